//! Whole messages in the order in which they were sent: those that are early wait.
//!
//! It is for grafts that send again what is lost, so a gap ends. What waits is bounded in number and in bytes all the same, as the other
//! end may leave a gap on purpose: then the gap is given up, and counted.

use std::collections::BTreeMap;

/// Messages that wait: more than are under way in any window.
pub const WAITING_MAX: usize = 1024;
/// In them: as much as in messages that are not whole.
pub const WAITING_BYTES: usize = 4 << 20;

#[derive(Debug, Default)]
pub struct Turns {
    /// Counted from 0, modulo 2^32.
    next: u32,
    /// By their numbers.
    waiting: BTreeMap<u32, Vec<u8>>,
    bytes: usize,
    given_up: u64,
}

impl Turns {
    /// Until its turn. One that has had its turn is dropped.
    pub fn put(&mut self, message: u32, bytes: Vec<u8>) {
        let ahead = message.wrapping_sub(self.next);
        // Neither twice, nor what was given up, nor what nobody can have sent.
        if ahead > u32::MAX / 2 || self.waiting.contains_key(&message) {
            return;
        }
        self.bytes += bytes.len();
        self.waiting.insert(message, bytes);
        while self.waiting.len() > WAITING_MAX || self.bytes > WAITING_BYTES {
            // No window is so long: the other end does not keep to it.
            if !self.skip() && self.take().is_some() {
                self.given_up += 1;
            }
        }
    }

    /// The message whose turn it is, if it is here.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        let bytes = self.waiting.remove(&self.next)?;
        self.bytes -= bytes.len();
        self.next = self.next.wrapping_add(1);
        Some(bytes)
    }

    /// Nothing that is missing comes any more: what waits for it has its turn. `false`: nothing waits for anything.
    pub fn skip(&mut self) -> bool {
        let nearest = self.waiting.keys().map(|message| message.wrapping_sub(self.next)).min();
        let Some(gap @ 1..) = nearest else { return false };
        self.given_up += u64::from(gap);
        self.next = self.next.wrapping_add(gap);
        true
    }

    /// Messages that were not waited for any longer.
    pub fn given_up(&self) -> u64 {
        self.given_up
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(turns: &mut Turns) -> Vec<u8> {
        std::iter::from_fn(|| turns.take()).flatten().collect()
    }

    #[test]
    fn messages_wait_for_their_turn() {
        let mut turns = Turns::default();
        for message in [2, 1, 4] {
            turns.put(message, vec![message as u8]);
            assert!(all(&mut turns).is_empty());
        }
        turns.put(0, vec![0]);
        assert_eq!(all(&mut turns), [0, 1, 2]);
        // Twice, and what has had its turn.
        turns.put(4, vec![9]);
        turns.put(1, vec![9]);
        turns.put(3, vec![3]);
        assert_eq!(all(&mut turns), [3, 4]);
        assert_eq!((turns.bytes, turns.given_up), (0, 0));
        // What the other end does not send any more.
        turns.put(7, vec![7]);
        assert!(turns.skip() && !turns.skip());
        assert_eq!((all(&mut turns), turns.given_up), (vec![7], 2));
    }

    #[test]
    fn numbers_wrap_around() {
        let mut turns = Turns { next: u32::MAX - 1, ..Turns::default() };
        for message in [1, 0, u32::MAX, u32::MAX - 1] {
            turns.put(message, vec![message as u8]);
        }
        assert_eq!(all(&mut turns), [254, 255, 0, 1]);
    }

    /// Whatever order they come in, and whatever is missing: never more than so much, and never out of order.
    #[test]
    fn what_waits_is_bounded() {
        let mut state = 7_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as u32
        };
        let mut turns = Turns::default();
        let mut latest = None;
        for _ in 0..20_000 {
            let ahead = if random() % 256 == 0 { random() } else { 1 + random() % 3000 };
            turns.put(turns.next.wrapping_add(ahead), vec![0; random() as usize % 20_000]);
            assert!(turns.waiting.len() <= WAITING_MAX && turns.bytes <= WAITING_BYTES);
            assert_eq!(turns.bytes, turns.waiting.values().map(Vec::len).sum::<usize>());
            while turns.take().is_some() {
                let taken = turns.next.wrapping_sub(1);
                assert!(latest.is_none_or(|latest| taken.wrapping_sub(latest) < u32::MAX / 2));
                latest = Some(taken);
            }
        }
        assert!(turns.given_up > 0);
    }
}
