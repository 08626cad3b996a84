//! Sockets for packets that need not wake userspace.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::{Error, Shared, write};

/// A UDP socket that packets are led to which arrived for another one.
pub struct QuietSocket {
    shared: Arc<Shared>,
    pub(super) index: u32,
}

impl QuietSocket {
    pub(super) fn new(shared: Arc<Shared>, socket: impl AsFd) -> Result<Self, Error> {
        let index = shared.quiet_used.fetch_add(1, Ordering::Relaxed);
        if index >= shared.quiets.len() {
            return Err(Error::Full { what: "quiet sockets" });
        }
        let fd = socket.as_fd().as_raw_fd() as u64;
        write(&shared.quiet_sockets, "quiet_sockets", &index.to_ne_bytes(), &fd.to_ne_bytes())?;
        Ok(Self { shared, index })
    }

    /// Packets that were led there so far. The last of them may be about to arrive, or be dropped there.
    pub fn packets(&self) -> u64 {
        self.shared.quiets.get(self.index).packets.load(Ordering::Acquire)
    }

    /// Packets of the same connections that went to the other socket, or are about to.
    pub fn others(&self) -> u64 {
        self.shared.quiets.get(self.index).others.load(Ordering::SeqCst)
    }

    /// Userspace is about to read: no packets are led to this socket, until [`QuietSocket::sleep`]. Returns how many
    /// went to the other socket so far.
    pub fn wake(&self) -> u64 {
        self.shared.quiets.get(self.index).heard.store(u64::MAX, Ordering::SeqCst);
        self.others()
    }

    /// Userspace has found the other socket empty after so many packets had gone there. Should it be woken by another
    /// one already, nothing comes here until the next time.
    pub fn sleep(&self, others: u64) {
        self.shared.quiets.get(self.index).heard.store(others, Ordering::SeqCst);
    }
}
