//! Floods a server with QUIC Initials from forged addresses, which the kernel itself sends. It is used for
//! measurements.
//!
//! A packet socket needs a system call and a socket buffer for each packet, which would be most of the measured cost.
//! Here the kernel runs a BPF program on pages of its own (`BPF_F_TEST_XDP_LIVE_FRAMES`, Linux 5.18) and sends them as
//! XDP frames. They arrive at the other end of a veth pair as from a network card's driver, if NAPI is on there (by an
//! XDP program or GRO). XDP gets the page, and a socket buffer is made only for packets that pass.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};

use libbpf_rs::{ErrorKind, ProgramInput};
use millrace_kernel::Error;
use millrace_kernel::object::{LoadedObject, embedded};

use crate::intf::FloodConfig as Config;

/// Network of the source addresses: 198.18.0.0/15, which RFC 2544 reserves for benchmarks.
pub const NETWORK: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 0);
/// Number of different source addresses in [`NETWORK`].
pub const SOURCES: u32 = 1 << 17;
/// Length of each frame, from the Ethernet header to the end of the QUIC Initial.
pub const FRAME_BYTES: usize = ETHERNET + IP + UDP + INITIAL;

const ETHERNET: usize = 14;
const IP: usize = 20;
const UDP: usize = 8;
const INITIAL: usize = 1200;
/// MAC source address of the frames. It is locally administered.
const FROM_MAC: [u8; 6] = [2, 0, 0, 0, 0, 1];

/// The loaded BPF program that sends Initials, and the frame that it rewrites for each of them.
pub struct Flood {
    object: LoadedObject,
    frame: Vec<u8>,
}

impl Flood {
    /// Loads the flood, which sends to a server through an interface of the calling thread's network namespace. Without
    /// an interface, frames are built and dropped, which shows the cost of the flood itself.
    pub fn load(interface: Option<u32>, mac: [u8; 6], to: SocketAddrV4) -> Result<Self, Error> {
        let frame = frame(mac, to);
        let mut open = embedded!("flood.bpf.o").open()?;
        open.configure(&Config {
            ifindex: interface.unwrap_or(0),
            header_sum: sum(frame.get(ETHERNET..ETHERNET + IP).unwrap_or_default()),
            network: NETWORK.to_bits(),
            hosts: SOURCES - 1,
        })?;
        Ok(Self { object: open.load()?, frame })
    }

    /// Sends `packets` packets. Packets that do not fit into the interface's queue are lost, and the interface counts
    /// them. A signal may end the flood early.
    pub fn send(&self, packets: u32) -> Result<(), Error> {
        let input = ProgramInput {
            data_in: Some(&self.frame),
            flags: libbpf_sys::BPF_F_TEST_XDP_LIVE_FRAMES,
            repeat: packets,
            ..ProgramInput::default()
        };
        match self.object.program("flood_xdp")?.test_run(input) {
            Err(error) if error.kind() != ErrorKind::Interrupted => {
                Err(Error::Run { program: "flood_xdp", source: io::Error::other(error) })
            }
            _ => Ok(()),
        }
    }
}

/// Builds the frame: Ethernet, IPv4, UDP without checksum, and an Initial of QUIC version 1 (RFC 9000, section 17.2.2).
/// Only the Initial's keys reveal that it is no real client's. The BPF program fills in source address, IP checksum,
/// source port and connection ID, which are zero here.
fn frame(mac: [u8; 6], to: SocketAddrV4) -> Vec<u8> {
    let mut frame = Vec::with_capacity(FRAME_BYTES);
    frame.extend(mac);
    frame.extend(FROM_MAC);
    frame.extend([8, 0]);
    frame.extend([0x45, 0]);
    frame.extend(((IP + UDP + INITIAL) as u16).to_be_bytes());
    frame.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
    frame.extend([0; 4]);
    frame.extend(to.ip().octets());
    frame.extend([0; 2]);
    frame.extend(to.port().to_be_bytes());
    frame.extend(((UDP + INITIAL) as u16).to_be_bytes());
    frame.extend([0, 0]);
    frame.extend([0xc3, 0, 0, 0, 1, 8]);
    frame.extend([0; 8]);
    // The source connection ID and the token are empty. The Initial's Length field follows (RFC 9000, section 17.2).
    frame.extend([0, 0]);
    let rest = (FRAME_BYTES - frame.len() - 2) as u16;
    frame.extend((0x4000 | rest).to_be_bytes());
    frame.resize(FRAME_BYTES, 0xa5);
    frame
}

/// Returns the sum of the header's 16-bit words in memory order, as the BPF program sums them.
fn sum(header: &[u8]) -> u32 {
    header.chunks_exact(2).map(|word| u32::from(u16::from_ne_bytes([word[0], word[1]]))).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(flood: &Flood) -> Vec<u8> {
        let mut after = vec![0; FRAME_BYTES];
        let input = ProgramInput {
            data_in: Some(&flood.frame),
            data_out: Some(&mut after),
            ..ProgramInput::default()
        };
        let program = flood.object.program("flood_xdp").expect("the program");
        let output = program.test_run(input).expect("a run");
        assert_eq!(output.return_value, libbpf_sys::XDP_DROP, "it has no interface");
        assert_eq!(output.data.expect("a frame").len(), FRAME_BYTES);
        after
    }

    #[test]
    fn flood_frames_are_quic_initials() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIP flood_frames_are_quic_initials: needs root");
            return;
        }
        let flood = Flood::load(None, [1; 6], SocketAddrV4::new(Ipv4Addr::new(10, 0, 0, 1), 4433));
        let flood = flood.unwrap_or_else(|error| panic!("{error}"));
        let frames = [made(&flood), made(&flood)];
        for frame in &frames {
            // The 16-bit words of a valid header, with its checksum, add up to 0xffff in one's complement.
            let header = sum(&frame[ETHERNET..ETHERNET + IP]);
            assert_eq!((header & 0xffff) + (header >> 16), 0xffff, "{frame:x?}");
            let source = &frame[ETHERNET + 12..ETHERNET + 16];
            assert!(source[0] == 198 && (18..20).contains(&source[1]), "{source:?}");
            assert_eq!(frame[ETHERNET + 16..ETHERNET + IP], [10, 0, 0, 1]);
            let port = u16::from_be_bytes([frame[ETHERNET + IP], frame[ETHERNET + IP + 1]]);
            assert!(port >= 1024, "{port}");
            let quic = &frame[ETHERNET + IP + UDP..];
            let length = usize::from(u16::from_be_bytes([quic[16], quic[17]]) & 0x3fff);
            assert_eq!((quic.len(), length), (INITIAL, INITIAL - 18));
        }
        let id = |frame: &[u8]| frame[ETHERNET + IP + UDP + 6..][..8].to_vec();
        assert_ne!(id(&frames[0]), id(&frames[1]));
        flood.send(1000).expect("frames that go nowhere");
    }
}
