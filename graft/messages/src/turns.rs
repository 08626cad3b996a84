//! Returns complete messages in the order in which they were sent. Messages that arrive before earlier ones wait.
//!
//! This is used with packet functions that retransmit lost packets, so gaps are filled. Waiting messages are bounded in
//! number and in bytes all the same, since a malicious sender may leave a gap on purpose. Such a gap is skipped and
//! counted.

use std::collections::BTreeMap;

/// Maximum number of messages that wait for earlier ones. No flow-control window allows as many messages in flight.
pub const WAITING_MAX: usize = 1024;
/// Maximum number of bytes of messages that wait for earlier ones. Incomplete messages have the same bound.
pub const WAITING_BYTES: usize = 4 << 20;

/// Messages of one direction that wait for earlier ones, and the number of the message that is returned next.
#[derive(Debug, Default)]
pub struct Turns {
    /// Number of the message that is returned next. Numbers start at 0 and wrap around at 2^32.
    next: u32,
    /// Waiting messages by number.
    waiting: BTreeMap<u32, Vec<u8>>,
    bytes: usize,
    given_up: u64,
}

impl Turns {
    /// Adds a message, which waits for earlier ones. A message is dropped if it was returned already, or skipped as
    /// missing.
    pub fn put(&mut self, message: u32, bytes: Vec<u8>) {
        let ahead = message.wrapping_sub(self.next);
        // Drops duplicates, messages that were skipped as missing, and messages whose number is more than 2^31 ahead of
        // the next one, which no sender can have reached.
        if ahead > u32::MAX / 2 || self.waiting.contains_key(&message) {
            return;
        }
        self.bytes += bytes.len();
        self.waiting.insert(message, bytes);
        while self.waiting.len() > WAITING_MAX || self.bytes > WAITING_BYTES {
            // The sender has exceeded every possible flow-control window, so missing messages are skipped.
            if !self.skip() && self.take().is_some() {
                self.given_up += 1;
            }
        }
    }

    /// Returns the next message in order; `None` if it has not arrived.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        let bytes = self.waiting.remove(&self.next)?;
        self.bytes -= bytes.len();
        self.next = self.next.wrapping_add(1);
        Some(bytes)
    }

    /// Skips the missing messages before the first waiting one. Returns `false` if no message waits behind a gap.
    pub fn skip(&mut self) -> bool {
        let nearest = self.waiting.keys().map(|message| message.wrapping_sub(self.next)).min();
        let Some(gap @ 1..) = nearest else { return false };
        self.given_up += u64::from(gap);
        self.next = self.next.wrapping_add(gap);
        true
    }

    /// Returns the number of missing messages that were skipped.
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
    fn messages_wait_for_missing_messages_with_lower_numbers() {
        let mut turns = Turns::default();
        for message in [2, 1, 4] {
            turns.put(message, vec![message as u8]);
            assert!(all(&mut turns).is_empty());
        }
        turns.put(0, vec![0]);
        assert_eq!(all(&mut turns), [0, 1, 2]);
        // A duplicate arrives, and then a message that was skipped as missing.
        turns.put(4, vec![9]);
        turns.put(1, vec![9]);
        turns.put(3, vec![3]);
        assert_eq!(all(&mut turns), [3, 4]);
        assert_eq!((turns.bytes, turns.given_up), (0, 0));
        // The other application will not send the missing messages any more.
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

    /// Messages arrive in any order, and some are missing. The bounds on waiting messages and bytes are never exceeded,
    /// and messages are returned in order.
    #[test]
    fn number_and_bytes_of_messages_waiting_for_order_are_bounded() {
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
