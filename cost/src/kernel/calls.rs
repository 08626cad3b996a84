//! Lists the system calls that use sockets.

use nix::libc;

use super::intf;

/// The use of a socket (`enum cost_call`) by each system call, indexed by its number; 0 for none.
pub(crate) type CallTable = [u8; intf::CALLS];

const KNOWN: [(libc::c_long, u32); 28] = [
    (libc::SYS_sendto, intf::COST_CALL_SEND),
    (libc::SYS_sendmsg, intf::COST_CALL_SEND),
    (libc::SYS_sendmmsg, intf::COST_CALL_SEND),
    (libc::SYS_recvfrom, intf::COST_CALL_RECEIVE),
    (libc::SYS_recvmsg, intf::COST_CALL_RECEIVE),
    (libc::SYS_recvmmsg, intf::COST_CALL_RECEIVE),
    (libc::SYS_write, intf::COST_CALL_WRITE),
    (libc::SYS_writev, intf::COST_CALL_WRITE),
    (libc::SYS_pwritev2, intf::COST_CALL_WRITE),
    (libc::SYS_read, intf::COST_CALL_READ),
    (libc::SYS_readv, intf::COST_CALL_READ),
    (libc::SYS_preadv2, intf::COST_CALL_READ),
    (libc::SYS_sendfile, intf::COST_CALL_SENDFILE),
    (libc::SYS_splice, intf::COST_CALL_SPLICE),
    (libc::SYS_socket, intf::COST_CALL_CREATE),
    (libc::SYS_socketpair, intf::COST_CALL_CREATE),
    (libc::SYS_connect, intf::COST_CALL_SOCKET),
    (libc::SYS_accept, intf::COST_CALL_SOCKET),
    (libc::SYS_accept4, intf::COST_CALL_SOCKET),
    (libc::SYS_bind, intf::COST_CALL_SOCKET),
    (libc::SYS_listen, intf::COST_CALL_SOCKET),
    (libc::SYS_setsockopt, intf::COST_CALL_SOCKET),
    (libc::SYS_getsockopt, intf::COST_CALL_SOCKET),
    (libc::SYS_getsockname, intf::COST_CALL_SOCKET),
    (libc::SYS_getpeername, intf::COST_CALL_SOCKET),
    (libc::SYS_shutdown, intf::COST_CALL_SOCKET),
    (libc::SYS_ioctl, intf::COST_CALL_SOCKET),
    (libc::SYS_close, intf::COST_CALL_SOCKET),
];

/// Returns how each system call uses a socket, indexed by its number.
pub(super) fn table() -> CallTable {
    let mut table: CallTable = [0; intf::CALLS];
    for (number, call) in KNOWN {
        let Ok(number) = usize::try_from(number) else { continue };
        if let Some(entry) = table.get_mut(number) {
            *entry = call as u8;
        }
    }
    table
}
