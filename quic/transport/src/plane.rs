//! The data plane of a connection: the queued data, the path, and the keys.

use std::time::Instant;

use millrace_quic::{
    keys::{DirectionKey, HeaderKey, TrafficSecret},
    packet,
    plane::downstream::{self, Downstream, PeerLimits},
};

use crate::{
    dscp::Dscp, numbers::NumberAllocator, path::PeerAddress, send::PacketFlow, stats::SeamCounters, tap::Tap,
};

/// Number of packets per key that the data plane leaves to quinn, which has to send a packet to update the keys.
const KEY_RESERVE: u64 = 1 << 16;

pub(crate) struct Plane {
    pub downstream: Downstream,
    config: downstream::Config,
    pub path: PeerAddress,
    pub keys: Option<PlaneKeys>,
    max_packets_per_key: u64,
    dscp: Dscp,
    /// True while the keys are used up and the data plane waits for quinn to update them.
    stalled: bool,
}

/// State that building a packet needs in addition to [`Plane`]: the packet number counter, counters of the connection,
/// and the packet trace.
pub(crate) struct Builder<'a> {
    pub numbers: &'a NumberAllocator,
    pub counters: &'a SeamCounters,
    pub tap: &'a Tap,
    /// The number that identifies the connection's MoQ session in packet traces.
    pub session: u32,
}

/// Whether the data plane's keys are used up, and whether a key update has to be requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyUse {
    /// True if the keys are used up, so that no packet may be sealed before a key update.
    pub used_up: bool,
    /// True if the caller has to ask the QUIC stack for a key update. It is true once per key generation.
    pub ask: bool,
}

impl Plane {
    pub fn new(config: downstream::Config, max_packets_per_key: u64, path: PeerAddress, dscp: Dscp) -> Self {
        Self {
            downstream: Downstream::new(config.clone(), PeerLimits::default(), Instant::now()),
            config,
            path,
            keys: None,
            max_packets_per_key,
            dscp,
            stalled: false,
        }
    }

    /// Replaces the data plane by a new one with the peer's limits. This is called once the limits are known.
    pub fn set_limits(&mut self, limits: PeerLimits) {
        // quinn may have reported the path's MTU before the peer's limits were known.
        let config = downstream::Config { mtu: self.downstream.mtu(), ..self.config.clone() };
        self.downstream = Downstream::new(config, limits, Instant::now());
    }

    pub fn set_secret(&mut self, secret: Option<TrafficSecret>) {
        self.keys = secret.map(|secret| PlaneKeys::new(secret, self.max_packets_per_key));
    }

    /// Returns the next packet's addresses and traffic class.
    pub fn flow(&self) -> PacketFlow {
        let traffic_class = self.dscp.traffic_class(self.downstream.marks());
        PacketFlow { to: self.path.remote, from: self.path.local, traffic_class }
    }

    /// Returns the traffic class (DSCP and ECN) of the kernel offload's packets.
    pub fn offload_class(&self) -> u8 {
        self.dscp.traffic_class(self.downstream.may_offload_mark())
    }

    /// Returns the state of the keys, or `None` if there are no keys yet. `next` is the next packet number.
    pub fn key_use(&mut self, next: u64) -> Option<KeyUse> {
        let keys = self.keys.as_mut()?;
        let sealed = next.saturating_sub(keys.since);
        // The key update is requested at half of the packet limit, because quinn needs time for the update.
        let ask = sealed >= keys.limit / 2 && !keys.requested;
        keys.requested |= ask;
        Some(KeyUse { used_up: sealed >= keys.limit, ask })
    }

    /// Sets whether the data plane has to wait for newer keys.
    pub fn set_stalled(&mut self, stalled: bool) {
        self.stalled = stalled;
    }

    /// Notes that quinn has updated the keys, so the data plane may send again. Returns whether the data plane was
    /// waiting for them.
    pub fn resume(&mut self) -> bool {
        std::mem::take(&mut self.stalled)
    }

    /// Appends one sealed packet to `out`. Returns false if there was nothing to send.
    pub fn build(&mut self, now: Instant, builder: &Builder<'_>, out: &mut Vec<u8>) -> bool {
        let Some(keys) = &self.keys else { return false };
        let mtu = self.downstream.mtu();
        let id = self.path.id;
        if !self.path.is_validated() {
            return false;
        }
        let at = out.len();
        packet::start(&id, out);
        let room = mtu.saturating_sub(packet::overhead(id.len()));
        let Some(content) = self.downstream.poll_frames(now, room, out) else {
            out.truncate(at);
            return false;
        };
        // The packet number is drawn only now, when the packet is known to have frames, so that no number stays unused.
        let drawn = builder.numbers.draw();
        packet::finish(out, at, id.len(), drawn.0, drawn.1, &keys.packet, &keys.header);
        let (_, number) = drawn;
        let size = out.len() - at;
        if builder.tap.is_on() {
            builder.tap.add(builder.session, number, size, self.downstream.pieces(&content));
        }
        self.downstream.on_sent(now, number, size, content);
        builder.counters.data_plane_packets.add(1);
        builder.counters.data_plane_bytes.add(size as u64);
        true
    }
}

/// The data plane's keys for sealing packets, of the newest key generation with which a packet was sealed.
pub(crate) struct PlaneKeys {
    header: HeaderKey,
    pub secret: TrafficSecret,
    packet: DirectionKey,
    pub generation: u16,
    /// The first packet number that any sender sealed with these keys.
    since: u64,
    /// Number of packets, counted from packet number `since`, that may be sealed with these keys before the data plane
    /// has to stop.
    limit: u64,
    /// True if quinn has been asked for newer keys.
    pub requested: bool,
}

impl PlaneKeys {
    fn new(secret: TrafficSecret, max_packets: u64) -> Self {
        let header = secret.header_key();
        let packet = secret.packet_key();
        let max_packets = max_packets.min(secret.suite().confidentiality_limit());
        // If a key may seal only few packets, at most a quarter of them are reserved for quinn.
        let limit = max_packets - KEY_RESERVE.min(max_packets / 4);
        Self { header, secret, packet, generation: 0, since: 0, limit, requested: false }
    }

    pub fn advance(&mut self, generation: u16, number: u64) {
        while self.generation < generation {
            self.secret = self.secret.next();
            self.packet = self.secret.packet_key();
            self.generation += 1;
            self.since = number;
            self.requested = false;
        }
    }
}
