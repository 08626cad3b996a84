//! Implements the transport's `Offload` for connections that have a record in the kernel.

use std::{
    any::Any,
    ops::Range,
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use millrace_kernel::crypto::QuicKeys;
use millrace_quic::{
    keys::{KeyMaterial, KeySuite, TrafficSecret},
    packet::ConnectionId,
    plane::downstream::{OffloadBudget, StreamKey},
    webtransport::Binding,
};
use millrace_transport::offload::{
    self, BeforeOffload, ConnectionStatus, DatagramCopy, Declined, Delegation, KeystreamCounts, Offload,
    OffloadOrigin, OffloadPath, OffloadSentPacket, OffloadedFrame, OpeningRequest, OpeningTerms, StreamCopy,
};

use super::{
    connection::{Binds, KernelConnection},
    ingress::{KernelEgress, KernelIngress, ours},
    openings::KernelOpenings,
};
use crate::program::{self as bpf, EgressOutcome, Forwarded, Lookup};

impl Offload for KernelConnection {
    fn numbers(&self) -> &AtomicU64 {
        self.downstream.number()
    }

    fn release(self: Arc<Self>) {
        self.is_released.store(true, Ordering::Relaxed);
        // The connection's entry in the kernel's tables becomes free once no run of the BPF program can use it any
        // more.
        let kernel = Arc::clone(&self.kernel);
        kernel.commands.release(self);
    }

    fn is_active(&self) -> bool {
        self.kernel.is_attached()
    }

    fn set_session(&self, session: u32) {
        self.downstream.set_session(session);
        self.upstream().into_iter().for_each(|upstream| upstream.set_session(session));
    }

    fn set_binding(&self, binding: Binding) {
        let _ = self.binding.set(binding); // Later calls change nothing.
        self.downstream.set_web(self.web_session());
    }

    fn set_seal_keys(self: Arc<Self>, generation: u16, secret: &TrafficSecret, header: &[u8; 32]) {
        let keys = quic_keys(secret, header);
        self.seal.set_keys(generation, secret);
        let kernel = Arc::clone(&self.kernel);
        kernel.commands.set_keys(self, generation, keys);
    }

    fn on_key_update(&self) {
        // Precomputed keystreams belong to the old keys, so new ones are needed now.
        self.kernel.computer.wake();
    }

    fn set_open_keys(self: Arc<Self>, generation: u16, secret: &TrafficSecret, header: &[u8; 32]) {
        let Some(_) = self.upstream() else { return };
        let keys = quic_keys(secret, header);
        self.open.set_keys(generation, secret);
        let kernel = Arc::clone(&self.kernel);
        kernel.commands.set_open_keys(self, generation, keys);
    }

    fn on_open_generation(&self, generation: u16) {
        self.open.set_generation(generation);
        self.kernel.computer.wake();
    }

    fn add_id(self: Arc<Self>, id: &ConnectionId) {
        let kernel = Arc::clone(&self.kernel);
        kernel.commands.set_id(self, *id, true);
    }

    fn remove_id(self: Arc<Self>, id: &ConnectionId) {
        let kernel = Arc::clone(&self.kernel);
        kernel.commands.set_id(self, *id, false);
    }

    fn set_path(self: Arc<Self>, path: OffloadPath) {
        let kernel = Arc::clone(&self.kernel);
        kernel.commands.set_path(self, path);
    }

    fn set_mtu(&self, bytes: u32) {
        self.downstream.set_mtu(bytes);
    }

    fn set_max_datagram(&self, bytes: u32) {
        self.downstream.set_max_datagram(bytes);
    }

    fn grant(&self, total: OffloadBudget) -> OffloadBudget {
        let data = self.downstream.set_max_data(total.data);
        let bytes = self.downstream.set_max_bytes(total.bytes);
        OffloadBudget { bytes, data }
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
        // A deferred packet arrived some time before it was read: it did not wake userspace.
        let arrived = self.kernel.relay.arrival(end);
        arrived.and_then(|at| self.kernel.clock.before(now, at)).unwrap_or(now)
    }

    fn on_received(&self, number: u64) -> bool {
        self.upstream().is_none_or(|upstream| upstream.observe(number))
    }

    fn leave(&self, stream: u64, bytes: &Range<u64>, fin: bool) {
        if let Some(upstream) = self.upstream() {
            upstream.leave(stream, bytes, fin);
        }
    }

    fn has_ingress(&self) -> bool {
        self.upstream().is_some()
    }

    fn ingress(
        self: Arc<Self>,
        origin: OffloadOrigin,
        seen: BeforeOffload,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<dyn offload::OffloadIngress>> {
        let upstream = self.open_from(&seen);
        let explain = |error: &_| {
            self.kernel.room.explain(error, "userspace decrypts the packets of a publisher's stream")
        };
        let upstream = upstream.inspect_err(explain).ok()?;
        let slot = match origin {
            OffloadOrigin::Stream(id) => upstream.slot(id),
            OffloadOrigin::Datagrams(alias) => upstream.datagrams(alias),
        };
        Some(KernelIngress::new(self, slot, held))
    }

    fn openings(
        self: Arc<Self>,
        alias: u64,
        last: (u64, u64),
        seen: BeforeOffload,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Option<Arc<dyn offload::OffloadOpenings>> {
        let made = KernelOpenings::new(Arc::clone(&self), alias, last, seen, held);
        let explain =
            |error: &_| self.kernel.room.explain(error, "userspace opens a track's streams to a subscriber");
        let made = made.inspect_err(explain).ok()?;
        let mut openings = self.openings.lock();
        openings.retain(|one| one.strong_count() > 0);
        openings.push(Arc::downgrade(&made) as Weak<dyn Binds>);
        Some(made)
    }

    fn accept(&self, stream: u64) -> Option<Arc<dyn offload::OffloadIngress>> {
        // If userspace claims the stream first, the program does not open subscribers' streams for it. If the claim
        // fails, the program has claimed the stream already.
        if self.upstream()?.take_stream(stream) {
            return None;
        }
        let openings: Vec<_> = self.openings.lock().iter().filter_map(Weak::upgrade).collect();
        openings.iter().find_map(|openings| openings.take_bound(stream))
    }

    fn set_stream_bits(&self, bits: u32) {
        self.downstream.set_stream_bits(bits);
    }

    fn set_streams(&self, next: u64, limit: u64) -> u64 {
        self.downstream.set_streams(next, limit)
    }

    fn prepare(
        self: Arc<Self>,
        ingress: &Arc<dyn offload::OffloadIngress>,
        request: &OpeningRequest,
    ) -> Result<Box<dyn Delegation>, Declined> {
        let ingress = ours(ingress)?;
        let OpeningRequest { tag, max_offset, terms } = *request;
        let OpeningTerms { alias, first, last_group, level, track, .. } = terms;
        let egress = bpf::OpeningRecord { alias, first, last_group, max_offset, level, tag, track };
        let added = ingress.slot.lock().add_opened(&self.downstream, &egress);
        let delegation = KernelEgress::delegation(Arc::clone(&self), &ingress, false, added)?;
        ingress.unknown.fetch_add(1, Ordering::Relaxed);
        ingress.prepared.lock().push((Arc::downgrade(&self), tag));
        Ok(delegation)
    }

    fn delegate(
        self: Arc<Self>,
        ingress: &Arc<dyn offload::OffloadIngress>,
        stream: &StreamCopy,
    ) -> Result<Box<dyn Delegation>, Declined> {
        let ingress = ours(ingress)?;
        let StreamCopy { key, id, shift, from, max_offset, level, track, group } = *stream;
        let egress =
            bpf::EgressRecord { stream_id: id, shift, from, max_offset, tag: key.0, level, track, group };
        let added = ingress.slot.lock().add(&self.downstream, &egress);
        KernelEgress::delegation(self, &ingress, true, added)
    }

    fn delegate_datagrams(
        self: Arc<Self>,
        ingress: &Arc<dyn offload::OffloadIngress>,
        datagrams: &DatagramCopy,
    ) -> Result<Box<dyn Delegation>, Declined> {
        let ingress = ours(ingress)?;
        let added = ingress.slot.lock().add_datagrams(&self.downstream, datagrams);
        KernelEgress::delegation(self, &ingress, true, added)
    }

    fn recall(self: Arc<Self>, key: StreamKey, delegation: Option<Box<dyn Delegation>>) {
        // The stream's flow control limit is set to 0 first, so only program runs that have already checked the old
        // limit may still send.
        if let Some(delegation) = &delegation {
            delegation.set_max_offset(0);
        }
        let kernel = Arc::clone(&self.kernel);
        kernel.commands.recall(self, key, delegation);
    }

    fn drain(&self, now: Instant, read: &mut dyn FnMut(Instant, OffloadSentPacket)) {
        // Another connection's thread may have moved reports about this connection's sent packets from the ring to its
        // inbox. So the inbox is checked even if the ring was empty.
        self.kernel.sort();
        if self.waiting.swap(false, Ordering::SeqCst) {
            let forwarded = std::mem::take(&mut *self.inbox.lock());
            forwarded.iter().for_each(|one| read(self.kernel.clock.instant(one.time_ns).min(now), sent(one)));
        }
    }

    fn short_of_room(&self) -> u64 {
        let outcomes = [
            EgressOutcome::Window,
            EgressOutcome::DataCredit,
            EgressOutcome::StreamCredit,
            EgressOutcome::StreamLimit,
        ];
        outcomes.map(|outcome| self.downstream.outcome(outcome)).iter().sum()
    }

    fn status(&self) -> ConnectionStatus {
        let copies: Vec<_> =
            EgressOutcome::ALL.into_iter().map(|one| (one.name(), self.downstream.outcome(one))).collect();
        let sent = [EgressOutcome::Sent, EgressOutcome::Lost].map(|one| self.downstream.outcome(one));
        let opened = |lookup| self.upstream().map_or(0, |upstream| upstream.lookups(lookup));
        ConnectionStatus {
            standing: None,
            is_ready: self.upstream().is_none_or(|upstream| upstream.is_open()),
            copies,
            sent: sent.iter().sum(),
            deferred: self.downstream.deferred_packets(),
            keystreams: [keystream_use(|lookup| self.downstream.lookups(lookup)), keystream_use(opened)],
        }
    }
}

fn sent(one: &Forwarded) -> OffloadSentPacket {
    let carried = match one.object {
        Some(object) => OffloadedFrame::Datagram { group: one.offset, object },
        None => OffloadedFrame::Stream {
            id: one.id,
            offset: one.offset,
            len: one.len,
            fin: one.fin,
            credit: one.credit,
        },
    };
    OffloadSentPacket { tag: one.tag, number: one.number, size: one.size, carried }
}

fn keystream_use(count: impl Fn(Lookup) -> u64) -> KeystreamCounts {
    KeystreamCounts { hit: count(Lookup::Hit), stale: count(Lookup::Stale), miss: count(Lookup::Miss) }
}

/// Returns keys in the form that the BPF program uses.
fn quic_keys(secret: &TrafficSecret, header: &[u8; 32]) -> QuicKeys {
    let KeyMaterial { key, iv, .. } = secret.key_material();
    match secret.suite() {
        KeySuite::ChaCha20Poly1305 => QuicKeys::chacha20_poly1305(&key, &iv, header),
        KeySuite::Aes128Gcm => {
            // A key of AES-128 has 16 bytes, and is padded to 32.
            let [key, header] = [&key, header].map(|padded| std::array::from_fn(|at| padded[at]));
            QuicKeys::aes128_gcm(&key, &iv, &header)
        }
        KeySuite::Aes256Gcm => QuicKeys::aes256_gcm(&key, &iv, header),
    }
}
