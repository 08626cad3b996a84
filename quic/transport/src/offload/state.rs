//! A connection's state for its offload: the budget, the delegated streams, and the keys, path and other settings that
//! a kernel offload needs.
//!
//! The offload sends within a budget of flow control credit and congestion window, which is granted whenever the
//! connection's lock is released. Before the data plane sends, the budget is reclaimed, so offload and data plane
//! together stay within both limits.
//!
//! A connection has an offload only part of the time ([`Offloaded::take_offload`] to [`Offloaded::finish_release`]).
//! This module always keeps the connection's state that an offload needs.

use std::{
    any::Any,
    collections::{HashMap, VecDeque},
    net::SocketAddr,
    ops::{Range, RangeInclusive},
    sync::Arc,
    time::Instant,
};

use millrace_quic::{
    keys::TrafficSecret,
    packet::ConnectionId,
    plane::downstream::{Downstream, Label, OffloadBudget, OffloadedPacket, StreamKey},
    received::{ReceivedNumbers, ReceivedStreams},
    webtransport::Binding,
};
use quinn::VarInt;
use tracing::{debug, warn};

use super::{
    BeforeOffload, ConnectionStatus, DatagramCopy, Delegation, Offload, OffloadIngress, OffloadOpenings,
    OffloadOrigin, OffloadPath, OffloadSentPacket, OffloadedFrame, StreamCopy,
    deferral::Deferral,
    delivered::DeliveredDatagrams,
    openings::{self, DelegatedStream, OpeningBook},
    places::OffloadPlaces,
    trial::OffloadTrial,
};
use crate::{dscp::ECT0, path, windows::WindowShare};

/// Number of this endpoint's newest connection IDs that the kernel offload accepts. quinn issues this many at a time to
/// a peer.
const IDS: usize = 8;

/// The state of a connection towards offloads, behind the connection's lock.
///
/// The connection has no offload, has one, or is releasing it. [`Self::take_offload`], [`Self::release`] and
/// [`Self::finish_release`] change the state, in this order. During a release, nothing is granted or delegated.
pub(crate) struct Offloaded {
    offload: Option<Arc<dyn Offload>>,
    is_releasing: bool,
    /// The address of this endpoint's socket.
    local: SocketAddr,
    /// The network path that was last passed to a kernel offload.
    path: Option<OffloadPath>,
    /// True if `path` was passed to the present kernel offload.
    path_told: bool,
    /// True if the present kernel offload has reported that it sends on `path`.
    path_ready: bool,
    /// True if the kernel offload may be granted a budget: it uses the present path, and the data plane may send.
    is_ready: bool,
    /// The test whether the kernel offload's packets arrive at the peer on the present path.
    trial: OffloadTrial,
    failed_trials: u64,
    pub(super) places: OffloadPlaces,
    /// The header protection keys of both directions. All generations use the header keys of generation 0.
    seal_header: Option<[u8; 32]>,
    open: Option<OpenKeys>,
    /// This endpoint's connection IDs that the peer has used as destination, the most recently used last.
    ids: VecDeque<ConnectionId>,
    pub(super) delegations: HashMap<StreamKey, DelegatedStream>,
    pub(super) openings: OpeningBook,
    /// Delegations of tracks' datagrams, by the tag of the copy.
    datagrams: HashMap<u64, Box<dyn Delegation>>,
    /// Number of the peer's unidirectional streams that were accepted.
    accepted: u64,
    binding: Option<Binding>,
    stream_bits: u32,
    /// The largest DATAGRAM frame that the peer accepts, bytes.
    max_datagram: u32,
    /// Total bytes of congestion window and flow control credit that the reported packets of the present kernel offload
    /// have used.
    registered: OffloadBudget,
    /// Bytes of congestion window and flow control credit that the kernel offload may use in addition to those counted
    /// in `registered`.
    budget: OffloadBudget,
    session: u32,
    /// Packet and copy counters of the kernel offloads that the connection had before.
    past: ConnectionStatus,
    delivered: DeliveredDatagrams,
    deferral: Deferral,
    /// True if the loss timer was just postponed so that deferred acknowledgements are read first. The timer is not
    /// postponed twice in a row.
    waited: bool,
}

/// The keys for decrypting packets, of the newest generation that the peer has used.
struct OpenKeys {
    secret: TrafficSecret,
    header: [u8; 32],
    generation: u16,
}

impl Offloaded {
    pub fn new(local: SocketAddr) -> Self {
        Self {
            offload: None,
            is_releasing: false,
            local,
            path: None,
            path_told: false,
            path_ready: false,
            is_ready: false,
            trial: OffloadTrial::new(),
            failed_trials: 0,
            places: OffloadPlaces::default(),
            seal_header: None,
            open: None,
            ids: VecDeque::new(),
            delegations: HashMap::new(),
            openings: OpeningBook::default(),
            datagrams: HashMap::new(),
            accepted: 0,
            binding: None,
            stream_bits: 0,
            max_datagram: 0,
            registered: OffloadBudget::default(),
            budget: OffloadBudget::default(),
            session: 0,
            past: ConnectionStatus::default(),
            delivered: DeliveredDatagrams::default(),
            deferral: Deferral::default(),
            waited: false,
        }
    }

    /// Sets the number by which packet traces identify the MoQ session on this connection.
    pub fn set_session(&mut self, session: u32) {
        self.session = session;
        self.offload.iter().for_each(|offload| offload.set_session(session));
    }

    /// Sets the low bits of the IDs of this endpoint's unidirectional streams, and the largest DATAGRAM frame that the
    /// peer accepts, bytes.
    pub fn set_peer(&mut self, stream_bits: u64, max_datagram: u64) {
        self.stream_bits = stream_bits as u32;
        self.max_datagram = u32::try_from(max_datagram).unwrap_or(u32::MAX);
        self.offload.iter().for_each(|offload| self.tell_peer(&**offload));
    }

    fn tell_peer(&self, offload: &dyn Offload) {
        offload.set_max_datagram(self.max_datagram);
        offload.set_stream_bits(self.stream_bits);
    }

    /// Sets whether the application's streams and datagrams are plain QUIC ones or belong to a WebTransport session.
    pub fn bind(&mut self, binding: Binding) {
        self.binding = Some(binding);
        self.offload.iter().for_each(|offload| offload.set_binding(binding));
    }

    /// Returns the kernel offload, unless it is being released.
    pub(super) fn offload(&self) -> Option<&Arc<dyn Offload>> {
        self.offload.as_ref().filter(|_| !self.is_releasing)
    }

    pub fn status(&self) -> ConnectionStatus {
        let mut status = self.offload.as_ref().map(|offload| offload.status()).unwrap_or_default();
        status.add(&self.past);
        status.is_ready &= self.is_ready;
        status.copies.push(("not_arriving", self.failed_trials));
        status.copies.push(("client_share", self.places.declined));
        status
    }
}

/// Methods that assign a kernel offload to the connection, and release it.
impl Offloaded {
    /// Assigns a kernel offload, which draws the connection's packet numbers from now on, and passes the connection's
    /// state to it. `seal` is the key generation with which this endpoint seals now, and its secret.
    pub fn take_offload(&mut self, offload: Arc<dyn Offload>, seal: Option<(u16, &TrafficSecret)>) {
        offload.set_session(self.session);
        self.binding.iter().for_each(|binding| offload.set_binding(*binding));
        self.tell_peer(&*offload);
        self.ids.iter().for_each(|id| Arc::clone(&offload).add_id(id));
        // A new offload counts the congestion window and flow control credit that it uses from zero.
        (self.registered, self.budget) = (OffloadBudget::default(), OffloadBudget::default());
        (self.path_told, self.path_ready) = (false, false);
        self.offload = Some(offload);
        self.install_both_seal_keys(seal);
    }

    /// Withdraws the send budget and all delegated streams and datagrams from the kernel offload. The offload returns
    /// its streams one by one. After `OffloadOwner::on_released`, the caller has to call [`Self::finish_release`].
    pub fn release(&mut self, downstream: &mut Downstream) {
        let Some(offload) = self.offload().map(Arc::clone) else { return };
        // The budget is withdrawn first, so that nothing is sent while streams are recalled.
        self.reclaim_budget(downstream);
        self.datagrams.clear();
        self.close_openings(downstream);
        for (key, delegated) in self.delegations.drain() {
            Arc::clone(&offload).recall(key, Some(delegated.delegation));
        }
        (self.is_releasing, self.is_ready) = (true, false);
        offload.release();
    }

    /// Ends the release, after the kernel offload has stopped and its packets were drained. Returns the offload, which
    /// the caller has to drop without holding the connection's lock.
    pub fn finish_release(&mut self, downstream: &mut Downstream) -> Option<Arc<dyn Offload>> {
        let offload = self.offload.take_if(|_| self.is_releasing)?;
        // The streams that are still delegated were opened by the kernel offload during the release, so `release` did
        // not recall them.
        for (key, _) in self.delegations.drain() {
            downstream.on_returned(key);
            self.openings.on_returned(key);
        }
        self.past.add(&offload.status());
        downstream.set_outstanding(OffloadBudget::default());
        (self.is_releasing, self.budget) = (false, OffloadBudget::default());
        Some(offload)
    }
}

/// Methods for packet protection keys and connection IDs.
impl Offloaded {
    /// Sets the first keys of both directions after the handshake.
    pub fn on_keys(&mut self, seal: Option<&TrafficSecret>, open: Option<TrafficSecret>) {
        if let Some(secret) = seal {
            self.seal_header = Some(secret.key_material().header);
            self.install_both_seal_keys(Some((0, secret)));
        }
        self.open =
            open.map(|secret| OpenKeys { header: secret.key_material().header, secret, generation: 0 });
    }

    /// Notes that this endpoint seals with the keys of `generation`, derived from `secret`, from now on.
    pub fn on_seal_keys(&mut self, generation: u16, secret: &TrafficSecret) {
        self.offload().into_iter().for_each(|offload| offload.on_key_update());
        self.install_seal_keys(generation.saturating_add(1), &secret.next());
    }

    /// Installs the kernel offload's encryption keys of the generation in use and of the next one.
    fn install_both_seal_keys(&self, seal: Option<(u16, &TrafficSecret)>) {
        if let Some((generation, secret)) = seal {
            self.install_seal_keys(generation, secret);
            self.install_seal_keys(generation.saturating_add(1), &secret.next());
        }
    }

    fn install_seal_keys(&self, generation: u16, secret: &TrafficSecret) {
        if let (Some(offload), Some(header)) = (self.offload(), &self.seal_header) {
            Arc::clone(offload).set_seal_keys(generation, secret, header);
        }
    }

    /// Notes a received packet that was sealed with keys of `generation`, for this endpoint's connection ID `id`.
    /// Returns whether the kernel offload has decrypted the packet, too, or may have.
    pub fn on_received(&mut self, number: u64, generation: u16, id: &[u8]) -> bool {
        if self.ids.back().is_none_or(|last| **last != *id) {
            self.on_id(id);
        }
        while let Some(open) = self.open.as_mut().filter(|open| open.generation < generation) {
            open.secret = open.secret.next();
            open.generation += 1;
            self.install_open_keys();
        }
        self.offload.as_ref().is_none_or(|offload| offload.on_received(number))
    }

    /// Notes that userspace received bytes of a peer's stream in a packet that the kernel offload did not decrypt.
    pub fn leave(&self, stream: u64, bytes: &Range<u64>, fin: bool) {
        self.offload.iter().for_each(|offload| offload.leave(stream, bytes, fin));
    }

    /// Notes that the peer now uses `id`, another of this endpoint's connection IDs.
    fn on_id(&mut self, id: &[u8]) {
        let Some(id) = ConnectionId::new(id) else { return };
        if let Some(at) = self.ids.iter().position(|known| *known == id) {
            // The kernel offload has the ID already, so a peer that alternates between IDs causes no system calls.
            let known = self.ids.remove(at);
            self.ids.extend(known);
            return;
        }
        self.ids.push_back(id);
        let oldest = if self.ids.len() > IDS { self.ids.pop_front() } else { None };
        if let Some(offload) = self.offload() {
            oldest.iter().for_each(|oldest| Arc::clone(offload).remove_id(oldest));
            Arc::clone(offload).add_id(&id);
        }
    }

    /// Installs the kernel offload's decryption keys of the generation in use and of the next one.
    fn install_open_keys(&self) {
        let (Some(offload), Some(open)) = (self.offload(), &self.open) else { return };
        let next = open.generation.saturating_add(1);
        for (generation, secret) in [(open.generation, open.secret.clone()), (next, open.secret.next())] {
            Arc::clone(offload).set_open_keys(generation, &secret, &open.header);
        }
        offload.on_open_generation(open.generation);
    }
}

/// Methods for packets whose wake-up of the process is deferred.
impl Offloaded {
    /// Returns when a packet arrived that was read at `now`. The packet's last bytes `end` identify it. The packet may
    /// have waited long to be read.
    pub fn arrival(&self, now: Instant, end: [u8; 8]) -> Instant {
        self.offload.as_ref().map_or(now, |offload| offload.arrival(now, end))
    }

    /// Notes that a packet of `size` bytes had only an ACK frame with this ACK Delay, which showed no loss.
    pub fn learn_ack(&mut self, size: usize, delay: u64) {
        self.deferral.learn(size, delay);
    }

    /// Makes the process read deferred packets, and returns whether there are any. If there are, the loss timer has to
    /// wait, because the missing acknowledgement may be among them.
    pub fn reads_first(&mut self) -> bool {
        self.waited = !self.waited && self.offload.as_ref().is_some_and(|offload| offload.read_deferred());
        self.waited
    }

    /// Tells the kernel offload which packets of the peer need not wake the process.
    fn defer(&mut self, now: Instant, downstream: &Downstream) {
        let Some(offload) = &self.offload else { return };
        let forwards = !self.delegations.is_empty() || !self.openings.is_empty();
        let serves = forwards && self.trial.has_passed() && downstream.is_steady();
        let declined = offload.short_of_room();
        let (size, bytes) = self.deferral.limits(now, self.budget, downstream.unpaced_window(), declined);
        let size = if serves { size } else { 0 };
        offload.set_deferral(size, self.registered.bytes.saturating_add(bytes));
    }
}

/// Methods for the kernel offload's budget and the packets that it reports.
impl Offloaded {
    /// Returns the budget that the kernel offload has now.
    pub fn budget(&self) -> OffloadBudget {
        self.budget
    }

    /// Withdraws the budget, so that the kernel offload sends and opens nothing more. The part that it may have used
    /// for packets not reported yet counts as outstanding.
    pub fn reclaim_budget(&mut self, downstream: &mut Downstream) {
        let Some(outstanding) = self.grant(OffloadBudget::default()) else { return };
        downstream.set_outstanding(outstanding);
        self.grant_streams(downstream, 0);
    }

    fn grant_streams(&self, downstream: &mut Downstream, limit: u64) {
        if let Some(offload) = &self.offload {
            downstream.on_streams_opened(offload.set_streams(downstream.next_stream(), limit));
        }
    }

    /// Sets the kernel offload's budget. Returns how much the offload may have used for packets not reported yet, or
    /// `None` if there is no offload.
    fn grant(&mut self, budget: OffloadBudget) -> Option<OffloadBudget> {
        let offload = self.offload.as_ref()?;
        let OffloadBudget { bytes, data } = self.registered;
        self.budget = budget;
        let total = OffloadBudget {
            bytes: bytes.saturating_add(budget.bytes),
            data: data.saturating_add(budget.data),
        };
        let reached = offload.grant(total);
        Some(OffloadBudget {
            bytes: reached.bytes.saturating_sub(bytes),
            data: reached.data.saturating_sub(data),
        })
    }

    /// Grants the kernel offload a budget if the data plane may send (`open`), and recalls streams that have ended.
    pub fn hand_out(
        &mut self,
        now: Instant,
        downstream: &mut Downstream,
        path: &path::PeerAddress,
        traffic_class: u8,
        open: bool,
    ) {
        let Some(offload) = self.offload().map(Arc::clone) else {
            // If there is no offload, or it is being released, no stream has to be recalled from it, so the queue of
            // recalls is emptied.
            while downstream.poll_recall().is_some() {}
            self.is_ready = false;
            return downstream.set_offload_marks(now, false);
        };
        while let Some(key) = downstream.poll_recall() {
            let delegation = self.delegations.remove(&key).map(|delegated| delegated.delegation);
            Arc::clone(&offload).recall(key, delegation);
        }
        downstream.set_outstanding(OffloadBudget::default());
        self.is_ready = self.follow_path(now, &offload, path, traffic_class, downstream) && open;
        let budget = if self.is_ready { downstream.budget() } else { OffloadBudget::default() };
        let budget = self.trial.allow(now, budget, downstream.mtu());
        offload.set_waiting(downstream.waiting().map(|level| u16::from_be_bytes(level.into())));
        self.grant(budget);
        // The kernel offload opens a stream with a packet, so it may open streams only if it has a budget.
        let streams = if budget.bytes > 0 { downstream.max_streams() } else { 0 };
        self.grant_streams(downstream, streams);
        self.defer(now, downstream);
    }

    /// Processes the kernel offload's reports of sent packets.
    pub fn drain(&mut self, now: Instant, downstream: &mut Downstream) {
        let Self { offload: Some(offload), registered, delivered, trial, openings, delegations, .. } = self
        else {
            return;
        };
        offload.drain(now, &mut |sent, one| {
            let OffloadSentPacket { tag, number, size, carried } = one;
            registered.bytes += u64::from(size);
            let size = usize::from(size);
            match carried {
                OffloadedFrame::Datagram { group, object } => {
                    delivered.add((tag, group, object));
                    downstream.on_offloaded_datagram(sent, number, size, Label { track: 0, group });
                }
                OffloadedFrame::Stream { id, offset, len, fin, credit } => {
                    registered.data += credit;
                    trial.on_sent(number);
                    // This packet may be the first report of a stream that the kernel offload opened.
                    let opened = (tag & openings::TAG != 0)
                        .then(|| openings.key(tag, Some(id), downstream, delegations))
                        .flatten();
                    let key = opened.unwrap_or(StreamKey(tag));
                    downstream.on_offloaded_sent(&OffloadedPacket {
                        sent,
                        number,
                        size,
                        key,
                        offset,
                        len,
                        fin,
                    });
                }
            }
        });
    }

    /// Notes acknowledged packet numbers. The caller has to process the kernel offload's reports before.
    pub fn on_ack(&mut self, now: Instant, ranges: &[RangeInclusive<u64>], remote: SocketAddr) {
        if self.trial.on_ack(now, ranges) {
            self.failed_trials += 1;
            warn!(%remote, "packets that the kernel sends to this peer do not arrive: userspace sends for now");
        }
    }
}

/// Methods for the network path that the kernel offload uses.
impl Offloaded {
    /// Passes the data plane's path to the kernel offload if it has changed. Returns whether the offload uses that path
    /// already.
    fn follow_path(
        &mut self,
        now: Instant,
        offload: &Arc<dyn Offload>,
        path: &path::PeerAddress,
        traffic_class: u8,
        downstream: &mut Downstream,
    ) -> bool {
        let ip = path.local.or(Some(self.local.ip()).filter(|ip| !ip.is_unspecified()));
        let Some(ip) = ip else { return false };
        offload.set_mtu(u32::try_from(downstream.mtu()).unwrap_or(u32::MAX));
        let local = SocketAddr::new(ip, self.local.port());
        let wanted = OffloadPath { local, remote: path.remote, id: path.id, traffic_class };
        let marks = traffic_class & ECT0 != 0;
        // Only the QUIC stack sends to an address that is not validated. So a peer that alternates between addresses
        // causes no changes of the kernel offload's path.
        if path.is_validated() && !(self.path_told && self.path.as_ref() == Some(&wanted)) {
            (self.path_told, self.path_ready) = (true, false);
            let is_same = |path: &OffloadPath| OffloadPath { traffic_class, ..path.clone() } == wanted;
            if !self.path.as_ref().is_some_and(is_same) {
                self.trial = OffloadTrial::new();
                self.deferral = Deferral::default();
            }
            self.path = Some(wanted.clone());
            Arc::clone(offload).set_path(wanted);
        }
        downstream.set_offload_marks(now, marks && self.path_ready);
        self.path_ready && path.is_validated()
    }

    /// Notes that the kernel offload uses `path` from now on.
    pub fn on_path(&mut self, path: &OffloadPath) {
        self.path_ready |= self.path_told && self.path.as_ref() == Some(path);
    }
}

/// Methods for streams that the kernel offload forwards.
impl Offloaded {
    /// Returns the kernel offload, if streams and datagrams can be delegated to it at present.
    pub(super) fn takes(&self) -> Option<&Arc<dyn Offload>> {
        self.offload().filter(|offload| self.seal_header.is_some() && offload.is_active())
    }

    /// Notes that the kernel offload has returned the stream.
    pub fn on_returned(&mut self, key: StreamKey) {
        self.openings.on_returned(key);
    }

    pub fn on_max_stream_data(&self, id: u64, max: u64) {
        let of_stream = self.delegations.values().filter(|delegated| delegated.id == id);
        of_stream.for_each(|delegated| delegated.delegation.set_max_offset(max));
    }
}

/// A connection's kernel offload, if it may have one, while the connection's lock is held.
///
/// Every call to a connection's offload from outside this crate is a method of this type. No method blocks.
/// [`Connection::offload`](crate::Connection::offload) gives access to it.
pub struct LockedOffload<'a> {
    pub(crate) offloaded: Option<&'a mut Offloaded>,
    pub(crate) downstream: &'a mut Downstream,
    pub(crate) received: &'a ReceivedNumbers,
    pub(crate) streams: Option<&'a ReceivedStreams>,
    /// A function that returns a reference which keeps the connection alive.
    pub(crate) hold: &'a dyn Fn() -> Arc<dyn Any + Send + Sync>,
}

/// Methods for a connection on which media arrives, whose streams and datagrams a kernel offload may forward.
impl LockedOffload<'_> {
    /// Returns a handle (ingress) with which a kernel offload forwards the peer's stream, or `None` if it cannot.
    pub fn ingress(&mut self, stream: quinn::StreamId) -> Option<Arc<dyn OffloadIngress>> {
        let origin = OffloadOrigin::Stream(VarInt::from(stream).into_inner());
        self.upstream(|offload, seen, held| offload.ingress(origin, seen, held))
    }

    /// Returns a handle (ingress) with which a kernel offload forwards the peer's datagrams under a track alias, or
    /// `None` if it cannot.
    pub fn ingress_datagrams(&mut self, alias: u64) -> Option<Arc<dyn OffloadIngress>> {
        self.upstream(|offload, seen, held| offload.ingress(OffloadOrigin::Datagrams(alias), seen, held))
    }

    /// Returns the object (openings) with which the kernel offload forwards the peer's new streams of a track alias, if
    /// their subgroup is after `last` (group and ID). Returns `None` if the offload cannot forward new streams.
    pub fn openings(&mut self, alias: u64, last: (u64, u64)) -> Option<Arc<dyn OffloadOpenings>> {
        self.upstream(|offload, seen, held| offload.openings(alias, last, seen, held))
    }

    /// Notes that a unidirectional stream of the peer was accepted. If the kernel offload does not forward this stream
    /// yet, it does not begin to forward the stream by itself any more. This has to be called for each of the peer's
    /// streams, once its type is known. If the offload forwards the stream, returns its handle (ingress).
    pub fn accept(&mut self, stream: quinn::StreamId) -> Option<Arc<dyn OffloadIngress>> {
        let offloaded = self.offloaded.as_deref_mut()?;
        let stream = VarInt::from(stream).into_inner();
        offloaded.accepted = offloaded.accepted.max((stream >> 2) + 1);
        offloaded.offload()?.accept(stream)
    }

    /// Calls `make` with the kernel offload and a summary of the packets received so far. Once the offload is prepared
    /// to decrypt packets, which is so after the first `make` that succeeds, it gets the keys and connection IDs for
    /// that.
    fn upstream<T>(
        &mut self,
        make: impl FnOnce(Arc<dyn Offload>, BeforeOffload, Arc<dyn Any + Send + Sync>) -> Option<T>,
    ) -> Option<T> {
        let offloaded = self.offloaded.as_deref()?;
        let offload = offloaded.offload().filter(|offload| offload.is_active())?;
        offloaded.open.as_ref()?;
        let is_first = !offload.has_ingress();
        // Streams that began before the kernel offload was told to read this peer's packets are excluded, because the
        // offload has not seen all of their bytes.
        let begun = self.streams.filter(|_| is_first).into_iter().flat_map(ReceivedStreams::begun).collect();
        let seen = BeforeOffload { packets: self.received.next(), streams: offloaded.accepted, begun };
        let made = make(Arc::clone(offload), seen, (self.hold)());
        if is_first && offload.has_ingress() {
            offloaded.install_open_keys();
            offload.set_session(offloaded.session);
            offloaded.ids.iter().for_each(|id| Arc::clone(offload).add_id(id));
        }
        made
    }
}

/// Methods for a connection on which media is sent, to a subscriber.
impl LockedOffload<'_> {
    /// Lets the kernel offload forward an incoming stream (`ingress`) on stream `key`, if all data of stream `key` so
    /// far was sent. It forwards bytes from the incoming stream's offset `from` on. Offsets on stream `key` are larger
    /// by `shift` bytes. Returns whether the stream is delegated now.
    pub fn delegate(
        &mut self,
        key: StreamKey,
        ingress: &Arc<dyn OffloadIngress>,
        shift: i64,
        from: u64,
    ) -> bool {
        let Some(offloaded) = self.offloaded.as_deref_mut() else { return false };
        let Some(offload) = offloaded.takes().map(Arc::clone) else { return false };
        let Some(granted) = self.downstream.delegate(key) else {
            return offloaded.delegations.contains_key(&key);
        };
        let stream = StreamCopy {
            key,
            id: granted.id,
            shift,
            from,
            max_offset: granted.max_offset,
            level: u16::from_be_bytes(granted.level.into()),
            track: granted.label.track,
            group: granted.label.group,
        };
        match offloaded.places.within(|| offload.delegate(ingress, &stream)) {
            Ok(delegation) => {
                offloaded.delegations.insert(key, DelegatedStream { id: granted.id, delegation });
                true
            }
            Err(declined) => {
                debug!(%declined, "userspace keeps sending a stream: the kernel declined it");
                self.downstream.on_returned(key);
                false
            }
        }
    }

    /// Lets the kernel offload forward a track's datagrams, if it can. An earlier forwarding of other incoming
    /// datagrams under the same tag ends. [`Self::take_delivered`] tells under this tag which datagrams were sent. The
    /// caller has to repeat the call, because the connection may get an offload later, or another one.
    pub fn delegate_datagrams(&mut self, ingress: &Arc<dyn OffloadIngress>, datagrams: &DatagramCopy) {
        let Some(offloaded) = self.offloaded.as_deref_mut() else { return };
        let Some(offload) = offloaded.takes().map(Arc::clone) else { return };
        if offloaded.datagrams.get(&datagrams.tag).is_some_and(|delegation| delegation.is_of(ingress)) {
            return;
        }
        offloaded.datagrams.remove(&datagrams.tag);
        match offloaded.places.within(|| offload.delegate_datagrams(ingress, datagrams)) {
            Ok(delegation) => drop(offloaded.datagrams.insert(datagrams.tag, delegation)),
            Err(declined) => {
                debug!(%declined, "userspace keeps sending a track's datagrams: the kernel declined them")
            }
        }
    }

    /// Stops the kernel offload from forwarding the datagrams that were delegated with this tag.
    pub fn recall_datagrams(&mut self, tag: u64) {
        if let Some(offloaded) = self.offloaded.as_deref_mut() {
            offloaded.datagrams.remove(&tag);
        }
    }

    /// Returns whether the kernel offload has sent the datagram with this group and object ID. A second call for the
    /// same datagram returns false.
    pub fn take_delivered(&mut self, now: Instant, tag: u64, group: u64, object: u64) -> bool {
        let Some(offloaded) = self.drained(now) else { return false };
        offloaded.delivered.take((tag, group, object))
    }

    /// Sets the limits on the number of delegated streams. Each stream counts against the first of the two limits that
    /// is not reached. If both limits are reached, the stream is not delegated.
    pub fn set_shares(&mut self, shares: [Arc<WindowShare>; 2]) {
        if let Some(offloaded) = self.offloaded.as_deref_mut() {
            offloaded.places.set_shares(shares);
        }
    }

    /// Returns the number of packets that the kernel offload has sent and not reported. It is 0 unless another CPU is
    /// writing a report at this moment.
    pub fn unregistered(&mut self, now: Instant) -> Option<u64> {
        let sent = self.offloaded.as_deref()?.status().sent;
        self.drained(now)?;
        Some(sent.saturating_sub(self.downstream.stats().offloaded_packets))
    }

    /// Processes the kernel offload's reports, and returns the connection's state for the offload. Returns `None` if
    /// the connection never has an offload.
    pub(super) fn drained(&mut self, now: Instant) -> Option<&mut Offloaded> {
        let offloaded = self.offloaded.as_deref_mut()?;
        offloaded.drain(now, self.downstream);
        Some(offloaded)
    }
}
