//! Whether what the offload sends arrives.
//!
//! Its packets take a shorter way out of the host than userspace's: past netfilter, IPsec policies and routing by a
//! socket's owner or mark. Where a host needs those, every packet of the kernel would be a loss. So it may send a few
//! on each path, and goes on once one of them was acknowledged.

use std::{
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use millrace_proto::plane::downstream::Budget;

/// Packets on trial. With every third packet lost on the way, all of them are in one trial of 6000.
const PACKETS: usize = 8;

/// Whatever was in the way may be gone by then.
const RETRY: Duration = Duration::from_secs(60);

#[derive(Debug, PartialEq)]
pub(in crate::offload) enum Trial {
    /// The numbers of packets sent.
    Open(Vec<u64>),
    Passed,
    Failed(Instant),
}

impl Trial {
    pub fn new() -> Self {
        Self::Open(Vec::with_capacity(PACKETS))
    }

    /// It has sent a packet.
    pub fn on_sent(&mut self, number: u64) {
        if let Self::Open(numbers) = self
            && numbers.len() < PACKETS
        {
            numbers.push(number);
        }
    }

    /// Returns whether the trial has just failed: all were sent, and a later packet arrived but none of them.
    pub fn on_ack(&mut self, now: Instant, ranges: &[RangeInclusive<u64>]) -> bool {
        let Self::Open(numbers) = self else { return false };
        let arrived = |number: &u64| ranges.iter().any(|range| range.contains(number));
        let largest = ranges.iter().map(|range| *range.end()).max();
        if numbers.iter().any(arrived) {
            *self = Self::Passed;
        } else if numbers.len() == PACKETS && numbers.iter().all(|number| Some(*number) < largest) {
            *self = Self::Failed(now);
            return true;
        }
        false
    }

    /// What may be granted of a budget, in packets of at most `mtu` bytes.
    pub fn allow(&mut self, now: Instant, budget: Budget, mtu: usize) -> Budget {
        if matches!(self, Self::Failed(at) if now.saturating_duration_since(*at) >= RETRY) {
            *self = Self::new();
        }
        match self {
            Self::Passed => budget,
            Self::Open(numbers) => {
                let left = (PACKETS - numbers.len()) * mtu;
                Budget { bytes: budget.bytes.min(left as u64), ..budget }
            }
            Self::Failed(_) => Budget::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Budget = Budget { bytes: 100_000, data: 50_000 };
    const MTU: usize = 1000;

    #[test]
    fn one_that_arrives_is_enough() {
        let (mut trial, now) = (Trial::new(), Instant::now());
        assert_eq!(trial.allow(now, BUDGET, MTU).bytes, 8000);
        (10..13).for_each(|number| trial.on_sent(number));
        assert_eq!(trial.allow(now, BUDGET, MTU).bytes, 5000);
        assert!(!trial.on_ack(now, &[15..=20, 0..=9]));
        assert!(!trial.on_ack(now, &[12..=20, 0..=9]));
        assert_eq!(trial.allow(now, BUDGET, MTU), BUDGET);
    }

    #[test]
    fn when_none_arrives_there_are_no_more_for_a_minute() {
        let (mut trial, now) = (Trial::new(), Instant::now());
        (10..20).for_each(|number| trial.on_sent(2 * number));
        assert_eq!(trial.allow(now, BUDGET, MTU).bytes, 0, "nothing more before that is known");
        assert!(!trial.on_ack(now, &[33..=33, 0..=19]), "the last may be under way");
        assert!(trial.on_ack(now, &[35..=35, 0..=19]));
        assert!(!trial.on_ack(now, &[20..=40, 0..=19]), "once");
        let later = now + RETRY;
        assert_eq!(trial.allow(later - Duration::from_nanos(1), BUDGET, MTU), Budget::default());
        assert_eq!(trial.allow(later, BUDGET, MTU).bytes, 8000);
    }
}
