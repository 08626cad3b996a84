use super::*;
use crate::{ack::EcnCounts, plane::ecn};

const MTU: u64 = 1000;
const MS: Duration = Duration::from_millis(1);
const RTT: Duration = Duration::from_millis(100);
const MAX_ACK_DELAY: Duration = Duration::from_millis(25);

/// A [`Recovery`] under test, in which each packet's content is its packet number.
struct RecoveryLab {
    recovery: Recovery<u64>,
    now: Instant,
    next: u64,
    outcome: RecoveryOutcome<u64>,
}

impl RecoveryLab {
    fn new() -> Self {
        let now = Instant::now();
        let config = Config {
            algorithm: CongestionAlgorithm::NewReno,
            mtu: MTU,
            initial_rtt: Duration::from_millis(333),
            max_ack_delay: MAX_ACK_DELAY,
            ecn: true,
        };
        Self { recovery: Recovery::new(config, now), now, next: 0, outcome: RecoveryOutcome::default() }
    }

    /// Returns a [`RecoveryLab`] with one round trip measured and no packet in flight.
    fn warm() -> Self {
        let mut lab = Self::new();
        lab.send(1);
        lab.now += RTT;
        lab.ack(&[0..=0]);
        lab.clear();
        lab
    }

    fn send(&mut self, packets: u64) {
        for number in self.next..self.next + packets {
            self.recovery.on_sent(self.now, number, MTU as usize, number);
        }
        self.next += packets;
    }

    fn send_as_stack(&mut self, size: usize, ack_eliciting: bool) {
        self.recovery.on_stack_sent(self.now, self.next, size, ack_eliciting);
        self.next += 1;
    }

    fn ack(&mut self, ranges: &[std::ops::RangeInclusive<u64>]) {
        self.try_ack(ranges).expect("sent");
    }

    fn try_ack(&mut self, ranges: &[std::ops::RangeInclusive<u64>]) -> Result<(), NeverSent> {
        let ack = AckRanges { delay: Duration::ZERO, ranges: ranges.to_vec(), ecn: None };
        self.recovery.on_ack(self.now, &ack, false, &mut self.outcome)
    }

    /// Advances time to the next deadline. Returns whether a probe timeout expired.
    fn expire(&mut self) -> bool {
        self.now = self.recovery.timeout().expect("armed");
        self.recovery.on_timeout(self.now, &mut self.outcome)
    }

    fn clear(&mut self) {
        self.outcome.acked.clear();
        self.outcome.lost.clear();
    }
}

#[test]
fn round_trip_estimate_matches_rfc_9002() {
    let mut rtt = Rtt::new(Duration::from_millis(333));
    assert_eq!(rtt.probe_timeout(GRANULARITY, MAX_ACK_DELAY), Duration::from_millis(333 + 666 + 25));
    rtt.sample(100 * MS, 20 * MS);
    assert_eq!((rtt.smoothed(), rtt.min()), (100 * MS, 100 * MS), "the first sample is taken as it is");
    assert_eq!(rtt.probe_timeout(GRANULARITY, MAX_ACK_DELAY), 325 * MS);
    rtt.sample(140 * MS, 20 * MS);
    // Expected values in ms: adjusted RTT 120; RTT variation 3/4 * 50 + 1/4 * 20 = 42.5; smoothed RTT 7/8 * 100 + 1/8 *
    // 120 = 102.5.
    assert_eq!(rtt.smoothed(), Duration::from_micros(102_500));
    assert_eq!(rtt.probe_timeout(GRANULARITY, Duration::ZERO), Duration::from_micros(272_500));
    assert_eq!(rtt.loss_delay(GRANULARITY), Duration::from_micros(157_500));
    rtt.sample(90 * MS, 20 * MS);
    assert_eq!(rtt.min(), 90 * MS, "an acknowledgement delay does not lower the minimum");
}

#[test]
fn ack_delay_above_the_peers_maximum_is_capped() {
    let mut lab = RecoveryLab::warm();
    lab.send(1);
    lab.now += 200 * MS;
    let ack = AckRanges { delay: Duration::from_secs(9), ranges: vec![1..=1], ecn: None };
    lab.recovery.on_ack(lab.now, &ack, false, &mut lab.outcome).expect("sent");
    // The expected smoothed round trip is 100 ms * 7/8 + (200 ms - 25 ms) / 8.
    assert_eq!(lab.recovery.rtt.smoothed(), Duration::from_micros(109_375));
}

#[test]
fn ack_whose_largest_number_is_not_new_gives_no_rtt_sample() {
    let mut lab = RecoveryLab::warm();
    lab.send(3);
    lab.now += RTT;
    lab.ack(&[3..=3]);
    lab.now += RTT;
    lab.ack(&[1..=3]);
    assert_eq!(lab.recovery.rtt.latest(), RTT);
    assert_eq!(lab.outcome.acked, [3, 1, 2]);
}

#[test]
fn packet_three_below_the_largest_acknowledged_is_lost() {
    let mut lab = RecoveryLab::warm();
    lab.send(5);
    lab.now += RTT;
    lab.ack(&[3..=3]);
    assert!(lab.outcome.lost.is_empty(), "two packets later is not enough");
    lab.ack(&[3..=4]);
    assert_eq!(lab.outcome.lost, [1]);
    assert_eq!(lab.recovery.in_flight(), 2 * MTU);
}

#[test]
fn packet_older_than_the_time_threshold_is_lost() {
    let mut lab = RecoveryLab::warm();
    lab.send(2);
    let sent = lab.now;
    lab.now += RTT;
    lab.ack(&[2..=2]);
    assert!(lab.outcome.lost.is_empty());
    assert_eq!(lab.recovery.timeout(), Some(sent + RTT * 9 / 8));
    assert!(!lab.expire(), "a loss timer is not a probe timeout");
    assert_eq!(lab.outcome.lost, [1]);
    assert_eq!((lab.recovery.in_flight(), lab.recovery.timeout()), (0, None));
}

#[test]
fn probe_timeouts_back_off_until_an_ack() {
    let mut lab = RecoveryLab::warm();
    lab.send(1);
    let mut sent = lab.now;
    // The only round-trip sample is 100 ms, measured by `RecoveryLab::warm`, so the RTT variation is half of 100 ms.
    for backoff in [1, 2, 4, 8] {
        assert!(lab.expire());
        assert_eq!(lab.now, sent + (RTT + 200 * MS + MAX_ACK_DELAY) * backoff);
        assert_eq!(lab.recovery.probes(), 2);
        assert!(lab.recovery.own_in_flight().next().is_some());
        sent = lab.now;
        lab.send(2);
        assert_eq!(lab.recovery.probes(), 0);
    }
    let last = lab.next - 1;
    lab.now += RTT;
    lab.ack(&[last..=last]);
    assert_eq!(
        lab.outcome.lost,
        (1..last - 1).collect::<Vec<_>>(),
        "the packet threshold declares them lost"
    );
    lab.send(1);
    let waits = lab.recovery.timeout().expect("armed") - lab.now;
    assert!(waits < RTT * 4, "no backoff any more: {waits:?}");
}

#[test]
fn packets_of_the_quic_stack_cause_no_probes() {
    let mut lab = RecoveryLab::warm();
    lab.send_as_stack(300, true);
    assert_eq!(lab.recovery.timeout(), None, "the stack has its own timer");
    lab.send(1);
    assert!(lab.recovery.timeout().is_some());
}

#[test]
fn lost_packet_of_the_quic_stack_is_congestion_without_retransmission() {
    let mut lab = RecoveryLab::warm();
    let window = lab.recovery.window();
    lab.send_as_stack(300, true);
    lab.send(3);
    assert_eq!(lab.recovery.in_flight(), 300 + 3 * MTU);
    assert_eq!(lab.recovery.stack_window(), window - 3 * MTU);
    lab.now += RTT;
    lab.ack(&[2..=4]);
    assert!(lab.outcome.lost.is_empty());
    let counts = lab.recovery.counts();
    assert_eq!((counts.packets_lost, counts.stack_lost, counts.congestion_events), (0, 1, 1));
    assert!(lab.recovery.window() < window);
    assert_eq!(lab.recovery.in_flight(), 0);
}

#[test]
fn lost_mtu_probe_is_not_congestion() {
    let mut lab = RecoveryLab::warm();
    lab.send_as_stack(MTU as usize + 400, true);
    lab.send(3);
    lab.now += RTT;
    let window = lab.recovery.window();
    lab.ack(&[2..=4]);
    assert_eq!(lab.recovery.counts().stack_lost, 1);
    assert_eq!(lab.recovery.counts().congestion_events, 0);
    assert!(lab.recovery.window() > window);
}

#[test]
fn packets_that_elicit_no_ack_are_not_in_flight() {
    let mut lab = RecoveryLab::warm();
    for _ in 0..10_000 {
        lab.send_as_stack(40, false);
    }
    assert_eq!((lab.recovery.in_flight(), lab.recovery.timeout()), (0, None));
    assert!(lab.recovery.sent.is_empty(), "the packets are not remembered");
    let last = lab.next - 1;
    lab.ack(&[5..=last]);
}

#[test]
fn congestion_window_is_reduced_once_per_round_trip() {
    let mut lab = RecoveryLab::warm();
    lab.send(9);
    lab.now += RTT;
    lab.ack(&[4..=4]);
    let reduced = lab.recovery.window();
    lab.ack(&[8..=8]);
    assert_eq!(lab.outcome.lost, [1, 2, 3, 5]);
    assert_eq!(lab.recovery.window(), reduced, "the packets belong to the same flight");
    assert_eq!(lab.recovery.counts().congestion_events, 1);
    lab.now += MS;
    lab.send(4);
    lab.now += RTT;
    let last = lab.next - 1;
    lab.ack(&[last..=last]);
    assert_eq!(lab.recovery.counts().congestion_events, 2);
}

#[test]
fn spurious_loss_is_undone_and_raises_the_packet_threshold() {
    let mut lab = RecoveryLab::warm();
    let window = lab.recovery.window();
    lab.send(8);
    lab.now += RTT;
    lab.ack(&[8..=8]);
    assert_eq!(lab.outcome.lost, [1, 2, 3, 4, 5]);
    assert!(lab.recovery.window() < window);
    lab.clear();
    lab.now += MS;
    lab.ack(&[2..=8]);
    assert_eq!(lab.recovery.counts().spurious_losses, 4);
    assert!(lab.recovery.window() < window, "one packet may still be lost");
    lab.ack(&[1..=8]);
    assert_eq!(lab.outcome.acked, [2, 3, 4, 5, 6, 7, 1]);
    assert!(lab.recovery.window() >= window);
    lab.clear();
    lab.send(8);
    lab.now += RTT;
    lab.ack(&[16..=16]);
    assert!(lab.outcome.lost.is_empty(), "reordering by seven was seen before");
}

#[test]
fn persistent_congestion_needs_an_outage_without_any_ack() {
    // Persistent congestion takes three probe timeouts: 3 * (100 + 200 + 25) ms. The outage lasts 1.4 s, or two times
    // 0.6 s if an ACK interrupts it.
    for interrupted in [false, true] {
        let mut lab = RecoveryLab::warm();
        for _ in 0..16 {
            lab.now += RTT;
            lab.send(1);
        }
        lab.now += MS;
        lab.send(1);
        lab.now += RTT;
        lab.ack(if interrupted { &[17..=17, 8..=8] } else { &[17..=17] });
        assert_eq!(lab.outcome.lost.len(), if interrupted { 14 } else { 15 });
        assert_eq!(lab.recovery.window() == 2 * MTU, !interrupted, "{}", lab.recovery.window());
    }
}

#[test]
fn acknowledgement_of_unsent_numbers_is_refused() {
    let mut lab = RecoveryLab::warm();
    lab.send(2);
    assert_eq!(lab.try_ack(&[3..=3]), Err(NeverSent(3)));
    assert_eq!(lab.try_ack(&[u64::MAX..=u64::MAX]), Err(NeverSent(u64::MAX)));
    lab.next += 1;
    lab.send(1);
    assert_eq!(lab.try_ack(&[1..=4]), Err(NeverSent(3)), "number 3 was skipped");
}

#[test]
fn packet_reported_as_sent_after_its_acknowledgement_is_found() {
    let mut lab = RecoveryLab::warm();
    lab.send(1);
    let late = lab.next;
    lab.next += 1;
    lab.send(1);
    lab.now += RTT;
    let frame = [late - 1..=late + 1];
    assert_eq!(lab.try_ack(&frame), Err(NeverSent(late)));
    assert_eq!(lab.outcome.acked, [late - 1, late + 1], "the other numbers are processed");
    lab.recovery.on_offloaded_sent(lab.now - RTT, late, 500, late);
    lab.ack(&frame);
    assert_eq!(lab.outcome.acked, [late - 1, late + 1, late]);
    assert!(lab.outcome.lost.is_empty() && lab.recovery.in_flight() == 0);
}

#[test]
fn packet_reported_as_sent_after_later_packets_were_acked_is_accepted() {
    let mut lab = RecoveryLab::warm();
    let late = lab.next;
    lab.next += 1;
    lab.send(REPORT_LAG + 10);
    lab.now += RTT;
    let frame = [late + 1..=lab.next - 1, 0..=0];
    lab.ack(&frame);
    lab.recovery.on_offloaded_sent(lab.now - RTT, late, 500, late);
    assert_eq!(lab.recovery.in_flight(), 500);
    lab.ack(&frame);
    assert_eq!(lab.outcome.lost, [] as [u64; 0], "losses are detected at the next new acknowledgement");
    lab.send(1);
    lab.now += RTT;
    lab.ack(&[late + 1..=lab.next - 1, 0..=0]);
    assert_eq!(lab.outcome.lost, [late]);
    assert_eq!(lab.recovery.in_flight(), 0);
}

#[test]
fn repeated_and_overlapping_ack_ranges_are_processed_once() {
    let mut lab = RecoveryLab::warm();
    lab.send(4);
    lab.now += RTT;
    #[allow(clippy::reversed_empty_ranges)]
    lab.ack(&[4..=4, 3..=1, 0..=4, 2..=2]);
    lab.ack(&[0..=4]);
    lab.ack(&[]);
    assert_eq!(lab.outcome.acked.len(), 4);
    assert_eq!(lab.recovery.in_flight(), 0);
}

#[test]
fn packets_reported_as_sent_out_of_order_are_accepted() {
    let mut lab = RecoveryLab::warm();
    let first = lab.next;
    let second = lab.next + 1;
    lab.next += 2;
    lab.recovery.on_sent(lab.now, second, MTU as usize, second);
    lab.recovery.on_stack_sent(lab.now, first, 200, true);
    assert_eq!(lab.recovery.in_flight(), MTU + 200);
    lab.now += RTT;
    lab.ack(&[first..=second]);
    assert_eq!((lab.recovery.in_flight(), lab.outcome.acked.as_slice()), (0, [second].as_slice()));
}

#[test]
fn loss_recovery_memory_stays_bounded() {
    let mut lab = RecoveryLab::warm();
    for round in 0..5000u64 {
        if round % 3 == 0 {
            lab.next += 1;
        }
        lab.send(4);
        lab.send_as_stack(100, round % 2 == 0);
        lab.now += RTT;
        let last = lab.next - 2;
        // The first packet of each round trip is lost.
        lab.ack(&[last - 2..=last + 1]);
        lab.clear();
    }
    assert!(lab.recovery.sent.len() < 128, "{} packets", lab.recovery.sent.len());
    assert!(lab.recovery.lost.len() <= 32, "{} losses", lab.recovery.lost.len());
    assert_eq!(lab.recovery.counts().packets_lost + lab.recovery.counts().packets_acked, 20_001);
}

/// Each packet of a peer makes the QUIC stack send an ACK, and the peer acknowledges none. While one older packet is in
/// flight, the ACK packets' numbers cannot be forgotten.
#[test]
fn too_many_unacknowledged_packets_of_the_quic_stack_are_detected() {
    let mut lab = RecoveryLab::warm();
    lab.send(1);
    for _ in 0..MAX_OTHERS {
        lab.send_as_stack(40, false);
    }
    assert!(!lab.recovery.is_unanswered());
    lab.send_as_stack(40, false);
    assert!(lab.recovery.is_unanswered());

    lab.ack(&[1..=1]);
    assert!(!lab.recovery.is_unanswered());
    assert_eq!(lab.recovery.sent.len(), 0, "nothing is in flight");
}

#[test]
fn number_of_small_packets_in_flight_is_bounded() {
    let mut lab = RecoveryLab::warm();
    let mut sent = 0;
    while lab.recovery.window_open(0) {
        lab.recovery.on_sent(lab.now, lab.next, 0, lab.next);
        lab.next += 1;
        sent += 1;
    }
    assert_eq!((sent, lab.recovery.unpaced_room()), (MAX_OWN, 0));
}

#[test]
fn path_change_ignores_losses_on_the_old_path() {
    let mut lab = RecoveryLab::warm();
    lab.send(5);
    lab.recovery.on_path_change(lab.now);
    let window = lab.recovery.window();
    lab.now += RTT;
    lab.ack(&[5..=5]);
    assert_eq!(lab.outcome.lost.len(), 2);
    assert_eq!(lab.recovery.window(), window);
}

#[test]
fn ecn_marked_packets_reduce_the_window_once_a_round_trip() {
    let mut lab = RecoveryLab::warm();
    assert_eq!(lab.recovery.ecn().state(), ecn::EcnState::Failed, "the peer sends no counts");
    lab.recovery.on_path_change(lab.now);
    lab.now += MS;
    lab.send(8);
    lab.now += RTT;
    let counted = |lab: &mut RecoveryLab, last: u64, ect0: u64, ce: u64| {
        let ecn = Some(EcnCounts { ect0, ect1: 0, ce });
        let ack = AckRanges { delay: Duration::ZERO, ranges: vec![0..=last], ecn };
        lab.recovery.on_ack(lab.now, &ack, false, &mut lab.outcome).expect("sent");
        lab.recovery.window()
    };
    let window = lab.recovery.window();
    assert_eq!(counted(&mut lab, 4, 4, 0), window + 4 * MTU);
    assert_eq!(lab.recovery.ecn().state(), ecn::EcnState::Capable);
    // The congestion window first grows by the two acknowledged packets. Then the CE mark halves it.
    let reduced = (window + 6 * MTU) / 2;
    assert_eq!(counted(&mut lab, 6, 5, 1), reduced);
    assert_eq!(counted(&mut lab, 8, 5, 3), reduced, "sent before the reduction");
    lab.now += MS;
    lab.send(4);
    lab.now += RTT;
    assert_eq!(counted(&mut lab, 9, 6, 3), reduced, "no more packets are marked");
    assert!(counted(&mut lab, 12, 8, 4) < reduced, "the mark is of another round trip");
    let counts = lab.recovery.counts();
    assert_eq!((counts.marked, counts.congestion_events, counts.packets_lost), (4, 2, 0));
}

#[test]
fn ack_out_of_order_does_not_end_ecn_marking() {
    let mut lab = RecoveryLab::new();
    lab.send(6);
    lab.now += RTT;
    let ack = |lab: &mut RecoveryLab, ranges: Vec<_>, ecn| {
        let ack = AckRanges { delay: Duration::ZERO, ranges, ecn };
        lab.recovery.on_ack(lab.now, &ack, false, &mut lab.outcome).expect("sent");
        lab.recovery.ecn().state()
    };
    let counts = |ect0| Some(EcnCounts { ect0, ect1: 0, ce: 0 });
    assert_eq!(ack(&mut lab, vec![4..=5], counts(4)), ecn::EcnState::Capable);
    assert_eq!(ack(&mut lab, vec![2..=3], counts(2)), ecn::EcnState::Capable, "the ACK frame is older");
    lab.send(1);
    assert_eq!(
        ack(&mut lab, vec![6..=6], counts(4)),
        ecn::EcnState::Failed,
        "the mark of one packet was removed"
    );
    assert!(!lab.recovery.ecn().marks());
}

/// Test helpers for paths that drop packets larger than [`BASE_MTU`].
impl RecoveryLab {
    fn large() -> Self {
        let mut lab = Self::warm();
        lab.recovery.set_mtu(1452);
        lab
    }

    fn send_one(&mut self, size: usize) {
        self.recovery.on_sent(self.now, self.next, size, self.next);
        self.next += 1;
    }

    /// Sends `large` packets of 1452 bytes, and one of 100 bytes after each. Only the small ones arrive, and are
    /// acknowledged one by one.
    fn lose_large(&mut self, large: u64) {
        let first = self.next;
        for _ in 0..large {
            self.send_one(1452);
            self.send_one(100);
        }
        self.now += RTT;
        for number in (first + 1..self.next).step_by(2) {
            self.ack(&[number..=number]);
        }
    }
}

#[test]
fn large_packet_losses_in_two_round_trips_do_not_reduce_the_mtu() {
    let mut lab = RecoveryLab::large();
    lab.lose_large(20);
    lab.lose_large(20);
    assert_eq!(lab.recovery.mtu(), 1452, "two round trips are too few, however many losses");
    lab.send_one(1452);
    lab.now += RTT;
    lab.ack(&[lab.next - 1..=lab.next - 1]);
    lab.lose_large(20);
    lab.lose_large(20);
    assert_eq!(lab.recovery.mtu(), 1452, "a large packet arrived in between");
}

#[test]
fn mtu_black_hole_ends_when_a_large_probe_is_acknowledged() {
    let mut lab = RecoveryLab::large();
    (0..3).for_each(|_| lab.lose_large(5));
    assert_eq!((lab.recovery.mtu(), lab.recovery.mtu_probe(lab.now, 0)), (BASE_MTU, None));

    lab.now += Duration::from_secs(10);
    assert_eq!(lab.recovery.mtu_probe(lab.now, 0), Some(1452));
    let events = lab.recovery.counts().congestion_events;
    let window = lab.recovery.window();
    let probe = lab.next;
    lab.lose_large(1);
    lab.send_one(100);
    lab.send_one(100);
    lab.now += RTT;
    lab.ack(&[lab.next - 2..=lab.next - 1]);
    assert!(lab.outcome.lost.contains(&probe), "the probe's content is sent again");
    assert_eq!(lab.recovery.counts().congestion_events, events, "the loss of a probe is no congestion");
    assert!(lab.recovery.window() >= window);
    lab.now += Duration::from_secs(19);
    assert_eq!(lab.recovery.mtu_probe(lab.now, 0), None, "the interval to the next probe has doubled");

    lab.now += Duration::from_secs(1);
    lab.send_one(1452);
    assert_eq!(lab.recovery.mtu_probe(lab.now, 0), None, "only one probe is in flight");
    lab.now += RTT;
    lab.ack(&[lab.next - 1..=lab.next - 1]);
    assert_eq!((lab.recovery.mtu(), lab.recovery.mtu_probe(lab.now + 60 * RTT, 0)), (1452, None));
}

#[test]
fn memory_for_the_state_of_packets_is_freed_after_a_burst() {
    let mut lab = RecoveryLab::warm();
    lab.send(1000);
    assert!(lab.recovery.sent.capacity() >= 1000);
    lab.now += RTT;
    lab.ack(&[1..=1000]);
    assert!(lab.recovery.sent.capacity() <= 4 * IDLE_SLOTS, "{}", lab.recovery.sent.capacity());
    // Few packets in flight need no new memory each time.
    let before = lab.recovery.sent.capacity();
    for number in 1001..1100 {
        lab.send(1);
        lab.now += RTT;
        lab.ack(&[number..=number]);
        assert_eq!(lab.recovery.sent.capacity(), before);
    }
}
