//! System calls that may send or receive.

use nix::libc;

/// By number: 512 bytes, in rows because `Default` ends at arrays of 32.
pub(crate) type Table = [[u8; ROW]; 16];
const ROW: usize = 32;

/// `enum cost_call`.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Call {
    Send = 1,
    Receive = 2,
    Write = 3,
    Read = 4,
    Sendfile = 5,
    Splice = 6,
}

const KNOWN: [(libc::c_long, Call); 14] = [
    (libc::SYS_sendto, Call::Send),
    (libc::SYS_sendmsg, Call::Send),
    (libc::SYS_sendmmsg, Call::Send),
    (libc::SYS_recvfrom, Call::Receive),
    (libc::SYS_recvmsg, Call::Receive),
    (libc::SYS_recvmmsg, Call::Receive),
    (libc::SYS_write, Call::Write),
    (libc::SYS_writev, Call::Write),
    (libc::SYS_pwritev2, Call::Write),
    (libc::SYS_read, Call::Read),
    (libc::SYS_readv, Call::Read),
    (libc::SYS_preadv2, Call::Read),
    (libc::SYS_sendfile, Call::Sendfile),
    (libc::SYS_splice, Call::Splice),
];

/// What each call does with a socket.
pub(super) fn table() -> Table {
    let mut table = Table::default();
    for (number, call) in KNOWN {
        let Ok(number) = usize::try_from(number) else { continue };
        if let Some(entry) = table.get_mut(number / ROW).and_then(|row| row.get_mut(number % ROW)) {
            *entry = call as u8;
        }
    }
    table
}
