//! Loss detection and probing over the packet numbers on the wire (RFC 9002).
//!
//! All senders of the connection draw from one sequence of numbers. Each packet of the data plane or of the offload is
//! stored with a `T` that describes its content. Packets of the QUIC stack count as bytes in flight, and their losses
//! as congestion, but the stack retransmits their contents itself.

mod loss;
mod loss_rate;
mod path_mtu;
mod rtt;

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use loss::LostEntry;
use loss_rate::LossRate;
pub use path_mtu::BASE_MTU;
use path_mtu::PathMtu;
pub use rtt::Rtt;

use super::{
    congestion::{
        AckEffect, Acked, CongestionAlgorithm, Controller, Delivery, LostPacket, RateSnapshot, SendingPacket,
    },
    ecn::Ecn,
    types::AckRanges,
};

/// kPacketThreshold (RFC 9002, section 6.1.1): the initial packet threshold, which grows if the path reorders packets
/// by more.
const PACKET_THRESHOLD: u64 = 3;
/// Number of packets for whose state memory is kept while fewer are in flight.
const IDLE_SLOTS: usize = 8;
/// Granularity of timers: kGranularity (RFC 9002, section 6.1.2).
const GRANULARITY: Duration = Duration::from_millis(1);
/// Number of packets sent per probe timeout (RFC 9002, section 6.2.4).
const PROBES: u8 = 2;
/// Largest number of doublings of the probe timeout. The QUIC stack's idle timeout ends the connection.
const MAX_BACKOFF: u32 = 16;
/// A sender has to report each packet to loss recovery before this many later packet numbers are used. Otherwise the
/// packet's number is forgotten.
const REPORT_LAG: u64 = 64;
/// Time after ECN marking was switched on in which packets of the kernel offload may still leave without ECT(0).
const OFFLOAD_LAG: Duration = Duration::from_millis(100);
/// Largest number of packet numbers that are remembered in addition to the data plane's packets in flight. More would
/// be needed only if a peer sends very many packets and acknowledges none, and then the connection is closed.
const MAX_OTHERS: u64 = 1 << 14;
/// Largest number of the data plane's packets in flight, however small they are.
const MAX_OWN: u64 = 1 << 16;

/// Settings of loss recovery.
#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// The congestion controller.
    pub algorithm: CongestionAlgorithm,
    /// Initial path MTU: the largest UDP payload to send, bytes.
    pub mtu: u64,
    /// Round trip that is assumed before the first sample.
    pub initial_rtt: Duration,
    /// The peer's transport parameter max_ack_delay.
    pub max_ack_delay: Duration,
    /// True if packets are marked ECT(0) on paths that deliver ECN marks unchanged.
    pub ecn: bool,
}

/// Lists of the contents of packets that were acknowledged or lost. The caller passes the same struct to each call, so
/// that memory is allocated only once.
#[derive(Debug)]
pub struct RecoveryOutcome<T> {
    /// Contents of packets that were acknowledged.
    pub acked: Vec<T>,
    /// Contents of packets that were lost.
    pub lost: Vec<T>,
}

/// Error: an ACK frame named a packet number that was never sent (a connection error: RFC 9000, section 13.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("packet number {0} was acknowledged but never sent")]
pub struct NeverSent(pub u64);

/// Counts since the connection began. Packets are the data plane's, including offloaded ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveryCounts {
    /// Packets that were sent.
    pub packets_sent: u64,
    /// Bytes of UDP payload that were sent.
    pub bytes_sent: u64,
    /// Packets that were declared lost.
    pub packets_lost: u64,
    /// Packets that were acknowledged.
    pub packets_acked: u64,
    /// Packets that were declared lost and acknowledged later.
    pub spurious_losses: u64,
    /// Ack-eliciting packets that the QUIC stack sent.
    pub stack_sent: u64,
    /// Ack-eliciting packets of the QUIC stack that were declared lost.
    pub stack_lost: u64,
    /// Number of times that a probe timeout expired (RFC 9002, section 6.2).
    pub probe_timeouts: u64,
    /// Number of congestion events that were reported to the controller.
    pub congestion_events: u64,
    /// Packets that the network has marked CE.
    pub marked: u64,
}

/// The state of all packets in flight, the round-trip time and the congestion window.
///
/// Senders report packets with [`Self::on_sent`], [`Self::on_stack_sent`] and [`Self::on_offloaded_sent`], roughly in
/// the order of their numbers. [`Self::on_ack`] and [`Self::on_timeout`] decide which are acknowledged or lost. A
/// number is *unused* until its packet is reported, then *in flight*, and *past* once the packet is acknowledged or
/// lost; a lost packet is remembered for a while, in case its acknowledgement arrives late. [`Self::timeout`] may
/// change with each call.
pub struct Recovery<T> {
    config: Config,
    controller: Box<dyn Controller>,
    delivery: Delivery,
    /// Round-trip times.
    pub rtt: Rtt,
    /// State of each packet number from `base` on. The packet with number `base` is in flight, or its sender may still
    /// report it.
    sent: VecDeque<Slot<T>>,
    base: u64,
    /// Packets that were declared lost recently, by number.
    lost: VecDeque<LostEntry<T>>,
    largest_acked: Option<u64>,
    packet_threshold: u64,
    /// Bytes in flight of all senders. The field `stack_in_flight` counts those of the QUIC stack alone.
    in_flight: u64,
    stack_in_flight: u64,
    /// Number of the data plane's packets in flight.
    own_packets: u64,
    last_own_sent: Option<Instant>,
    loss_time: Option<Instant>,
    pto_count: u32,
    /// Number of probe packets that are still to be sent after a probe timeout.
    probes: u8,
    /// Time of the last reduction of the congestion window. Losses of packets sent before it do not reduce the window
    /// again.
    reduced_at: Option<Instant>,
    /// Number of packets whose loss led to the last reduction of the window, and that were not acknowledged since. At 0
    /// the reduction is undone.
    blamed: u64,
    /// Time of the first round-trip sample. Losses before it do not establish persistent congestion (RFC 9002, section
    /// 7.6.2).
    sampled_at: Option<Instant>,
    path_mtu: PathMtu,
    counts: RecoveryCounts,
    loss_rate: LossRate,
    ecn: Ecn,
    /// Time at which the kernel offload began to mark its packets ECT(0); `None` while it does not mark them.
    offload_marks: Option<Instant>,
}

enum Slot<T> {
    /// The packet number was skipped, or the packet's sender has not reported the packet yet.
    Unused,
    /// The packet was forgotten: its number was skipped, or it was lost or acknowledged long ago.
    Past,
    /// The packet is not ack-eliciting, so its loss would not be noticed.
    NonEliciting,
    /// The packet was acknowledged or declared lost.
    Resolved {
        acked: bool,
    },
    InFlight(RecoveryPacket<T>),
}

struct RecoveryPacket<T> {
    sent: Instant,
    size: u64,
    snapshot: RateSnapshot,
    /// The packet's content; `None` for a packet of the QUIC stack.
    content: Option<T>,
    /// True if the packet probes a larger MTU, so its loss is no sign of congestion.
    mtu_probe: bool,
    /// True if the packet was sent as ECT(0).
    marked: bool,
}

impl<T> Default for RecoveryOutcome<T> {
    fn default() -> Self {
        Self { acked: Vec::new(), lost: Vec::new() }
    }
}

impl<T: Clone> Recovery<T> {
    /// Creates the state of a new connection.
    pub fn new(config: Config, now: Instant) -> Self {
        Self {
            config,
            controller: config.algorithm.start(config.mtu, now),
            delivery: Delivery::new(now),
            rtt: Rtt::new(config.initial_rtt),
            sent: VecDeque::new(),
            base: 0,
            lost: VecDeque::new(),
            largest_acked: None,
            packet_threshold: PACKET_THRESHOLD,
            in_flight: 0,
            stack_in_flight: 0,
            own_packets: 0,
            last_own_sent: None,
            loss_time: None,
            pto_count: 0,
            probes: 0,
            reduced_at: None,
            blamed: 0,
            sampled_at: None,
            path_mtu: PathMtu::new(config.mtu),
            counts: RecoveryCounts::default(),
            loss_rate: LossRate::new(now),
            ecn: Ecn::new(config.ecn),
            offload_marks: None,
        }
    }

    /// Notes that the data plane sent a packet of `size` bytes of UDP payload.
    pub fn on_sent(&mut self, now: Instant, number: u64, size: usize, content: T) {
        // Any packet of the data plane counts as one of the probes to be sent after a probe timeout.
        self.probes = self.probes.saturating_sub(1);
        let marked = self.ecn.marks();
        if marked {
            self.ecn.on_sent();
        }
        self.on_own_sent(now, number, size, content, marked);
    }

    /// Notes that the kernel offload sent a packet of the data plane's streams or datagrams, at `sent`.
    pub fn on_offloaded_sent(&mut self, sent: Instant, number: u64, size: usize, content: T) {
        // The kernel offload may have sent the packet without ECT(0) while ECN marking was being switched on. Counting
        // too few marked packets is harmless.
        let marked = self.offload_marks.is_some_and(|since| sent > since + OFFLOAD_LAG);
        self.on_own_sent(sent, number, size, content, marked);
    }

    fn on_own_sent(&mut self, sent: Instant, number: u64, size: usize, content: T, marked: bool) {
        let size = size as u64;
        self.counts.packets_sent += 1;
        self.counts.bytes_sent += size;
        self.last_own_sent = self.last_own_sent.max(Some(sent));
        let snapshot = self.depart(sent, size);
        let mtu_probe = size > self.mtu();
        self.path_mtu.on_sent(sent, size);
        let packet = RecoveryPacket { sent, size, snapshot, content: Some(content), mtu_probe, marked };
        self.record(number, Slot::InFlight(packet));
    }

    /// Notes that the QUIC stack sent a packet.
    pub fn on_stack_sent(&mut self, now: Instant, number: u64, size: usize, ack_eliciting: bool) {
        if !ack_eliciting {
            return self.record(number, Slot::NonEliciting);
        }
        let size = size as u64;
        self.counts.stack_sent += 1;
        let mtu_probe = size > self.mtu();
        let snapshot = self.depart(now, size);
        let packet = RecoveryPacket { sent: now, size, snapshot, content: None, mtu_probe, marked: false };
        self.record(number, Slot::InFlight(packet));
    }

    /// Processes a whole ACK frame. Adds the data plane's packets that it acknowledges, or reveals as lost, to
    /// `outcome`.
    ///
    /// `app_limited` is true if the data plane had nothing to send although the congestion window allowed it.
    ///
    /// # Errors
    /// Fails if the frame names a packet number that was not sent, or whose sender has not reported it yet. The frame's
    /// other numbers have been processed in this case. The caller may pass the same frame again after the sender's
    /// report.
    pub fn on_ack(
        &mut self,
        now: Instant,
        ack: &AckRanges,
        app_limited: bool,
        outcome: &mut RecoveryOutcome<T>,
    ) -> Result<(), NeverSent> {
        let Some(largest) = ack.ranges.first().map(|range| *range.end()) else { return Ok(()) };
        let mut newly = Newly::default();
        self.loss_rate.on_ack(now, &self.counts);
        // The sender is limited by the congestion window if a full-sized packet does not fit into the window any more.
        let window_limited = !app_limited && self.in_flight + self.mtu() > self.controller.window();
        // Acknowledging a packet that was never sent is an error (RFC 9000, section 13.1). But the packet's sender may
        // not have reported it yet, so the frame's other numbers are processed first.
        if largest >= self.next() {
            newly.never_sent = Some(largest);
        }
        for range in &ack.ranges {
            let first = *range.start();
            let end = range.end().saturating_add(1).min(self.next());
            if let Some(last) = end.checked_sub(1) {
                self.on_late_ack(first, last, outcome);
            }
            for number in first.max(self.base)..end {
                self.acknowledge(now, number, largest, &mut newly, outcome);
            }
        }
        let result = newly.never_sent.map_or(Ok(()), |number| Err(NeverSent(number)));
        // Counts of a reordered ACK frame must not be validated (RFC 9000, section 13.4.2.1).
        let raises = newly.last > self.largest_acked && result.is_ok();
        self.largest_acked = self.largest_acked.max(newly.last);
        let Some(newest) = newly.newest else { return result };
        if newly.largest {
            // A delay beyond the peer's max_ack_delay is capped (RFC 9002, section 5.3).
            let delay = ack.delay.min(self.config.max_ack_delay);
            self.rtt.sample(now.saturating_duration_since(newest), delay);
            self.sampled_at.get_or_insert(now);
        }
        // Any new acknowledgement resets the backoff (RFC 9002, section 6.2.1).
        self.pto_count = 0;
        if newly.bytes > 0 {
            let acked = Acked {
                bytes: newly.bytes,
                sent: newest,
                rtt: self.rtt.latest(),
                smoothed_rtt: self.rtt.smoothed(),
                app_limited,
            };
            self.controller.on_ack(now, &acked);
        }
        self.detect(now, outcome);
        if raises {
            self.take_marks(now, newest, newly.marked, ack.ecn);
        }
        if let Some(sample) = self.delivery.sample(self.rtt.min()) {
            self.controller.on_delivered(&AckEffect {
                now,
                acked: newly.all_bytes,
                total: self.delivery.delivered(),
                sample,
                rtt: newly.largest.then(|| self.rtt.latest()),
                in_flight: self.in_flight,
                window_limited,
            });
        }
        self.prune(now);
        result
    }

    /// Notes that there is nothing to send. This marks the sender as application-limited if the congestion window is
    /// not full.
    pub fn on_app_limited(&mut self) {
        if self.in_flight + self.mtu() <= self.controller.window() {
            self.delivery.on_app_limited(self.in_flight);
        }
    }

    /// Returns the time at which [`Recovery::on_timeout`] has to be called next.
    pub fn timeout(&self) -> Option<Instant> {
        self.loss_time.or_else(|| self.probe_time())
    }

    /// Returns whether a probe timeout has expired. Then [`Recovery::probes`] packets have to be sent, even if the
    /// window is full.
    pub fn on_timeout(&mut self, now: Instant, outcome: &mut RecoveryOutcome<T>) -> bool {
        if self.loss_time.is_some_and(|at| at <= now) {
            self.detect(now, outcome);
            self.prune(now);
            return false;
        }
        if self.loss_time.is_some() || self.probe_time().is_none_or(|at| at > now) {
            return false;
        }
        self.pto_count += 1;
        self.counts.probe_timeouts += 1;
        self.probes = PROBES;
        true
    }

    /// Returns the number of probe packets that are still to be sent.
    pub fn probes(&self) -> u8 {
        self.probes
    }

    /// Returns whether the peer's next acknowledgement may be read with a delay: no loss is suspected, no probe timeout
    /// has expired, and no packet of the QUIC stack is in flight.
    pub fn is_steady(&self) -> bool {
        self.loss_time.is_none() && self.pto_count == 0 && self.probes == 0 && self.stack_in_flight == 0
    }

    /// Returns the data plane's packets in flight, oldest first.
    pub fn own_in_flight(&self) -> impl Iterator<Item = &T> {
        self.sent.iter().filter_map(|slot| match slot {
            Slot::InFlight(packet) => packet.content.as_ref(),
            _ => None,
        })
    }

    /// Returns whether a full-sized packet fits into the congestion window. `unreported` is the number of bytes that
    /// the kernel offload may have sent and not reported yet.
    pub fn window_open(&self, unreported: u64) -> bool {
        self.in_flight + unreported + self.mtu() <= self.controller.window() && self.own_packets < MAX_OWN
    }

    /// Returns how many bytes a sender without pacing may send now.
    pub fn unpaced_room(&self) -> u64 {
        if self.own_packets >= MAX_OWN {
            return 0;
        }
        self.controller.unpaced_window().saturating_sub(self.in_flight)
    }

    /// Returns the congestion window for a sender without pacing, bytes.
    pub fn unpaced_window(&self) -> u64 {
        self.controller.unpaced_window()
    }

    /// Returns whether the peer leaves so many packets unacknowledged that the connection has to be closed, to bound
    /// this state's memory.
    pub fn is_unanswered(&self) -> bool {
        self.sent.len() as u64 - self.own_packets > MAX_OTHERS
    }

    /// Returns the congestion window, bytes.
    pub fn window(&self) -> u64 {
        self.controller.window()
    }

    /// Returns the number of bytes that the peer has acknowledged since the connection began.
    pub fn delivered(&self) -> u64 {
        self.delivery.delivered()
    }

    /// Returns the highest recent delivery rate of the path, bytes per second.
    pub fn fastest(&self) -> u64 {
        self.delivery.fastest()
    }

    /// Returns the estimated bandwidth of the path in bytes per second; `None` if the controller does not estimate
    /// it.
    pub fn bandwidth(&self) -> Option<u64> {
        self.controller.bandwidth()
    }

    /// Returns the pacing rate, bytes per second.
    pub fn pacing_rate(&self) -> u64 {
        self.controller.pacing_rate(self.rtt.smoothed())
    }

    /// Returns the bytes in flight of all senders.
    pub fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Returns how many bytes of the congestion window are left to the QUIC stack. It is at least two packets, so that
    /// the stack can always send control streams.
    pub fn stack_window(&self) -> u64 {
        let own = self.in_flight - self.stack_in_flight;
        self.controller.window().saturating_sub(own).max(2 * self.mtu())
    }

    /// Returns the counts of sent, lost and acknowledged packets since the connection began.
    pub fn counts(&self) -> RecoveryCounts {
        self.counts
    }

    /// Returns the state of ECN marking.
    pub fn ecn(&self) -> &Ecn {
        &self.ecn
    }

    /// Notes whether the kernel offload marks its packets as ECT(0) from now on.
    pub fn set_offload_marks(&mut self, now: Instant, marks: bool) {
        self.offload_marks = marks.then(|| self.offload_marks.unwrap_or(now));
    }

    /// Returns the fraction of the data plane's packets that were lost lately, 0 to 1; `None` if there were too few
    /// packets to tell.
    pub fn loss(&self) -> Option<f64> {
        self.loss_rate.get(&self.counts)
    }

    /// Returns the largest UDP payload to send, bytes. It falls to [`BASE_MTU`] when acknowledgements show that the
    /// path drops larger packets.
    pub fn mtu(&self) -> u64 {
        self.path_mtu.size()
    }

    /// Returns the UDP payload size in bytes of the padded packet to send now to test whether the path carries large
    /// packets again. Returns `None` if no such packet is due, or it does not fit into the congestion window.
    /// `unreported` is the number of bytes that the kernel offload may have sent and not reported yet.
    pub fn mtu_probe(&self, now: Instant, unreported: u64) -> Option<u64> {
        let window = self.controller.window();
        self.path_mtu.probe_size(now).filter(|size| self.in_flight + unreported + size <= window)
    }

    /// Notes that the QUIC stack found that the path carries UDP payloads of `mtu` bytes.
    pub fn set_mtu(&mut self, mtu: u64) {
        self.path_mtu = PathMtu::new(mtu);
        self.controller.set_mtu(mtu);
    }

    /// Notes that the path changed, and resets round-trip time and congestion window (RFC 9000, section 9.4).
    pub fn on_path_change(&mut self, now: Instant) {
        self.controller = self.config.algorithm.start(self.mtu(), now);
        self.rtt = Rtt::new(self.config.initial_rtt);
        self.packet_threshold = PACKET_THRESHOLD;
        self.ecn.on_path_change();
        self.offload_marks = None;
        self.pto_count = 0;
        self.blamed = 0;
        // Losses of packets on the old path must not reduce the new window.
        self.reduced_at = Some(now);
    }

    /// Notes that an ack-eliciting packet is sent, and returns the state for its rate sample.
    fn depart(&mut self, now: Instant, size: u64) -> RateSnapshot {
        let app_limited = self.delivery.is_app_limited();
        self.controller.on_sent(&SendingPacket { now, in_flight: self.in_flight, app_limited });
        self.delivery.on_sent(now, self.in_flight, size)
    }

    fn next(&self) -> u64 {
        self.base + self.sent.len() as u64
    }

    /// Stores a packet's state. Senders draw and report numbers without a common lock, so reports may be slightly out
    /// of order.
    fn record(&mut self, number: u64, slot: Slot<T>) {
        // The packet's number was forgotten before its sender reported it, so the report is ignored.
        while self.base > number {
            self.sent.push_front(Slot::Past);
            self.base -= 1;
        }
        while self.next() <= number {
            self.sent.push_back(Slot::Unused);
        }
        let Some(place) = self.sent.get_mut((number - self.base) as usize) else { return };
        debug_assert!(matches!(place, Slot::Unused | Slot::Past), "packet number {number} was used twice");
        if let Slot::InFlight(packet) = &slot {
            self.in_flight += packet.size;
            match packet.content {
                Some(_) => self.own_packets += 1,
                None => self.stack_in_flight += packet.size,
            }
        }
        *place = slot;
        self.trim();
    }

    fn acknowledge(
        &mut self,
        now: Instant,
        number: u64,
        largest: u64,
        newly: &mut Newly,
        outcome: &mut RecoveryOutcome<T>,
    ) {
        let Some(slot) = self.sent.get_mut((number - self.base) as usize) else { return };
        match slot {
            Slot::Unused => {
                newly.never_sent.get_or_insert(number);
                return;
            }
            Slot::Resolved { .. } | Slot::Past => return,
            Slot::NonEliciting | Slot::InFlight(_) => {}
        }
        newly.last = newly.last.max(Some(number));
        let Slot::InFlight(packet) = std::mem::replace(slot, Slot::Resolved { acked: true }) else { return };
        self.leave_flight(&packet);
        self.delivery.on_acked(now, packet.sent, packet.size, packet.snapshot);
        newly.all_bytes += packet.size;
        self.path_mtu.on_acked(packet.size);
        newly.newest = newly.newest.max(Some(packet.sent));
        newly.largest |= number == largest;
        newly.marked += u64::from(packet.marked);
        // Packets from before the last reduction do not grow the window (RFC 9002, section 7.3.2).
        if self.reduced_at.is_none_or(|at| packet.sent > at) {
            newly.bytes += packet.size;
        }
        if let Some(content) = packet.content {
            self.counts.packets_acked += 1;
            outcome.acked.push(content);
        }
    }

    /// Forgets the numbers before the first packet in flight, and frees memory that only a burst needed.
    fn trim(&mut self) {
        self.forget_past();
        let wanted = IDLE_SLOTS.max(2 * self.sent.len());
        if self.sent.capacity() > 2 * wanted {
            self.sent.shrink_to(wanted);
        }
    }

    fn forget_past(&mut self) {
        while let Some(slot) = self.sent.front() {
            match slot {
                Slot::InFlight(_) => return,
                // The packet's sender may still report it, so its number is not forgotten yet.
                Slot::Unused if self.base + REPORT_LAG >= self.next() => return,
                Slot::Unused | Slot::Past | Slot::NonEliciting | Slot::Resolved { .. } => {}
            }
            self.sent.pop_front();
            self.base += 1;
        }
    }

    fn leave_flight(&mut self, packet: &RecoveryPacket<T>) {
        self.in_flight -= packet.size;
        match packet.content {
            Some(_) => self.own_packets -= 1,
            None => self.stack_in_flight -= packet.size,
        }
    }

    fn probe_time(&self) -> Option<Instant> {
        // Only packets of the data plane need a probe timeout here, because the QUIC stack has its own timer.
        let sent = self.last_own_sent.filter(|_| self.own_packets > 0)?;
        let backoff = 1 << self.pto_count.min(MAX_BACKOFF);
        Some(sent + self.rtt.probe_timeout(GRANULARITY, self.config.max_ack_delay) * backoff)
    }
}

/// Packets that one ACK frame newly acknowledged.
#[derive(Default)]
struct Newly {
    /// Time when the newest of the packets was sent.
    newest: Option<Instant>,
    /// The largest packet number that the frame newly acknowledged.
    last: Option<u64>,
    /// A packet number that the frame acknowledges although no sender has reported a packet with this number.
    never_sent: Option<u64>,
    all_bytes: u64,
    /// Number of packets that were marked ECT(0).
    marked: u64,
    /// Acknowledged bytes of packets sent after the last reduction of the window. Only these bytes may grow the window.
    bytes: u64,
    /// True if the frame newly acknowledges its largest number. Only then it gives a round-trip sample (RFC 9002,
    /// section 5.1).
    largest: bool,
}

#[cfg(test)]
mod tests;
