//! Connections as the kernel engine sees them, and what it forwards from one to others.

use std::{
    any::Any,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use millrace_bpf::{
    crypto::QuicKeys,
    relay::{self as bpf, EgressKey, EgressOutcome, Forwarded, Lookup, Slot},
};
use millrace_proto::{
    moq::data::Position,
    plane::downstream::{Budget, StreamKey},
    quic::{
        keys::{Secret, Suite},
        packet::ConnectionId,
    },
};
use parking_lot::Mutex;
use tracing::debug;

use super::{Kernel, deferred::Deferred, keystream::Ahead};
use crate::offload::{
    self, Carried, ConnectionStatus, Datagrams, Declined, Delegation, KeystreamUse, Offload, Origin, Owner,
    Path, Sent, Stream,
};

/// A connection that the kernel may send on, and whose packets it may open.
pub(super) struct Connection {
    pub downstream: bpf::Downstream,
    /// Once a stream of the peer may be forwarded.
    upstream: OnceLock<bpf::Upstream>,
    /// Of the connection's endpoint.
    deferred: Option<Arc<Deferred>>,
    pub seal: Ahead,
    pub open: Ahead,
    kernel: Arc<Kernel>,
    owner: OnceLock<Weak<dyn Owner>>,
    inbox: Mutex<Vec<Forwarded>>,
    /// The inbox is not empty.
    waiting: AtomicBool,
}

/// A slot of an upstream connection.
struct Ingress {
    // Before the connection, whose place in the kernel it names.
    slot: Mutex<Slot>,
    exclusive: AtomicBool,
    connection: Arc<Connection>,
    _held: Arc<dyn Any + Send + Sync>,
}

/// An entry of a slot.
struct Egress {
    ingress: Weak<Ingress>,
    key: EgressKey,
    from: Arc<Connection>,
    to: Arc<Connection>,
}

impl Connection {
    pub fn new(kernel: Arc<Kernel>, downstream: bpf::Downstream, deferred: Option<Arc<Deferred>>) -> Self {
        deferred.iter().for_each(|deferred| downstream.set_deferred_socket(&deferred.handle));
        Self {
            downstream,
            upstream: OnceLock::new(),
            deferred,
            seal: Ahead::default(),
            open: Ahead::default(),
            kernel,
            owner: OnceLock::new(),
            inbox: Mutex::default(),
            waiting: AtomicBool::new(false),
        }
    }

    pub fn owner(&self) -> Option<Arc<dyn Owner>> {
        self.owner.get()?.upgrade()
    }

    /// The connection as one that media arrives on, if it is.
    pub fn upstream(&self) -> Option<&bpf::Upstream> {
        self.upstream.get()
    }

    /// Makes the kernel open the connection's packets, those from number `expected` on.
    fn open_from(&self, expected: u64) -> Result<&bpf::Upstream, millrace_bpf::Error> {
        if self.upstream.get().is_none() {
            let upstream = self.kernel.relay.upstream(expected)?;
            self.deferred.iter().for_each(|deferred| upstream.set_deferred_socket(&deferred.handle));
            self.downstream.remove_ids();
            let _ = self.upstream.set(upstream); // another was faster
        }
        self.upstream().ok_or(millrace_bpf::Error::Full { what: "upstreams" })
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

    fn delegated(
        self: Arc<Self>,
        ingress: &Arc<Ingress>,
        added: Result<EgressKey, millrace_bpf::Error>,
    ) -> Result<Box<dyn Delegation>, Declined> {
        let key = match added {
            Ok(key) => key,
            Err(error) => {
                if matches!(error, millrace_bpf::Error::Unsettled { .. }) {
                    self.kernel.wake();
                }
                return Err(Declined(error.to_string()));
            }
        };
        if self.kernel.streams.fetch_add(1, Ordering::Relaxed) == 0 {
            self.kernel.wake();
        }
        if self.seal.add_stream() | ingress.connection.open.add_stream() {
            self.kernel.computer.wake();
        }
        let from = Arc::clone(&ingress.connection);
        Ok(Box::new(Egress { ingress: Arc::downgrade(ingress), key, from, to: self }))
    }
}

impl Offload for Connection {
    fn numbers(&self) -> &AtomicU64 {
        self.downstream.number()
    }

    fn set_owner(&self, owner: Weak<dyn Owner>) {
        let _ = self.owner.set(owner); // there is one already
    }

    fn is_active(&self) -> bool {
        self.kernel.is_attached()
    }

    fn set_session(&self, session: u32) {
        self.downstream.set_session(session);
        self.upstream().into_iter().for_each(|upstream| upstream.set_session(session));
    }

    fn supports(&self, suite: Suite) -> bool {
        suite != Suite::Aes256Gcm
    }

    fn set_seal_keys(self: Arc<Self>, generation: u16, secret: &Secret, header: &[u8; 32]) {
        let Some(keys) = quic_keys(secret, header) else { return };
        self.seal.set_keys(generation, secret);
        let kernel = Arc::clone(&self.kernel);
        kernel.install_keys(self, generation, keys);
    }

    fn on_key_update(&self) {
        // What was computed ahead is stale.
        self.kernel.computer.wake();
    }

    fn set_open_keys(&self, generation: u16, secret: &Secret, header: &[u8; 32]) {
        let (Some(upstream), Some(keys)) = (self.upstream(), quic_keys(secret, header)) else { return };
        self.open.set_keys(generation, secret);
        if let Err(error) = upstream.set_keys(generation, &keys) {
            debug!(%error, "the kernel has no keys to open packets with");
        }
    }

    fn on_open_generation(&self, generation: u16) {
        self.open.set_generation(generation);
        self.kernel.computer.wake();
    }

    fn add_id(&self, id: &ConnectionId) {
        let added = match self.upstream() {
            Some(upstream) => upstream.add_id(id),
            None => self.downstream.add_id(id),
        };
        if let Err(error) = added {
            debug!(%error, "the kernel does not know a connection ID");
        }
    }

    fn remove_id(&self, id: &ConnectionId) {
        let removed = match self.upstream() {
            Some(upstream) => upstream.remove_id(id),
            None => self.downstream.remove_id(id),
        };
        if let Err(error) = removed {
            debug!(%error, "the kernel still knows a connection ID");
        }
    }

    fn set_path(self: Arc<Self>, path: Path) {
        let kernel = Arc::clone(&self.kernel);
        kernel.change_path(self, path);
    }

    fn set_mtu(&self, bytes: u32) {
        self.downstream.set_mtu(bytes);
    }

    fn set_max_datagram(&self, bytes: u32) {
        self.downstream.set_max_datagram(bytes);
    }

    fn grant(&self, total: Budget) -> Budget {
        let data = self.downstream.set_max_data(total.data);
        let bytes = self.downstream.set_max_bytes(total.bytes);
        Budget { bytes, data }
    }

    fn stop(&self) {
        self.downstream.set_max_bytes(0);
    }

    fn set_waiting(&self, level: Option<u16>) {
        self.downstream.set_waiting(level);
    }

    fn set_deferral(&self, bytes: u32, total: u64) {
        self.downstream.set_deferral(bytes, total);
    }

    fn read_deferred(&self) -> bool {
        self.deferred.as_ref().is_some_and(|deferred| deferred.tick().is_some())
    }

    fn arrival(&self, now: Instant, end: [u8; 8]) -> Instant {
        self.kernel.arrived(now, end)
    }

    fn on_received(&self, number: u64) {
        if let Some(upstream) = self.upstream() {
            upstream.observe(number);
        }
    }

    fn has_ingress(&self) -> bool {
        self.upstream().is_some()
    }

    fn ingress(
        self: Arc<Self>,
        origin: Origin,
        expected: u64,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<dyn offload::Ingress>> {
        let upstream = self.open_from(expected);
        let upstream =
            upstream.inspect_err(|error| debug!(%error, "packets are opened in userspace")).ok()?;
        let slot = match origin {
            Origin::Stream(id) => upstream.slot(id),
            Origin::Datagrams(alias) => upstream.datagrams(alias),
        };
        let exclusive = AtomicBool::new(false);
        Some(Arc::new(Ingress { slot: Mutex::new(slot), exclusive, connection: self, _held: held }))
    }

    fn delegate(
        self: Arc<Self>,
        ingress: &Arc<dyn offload::Ingress>,
        stream: &Stream,
    ) -> Result<Box<dyn Delegation>, Declined> {
        let ingress = ours(ingress)?;
        let Stream { key, id, shift, from, max_offset, level, track, group } = *stream;
        let egress = bpf::Egress { stream_id: id, shift, from, max_offset, tag: key.0, level, track, group };
        let added = ingress.slot.lock().add(&self.downstream, &egress);
        self.delegated(&ingress, added)
    }

    fn delegate_datagrams(
        self: Arc<Self>,
        ingress: &Arc<dyn offload::Ingress>,
        datagrams: &Datagrams,
    ) -> Result<Box<dyn Delegation>, Declined> {
        let ingress = ours(ingress)?;
        let Datagrams { tag, alias, first, last_group, level, track } = *datagrams;
        let egress = bpf::Datagrams { alias, first, last_group, tag, level, track };
        let added = ingress.slot.lock().add_datagrams(&self.downstream, &egress);
        self.delegated(&ingress, added)
    }

    fn recall(self: Arc<Self>, key: StreamKey, delegation: Option<Box<dyn Delegation>>) {
        // Nothing more is sent, save what is about to be this very moment.
        if let Some(delegation) = &delegation {
            delegation.set_max_offset(0);
        }
        let kernel = Arc::clone(&self.kernel);
        kernel.recall(self, key, delegation);
    }

    fn drain(&self, now: Instant, read: &mut dyn FnMut(Instant, Sent)) {
        self.kernel.sort();
        if self.waiting.swap(false, Ordering::AcqRel) {
            let forwarded = std::mem::take(&mut *self.inbox.lock());
            forwarded.iter().for_each(|one| read(self.kernel.clock.instant(one.time_ns).min(now), sent(one)));
        }
    }

    fn short_of_room(&self) -> u64 {
        let outcomes = [EgressOutcome::Window, EgressOutcome::DataCredit, EgressOutcome::StreamCredit];
        outcomes.map(|outcome| self.downstream.outcome(outcome)).iter().sum()
    }

    fn status(&self) -> ConnectionStatus {
        let copies: Vec<_> =
            EgressOutcome::ALL.into_iter().map(|one| (one.name(), self.downstream.outcome(one))).collect();
        let sent = [EgressOutcome::Sent, EgressOutcome::Lost].map(|one| self.downstream.outcome(one));
        let opened = |lookup| self.upstream().map_or(0, |upstream| upstream.lookups(lookup));
        ConnectionStatus {
            refused: None,
            copies,
            sent: sent.iter().sum(),
            deferred: self.downstream.deferred_packets(),
            keystreams: [keystream_use(|lookup| self.downstream.lookups(lookup)), keystream_use(opened)],
        }
    }
}

impl offload::Ingress for Ingress {
    fn advance(&self, position: &Position) {
        let Position { offset, field, value, missing, left, previous, with_properties, ended, kind } =
            *position;
        let field = field as u8;
        self.slot.lock().advance(&bpf::Position {
            offset,
            field,
            value,
            missing,
            left,
            previous,
            with_properties,
            ended,
            kind,
        });
    }

    fn set_exclusive(&self, exclusive: bool) {
        if self.exclusive.swap(exclusive, Ordering::Relaxed) != exclusive {
            self.slot.lock().set_exclusive(exclusive);
        }
    }
}

impl Delegation for Egress {
    fn set_max_offset(&self, max: u64) {
        if let Some(ingress) = self.ingress.upgrade() {
            ingress.slot.lock().set_max_offset(self.key, max);
        }
    }

    fn is_of(&self, ingress: &Arc<dyn offload::Ingress>) -> bool {
        std::ptr::addr_eq(self.ingress.as_ptr(), Arc::as_ptr(ingress))
    }
}

impl Drop for Egress {
    fn drop(&mut self) {
        self.to.kernel.streams.fetch_sub(1, Ordering::Relaxed);
        self.to.seal.remove_stream();
        self.from.open.remove_stream();
        if let Some(ingress) = self.ingress.upgrade() {
            ingress.slot.lock().remove(self.key);
        }
    }
}

fn ours(ingress: &Arc<dyn offload::Ingress>) -> Result<Arc<Ingress>, Declined> {
    let ingress = Arc::clone(ingress) as Arc<dyn Any + Send + Sync>;
    ingress.downcast().map_err(|_| Declined("another engine's ingress".to_owned()))
}

fn sent(one: &Forwarded) -> Sent {
    let carried = match one.object {
        Some(object) => Carried::Datagram { group: one.offset, object },
        None => Carried::Stream { offset: one.offset, len: one.len, fin: one.fin, credit: one.credit },
    };
    Sent { tag: one.tag, number: one.number, size: one.size, carried }
}

fn keystream_use(count: impl Fn(Lookup) -> u64) -> KeystreamUse {
    KeystreamUse { hit: count(Lookup::Hit), stale: count(Lookup::Stale), miss: count(Lookup::Miss) }
}

/// The kernel's form of a generation's keys; `None`: it does not have the suite.
fn quic_keys(secret: &Secret, header: &[u8; 32]) -> Option<QuicKeys> {
    let material = secret.key_material();
    match secret.suite() {
        Suite::ChaCha20Poly1305 => Some(QuicKeys::chacha20_poly1305(&material.key, &material.iv, header)),
        Suite::Aes128Gcm => {
            let (key, header) = (material.key.first_chunk()?, header.first_chunk()?);
            Some(QuicKeys::aes128_gcm(key, &material.iv, header))
        }
        Suite::Aes256Gcm => None,
    }
}
