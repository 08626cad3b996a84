//! The C ABI, as `include/millrace_gate.h` documents it.
//!
//! Callers promise what C callers always do: pointers are null or point to what the header says, for as long as the
//! call takes, and strings end in zero.

#![allow(unsafe_code)]

use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char, c_int},
    net::{IpAddr, SocketAddr},
    panic::{AssertUnwindSafe, catch_unwind},
    ptr, slice,
};

use millrace_kernel::{prefix::Prefix, xdp::Mode};

use crate::kernel::{Counter, Entry, Pass, Rule};
use nix::{libc, sys::socket::SockaddrLike, sys::socket::SockaddrStorage};

use crate::{Error, Gate, Policy, Scope, policy};

const NAME_MAX: usize = 64;
const ID_MAX: usize = 20;

/// `millrace_gate_count`.
#[repr(C)]
pub struct Count {
    scope: [c_char; NAME_MAX],
    reason: [c_char; NAME_MAX],
    is_rule: u8,
    reserved: [u8; 7],
    packets: u64,
    bytes: u64,
    monitored: u64,
}

/// `millrace_gate_id`.
#[repr(C)]
pub struct Id {
    len: u8,
    bytes: [u8; ID_MAX],
}

/// `millrace_gate_status`, but for success.
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

struct Failure(Status, String);

impl Failure {
    fn invalid(what: impl Into<String>) -> Self {
        Self(Status::Invalid, what.into())
    }
}

impl From<Error> for Failure {
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

impl From<policy::Problems> for Failure {
    fn from(errors: policy::Problems) -> Self {
        Self(Status::Policy, errors.to_string())
    }
}

type Result<T> = std::result::Result<T, Failure>;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs a call; a failure, or a panic, becomes a status and the thread's last error.
fn call(work: impl FnOnce() -> Result<()>) -> c_int {
    // What a panic may leave half changed is behind locks that do not mind, or is the kernel's.
    let done = catch_unwind(AssertUnwindSafe(work));
    let Failure(status, message) = match done {
        Ok(Ok(())) => return 0,
        Ok(Err(failure)) => failure,
        Err(_) => Failure(Status::Internal, "a fault of the library: it panicked".to_owned()),
    };
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    // Not while the thread ends.
    let _ = LAST.try_with(|last| last.replace(message));
    status as c_int
}

/// # Safety
/// `it` is null or points to a valid `T` for as long as the result is used.
unsafe fn valid<'a, T>(it: *const T, what: &str) -> Result<&'a T> {
    // SAFETY: as promised.
    unsafe { it.as_ref() }.ok_or_else(|| Failure::invalid(format!("{what} is null")))
}

/// # Safety
/// `text` is null or points to a string that ends in zero, for as long as the result is used.
unsafe fn string<'a>(text: *const c_char, what: &str) -> Result<&'a str> {
    if text.is_null() {
        return Err(Failure::invalid(format!("{what} is null")));
    }
    // SAFETY: as promised.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Failure::invalid(format!("{what} is not UTF-8")))
}

/// # Safety
/// `bytes` is null or points to `len` bytes, for as long as the result is used.
unsafe fn bytes<'a>(bytes: *const u8, len: usize, what: &str) -> Result<&'a [u8]> {
    match (bytes.is_null(), len) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(Failure::invalid(format!("{what} is null"))),
        // SAFETY: as promised.
        (false, _) => Ok(unsafe { slice::from_raw_parts(bytes, len) }),
    }
}

/// # Safety
/// `address` is null or points to `len` bytes of a socket address.
unsafe fn client(address: *const libc::sockaddr, len: libc::socklen_t) -> Result<SocketAddr> {
    if address.is_null() {
        return Err(Failure::invalid("client is null"));
    }
    let unknown = || Failure::invalid("client is no IPv4 or IPv6 address");
    if (len as usize) < size_of::<libc::sockaddr_in>() {
        return Err(unknown());
    }
    // SAFETY: as promised; its family is there.
    let storage = unsafe { SockaddrStorage::from_raw(address, Some(len)) }.ok_or_else(unknown)?;
    if let Some(v4) = storage.as_sockaddr_in() {
        return Ok(SocketAddr::new(v4.ip().into(), v4.port()));
    }
    let v6 = storage.as_sockaddr_in6().filter(|_| len as usize >= size_of::<libc::sockaddr_in6>());
    v6.map(|v6| SocketAddr::new(v6.ip().to_canonical(), v6.port())).ok_or_else(unknown)
}

fn mode(mode: c_int) -> Result<Mode> {
    match mode {
        0 => Ok(Mode::Auto),
        1 => Ok(Mode::Native),
        2 => Ok(Mode::Generic),
        _ => Err(Failure::invalid("mode is none of millrace_gate_mode")),
    }
}

/// # Safety
/// `to` is null or may be written to.
unsafe fn give<T>(to: *mut T, value: T, what: &str) -> Result<()> {
    if to.is_null() {
        return Err(Failure::invalid(format!("{what} is null")));
    }
    // SAFETY: as promised.
    unsafe { to.write(value) };
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn millrace_gate_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn millrace_gate_error() -> *const c_char {
    // The string stays where it is until it is replaced.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// # Safety
/// See the module; `gate` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_open(
    interface: *const c_char,
    policy: *const c_char,
    attach_mode: c_int,
    gate: *mut *mut Gate,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let (interface, policy) = unsafe { (string(interface, "interface")?, string(policy, "policy")?) };
        if gate.is_null() {
            return Err(Failure::invalid("gate is null"));
        }
        let attach_mode = mode(attach_mode)?;
        let opened = Gate::new(&Policy::parse(policy)?)?;
        opened.attach(interface, attach_mode)?;
        // SAFETY: the caller's promise.
        unsafe { give(gate, Box::into_raw(Box::new(opened)), "gate") }
    })
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_attach(
    gate: *mut Gate,
    interface: *const c_char,
    attach_mode: c_int,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let (gate, interface) = unsafe { (valid(gate, "gate")?, string(interface, "interface")?) };
        gate.attach(interface, mode(attach_mode)?)?;
        Ok(())
    })
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_set_policy(gate: *mut Gate, policy: *const c_char) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
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
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(gate) });
        }
        Ok(())
    });
}

/// # Safety
/// See the module; `scope` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_scope_open(
    gate: *mut Gate,
    name: *const c_char,
    scope: *mut *mut Scope,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let (gate, name) = unsafe { (valid(gate, "gate")?, string(name, "name")?) };
        if scope.is_null() {
            return Err(Failure::invalid("scope is null"));
        }
        let opened = gate.scope(name)?;
        // SAFETY: the caller's promise.
        unsafe { give(scope, Box::into_raw(Box::new(opened)), "scope") }
    })
}

/// # Safety
/// `scope` is null or came from `millrace_gate_scope_open` and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_scope_close(scope: *mut Scope) {
    call(|| {
        if !scope.is_null() {
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(scope) });
        }
        Ok(())
    });
}

/// # Safety
/// See the module; `connections` is null or may be written to.
unsafe fn count(
    scope: *mut Scope,
    address: *const libc::sockaddr,
    len: libc::socklen_t,
    connections: *mut u32,
    change: impl FnOnce(&Scope, IpAddr) -> std::result::Result<u32, Error>,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let (scope, client) = unsafe { (valid(scope, "scope")?, client(address, len)?) };
        let now = change(scope, client.ip())?;
        if connections.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { give(connections, now, "connections") }
    })
}

/// # Safety
/// See the module; `connections` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_inc(
    scope: *mut Scope,
    client: *const libc::sockaddr,
    client_len: libc::socklen_t,
    connections: *mut u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { count(scope, client, client_len, connections, Scope::inc) }
}

/// # Safety
/// See the module; `connections` is null or may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_dec(
    scope: *mut Scope,
    client: *const libc::sockaddr,
    client_len: libc::socklen_t,
    connections: *mut u32,
) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { count(scope, client, client_len, connections, Scope::dec) }
}

/// # Safety
/// See the module.
unsafe fn id(
    scope: *mut Scope,
    id: *const u8,
    len: usize,
    tell: impl FnOnce(&Scope, &[u8]) -> std::result::Result<(), Error>,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let scope = unsafe { valid(scope, "scope")? };
        if !(1..=ID_MAX).contains(&len) {
            return Err(Failure::invalid("a connection ID has 1 to 20 bytes"));
        }
        // SAFETY: the caller's promise.
        Ok(tell(scope, unsafe { bytes(id, len, "id")? })?)
    })
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_publish(scope: *mut Scope, bytes: *const u8, len: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { id(scope, bytes, len, Scope::publish) }
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_retire(scope: *mut Scope, bytes: *const u8, len: usize) -> c_int {
    // SAFETY: the caller's promise.
    unsafe { id(scope, bytes, len, Scope::retire) }
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_list(
    gate: *mut Gate,
    scope: *const c_char,
    prefix: *const c_char,
    entry: c_int,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let (gate, prefix) = unsafe { (valid(gate, "gate")?, string(prefix, "prefix")?) };
        let scope = match scope.is_null() {
            true => None,
            // SAFETY: the caller's promise.
            false => Some(unsafe { string(scope, "scope")? }),
        };
        let prefix: Prefix =
            prefix.parse().map_err(|error: crate::ParseError| Failure::invalid(error.to_string()))?;
        match entry {
            0 => gate.unlist(scope, prefix)?,
            1 => gate.list(scope, prefix, Entry::Block)?,
            2 => gate.list(scope, prefix, Entry::Allow)?,
            _ => return Err(Failure::invalid("entry is none of millrace_gate_entry")),
        }
        Ok(())
    })
}

/// # Safety
/// See the module; `original` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_check_token(
    scope: *const Scope,
    address: *const libc::sockaddr,
    address_len: libc::socklen_t,
    token: *const u8,
    token_len: usize,
    original: *mut Id,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let (scope, client) = unsafe { (valid(scope, "scope")?, client(address, address_len)?) };
        // SAFETY: the caller's promise.
        let token = unsafe { bytes(token, token_len, "token")? };
        let token = scope.check_token(client, token);
        let token = token.map_err(|error| Failure(Status::NotFound, format!("token: {error}")))?;
        let mut id = Id { len: 0, bytes: [0; ID_MAX] };
        for (to, from) in id.bytes.iter_mut().zip(token.original_id()) {
            *to = *from;
            id.len += 1;
        }
        // SAFETY: the caller's promise.
        unsafe { give(original, id, "original") }
    })
}

/// # Safety
/// See the module; `counts` is null or has room for `room`, and `have` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_gate_statistics(
    gate: *const Gate,
    counts: *mut Count,
    room: usize,
    have: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let gate = unsafe { valid(gate, "gate")? };
        if counts.is_null() && room > 0 {
            return Err(Failure::invalid("counts is null"));
        }
        let all = all_counts(gate)?;
        // SAFETY: the caller's promise.
        unsafe { give(have, all.len(), "have")? };
        let len = all.len().min(room);
        // SAFETY: the caller's promise; the source has at least as many, and is elsewhere.
        unsafe { ptr::copy_nonoverlapping(all.as_ptr(), counts, len) };
        Ok(())
    })
}

fn all_counts(gate: &Gate) -> Result<Vec<Count>> {
    let statistics = gate.statistics()?;
    let scopes = statistics.scopes.iter().flat_map(|scope| {
        let rules = Rule::ALL.map(|rule| (rule.name(), true, scope.rule(rule)));
        let passes = Pass::ALL.map(|pass| (pass.name(), false, scope.pass(pass)));
        let all = rules.into_iter().chain(passes);
        all.map(|(reason, is_rule, counter)| Count::new(&scope.name, reason, is_rule, counter))
    });
    Ok(scopes.collect())
}

impl Count {
    fn new(scope: &str, reason: &str, is_rule: bool, counter: Counter) -> Self {
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

/// A string with room for its zero; what is too long is cut off.
fn fixed(text: &str) -> [c_char; NAME_MAX] {
    let mut fixed = [0; NAME_MAX];
    for (to, from) in fixed.iter_mut().take(NAME_MAX - 1).zip(text.bytes()) {
        *to = c_char::from_ne_bytes([from]);
    }
    fixed
}

#[cfg(test)]
mod tests;
