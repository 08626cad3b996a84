//! Options of one-to-one SCTP sockets (RFC 6458), for code that uses these sockets like TCP sockets.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::libc;

use crate::udp::set;

/// The protocol number `IPPROTO_SCTP`, which is also the level of its options.
pub const PROTOCOL: i32 = libc::IPPROTO_SCTP;

// Constants from linux/sctp.h.
const RTOINFO: libc::c_int = 0;
const NODELAY: libc::c_int = 3;
const PEER_ADDR_PARAMS: libc::c_int = 9;
const HEARTBEATS: u32 = 1;

/// `struct sctp_rtoinfo`.
#[repr(C)]
struct RetransmissionTimes {
    association: i32,
    initial_ms: u32,
    most_ms: u32,
    least_ms: u32,
}

/// `struct sctp_paddrparams`, which is packed.
#[repr(C, packed(4))]
struct SctpPathParameters {
    association: i32,
    address: [u8; 128],
    heartbeat_ms: u32,
    retransmissions: u16,
    mtu: [u8; 4],
    sack_delay: [u8; 4],
    flags: [u8; 4],
    flow_label: [u8; 4],
    dscp: u8,
}

const _: () = assert!(size_of::<RetransmissionTimes>() == 16 && size_of::<SctpPathParameters>() == 156);

/// Sets options of a socket. Small messages are sent at once. A path without traffic is probed after the time `silent`,
/// and is given up after `questions` unanswered probes in a row.
///
/// # Errors
/// Fails if the kernel refuses an option, for example because the socket is not an SCTP socket.
pub fn prepare(socket: impl AsFd, silent: Duration, questions: u16) -> io::Result<()> {
    let ms = u32::try_from(silent.as_millis()).unwrap_or(u32::MAX);
    set(&socket, PROTOCOL, NODELAY, &1_i32)?;
    let times =
        RetransmissionTimes { association: 0, initial_ms: ms.min(1000), most_ms: ms, least_ms: ms.min(200) };
    set(&socket, PROTOCOL, RTOINFO, &times)?;
    let path = SctpPathParameters {
        association: 0,
        address: [0; 128],
        heartbeat_ms: ms,
        retransmissions: questions,
        mtu: [0; 4],
        sack_delay: [0; 4],
        flags: HEARTBEATS.to_ne_bytes(),
        flow_label: [0; 4],
        dscp: 0,
    };
    set(&socket, PROTOCOL, PEER_ADDR_PARAMS, &path)
}
