//! Where the datagrams of a session come from: its socket, and its ring, if it has one.

use std::io;
use std::net::UdpSocket;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use millrace_graft_kernel::joint::FRAME_BYTES;
use millrace_kernel::xsk::Reader;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

/// More than fits any datagram of a session, with its frame.
pub(super) const DATAGRAM_MAX: usize = 2048;

#[derive(Debug)]
pub(super) struct Inbox {
    pub socket: UdpSocket,
    ring: Option<Reader>,
    /// The latest datagram was there.
    is_at_ring: bool,
}

impl Inbox {
    pub fn new(socket: OwnedFd) -> Self {
        Self { socket: socket.into(), ring: None, is_at_ring: false }
    }

    /// There is a ring from now on, too.
    ///
    /// # Errors
    /// The descriptors are of something else.
    pub fn add_ring(&mut self, descriptors: [OwnedFd; 2], frames: u32) -> io::Result<BorrowedFd<'_>> {
        let ring: &Reader = self.ring.insert(Reader::new(descriptors, frames)?);
        Ok(ring.as_fd())
    }

    /// The next datagram, from where the latest one came, as long as there is another one there: when the session changes from the one
    /// to the other, what came before the change is first.
    pub fn next(&mut self, buffer: &mut [u8; DATAGRAM_MAX]) -> Result<Option<usize>, Errno> {
        for _ in 0..2 {
            let got = if self.is_at_ring { self.next_of_ring(buffer) } else { self.next_of_socket(buffer)? };
            if got.is_some() || self.ring.is_none() {
                return Ok(got);
            }
            self.is_at_ring = !self.is_at_ring;
        }
        Ok(None)
    }

    /// Its frame has been looked at in the kernel.
    fn next_of_ring(&mut self, buffer: &mut [u8]) -> Option<usize> {
        let got = self.ring.as_mut()?.next(buffer)?;
        Some(got.saturating_sub(FRAME_BYTES))
    }

    fn next_of_socket(&self, buffer: &mut [u8]) -> Result<Option<usize>, Errno> {
        loop {
            match recv(&self.socket, &mut *buffer, RecvFlags::DONTWAIT) {
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
