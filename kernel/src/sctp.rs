//! What one-to-one sockets of SCTP (RFC 6458) want set, for whoever uses them as those of TCP.

use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use nix::libc;

use crate::udp::set;

/// The kernel's `IPPROTO_SCTP`, and its level of options.
pub const PROTOCOL: i32 = libc::IPPROTO_SCTP;

// Of `linux/sctp.h`.
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
struct PathParameters {
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

const _: () = assert!(size_of::<RetransmissionTimes>() == 16 && size_of::<PathParameters>() == 156);

/// Small messages leave at once; a path is asked for after `silent`, and given up when so many questions in a row were not answered.
///
/// # Errors
/// The kernel's: it is no socket of SCTP, for one.
pub fn prepare(socket: impl AsFd, silent: Duration, questions: u16) -> io::Result<()> {
    let ms = u32::try_from(silent.as_millis()).unwrap_or(u32::MAX);
    set(&socket, PROTOCOL, NODELAY, &1_i32)?;
    let times =
        RetransmissionTimes { association: 0, initial_ms: ms.min(1000), most_ms: ms, least_ms: ms.min(200) };
    set(&socket, PROTOCOL, RTOINFO, &times)?;
    let path = PathParameters {
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
