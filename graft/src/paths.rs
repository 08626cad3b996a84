//! What TCP has measured of the paths to its peers: passively, from the sockets that there are.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::IpAddr,
};

use millrace_graft_kernel::Socket;
use millrace_graft_proto::{
    measure::Report,
    select::features::{Feature, Features},
};
use serde::{Deserialize, Serialize};

use crate::Class;

/// Peers that are remembered; the one that was seen longest ago goes.
const PEERS_MAX: usize = 4096;

/// A path to a peer.
#[derive(Clone, Debug, Serialize, Deserialize, PartialEq)]
pub struct Path {
    pub peer: IpAddr,
    pub class: String,
    /// Now.
    pub connections: u32,
    /// The least that was seen.
    pub rtt_min_us: u32,
    /// The median of the connections, smoothed by TCP.
    pub rtt_us: u32,
    pub rtt_variation_us: u32,
    /// Bytes per second, the greatest of the connections.
    pub delivery_rate: Option<u64>,
    /// Packets that were delivered, and that TCP took for lost, of all connections that were seen.
    pub delivered: u64,
    pub lost: u64,
    /// Packets by which they came out of order, at least 3, which TCP assumes.
    pub reordering: u32,
    /// Seconds since there was a connection; 0: there is one.
    pub idle_s: u64,
    /// What the latest probe of it has said.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probed: Option<Probed>,
}

/// Figures of packets that were sent to find them out.
#[derive(Clone, Debug, Default, Serialize, Deserialize, PartialEq)]
pub struct Probed {
    pub rtt_min_us: u32,
    /// Median.
    pub rtt_us: u32,
    pub loss_percent: f64,
    /// 1: losses are independent.
    pub burstiness: f64,
    pub queue_growth_us_s: f64,
    pub age_s: u64,
}

impl Path {
    /// As a model has them. A probe knows better than TCP what is lost without it.
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

    pub fn loss_percent(&self) -> f64 {
        match self.delivered + self.lost {
            0 => 0.0,
            all => self.lost as f64 * 100.0 / all as f64,
        }
    }
}

#[derive(Clone, Debug, Default)]
struct Peer {
    latest: Vec<Socket>,
    rtt_min_us: Option<u32>,
    rtt_us: u32,
    rtt_variation_us: u32,
    delivery_rate: Option<u64>,
    delivered: u64,
    lost: u64,
    reordering: u32,
    seen_s: u64,
    /// And when.
    probed: Option<(Report, u64)>,
}

/// Packets of a socket.
#[derive(Debug, Default)]
struct Counted {
    delivered: u32,
    lost: u32,
    /// By the latest look.
    is_missed: bool,
}

/// Remembers peers beyond their connections.
#[derive(Debug, Default)]
pub struct Monitor {
    classes: Vec<Class>,
    peers: BTreeMap<IpAddr, Peer>,
    /// What was counted of a socket already, by its cookie.
    counted: HashMap<u64, Counted>,
    now_s: u64,
}

impl Monitor {
    /// `classes`: sorted by their round trips, the first of them from 0 on.
    pub fn new(classes: Vec<Class>) -> Self {
        Self { classes, ..Self::default() }
    }

    pub fn set_classes(&mut self, classes: Vec<Class>) {
        self.classes = classes;
    }

    /// Takes all sockets of this moment, `now_s` in seconds of any clock that does not go back.
    pub fn update(&mut self, sockets: Vec<Socket>, now_s: u64) {
        self.now_s = now_s;
        let live: HashSet<u64> = sockets.iter().map(|socket| socket.cookie).collect();
        // The end of one may be told after the first look that has missed it.
        self.counted.retain(|cookie, counted| {
            let is_missed = !live.contains(cookie);
            !(std::mem::replace(&mut counted.is_missed, is_missed) && is_missed)
        });
        self.peers.values_mut().for_each(|peer| peer.latest.clear());
        for socket in sockets {
            // Nothing has come back yet.
            if socket.srtt_us == 0 {
                continue;
            }
            let (delivered, lost) = (socket.delivered_packets, socket.lost_packets);
            let counted = Counted { delivered, lost, is_missed: false };
            let before = self.counted.insert(socket.cookie, counted).unwrap_or_default();
            let peer = self.peers.entry(socket.remote.ip()).or_default();
            peer.count(&socket, &before, now_s);
            peer.latest.push(socket);
        }
        self.peers.values_mut().filter(|peer| !peer.latest.is_empty()).for_each(Peer::sum_up);
        self.forget();
    }

    /// The last that TCP knew of a connection that is over. The walk over sockets meets only those that live for a while.
    pub fn note_ended(&mut self, socket: Socket, now_s: u64) {
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

    /// A probe of the path to a peer, with whom there need not be a connection. One that nobody answered says nothing of its length.
    pub fn note_probe(&mut self, address: IpAddr, report: Report, now_s: u64) {
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

    /// By peer.
    pub fn paths(&self) -> Vec<Path> {
        self.peers.iter().map(|(address, peer)| self.path(*address, peer)).collect()
    }

    pub fn path_to(&self, peer: IpAddr) -> Option<Path> {
        self.peers.get(&peer).map(|known| self.path(peer, known))
    }

    /// Of a path with this least round trip.
    pub fn class_of(&self, rtt_min_us: u32) -> String {
        let class = self.classes.iter().rev().find(|class| class.min_rtt_us <= rtt_min_us);
        class.map(|class| class.name.clone()).unwrap_or_default()
    }

    fn path(&self, address: IpAddr, peer: &Peer) -> Path {
        let rtt_min_us = peer.rtt_min_us.unwrap_or(peer.rtt_us);
        Path {
            peer: address,
            class: self.class_of(rtt_min_us),
            connections: u32::try_from(peer.latest.len()).unwrap_or(u32::MAX),
            rtt_min_us,
            rtt_us: peer.rtt_us,
            rtt_variation_us: peer.rtt_variation_us,
            delivery_rate: peer.delivery_rate,
            delivered: peer.delivered,
            lost: peer.lost,
            reordering: peer.reordering,
            idle_s: if peer.latest.is_empty() { self.now_s.saturating_sub(peer.seen_s).max(1) } else { 0 },
            probed: peer.probed.as_ref().map(|(report, at_s)| Probed {
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

impl Peer {
    /// What a socket has counted since. The kernel's counters wrap.
    fn count(&mut self, socket: &Socket, before: &Counted, now_s: u64) {
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

    pub(crate) fn socket(peer: u32, cookie: u64, rtt_us: u32, delivered: u32, lost: u32) -> Socket {
        let at = |address: u32| SocketAddr::from((Ipv4Addr::from_bits(address), 80));
        Socket {
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
    fn counts_outlive_connections_and_are_taken_once() {
        let mut monitor = Monitor::new(default_classes());
        monitor.update(vec![socket(7, 1, 1000, 90, 10), socket(7, 2, 3000, 100, 0)], 1);
        monitor.update(vec![socket(7, 1, 2000, 190, 10)], 2);
        let path = &monitor.paths()[0];
        assert_eq!((path.delivered, path.lost, path.connections), (290, 10, 1));
        assert_eq!((path.rtt_min_us, path.rtt_us, path.class.as_str()), (1000, 2010, "lan"));
        monitor.update(Vec::new(), 12);
        // The kernel gives a cookie once; another socket counts from the beginning.
        monitor.update(vec![socket(7, 3, 2000, 10, 0)], 13);
        assert_eq!(monitor.paths()[0].delivered, 300);
    }

    #[test]
    fn what_ended_between_two_looks_counts_once() {
        let mut monitor = Monitor::new(default_classes());
        monitor.note_ended(socket(7, 1, 6000, 90, 10), 1);
        let path = &monitor.paths()[0];
        assert_eq!((path.delivered, path.lost, path.rtt_min_us, path.connections), (90, 10, 6000, 0));
        assert_eq!((path.class.as_str(), path.delivery_rate), ("terrestrial", Some(90)));
        // Of one that was met before, only what came since.
        monitor.update(vec![socket(7, 2, 5500, 50, 0)], 2);
        monitor.note_ended(socket(7, 2, 5500, 80, 5), 2);
        let path = &monitor.paths()[0];
        assert_eq!((path.delivered, path.lost, path.rtt_min_us), (170, 15, 5500));
        monitor.update(Vec::new(), 3);
        assert_eq!(monitor.paths()[0].delivered, 170);
    }

    #[test]
    fn classes_are_by_the_least_round_trip() {
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
    fn probes_count_beside_connections_and_without() {
        let report = |answered, rtt_min_us| Report { answered, rtt_min_us, rtt_us: 900, ..Report::default() };
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
    fn peers_are_bounded() {
        let mut monitor = Monitor::new(default_classes());
        let sockets = (0..PEERS_MAX as u32 + 10).map(|at| socket(at + 10, u64::from(at), 1000, 1, 0));
        monitor.update(sockets.collect(), 1);
        assert_eq!(monitor.paths().len(), PEERS_MAX);
        monitor.update(vec![socket(5, 1 << 40, 1000, 1, 0)], 2);
        assert_eq!(monitor.paths().len(), PEERS_MAX);
        assert_eq!(monitor.path_to("0.0.0.5".parse().unwrap()).map(|path| path.idle_s), Some(0));
        // One look that misses a socket may be before its end is told.
        monitor.update(vec![socket(5, 1 << 40, 1000, 1, 0)], 3);
        assert_eq!(monitor.counted.len(), 1);
    }
}
