//! Names the protocol of a TCP connection by its first bytes, with the library nDPI, which is loaded at run time.
//!
//! Tier: test-all, since it is no part of the product.
//!
//! The library's structures differ from version to version, so only its own functions create and read them. The
//! functions used here have the same signature in all versions 4.2. The library parses untrusted bytes in C, so callers
//! should run it in a process without any rights.

#![allow(unsafe_code)]

use std::ffi::{CStr, c_char, c_void};
use std::ptr::NonNull;

use libloading::{Library, Symbol};

mod names;
mod sample;

pub use names::{USUAL_NAMES, profile};
pub use sample::{NdpiSample, RECORD_MAX, parse};

/// File name of the library in Debian 12 and 13.
pub const LIBRARY: &str = "libndpi.so.4.2";
/// Debian package that installs the library. The library's own package has another name in each release.
pub const PACKAGE: &str = "libndpi-dev";
/// Version of nDPI whose functions are declared here.
const VERSION: &str = "4.2.";

/// Size of the bit mask that enables nDPI's protocols, in bytes. The library reads fewer bytes of it.
const MASK_BYTES: usize = 1024;
/// Largest size of nDPI's state of a flow that this crate allocates, in bytes.
const FLOW_BYTES_MAX: u32 = 1 << 16;
const PACKET_MAX: usize = 1500;
const HEADERS: usize = 40;

/// Largest TCP payload of a packet that is passed to nDPI, in bytes.
pub const SEGMENT_MAX: usize = PACKET_MAX - HEADERS;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{LIBRARY} cannot be opened: on Debian and Ubuntu, install the package {PACKAGE}")]
    Absent(#[source] libloading::Error),
    #[error("{LIBRARY} has no usable {name}")]
    Symbol { name: &'static str, source: libloading::Error },
    #[error(
        "{LIBRARY} is nDPI {0}: only {VERSION}x is supported, since its functions change from version to version"
    )]
    Version(String),
    #[error("nDPI cannot be initialised")]
    NotReady,
}

/// The names that nDPI gives to a connection's protocol and category.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NdpiFound {
    /// Name of the protocol, such as `TLS`.
    pub protocol: String,
    /// Name of the underlying protocol, if known. For a site that is recognised by its name, it is `TLS`.
    pub carrier: Option<String>,
    /// Name of the category, such as `Web`.
    pub category: String,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NdpiProtocol {
    master: u16,
    application: u16,
    category: u32,
}

type Process = unsafe extern "C" fn(*mut c_void, *mut c_void, *const u8, u16, u64) -> NdpiProtocol;
type ProtocolName = unsafe extern "C" fn(*mut c_void, u16) -> *const c_char;
type CategoryName = unsafe extern "C" fn(*mut c_void, u32) -> *const c_char;

/// The initialised library. The value must stay in one thread, since it has raw pointers.
pub struct Ndpi {
    module: NonNull<c_void>,
    process: Process,
    protocol_name: ProtocolName,
    category_name: CategoryName,
    free_flow_data: unsafe extern "C" fn(*mut c_void),
    exit: unsafe extern "C" fn(*mut c_void),
    flow_bytes: usize,
    // Dropped after the function pointers above, which point into the library.
    _library: Library,
}

impl Drop for Ndpi {
    fn drop(&mut self) {
        // SAFETY: the library's own `init` created the module, and nothing uses it after this.
        unsafe { (self.exit)(self.module.as_ptr()) }
    }
}

impl Ndpi {
    /// Loads and initialises the library. That takes most of a second, and some 100 MiB of address space.
    ///
    /// # Errors
    ///
    /// Returns an error if the library is missing, or has another version.
    pub fn load() -> Result<Self, Error> {
        // SAFETY: Debian's library has no constructors that affect this process.
        let library = unsafe { Library::new(LIBRARY) }.map_err(Error::Absent)?;
        // SAFETY: ndpi_api.h of every version declares the function with this type.
        let revision: unsafe extern "C" fn() -> *const c_char = unsafe { get(&library, "ndpi_revision") }?;
        // SAFETY: the function returns a constant string.
        let version = text(unsafe { revision() });
        if !version.starts_with(VERSION) {
            return Err(Error::Version(version));
        }
        // SAFETY: ndpi_api.h of 4.2 declares each function with this type; `ndpi_init_prefs` is a four-byte
        // enumeration.
        unsafe {
            let init: unsafe extern "C" fn(u32) -> *mut c_void = get(&library, "ndpi_init_detection_module")?;
            let all: unsafe extern "C" fn(*mut c_void, *const u8) =
                get(&library, "ndpi_set_protocol_detection_bitmask2")?;
            let finalize: unsafe extern "C" fn(*mut c_void) = get(&library, "ndpi_finalize_initialization")?;
            let size: unsafe extern "C" fn() -> u32 =
                get(&library, "ndpi_detection_get_sizeof_ndpi_flow_struct")?;
            let process = get(&library, "ndpi_detection_process_packet")?;
            let protocol_name = get(&library, "ndpi_get_proto_name")?;
            let category_name = get(&library, "ndpi_category_get_name")?;
            let free_flow_data = get(&library, "ndpi_free_flow_data")?;
            let exit = get(&library, "ndpi_exit_detection_module")?;
            let flow_bytes = size();
            let module = NonNull::new(init(0)).ok_or(Error::NotReady)?;
            let ndpi = Self {
                module,
                process,
                protocol_name,
                category_name,
                free_flow_data,
                exit,
                flow_bytes: flow_bytes as usize,
                _library: library,
            };
            if !(1..=FLOW_BYTES_MAX).contains(&flow_bytes) {
                return Err(Error::NotReady);
            }
            all(module.as_ptr(), [u8::MAX; MASK_BYTES].as_ptr());
            finalize(module.as_ptr());
            Ok(ndpi)
        }
    }

    /// Returns the protocol of a connection to `port`, or `None` if the library does not recognise it. `segments` are
    /// the connection's first segments in order; the flag is true if the client sent the segment. At most
    /// [`SEGMENT_MAX`] bytes of each are used.
    pub fn look<'a>(
        &self,
        port: u16,
        segments: impl IntoIterator<Item = (bool, &'a [u8])>,
    ) -> Option<NdpiFound> {
        let mut flow = NdpiFlow::new(self);
        let mut packets = NdpiPackets::new(port);
        for flags in [NdpiFlags::Syn, NdpiFlags::SynAck, NdpiFlags::Ack] {
            flow.process(&packets.next(flags != NdpiFlags::SynAck, flags, &[]));
        }
        let mut found = None;
        for (by_client, bytes) in segments {
            let bytes = bytes.get(..SEGMENT_MAX).unwrap_or(bytes);
            // The library's first answers may be guesses. Its later answers are based on more packets.
            found = flow.process(&packets.next(by_client, NdpiFlags::Data, bytes)).or(found);
        }
        found
    }

    fn name(&self, protocol: u16) -> Option<String> {
        // SAFETY: the module is live, and returns a string of its own for any number. Protocol 0 stands for unknown.
        (protocol != 0).then(|| text(unsafe { (self.protocol_name)(self.module.as_ptr(), protocol) }))
    }
}

/// Returns a function of the library.
///
/// # Safety
///
/// `T` must be the function's type.
unsafe fn get<T: Copy>(library: &Library, name: &'static str) -> Result<T, Error> {
    // SAFETY: the caller guarantees that `T` is the type of the library's function.
    let symbol: Symbol<'_, T> =
        unsafe { library.get(name.as_bytes()) }.map_err(|source| Error::Symbol { name, source })?;
    Ok(*symbol)
}

fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the pointer is to a zero-terminated string of the library, which lives as long as the module.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}

struct NdpiFlow<'a> {
    ndpi: &'a Ndpi,
    /// State of the flow, for the library only. `u128` gives it the strictest alignment that it may need.
    memory: Vec<u128>,
}

impl<'a> NdpiFlow<'a> {
    fn new(ndpi: &'a Ndpi) -> Self {
        Self { ndpi, memory: vec![0; ndpi.flow_bytes.div_ceil(size_of::<u128>())] }
    }

    fn process(&mut self, packet: &[u8]) -> Option<NdpiFound> {
        let length = u16::try_from(packet.len()).ok()?;
        // SAFETY: the module is live. The flow started as zeros, has the size that the library demands, and is used by
        // nothing else. The packet outlives the call, and the library keeps no pointer to it that a later call would
        // follow.
        let found = unsafe {
            (self.ndpi.process)(
                self.ndpi.module.as_ptr(),
                self.memory.as_mut_ptr().cast(),
                packet.as_ptr(),
                length,
                1,
            )
        };
        let carrier = self.ndpi.name(found.master);
        let (protocol, carrier) = match self.ndpi.name(found.application) {
            Some(application) => (application, carrier),
            None => (carrier?, None),
        };
        // SAFETY: the module is live, and an unknown category has an empty name.
        let category = text(unsafe { (self.ndpi.category_name)(self.ndpi.module.as_ptr(), found.category) });
        Some(NdpiFound { protocol, carrier, category })
    }
}

impl Drop for NdpiFlow<'_> {
    fn drop(&mut self) {
        // SAFETY: the library frees what it has allocated for the flow, but not the flow itself.
        unsafe { (self.ndpi.free_flow_data)(self.memory.as_mut_ptr().cast()) }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum NdpiFlags {
    Syn = 0x02,
    SynAck = 0x12,
    Ack = 0x10,
    Data = 0x18,
}

/// Builds IPv4 and TCP headers around payloads, as if they had been captured.
struct NdpiPackets {
    port: u16,
    /// Next sequence numbers: of the client, and of the server.
    next: [u32; 2],
}

impl NdpiPackets {
    fn new(port: u16) -> Self {
        Self { port, next: [1000, 5000] }
    }

    fn next(&mut self, by_client: bool, flags: NdpiFlags, payload: &[u8]) -> Vec<u8> {
        const CLIENT: (u32, u16) = (0x0a00_0001, 40_000);
        let server = (0x0a00_0002, self.port);
        let (from, to) = if by_client { (CLIENT, server) } else { (server, CLIENT) };
        let own = usize::from(!by_client);
        let other = usize::from(by_client);
        let length = (HEADERS + payload.len()) as u16;
        let mut packet = Vec::with_capacity(usize::from(length));
        packet.extend([0x45, 0]);
        packet.extend(length.to_be_bytes());
        // These bytes are: identification, \"do not fragment\", 64 hops, TCP, and no checksum.
        packet.extend([0, 1, 0x40, 0, 64, 6, 0, 0]);
        packet.extend(from.0.to_be_bytes());
        packet.extend(to.0.to_be_bytes());
        packet.extend(from.1.to_be_bytes());
        packet.extend(to.1.to_be_bytes());
        packet.extend(self.next[own].to_be_bytes());
        packet.extend((if flags == NdpiFlags::Syn { 0 } else { self.next[other] }).to_be_bytes());
        // These bytes are: a header of five words, the window, no checksum, and no urgent data.
        packet.extend([0x50, flags as u8, 0xff, 0xff, 0, 0, 0, 0]);
        packet.extend(payload);
        let syn = u32::from(matches!(flags, NdpiFlags::Syn | NdpiFlags::SynAck));
        self.next[own] = self.next[own].wrapping_add(payload.len() as u32 + syn);
        packet
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Loads the library, or prints that the test is skipped and returns `None`.
    fn ndpi(test: &str) -> Option<Ndpi> {
        match Ndpi::load() {
            Ok(ndpi) => Some(ndpi),
            Err(error) => {
                println!("SKIP {test}: {error}");
                None
            }
        }
    }

    #[test]
    fn synthetic_tcp_packets_for_ndpi_have_valid_headers() {
        let mut packets = NdpiPackets::new(443);
        let syn = packets.next(true, NdpiFlags::Syn, &[]);
        let answer = packets.next(false, NdpiFlags::SynAck, &[]);
        let data = packets.next(true, NdpiFlags::Data, b"abc");
        assert_eq!((syn.len(), answer.len(), data.len()), (40, 40, 43));
        assert_eq!((&syn[22..24], &answer[20..22]), (&443_u16.to_be_bytes()[..], &443_u16.to_be_bytes()[..]));
        assert_eq!(&answer[28..32], &1001_u32.to_be_bytes(), "the SYN is acknowledged");
        assert_eq!(
            (&data[24..28], &data[28..32]),
            (&1001_u32.to_be_bytes()[..], &5001_u32.to_be_bytes()[..])
        );
        assert_eq!(packets.next, [1004, 5001]);
        assert_eq!(u16::from_be_bytes([data[2], data[3]]), 43);
    }

    #[test]
    fn ndpi_recognises_tls_http_and_ssh_by_their_first_bytes() {
        let Some(ndpi) = ndpi("ndpi_recognises_tls_http_and_ssh_by_their_first_bytes") else { return };
        let hello: &[(bool, &[u8])] = &[(true, include_bytes!("client_hello.bin"))];
        let http: &[(bool, &[u8])] = &[
            (true, b"GET / HTTP/1.1\r\nHost: archive.example\r\nUser-Agent: curl/8.0\r\nAccept: */*\r\n\r\n"),
            (false, b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 5\r\n\r\nhello"),
        ];
        let ssh: &[(bool, &[u8])] =
            &[(false, b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n"), (true, b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n")];
        for (segments, protocol, category) in
            [(hello, "TLS", "Web"), (http, "HTTP", "Web"), (ssh, "SSH", "RemoteAccess")]
        {
            let found = ndpi.look(7100, segments.iter().copied()).expect(protocol);
            assert_eq!((found.protocol.as_str(), found.category.as_str()), (protocol, category));
        }
        assert_eq!(ndpi.look(7100, []), None);
    }

    #[test]
    fn random_bytes_are_no_protocol_and_do_no_harm() {
        let Some(ndpi) = ndpi("random_bytes_are_no_protocol_and_do_no_harm") else { return };
        let mut state = 7_u64;
        let mut noise = |length: usize| -> Vec<u8> {
            let mut next = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 56) as u8
            };
            (0..length).map(|_| next()).collect()
        };
        for round in 0..2000 {
            let pieces: Vec<_> =
                (0..round % 10).map(|at| noise(1 + (round * 37 + at * 211) % SEGMENT_MAX)).collect();
            ndpi.look(
                round as u16,
                pieces.iter().enumerate().map(|(at, piece)| (at % 2 == 0, piece.as_slice())),
            );
        }
        let long = vec![b'A'; 3 * PACKET_MAX];
        ndpi.look(80, [(true, long.as_slice())]);
    }
}
