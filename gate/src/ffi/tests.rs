use super::*;

fn last() -> String {
    // SAFETY: `millrace_gate_error` never returns null, and its string ends in zero.
    unsafe { CStr::from_ptr(millrace_gate_error()) }.to_string_lossy().into_owned()
}

#[test]
fn invalid_arguments_are_refused_with_a_message() {
    let mut gate = ptr::null_mut();
    let mut id = FfiId { len: 0, bytes: [0; ID_MAX] };
    let refused = |status: c_int, why: &str| {
        assert_eq!(status, Status::Invalid as c_int, "{why}");
        assert!(last().contains(why), "{why}: {}", last());
    };
    let eth = c"eth0".as_ptr();
    let empty = c"".as_ptr();
    let nothing = ptr::null();
    let no_gate = ptr::null_mut::<Gate>();
    let no_scope = ptr::null_mut::<Scope>();
    // SAFETY: the functions accept null for every pointer, and the pointers that are not null are valid.
    unsafe {
        refused(millrace_gate_open(nothing, empty, 0, &raw mut gate), "interface is null");
        refused(millrace_gate_open(c"\xff".as_ptr(), empty, 0, &raw mut gate), "interface is not UTF-8");
        refused(millrace_gate_open(eth, nothing, 0, &raw mut gate), "policy is null");
        refused(millrace_gate_open(eth, empty, 0, ptr::null_mut()), "gate is null");
        refused(millrace_gate_open(eth, empty, 7, &raw mut gate), "mode is not a value");
        refused(millrace_gate_attach(no_gate, eth, 0), "gate is null");
        refused(millrace_gate_set_policy(no_gate, empty), "gate is null");
        refused(millrace_gate_inc(no_scope, ptr::null(), 0, ptr::null_mut()), "scope is null");
        refused(millrace_gate_retire(no_scope, ptr::null(), 0), "scope is null");
        refused(millrace_gate_list(no_gate, nothing, nothing, 1), "gate is null");
        let token = millrace_gate_check_token(no_scope, ptr::null(), 0, ptr::null(), 0, &raw mut id);
        refused(token, "scope is null");
        refused(millrace_gate_statistics(no_gate, ptr::null_mut(), 0, ptr::null_mut()), "gate is null");
        millrace_gate_close(no_gate);
        millrace_gate_scope_close(no_scope);
    }
    assert!(gate.is_null());
}

#[test]
fn invalid_policy_is_reported_with_its_place() {
    let mut gate = ptr::null_mut();
    let policy = c"[[scope]]\nname = \"web\"\nprot = 443\n";
    // SAFETY: the strings end in zero, and the pointer to the result is valid for writes.
    let status = unsafe { millrace_gate_open(c"lo".as_ptr(), policy.as_ptr(), 0, &raw mut gate) };
    assert_eq!(status, Status::Policy as c_int);
    assert!(last().contains("policy:3: scope[0].prot: unknown key; did you mean `port`?"), "{}", last());
    assert!(gate.is_null());
}

#[test]
fn panic_does_not_cross_the_c_interface() {
    assert_eq!(call(|| panic!("on purpose")), Status::Internal as c_int);
    assert!(last().contains("panicked"));
}

#[test]
fn socket_addresses_of_both_families_are_read() {
    use nix::sys::socket::{SockaddrIn, SockaddrIn6, UnixAddr};
    use std::net::{SocketAddrV4, SocketAddrV6};
    // SAFETY: the pointer and the length belong to the same valid socket address.
    let read = |address: &dyn SockaddrLike| unsafe { client(address.as_ptr(), address.len()) }.ok();
    let v4: SocketAddrV4 = "192.0.2.1:5".parse().unwrap();
    let v6: SocketAddrV6 = "[2001:db8::1]:6".parse().unwrap();
    let mapped: SocketAddrV6 = "[::ffff:192.0.2.1]:5".parse().unwrap();
    assert_eq!(read(&SockaddrIn::from(v4)), Some(v4.into()));
    assert_eq!(read(&SockaddrIn6::from(v6)), Some(v6.into()));
    assert_eq!(read(&SockaddrIn6::from(mapped)), Some(v4.into()), "as a dual-stack socket has it");
    assert_eq!(read(&UnixAddr::new("/nowhere").unwrap()), None);
    let v4 = SockaddrIn::from(v4);
    for len in [0, 1, 2, 8] {
        // SAFETY: the address has more than `len` bytes.
        assert!(unsafe { client(v4.as_ptr(), len) }.is_err(), "cut to {len} bytes");
    }
}
