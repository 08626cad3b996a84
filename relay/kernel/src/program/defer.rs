//! Handles of sockets for deferred packets, which userspace need not see at once.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use millrace_kernel::Error;
use millrace_kernel::object::write;

use super::intf;
use super::shared::RelayMaps;

/// A UDP socket to which packets are steered although they arrived for the ordinary socket, which userspace sleeps on.
///
/// Userspace is *awake* after [`Self::wake`], and *asleep* after [`Self::sleep`], unless a packet has gone to the
/// ordinary socket meanwhile. The program steers packets to this socket only while userspace is asleep: while
/// `wakes_read` equals `wakes`. For a packet that goes to the ordinary socket, the program first increments `wakes`. So
/// after a packet that wakes userspace, all packets go to the ordinary socket. Packets in this socket are always older
/// than those in the ordinary socket.
pub struct DeferredSocket {
    shared: Arc<RelayMaps>,
    pub(super) index: u32,
}

impl DeferredSocket {
    pub(super) fn new(shared: Arc<RelayMaps>, socket: impl AsFd, room: u64) -> Result<Self, Error> {
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

    /// Returns how many packets were steered to the socket. The most recent ones may not be readable yet, or may be
    /// dropped by the socket.
    pub fn packets(&self) -> u64 {
        self.entry().packets.load(Ordering::Acquire)
    }

    /// Returns how many packets of connections that may use this socket went to the ordinary socket instead, and so
    /// wake userspace. The most recent ones may not be readable yet.
    pub fn wakes(&self) -> u64 {
        self.entry().wakes.load(Ordering::SeqCst)
    }

    /// Returns how many of [`packets`](Self::packets) came from publishers.
    pub fn media(&self) -> u64 {
        self.entry().media.load(Ordering::Relaxed)
    }

    /// Records that userspace is awake and about to read this socket and the ordinary one. No packets are steered to
    /// this socket until [`sleep`](Self::sleep). Returns [`wakes`](Self::wakes).
    pub fn wake(&self) -> u64 {
        // `u64::MAX` never equals `wakes`, so the program steers no packet to this socket.
        self.entry().wakes_read.store(u64::MAX, Ordering::SeqCst);
        self.wakes()
    }

    /// Records that userspace sleeps, after it has read all of the first `wakes` packets on the ordinary socket. If
    /// more packets have gone to the ordinary socket meanwhile, they wake userspace, and no packet is steered to this
    /// socket until the next call.
    pub fn sleep(&self, wakes: u64) {
        self.entry().wakes_read.store(wakes, Ordering::SeqCst);
    }

    /// Returns how many of [`packets`](Self::packets) were read from this socket or dropped.
    pub fn taken(&self) -> u64 {
        self.entry().taken.load(Ordering::Relaxed)
    }

    /// Counts packets as read or dropped. A local process may also send packets to the socket itself, so the total is
    /// limited to the number of steered packets.
    pub fn take(&self, packets: u64) {
        self.entry().taken.fetch_add(packets, Ordering::Relaxed);
        self.entry().taken.fetch_min(self.packets(), Ordering::Relaxed);
    }
}

/// Implements [`RelayProgram::arrival`](super::RelayProgram::arrival).
pub(super) fn arrival(shared: &RelayMaps, end: [u8; 8]) -> Option<u32> {
    let end = u64::from_ne_bytes(end);
    let word = shared.arrivals.get(end as u32 % intf::ARRIVALS).word.load(Ordering::Relaxed);
    (word >> 32 == end >> 32).then_some(word as u32)
}
