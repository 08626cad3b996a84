//! Packets whose wake-up is deferred: everything in them was forwarded, and nobody else waits for it. They are steered
//! to a socket of their own while this process sleeps. Once it is woken, by the ticker or a packet that came
//! by the other socket, it reads this one first, and packets keep their order.

use std::{
    net::UdpSocket,
    sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    task::Waker,
};

use crate::program::DeferredSocket;
use parking_lot::Mutex;

/// Looks in vain after which a packet is not expected any more.
const PATIENCE: u8 = 3;

/// The socket, and who reads it.
pub(super) struct Deferred {
    pub handle: DeferredSocket,
    socket: UdpSocket,
    /// Packets that were given up.
    dropped: AtomicU64,
    /// Packets of publishers among those that were read.
    media: AtomicU64,
    vain: AtomicU8,
    reader: Mutex<Option<Waker>>,
    /// The ticker rests. No packet is deferred then.
    resting: AtomicBool,
    ticker: Box<dyn Fn() + Send + Sync>,
}

impl Deferred {
    /// `ticker`: called when it is to tick again.
    pub fn new(handle: DeferredSocket, socket: UdpSocket, ticker: Box<dyn Fn() + Send + Sync>) -> Self {
        Self {
            handle,
            socket,
            dropped: AtomicU64::new(0),
            media: AtomicU64::new(0),
            vain: AtomicU8::new(0),
            reader: Mutex::default(),
            resting: AtomicBool::new(false),
            ticker,
        }
    }

    pub fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    /// Packets that did not wake this process.
    pub fn packets(&self) -> u64 {
        self.handle.packets()
    }

    /// Of these, packets that there was no room for.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Packets that wait to be read.
    pub fn waiting(&self) -> u64 {
        self.packets().saturating_sub(self.handle.taken())
    }

    /// Before packets are read: from now on all come by the other socket. Returns what [`Deferred::sleep`] wants to know.
    pub fn wake(&self) -> u64 {
        self.handle.wake()
    }

    /// After there was nothing more to read by the other socket.
    pub fn sleep(&self, others: u64) {
        self.media.store(self.handle.media(), Ordering::Relaxed);
        self.handle.sleep(others);
        // Packets may be deferred again. Either this comes behind [`Deferred::rest`], and sees it, or packets go on waking.
        if self.resting.load(Ordering::SeqCst) && self.resting.swap(false, Ordering::SeqCst) {
            (self.ticker)();
        }
    }

    /// The ticker rests until it is told: every packet wakes this process, the next of which tells it.
    pub fn rest(&self) {
        self.resting.store(true, Ordering::SeqCst);
        self.handle.wake();
    }

    /// So many packets were read.
    pub fn on_read(&self, packets: u64) {
        self.handle.take(packets);
        self.vain.store(0, Ordering::Relaxed);
    }

    /// There was nothing to read: what is counted is about to come, or was dropped for want of room.
    pub fn on_nothing(&self) {
        let missing = self.waiting();
        if self.vain.fetch_add(1, Ordering::Relaxed) >= PATIENCE {
            self.handle.take(missing);
            self.dropped.fetch_add(missing, Ordering::Relaxed);
            self.vain.store(0, Ordering::Relaxed);
        }
    }

    /// Who is to be woken when somebody should look.
    pub fn set_reader(&self, waker: &Waker) {
        let mut reader = self.reader.lock();
        if !reader.as_ref().is_some_and(|reader| reader.will_wake(waker)) {
            *reader = Some(waker.clone());
        }
    }

    /// Has the reader look if there is something; returns how many packets of publishers that is.
    pub fn tick(&self) -> Option<u64> {
        if self.waiting() == 0 {
            return None;
        }
        self.reader.lock().iter().for_each(Waker::wake_by_ref);
        Some(self.handle.media().saturating_sub(self.media.load(Ordering::Relaxed)))
    }
}
