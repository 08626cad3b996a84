//! Asks the kernel who is at the other end of a Unix socket.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::libc;

/// Groups of a process that are asked for at first: few have more.
const GROUPS: usize = 32;

/// Returns the supplementary groups that the process had which has made the connection (`SO_PEERGROUPS`, Linux 4.13).
///
/// # Errors
/// It is no connection of a Unix socket.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<libc::gid_t>> {
    let mut groups: Vec<libc::gid_t> = vec![0; GROUPS];
    loop {
        let mut bytes = size_of_val(&groups[..]) as libc::socklen_t;
        // SAFETY: the descriptor is open, and there is room for as many bytes as is said.
        let got = unsafe {
            libc::getsockopt(
                socket.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut bytes,
            )
        };
        let count = bytes as usize / size_of::<libc::gid_t>();
        match got {
            0 => {
                groups.truncate(count);
                return Ok(groups);
            }
            _ => match io::Error::last_os_error() {
                // It says how many there are.
                error if error.raw_os_error() == Some(libc::ERANGE) && count > groups.len() => {
                    groups.resize(count, 0);
                }
                error => return Err(error),
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn groups_of_the_other_end_are_those_of_its_process() {
        let (one, _other) = UnixStream::pair().expect("a pair");
        let mut own: Vec<_> =
            nix::unistd::getgroups().expect("groups").into_iter().map(nix::unistd::Gid::as_raw).collect();
        let mut found = peer_groups(one.as_fd()).expect("groups");
        own.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, own);
    }
}
