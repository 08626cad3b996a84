//! The peer's connection credit (MAX_DATA, RFC 9000, section 4.1), split between the QUIC stack and the data plane.
//!
//! The stack knows only of the part that it is *granted*; the rest belongs to the data plane. So no byte of credit is
//! used twice, however the packets of both senders interleave. The grant is topped up as the stack uses it.

use std::{collections::HashMap, ops::Range};

/// Credit that the QUIC stack is granted at a time, bytes: enough for control messages.
const GRANT: u64 = 64 * 1024;

/// Smallest grant to the QUIC stack, bytes: about one packet. If the peer gives less credit, the stack is granted all
/// of it.
const LEAST: u64 = 1200;

/// Smallest number of most recent streams whose sent offsets are remembered. At most twice as many streams are
/// remembered. A retransmission on a forgotten stream counts as new data, so the grant is topped up earlier than
/// needed.
const STREAMS: usize = 512;

/// The split of one connection's credit, in bytes.
#[derive(Clone, Debug)]
pub struct CreditSplit {
    /// The peer's MAX_DATA.
    total: u64,
    /// The limit that is passed to the QUIC stack as the peer's MAX_DATA.
    granted: u64,
    /// Unused credit that the QUIC stack has after each top-up.
    grant: u64,
    /// Stream bytes that the stack has sent, without retransmissions.
    used: u64,
    /// Largest offset that the stack has sent on each of the most recent streams, by stream ID.
    sent: HashMap<u64, u64>,
    /// The previous contents of the map `sent`, which are moved here whenever `sent` has `STREAMS` entries.
    earlier: HashMap<u64, u64>,
}

impl CreditSplit {
    /// Splits the peer's `initial_max_data`.
    pub fn new(total: u64) -> Self {
        let grant = GRANT.min(total / 4).max(LEAST);
        let granted = grant.min(total);
        Self { total, granted, grant, used: 0, sent: HashMap::new(), earlier: HashMap::new() }
    }

    /// Returns the part of MAX_DATA that the QUIC stack may use, bytes.
    pub fn granted(&self) -> u64 {
        self.granted
    }

    /// Returns the part of MAX_DATA that the data plane may use, bytes.
    pub fn rest(&self) -> u64 {
        self.total - self.granted
    }

    /// Notes that the QUIC stack sends the range `bytes` of a stream. New bytes of a stream are sent in order.
    pub fn on_sent(&mut self, stream: u64, bytes: Range<u64>) {
        let sent = match self.sent.get_mut(&stream) {
            Some(sent) => sent,
            None => {
                // All entries move to `earlier` at once, so the map need not record the order of streams.
                if self.sent.len() >= STREAMS {
                    self.earlier = std::mem::take(&mut self.sent);
                }
                let earlier = self.earlier.remove(&stream).unwrap_or_default();
                self.sent.entry(stream).or_insert(earlier)
            }
        };
        // New bytes of a stream are sent in order, so bytes before `start` were counted before, even if the stream was
        // forgotten.
        self.used += bytes.end.saturating_sub(bytes.start.max(*sent));
        *sent = bytes.end.max(*sent);
    }

    /// Notes the peer's new MAX_DATA limit. The increase belongs to the data plane until the QUIC stack's grant is
    /// topped up.
    pub fn on_max_data(&mut self, total: u64) {
        self.total = self.total.max(total);
    }

    /// Raises the QUIC stack's limit once half of its grant is used. `take` requests bytes from the data plane's part,
    /// and returns how many it got. Returns the stack's new limit.
    pub fn top_up(&mut self, take: impl FnOnce(u64) -> u64) -> Option<u64> {
        let left = self.granted.saturating_sub(self.used);
        if left >= self.grant.div_ceil(2) {
            return None;
        }
        let taken = take(self.grant - left);
        self.granted += taken;
        (taken > 0).then_some(self.granted)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// One stream stays open while many other streams are opened and closed.
    #[test]
    fn retransmission_on_a_forgotten_stream_uses_no_flow_control_credit() {
        let mut credit = CreditSplit::new(16 << 20);
        for round in 0..190 {
            credit.on_sent(0, round * 1000..(round + 1) * 1000);
            // This is a retransmission on stream 0, which must not count as new data. The many other streams then make
            // `credit` forget stream 0 before the next round.
            credit.on_sent(0, 0..10);
            for stream in 0..2 * STREAMS as u64 {
                credit.on_sent(4 * (round * 2 * STREAMS as u64 + stream + 1), 0..0);
            }
            credit.top_up(|wanted| wanted);
        }
        assert_eq!(credit.used, 190_000);
        assert!(credit.granted() <= 190_000 + GRANT, "granted {}", credit.granted());
    }

    #[test]
    fn flow_control_grant_is_a_quarter_of_max_data_but_at_least_a_packet() {
        for (total, granted) in [(0, 0), (1000, 1000), (4000, 1200), (40_000, 10_000), (1 << 30, 64 << 10)] {
            let credit = CreditSplit::new(total);
            assert_eq!((credit.granted(), credit.rest()), (granted, total - granted));
        }
    }

    #[test]
    fn flow_control_credit_is_topped_up_when_half_is_used() {
        let mut credit = CreditSplit::new(40_000);
        credit.on_sent(0, 0..4000);
        credit.on_sent(4, 0..1000);
        credit.on_sent(0, 0..4000);
        credit.on_sent(0, 0..3000);
        assert_eq!(credit.top_up(|_| panic!("exactly half is left")), None);
        credit.on_sent(4, 1000..1001);
        assert_eq!(credit.top_up(|wanted| wanted), Some(15_001));
        assert_eq!(credit.rest(), 24_999);
    }

    #[test]
    fn flow_control_credit_top_up_that_fails_is_tried_again() {
        let mut credit = CreditSplit::new(4000);
        credit.on_sent(0, 0..1200);
        assert_eq!(credit.top_up(|_| 0), None);
        credit.on_max_data(6000);
        assert_eq!(credit.rest(), 4800);
        assert_eq!(credit.top_up(|_| 700), Some(1900));
        credit.on_max_data(5000);
        assert_eq!(credit.rest(), 4100, "a limit never falls");
    }

    proptest! {
        #[test]
        fn credit_shared_by_quic_stack_and_data_plane_never_exceeds_max_data(
            initial in 0..200_000u64,
            steps in proptest::collection::vec((0..4u8, 0..50_000u64), 1..200),
        ) {
            let mut credit = CreditSplit::new(initial);
            let mut total = initial;
            let mut stack = 0;
            let mut plane = 0;
            for (what, amount) in steps {
                match what {
                    0 => {
                        total += amount;
                        credit.on_max_data(total);
                    }
                    1 => {
                        let start = stack;
                        stack += amount.min(credit.granted() - stack);
                        credit.on_sent(0, start..stack);
                    }
                    2 => plane += amount.min(credit.rest() - plane),
                    _ => {
                        let left = credit.rest() - plane;
                        credit.top_up(|wanted| wanted.min(left));
                    }
                }
                prop_assert!(plane <= credit.rest());
                prop_assert_eq!(credit.granted() + credit.rest(), total);
            }
        }
    }
}
