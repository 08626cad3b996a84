//! Sockets for packets that need not wake this process, because the kernel has forwarded all of their content. While
//! the process sleeps, the kernel steers such packets to the deferred socket, which wakes nobody. Once the process is
//! woken, by the ticker (a periodic timer) or by another packet, it reads the deferred socket first, so that packets
//! stay in order.

use std::{
    net::UdpSocket,
    sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    task::Waker,
};

use crate::program::DeferredSocket;
use parking_lot::Mutex;

/// Number of reads in a row that find no packet, after which packets that are counted as waiting are considered
/// dropped.
const PATIENCE: u8 = 3;

/// The deferred socket of an endpoint (the socket for packets that need not wake this process), and the task that reads
/// it.
pub(super) struct Deferred {
    pub handle: DeferredSocket,
    socket: UdpSocket,
    /// Number of packets that were dropped because the deferred socket's buffer was full.
    dropped: AtomicU64,
    /// Number of publishers' packets that had been steered to the deferred socket in total when this process last went
    /// to sleep.
    media: AtomicU64,
    // Number of reads in a row that found no packet in the deferred socket.
    vain: AtomicU8,
    reader: Mutex<Option<Waker>>,
    /// True while the timer (ticker) that wakes the socket's reader is paused. Every packet wakes this process then.
    resting: AtomicBool,
    ticker: Box<dyn Fn() + Send + Sync>,
}

impl Deferred {
    /// Makes the deferred socket of an endpoint. `ticker` resumes the timer that periodically wakes the socket's
    /// reader.
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

    /// Returns how many packets were steered to the deferred socket and did not wake this process.
    pub fn packets(&self) -> u64 {
        self.handle.packets()
    }

    /// Returns how many deferred packets were dropped because the deferred socket's buffer was full.
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }

    /// Returns how many packets wait in the deferred socket.
    pub fn waiting(&self) -> u64 {
        self.packets().saturating_sub(self.handle.taken())
    }

    /// Makes every packet wake this process from now on. Called before packets are read. Returns the argument for
    /// [`Deferred::sleep`].
    pub fn wake(&self) -> u64 {
        self.handle.wake()
    }

    /// Lets the kernel steer packets to the deferred socket again, after the main socket was read until it was empty.
    /// `others` is the value that [`Deferred::wake`] returned.
    pub fn sleep(&self, others: u64) {
        self.media.store(self.handle.media(), Ordering::Relaxed);
        self.handle.sleep(others);
        // Packets may be deferred again, so the ticker (the timer that wakes the socket's reader) has to run. If `rest`
        // runs at the same time, either this code sees the flag `resting`, or every packet still wakes this process.
        if self.resting.load(Ordering::SeqCst) && self.resting.swap(false, Ordering::SeqCst) {
            (self.ticker)();
        }
    }

    /// Pauses the ticker, the timer that wakes the socket's reader. From now on every packet wakes this process, and
    /// the next packet resumes the ticker.
    pub fn rest(&self) {
        self.resting.store(true, Ordering::SeqCst);
        self.handle.wake();
    }

    /// Counts packets that were read from the deferred socket.
    pub fn on_read(&self, packets: u64) {
        self.handle.take(packets);
        self.vain.store(0, Ordering::Relaxed);
    }

    /// Records that a read found the deferred socket empty. Packets that are counted as waiting may be just arriving,
    /// or were dropped because the buffer was full.
    pub fn on_nothing(&self) {
        let missing = self.waiting();
        if self.vain.fetch_add(1, Ordering::Relaxed) >= PATIENCE {
            self.handle.take(missing);
            self.dropped.fetch_add(missing, Ordering::Relaxed);
            self.vain.store(0, Ordering::Relaxed);
        }
    }

    /// Sets the task that [`Deferred::tick`] wakes when packets wait in the deferred socket.
    pub fn set_reader(&self, waker: &Waker) {
        let mut reader = self.reader.lock();
        if !reader.as_ref().is_some_and(|reader| reader.will_wake(waker)) {
            *reader = Some(waker.clone());
        }
    }

    /// Wakes the reader if packets wait in the deferred socket. Returns how many packets of publishers were deferred
    /// since this process went to sleep, or `None` if no packet waits.
    pub fn tick(&self) -> Option<u64> {
        if self.waiting() == 0 {
            return None;
        }
        self.reader.lock().iter().for_each(Waker::wake_by_ref);
        Some(self.handle.media().saturating_sub(self.media.load(Ordering::Relaxed)))
    }
}
