//! Explicit congestion notification (RFC 9000, section 13.4): decides whether packets are sent as ECT(0), and checks
//! the peer's counts.

use crate::ack::EcnCounts;

/// Number of packets that are marked ECT(0) to test whether ECN marks arrive (section 13.4.2, appendix A.4).
const TESTS: u64 = 10;

/// ECN marking on one path. Packets of the data plane and of the kernel offload may be marked; the QUIC stack's are
/// not.
///
/// The state moves from testing to unknown once all test packets were sent, and to capable when one of them is
/// acknowledged with valid counts. It moves to failed if all of them are lost or counts are invalid. A path change
/// begins a new test.
#[derive(Clone, Debug)]
pub struct Ecn {
    state: EcnState,
    enabled: bool,
    /// Counts in the last ACK frame that was evaluated. The peer's counts cover all paths of the connection.
    seen: EcnCounts,
    /// Marked packets that were lost during the test.
    lost: u64,
}

/// The state of ECN marking on a path.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EcnState {
    /// ECN marking is switched off by configuration.
    #[default]
    Off,
    /// The next `left` packets are marked to test the path.
    Testing {
        /// Number of packets that are still to be marked ECT(0).
        left: u64,
    },
    /// The test packets have all been sent, and none of them is acknowledged yet. No further packet is marked.
    Unknown,
    /// Marks arrive, and packets that the network has marked CE are counted.
    Capable,
    /// Marks do not arrive, or the peer does not count them: no packet is marked.
    Failed,
}

impl EcnState {
    /// Returns the state's name for the operator's status output.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Testing { .. } => "testing",
            Self::Unknown => "unknown",
            Self::Capable => "capable",
            Self::Failed => "failed",
        }
    }
}

impl Ecn {
    /// Creates the ECN state of a new path.
    pub fn new(enabled: bool) -> Self {
        let mut ecn = Self { state: EcnState::Off, enabled, seen: EcnCounts::default(), lost: 0 };
        ecn.on_path_change();
        ecn
    }

    /// Returns the state of ECN marking.
    pub fn state(&self) -> EcnState {
        self.state
    }

    /// Returns whether the next packet is sent as ECT(0).
    pub fn marks(&self) -> bool {
        matches!(self.state, EcnState::Testing { .. } | EcnState::Capable)
    }

    /// Notes that a packet marked ECT(0) was sent.
    pub fn on_sent(&mut self) {
        if let EcnState::Testing { left } = &mut self.state {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.state = EcnState::Unknown;
            }
        }
    }

    /// Notes that a packet marked ECT(0) was lost. If all packets that test the path are lost, the path is assumed to
    /// drop marked packets.
    pub fn on_lost(&mut self) {
        if matches!(self.state, EcnState::Testing { .. } | EcnState::Unknown) {
            self.lost += 1;
            if self.lost >= TESTS {
                self.state = EcnState::Failed;
            }
        }
    }

    /// Evaluates an ACK frame that raised the largest acknowledged number, and newly acknowledges `marked` marked
    /// packets. At most `most` of the packets sent so far were marked. Returns the number of new CE marks.
    pub fn on_ack(&mut self, marked: u64, most: u64, counts: Option<EcnCounts>) -> u64 {
        if !matches!(self.state, EcnState::Testing { .. } | EcnState::Unknown | EcnState::Capable) {
            return 0;
        }
        let Some(counts) = counts else {
            if marked > 0 {
                self.state = EcnState::Failed;
            }
            return 0;
        };
        let Some(ce) = self.validate(marked, most, counts) else {
            self.state = EcnState::Failed;
            return 0;
        };
        self.seen = counts;
        if marked > 0 {
            self.state = EcnState::Capable;
        }
        ce
    }

    /// Checks the peer's ECN counts (RFC 9000, section 13.4.2.1). Returns the number of new CE marks, or `None` if the
    /// counts are impossible.
    fn validate(&self, marked: u64, most: u64, counts: EcnCounts) -> Option<u64> {
        let ect0 = counts.ect0.checked_sub(self.seen.ect0)?;
        let ce = counts.ce.checked_sub(self.seen.ce)?;
        let total = counts.ect0.checked_add(counts.ce)?;
        // A marked packet arrives as ECT(0) or CE, so fewer counts than packets show that marks were removed.
        (ect0.checked_add(ce)? >= marked && counts.ect1 == 0 && total <= most).then_some(ce)
    }

    /// Begins a new ECN test, because packets take another path.
    pub fn on_path_change(&mut self) {
        self.state = if self.enabled { EcnState::Testing { left: TESTS } } else { EcnState::Off };
        self.lost = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(ect0: u64, ect1: u64, ce: u64) -> Option<EcnCounts> {
        Some(EcnCounts { ect0, ect1, ce })
    }

    #[test]
    fn disabled_ecn_marks_no_packet() {
        let mut ecn = Ecn::new(false);
        assert!(!ecn.marks());
        assert_eq!(ecn.on_ack(0, 100, counts(9, 0, 9)), 0);
        assert_eq!(ecn.state(), EcnState::Off);
    }

    #[test]
    fn ecn_marking_pauses_after_ten_packets_until_one_is_confirmed() {
        let mut ecn = Ecn::new(true);
        for _ in 0..TESTS {
            assert!(ecn.marks());
            ecn.on_sent();
        }
        assert!(!ecn.marks());
        assert_eq!(ecn.state(), EcnState::Unknown);
        assert_eq!(ecn.on_ack(1, 10, counts(1, 0, 0)), 0);
        assert!(ecn.marks());
        assert_eq!(ecn.state(), EcnState::Capable);
    }

    #[test]
    fn path_that_strips_ecn_marks_fails_validation() {
        let mut ecn = Ecn::new(true);
        (0..TESTS).for_each(|_| ecn.on_sent());
        (0..TESTS - 1).for_each(|_| ecn.on_lost());
        assert_eq!(ecn.state(), EcnState::Unknown);
        ecn.on_lost();
        assert_eq!(ecn.state(), EcnState::Failed);
        ecn.on_path_change();
        assert!(ecn.marks(), "another path may carry marks");
    }

    #[test]
    fn inconsistent_ecn_counts_in_an_ack_end_ecn_marking() {
        for (marked, next, what) in [
            (3, None, "the peer sends no counts"),
            (3, counts(12, 0, 0), "the mark of one packet was removed"),
            (0, counts(9, 0, 1), "fewer than before"),
            (0, counts(10, 0, 0), "fewer CE than before"),
            (1, counts(11, 1, 1), "ECT(1) is never sent"),
            (1, counts(99, 0, 2), "more than were sent"),
            (1, counts(u64::MAX, 0, u64::MAX), "more than can be"),
        ] {
            let mut ecn = Ecn::new(true);
            assert_eq!(ecn.on_ack(11, 100, counts(10, 0, 1)), 1);
            assert_eq!(ecn.on_ack(marked, 100, next), 0, "{what}");
            assert_eq!(ecn.state(), EcnState::Failed, "{what}");
            assert_eq!(ecn.on_ack(1, 100, counts(12, 0, 3)), 0, "{what}");
        }
    }

    #[test]
    fn new_ce_marks_in_an_ack_are_counted_once() {
        let mut ecn = Ecn::new(true);
        assert_eq!(ecn.on_ack(5, 100, counts(5, 0, 0)), 0);
        assert_eq!(ecn.on_ack(5, 100, counts(7, 0, 3)), 3);
        assert_eq!(ecn.on_ack(0, 100, counts(7, 0, 3)), 0);
        // The ACK frame before this one was lost, so this frame's counts cover the packets that both ACK frames
        // acknowledge.
        assert_eq!(ecn.on_ack(2, 100, counts(9, 0, 5)), 2);
        assert_eq!(ecn.on_ack(0, 100, None), 0, "nothing marked was acknowledged");
        assert_eq!(ecn.state(), EcnState::Capable);
    }
}
