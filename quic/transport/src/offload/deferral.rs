//! Which packets of a subscriber need not wake this process: those in which it acknowledges what the offload sent, as long
//! as nothing depends on them.
//!
//! The offload does not open these packets, it sees their length. So it is told the length of an acknowledgement that
//! says nothing new about losses: one that does has a range more, which takes two bytes at least.

use std::time::{Duration, Instant};

use millrace_quic::{plane::downstream::Budget, varint};

/// How long all packets wake the process after there was no window or credit left for something.
const SHORT_OF_ROOM: Duration = Duration::from_millis(100);

/// What is left of the window, as a fraction, when acknowledgements wake the process again: enough for what is sent
/// until they are read.
const RESERVE: u64 = 2;

/// A connection's acknowledgements.
#[derive(Default)]
pub(in crate::offload) struct Deferral {
    /// UDP payload of one without news, bytes.
    size: u32,
    /// Copies that were declined for want of window or credit.
    declined: u64,
    wake_until: Option<Instant>,
}

impl Deferral {
    /// A packet of `size` bytes held an acknowledgement with this ACK Delay, which told of no loss, and nothing else.
    /// That field varies in length from one to the next: two bytes are enough for a delay of 131 ms.
    pub fn learn(&mut self, size: usize, delay: u64) {
        let others = size.saturating_sub(varint::len(delay));
        self.size = u32::try_from(others + 2).unwrap_or(0);
    }

    /// The UDP payload of packets whose wake-up is deferred, and the bytes that may be sent before all wake the process:
    /// `budget` is all that may be sent, `window` what may be in flight, and `declined` how often that was not enough so
    /// far.
    pub fn limits(&mut self, now: Instant, budget: Budget, window: u64, declined: u64) -> (u32, u64) {
        if std::mem::replace(&mut self.declined, declined) != declined {
            self.wake_until = Some(now + SHORT_OF_ROOM);
        }
        let bytes = budget.bytes.saturating_sub(window / RESERVE).min(budget.data / 2);
        if bytes == 0 || self.wake_until.is_some_and(|until| now < until) {
            return (0, 0);
        }
        (self.size, bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: Budget = Budget { bytes: 100_000, data: 1 << 30 };
    const WINDOW: u64 = 120_000;

    #[test]
    fn one_range_more_is_longer_than_any_delay() {
        let mut deferral = Deferral::default();
        let now = Instant::now();
        assert_eq!(deferral.limits(now, BUDGET, WINDOW, 0).0, 0, "nothing is known yet");
        // What a packet has beside the delay, and a range more in two bytes.
        let (without, with) = (35, 37);
        for delay in [1, 63, 64, 16_383] {
            deferral.learn(without + varint::len(delay), delay);
            let limit = deferral.limits(now, BUDGET, WINDOW, 0).0;
            assert!((without + 1..=without + 2).all(|size| size <= limit as usize), "{delay}");
            assert!(with + 1 > limit as usize, "{delay}");
        }
    }

    #[test]
    fn the_end_of_window_and_credit_wakes() {
        let mut deferral = Deferral::default();
        let now = Instant::now();
        deferral.learn(36, 0);
        assert_eq!(deferral.limits(now, BUDGET, WINDOW, 0), (37, 40_000));
        assert_eq!(deferral.limits(now, Budget { bytes: 30_000, ..BUDGET }, WINDOW, 0), (0, 0));
        assert_eq!(deferral.limits(now, Budget { data: 50_000, ..BUDGET }, WINDOW, 0), (37, 25_000));
        assert_eq!(deferral.limits(now, Budget { data: 0, ..BUDGET }, WINDOW, 0), (0, 0));
    }

    #[test]
    fn so_is_what_follows_when_it_was_not_enough() {
        let mut deferral = Deferral::default();
        let now = Instant::now();
        deferral.learn(36, 0);
        assert_eq!(deferral.limits(now, BUDGET, WINDOW, 0).0, 37);
        assert_eq!(deferral.limits(now, BUDGET, WINDOW, 3), (0, 0));
        let later = now + SHORT_OF_ROOM;
        assert_eq!(deferral.limits(later - Duration::from_nanos(1), BUDGET, WINDOW, 3), (0, 0));
        assert_eq!(deferral.limits(later, BUDGET, WINDOW, 3).0, 37);
    }
}
