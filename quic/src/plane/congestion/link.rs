//! A simulated bottleneck for tests. Flows that always have data share its rate and its bounded queue, and packets are
//! lost at random.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    time::{Duration, Instant},
};

use super::{AckEffect, Acked, Controller, Delivery, LostPacket, RateSnapshot, SendingPacket};

pub const MTU: u64 = 1250;

pub struct SimulatedLink {
    /// Rate of the bottleneck in bytes per second.
    pub rate: u64,
    pub rtt: Duration,
    /// Size of the bottleneck's queue in bytes.
    pub queue: u64,
    /// Probability that a packet is lost at random.
    pub loss: f64,
}

/// A flow's measured share of the link's rate, and the fraction of its packets that was lost.
#[derive(Debug)]
pub struct FlowOutcome {
    /// The flow's share of the link's rate, 0 to 1.
    pub share: f64,
    /// Fraction of the flow's packets that was lost.
    pub lost: f64,
}

struct SimulatedFlow {
    controller: Box<dyn Controller>,
    delivery: Delivery,
    under_way: BTreeMap<u64, (Instant, RateSnapshot)>,
    next: u64,
    may_send: Instant,
    /// Start of the recovery period. Losses of packets sent before this time are no new congestion event.
    recovers: Option<Instant>,
    /// Number of bytes acknowledged.
    acked: u64,
    lost: u64,
}

impl SimulatedLink {
    /// Runs the flows until `end`, and measures them from `warm` on. `warm` and `end` are durations since `start`.
    pub fn run(
        &self,
        start: Instant,
        controllers: Vec<Box<dyn Controller>>,
        warm: Duration,
        end: Duration,
    ) -> Vec<FlowOutcome> {
        let mut flows: Vec<_> =
            controllers.into_iter().map(|controller| SimulatedFlow::new(controller, start)).collect();
        let mut acks: BinaryHeap<Reverse<(Instant, usize, u64)>> = BinaryHeap::new();
        let mut now = start;
        let mut free = start;
        let mut random = 0x2545_f491_4f6c_dd1d_u64;
        let mut before = vec![(0, 0); flows.len()];
        let mut is_warm = false;
        while now < start + end {
            if !is_warm && now >= start + warm {
                is_warm = true;
                before = flows.iter().map(|flow| (flow.acked, flow.lost)).collect();
            }
            for (index, flow) in flows.iter_mut().enumerate() {
                while let Some(number) = flow.send(now, self.rtt) {
                    random = random
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let is_lost = ((random >> 11) as f64 / (1_u64 << 53) as f64) < self.loss;
                    let waiting = free.saturating_duration_since(now).as_secs_f64() * self.rate as f64;
                    if is_lost || waiting as u64 + MTU > self.queue {
                        continue;
                    }
                    free = free.max(now) + Duration::from_secs_f64(MTU as f64 / self.rate as f64);
                    acks.push(Reverse((free + self.rtt, index, number)));
                }
            }
            let soonest = flows.iter().filter(|flow| flow.has_room()).map(|flow| flow.may_send).min();
            let ack = acks.peek().map(|Reverse((at, ..))| *at);
            match (ack, soonest) {
                (Some(ack), soonest) if soonest.is_none_or(|at| ack <= at) => {
                    if let Some(Reverse((at, index, number))) = acks.pop() {
                        now = at;
                        flows[index].on_ack(now, self.rtt, number);
                    }
                }
                (_, Some(soonest)) => now = now.max(soonest),
                // No ACK is due and no flow may send, so all packets in flight were lost and are declared lost.
                _ => {
                    now += 3 * self.rtt;
                    flows.iter_mut().for_each(|flow| flow.on_lost(now, u64::MAX));
                }
            }
        }
        let capacity = self.rate as f64 * (end - warm).as_secs_f64();
        let outcome = |(flow, (acked, lost)): (&SimulatedFlow, (u64, u64))| {
            let acked = (flow.acked - acked) as f64;
            let lost = (flow.lost - lost) as f64;
            FlowOutcome { share: acked / capacity, lost: lost / (acked + lost) }
        };
        flows.iter().zip(before).map(outcome).collect()
    }
}

impl SimulatedFlow {
    fn new(controller: Box<dyn Controller>, start: Instant) -> Self {
        Self {
            controller,
            delivery: Delivery::new(start),
            under_way: BTreeMap::new(),
            next: 0,
            may_send: start,
            recovers: None,
            acked: 0,
            lost: 0,
        }
    }

    fn in_flight(&self) -> u64 {
        self.under_way.len() as u64 * MTU
    }

    fn has_room(&self) -> bool {
        self.in_flight() + MTU <= self.controller.window()
    }

    fn send(&mut self, now: Instant, rtt: Duration) -> Option<u64> {
        if self.may_send > now || !self.has_room() {
            return None;
        }
        let in_flight = self.in_flight();
        self.controller.on_sent(&SendingPacket { now, in_flight, app_limited: false });
        let snapshot = self.delivery.on_sent(now, in_flight, MTU);
        let pause = MTU as f64 / self.controller.pacing_rate(rtt).max(1) as f64;
        self.may_send = now + Duration::from_secs_f64(pause);
        self.under_way.insert(self.next, (now, snapshot));
        self.next += 1;
        Some(self.next - 1)
    }

    fn on_ack(&mut self, now: Instant, rtt: Duration, number: u64) {
        let was_full = !self.has_room();
        let Some((sent, snapshot)) = self.under_way.remove(&number) else { return };
        self.on_lost(now, number.saturating_sub(2));
        self.acked += MTU;
        self.delivery.on_acked(now, sent, MTU, snapshot);
        let trip = now - sent;
        let in_flight = self.in_flight();
        if self.recovers.is_none_or(|since| sent > since) {
            let acked = Acked { bytes: MTU, sent, rtt: trip, smoothed_rtt: trip, app_limited: false };
            self.controller.on_ack(now, &acked);
        }
        if let Some(sample) = self.delivery.sample(rtt) {
            let total = self.delivery.delivered();
            let delivered = AckEffect {
                now,
                acked: MTU,
                total,
                sample,
                rtt: Some(trip),
                in_flight,
                window_limited: was_full,
            };
            self.controller.on_delivered(&delivered);
        }
    }

    /// Declares packets with numbers below `number` lost, if they are still in flight.
    fn on_lost(&mut self, now: Instant, number: u64) {
        let later = self.under_way.split_off(&number);
        for (sent, snapshot) in std::mem::replace(&mut self.under_way, later).into_values() {
            self.lost += MTU;
            self.delivery.on_lost(MTU);
            self.controller.on_lost(&LostPacket {
                now,
                size: MTU,
                in_flight: snapshot.in_flight,
                lost: self.delivery.lost_since(&snapshot),
                app_limited: false,
                delivered: self.delivery.delivered(),
            });
            if self.recovers.is_none_or(|since| sent > since) {
                self.recovers = Some(now);
                self.controller.on_congestion(now);
            }
        }
    }
}
