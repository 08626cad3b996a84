//! The socket that a session's datagrams come by.

use std::net::UdpSocket;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// More than fits any datagram of a session, with its frame.
pub(super) const DATAGRAM_MAX: usize = 2048;

#[derive(Debug)]
pub(super) struct Inbox {
    pub socket: UdpSocket,
}

impl Inbox {
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket: socket.into() }
    }

    /// Takes the next datagram. `None`: there is none now.
    pub fn next(&self, buffer: &mut [u8; DATAGRAM_MAX]) -> Result<Option<usize>, Errno> {
        loop {
            match recv(&self.socket, &mut buffer[..], RecvFlags::DONTWAIT) {
                // One that was shut down reads as empty.
                Ok((_, 0)) | Err(Errno::AGAIN) => return Ok(None),
                Ok((_, got)) => return Ok(Some(got)),
                Err(Errno::INTR | Errno::CONNREFUSED | Errno::HOSTUNREACH | Errno::NETUNREACH) => {
                    self.forget_errors();
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// What ICMP has said would make the socket readable for ever.
    fn forget_errors(&self) {
        let mut buffer = [0; DATAGRAM_MAX];
        while recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT | RecvFlags::ERRQUEUE).is_ok() {}
    }
}
