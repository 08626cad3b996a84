//! The socket that receives a session's datagrams.

use std::net::UdpSocket;
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// Bytes of a buffer that holds the longest datagram of a session, header included.
pub(crate) const DATAGRAM_MAX: usize = 2048;

#[derive(Debug)]
/// The socket on which a session's datagrams arrive.
pub(crate) struct SessionInbox {
    pub socket: UdpSocket,
}

impl SessionInbox {
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket: socket.into() }
    }

    /// Receives the next datagram without blocking, or returns `None` if none has arrived.
    pub fn next(&self, buffer: &mut [u8; DATAGRAM_MAX]) -> Result<Option<usize>, Errno> {
        loop {
            match recv(&self.socket, &mut buffer[..], RecvFlags::DONTWAIT) {
                // A shut-down socket returns 0 bytes, which is treated as no datagram.
                Ok((_, 0)) | Err(Errno::AGAIN) => return Ok(None),
                Ok((_, got)) => return Ok(Some(got)),
                // The kernel reports ICMP errors about datagrams that were sent earlier; they do not affect receiving.
                Err(Errno::INTR | Errno::CONNREFUSED | Errno::HOSTUNREACH | Errno::NETUNREACH) => {
                    self.forget_errors();
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Removes ICMP errors from the socket's error queue, since poll() would otherwise report the socket for ever.
    fn forget_errors(&self) {
        let mut buffer = [0; DATAGRAM_MAX];
        while recv(&self.socket, &mut buffer, RecvFlags::DONTWAIT | RecvFlags::ERRQUEUE).is_ok() {}
    }
}
