//! Asks the kernel about the peer of a Unix socket.

#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::libc;

/// Number of supplementary groups that fit into the buffer of the first `getsockopt` call. Few processes have more.
const GROUPS: usize = 32;

/// Returns the supplementary groups that the peer's process had when it connected (`SO_PEERGROUPS`, since Linux 4.13).
///
/// # Errors
/// Fails if the descriptor is not a connected Unix socket.
pub fn peer_groups(socket: BorrowedFd<'_>) -> io::Result<Vec<libc::gid_t>> {
    let mut groups: Vec<libc::gid_t> = vec![0; GROUPS];
    loop {
        let mut bytes = size_of_val(&groups[..]) as libc::socklen_t;
        // SAFETY: the socket's descriptor is open, and `groups` has `bytes` bytes.
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
                // With ERANGE the kernel also returns the size that is needed.
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
    fn groups_of_a_unix_socket_peer_are_those_of_its_process() {
        let (one, _other) = UnixStream::pair().expect("a pair");
        let mut own: Vec<_> =
            nix::unistd::getgroups().expect("groups").into_iter().map(nix::unistd::Gid::as_raw).collect();
        let mut found = peer_groups(one.as_fd()).expect("groups");
        own.sort_unstable();
        found.sort_unstable();
        assert_eq!(found, own);
    }
}
