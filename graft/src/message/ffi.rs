//! The C ABI, as `include/millrace_graft.h` documents it.
//!
//! Callers promise what C callers always do: pointers are null or point to what the header says, for as long as the
//! call takes, and strings end in zero.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::Duration;

use super::stream::{self, Rest};
use super::{DEFAULT_SOCKET, Error, Event, Listener, Preconnection, Qos, Received, Session, Want};

const NAME_MAX: usize = 64;
const TEXT_MAX: usize = 256;
/// Of one call.
const READ_MAX: usize = 64 << 10;
const MAX_DELAY: u32 = 1;
const MIN_THROUGHPUT: u32 = 2;
const MAX_LOSS: u32 = 4;
const ADAPT: u32 = 8;

/// `millrace_graft_session`.
pub struct Held {
    session: Session,
    /// A message that there was no room for.
    message: Option<Vec<u8>>,
    /// Where it is read as a stream.
    rest: Rest,
}

impl From<Session> for Held {
    fn from(session: Session) -> Self {
        Self { session, message: None, rest: Rest::default() }
    }
}

/// `millrace_graft_qos`.
#[repr(C)]
pub struct AskedQos {
    asked: u32,
    max_delay_ms: u32,
    min_throughput_mbit: f64,
    max_loss_percent: f64,
}

/// `millrace_graft_event`.
#[repr(C)]
pub struct ToldEvent {
    kind: i32,
    reserved: u32,
    messages: u64,
    asked: f64,
    measured: f64,
    text: [c_char; TEXT_MAX],
}

/// `millrace_graft_agreed`.
#[repr(C)]
pub struct Agreed {
    graft: [c_char; NAME_MAX],
    services: [c_char; TEXT_MAX],
    is_sealed: u8,
    reserved: [u8; 7],
}

/// `millrace_graft_status`, but for success.
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

struct Failure(Status, String);

impl From<Error> for Failure {
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

type Result<T> = std::result::Result<T, Failure>;

fn invalid(what: impl Into<String>) -> Failure {
    Failure(Status::Invalid, what.into())
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// Runs a call; a failure, or a panic, becomes a status and the thread's last error.
fn call(work: impl FnOnce() -> Result<()>) -> c_int {
    // What a panic leaves half changed is the caller's session alone.
    let Failure(status, message) = match catch_unwind(AssertUnwindSafe(work)) {
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
/// `it` is null or points to a valid `T` that nothing else uses, for as long as the result is used.
unsafe fn valid<'a, T>(it: *mut T, what: &str) -> Result<&'a mut T> {
    // SAFETY: as promised.
    unsafe { it.as_mut() }.ok_or_else(|| invalid(format!("{what} is null")))
}

/// # Safety
/// `text` is null or points to a string that ends in zero, for as long as the result is used.
unsafe fn optional<'a>(text: *const c_char, what: &str) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: as promised.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| invalid(format!("{what} is not UTF-8")))
}

/// # Safety
/// As [`optional`].
unsafe fn string<'a>(text: *const c_char, what: &str) -> Result<&'a str> {
    // SAFETY: as promised.
    unsafe { optional(text, what)? }.ok_or_else(|| invalid(format!("{what} is null")))
}

/// The daemon's socket, the peer, and the service.
///
/// # Safety
/// As [`optional`].
unsafe fn whom<'a>(
    socket: *const c_char,
    peer: *const c_char,
    service: *const c_char,
) -> Result<(&'a str, &'a str, &'a str)> {
    // SAFETY: as promised.
    unsafe {
        let socket = optional(socket, "socket")?.unwrap_or(DEFAULT_SOCKET);
        Ok((socket, string(peer, "peer")?, string(service, "service")?))
    }
}

/// # Safety
/// `to` is null or may be written to.
unsafe fn give<T>(to: *mut T, value: T, what: &str) -> Result<()> {
    if to.is_null() {
        return Err(invalid(format!("{what} is null")));
    }
    // SAFETY: as promised.
    unsafe { to.write(value) };
    Ok(())
}

/// # Safety
/// `from` is null or has as many bytes, for as long as the result is used.
unsafe fn slice<'a>(from: *const c_void, bytes: usize, what: &str) -> Result<&'a [u8]> {
    match (from.is_null(), bytes) {
        (_, 0) => Ok(&[]),
        (true, _) => Err(invalid(format!("{what} is null"))),
        // SAFETY: the caller's promise.
        (false, _) => Ok(unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }),
    }
}

/// # Safety
/// As [`optional`]; `qos` is null or points to one.
unsafe fn want(services: *const c_char, qos: *const AskedQos) -> Result<Want> {
    // SAFETY: the caller's promise.
    let services = unsafe { optional(services, "services")? }.unwrap_or_default();
    let services = services.split_whitespace().map(str::to_owned).collect();
    // SAFETY: the caller's promise.
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
pub extern "C" fn millrace_graft_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => c"",
        };
    VERSION.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn millrace_graft_error() -> *const c_char {
    // The string stays where it is until it is replaced.
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// # Safety
/// See the module; `session` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_init(
    socket: *const c_char,
    peer: *const c_char,
    service: *const c_char,
    session: *mut *mut Held,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let (socket, peer, service) = unsafe { whom(socket, peer, service)? };
        if session.is_null() {
            return Err(invalid("session is null"));
        }
        let made = Held::from(Session::new(Path::new(socket), peer, service)?);
        // SAFETY: the caller's promise.
        unsafe { give(session, Box::into_raw(Box::new(made)), "session") }
    })
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_negotiate(
    session: *mut Held,
    services: *const c_char,
    qos: *const AskedQos,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let (held, want) = unsafe { (valid(session, "session")?, want(services, qos)?) };
        Ok(held.session.negotiate(want)?)
    })
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_validate(session: *mut Held, timeout_ms: c_int) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let held = unsafe { valid(session, "session")? };
        held.session.validate(patience(timeout_ms))?;
        Ok(())
    })
}

/// # Safety
/// See the module; `agreed` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_agreement(session: *mut Held, agreed: *mut Agreed) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let held = unsafe { valid(session, "session")? };
        let opened = held.session.agreed()?;
        let found = Agreed {
            graft: fixed(&opened.graft),
            services: fixed(&opened.services.join(" ")),
            is_sealed: opened.is_sealed.into(),
            reserved: [0; 7],
        };
        // SAFETY: the caller's promise.
        unsafe { give(agreed, found, "agreed") }
    })
}

/// # Safety
/// See the module; `message` is null or has as many bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_send(
    session: *mut Held,
    message: *const c_void,
    bytes: usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let (held, message) = unsafe { (valid(session, "session")?, slice(message, bytes, "message")?) };
        Ok(held.session.send(message)?)
    })
}

/// # Safety
/// See the module; `message` is null or has room for as many bytes, and `bytes` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_recv(
    session: *mut Held,
    message: *mut c_void,
    room: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let held = unsafe { valid(session, "session")? };
        if bytes.is_null() || (message.is_null() && room > 0) {
            return Err(invalid("message or bytes is null"));
        }
        let got = match held.message.take() {
            Some(message) => message,
            None => match held.session.receive()? {
                Received::Message(message) => message,
                Received::Finished => {
                    return Err(Failure(
                        Status::Finished,
                        "the other end has finished, and nothing more comes".to_owned(),
                    ));
                }
            },
        };
        // SAFETY: the caller's promise.
        unsafe { give(bytes, got.len(), "bytes")? };
        if got.len() > room {
            let words = format!("the message has {} bytes, and there is room for {room}", got.len());
            held.message = Some(got);
            return Err(Failure(Status::TooLong, words));
        }
        if !got.is_empty() {
            // SAFETY: the caller's promise; there is room for it, and the source is elsewhere.
            unsafe { std::ptr::copy_nonoverlapping(got.as_ptr(), message.cast::<u8>(), got.len()) };
        }
        Ok(())
    })
}

/// # Safety
/// See the module; `from` is null or has as many bytes, and `written` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_write(
    session: *mut Held,
    from: *const c_void,
    bytes: usize,
    written: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let (held, from) = unsafe { (valid(session, "session")?, slice(from, bytes, "from")?) };
        if written.is_null() {
            return Err(invalid("written is null"));
        }
        let taken = stream::write(&mut held.session, from)?;
        // SAFETY: the caller's promise.
        unsafe { give(written, taken, "written") }
    })
}

/// # Safety
/// See the module; `to` is null or has room for as many bytes, and `bytes` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_read(
    session: *mut Held,
    to: *mut c_void,
    room: usize,
    bytes: *mut usize,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let held = unsafe { valid(session, "session")? };
        if bytes.is_null() || to.is_null() || room == 0 {
            return Err(invalid("to or bytes is null, or there is no room"));
        }
        // What a caller's memory has been is never read.
        let mut buffer = vec![0; room.min(READ_MAX)];
        let got = stream::read(&mut held.session, &mut held.rest, &mut buffer)?;
        // SAFETY: the caller's promise; `got` is at most `room`.
        unsafe { std::ptr::copy_nonoverlapping(buffer.as_ptr(), to.cast::<u8>(), got) };
        // SAFETY: the caller's promise.
        unsafe { give(bytes, got, "bytes") }
    })
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_renegotiate(
    session: *mut Held,
    services: *const c_char,
    qos: *const AskedQos,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let (held, want) = unsafe { (valid(session, "session")?, want(services, qos)?) };
        Ok(held.session.renegotiate(want)?)
    })
}

/// # Safety
/// See the module; `event` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_next_event(session: *mut Held, event: *mut ToldEvent) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let held = unsafe { valid(session, "session")? };
        if event.is_null() {
            return Err(invalid("event is null"));
        }
        let found = held.session.event()?.ok_or(Error::WouldBlock)?;
        // SAFETY: the caller's promise.
        unsafe { give(event, ToldEvent::of(&found), "event") }
    })
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_finish(session: *mut Held) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let held = unsafe { valid(session, "session")? };
        Ok(held.session.finish()?)
    })
}

/// # Safety
/// `session` is null or came from this library and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_close(session: *mut Held) -> c_int {
    call(|| {
        if session.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let held = unsafe { Box::from_raw(session) };
        match held.session.close() {
            Ok(()) | Err(Error::Refused { .. } | Error::Forked) => Ok(()),
            Err(error) => Err(error.into()),
        }
    })
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_fd(session: *const Held) -> c_int {
    // SAFETY: the caller's promise.
    let held = unsafe { session.as_ref() };
    held.map_or(Status::Invalid as c_int, |held| held.session.as_fd().as_raw_fd())
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_set_nonblocking(session: *mut Held, nonblocking: c_int) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let held = unsafe { valid(session, "session")? };
        held.session.set_nonblocking(nonblocking != 0);
        Ok(())
    })
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_set_timeout(session: *mut Held, timeout_ms: c_int) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let held = unsafe { valid(session, "session")? };
        held.session.set_timeout(patience(timeout_ms));
        Ok(())
    })
}

/// # Safety
/// See the module; `listener` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_listen(
    socket: *const c_char,
    peer: *const c_char,
    service: *const c_char,
    listener: *mut *mut Listener,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let (socket, peer, service) = unsafe { whom(socket, peer, service)? };
        if listener.is_null() {
            return Err(invalid("listener is null"));
        }
        let made = Preconnection::new(peer, service).socket(socket).listen()?;
        // SAFETY: the caller's promise.
        unsafe { give(listener, Box::into_raw(Box::new(made)), "listener") }
    })
}

/// # Safety
/// See the module; `session` may be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_accept(listener: *mut Listener, session: *mut *mut Held) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let listener = unsafe { valid(listener, "listener")? };
        if session.is_null() {
            return Err(invalid("session is null"));
        }
        let held = Held::from(listener.accept()?);
        // SAFETY: the caller's promise.
        unsafe { give(session, Box::into_raw(Box::new(held)), "session") }
    })
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_listener_fd(listener: *const Listener) -> c_int {
    // SAFETY: the caller's promise.
    let listener = unsafe { listener.as_ref() };
    listener.map_or(Status::Invalid as c_int, |listener| listener.as_fd().as_raw_fd())
}

/// # Safety
/// See the module.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_listener_set_nonblocking(
    listener: *mut Listener,
    nonblocking: c_int,
) -> c_int {
    call(|| {
        // SAFETY: the caller's promise.
        let listener = unsafe { valid(listener, "listener")? };
        listener.set_nonblocking(nonblocking != 0);
        Ok(())
    })
}

/// # Safety
/// `listener` is null or came from this library and is used no more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn millrace_graft_listener_close(listener: *mut Listener) {
    call(|| {
        if !listener.is_null() {
            // SAFETY: the caller's promise.
            drop(unsafe { Box::from_raw(listener) });
        }
        Ok(())
    });
}

impl ToldEvent {
    fn of(event: &Event) -> Self {
        let (mut messages, mut numbers) = (0, (0.0, 0.0));
        let (kind, text) = match event {
            Event::Changed { graft, .. } => (1, graft.as_str()),
            Event::Refused { reason, .. } => (2, reason.as_str()),
            Event::Violated(violation) => {
                numbers = (violation.asked, violation.measured);
                (3, violation.what.as_str())
            }
            Event::Lost(lost) => {
                messages = *lost;
                (4, "")
            }
            Event::Finished => (5, ""),
            Event::Closed { reason } => (6, reason.as_str()),
        };
        let (asked, measured) = numbers;
        Self { kind, reserved: 0, messages, asked, measured, text: fixed(text) }
    }
}

/// A string with room for its zero; what is too long is cut off.
fn fixed<const MAX: usize>(text: &str) -> [c_char; MAX] {
    let mut fixed = [0; MAX];
    for (to, from) in fixed.iter_mut().take(MAX - 1).zip(text.bytes()) {
        *to = c_char::from_ne_bytes([from]);
    }
    fixed
}
