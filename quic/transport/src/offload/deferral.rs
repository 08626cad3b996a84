//! Packets of a subscriber that need not wake this process: its acknowledgements of what the offload sent, as long as nothing depends on
//! them.
//!
//! The offload does not open these packets; it sees only their length. It gets the length of an acknowledgement without news of losses. One
//! with such news has another range, which takes at least two bytes.

use std::time::{Duration, Instant};

use millrace_quic::{plane::downstream::OffloadBudget, varint};

/// How long all packets wake the process after there was no window or credit left for something.
const SHORT_OF_ROOM: Duration = Duration::from_millis(100);

/// The fraction of the window that is left when acknowledgements wake the process again. It has to last until they are read.
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
    pub fn limits(&mut self, now: Instant, budget: OffloadBudget, window: u64, declined: u64) -> (u32, u64) {
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

    const BUDGET: OffloadBudget = OffloadBudget { bytes: 100_000, data: 1 << 30 };
    const WINDOW: u64 = 120_000;

    #[test]
    fn additional_ack_range_is_longer_than_any_ack_delay() {
        let mut deferral = Deferral::default();
        let now = Instant::now();
        assert_eq!(deferral.limits(now, BUDGET, WINDOW, 0).0, 0, "nothing is known yet");
        // A packet's bytes besides the ACK Delay, without and with another range of two bytes.
        let without = 35;
        let with = 37;
        for delay in [1, 63, 64, 16_383] {
            deferral.learn(without + varint::len(delay), delay);
            let limit = deferral.limits(now, BUDGET, WINDOW, 0).0;
            assert!((without + 1..=without + 2).all(|size| size <= limit as usize), "{delay}");
            assert!(with + 1 > limit as usize, "{delay}");
        }
    }

    #[test]
    fn exhausted_window_or_credit_wakes_userspace() {
        let mut deferral = Deferral::default();
        let now = Instant::now();
        deferral.learn(36, 0);
        assert_eq!(deferral.limits(now, BUDGET, WINDOW, 0), (37, 40_000));
        assert_eq!(deferral.limits(now, OffloadBudget { bytes: 30_000, ..BUDGET }, WINDOW, 0), (0, 0));
        assert_eq!(deferral.limits(now, OffloadBudget { data: 50_000, ..BUDGET }, WINDOW, 0), (37, 25_000));
        assert_eq!(deferral.limits(now, OffloadBudget { data: 0, ..BUDGET }, WINDOW, 0), (0, 0));
    }

    #[test]
    fn shortage_suspends_deferral_for_a_while() {
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
