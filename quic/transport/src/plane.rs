//! The data plane of a connection: what the peer is owed, where it goes, and the keys it is sealed with.

use std::time::Instant;

use millrace_quic::{
    keys::{HeaderKey, PacketKey, Secret},
    packet,
    plane::downstream::{self, Downstream, PeerLimits},
};

use crate::{dscp::Dscp, numbers::Numbers, path::Path, send::Flow, stats::Counters, tap::Tap};

/// Packets of what may be sealed with one key that are left to quinn: it has to send to move on.
const KEY_RESERVE: u64 = 1 << 16;

pub(crate) struct Plane {
    pub downstream: Downstream,
    config: downstream::Config,
    pub path: Path,
    pub keys: Option<Keys>,
    max_packets_per_key: u64,
    dscp: Dscp,
    /// It has used its keys up and waits for quinn to move on.
    stalled: bool,
}

/// What packets are built with, besides the plane itself.
pub(crate) struct Builder<'a> {
    pub numbers: &'a Numbers,
    pub counters: &'a Counters,
    pub tap: &'a Tap,
    /// Of the tap.
    pub session: u32,
}

/// How far the keys are used up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyUse {
    /// Newer ones have to be waited for.
    pub used_up: bool,
    /// The stack has to be asked for newer ones; said once.
    pub ask: bool,
}

impl Plane {
    pub fn new(config: downstream::Config, max_packets_per_key: u64, path: Path, dscp: Dscp) -> Self {
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

    /// The peer's limits are known: begins anew.
    pub fn set_limits(&mut self, limits: PeerLimits) {
        let config = downstream::Config { mtu: self.downstream.mtu(), ..self.config.clone() };
        self.downstream = Downstream::new(config, limits, Instant::now());
    }

    pub fn set_secret(&mut self, secret: Option<Secret>) {
        self.keys = secret.map(|secret| Keys::new(secret, self.max_packets_per_key));
    }

    /// Where the next packet goes, and as what.
    pub fn flow(&self) -> Flow {
        let traffic_class = self.dscp.traffic_class(self.downstream.marks());
        Flow { to: self.path.remote, from: self.path.local, traffic_class }
    }

    /// DSCP and ECN of what the offload sends.
    pub fn offload_class(&self) -> u8 {
        self.dscp.traffic_class(self.downstream.may_offload_mark())
    }

    /// `next`: the next packet number. `None`: there are no keys yet.
    pub fn key_use(&mut self, next: u64) -> Option<KeyUse> {
        let keys = self.keys.as_mut()?;
        let sealed = next.saturating_sub(keys.since);
        let ask = sealed >= keys.limit / 2 && !keys.requested;
        keys.requested |= ask;
        Some(KeyUse { used_up: sealed >= keys.limit, ask })
    }

    /// Whether it has to wait for newer keys.
    pub fn set_stalled(&mut self, stalled: bool) {
        self.stalled = stalled;
    }

    /// quinn goes on: returns whether the plane waited for that.
    pub fn resume(&mut self) -> bool {
        std::mem::take(&mut self.stalled)
    }

    /// Appends one sealed packet to `out`; returns whether there was one to send.
    pub fn build(&mut self, now: Instant, builder: &Builder<'_>, out: &mut Vec<u8>) -> bool {
        let Some(keys) = &self.keys else { return false };
        let (mtu, id) = (self.downstream.mtu(), self.path.id);
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
        let drawn = builder.numbers.draw();
        packet::finish(out, at, id.len(), drawn, &keys.packet, &keys.header);
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

/// Sending keys of the data plane: those of the newest generation drawn.
pub(crate) struct Keys {
    header: HeaderKey,
    pub secret: Secret,
    packet: PacketKey,
    pub generation: u16,
    /// The first number sealed with them, by either sender.
    since: u64,
    /// Numbers that the data plane may go up to after `since`.
    limit: u64,
    /// quinn has been asked for newer ones.
    pub requested: bool,
}

impl Keys {
    fn new(secret: Secret, max_packets: u64) -> Self {
        let (header, packet) = (secret.header_key(), secret.packet_key());
        let max_packets = max_packets.min(secret.suite().confidentiality_limit());
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
