//! Computes the wire latency from the samples of the BPF packet probe: matches each copy of an object that left the
//! relay with the packet in which the object arrived.
//!
//! Packets are encrypted, so copies are matched by their order alone. That is unambiguous while each object is one
//! packet and is forwarded before the next object arrives. If the numbers of packets show otherwise, the result says
//! so.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use millrace_kernel::tc::KernelHook;
use millrace_lab_kernel::probe::PacketSample;
use serde::{Deserialize, Serialize};

/// Addresses of the host that sends objects to the relay, and of the host that receives copies from the relay.
#[derive(Debug, Clone, Copy)]
pub struct WireHosts {
    pub publisher: IpAddr,
    pub subscribers: IpAddr,
    /// Number of subscribers at that host. The flows with the most packets are theirs.
    pub flows: usize,
    /// Smallest UDP payload that counts as an object, bytes.
    pub object_bytes: u32,
}

/// Numbers of packets that were matched, over all subscribers. `missing` and `extra` are 0 if every object had exactly
/// one copy for each subscriber.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Matched {
    /// Packets with objects that arrived at the relay in the period.
    pub objects: u64,
    /// Flows to subscribers that carried copies of objects.
    pub subscribers: u64,
    /// Copies that were matched. Copies still on their way at the end are left out.
    pub copies: u64,
    /// Copies that should have left the relay in the period but did not, over all subscribers.
    pub missing: u64,
    /// Packets that the relay sent to subscribers in addition to one copy of each object, such as retransmissions and
    /// path MTU probes, and large packets to other clients at the subscribers' host, such as those of a handshake.
    pub extra: u64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WireFigures {
    /// Time from arrival at the relay's interface to departure, for each copy.
    pub latencies_ns: Vec<u64>,
    pub matched: Matched,
}

/// Matches the packets that the probe recorded in a period. If the probe recorded an object's arrival, it must also
/// have recorded the copies that left. So the probe must be attached to the subscribers' interface before it is
/// attached to the publisher's.
pub fn matched(samples: &[PacketSample], ends: &WireHosts) -> WireFigures {
    let mut entered = Vec::new();
    let mut left: BTreeMap<SocketAddr, Vec<u64>> = BTreeMap::new();
    for sample in samples {
        let times = match sample.hook {
            KernelHook::Ingress if sample.source.ip() == ends.publisher => &mut entered,
            KernelHook::Egress if sample.destination.ip() == ends.subscribers => {
                left.entry(sample.destination).or_default()
            }
            _ => continue,
        };
        times.extend((0..sample.packets(ends.object_bytes)).map(|_| sample.time_ns));
    }
    // Each CPU reads the clock before it reserves space in the ring buffer, so samples of two CPUs may be out of order.
    entered.sort_unstable();
    let mut wire = WireFigures { latencies_ns: Vec::new(), matched: Matched::default() };
    wire.matched.objects = entered.len() as u64;
    let mut flows: Vec<_> = left.into_values().collect();
    flows.sort_by_key(|copies| std::cmp::Reverse(copies.len()));
    let others = flows.split_off(ends.flows.min(flows.len()));
    wire.matched.subscribers = flows.len() as u64;
    wire.matched.extra = others.iter().map(|packets| packets.len() as u64).sum();
    for copies in &mut flows {
        copies.sort_unstable();
        wire.add(&entered, copies);
    }
    wire
}

impl WireFigures {
    /// Matches the copies for one subscriber with the objects that arrived at the relay.
    fn add(&mut self, entered: &[u64], left: &[u64]) {
        let (Some(first), Some(last)) = (entered.first(), entered.last()) else { return };
        // Copies before the first object belong to objects whose arrival the probe did not record.
        let left = left.get(left.partition_point(|time| time < first)..).unwrap_or_default();
        match settled(entered, left) {
            Some(count) => {
                self.matched.copies += count as u64;
                let pairs = entered.iter().zip(left).take(count);
                self.latencies_ns.extend(pairs.map(|(came, went)| went - came));
            }
            None => {
                // Copies of the last object may leave after the period, so that object is left out.
                let left = left.get(..left.partition_point(|time| time < last)).unwrap_or_default();
                self.matched.copies += left.len() as u64;
                self.add_nearest(entered.get(..entered.len() - 1).unwrap_or_default(), left);
            }
        }
    }

    /// Matches the copies for one subscriber if there are more or fewer of them than objects. A copy belongs to the
    /// latest object that arrived before the copy left, and each object gets at most one copy. So no latency can exceed
    /// the time between two objects.
    fn add_nearest(&mut self, entered: &[u64], left: &[u64]) {
        let mut last = None;
        let mut with_copy = 0;
        for went in left {
            // The copy belongs to the latest object that arrived before the copy left.
            let index = entered.partition_point(|came| came <= went).checked_sub(1);
            match index.and_then(|index| entered.get(index)) {
                Some(came) if index != last => {
                    self.latencies_ns.push(went - came);
                    with_copy += 1;
                    last = index;
                }
                _ => self.matched.extra += 1,
            }
        }
        self.matched.missing += entered.len() as u64 - with_copy;
    }
}

/// Finds the latest moment, in the second half of the period, when as many copies had left as objects had arrived.
/// Returns that number of objects. Returns `None` if there is no such moment, or if a copy left before its object
/// arrived.
fn settled(entered: &[u64], left: &[u64]) -> Option<usize> {
    let count = (entered.len() / 2..entered.len()).rev().find(|count| {
        entered.get(*count).is_some_and(|next| left.partition_point(|went| went < next) == *count)
    })?;
    let in_order = entered.iter().zip(left).take(count).all(|(came, went)| came <= went);
    in_order.then_some(count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PUBLISHER: &str = "10.0.0.1:5000";
    const RELAY: &str = "10.0.0.2:4443";
    const ENDS: WireHosts = WireHosts {
        publisher: IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 1)),
        subscribers: IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 1, 1)),
        flows: 2,
        object_bytes: 1200,
    };

    fn sample(time_ns: u64, hook: KernelHook, source: &str, destination: &str) -> PacketSample {
        PacketSample {
            time_ns,
            ifindex: 1,
            hook,
            source: source.parse().expect("an address"),
            destination: destination.parse().expect("an address"),
            payload_bytes: 1230,
            segment_bytes: None,
            vlan: None,
        }
    }

    fn came(time_ns: u64) -> PacketSample {
        sample(time_ns, KernelHook::Ingress, PUBLISHER, RELAY)
    }

    fn went(time_ns: u64, port: u16) -> PacketSample {
        sample(time_ns, KernelHook::Egress, RELAY, &format!("10.0.1.1:{port}"))
    }

    fn run(samples: &[PacketSample]) -> WireFigures {
        matched(&[samples, &[came(10_000)]].concat(), &ENDS)
    }

    #[test]
    fn forwarded_copies_are_matched_by_order_per_subscriber() {
        let wire = run(&[
            came(100),
            went(150, 1),
            went(160, 2),
            came(200),
            went(270, 2),
            went(280, 1),
            came(300),
            went(310, 1),
            went(320, 2),
        ]);
        let mut latencies = wire.latencies_ns.clone();
        latencies.sort_unstable();
        assert_eq!(latencies, [10, 20, 50, 60, 70, 80]);
        assert_eq!(wire.matched, Matched { objects: 4, subscribers: 2, copies: 6, missing: 0, extra: 0 });
    }

    #[test]
    fn latency_above_the_send_period_is_matched_if_no_copy_is_missing() {
        let wire = run(&[came(100), came(200), went(250, 1), went(300, 1)]);
        assert_eq!(wire.latencies_ns, [150, 100]);
    }

    #[test]
    fn missing_and_extra_copies_are_counted() {
        // The first object has no copy, and the third one has two.
        let wire =
            run(&[came(100), came(200), went(230, 1), came(300), went(340, 1), went(350, 1), went(360, 1)]);
        assert_eq!(wire.latencies_ns, [30, 40]);
        assert_eq!(wire.matched, Matched { objects: 4, subscribers: 1, copies: 4, missing: 1, extra: 2 });
    }

    #[test]
    fn packets_that_are_no_objects_are_ignored() {
        let small = PacketSample { payload_bytes: 60, ..came(110) };
        let other = sample(120, KernelHook::Ingress, "10.0.9.9:1", RELAY);
        let to_publisher = sample(130, KernelHook::Egress, RELAY, PUBLISHER);
        let wire = run(&[went(50, 1), came(100), small, other, to_publisher, went(150, 1)]);
        assert_eq!(wire.latencies_ns, [50]);
        assert_eq!(wire.matched.copies, 1);
    }

    #[test]
    fn unsorted_packet_samples_match_objects_to_copies_except_the_last() {
        // The copy sent at 50 ns has no object among the samples, since the first object arrived at 100 ns. The last
        // object arrived at 400 ns and is left out, with its copy sent at 440 ns.
        let samples =
            [went(50, 1), went(280, 1), came(260), came(100), went(130, 1), came(400), went(440, 1)];
        let wire = matched(&samples, &ENDS);
        assert_eq!(wire.latencies_ns, [30, 20]);
        assert_eq!(wire.matched, Matched { objects: 3, subscribers: 1, copies: 2, missing: 0, extra: 0 });
        assert_eq!(matched(&[], &ENDS).matched, Matched::default());
    }

    #[test]
    fn copies_in_flight_at_the_end_are_not_missing() {
        let wire = matched(&[came(100), went(110, 1), came(200), went(210, 1), came(300), came(400)], &ENDS);
        assert_eq!(wire.latencies_ns, [10, 10]);
        assert_eq!(wire.matched, Matched { objects: 4, subscribers: 1, copies: 2, missing: 0, extra: 0 });
    }

    #[test]
    fn flows_of_other_clients_are_no_subscribers() {
        let copies = [came(100), went(110, 1), went(120, 2), came(200), went(210, 1), went(220, 2)];
        let wire = run(&[&copies[..], &[went(230, 3)]].concat());
        assert_eq!(wire.latencies_ns, [10, 10, 20, 20]);
        assert_eq!(wire.matched, Matched { objects: 3, subscribers: 2, copies: 4, missing: 0, extra: 1 });
    }

    #[test]
    fn gso_super_packets_count_by_segment() {
        let pair = PacketSample { payload_bytes: 2460, segment_bytes: Some(1230), ..came(100) };
        let wire = run(&[pair, went(150, 1), went(160, 1)]);
        assert_eq!(wire.latencies_ns, [50, 60]);
    }
}
