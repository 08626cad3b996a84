//! Decides which packets of a subscriber need not wake this process: acknowledgements of the kernel offload's packets,
//! while no data waits for congestion window or retransmission.
//!
//! The offload does not decrypt these packets, and knows only their length. So this module tells the offload the length
//! of a packet whose ACK shows no loss. An ACK that shows a loss has an additional range, so it is at least two bytes
//! longer.

use std::time::{Duration, Instant};

use millrace_quic::{plane::downstream::OffloadBudget, varint};

/// Time for which all packets wake the process after the kernel offload could not send for lack of congestion window or
/// flow control credit.
const SHORT_OF_ROOM: Duration = Duration::from_millis(100);

/// Acknowledgements wake the process again when the kernel offload may send no more than this fraction (1/`RESERVE`) of
/// the congestion window. These bytes have to last until the process has read the acknowledgements.
const RESERVE: u64 = 2;

/// The state of deferred wake-ups on one connection.
#[derive(Default)]
pub(in crate::offload) struct Deferral {
    /// Largest UDP payload of a packet with an ACK that shows no loss, bytes.
    size: u32,
    /// Number of frame copies that the kernel offload did not send for lack of congestion window or flow control
    /// credit.
    declined: u64,
    /// Time until which every packet wakes the process, because the kernel offload lacked congestion window or flow
    /// control credit.
    wake_until: Option<Instant>,
}

impl Deferral {
    /// Notes that a packet of `size` bytes had only an ACK frame with this ACK Delay, which showed no loss. The length
    /// of the ACK Delay varies between packets: two bytes are enough for a delay of 131 ms.
    pub fn learn(&mut self, size: usize, delay: u64) {
        let others = size.saturating_sub(varint::len(delay));
        self.size = u32::try_from(others + 2).unwrap_or(0);
    }

    /// Returns the largest UDP payload of packets whose wake-up is deferred, and the bytes that may be sent before all
    /// packets wake the process. `budget` is the kernel offload's unused budget, and `window` the congestion window for
    /// it, bytes. `declined` is how many frame copies the offload could not send so far for lack of congestion window
    /// or flow control credit.
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
    fn ack_packet_with_a_second_range_is_too_long_to_defer_at_any_ack_delay() {
        let mut deferral = Deferral::default();
        let now = Instant::now();
        assert_eq!(deferral.limits(now, BUDGET, WINDOW, 0).0, 0, "the length is unknown at first");
        // Lengths of packets without their ACK Delay field: `without` has one ACK range, and `with` has an additional
        // range of two bytes.
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
    fn ack_wakes_userspace_when_the_offloads_window_or_credit_runs_low() {
        let mut deferral = Deferral::default();
        let now = Instant::now();
        deferral.learn(36, 0);
        assert_eq!(deferral.limits(now, BUDGET, WINDOW, 0), (37, 40_000));
        assert_eq!(deferral.limits(now, OffloadBudget { bytes: 30_000, ..BUDGET }, WINDOW, 0), (0, 0));
        assert_eq!(deferral.limits(now, OffloadBudget { data: 50_000, ..BUDGET }, WINDOW, 0), (37, 25_000));
        assert_eq!(deferral.limits(now, OffloadBudget { data: 0, ..BUDGET }, WINDOW, 0), (0, 0));
    }

    #[test]
    fn offload_that_lacked_window_or_credit_defers_no_wake_ups_for_a_while() {
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
