//! Decides which packets are lost, and whether a loss means congestion (RFC 9002, sections 6.1, 7.3 and 7.6).

use std::time::{Duration, Instant};

use crate::ack::EcnCounts;

use super::{BASE_MTU, GRANULARITY, LostPacket, Recovery, RecoveryOutcome, RecoveryPacket, Slot};

/// Largest packet threshold of loss detection. On a path that reorders packets by more, losses are declared wrongly.
const MAX_PACKET_THRESHOLD: u64 = 128;
/// Number of probe timeouts after which losses are persistent congestion: kPersistentCongestionThreshold (RFC 9002,
/// section 7.6.1).
const PERSISTENT_CONGESTION_THRESHOLD: u32 = 3;
/// Largest number of lost packets that are remembered, to detect late acknowledgements.
const MAX_LOST: usize = 256;

/// A packet that was declared lost.
pub(super) struct LostEntry<T> {
    number: u64,
    packet: RecoveryPacket<T>,
    /// Time when the packet was declared lost.
    at: Instant,
    /// True if the packet's loss led to the last reduction of the window.
    blamed: bool,
}

impl<T: Clone> Recovery<T> {
    /// Notes that packets from `first` to `last` are acknowledged. Packets in this range that were wrongly declared
    /// lost count as acknowledged.
    pub(super) fn on_late_ack(&mut self, first: u64, last: u64, outcome: &mut RecoveryOutcome<T>) {
        let start = self.lost.partition_point(|lost| lost.number < first);
        while let Some(lost) = self.lost.get(start)
            && lost.number <= last
        {
            let Some(lost) = self.lost.remove(start) else { return };
            let distance = self.largest_acked.unwrap_or_default().saturating_sub(lost.number);
            // The path reorders by `distance` packets, so the packet threshold is raised above `distance`.
            self.packet_threshold = self.packet_threshold.max(distance + 1).min(MAX_PACKET_THRESHOLD);
            if lost.blamed && self.blamed > 0 {
                self.blamed -= 1;
                if self.blamed == 0 {
                    self.controller.on_spurious_congestion();
                }
            }
            self.delivery.on_late(lost.packet.size);
            if let Some(content) = lost.packet.content {
                self.counts.spurious_losses += 1;
                outcome.acked.push(content);
            }
        }
    }

    /// Declares packets lost, and reports the losses to the controller.
    pub(super) fn detect(&mut self, now: Instant, outcome: &mut RecoveryOutcome<T>) {
        self.loss_time = None;
        let Some(largest_acked) = self.largest_acked else { return };
        let delay = self.rtt.loss_delay(GRANULARITY);
        let mut newest: Option<Instant> = None;
        let mut outage = Outage::default();
        for number in self.base..largest_acked.saturating_add(1).min(self.next()) {
            let Some(slot) = self.sent.get_mut((number - self.base) as usize) else { break };
            let packet = match slot {
                Slot::InFlight(packet) => packet,
                Slot::Resolved { acked: true } => {
                    outage.interrupt();
                    continue;
                }
                _ => continue,
            };
            let overdue = packet.sent + delay;
            // A packet is declared lost by the packet threshold or by the time threshold (RFC 9002, section 6.1).
            if overdue > now && largest_acked - number < self.packet_threshold {
                self.loss_time = Some(self.loss_time.map_or(overdue, |at| at.min(overdue)));
                outage.interrupt();
                continue;
            }
            let Slot::InFlight(packet) = std::mem::replace(slot, Slot::Resolved { acked: false }) else {
                continue;
            };
            self.leave_flight(&packet);
            self.delivery.on_lost(packet.size);
            if packet.marked {
                self.ecn.on_lost();
            }
            if !packet.mtu_probe {
                self.controller.on_lost(&LostPacket {
                    now,
                    size: packet.size,
                    in_flight: packet.snapshot.in_flight,
                    lost: self.delivery.lost_since(&packet.snapshot),
                    app_limited: packet.snapshot.app_limited,
                    delivered: self.delivery.delivered(),
                });
                newest = newest.max(Some(packet.sent));
                // Losses of packets up to the base MTU tell nothing about the path MTU, so they are not reported to
                // `PathMtu`.
                if packet.size > BASE_MTU {
                    self.path_mtu.on_lost(now, packet.sent);
                }
                if self.sampled_at.is_some_and(|at| packet.sent > at) {
                    outage.extend(packet.sent);
                }
            }
            match &packet.content {
                Some(content) => {
                    self.counts.packets_lost += 1;
                    outcome.lost.push(content.clone());
                }
                None => self.counts.stack_lost += 1,
            }
            self.remember(LostEntry { number, packet, at: now, blamed: false });
        }
        if let Some(newest) = newest {
            self.congestion(now, newest);
            if outage.longest > self.persistent_duration() {
                self.controller.on_persistent_congestion(now);
                self.rtt.forget_min();
                self.reduced_at = None;
            }
        }
    }

    /// Evaluates the ECN counts of an ACK frame that newly acknowledges `marked` packets sent as ECT(0). `newest` is
    /// the send time of the newest of these packets. The controller treats a CE mark like a loss (RFC 9002, section
    /// 7.1), but nothing is retransmitted.
    pub(super) fn take_marks(
        &mut self,
        now: Instant,
        newest: Instant,
        marked: u64,
        counts: Option<EcnCounts>,
    ) {
        let most = self.counts.packets_sent + self.counts.stack_sent;
        let ce = self.ecn.on_ack(marked, most, counts);
        let Some(snapshot) = self.delivery.newest().filter(|_| ce > 0) else { return };
        self.counts.marked += ce;
        // ECN counts have no packet sizes, so each CE mark counts as a full-sized packet.
        let size = ce * self.mtu();
        self.delivery.on_lost(size);
        self.controller.on_lost(&LostPacket {
            now,
            size,
            in_flight: snapshot.in_flight,
            lost: self.delivery.lost_since(&snapshot),
            app_limited: snapshot.app_limited,
            delivered: self.delivery.delivered(),
        });
        if self.reduced_at.is_none_or(|at| newest > at) {
            self.congestion(now, newest);
        }
        // A reduction for CE marks must not be undone when losses turn out to be spurious.
        self.blamed = 0;
        self.lost.iter_mut().for_each(|lost| lost.blamed = false);
    }

    /// Reduces the window once per round trip: only if the lost packet was sent after the last reduction.
    fn congestion(&mut self, now: Instant, newest: Instant) {
        let fresh = self.reduced_at.is_none_or(|at| newest > at);
        if fresh {
            self.reduced_at = Some(now);
            self.blamed = 0;
            self.counts.congestion_events += 1;
            self.controller.on_congestion(now);
        }
        for lost in &mut self.lost {
            // Losses of packets sent before the reduction belong to the same congestion event.
            let joins = lost.at == now && !lost.packet.mtu_probe;
            if joins && (fresh || !lost.blamed) {
                self.blamed += 1;
            }
            lost.blamed = joins || (lost.blamed && !fresh);
        }
    }

    /// Remembers a lost packet. The list is sorted by number, because a packet that was reported late may follow larger
    /// numbers.
    fn remember(&mut self, lost: LostEntry<T>) {
        let index = self.lost.partition_point(|other| other.number < lost.number);
        self.lost.insert(index, lost);
    }

    /// Forgets packets that were declared lost longer ago than the duration of persistent congestion. Their
    /// acknowledgement is not expected any more.
    pub(super) fn prune(&mut self, now: Instant) {
        let keep = self.persistent_duration();
        while let Some(lost) = self.lost.front()
            && (self.lost.len() > MAX_LOST || now.saturating_duration_since(lost.at) > keep)
        {
            self.lost.pop_front();
        }
        self.trim();
    }

    fn persistent_duration(&self) -> Duration {
        self.rtt.probe_timeout(GRANULARITY, self.config.max_ack_delay) * PERSISTENT_CONGESTION_THRESHOLD
    }
}

/// The longest period in which every packet was lost, for detecting persistent congestion (RFC 9002, section 7.6.2).
#[derive(Default)]
struct Outage {
    start: Option<Instant>,
    longest: Duration,
}

impl Outage {
    fn extend(&mut self, sent: Instant) {
        let start = *self.start.get_or_insert(sent);
        self.longest = self.longest.max(sent.saturating_duration_since(start));
    }

    fn interrupt(&mut self) {
        self.start = None;
    }
}
