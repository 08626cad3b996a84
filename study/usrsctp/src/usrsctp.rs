//! SCTP in userspace by the C library usrsctp, which is loaded at run time. There is one association, whose packets are
//! sent and received by the caller.
//!
//! The library's state is global, so it needs a process of its own, and one thread. Addresses are of the family
//! `AF_CONN`, so the library opens no sockets.

#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::ptr::{null, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use nix::libc;

/// File name of the library in Debian and its derivatives: package `libusrsctp2`.
pub const LIBRARY: &str = "libusrsctp.so.2";

const AF_CONN: u16 = 123;
const IPPROTO_SCTP: c_int = 132;
/// Port on both sides. SCTP requires an address and a port on each side, which are constant here.
const PORT: u16 = 5000;
/// Address that stands for the peer in calls of the library.
const OTHER: usize = 1;
const RTOINFO: c_int = 0x1;
const INITMSG: c_int = 0x3;
const NODELAY: c_int = 0x4;
const PEER_ADDR_PARAMS: c_int = 0xa;
const PMTUD_DISABLE: u32 = 0x10;
const UNORDERED: u16 = 0x400;
const SENDV_SNDINFO: c_uint = 1;
const NOTIFICATION: c_int = 0x2000;
/// Size of the common header of an SCTP packet, in bytes.
const COMMON_HEADER: u32 = 12;

pub const READ: c_int = 1;
pub const WRITE: c_int = 2;
pub const ERROR: c_int = 4;

type Socket = *mut c_void;
type UsrsctpOutput = extern "C" fn(*mut c_void, *mut c_void, usize, u8, u8) -> c_int;
type Print = unsafe extern "C" fn(*const c_char, ...);

#[repr(C)]
struct Address {
    family: u16,
    port: u16,
    address: *mut c_void,
}

#[repr(C)]
#[derive(Default)]
struct SendInfo {
    stream: u16,
    flags: u16,
    protocol: u32,
    context: u32,
    association: u32,
}

#[repr(C)]
struct Rto {
    association: u32,
    initial_ms: u32,
    max_ms: u32,
    min_ms: u32,
}

#[repr(C)]
struct Init {
    streams_out: u16,
    streams_in: u16,
    attempts: u16,
    timeout_ms: u16,
}

/// The layout of `struct sctp_paddrparams`: the address is a `sockaddr_storage`.
#[repr(C)]
struct PathParameters {
    address: libc::sockaddr_storage,
    association: u32,
    heartbeat_ms: u32,
    mtu: u32,
    flags: u32,
    flow_label: u32,
    retries: u16,
    dscp: u8,
}

/// The functions of usrsctp, named as in `usrsctp.h`.
struct UsrsctpCalls {
    init_nothreads: unsafe extern "C" fn(u16, Option<UsrsctpOutput>, Option<Print>),
    register_address: unsafe extern "C" fn(*mut c_void),
    socket:
        unsafe extern "C" fn(c_int, c_int, c_int, *const c_void, *const c_void, u32, *mut c_void) -> Socket,
    setsockopt: unsafe extern "C" fn(Socket, c_int, c_int, *const c_void, libc::socklen_t) -> c_int,
    set_non_blocking: unsafe extern "C" fn(Socket, c_int) -> c_int,
    bind: unsafe extern "C" fn(Socket, *mut Address, libc::socklen_t) -> c_int,
    connect: unsafe extern "C" fn(Socket, *mut Address, libc::socklen_t) -> c_int,
    get_events: unsafe extern "C" fn(Socket) -> c_int,
    sendv: unsafe extern "C" fn(
        Socket,
        *const c_void,
        usize,
        *mut Address,
        c_int,
        *mut c_void,
        libc::socklen_t,
        c_uint,
        c_int,
    ) -> isize,
    recvv: unsafe extern "C" fn(
        Socket,
        *mut c_void,
        usize,
        *mut c_void,
        *mut libc::socklen_t,
        *mut c_void,
        *mut libc::socklen_t,
        *mut c_uint,
        *mut c_int,
    ) -> isize,
    shutdown: unsafe extern "C" fn(Socket, c_int) -> c_int,
    conninput: unsafe extern "C" fn(*mut c_void, *const c_void, usize, u8),
    handle_timers: unsafe extern "C" fn(u32),
    /// The loaded library, which must stay loaded as long as its functions are called.
    _library: Library,
}

/// The library usrsctp, loaded into this process.
pub struct Usrsctp(UsrsctpCalls);

/// Settings of an SCTP association.
#[derive(Clone, Copy, Debug)]
pub struct Association {
    /// Largest size of an SCTP packet, in bytes.
    pub packet_bytes: u32,
    /// Size of the association's send buffer and of its receive buffer, in bytes.
    pub buffer_bytes: u32,
    pub is_ordered: bool,
    /// Number of SCTP streams, on which messages are sent in turn. Messages on different streams do not wait for each
    /// other.
    pub streams: u16,
    /// Initial and smallest retransmission time-out, in milliseconds.
    pub rto_initial_ms: u32,
    pub rto_min_ms: u32,
}

/// Result of an attempt to read a message.
#[derive(Debug, PartialEq, Eq)]
pub enum MessageRead {
    Bytes(usize),
    Nothing,
    /// The peer sends no more messages, after a regular shutdown.
    End,
}

/// The socket on which packets are sent.
static WIRE: OnceLock<OwnedFd> = OnceLock::new();
static UNSENT: AtomicU64 = AtomicU64::new(0);

/// Sends a packet for the library. A packet that cannot be sent counts as lost, like one lost on the path.
extern "C" fn output(_: *mut c_void, packet: *mut c_void, bytes: usize, _: u8, _: u8) -> c_int {
    let Some(wire) = WIRE.get() else { return 0 };
    // SAFETY: the library lends `bytes` bytes at `packet` for this call, and the descriptor stays open as long as the
    // process.
    let sent =
        unsafe { libc::send(wire.as_raw_fd(), packet, bytes, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) };
    if sent < 0 {
        UNSENT.fetch_add(1, Ordering::Relaxed);
    }
    0
}

impl Usrsctp {
    /// Loads and initialises the library, once per process. It opens what it needs (random numbers) now, and starts a
    /// thread that has nothing to do.
    ///
    /// # Errors
    ///
    /// Returns an error if the library is not installed, or lacks a function.
    pub fn load() -> Result<Self, String> {
        static LOADED: AtomicBool = AtomicBool::new(false);
        if LOADED.swap(true, Ordering::Relaxed) {
            return Err(format!("{LIBRARY} is loaded already"));
        }
        let absent =
            |error| format!("{LIBRARY} cannot be loaded: install Debian's package libusrsctp2 ({error})");
        // SAFETY: loading runs the constructors of a C library of the system, which need nothing. All symbols are bound
        // now, so nothing is looked up later.
        let library = unsafe { Library::open(Some(LIBRARY), RTLD_NOW | RTLD_LOCAL) }.map_err(absent)?;
        macro_rules! call {
            ($name:literal) => {{
                // SAFETY: the types above are those that usrsctp.h declares in the version that LIBRARY names.
                let found = unsafe { library.get(concat!("usrsctp_", $name, "\0").as_bytes()) };
                *found.map_err(|error| format!("{LIBRARY} has no usrsctp_{}: {error}", $name))?
            }};
        }
        let calls = UsrsctpCalls {
            init_nothreads: call!("init_nothreads"),
            register_address: call!("register_address"),
            socket: call!("socket"),
            setsockopt: call!("setsockopt"),
            set_non_blocking: call!("set_non_blocking"),
            bind: call!("bind"),
            connect: call!("connect"),
            get_events: call!("get_events"),
            sendv: call!("sendv"),
            recvv: call!("recvv"),
            shutdown: call!("shutdown"),
            conninput: call!("conninput"),
            handle_timers: call!("handle_timers"),
            _library: library,
        };
        // SAFETY: this is called once per process. `output` has the type that usrsctp.h declares, and the optional
        // print function is absent.
        unsafe {
            (calls.init_nothreads)(0, Some(output), None);
            (calls.register_address)(OTHER as *mut c_void);
        }
        Ok(Self(calls))
    }

    /// Starts the one association of this process. `wire` is a connected socket on which packets are sent.
    ///
    /// # Errors
    ///
    /// Returns an error if there is an association already, or if the library refuses a setting.
    pub fn connect(self, wire: OwnedFd, how: Association) -> io::Result<Connected> {
        WIRE.set(wire).map_err(|_| io::Error::from(io::ErrorKind::AlreadyExists))?;
        let calls = &self.0;
        // SAFETY: the library is loaded, and the optional arguments are null.
        let socket = unsafe {
            (calls.socket)(AF_CONN.into(), libc::SOCK_STREAM, IPPROTO_SCTP, null(), null(), 0, null_mut())
        };
        if socket.is_null() {
            return Err(io::Error::last_os_error());
        }
        let connected = Connected { library: self, socket, how, next_stream: 0 };
        connected.set_up()?;
        Ok(connected)
    }
}

/// An association that is established or being established.
pub struct Connected {
    library: Usrsctp,
    socket: Socket,
    how: Association,
    next_stream: u16,
}

impl Connected {
    fn set_up(&self) -> io::Result<()> {
        let calls = &self.library.0;
        let how = &self.how;
        let buffer = c_int::try_from(how.buffer_bytes).unwrap_or(c_int::MAX);
        for option in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
            self.set(libc::SOL_SOCKET, option, &buffer)?;
        }
        self.set(IPPROTO_SCTP, NODELAY, &1_i32)?;
        let init = Init { streams_out: how.streams, streams_in: how.streams, attempts: 20, timeout_ms: 2000 };
        self.set(IPPROTO_SCTP, INITMSG, &init)?;
        let initial_ms = how.rto_initial_ms;
        let min_ms = how.rto_min_ms;
        self.set(IPPROTO_SCTP, RTOINFO, &Rto { association: 0, initial_ms, max_ms: 5000, min_ms })?;
        // SAFETY: the socket is the library's and open, and the library copies the addresses.
        unsafe {
            done((calls.set_non_blocking)(self.socket, 1))?;
            let mut own = address();
            done((calls.bind)(self.socket, &raw mut own, size_of::<Address>() as libc::socklen_t))?;
            let mut other = address();
            match done((calls.connect)(self.socket, &raw mut other, size_of::<Address>() as libc::socklen_t))
            {
                Err(error) if error.raw_os_error() != Some(libc::EINPROGRESS) => return Err(error),
                _ => {}
            }
        }
        // SAFETY: zeros are an address without a family. An `Address` fits into `sockaddr_storage`, which is aligned
        // for all addresses.
        let address = unsafe {
            let mut any: libc::sockaddr_storage = std::mem::zeroed();
            (&raw mut any).cast::<Address>().write(address());
            any
        };
        let mtu = how.packet_bytes.saturating_sub(COMMON_HEADER) & !3;
        let path = PathParameters {
            address,
            association: 0,
            heartbeat_ms: 0,
            mtu,
            flags: PMTUD_DISABLE,
            flow_label: 0,
            retries: 0,
            dscp: 0,
        };
        self.set(IPPROTO_SCTP, PEER_ADDR_PARAMS, &path)
    }

    fn set<T>(&self, level: c_int, option: c_int, value: &T) -> io::Result<()> {
        let length = size_of::<T>() as libc::socklen_t;
        // SAFETY: the value outlives this call, and `length` is its size.
        let set = unsafe {
            (self.library.0.setsockopt)(self.socket, level, option, std::ptr::from_ref(value).cast(), length)
        };
        done(set).map_err(|error| io::Error::new(error.kind(), format!("option {option:#x}: {error}")))
    }

    /// Returns which events are pending: a combination of [`READ`], [`WRITE`] and [`ERROR`].
    pub fn events(&self) -> c_int {
        // SAFETY: the socket is the library's and open; this also holds for all calls below.
        unsafe { (self.library.0.get_events)(self.socket) }
    }

    /// Passes a packet from the wire to the library. Anybody may have sent it.
    pub fn input(&self, packet: &[u8]) {
        // SAFETY: the bytes are lent for this call only.
        unsafe { (self.library.0.conninput)(OTHER as *mut c_void, packet.as_ptr().cast(), packet.len(), 0) }
    }

    /// Runs the library's timers for the time that has passed.
    pub fn tick(&self, ms: u32) {
        // SAFETY: all calls of the library come from this thread.
        unsafe { (self.library.0.handle_timers)(ms) }
    }

    /// Sends a message. Returns false if the buffer had no space for it.
    ///
    /// # Errors
    ///
    /// Returns an error if the association is over: `BrokenPipe` after a regular shutdown, another error otherwise.
    pub fn send(&mut self, message: &[u8]) -> io::Result<bool> {
        let mut info = SendInfo {
            stream: self.next_stream,
            flags: if self.how.is_ordered { 0 } else { UNORDERED },
            ..SendInfo::default()
        };
        let at = message.as_ptr().cast();
        let bytes = message.len();
        let length = size_of::<SendInfo>() as libc::socklen_t;
        let was_aborted = self.events() & ERROR != 0;
        // SAFETY: the message and its description are lent for this call only.
        let sent = unsafe {
            let info = (&raw mut info).cast();
            (self.library.0.sendv)(self.socket, at, bytes, null_mut(), 0, info, length, SENDV_SNDINFO, 0)
        };
        if sent >= 0 {
            self.next_stream = (self.next_stream + 1) % self.how.streams.max(1);
            return Ok(true);
        }
        match io::Error::last_os_error() {
            error if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
            // Both sides have shut the association down. Received messages may still be read.
            error if error.raw_os_error() == Some(libc::ENOENT) => Err(io::ErrorKind::BrokenPipe.into()),
            // The library also reports this error if the peer is about to shut down, not only if it has aborted.
            error if error.raw_os_error() == Some(libc::ECONNRESET) && !was_aborted => {
                Err(io::ErrorKind::BrokenPipe.into())
            }
            error => Err(error),
        }
    }

    /// Reads the next message, or a part of one that is longer than the buffer. No program of this project sends such a
    /// long message.
    ///
    /// # Errors
    ///
    /// Returns an error if the association is over.
    pub fn receive(&mut self, buffer: &mut [u8]) -> io::Result<MessageRead> {
        let mut flags = 0;
        let mut kind = 0;
        let mut from = 0;
        let mut info = 0;
        let at = buffer.as_mut_ptr().cast();
        let bytes = buffer.len();
        // SAFETY: the buffer outlives this call. The length of the sender's address is 0, so none is written.
        let got = unsafe {
            (self.library.0.recvv)(
                self.socket,
                at,
                bytes,
                null_mut(),
                &raw mut from,
                null_mut(),
                &raw mut info,
                &raw mut kind,
                &raw mut flags,
            )
        };
        match usize::try_from(got) {
            Ok(0) => Ok(MessageRead::End),
            Ok(_) if flags & NOTIFICATION != 0 => Ok(MessageRead::Nothing),
            Ok(got) => Ok(MessageRead::Bytes(got)),
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(MessageRead::Nothing),
                error => Err(error),
            },
        }
    }

    /// Tells the association that no more messages follow. Messages sent before are still delivered.
    pub fn finish(&self) {
        // SAFETY: the socket is the library's and open. Without an association the call does nothing.
        unsafe { (self.library.0.shutdown)(self.socket, libc::SHUT_WR) };
    }

    /// Returns the number of packets that could not be sent to the peer.
    pub fn unsent() -> u64 {
        UNSENT.load(Ordering::Relaxed)
    }
}

fn address() -> Address {
    Address { family: AF_CONN, port: PORT.to_be(), address: OTHER as *mut c_void }
}

fn done(result: c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks that the structures have the sizes and field offsets that usrsctp.h gives them.
    #[test]
    fn structures_match_the_usrsctp_library() {
        assert_eq!(size_of::<Address>(), 16);
        assert_eq!(size_of::<SendInfo>(), 16);
        assert_eq!(size_of::<Rto>(), 16);
        assert_eq!(size_of::<Init>(), 8);
        assert_eq!(std::mem::offset_of!(PathParameters, association), 128);
        assert_eq!(std::mem::offset_of!(PathParameters, retries), 148);
    }
}
