//! Connections as the kernel engine sees them.

use std::{
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use millrace_quic::webtransport::Binding;

use crate::program::{self as bpf, Forwarded};
use millrace_transport::offload::{Claim, Ingress, Owner, Seen, Standing, Worth};
use parking_lot::Mutex;

use super::{Claimant, Kernel, deferred::Deferred, keystream::Ahead, queue::Place};

/// A connection's claim to a record.
pub(super) struct Claimed {
    kernel: Arc<Kernel>,
    number: u64,
}

impl Claimed {
    pub fn new(kernel: Arc<Kernel>, claimant: Claimant) -> Self {
        let number = kernel.records.enter(claimant, Instant::now());
        Self { kernel, number }
    }
}

impl Claim for Claimed {
    fn set_worth(&self, worth: Worth) {
        self.kernel.claims_changed(self.kernel.records.set_worth(self.number, worth, Instant::now()));
    }

    fn end(&self) {
        self.kernel.claims_changed(self.kernel.records.end(self.number));
    }

    fn standing(&self) -> Standing {
        self.kernel.records.standing(self.number)
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        self.kernel.claims_changed(self.kernel.records.leave(self.number));
    }
}

/// A record that was made for a claim; it counts as in use until this is dropped.
struct Granted {
    kernel: Arc<Kernel>,
    claim: u64,
}

impl Drop for Granted {
    fn drop(&mut self) {
        self.kernel.claims_changed(self.kernel.records.returned(self.claim));
    }
}

/// A connection that has a record: the kernel may send on it, and open its packets.
pub(super) struct KernelConnection {
    pub downstream: bpf::DownstreamRecord,
    /// Once a stream of the peer may be forwarded.
    pub upstream: OnceLock<bpf::UpstreamRecord>,
    // Behind both: when they are gone the record is free.
    _granted: Granted,
    /// Of the connection's endpoint.
    pub deferred: Option<Arc<Deferred>>,
    pub seal: Ahead,
    pub open: Ahead,
    pub kernel: Arc<Kernel>,
    owner: Weak<dyn Owner>,
    /// Of a connection that is not bare.
    pub binding: OnceLock<Binding>,
    /// Of tracks of the peer.
    pub openings: Mutex<Vec<Weak<dyn Binds>>>,
    /// Commands to the engine's thread.
    pub place: Place,
    /// Set once the record is to be given back.
    pub is_released: AtomicBool,
    pub inbox: Mutex<Vec<Forwarded>>,
    /// The inbox is not empty.
    pub waiting: AtomicBool,
}

/// What streams of the peer may be bound to.
pub(super) trait Binds: Send + Sync {
    /// What the program has bound to this stream.
    fn take_bound(&self, stream: u64) -> Option<Arc<dyn Ingress>>;
}

impl KernelConnection {
    pub fn new(
        kernel: Arc<Kernel>,
        downstream: bpf::DownstreamRecord,
        claim: u64,
        claimant: Claimant,
    ) -> Self {
        let Claimant { owner, deferred } = claimant;
        deferred.iter().for_each(|deferred| downstream.set_deferred_socket(&deferred.handle));
        Self {
            downstream,
            upstream: OnceLock::new(),
            _granted: Granted { kernel: Arc::clone(&kernel), claim },
            deferred,
            seal: Ahead::default(),
            open: Ahead::default(),
            kernel,
            owner,
            binding: OnceLock::new(),
            openings: Mutex::default(),
            place: Place::default(),
            is_released: AtomicBool::new(false),
            inbox: Mutex::default(),
            waiting: AtomicBool::new(false),
        }
    }

    pub fn owner(&self) -> Option<Arc<dyn Owner>> {
        self.owner.upgrade()
    }

    /// The connection as one that media arrives on, if it is.
    pub fn upstream(&self) -> Option<&bpf::UpstreamRecord> {
        self.upstream.get()
    }

    /// Makes the kernel open the connection's packets, those that nothing was seen of.
    pub fn open_from(&self, seen: &Seen) -> Result<&bpf::UpstreamRecord, millrace_kernel::Error> {
        if self.upstream.get().is_none() {
            let upstream = self.kernel.relay.upstream_from(seen.packets, seen.streams)?;
            seen.begun.iter().for_each(|id| upstream.note_begun(*id));
            upstream.set_web(self.web_session());
            self.deferred.iter().for_each(|deferred| upstream.set_deferred_socket(&deferred.handle));
            let _ = self.upstream.set(upstream); // another was faster
        }
        self.upstream().ok_or(millrace_kernel::Error::Full { what: "upstreams" })
    }

    /// Returns the WebTransport session that streams and datagrams lie in, in both directions.
    pub fn web_session(&self) -> Option<u64> {
        match self.binding.get() {
            Some(Binding::Session(id)) => Some(*id),
            Some(Binding::Bare) | None => None,
        }
    }

    /// Something was sent on the connection, which [`Offload::drain`] will give.
    pub fn put(&self, forwarded: Forwarded) {
        self.inbox.lock().push(forwarded);
        self.waiting.store(true, Ordering::Release);
    }

    /// Whether there is something to drain.
    pub fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Acquire)
    }
}
