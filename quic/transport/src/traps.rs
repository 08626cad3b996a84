//! Packet numbers that are skipped at random, to detect a peer that acknowledges packets it did not receive (RFC 9000,
//! section 21.4). Such a peer could make this endpoint send more than the path carries.
//!
//! An offload draws numbers without a call to this process. So a number is skipped whenever this process handles a
//! packet and enough numbers were drawn since the last skip.

use std::{
    collections::{VecDeque, hash_map::RandomState},
    hash::BuildHasher,
    ops::RangeInclusive,
};

/// Mean distance of the first skipped packet number from 0. It is short because a lying peer gains most at the
/// beginning. Each following distance is twice as long on average, and varies randomly by up to a half. Each skipped
/// number adds a range to the peer's ACK frames.
const NEAREST: u64 = 64;
/// Largest mean distance between two skipped packet numbers.
const FARTHEST: u64 = 1 << 13;

/// Number of the newest skipped numbers that are remembered.
const KEPT: usize = 64;

pub(crate) struct Traps {
    /// The skipped numbers, in ascending order.
    left_out: VecDeque<u64>,
    /// The next skipped number is the first one that this process draws at or above this number.
    next: u64,
    distance: u64,
    /// Random keys that the peer does not know, so that it cannot predict the skipped numbers.
    random: RandomState,
}

impl Traps {
    pub fn new() -> Self {
        let mut traps =
            Self { left_out: VecDeque::new(), next: 0, distance: NEAREST, random: RandomState::new() };
        traps.aim(0);
        traps
    }

    /// Returns whether the number `next` has to be skipped.
    pub fn is_due(&self, next: u64) -> bool {
        next >= self.next
    }

    /// Notes that a number was skipped, and chooses the next number to skip.
    pub fn add(&mut self, number: u64) {
        self.left_out.push_back(number);
        if self.left_out.len() > KEPT {
            self.left_out.pop_front();
        }
        self.distance = (2 * self.distance).min(FARTHEST);
        self.aim(number);
    }

    fn aim(&mut self, number: u64) {
        // The distance between two skipped packet numbers is random, between a half and one and a half of its mean.
        self.next = number + self.distance / 2 + self.random.hash_one(number) % self.distance;
    }

    /// Returns whether one of the acknowledged ranges contains a skipped packet number.
    pub fn catch(&self, acknowledged: &[RangeInclusive<u64>]) -> bool {
        let Some(oldest) = self.left_out.front() else { return false };
        acknowledged.iter().filter(|range| range.end() >= oldest).any(|range| {
            let first = self.left_out.partition_point(|number| number < range.start());
            self.left_out.get(first).is_some_and(|number| number <= range.end())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Draws the first `numbers` packet numbers one by one, and returns those that were skipped.
    fn run(traps: &mut Traps, numbers: u64) -> Vec<u64> {
        let due: Vec<_> = (0..numbers)
            .filter(|number| traps.is_due(*number).then(|| traps.add(*number)).is_some())
            .collect();
        due
    }

    #[test]
    fn skipped_packet_numbers_are_frequent_at_first_and_then_rare() {
        let runs: Vec<_> = (0..20).map(|_| run(&mut Traps::new(), 1_000_000)).collect();
        for left_out in &runs {
            assert!((NEAREST / 2..NEAREST * 3 / 2).contains(&left_out[0]));
            let distances = left_out.windows(2).map(|pair| pair[1] - pair[0]);
            for (i, distance) in distances.enumerate() {
                let mean = (NEAREST << (i + 1).min(32)).min(FARTHEST);
                assert!((mean / 2..mean * 3 / 2).contains(&distance), "{distance} is the {i}th");
            }
        }
        assert!(
            runs.iter().any(|left_out| left_out[..4] != runs[0][..4]),
            "connections skip different numbers"
        );
    }

    #[test]
    fn acknowledged_skipped_number_is_detected_in_any_range() {
        let mut traps = Traps::new();
        assert!(!traps.catch(&[0..=u64::MAX]), "no number was skipped yet");
        let left_out = run(&mut traps, 1_000_000);
        assert!(left_out.len() > KEPT);
        assert_eq!(traps.left_out.len(), KEPT);
        for number in &left_out[left_out.len() - KEPT..] {
            assert!(traps.catch(&[*number..=*number]));
            assert!(traps.catch(&[number + 1..=number + 9, 3..=*number]));
            assert!(!traps.catch(&[number + 1..=number + 9, number - 9..=number - 1]));
        }
        assert!(
            !traps.catch(&[0..=left_out[left_out.len() - KEPT] - 1]),
            "older skipped numbers are forgotten"
        );
    }
}
