//! Implements the transport's traits for media that the kernel forwards. An ingress is a publisher's stream or a
//! track's datagrams. An egress is one subscriber's copy of an ingress.

use std::{
    any::Any,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use millrace_moq::data::Position;

use crate::program::{self as bpf, EgressKey, SlotRecord};
use millrace_transport::offload::{self, Declined, Delegation, OpeningSide};
use parking_lot::Mutex;

use super::connection::KernelConnection;

/// A stream of the peer, or a track's datagrams, that the kernel forwards to subscribers.
pub(super) struct KernelIngress {
    // Fields are dropped in order. `slot` (the stream's entry in the kernel's tables) has to be dropped before
    // `connection`, which owns the publisher's entry.
    pub slot: Mutex<SlotRecord>,
    exclusive: AtomicBool,
    serial: u64,
    /// The subscribers' connections on which the kernel may open a stream to forward this publisher's stream. Each
    /// comes with the number (tag) of the subscription on that connection.
    pub prepared: Mutex<Vec<(Weak<KernelConnection>, u64)>>,
    /// Number of entries of `prepared` whose stream userspace does not know yet, so that it cannot retransmit the
    /// stream's data. `on_adopted` lowers the number.
    pub unknown: AtomicUsize,
    connection: Arc<KernelConnection>,
    _held: Arc<dyn Any + Send + Sync>,
}

impl KernelIngress {
    pub fn new(
        connection: Arc<KernelConnection>,
        slot: SlotRecord,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Arc::new(Self {
            slot: Mutex::new(slot),
            exclusive: AtomicBool::new(false),
            serial: NEXT.fetch_add(1, Ordering::Relaxed),
            prepared: Mutex::default(),
            unknown: AtomicUsize::new(0),
            connection,
            _held: held,
        })
    }
}

impl Drop for KernelIngress {
    fn drop(&mut self) {
        let prepared = std::mem::take(self.prepared.get_mut());
        if *self.unknown.get_mut() > 0 {
            self.connection.kernel.forget_prepared(prepared);
        }
    }
}

/// One subscriber's copy of a forwarded stream, or of a track's datagrams.
pub(super) struct KernelEgress {
    ingress: Weak<KernelIngress>,
    key: EgressKey,
    from: Arc<KernelConnection>,
    to: Arc<KernelConnection>,
    /// True once the copy has a stream to the subscriber.
    opened: AtomicBool,
}

impl KernelEgress {
    /// Wraps an egress (one subscriber's copy) that was added for an ingress. If the egress could not be added, returns
    /// the reason.
    pub fn delegation(
        to: Arc<KernelConnection>,
        ingress: &Arc<KernelIngress>,
        opened: bool,
        added: Result<EgressKey, millrace_kernel::Error>,
    ) -> Result<Box<dyn Delegation>, Declined> {
        let key = match added {
            Ok(key) => key,
            Err(error) => {
                if matches!(error, millrace_kernel::Error::Unsettled { .. }) {
                    to.kernel.settle();
                }
                to.kernel.room.explain(&error, "userspace sends a stream to a subscriber");
                return Err(Declined(error.to_string()));
            }
        };
        let count = if opened { &to.kernel.streams } else { &to.kernel.prepared };
        if count.fetch_add(1, Ordering::Relaxed) == 0 {
            to.kernel.ticker.wake();
        }
        let sends = to.seal.add_stream();
        let opens = ingress.connection.open.add_stream();
        for connection in [sends.then_some(&to), opens.then_some(&ingress.connection)].into_iter().flatten() {
            connection.kernel.kept.add(connection, &connection.is_kept);
            connection.kernel.computer.wake();
        }
        let from = Arc::clone(&ingress.connection);
        let opened = AtomicBool::new(opened);
        Ok(Box::new(KernelEgress { ingress: Arc::downgrade(ingress), key, from, to, opened }))
    }
}

impl offload::OffloadResult for KernelIngress {
    fn is_over(&self) -> bool {
        self.connection.is_released.load(Ordering::Relaxed)
    }
}

impl offload::OffloadIngress for KernelIngress {
    fn advance(&self, position: &Position) {
        self.slot.lock().advance(position);
    }

    fn is_contradicted(&self) -> bool {
        self.slot.lock().is_contradicted()
    }

    fn set_exclusive(&self, exclusive: bool) {
        if self.exclusive.swap(exclusive, Ordering::Relaxed) != exclusive {
            self.slot.lock().set_exclusive(exclusive);
        }
    }

    fn serial(&self) -> u64 {
        self.serial
    }

    fn claim_object(&self, object: (u64, u64)) -> bool {
        self.slot.lock().claim_object(object)
    }

    fn skip_to(&self, largest: (u64, u64)) {
        self.slot.lock().skip_to(largest.0, largest.1);
    }

    fn on_adopted(&self) {
        self.unknown.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Delegation for KernelEgress {
    fn set_max_offset(&self, max: u64) {
        if let Some(ingress) = self.ingress.upgrade() {
            ingress.slot.lock().set_max_offset(self.key, max);
        }
    }

    fn is_of(&self, ingress: &Arc<dyn offload::OffloadIngress>) -> bool {
        std::ptr::addr_eq(self.ingress.as_ptr(), Arc::as_ptr(ingress))
    }

    fn close(&self) -> OpeningSide {
        let closed = self.ingress.upgrade().map(|ingress| ingress.slot.lock().close(self.key));
        match closed {
            Some(bpf::OpeningRecordSide::Program(id)) => OpeningSide::Offload(id),
            Some(bpf::OpeningRecordSide::Userspace) | None => OpeningSide::Userspace,
        }
    }

    fn on_opened(&self) {
        if !self.opened.swap(true, Ordering::Relaxed) {
            let kernel = &self.to.kernel;
            kernel.prepared.fetch_sub(1, Ordering::Relaxed);
            kernel.streams.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Drop for KernelEgress {
    fn drop(&mut self) {
        let kernel = &self.to.kernel;
        let count = if *self.opened.get_mut() { &kernel.streams } else { &kernel.prepared };
        count.fetch_sub(1, Ordering::Relaxed);
        self.to.seal.remove_stream();
        self.from.open.remove_stream();
        if let Some(ingress) = self.ingress.upgrade() {
            ingress.slot.lock().remove(self.key);
        }
    }
}

/// Casts the ingress to `KernelIngress`. Returns an error if another forwarding engine has made the ingress.
pub(super) fn ours(ingress: &Arc<dyn offload::OffloadIngress>) -> Result<Arc<KernelIngress>, Declined> {
    let ingress = Arc::clone(ingress) as Arc<dyn Any + Send + Sync>;
    ingress.downcast().map_err(|_| Declined("another engine's ingress".to_owned()))
}
