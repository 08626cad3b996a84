//! TCP's measurements of the paths to its peers, which are read from existing sockets without extra packets.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::IpAddr,
};

use millrace_graft_kernel::SocketState;
use millrace_graft_proto::{
    measure::PathReport,
    select::features::{Feature, Features},
};
use serde::{Deserialize, Serialize};

use crate::{PathClass, settings::class_of};

/// Limit of peers that are remembered. If it is exceeded, the peer that was seen longest ago is dropped.
const PEERS_MAX: usize = 4096;

/// Measurements of the path to one peer.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct PeerPath {
    /// The peer's address.
    pub peer: IpAddr,
    /// Name of the path's class, which its smallest round-trip time determines.
    pub class: String,
    /// Number of present TCP connections with the peer.
    pub connections: u32,
    /// Smallest round-trip time that was measured, in microseconds.
    pub rtt_min_us: u32,
    /// Median of TCP's smoothed round-trip times over the present connections, in microseconds.
    pub rtt_us: u32,
    /// Variation of the round-trip time, in microseconds.
    pub rtt_variation_us: u32,
    /// Largest delivery rate of the present connections, in bytes per second.
    pub delivery_rate: Option<u64>,
    /// Number of packets that were delivered, summed over all connections that were seen.
    pub delivered: u64,
    /// Number of packets that TCP considered lost, summed over all connections that were seen.
    pub lost: u64,
    /// TCP's estimate of the largest reordering on the path: by how many packets one arrived late. The estimate starts
    /// at the sysctl `tcp_reordering`, which is 3 by default.
    pub reordering: u32,
    /// Seconds since the last connection with the peer, or 0 if there is one now.
    pub idle_s: u64,
    /// Result of the latest probe of the path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probed: Option<ProbedPackets>,
}

/// Result of a probe of the path, for which the daemon sends packets of its own.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct ProbedPackets {
    /// Smallest round-trip time of the probe, in microseconds.
    pub rtt_min_us: u32,
    /// Median round-trip time of the probe, in microseconds.
    pub rtt_us: u32,
    /// Share of the probe's packets that were lost, in per cent.
    pub loss_percent: f64,
    /// Burstiness of the packet losses, which is 1 if the losses are independent of each other.
    pub burstiness: f64,
    /// Growth of the queueing delay during the probe, in microseconds per second.
    pub queue_growth_us_s: f64,
    /// Time since the probe, in seconds.
    pub age_s: u64,
}

impl PeerPath {
    /// Returns the features of the path (round-trip time, rate, loss) from which a model chooses a congestion control
    /// or carrier. The loss rate of a probe is preferred to TCP's loss rate, since TCP also loses packets in queues
    /// that it fills itself.
    pub fn features(&self) -> Features {
        let probed = self.probed.as_ref();
        let counted = (self.delivered > 0).then(|| self.loss_percent());
        Features::default()
            .with(Feature::Rtt, (self.rtt_min_us > 0).then(|| f64::from(self.rtt_min_us) / 1e3))
            .with(Feature::Rate, self.delivery_rate.map(|bytes| bytes as f64 * 8.0 / 1e6))
            .with(Feature::Loss, probed.map(|it| it.loss_percent).or(counted))
            .with(Feature::Burstiness, probed.map(|it| it.burstiness))
            .with(Feature::Queue, probed.map(|it| (it.queue_growth_us_s / 1e3).max(0.0)))
            .with(Feature::Paths, 1.0)
    }

    /// Returns the share of packets that were lost, in per cent.
    pub fn loss_percent(&self) -> f64 {
        match self.delivered + self.lost {
            0 => 0.0,
            all => self.lost as f64 * 100.0 / all as f64,
        }
    }
}

#[derive(Clone, Debug, Default)]
struct PeerFigures {
    latest: Vec<SocketState>,
    rtt_min_us: Option<u32>,
    rtt_us: u32,
    rtt_variation_us: u32,
    delivery_rate: Option<u64>,
    delivered: u64,
    lost: u64,
    reordering: u32,
    seen_s: u64,
    /// Result of the latest probe of the path, and the time of that probe in seconds, by the clock of `Monitor::now_s`.
    probed: Option<(PathReport, u64)>,
}

/// Packet counters of one TCP socket when the list of sockets was last read.
#[derive(Debug, Default)]
struct SocketPackets {
    delivered: u32,
    lost: u32,
    /// True if the latest list of sockets no longer contains the socket.
    is_missed: bool,
}

/// Measures the paths to peers. A peer is remembered after its connections have ended.
#[derive(Debug, Default)]
pub struct Monitor {
    classes: Vec<PathClass>,
    peers: BTreeMap<IpAddr, PeerFigures>,
    /// Packet counters of each TCP socket when the list of sockets was last read, by the socket's cookie.
    counted: HashMap<u64, SocketPackets>,
    now_s: u64,
}

impl Monitor {
    /// Creates a monitor without peers. `classes` are classes of paths, sorted by their smallest round-trip time; the
    /// first one begins at 0.
    pub fn new(classes: Vec<PathClass>) -> Self {
        Self { classes, ..Self::default() }
    }

    /// Replaces the classes of paths.
    pub fn set_classes(&mut self, classes: Vec<PathClass>) {
        self.classes = classes;
    }

    /// Updates the measurements from a list of all sockets. `now_s` is in seconds of any clock that does not go back.
    pub fn update(&mut self, sockets: Vec<SocketState>, now_s: u64) {
        self.now_s = now_s;
        let live: HashSet<u64> = sockets.iter().map(|socket| socket.cookie).collect();
        // The end of a socket may be reported after the first update that has not found it, so its counters are kept
        // for one more update.
        self.counted.retain(|cookie, counted| {
            let is_missed = !live.contains(cookie);
            !(std::mem::replace(&mut counted.is_missed, is_missed) && is_missed)
        });
        self.peers.values_mut().for_each(|peer| peer.latest.clear());
        for socket in sockets {
            // This socket has not measured a round trip yet.
            if socket.srtt_us == 0 {
                continue;
            }
            let delivered = socket.delivered_packets;
            let lost = socket.lost_packets;
            let counted = SocketPackets { delivered, lost, is_missed: false };
            let before = self.counted.insert(socket.cookie, counted).unwrap_or_default();
            let peer = self.peers.entry(socket.remote.ip()).or_default();
            peer.count(&socket, &before, now_s);
            peer.latest.push(socket);
        }
        self.peers.values_mut().filter(|peer| !peer.latest.is_empty()).for_each(PeerFigures::sum_up);
        self.forget();
    }

    /// Records the final state of a connection that has ended. The lists of sockets that are read once a second miss
    /// shorter connections.
    pub fn note_ended(&mut self, socket: SocketState, now_s: u64) {
        if socket.srtt_us == 0 {
            return;
        }
        self.now_s = self.now_s.max(now_s);
        let before = self.counted.remove(&socket.cookie).unwrap_or_default();
        let peer = self.peers.entry(socket.remote.ip()).or_default();
        peer.count(&socket, &before, now_s);
        peer.latest.retain(|other| other.cookie != socket.cookie);
        peer.rtt_min_us = peer.rtt_min_us.into_iter().chain(socket.rtt_min_us).min();
        if peer.latest.is_empty() {
            (peer.rtt_us, peer.rtt_variation_us) = (socket.srtt_us, socket.rttvar_us);
            peer.delivery_rate = socket.delivery_rate.or(peer.delivery_rate);
        }
        self.forget();
    }

    /// Records the result of a probe of the path to a peer, even if no connection with the peer exists. A probe whose
    /// packets were not answered does not change the round-trip times.
    pub fn note_probe(&mut self, address: IpAddr, report: PathReport, now_s: u64) {
        self.now_s = self.now_s.max(now_s);
        let peer = self.peers.entry(address).or_default();
        peer.seen_s = now_s;
        if report.answered > 0 {
            peer.rtt_min_us = peer.rtt_min_us.into_iter().chain([report.rtt_min_us]).min();
        }
        if peer.rtt_us == 0 {
            (peer.rtt_us, peer.rtt_variation_us) = (report.rtt_us, report.rtt_variation_us);
        }
        peer.probed = Some((report, now_s));
        self.forget();
    }

    /// Returns the paths to all peers, ordered by address.
    pub fn paths(&self) -> Vec<PeerPath> {
        self.peers.iter().map(|(address, peer)| self.path(*address, peer)).collect()
    }

    /// Returns the path to a peer, if it was measured.
    pub fn path_to(&self, peer: IpAddr) -> Option<PeerPath> {
        self.peers.get(&peer).map(|known| self.path(peer, known))
    }

    fn path(&self, address: IpAddr, peer: &PeerFigures) -> PeerPath {
        let rtt_min_us = peer.rtt_min_us.unwrap_or(peer.rtt_us);
        PeerPath {
            peer: address,
            class: class_of(&self.classes, rtt_min_us),
            connections: u32::try_from(peer.latest.len()).unwrap_or(u32::MAX),
            rtt_min_us,
            rtt_us: peer.rtt_us,
            rtt_variation_us: peer.rtt_variation_us,
            delivery_rate: peer.delivery_rate,
            delivered: peer.delivered,
            lost: peer.lost,
            reordering: peer.reordering,
            idle_s: if peer.latest.is_empty() { self.now_s.saturating_sub(peer.seen_s).max(1) } else { 0 },
            probed: peer.probed.as_ref().map(|(report, at_s)| ProbedPackets {
                rtt_min_us: report.rtt_min_us,
                rtt_us: report.rtt_us,
                loss_percent: report.loss_percent,
                burstiness: report.burstiness,
                queue_growth_us_s: report.queue_growth_us_s,
                age_s: self.now_s.saturating_sub(*at_s),
            }),
        }
    }

    fn forget(&mut self) {
        while self.peers.len() > PEERS_MAX {
            let oldest = self.peers.iter().min_by_key(|(_, peer)| peer.seen_s).map(|(address, _)| *address);
            let Some(address) = oldest else { return };
            self.peers.remove(&address);
        }
    }
}

impl PeerFigures {
    /// Adds the packets that a socket has counted since the latest update. The kernel's counters wrap around, so the
    /// difference is computed modulo their size.
    fn count(&mut self, socket: &SocketState, before: &SocketPackets, now_s: u64) {
        self.delivered += u64::from(socket.delivered_packets.wrapping_sub(before.delivered));
        self.lost += u64::from(socket.lost_packets.wrapping_sub(before.lost));
        self.reordering = self.reordering.max(socket.reordering_packets);
        self.seen_s = now_s;
    }

    fn sum_up(&mut self) {
        let sockets = &self.latest;
        self.rtt_min_us = sockets.iter().filter_map(|socket| socket.rtt_min_us).chain(self.rtt_min_us).min();
        self.rtt_us = median(sockets.iter().map(|socket| socket.srtt_us));
        self.rtt_variation_us = median(sockets.iter().map(|socket| socket.rttvar_us));
        self.delivery_rate = sockets.iter().filter_map(|socket| socket.delivery_rate).max();
    }
}

fn median(values: impl Iterator<Item = u32>) -> u32 {
    let mut values: Vec<u32> = values.collect();
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::net::{Ipv4Addr, SocketAddr};

    use crate::settings::default_classes;

    pub(crate) fn socket(peer: u32, cookie: u64, rtt_us: u32, delivered: u32, lost: u32) -> SocketState {
        let at = |address: u32| SocketAddr::from((Ipv4Addr::from_bits(address), 80));
        SocketState {
            local: at(1),
            remote: at(peer),
            cookie,
            congestion: "bbr".into(),
            bytes_acked: 0,
            rtt_min_us: Some(rtt_us),
            srtt_us: rtt_us + 10,
            rttvar_us: 5,
            cwnd_packets: 10,
            delivered_packets: delivered,
            lost_packets: lost,
            reordering_packets: 3,
            delivery_rate: Some(u64::from(delivered)),
        }
    }

    #[test]
    fn path_counters_outlive_connections_and_count_each_packet_once() {
        let mut monitor = Monitor::new(default_classes());
        monitor.update(vec![socket(7, 1, 1000, 90, 10), socket(7, 2, 3000, 100, 0)], 1);
        monitor.update(vec![socket(7, 1, 2000, 190, 10)], 2);
        let path = &monitor.paths()[0];
        assert_eq!((path.delivered, path.lost, path.connections), (290, 10, 1));
        assert_eq!((path.rtt_min_us, path.rtt_us, path.class.as_str()), (1000, 2010, "lan"));
        monitor.update(Vec::new(), 12);
        // The kernel never reuses a socket cookie. A socket with another cookie is therefore new, and all of its
        // packets are added.
        monitor.update(vec![socket(7, 3, 2000, 10, 0)], 13);
        assert_eq!(monitor.paths()[0].delivered, 300);
    }

    #[test]
    fn packets_of_a_socket_closed_between_two_polls_are_counted_once() {
        let mut monitor = Monitor::new(default_classes());
        monitor.note_ended(socket(7, 1, 6000, 90, 10), 1);
        let path = &monitor.paths()[0];
        assert_eq!((path.delivered, path.lost, path.rtt_min_us, path.connections), (90, 10, 6000, 0));
        assert_eq!((path.class.as_str(), path.delivery_rate), ("terrestrial", Some(90)));
        // Packets of a socket that were counted before are not counted again.
        monitor.update(vec![socket(7, 2, 5500, 50, 0)], 2);
        monitor.note_ended(socket(7, 2, 5500, 80, 5), 2);
        let path = &monitor.paths()[0];
        assert_eq!((path.delivered, path.lost, path.rtt_min_us), (170, 15, 5500));
        monitor.update(Vec::new(), 3);
        assert_eq!(monitor.paths()[0].delivered, 170);
    }

    #[test]
    fn path_class_is_determined_by_the_smallest_round_trip_time() {
        let table = [
            (100, "lan"),
            (4_999, "lan"),
            (5_000, "terrestrial"),
            (299_999, "terrestrial"),
            (300_000, "long-delay"),
        ];
        for (rtt_us, class) in table {
            let mut monitor = Monitor::new(default_classes());
            monitor.update(vec![socket(7, 1, rtt_us, 1, 0)], 1);
            assert_eq!(monitor.paths()[0].class, class, "{rtt_us}");
        }
    }

    #[test]
    fn probe_result_is_recorded_for_peers_with_and_without_connections() {
        let report =
            |answered, rtt_min_us| PathReport { answered, rtt_min_us, rtt_us: 900, ..PathReport::default() };
        let address = |last: u32| IpAddr::from(Ipv4Addr::from_bits(last));
        let mut monitor = Monitor::new(default_classes());
        monitor.update(vec![socket(7, 1, 6000, 1, 0)], 10);
        monitor.note_probe(address(7), report(3, 800), 11);
        monitor.note_probe(address(8), report(0, 0), 11);
        monitor.update(vec![socket(7, 1, 6000, 1, 0)], 13);
        let [near, mute] = &monitor.paths()[..] else { panic!("two peers") };
        assert_eq!((near.class.as_str(), near.rtt_min_us, near.rtt_us), ("lan", 800, 6010));
        assert_eq!(near.probed.as_ref().map(|it| (it.rtt_us, it.age_s)), Some((900, 2)));
        assert_eq!((mute.connections, mute.idle_s, mute.probed.is_some()), (0, 2, true));
        (0..PEERS_MAX as u32).for_each(|at| monitor.note_probe(address(at + 100), report(1, 1), 14));
        assert_eq!(monitor.paths().len(), PEERS_MAX);
    }

    #[test]
    fn number_of_measured_peers_is_bounded() {
        let mut monitor = Monitor::new(default_classes());
        let sockets = (0..PEERS_MAX as u32 + 10).map(|at| socket(at + 10, u64::from(at), 1000, 1, 0));
        monitor.update(sockets.collect(), 1);
        assert_eq!(monitor.paths().len(), PEERS_MAX);
        monitor.update(vec![socket(5, 1 << 40, 1000, 1, 0)], 2);
        assert_eq!(monitor.paths().len(), PEERS_MAX);
        assert_eq!(monitor.path_to("0.0.0.5".parse().unwrap()).map(|path| path.idle_s), Some(0));
        // The counters of sockets that were missing in two lists in a row are dropped. Only the counters of the socket
        // in the latest list are left.
        monitor.update(vec![socket(5, 1 << 40, 1000, 1, 0)], 3);
        assert_eq!(monitor.counted.len(), 1);
    }
}
