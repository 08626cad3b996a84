//! Returns complete messages in the order in which they were sent. Messages that arrive early wait.
//!
//! The order is for grafts that retransmit lost packets, so that gaps are filled. Waiting messages are bounded in
//! number and in bytes anyway, since the other end may leave a gap on purpose. Such a gap is given up and counted.

use std::collections::BTreeMap;

/// Largest number of waiting messages, which is more than any window has under way.
pub const WAITING_MAX: usize = 1024;
/// Limit of the waiting messages in bytes, the same as of incomplete ones.
pub const WAITING_BYTES: usize = 4 << 20;

/// Messages of one direction that wait for their turn, and the number of the message whose turn is next.
#[derive(Debug, Default)]
pub struct Turns {
    /// Number of the message whose turn is next. Numbers start at 0 and wrap around at 2^32.
    next: u32,
    /// Waiting messages by number.
    waiting: BTreeMap<u32, Vec<u8>>,
    bytes: usize,
    given_up: u64,
}

impl Turns {
    /// Adds a message, which waits for its turn. A message whose turn is over is dropped.
    pub fn put(&mut self, message: u32, bytes: Vec<u8>) {
        let ahead = message.wrapping_sub(self.next);
        // Dropped are duplicates, messages that were given up, and numbers that no sender can have used.
        if ahead > u32::MAX / 2 || self.waiting.contains_key(&message) {
            return;
        }
        self.bytes += bytes.len();
        self.waiting.insert(message, bytes);
        while self.waiting.len() > WAITING_MAX || self.bytes > WAITING_BYTES {
            // The other end has exceeded every possible window, so this message is given up.
            if !self.skip() && self.take().is_some() {
                self.given_up += 1;
            }
        }
    }

    /// Returns the message whose turn has come, if it has arrived.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        let bytes = self.waiting.remove(&self.next)?;
        self.bytes -= bytes.len();
        self.next = self.next.wrapping_add(1);
        Some(bytes)
    }

    /// Gives up the messages missing before the next waiting one. Returns `false` if no message waits behind a gap.
    pub fn skip(&mut self) -> bool {
        let nearest = self.waiting.keys().map(|message| message.wrapping_sub(self.next)).min();
        let Some(gap @ 1..) = nearest else { return false };
        self.given_up += u64::from(gap);
        self.next = self.next.wrapping_add(gap);
        true
    }

    /// Returns the number of messages that were given up.
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
    fn early_messages_wait_for_their_turn() {
        let mut turns = Turns::default();
        for message in [2, 1, 4] {
            turns.put(message, vec![message as u8]);
            assert!(all(&mut turns).is_empty());
        }
        turns.put(0, vec![0]);
        assert_eq!(all(&mut turns), [0, 1, 2]);
        // A duplicate arrives, and then a message whose turn is over.
        turns.put(4, vec![9]);
        turns.put(1, vec![9]);
        turns.put(3, vec![3]);
        assert_eq!(all(&mut turns), [3, 4]);
        assert_eq!((turns.bytes, turns.given_up), (0, 0));
        // The other end does not send the messages before these any more.
        turns.put(7, vec![7]);
        assert!(turns.skip() && !turns.skip());
        assert_eq!((all(&mut turns), turns.given_up), (vec![7], 2));
    }

    #[test]
    fn message_numbers_wrap_around() {
        let mut turns = Turns { next: u32::MAX - 1, ..Turns::default() };
        for message in [1, 0, u32::MAX, u32::MAX - 1] {
            turns.put(message, vec![message as u8]);
        }
        assert_eq!(all(&mut turns), [254, 255, 0, 1]);
    }

    /// Messages arrive in any order, and some are missing. The limits hold, and so does the order.
    #[test]
    fn waiting_messages_are_bounded() {
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
