//! Explicit congestion notification (RFC 9000, section 13.4): whether packets are sent as ECT(0), and what the peer's counts say.

use crate::ack::EcnCounts;

/// Packets that are marked before it is known whether marks arrive (section 13.4.2, appendix A.4).
const TESTS: u64 = 10;

/// Marking on one path. Those that are marked are the data plane's packets and the offload's; the QUIC stack's are not.
#[derive(Clone, Debug)]
pub struct Ecn {
    state: State,
    enabled: bool,
    /// Of the last ACK frame that was looked at. The peer counts on through all paths.
    seen: EcnCounts,
    /// Marked packets that were lost while that is not known.
    lost: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum State {
    /// Nothing is marked.
    #[default]
    Off,
    /// So many more packets are marked.
    Testing { left: u64 },
    /// All of those have been sent, and none is acknowledged.
    Unknown,
    /// Marks arrive, and so do those of the network.
    Capable,
    /// They do not, or the peer does not count them: nothing is marked.
    Failed,
}

impl State {
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
    pub fn new(enabled: bool) -> Self {
        let mut ecn = Self { state: State::Off, enabled, seen: EcnCounts::default(), lost: 0 };
        ecn.on_path_change();
        ecn
    }

    pub fn state(&self) -> State {
        self.state
    }

    /// Whether the next packet is sent as ECT(0).
    pub fn marks(&self) -> bool {
        matches!(self.state, State::Testing { .. } | State::Capable)
    }

    /// A marked packet was sent.
    pub fn on_sent(&mut self) {
        if let State::Testing { left } = &mut self.state {
            *left = left.saturating_sub(1);
            if *left == 0 {
                self.state = State::Unknown;
            }
        }
    }

    /// A marked packet was lost: if all are, the path does not carry them.
    pub fn on_lost(&mut self) {
        if matches!(self.state, State::Testing { .. } | State::Unknown) {
            self.lost += 1;
            if self.lost >= TESTS {
                self.state = State::Failed;
            }
        }
    }

    /// An ACK frame raised the largest acknowledged number. It is the first to acknowledge so many `marked` packets; `most`
    /// packets were sent that may have been marked. Returns how many more the network has marked CE.
    pub fn on_ack(&mut self, marked: u64, most: u64, counts: Option<EcnCounts>) -> u64 {
        if !matches!(self.state, State::Testing { .. } | State::Unknown | State::Capable) {
            return 0;
        }
        let Some(counts) = counts else {
            if marked > 0 {
                self.state = State::Failed;
            }
            return 0;
        };
        let Some(ce) = self.validate(marked, most, counts) else {
            self.state = State::Failed;
            return 0;
        };
        self.seen = counts;
        if marked > 0 {
            self.state = State::Capable;
        }
        ce
    }

    /// Section 13.4.2.1; `None`: the counts cannot be.
    fn validate(&self, marked: u64, most: u64, counts: EcnCounts) -> Option<u64> {
        let ect0 = counts.ect0.checked_sub(self.seen.ect0)?;
        let ce = counts.ce.checked_sub(self.seen.ce)?;
        let total = counts.ect0.checked_add(counts.ce)?;
        (ect0.checked_add(ce)? >= marked && counts.ect1 == 0 && total <= most).then_some(ce)
    }

    /// Packets take another path, on which it is not known.
    pub fn on_path_change(&mut self) {
        self.state = if self.enabled { State::Testing { left: TESTS } } else { State::Off };
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
    fn nothing_is_marked_where_it_is_off() {
        let mut ecn = Ecn::new(false);
        assert!(!ecn.marks());
        assert_eq!(ecn.on_ack(0, 100, counts(9, 0, 9)), 0);
        assert_eq!(ecn.state(), State::Off);
    }

    #[test]
    fn ten_are_marked_until_one_arrives() {
        let mut ecn = Ecn::new(true);
        for _ in 0..TESTS {
            assert!(ecn.marks());
            ecn.on_sent();
        }
        assert!(!ecn.marks());
        assert_eq!(ecn.state(), State::Unknown);
        assert_eq!(ecn.on_ack(1, 10, counts(1, 0, 0)), 0);
        assert!(ecn.marks());
        assert_eq!(ecn.state(), State::Capable);
    }

    #[test]
    fn where_none_arrives_no_more_are_marked() {
        let mut ecn = Ecn::new(true);
        (0..TESTS).for_each(|_| ecn.on_sent());
        (0..TESTS - 1).for_each(|_| ecn.on_lost());
        assert_eq!(ecn.state(), State::Unknown);
        ecn.on_lost();
        assert_eq!(ecn.state(), State::Failed);
        ecn.on_path_change();
        assert!(ecn.marks(), "another path may");
    }

    #[test]
    fn counts_that_cannot_be_end_it() {
        for (marked, next, what) in [
            (3, None, "it does not count"),
            (3, counts(12, 0, 0), "one was bleached"),
            (0, counts(9, 0, 1), "fewer than before"),
            (0, counts(10, 0, 0), "fewer CE than before"),
            (1, counts(11, 1, 1), "ECT(1) is never sent"),
            (1, counts(99, 0, 2), "more than were sent"),
            (1, counts(u64::MAX, 0, u64::MAX), "more than can be"),
        ] {
            let mut ecn = Ecn::new(true);
            assert_eq!(ecn.on_ack(11, 100, counts(10, 0, 1)), 1);
            assert_eq!(ecn.on_ack(marked, 100, next), 0, "{what}");
            assert_eq!(ecn.state(), State::Failed, "{what}");
            assert_eq!(ecn.on_ack(1, 100, counts(12, 0, 3)), 0, "{what}");
        }
    }

    #[test]
    fn marks_of_the_network_are_counted_once() {
        let mut ecn = Ecn::new(true);
        assert_eq!(ecn.on_ack(5, 100, counts(5, 0, 0)), 0);
        assert_eq!(ecn.on_ack(5, 100, counts(7, 0, 3)), 3);
        assert_eq!(ecn.on_ack(0, 100, counts(7, 0, 3)), 0);
        // An acknowledgement was lost before it.
        assert_eq!(ecn.on_ack(2, 100, counts(9, 0, 5)), 2);
        assert_eq!(ecn.on_ack(0, 100, None), 0, "nothing marked was acknowledged");
        assert_eq!(ecn.state(), State::Capable);
    }
}
