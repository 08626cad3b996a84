//! The C ABI, which `include/millrace_messages.h` documents. Its safety conditions are those usual in C: each pointer
//! is null, or points to what the header states while the call runs, and strings end in a zero byte.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use crate::stream::{self, Rest};
use crate::{DEFAULT_SOCKET, Error, Listener, Preconnection, Qos, Received, Session, SessionEvent, Want};

const NAME_MAX: usize = 64;
const TEXT_MAX: usize = 256;
/// Maximum number of bytes that one call of `millrace_messages_read` returns.
const READ_MAX: usize = 64 << 10;
const MAX_DELAY: u32 = 1;
const MIN_THROUGHPUT: u32 = 2;
const MAX_LOSS: u32 = 4;
const ADAPT: u32 = 8;

/// The object behind a pointer to `millrace_messages_session`.
pub struct FfiSession {
    session: Session,
    /// A received message that did not fit into the caller's buffer. The next receive call returns it.
    message: Option<Vec<u8>>,
    /// The rest of a message that was read in part, if the session is read as a stream.
    rest: Rest,
}

impl From<Session> for FfiSession {
    fn from(session: Session) -> Self {
        Self { session, message: None, rest: Rest::default() }
    }
}

/// The struct `millrace_messages_qos` in C layout.
#[repr(C)]
pub struct AskedQos {
    asked: u32,
    max_delay_ms: u32,
    min_throughput_mbit: f64,
    max_loss_percent: f64,
}

/// The struct `millrace_messages_event` in C layout.
#[repr(C)]
pub struct ToldEvent {
    kind: i32,
    reserved: u32,
    messages: u64,
    asked: f64,
    measured: f64,
    text: [c_char; TEXT_MAX],
}

/// The struct `millrace_messages_agreed` in C layout.
#[repr(C)]
pub struct FfiAgreement {
    graft: [c_char; NAME_MAX],
    services: [c_char; TEXT_MAX],
    is_sealed: u8,
    reserved: [u8; 7],
}

/// The error values of `millrace_messages_status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
enum Status {
    Invalid = -1,
    NoDaemon = -2,
    Refused = -3,
    NotAgreed = -4,
    Again = -5,
    TimedOut = -6,
    TooLong = -7,
    Finished = -8,
    Over = -9,
    Forked = -10,
    System = -11,
    Internal = -12,
    Incomplete = -13,
}

/// The status that a call returns, and the text that `millrace_messages_error` returns.
struct MessagesFailure(Status, String);

impl From<Error> for MessagesFailure {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::NoDaemon { .. } => Status::NoDaemon,
            Error::Refused { .. } => Status::Refused,
            Error::NotAgreed(_) => Status::NotAgreed,
            Error::WouldBlock => Status::Again,
            Error::TimedOut => Status::TimedOut,
            Error::TooLong { .. } => Status::TooLong,
            Error::Finished => Status::Finished,
            Error::Over(_) => Status::Over,
            Error::NotAStream { .. } => Status::Invalid,
            Error::Incomplete => Status::Incomplete,
            Error::Forked => Status::Forked,
            Error::Protocol(_) => Status::Internal,
            Error::Socket(_) => Status::System,
        };
        Self(status, error.to_string())
    }
}

type Result<T> = std::result::Result<T, MessagesFailure>;

fn invalid(what: impl Into<String>) -> MessagesFailure {
    MessagesFailure(Status::Invalid, what.into())
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs the body of a C function. A failure or a panic becomes a status, and its text becomes the latest error of this
/// thread.
fn call(work: impl FnOnce() -> Result<()>) -> c_int {
    // A panic can only leave the caller's session inconsistent, since calls share no other state.
    let MessagesFailure(status, message) = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return 0,
        Ok(Err(failure)) => failure,
        Err(_) => MessagesFailure(Status::Internal, "a fault of the library: it panicked".to_owned()),
    };
    let message = CString::new(message.replace('\0', " ")).unwrap_or_default();
    // While a thread ends, its thread-local storage no longer exists; the text is then lost.
    let _ = LAST.try_with(|last| last.replace(message));
    status as c_int
}

/// # Safety
/// `it` is null or points to a valid `T`. Nothing else uses the `T` while the result is used.
unsafe fn valid<'a, T>(it: *mut T, what: &str) -> Result<&'a mut T> {
    // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
    unsafe { it.as_mut() }.ok_or_else(|| invalid(format!("{what} is null")))
}

/// # Safety
/// `text` is null or points to a string that ends in a zero byte, for as long as the result is used.
unsafe fn optional<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| invalid(format!("{what} is not UTF-8")))
}

/// # Safety
/// `text` is null or points to a string that ends in a zero byte, for as long as the result is used.
unsafe fn string<'a>(text: *const c_char, what: &str) -> Result<&'a str> {
    // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
    unsafe { optional(text, what)? }.ok_or_else(|| invalid(format!("{what} is null")))
}

/// Converts the path of the daemon's socket, and the names of the peer and the service.
///
/// # Safety
/// Each string is null or ends in a zero byte, for as long as the result is used.
unsafe fn whom<'a>(
    socket: *const c_char,
    peer: *const c_char,
    service: *const c_char,
) -> Result<(&'a str, &'a str, &'a str)> {
    // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
    unsafe {
        let socket = optional(socket, "socket")?.unwrap_or(DEFAULT_SOCKET);
        Ok((socket, string(peer, "peer")?, string(service, "service")?))
    }
}

/// # Safety
/// `to` is null or valid for a write of a `T`.
unsafe fn give<T>(to: *mut T, value: T, what: &str) -> Result<()> {
    if to.is_null() {
        return Err(invalid(format!("{what} is null")));
    }
    // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
    unsafe { to.write(value) };
    Ok(())
}

/// # Safety
/// `from` is null or points to `bytes` bytes, for as long as the result is used.
unsafe fn slice<'a>(from: *const c_void, bytes: usize, what: &str) -> Result<&'a [u8]> {
    match (from.is_null(), bytes) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(invalid(format!("{what} is null"))),
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }),
    }
}

/// # Safety
/// `services` is null or a string that ends in a zero byte, and `qos` is null or points to an `AskedQos`.
unsafe fn want(services: *const c_char, qos: *const AskedQos) -> Result<Want> {
    // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
    let services = unsafe { optional(services, "services")? }.unwrap_or_default();
    let services = services.split_whitespace().map(str::to_owned).collect();
    // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
    let Some(qos) = (unsafe { qos.as_ref() }) else { return Ok(Want { services, ..Want::default() }) };
    let has = |bit: u32| qos.asked & bit != 0;
    let adapt = has(ADAPT);
    let qos = Qos {
        max_delay_ms: has(MAX_DELAY).then_some(qos.max_delay_ms),
        min_throughput_mbit: has(MIN_THROUGHPUT).then_some(qos.min_throughput_mbit),
        max_loss_percent: has(MAX_LOSS).then_some(qos.max_loss_percent),
    };
    let want = Want { services, qos, adapt };
    want.check().map_err(invalid)?;
    Ok(want)
}

fn patience(timeout_ms: c_int) -> Option<Duration> {
    u64::try_from(timeout_ms).ok().map(Duration::from_millis)
}

#[unsafe(no_mangle)]
pub extern "C" fn millrace_messages_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

#[unsafe(no_mangle)]
pub extern "C" fn millrace_messages_error() -> *const c_char {
    // The returned error text is valid until this thread's next call into the library replaces it.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold, and `session` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_init(
    socket: *const c_char,
    peer: *const c_char,
    service: *const c_char,
    session: *mut *mut FfiSession,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let (socket, peer, service) = unsafe { whom(socket, peer, service)? };
        if session.is_null() {
            return Err(invalid("session is null"));
        }
        let made = FfiSession::from(Session::new(Path::new(socket), peer, service)?);
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        unsafe { give(session, Box::into_raw(Box::new(made)), "session") }
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_negotiate(
    session: *mut FfiSession,
    services: *const c_char,
    qos: *const AskedQos,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let (held, want) = unsafe { (valid(session, "session")?, want(services, qos)?) };
        Ok(held.session.negotiate(want)?)
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_validate(session: *mut FfiSession, timeout_ms: c_int) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let held = unsafe { valid(session, "session")? };
        held.session.validate(patience(timeout_ms))?;
        Ok(())
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold, and `agreed` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_agreement(
    session: *mut FfiSession,
    agreed: *mut FfiAgreement,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let held = unsafe { valid(session, "session")? };
        let opened = held.session.agreed()?;
        let found = FfiAgreement {
            graft: fixed(&opened.graft),
            services: fixed(&opened.services.join(" ")),
            is_sealed: opened.is_sealed.into(),
            reserved: [0; 7],
        };
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        unsafe { give(agreed, found, "agreed") }
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold, and `message` is null or points to `bytes`
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_send(
    session: *mut FfiSession,
    message: *const c_void,
    bytes: usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let (held, message) = unsafe { (valid(session, "session")?, slice(message, bytes, "message")?) };
        Ok(held.session.send(message)?)
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold. `message` is null or has room for `room`
/// bytes, and `bytes` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_recv(
    session: *mut FfiSession,
    message: *mut c_void,
    room: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let held = unsafe { valid(session, "session")? };
        if bytes.is_null() || (message.is_null() && room > 0) {
            return Err(invalid("message or bytes is null"));
        }
        let got = match held.message.take() {
            Some(message) => message,
            None => match held.session.receive()? {
                Received::Message(message) => message,
                Received::Finished => {
                    return Err(MessagesFailure(
                        Status::Finished,
                        "the other end has finished, and nothing more comes".to_owned(),
                    ));
                }
            },
        };
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        unsafe { give(bytes, got.len(), "bytes")? };
        if got.len() > room {
            let words = format!("the message has {} bytes, and there is room for {room}", got.len());
            held.message = Some(got);
            return Err(MessagesFailure(Status::TooLong, words));
        }
        if !got.is_empty() {
            // SAFETY: the caller provides `room` bytes, and the message is no longer than that and not in the same
            // memory.
            unsafe { std::ptr::copy_nonoverlapping(got.as_ptr(), message.cast::<u8>(), got.len()) };
        }
        Ok(())
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold. `from` is null or points to `bytes` bytes, and
/// `written` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_write(
    session: *mut FfiSession,
    from: *const c_void,
    bytes: usize,
    written: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let (held, from) = unsafe { (valid(session, "session")?, slice(from, bytes, "from")?) };
        if written.is_null() {
            return Err(invalid("written is null"));
        }
        let taken = stream::write(&mut held.session, from)?;
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        unsafe { give(written, taken, "written") }
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold. `to` is null or has room for `room` bytes, and
/// `bytes` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_read(
    session: *mut FfiSession,
    to: *mut c_void,
    room: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let held = unsafe { valid(session, "session")? };
        if bytes.is_null() || to.is_null() || room == 0 {
            return Err(invalid("to or bytes is null, or there is no room"));
        }
        // The caller's buffer may be uninitialized, so no reference to it is made and nothing reads it.
        let mut buffer = vec![0; room.min(READ_MAX)];
        let got = stream::read(&mut held.session, &mut held.rest, &mut buffer)?;
        // SAFETY: the caller provides `room` bytes, and `got` is at most `room`.
        unsafe { std::ptr::copy_nonoverlapping(buffer.as_ptr(), to.cast::<u8>(), got) };
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        unsafe { give(bytes, got, "bytes") }
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_renegotiate(
    session: *mut FfiSession,
    services: *const c_char,
    qos: *const AskedQos,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let (held, want) = unsafe { (valid(session, "session")?, want(services, qos)?) };
        Ok(held.session.renegotiate(want)?)
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold, and `event` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_next_event(
    session: *mut FfiSession,
    event: *mut ToldEvent,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let held = unsafe { valid(session, "session")? };
        if event.is_null() {
            return Err(invalid("event is null"));
        }
        let found = held.session.event()?.ok_or(Error::WouldBlock)?;
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        unsafe { give(event, ToldEvent::from_event(&found), "event") }
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_finish(session: *mut FfiSession) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let held = unsafe { valid(session, "session")? };
        Ok(held.session.finish()?)
    })
}

/// # Safety
/// `session` is null or was returned by this library, and is not used after this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_close(session: *mut FfiSession) -> c_int {
    call(|| {
        if session.is_null() {
            return Ok(());
        }
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let held = unsafe { Box::from_raw(session) };
        match held.session.close() {
            Ok(()) | Err(Error::Refused { .. } | Error::Forked) => Ok(()),
            Err(error) => Err(error.into()),
        }
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_fd(session: *const FfiSession) -> c_int {
    // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
    let held = unsafe { session.as_ref() };
    held.map_or(Status::Invalid as c_int, |held| held.session.as_fd().as_raw_fd())
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_set_nonblocking(
    session: *mut FfiSession,
    nonblocking: c_int,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let held = unsafe { valid(session, "session")? };
        held.session.set_nonblocking(nonblocking != 0);
        Ok(())
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_set_timeout(session: *mut FfiSession, timeout_ms: c_int) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let held = unsafe { valid(session, "session")? };
        held.session.set_timeout(patience(timeout_ms));
        Ok(())
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold, and `listener` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_listen(
    socket: *const c_char,
    peer: *const c_char,
    service: *const c_char,
    listener: *mut *mut Listener,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let (socket, peer, service) = unsafe { whom(socket, peer, service)? };
        if listener.is_null() {
            return Err(invalid("listener is null"));
        }
        let made = Preconnection::new(peer, service).socket(socket).listen()?;
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        unsafe { give(listener, Box::into_raw(Box::new(made)), "listener") }
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold, and `session` is valid for writes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_accept(
    listener: *mut Listener,
    session: *mut *mut FfiSession,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let listener = unsafe { valid(listener, "listener")? };
        if session.is_null() {
            return Err(invalid("session is null"));
        }
        let held = FfiSession::from(listener.accept()?);
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        unsafe { give(session, Box::into_raw(Box::new(held)), "session") }
    })
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_listener_fd(listener: *const Listener) -> c_int {
    // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
    let listener = unsafe { listener.as_ref() };
    listener.map_or(Status::Invalid as c_int, |listener| listener.as_fd().as_raw_fd())
}

/// # Safety
/// The safety conditions of C callers (see the top of this module) hold.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_listener_set_nonblocking(
    listener: *mut Listener,
    nonblocking: c_int,
) -> c_int {
    call(|| {
        // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
        let listener = unsafe { valid(listener, "listener")? };
        listener.set_nonblocking(nonblocking != 0);
        Ok(())
    })
}

/// # Safety
/// `listener` is null or was returned by this library, and is not used after this call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_messages_listener_close(listener: *mut Listener) {
    call(|| {
        if !listener.is_null() {
            // SAFETY: the caller fulfils the conditions in this function's `# Safety`.
            drop(unsafe { Box::from_raw(listener) });
        }
        Ok(())
    });
}

impl ToldEvent {
    fn from_event(event: &SessionEvent) -> Self {
        let mut messages = 0;
        let mut numbers = (0.0, 0.0);
        let (kind, text) = match event {
            SessionEvent::Changed { graft, .. } => (1, graft.as_str()),
            SessionEvent::Refused { reason, .. } => (2, reason.as_str()),
            SessionEvent::Violated(violation) => {
                numbers = (violation.asked, violation.measured);
                (3, violation.what.as_str())
            }
            SessionEvent::Lost(lost) => {
                messages = *lost;
                (4, "")
            }
            SessionEvent::Finished => (5, ""),
            SessionEvent::Closed { reason } => (6, reason.as_str()),
        };
        let (asked, measured) = numbers;
        Self { kind, reserved: 0, messages, asked, measured, text: fixed(text) }
    }
}

/// Copies a text to an array, with a terminating zero byte. A text that is too long for the array is cut off.
fn fixed<const MAX: usize>(text: &str) -> [c_char; MAX] {
    let mut fixed = [0; MAX];
    for (to, from) in fixed.iter_mut().take(MAX - 1).zip(text.bytes()) {
        *to = c_char::from_ne_bytes([from]);
    }
    fixed
}
