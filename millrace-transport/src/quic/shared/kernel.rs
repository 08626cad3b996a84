//! What the kernel does on a connection: it receives the streams that it is told to forward, and sends on those that
//! it was lent.
//!
//! The kernel sends within a share of credit and window, which it is told whenever the connection's lock is let go.
//! Before anything is sent from here the share is taken back, so both together stay within the peer's limits.

use std::{
    borrow::Borrow,
    collections::{HashMap, HashSet, VecDeque},
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use millrace_bpf::{crypto::QuicKeys, relay as bpf};
use millrace_proto::{
    moq::Location,
    quic::{
        keys::{Secret, Suite},
        packet::ConnectionId,
    },
    relay::downstream::{Downstream, Elsewhere, Label, Share, StreamKey},
};
use tracing::{debug, warn};

use super::{Arrival, Keys, Shared, State, attention, quiet::Quiet, trial::Trial, with_batch};
use crate::engine::kernel::{Feed, Leg, Line, Owner, Supplies};

/// This end's connection IDs that a peer may use in turn; older ones are forgotten.
const IDS: usize = 4;

/// Where a connection's packet number word is.
pub(in crate::quic) enum Word {
    Own(AtomicU64),
    Kernel(Arc<Line>),
}

impl Borrow<AtomicU64> for Word {
    fn borrow(&self) -> &AtomicU64 {
        match self {
            Self::Own(word) => word,
            Self::Kernel(line) => line.downstream.number(),
        }
    }
}

/// The kernel's part of a connection.
pub(super) struct Part {
    line: Arc<Line>,
    /// Of this end's socket.
    local: SocketAddr,
    /// From where to where the kernel was told to send, and whether it does.
    path: Option<(SocketAddr, SocketAddr, ConnectionId)>,
    path_ready: bool,
    /// On this path.
    trial: Trial,
    failed_trials: u64,
    /// The header keys of both directions, which are those of generation 0.
    seal_header: Option<[u8; 32]>,
    open: Option<Open>,
    /// This end's IDs, as the peer uses them: the newest last.
    ids: VecDeque<ConnectionId>,
    legs: HashMap<StreamKey, Out>,
    /// Totals that the kernel has registered.
    registered: Share,
    /// What it may send beyond them.
    share: Share,
    session: u32,
    delivered: Delivered,
    quiet: Quiet,
    /// A timer has waited for acknowledgements to be read, and does not again.
    waited: bool,
}

/// Datagrams that the kernel has sent, until they come by in userspace: subscription and location of each.
#[derive(Default)]
struct Delivered {
    waiting: HashSet<(u64, Location)>,
    order: VecDeque<(u64, Location)>,
}

impl Delivered {
    /// Some never come by, since the QUIC stack's buffer for datagrams overflows. It has room for fewer of those that do.
    const MOST: usize = 1 << 15;

    fn add(&mut self, datagram: (u64, Location)) {
        if self.waiting.insert(datagram) {
            self.order.push_back(datagram);
        }
        if self.order.len() > Self::MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.waiting.remove(&oldest);
        }
    }

    fn take(&mut self, datagram: (u64, Location)) -> bool {
        // Most come by in the order in which they were sent.
        if self.order.front() == Some(&datagram) {
            self.order.pop_front();
        }
        self.waiting.remove(&datagram)
    }
}

/// Receiving keys: those of the newest generation that the peer has used.
struct Open {
    secret: Secret,
    header: [u8; 32],
    generation: u16,
}

/// A stream that the kernel sends on.
struct Out {
    id: u64,
    leg: Leg,
}

impl Part {
    pub fn new(line: Arc<Line>, local: SocketAddr) -> Self {
        Self {
            line,
            local,
            path: None,
            path_ready: false,
            trial: Trial::new(),
            failed_trials: 0,
            seal_header: None,
            open: None,
            ids: VecDeque::new(),
            legs: HashMap::new(),
            registered: Share::default(),
            share: Share::default(),
            session: 0,
            delivered: Delivered::default(),
            quiet: Quiet::default(),
            waited: false,
        }
    }

    /// How traces name the connection.
    pub fn set_session(&mut self, session: u32) {
        self.session = session;
        self.line.downstream.set_session(session);
        self.line.upstream().into_iter().for_each(|upstream| upstream.set_session(session));
    }

    /// The handshake is over: both directions' keys of the first two generations.
    pub fn on_keys(&mut self, seal: Option<&Secret>, open: Option<Secret>) {
        if let Some(secret) = seal.filter(|secret| secret.suite() != Suite::Aes256Gcm) {
            let header = secret.key_material().header;
            self.seal_header = Some(header);
            self.install_seal_keys(0, secret);
            self.install_seal_keys(1, &secret.next());
        }
        self.open = open.map(|secret| Open { header: secret.key_material().header, secret, generation: 0 });
    }

    /// This end seals with the keys of `generation`, those of `secret`, from now on.
    pub fn on_seal_keys(&mut self, generation: u16, secret: &Secret) {
        self.line.on_key_update();
        self.install_seal_keys(generation.saturating_add(1), &secret.next());
    }

    fn install_seal_keys(&self, generation: u16, secret: &Secret) {
        if let Some(keys) = self.seal_header.and_then(|header| quic_keys(secret, &header)) {
            self.line.set_seal_keys(generation, keys, secret);
        }
    }

    /// A packet arrived, sealed with keys of `generation`, for `id` of this end.
    pub fn on_received(&mut self, number: u64, generation: u16, id: &[u8]) {
        if self.ids.back().is_none_or(|last| **last != *id) {
            self.on_id(id);
        }
        while let Some(open) = self.open.as_mut().filter(|open| open.generation < generation) {
            open.secret = open.secret.next();
            open.generation += 1;
            self.install_open_keys();
        }
        if let Some(upstream) = self.line.upstream() {
            upstream.observe(number);
        }
    }

    /// The peer has moved to another of this end's IDs.
    fn on_id(&mut self, id: &[u8]) {
        let Some(id) = ConnectionId::new(id) else { return };
        self.ids.retain(|known| *known != id);
        self.ids.push_back(id);
        let oldest = if self.ids.len() > IDS { self.ids.pop_front() } else { None };
        if let Some(oldest) = oldest {
            self.line.remove_id(&oldest);
        }
        self.line.add_id(&id);
    }

    /// When a packet arrived, which may have waited in the quiet socket.
    pub fn arrived(&self, arrival: &Arrival) -> Instant {
        self.line.arrived(arrival.now, arrival.end)
    }

    pub fn learn_ack(&mut self, size: usize, delay: u64) {
        self.quiet.learn(size, delay);
    }

    /// Before a timer acts on an acknowledgement that is missing: whether it shall wait since it may lie in the quiet
    /// socket, which is read now.
    pub fn reads_first(&mut self) -> bool {
        self.waited = !self.waited && self.line.read_quiet();
        self.waited
    }

    /// Tells the kernel which packets of the peer are no hurry.
    fn hush(&mut self, now: Instant, downstream: &Downstream) {
        let serves = !self.legs.is_empty() && self.trial == Trial::Passed && downstream.is_calm();
        let declined = [bpf::LegOutcome::Window, bpf::LegOutcome::DataCredit, bpf::LegOutcome::StreamCredit];
        let declined = declined.map(|outcome| self.line.downstream.outcome(outcome)).iter().sum();
        let (size, bytes) = self.quiet.limits(now, self.share, downstream.window(), declined);
        let size = if serves { size } else { 0 };
        self.line.downstream.set_quiet(size, self.registered.bytes.saturating_add(bytes));
    }

    /// Keys of the generation in use and of the next.
    fn install_open_keys(&self) {
        let Some(open) = &self.open else { return };
        let next = open.generation.saturating_add(1);
        for (generation, secret) in [(open.generation, open.secret.clone()), (next, open.secret.next())] {
            if let Some(keys) = quic_keys(&secret, &open.header)
                && let Err(error) = self.line.set_open_keys(generation, &keys, &secret)
            {
                debug!(%error, "the kernel has no keys to open packets with");
            }
        }
        self.line.on_opened_generation(open.generation);
    }

    /// The largest DATAGRAM frame that the peer takes, bytes.
    pub fn set_max_datagram(&self, bytes: u64) {
        self.line.downstream.set_max_datagram(u32::try_from(bytes).unwrap_or(u32::MAX));
    }

    /// The kernel's handle for the connection as one that media arrives on; `None` if there is no room for it.
    fn upstream(&mut self, expected: u64) -> Option<&bpf::Upstream> {
        if self.line.upstream().is_none() {
            let suite = self.open.as_ref()?.secret.suite();
            if suite == Suite::Aes256Gcm {
                return None;
            }
            let upstream = self.line.open_from(expected);
            let upstream =
                upstream.inspect_err(|error| debug!(%error, "packets are opened in userspace")).ok()?;
            self.install_open_keys();
            upstream.set_session(self.session);
            self.ids.iter().for_each(|id| self.line.add_id(id));
        }
        self.line.upstream()
    }

    pub fn on_max_stream_data(&self, id: u64, max: u64) {
        self.legs.values().filter(|out| out.id == id).for_each(|out| out.leg.set_max_offset(max));
    }

    /// Lets the kernel send nothing more; returns what it may have sent without having said so.
    pub fn take_share(&mut self) -> Share {
        self.set_share(Share::default())
    }

    fn set_share(&mut self, share: Share) -> Share {
        let Share { bytes, data } = self.registered;
        self.share = share;
        let all_data = self.line.downstream.set_max_data(data.saturating_add(share.data));
        let all_bytes = self.line.downstream.set_max_bytes(bytes.saturating_add(share.bytes));
        Share { bytes: all_bytes.saturating_sub(bytes), data: all_data.saturating_sub(data) }
    }

    /// Bytes of the window that are the kernel's at the moment.
    pub fn share(&self) -> Share {
        self.share
    }

    /// Whether the kernel sends to where `state` does.
    fn follow_path(&mut self, path: &super::Path, mtu: usize) -> bool {
        let ip = path.local.or(Some(self.local.ip()).filter(|ip| !ip.is_unspecified()));
        let Some(ip) = ip else { return false };
        self.line.downstream.set_mtu(u32::try_from(mtu).unwrap_or(u32::MAX));
        let wanted = (SocketAddr::new(ip, self.local.port()), path.remote, path.id);
        if self.path != Some(wanted) {
            self.path_ready = false;
            self.trial = Trial::new();
            self.quiet = Quiet::default();
            self.path = Some(wanted);
            let (local, remote, id) = (wanted.0, wanted.1, path.id.to_vec());
            self.line.set_path(bpf::Path { local, remote, id, traffic_class: 0, flow_label: 0 });
        }
        self.path_ready && path.is_validated()
    }
}

impl Shared {
    /// Takes note of what the kernel has sent.
    pub(super) fn take_in(&self, state: &mut State, now: Instant) {
        let Some(part) = &mut state.kernel else { return };
        part.line.take(now, |sent, one| {
            part.registered.bytes += u64::from(one.size);
            if let Some(object) = one.object {
                part.delivered.add((one.tag, Location { group: one.offset, object }));
                let label = Label { track: 0, group: one.offset };
                state.downstream.on_datagram_elsewhere(sent, one.number, usize::from(one.size), label);
                return;
            }
            part.registered.data += u64::from(one.len);
            part.trial.on_sent(one.number);
            state.downstream.on_sent_elsewhere(&Elsewhere {
                sent,
                number: one.number,
                size: usize::from(one.size),
                key: StreamKey(one.tag),
                offset: one.offset,
                len: one.len,
                fin: one.fin,
            });
        });
    }

    /// Packets were acknowledged, all that the kernel has sent being known.
    pub(super) fn judge(&self, state: &mut State, now: Instant) {
        let State { kernel: Some(part), ack, path, .. } = state else { return };
        if part.trial.on_ack(now, &ack.ranges) {
            part.failed_trials += 1;
            warn!(remote = %path.remote, "what the kernel sends there does not arrive: it is sent from userspace");
        }
    }

    /// Before something is sent from here: the kernel sends nothing meanwhile.
    pub(super) fn take_share(&self, state: &mut State) {
        let State { kernel: Some(part), downstream, .. } = state else { return };
        if downstream.has_work() {
            downstream.set_outstanding(part.take_share());
        }
    }

    /// Tells the kernel what it may send now, and takes streams back that are over.
    pub(super) fn hand_out(&self, state: &mut State, now: Instant) {
        if state.kernel.is_none() {
            return;
        }
        let sending = state.keys.as_mut().is_some_and(|keys| !self.is_used_up(keys))
            && self.open.load(Ordering::Relaxed);
        let State { kernel: Some(part), downstream, path, .. } = state else { return };
        while let Some(key) = downstream.poll_recall() {
            part.line.recall(key, part.legs.remove(&key).map(|out| out.leg));
        }
        downstream.set_outstanding(Share::default());
        let ready = part.follow_path(path, downstream.mtu());
        let share = if sending && ready { downstream.share() } else { Share::default() };
        let share = part.trial.allow(now, share, downstream.mtu());
        part.line.downstream.set_waiting(downstream.waiting().map(|level| u16::from_be_bytes(level.into())));
        part.set_share(share);
        part.hush(now, downstream);
        if !self.open.load(Ordering::SeqCst) {
            // Closed meanwhile, without the lock.
            part.take_share();
        }
    }

    /// Whether the data plane has to wait for newer keys; asks for them well before.
    pub(super) fn is_used_up(&self, keys: &mut Keys) -> bool {
        let sealed = self.numbers.peek().1.saturating_sub(keys.since);
        if sealed >= keys.limit / 2 && !keys.requested {
            keys.requested = true;
            self.request(attention::KEY_UPDATE);
        }
        sealed >= keys.limit
    }

    /// A stream of the peer that the kernel may forward from now on.
    pub(in crate::quic) fn feed(self: &Arc<Self>, stream: u64) -> Option<Arc<Feed>> {
        self.feed_from(|upstream| upstream.slot(stream))
    }

    /// Datagrams under a track alias of the peer that the kernel may forward from now on.
    pub(in crate::quic) fn feed_datagrams(self: &Arc<Self>, alias: u64) -> Option<Arc<Feed>> {
        self.feed_from(|upstream| upstream.datagrams(alias))
    }

    fn feed_from(self: &Arc<Self>, slot: impl FnOnce(&bpf::Upstream) -> bpf::Slot) -> Option<Arc<Feed>> {
        let mut guard = self.state.lock();
        let expected = guard.received.map_or(0, |received| received + 1);
        let part = guard.kernel.as_mut().filter(|part| part.line.is_served())?;
        let slot = slot(part.upstream(expected)?);
        let line = Arc::clone(&part.line);
        drop(guard);
        Some(Feed::new(slot, line, Arc::clone(self) as _))
    }

    /// Has the kernel forward a track's datagrams, until what it returns is dropped.
    pub(in crate::quic) fn lend_datagrams(
        &self,
        feed: &Arc<Feed>,
        datagrams: &bpf::Datagrams,
    ) -> Option<Leg> {
        let guard = self.state.lock();
        let part = guard.kernel.as_ref()?;
        if part.seal_header.is_none() || !part.line.is_served() {
            return None;
        }
        let lent = part.line.lend_datagrams(feed, datagrams);
        lent.inspect_err(|error| debug!(%error, "datagrams stay in userspace")).ok()
    }

    /// Whether the kernel has sent the datagram of a subscription; says so once.
    pub(in crate::quic) fn take_delivered(&self, now: Instant, owner: u64, at: Location) -> bool {
        let mut guard = self.state.lock();
        if guard.kernel.is_none() {
            return false;
        }
        self.take_in(&mut guard, now);
        guard.kernel.as_mut().is_some_and(|part| part.delivered.take((owner, at)))
    }

    /// Has the kernel forward a feed as stream `key`, once that owes nothing: from offset `from` of the feed on, at
    /// an offset that is larger by `shift`. Returns whether it does.
    pub(in crate::quic) fn lend(&self, key: StreamKey, feed: &Arc<Feed>, shift: i64, from: u64) -> bool {
        let mut guard = self.state.lock();
        let State { kernel: Some(part), downstream, .. } = &mut *guard else { return false };
        if part.seal_header.is_none() || !part.line.is_served() {
            return false;
        }
        let Some(loan) = downstream.lend(key) else { return part.legs.contains_key(&key) };
        let leg = bpf::Leg {
            stream_id: loan.id,
            shift,
            from,
            max_offset: loan.max_offset,
            tag: key.0,
            level: u16::from_be_bytes(loan.level.into()),
            track: loan.label.track,
            group: loan.label.group,
        };
        match part.line.lend(feed, &leg) {
            Ok(leg) => {
                part.legs.insert(key, Out { id: loan.id, leg });
                true
            }
            Err(error) => {
                debug!(%error, "a stream stays in userspace");
                downstream.on_returned(key);
                false
            }
        }
    }

    /// What became of packets that the kernel could have sent here.
    pub(in crate::quic) fn kernel_outcomes(&self) -> Option<Vec<(&'static str, u64)>> {
        let state = self.state.lock();
        let part = state.kernel.as_ref()?;
        let outcomes = bpf::LegOutcome::ALL.into_iter();
        let outcomes = outcomes.map(|outcome| (outcome.name(), part.line.downstream.outcome(outcome)));
        Some(outcomes.chain([("not_arriving", part.failed_trials)]).collect())
    }

    /// Packets that the kernel sent without saying so. There are none but those that another CPU registers this moment.
    pub(in crate::quic) fn kernel_unregistered(&self) -> Option<u64> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let downstream = &state.kernel.as_ref()?.line.downstream;
        let counted = [bpf::LegOutcome::Sent, bpf::LegOutcome::Lost];
        let sent: u64 = counted.map(|outcome| downstream.outcome(outcome)).iter().sum();
        self.take_in(state, Instant::now());
        Some(sent.saturating_sub(state.downstream.stats().elsewhere_packets))
    }

    /// Packets of the peer that did not wake this process.
    pub(in crate::quic) fn kernel_quiet(&self) -> u64 {
        let state = self.state.lock();
        state.kernel.as_ref().map_or(0, |part| part.line.downstream.quiet_packets())
    }

    /// Where the keystreams of packets came from that the kernel sealed, and of those that it opened.
    pub(in crate::quic) fn kernel_keystreams(&self) -> Option<[Supplies; 2]> {
        let state = self.state.lock();
        let line = &state.kernel.as_ref()?.line;
        Some([line.sealed(), line.opened()])
    }

    fn transmit_now(&self, now: Instant) {
        with_batch(|batch| {
            self.transmit(now, batch);
            self.sender.flush(batch);
        });
    }
}

impl Owner for Shared {
    fn on_forwarded(&self, now: Instant) {
        self.transmit_now(now);
    }

    fn on_returned(&self, now: Instant, keys: &[StreamKey]) {
        {
            let mut state = self.state.lock();
            self.take_in(&mut state, now);
            keys.iter().for_each(|key| state.downstream.on_returned(*key));
        }
        self.transmit_now(now);
    }

    fn on_path(&self, now: Instant, path: &bpf::Path) {
        {
            let mut state = self.state.lock();
            let Some(part) = &mut state.kernel else { return };
            let current = |wanted: &(SocketAddr, SocketAddr, ConnectionId)| {
                (wanted.0, wanted.1) == (path.local, path.remote) && *wanted.2 == *path.id
            };
            part.path_ready |= part.path.as_ref().is_some_and(current);
        }
        self.transmit_now(now);
    }
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
