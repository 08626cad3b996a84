//! Deferred wake-ups: a socket for packets that userspace need not see at once.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use millrace_kernel::Error;
use millrace_kernel::object::write;

use super::intf;
use super::shared::Shared;

/// A UDP socket that packets are steered to although they arrived for another one, which userspace sleeps on.
pub struct DeferredSocket {
    shared: Arc<Shared>,
    pub(super) index: u32,
}

impl DeferredSocket {
    pub(super) fn new(shared: Arc<Shared>, socket: impl AsFd, room: u64) -> Result<Self, Error> {
        let index = shared.sockets_used.fetch_add(1, Ordering::Relaxed);
        if index >= shared.deferrals.len() {
            return Err(Error::Full { what: "deferred sockets" });
        }
        let fd = socket.as_fd().as_raw_fd() as u64;
        shared.deferrals.get(index).room.store(room, Ordering::Relaxed);
        write(&shared.sockets, "sockets", &index.to_ne_bytes(), &fd.to_ne_bytes())?;
        Ok(Self { shared, index })
    }

    fn entry(&self) -> &intf::Deferral {
        self.shared.deferrals.get(self.index)
    }

    /// Packets that were steered there so far. The last of them may be about to arrive, or be dropped there.
    pub fn packets(&self) -> u64 {
        self.entry().packets.load(Ordering::Acquire)
    }

    /// Packets of the same connections that went to the other socket, or are about to, and wake userspace.
    pub fn wakes(&self) -> u64 {
        self.entry().wakes.load(Ordering::SeqCst)
    }

    /// Of [`packets`](Self::packets), those of publishers.
    pub fn media(&self) -> u64 {
        self.entry().media.load(Ordering::Relaxed)
    }

    /// Userspace is about to read: no packets are steered to this socket until it [sleeps](Self::sleep). Returns
    /// [`wakes`](Self::wakes).
    pub fn wake(&self) -> u64 {
        self.entry().wakes_read.store(u64::MAX, Ordering::SeqCst);
        self.wakes()
    }

    /// Userspace found the other socket empty after `wakes` packets had gone there, and sleeps. If more have gone there
    /// meanwhile, it is awake again, and nothing is steered here until the next time.
    pub fn sleep(&self, wakes: u64) {
        self.entry().wakes_read.store(wakes, Ordering::SeqCst);
    }

    /// Of [`packets`](Self::packets), those that no longer wait.
    pub fn taken(&self) -> u64 {
        self.entry().taken.load(Ordering::Relaxed)
    }

    /// So many more were read, or are given up. Somebody on this host may have sent packets to the socket itself, and these
    /// are counted here, too: so the total is kept from exceeding that of the packets that were steered.
    pub fn take(&self, packets: u64) {
        self.entry().taken.fetch_add(packets, Ordering::Relaxed);
        self.entry().taken.fetch_min(self.packets(), Ordering::Relaxed);
    }
}

/// As [`Relay::arrival`](super::Relay::arrival).
pub(super) fn arrival(shared: &Shared, end: [u8; 8]) -> Option<u32> {
    let end = u64::from_ne_bytes(end);
    let word = shared.arrivals.get(end as u32 % intf::ARRIVALS).word.load(Ordering::Relaxed);
    (word >> 32 == end >> 32).then_some(word as u32)
}
