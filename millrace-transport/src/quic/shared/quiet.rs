//! Which packets of a subscriber need not wake this process: those in which it acknowledges what the kernel sent, as long
//! as nothing depends on them.
//!
//! The kernel does not open these packets, it sees their length. So it is told the length of an acknowledgement that
//! says nothing new about losses: one that does has a range more, which takes two bytes at least.

use std::time::{Duration, Instant};

use millrace_proto::{quic::varint, relay::downstream::Share};

/// How long all packets are loud after the kernel had no window or credit left for something.
const SHORT_OF_ROOM: Duration = Duration::from_millis(100);

/// What is left of the window, as a fraction, when acknowledgements become loud: enough for what is sent until they
/// are read.
const RESERVE: u64 = 2;

/// A connection's acknowledgements.
#[derive(Default)]
pub(super) struct Quiet {
    /// UDP payload of one without news, bytes.
    size: u32,
    /// Copies that the kernel declined for want of window or credit.
    declined: u64,
    loud_until: Option<Instant>,
}

impl Quiet {
    /// A packet of `size` bytes held an acknowledgement with this ACK Delay, which told of no loss, and nothing else.
    /// That field varies in length from one to the next: two bytes are enough for a delay of 131 ms.
    pub fn learn(&mut self, size: usize, delay: u64) {
        let others = size.saturating_sub(varint::len(delay));
        self.size = u32::try_from(others + 2).unwrap_or(0);
    }

    /// The UDP payload that is no hurry, and the bytes that the kernel may send before everything is: `share` is all that
    /// it may send, `window` the congestion window, and `declined` how often that was not enough so far.
    pub fn limits(&mut self, now: Instant, share: Share, window: u64, declined: u64) -> (u32, u64) {
        if std::mem::replace(&mut self.declined, declined) != declined {
            self.loud_until = Some(now + SHORT_OF_ROOM);
        }
        let bytes = share.bytes.saturating_sub(window / RESERVE).min(share.data / 2);
        if bytes == 0 || self.loud_until.is_some_and(|until| now < until) {
            return (0, 0);
        }
        (self.size, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: Share = Share { bytes: 100_000, data: 1 << 30 };
    const WINDOW: u64 = 120_000;

    #[test]
    fn one_range_more_is_longer_than_any_delay() {
        let mut quiet = Quiet::default();
        let now = Instant::now();
        assert_eq!(quiet.limits(now, SHARE, WINDOW, 0).0, 0, "nothing is known yet");
        // What a packet has beside the delay, and a range more in two bytes.
        let (without, with) = (35, 37);
        for delay in [1, 63, 64, 16_383] {
            quiet.learn(without + varint::len(delay), delay);
            let limit = quiet.limits(now, SHARE, WINDOW, 0).0;
            assert!((without + 1..=without + 2).all(|size| size <= limit as usize), "{delay}");
            assert!(with + 1 > limit as usize, "{delay}");
        }
    }

    #[test]
    fn the_end_of_window_and_credit_is_loud() {
        let mut quiet = Quiet::default();
        let now = Instant::now();
        quiet.learn(36, 0);
        assert_eq!(quiet.limits(now, SHARE, WINDOW, 0), (37, 40_000));
        assert_eq!(quiet.limits(now, Share { bytes: 30_000, ..SHARE }, WINDOW, 0), (0, 0));
        assert_eq!(quiet.limits(now, Share { data: 50_000, ..SHARE }, WINDOW, 0), (37, 25_000));
        assert_eq!(quiet.limits(now, Share { data: 0, ..SHARE }, WINDOW, 0), (0, 0));
    }

    #[test]
    fn so_is_what_follows_when_it_was_not_enough() {
        let mut quiet = Quiet::default();
        let now = Instant::now();
        quiet.learn(36, 0);
        assert_eq!(quiet.limits(now, SHARE, WINDOW, 0).0, 37);
        assert_eq!(quiet.limits(now, SHARE, WINDOW, 3), (0, 0));
        let later = now + SHORT_OF_ROOM;
        assert_eq!(quiet.limits(later - Duration::from_nanos(1), SHARE, WINDOW, 3), (0, 0));
        assert_eq!(quiet.limits(later, SHARE, WINDOW, 3).0, 37);
    }
}
