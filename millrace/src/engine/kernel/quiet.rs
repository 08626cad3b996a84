//! Packets that need not wake this process: everything in them was forwarded, and nobody else waits for it. They are
//! led to a socket of their own. That is read on the engine's tick, and before the other one when packets of the same
//! connections came there, so that they keep their order.

use std::{
    net::UdpSocket,
    sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering},
    task::Waker,
};

use millrace_bpf::relay::QuietSocket;
use parking_lot::Mutex;

/// Looks in vain after which a packet is not expected any more.
const PATIENCE: u8 = 3;

/// A quiet socket, and who reads it.
pub struct Quiet {
    pub(super) handle: QuietSocket,
    socket: UdpSocket,
    /// Packets that were read, or given up.
    taken: AtomicU64,
    vain: AtomicU8,
    /// Those that came by the other socket, the last time that this one was read.
    others: AtomicU64,
    /// It is time to read.
    due: AtomicBool,
    reader: Mutex<Option<Waker>>,
}

impl Quiet {
    pub(super) fn new(handle: QuietSocket, socket: UdpSocket) -> Self {
        Self {
            handle,
            socket,
            taken: AtomicU64::new(0),
            vain: AtomicU8::new(0),
            others: AtomicU64::new(0),
            due: AtomicBool::new(false),
            reader: Mutex::default(),
        }
    }

    pub fn socket(&self) -> &UdpSocket {
        &self.socket
    }

    /// Packets that did not wake this process.
    pub fn packets(&self) -> u64 {
        self.handle.packets()
    }

    fn is_waiting(&self) -> bool {
        self.packets() > self.taken.load(Ordering::Relaxed)
    }

    /// Whether the socket should be read now. To be asked again after it was, until it says no.
    pub fn is_due(&self) -> bool {
        let others = self.handle.others();
        let came = self.others.swap(others, Ordering::Relaxed) != others;
        let due = (self.due.swap(false, Ordering::AcqRel) || came) && self.is_waiting();
        if due {
            self.due.store(true, Ordering::Release);
        }
        due
    }

    /// So many packets were read. Any that were not led there, but sent by somebody on this host, count as well; so
    /// the total is kept from going beyond what will be expected.
    pub fn on_read(&self, packets: u64) {
        self.taken.fetch_add(packets, Ordering::Relaxed);
        self.taken.fetch_min(self.packets(), Ordering::Relaxed);
        self.vain.store(0, Ordering::Relaxed);
    }

    /// There was nothing to read: what is counted is about to come, or was dropped for want of room.
    pub fn on_nothing(&self) {
        self.due.store(false, Ordering::Release);
        let counted = self.packets();
        if self.vain.fetch_add(1, Ordering::Relaxed) >= PATIENCE {
            self.taken.fetch_max(counted, Ordering::Relaxed);
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

    /// Has the reader look if there is something; returns whether there was.
    pub(super) fn tick(&self) -> bool {
        let waiting = self.is_waiting();
        if waiting {
            self.due.store(true, Ordering::Release);
            self.reader.lock().iter().for_each(Waker::wake_by_ref);
        }
        waiting
    }
}
