//! Connections for which the kernel forwards media. Each needs an entry (record) in the BPF program's maps, and may
//! have to wait for one.

use std::{
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Instant,
};

use millrace_quic::webtransport::Binding;

use crate::program::{self as bpf, Forwarded};
use millrace_transport::offload::{
    BeforeOffload, OffloadClaim, OffloadIngress, OffloadOwner, OffloadStanding, Worth,
};
use parking_lot::Mutex;

use super::{
    Claimant, RelayKernel, deferred::Deferred, keystream::KeystreamAhead, queue::ConnectionCommands,
};

/// A connection's claim to a record in the kernel's tables, with which the kernel forwards the connection's media.
pub(super) struct Claimed {
    kernel: Arc<RelayKernel>,
    number: u64,
}

impl Claimed {
    pub fn new(kernel: Arc<RelayKernel>, claimant: Claimant) -> Self {
        let number = kernel.records.enter(claimant, Instant::now());
        Self { kernel, number }
    }
}

impl OffloadClaim for Claimed {
    fn set_worth(&self, worth: Worth) {
        self.kernel.claims_changed(self.kernel.records.set_worth(self.number, worth, Instant::now()));
    }

    fn end(&self) {
        self.kernel.claims_changed(self.kernel.records.end(self.number));
    }

    fn standing(&self) -> OffloadStanding {
        self.kernel.records.standing(self.number)
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        self.kernel.claims_changed(self.kernel.records.leave(self.number));
    }
}

/// A record in the kernel's tables that was granted to a connection's claim. The record counts as in use until this
/// value is dropped.
struct Granted {
    kernel: Arc<RelayKernel>,
    claim: u64,
}

impl Drop for Granted {
    fn drop(&mut self) {
        self.kernel.claims_changed(self.kernel.records.returned(self.claim));
    }
}

/// A connection with an entry (record) in the BPF program's maps: the kernel may send on the connection, and decrypt
/// its packets.
///
/// It lives from the assignment of the record until the transport has been informed that the record is free. `upstream`
/// is set at most once, when the first stream of the peer may be forwarded. `is_released` is set at most once: from
/// then on the connection gets no record. The engine's thread waits until running BPF programs have ended, and then
/// informs the connection's owner. `inbox` contains reports about sent packets that another thread has read from the
/// ring buffer for this connection. `waiting` is set after each push and cleared before each drain, so a drain may find
/// no report, but misses none. After setting `waiting`, the push lists the connection in [`RelayKernel::waiting`].
pub(super) struct KernelConnection {
    pub downstream: bpf::DownstreamRecord,
    /// The record in the kernel's tables for received media. It is set when the first stream of the peer may be
    /// forwarded.
    pub upstream: OnceLock<bpf::UpstreamRecord>,
    // The grant of the record in the kernel's tables. It is dropped after the records for received and for sent media,
    // so that the engine grants the record again only when both are gone.
    _granted: Granted,
    /// The endpoint's socket for packets that need not wake this process, if the endpoint has one.
    pub deferred: Option<Arc<Deferred>>,
    pub seal: KeystreamAhead,
    pub open: KeystreamAhead,
    pub kernel: Arc<RelayKernel>,
    owner: Weak<dyn OffloadOwner>,
    /// The WebTransport session to which the connection's streams and datagrams belong. Unset without WebTransport.
    pub binding: OnceLock<Binding>,
    /// The openings of each track that the peer publishes: entries in the kernel's tables that are prepared for streams
    /// that have not begun.
    pub openings: Mutex<Vec<Weak<dyn Binds>>>,
    /// The connection's commands to the engine's thread.
    pub place: ConnectionCommands,
    /// True from when the connection begins to return its record in the kernel's tables to the engine.
    pub is_released: AtomicBool,
    pub inbox: Mutex<Vec<Forwarded>>,
    /// True while `inbox` may contain the kernel's reports about sent packets.
    pub waiting: AtomicBool,
    /// Whether [`RelayKernel::waiting`] lists this connection, because its inbox may contain reports.
    pub is_listed: AtomicBool,
    /// Whether [`RelayKernel::kept`] lists this connection, so that the keystream thread keeps its keystream rings
    /// filled.
    pub is_kept: AtomicBool,
}

/// A track's ingresses (entries for forwarded streams) that userspace has prepared for streams that have not begun. The
/// BPF program binds each to a new stream of the peer.
pub(super) trait Binds: Send + Sync {
    /// Returns the entry (ingress) by which the BPF program forwards this stream, if the program has bound one to it.
    fn take_bound(&self, stream: u64) -> Option<Arc<dyn OffloadIngress>>;
}

impl KernelConnection {
    pub fn new(
        kernel: Arc<RelayKernel>,
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
            seal: KeystreamAhead::default(),
            open: KeystreamAhead::default(),
            kernel,
            owner,
            binding: OnceLock::new(),
            openings: Mutex::default(),
            place: ConnectionCommands::default(),
            is_released: AtomicBool::new(false),
            inbox: Mutex::default(),
            waiting: AtomicBool::new(false),
            is_listed: AtomicBool::new(false),
            is_kept: AtomicBool::new(false),
        }
    }

    pub fn owner(&self) -> Option<Arc<dyn OffloadOwner>> {
        self.owner.upgrade()
    }

    /// Returns the connection's entry in the kernel's table of publishers' connections, if media arrives on it.
    pub fn upstream(&self) -> Option<&bpf::UpstreamRecord> {
        self.upstream.get()
    }

    /// Makes the kernel decrypt the connection's packets. `seen` contains the packets and streams that userspace has
    /// seen before, which the kernel must not treat as new.
    pub fn open_from(&self, seen: &BeforeOffload) -> Result<&bpf::UpstreamRecord, millrace_kernel::Error> {
        if self.upstream.get().is_none() {
            let upstream = self.kernel.relay.upstream_from(seen.packets, seen.streams)?;
            seen.begun.iter().for_each(|id| upstream.note_begun(*id));
            upstream.set_web(self.web_session());
            self.deferred.iter().for_each(|deferred| upstream.set_deferred_socket(&deferred.handle));
            let _ = self.upstream.set(upstream); // `set` fails if another thread has set `upstream` already.
        }
        self.upstream().ok_or(millrace_kernel::Error::Full { what: "upstreams" })
    }

    /// Returns the ID of the WebTransport session that the connection's streams and datagrams belong to.
    pub fn web_session(&self) -> Option<u64> {
        match self.binding.get() {
            Some(Binding::Session(id)) => Some(*id),
            Some(Binding::Bare) | None => None,
        }
    }

    /// Adds a report about a packet that the kernel has sent to the inbox, which [`Offload::drain`] empties.
    pub fn put(self: &Arc<Self>, forwarded: Forwarded) {
        self.inbox.lock().push(forwarded);
        self.waiting.store(true, Ordering::SeqCst);
        self.kernel.waiting.add(self, &self.is_listed);
    }
}
