//! The C ABI, as `include/millrace_gate.h` documents it.
//!
//! Callers must pass pointers that are null, or point to valid objects of the type in the header for the time of the
//! call. Strings end in zero.

#![allow(unsafe_code)]

use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char, c_int},
    net::{IpAddr, SocketAddr},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr, slice,
};

use millrace_kernel::{prefix::Prefix, xdp::XdpMode};

use crate::kernel::{ListEntry, PacketCounter, Pass, Rule};
use nix::{libc, sys::socket::SockaddrLike, sys::socket::SockaddrStorage};

use crate::{Error, Gate, Policy, Scope, policy};

const NAME_MAX: usize = 64;
const ID_MAX: usize = 20;

/// The header's structure `millrace_gate_count`.
#[repr(C)]
pub struct FfiCount {
    scope: [c_char; NAME_MAX],
    reason: [c_char; NAME_MAX],
    is_rule: u8,
    reserved: [u8; 7],
    packets: u64,
    bytes: u64,
    monitored: u64,
}

/// The header's structure `millrace_gate_id`.
#[repr(C)]
pub struct FfiId {
    len: u8,
    bytes: [u8; ID_MAX],
}

/// The values of `millrace_gate_status` that are failures.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
enum Status {
    Invalid = -1,
    Policy = -2,
    NotFound = -3,
    Full = -4,
    System = -5,
    Internal = -6,
}

struct FfiFailure(Status, String);

impl FfiFailure {
    fn invalid(what: impl Into<String>) -> Self {
        Self(Status::Invalid, what.into())
    }
}

impl From<Error> for FfiFailure {
    fn from(error: Error) -> Self {
        use millrace_kernel::Error as Kernel;
        let status = match &error {
            Error::NoScope { .. } | Error::Interface { .. } => Status::NotFound,
            Error::Load | Error::Kernel(Kernel::Rules(_)) => Status::Policy,
            Error::Kernel(Kernel::Config(_)) => Status::Invalid,
            Error::Kernel(Kernel::Full { .. }) => Status::Full,
            Error::Thread(_)
            | Error::Namespace(_)
            | Error::Attach { .. }
            | Error::Twice(_)
            | Error::Kernel(_) => Status::System,
        };
        Self(status, error.to_string())
    }
}

impl From<policy::Problems> for FfiFailure {
    fn from(errors: policy::Problems) -> Self {
        Self(Status::Policy, errors.to_string())
    }
}

type Result<T> = std::result::Result<T, FfiFailure>;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs `work` and returns a `millrace_gate_status`. The text of a failure or a panic becomes the thread's last error.
fn call(work: impl FnOnce() -> Result<()>) -> c_int {
    // After a panic only two kinds of state can be half changed: maps in the kernel, and data behind locks whose users
    // tolerate this.
    let done = catch_unwind(AssertUnwindSafe(work));
    let FfiFailure(status, message) = match done {
        Ok(Ok(())) => return 0,
        Ok(Err(failure)) => failure,
        Err(_) => {
            FfiFailure(Status::Internal, "the library panicked, which is a fault of its own".to_owned())
        }
    };
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    // Storing the error fails only while the thread ends, when nobody can ask for the error.
    let _ = LAST.try_with(|last| last.replace(message));
    status as c_int
}

/// Returns a reference, or an error that names the argument if the pointer is null.
///
/// # Safety
/// `it` must be null, or point to a valid `T` for as long as the result is used.
unsafe fn valid<'a, T>(it: *const T, what: &str) -> Result<&'a T> {
    // SAFETY: the caller passes valid pointers, as the module's documentation requires.
    unsafe { it.as_ref() }.ok_or_else(|| FfiFailure::invalid(format!("{what} is null")))
}

/// Returns a C string as text, or an error that names the argument.
///
/// # Safety
/// `text` must be null, or point to a string that ends in zero, for as long as the result is used.
unsafe fn string<'a>(text: *const c_char, what: &str) -> Result<&'a str> {
    if text.is_null() {
        return Err(FfiFailure::invalid(format!("{what} is null")));
    }
    // SAFETY: the caller passes valid pointers, as the module's documentation requires.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| FfiFailure::invalid(format!("{what} is not UTF-8")))
}

/// Returns bytes as a slice, or an error that names the argument. The pointer may be null if `len` is 0.
///
/// # Safety
/// `bytes` must be null, or point to `len` bytes, for as long as the result is used.
unsafe fn bytes<'a>(bytes: *const u8, len: usize, what: &str) -> Result<&'a [u8]> {
    match (bytes.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(FfiFailure::invalid(format!("{what} is null"))),
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        (false, _) => Ok(unsafe { slice::from_raw_parts(bytes, len) }),
    }
}

/// Reads the address of a client. IPv4-mapped IPv6 addresses become IPv4.
///
/// # Safety
/// `address` must be null, or point to `len` bytes of a socket address.
unsafe fn client(address: *const libc::sockaddr, len: libc::socklen_t) -> Result<SocketAddr> {
    if address.is_null() {
        return Err(FfiFailure::invalid("client is null"));
    }
    let unknown = || FfiFailure::invalid("client is not an IPv4 or IPv6 address");
    if (len as usize) < size_of::<libc::sockaddr_in>() {
        return Err(unknown());
    }
    // SAFETY: the caller passes a valid address; the family is within `len`.
    let storage = unsafe { SockaddrStorage::from_raw(address, Some(len)) }.ok_or_else(unknown)?;
    if let Some(v4) = storage.as_sockaddr_in() {
        return Ok(SocketAddr::new(v4.ip().into(), v4.port()));
    }
    let v6 = storage.as_sockaddr_in6().filter(|_| len as usize >= size_of::<libc::sockaddr_in6>());
    v6.map(|v6| SocketAddr::new(v6.ip().to_canonical(), v6.port())).ok_or_else(unknown)
}

fn mode(mode: c_int) -> Result<XdpMode> {
    match mode {
        0 => Ok(XdpMode::Auto),
        1 => Ok(XdpMode::Native),
        2 => Ok(XdpMode::Generic),
        _ => Err(FfiFailure::invalid("mode is not a value of millrace_gate_mode")),
    }
}

/// Writes a result of a call, or returns an error that names the argument if the pointer is null.
///
/// # Safety
/// `to` must be null, or valid for writes.
unsafe fn give<T>(to: *mut T, value: T, what: &str) -> Result<()> {
    if to.is_null() {
        return Err(FfiFailure::invalid(format!("{what} is null")));
    }
    // SAFETY: the caller passes valid pointers, as the module's documentation requires.
    unsafe { to.write(value) };
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn millrace_gate_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[unsafe(no_mangle)]
pub extern "C" fn millrace_gate_error() -> *const c_char {
    // Only `replace` in `call` changes `LAST`, so the pointer stays valid until the thread's next failure.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// # Safety
/// The pointers must be valid, as the module's documentation says; `gate` must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_open(
    interface: *const c_char,
    policy: *const c_char,
    attach_mode: c_int,
    gate: *mut *mut Gate,
) -> c_int {
    call(|| {
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        let (interface, policy) = unsafe { (string(interface, "interface")?, string(policy, "policy")?) };
        if gate.is_null() {
            return Err(FfiFailure::invalid("gate is null"));
        }
        let attach_mode = mode(attach_mode)?;
        let opened = Gate::new(&Policy::parse(policy)?)?;
        opened.attach(interface, attach_mode)?;
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        unsafe { give(gate, Box::into_raw(Box::new(opened)), "gate") }
    })
}

/// # Safety
/// The pointers must be valid, as the module's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_attach(
    gate: *mut Gate,
    interface: *const c_char,
    attach_mode: c_int,
) -> c_int {
    call(|| {
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        let (gate, interface) = unsafe { (valid(gate, "gate")?, string(interface, "interface")?) };
        gate.attach(interface, mode(attach_mode)?)?;
        Ok(())
    })
}

/// # Safety
/// The pointers must be valid, as the module's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_set_policy(gate: *mut Gate, policy: *const c_char) -> c_int {
    call(|| {
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        let (gate, policy) = unsafe { (valid(gate, "gate")?, string(policy, "policy")?) };
        Ok(gate.set_policy(&Policy::parse(policy)?)?)
    })
}

/// # Safety
/// `gate` is null or came from `millrace_gate_open` and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_close(gate: *mut Gate) {
    call(|| {
        if !gate.is_null() {
            // SAFETY: the caller passes valid pointers, as the module's documentation requires.
            drop(unsafe { Box::from_raw(gate) });
        }
        Ok(())
    });
}

/// # Safety
/// The pointers must be valid, as the module's documentation says; `scope` must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_scope_open(
    gate: *mut Gate,
    name: *const c_char,
    scope: *mut *mut Scope,
) -> c_int {
    call(|| {
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        let (gate, name) = unsafe { (valid(gate, "gate")?, string(name, "name")?) };
        if scope.is_null() {
            return Err(FfiFailure::invalid("scope is null"));
        }
        let opened = gate.scope(name)?;
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        unsafe { give(scope, Box::into_raw(Box::new(opened)), "scope") }
    })
}

/// # Safety
/// `scope` is null or came from `millrace_gate_scope_open` and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_scope_close(scope: *mut Scope) {
    call(|| {
        if !scope.is_null() {
            // SAFETY: the caller passes valid pointers, as the module's documentation requires.
            drop(unsafe { Box::from_raw(scope) });
        }
        Ok(())
    });
}

/// Changes the count of a client's connections.
///
/// # Safety
/// The pointers must be valid, as the module's documentation says; `connections` must be null or valid for writes.
unsafe fn count(
    scope: *mut Scope,
    address: *const libc::sockaddr,
    len: libc::socklen_t,
    connections: *mut u32,
    change: impl FnOnce(&Scope, IpAddr) -> std::result::Result<u32, Error>,
) -> c_int {
    call(|| {
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        let (scope, client) = unsafe { (valid(scope, "scope")?, client(address, len)?) };
        let now = change(scope, client.ip())?;
        if connections.is_null() {
            return Ok(());
        }
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        unsafe { give(connections, now, "connections") }
    })
}

/// # Safety
/// The pointers must be valid, as the module's documentation says; `connections` must be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_inc(
    scope: *mut Scope,
    client: *const libc::sockaddr,
    client_len: libc::socklen_t,
    connections: *mut u32,
) -> c_int {
    // SAFETY: the caller passes valid pointers, as the module's documentation requires.
    unsafe { count(scope, client, client_len, connections, Scope::inc) }
}

/// # Safety
/// The pointers must be valid, as the module's documentation says; `connections` must be null or valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_dec(
    scope: *mut Scope,
    client: *const libc::sockaddr,
    client_len: libc::socklen_t,
    connections: *mut u32,
) -> c_int {
    // SAFETY: the caller passes valid pointers, as the module's documentation requires.
    unsafe { count(scope, client, client_len, connections, Scope::dec) }
}

/// Publishes or retires a connection ID.
///
/// # Safety
/// The pointers must be valid, as the module's documentation says.
unsafe fn id(
    scope: *mut Scope,
    id: *const u8,
    len: usize,
    tell: impl FnOnce(&Scope, &[u8]) -> std::result::Result<(), Error>,
) -> c_int {
    call(|| {
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        let scope = unsafe { valid(scope, "scope")? };
        if !(1..=ID_MAX).contains(&len) {
            return Err(FfiFailure::invalid("a connection ID has 1 to 20 bytes"));
        }
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        Ok(tell(scope, unsafe { bytes(id, len, "id")? })?)
    })
}

/// # Safety
/// The pointers must be valid, as the module's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_publish(scope: *mut Scope, bytes: *const u8, len: usize) -> c_int {
    // SAFETY: the caller passes valid pointers, as the module's documentation requires.
    unsafe { id(scope, bytes, len, Scope::publish) }
}

/// # Safety
/// The pointers must be valid, as the module's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_retire(scope: *mut Scope, bytes: *const u8, len: usize) -> c_int {
    // SAFETY: the caller passes valid pointers, as the module's documentation requires.
    unsafe { id(scope, bytes, len, Scope::retire) }
}

/// # Safety
/// The pointers must be valid, as the module's documentation says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_list(
    gate: *mut Gate,
    scope: *const c_char,
    prefix: *const c_char,
    entry: c_int,
) -> c_int {
    call(|| {
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        let (gate, prefix) = unsafe { (valid(gate, "gate")?, string(prefix, "prefix")?) };
        let scope = match scope.is_null() {
            true => None,
            // SAFETY: the caller passes valid pointers, as the module's documentation requires.
            false => Some(unsafe { string(scope, "scope")? }),
        };
        let prefix: Prefix =
            prefix.parse().map_err(|error: crate::ParseError| FfiFailure::invalid(error.to_string()))?;
        match entry {
            0 => gate.unlist(scope, prefix)?,
            1 => gate.list(scope, prefix, ListEntry::Block)?,
            2 => gate.list(scope, prefix, ListEntry::Allow)?,
            _ => return Err(FfiFailure::invalid("entry is not a value of millrace_gate_entry")),
        }
        Ok(())
    })
}

/// # Safety
/// The pointers must be valid, as the module's documentation says; `original` must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_check_token(
    scope: *const Scope,
    address: *const libc::sockaddr,
    address_len: libc::socklen_t,
    token: *const u8,
    token_len: usize,
    original: *mut FfiId,
) -> c_int {
    call(|| {
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        let (scope, client) = unsafe { (valid(scope, "scope")?, client(address, address_len)?) };
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        let token = unsafe { bytes(token, token_len, "token")? };
        let token = scope.check_token(client, token);
        let token = token.map_err(|error| FfiFailure(Status::NotFound, format!("token: {error}")))?;
        let mut id = FfiId { len: 0, bytes: [0; ID_MAX] };
        for (to, from) in id.bytes.iter_mut().zip(token.original_id()) {
            *to = *from;
            id.len += 1;
        }
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        unsafe { give(original, id, "original") }
    })
}

/// # Safety
/// The pointers must be valid, as the module's documentation says; `counts` must be null or have space for `room`
/// elements, and `have` must be valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_statistics(
    gate: *const Gate,
    counts: *mut FfiCount,
    room: usize,
    have: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        let gate = unsafe { valid(gate, "gate")? };
        if counts.is_null() && room > 0 {
            return Err(FfiFailure::invalid("counts is null"));
        }
        let all = all_counts(gate)?;
        // SAFETY: the caller passes valid pointers, as the module's documentation requires.
        unsafe { give(have, all.len(), "have")? };
        let len = all.len().min(room);
        // SAFETY: the caller passes valid pointers; `all` has at least `len` elements, and does not overlap the
        // caller's array `counts`.
        unsafe { ptr::copy_nonoverlapping(all.as_ptr(), counts, len) };
        Ok(())
    })
}

fn all_counts(gate: &Gate) -> Result<Vec<FfiCount>> {
    let statistics = gate.statistics()?;
    let scopes = statistics.scopes.iter().flat_map(|scope| {
        let rules = Rule::ALL.map(|rule| (rule.name(), true, scope.rule(rule)));
        let passes = Pass::ALL.map(|pass| (pass.name(), false, scope.pass(pass)));
        let all = rules.into_iter().chain(passes);
        all.map(|(reason, is_rule, counter)| FfiCount::new(&scope.name, reason, is_rule, counter))
    });
    Ok(scopes.collect())
}

impl FfiCount {
    fn new(scope: &str, reason: &str, is_rule: bool, counter: PacketCounter) -> Self {
        Self {
            scope: fixed(scope),
            reason: fixed(reason),
            is_rule: is_rule.into(),
            reserved: [0; 7],
            packets: counter.packets,
            bytes: counter.bytes,
            monitored: counter.monitored,
        }
    }
}

/// Copies text to a fixed array and adds a terminating zero. Text that is too long is cut.
fn fixed(text: &str) -> [c_char; NAME_MAX] {
    let mut fixed = [0; NAME_MAX];
    for (to, from) in fixed.iter_mut().take(NAME_MAX - 1).zip(text.bytes()) {
        *to = c_char::from_ne_bytes([from]);
    }
    fixed
}

#[cfg(test)]
mod tests;
