//! Tries whether the offload's packets arrive.
//!
//! Its packets take a shorter way out of the host than userspace's: past netfilter, IPsec policies and routing by a
//! socket's owner or mark. Where a host needs those, every packet of the kernel would be a loss. So it may send a few
//! on each path, and goes on once one of them was acknowledged.

use std::{
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use millrace_quic::plane::downstream::OffloadBudget;

/// Packets on trial. With every third packet lost on the way, all of them are in one trial of 6000.
const PACKETS: usize = 8;

/// Packets of each later trial: on a host where none ever arrives, each is a loss.
const LATER_PACKETS: usize = 2;

/// Whatever was in the way may be gone by then. After each trial that fails it is twice as long, up to an hour.
const RETRY: Duration = Duration::from_secs(60);
const RETRY_MOST: Duration = Duration::from_secs(3600);

/// The trial of an offload on one path: it is open, and then has passed, or has failed until it is open again.
///
/// Calls come with the connection's lock held. [`Self::on_sent`] notes the first packets of an open trial, and [`Self::on_ack`] decides it.
/// [`Self::allow`] opens a failed one again once its pause is over, and keeps an open one to the bytes of its packets. A trial that has passed
/// never fails: a new path begins with a new trial.
#[derive(Debug)]
pub(in crate::offload) struct OffloadTrial {
    state: TrialState,
    /// Trials that failed, one after the other.
    failures: u32,
}

#[derive(Debug, PartialEq)]
enum TrialState {
    /// The numbers of packets sent.
    Open(Vec<u64>),
    Passed,
    Failed(Instant),
}

impl OffloadTrial {
    pub fn new() -> Self {
        Self { state: TrialState::Open(Vec::with_capacity(PACKETS)), failures: 0 }
    }

    pub fn has_passed(&self) -> bool {
        self.state == TrialState::Passed
    }

    fn packets(&self) -> usize {
        if self.failures == 0 { PACKETS } else { LATER_PACKETS }
    }

    /// The offload has sent a packet.
    pub fn on_sent(&mut self, number: u64) {
        let packets = self.packets();
        if let TrialState::Open(numbers) = &mut self.state
            && numbers.len() < packets
        {
            numbers.push(number);
        }
    }

    /// Returns whether the trial has just failed: all were sent, and a later packet arrived but none of them.
    pub fn on_ack(&mut self, now: Instant, ranges: &[RangeInclusive<u64>]) -> bool {
        let packets = self.packets();
        let TrialState::Open(numbers) = &self.state else { return false };
        let arrived = |number: &u64| ranges.iter().any(|range| range.contains(number));
        let largest = ranges.iter().map(|range| *range.end()).max();
        if numbers.iter().any(arrived) {
            self.state = TrialState::Passed;
        } else if numbers.len() == packets && numbers.iter().all(|number| Some(*number) < largest) {
            self.state = TrialState::Failed(now);
            self.failures = self.failures.saturating_add(1);
            return true;
        }
        false
    }

    /// Returns the part of a budget that may be granted during the trial. Packets have at most `mtu` bytes.
    pub fn allow(&mut self, now: Instant, budget: OffloadBudget, mtu: usize) -> OffloadBudget {
        if matches!(self.state, TrialState::Failed(at) if now.saturating_duration_since(at) >= self.pause()) {
            self.state = TrialState::Open(Vec::with_capacity(LATER_PACKETS));
        }
        match &self.state {
            TrialState::Passed => budget,
            TrialState::Open(numbers) => {
                let left = (self.packets() - numbers.len()) * mtu;
                OffloadBudget { bytes: budget.bytes.min(left as u64), ..budget }
            }
            TrialState::Failed(_) => OffloadBudget::default(),
        }
    }

    /// Returns the time between the last trial, which has failed, and the next.
    fn pause(&self) -> Duration {
        let doubled = 1 << self.failures.saturating_sub(1).min(6);
        (RETRY * doubled).min(RETRY_MOST)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BUDGET: OffloadBudget = OffloadBudget { bytes: 100_000, data: 50_000 };
    const MTU: usize = 1000;

    #[test]
    fn one_arrived_kernel_packet_passes_the_trial() {
        let mut trial = OffloadTrial::new();
        let now = Instant::now();
        assert_eq!(trial.allow(now, BUDGET, MTU).bytes, 8000);
        (10..13).for_each(|number| trial.on_sent(number));
        assert_eq!(trial.allow(now, BUDGET, MTU).bytes, 5000);
        assert!(!trial.on_ack(now, &[15..=20, 0..=9]));
        assert!(!trial.on_ack(now, &[12..=20, 0..=9]));
        assert_eq!(trial.allow(now, BUDGET, MTU), BUDGET);
    }

    #[test]
    fn failed_trial_of_kernel_sending_pauses_for_a_minute() {
        let mut trial = OffloadTrial::new();
        let now = Instant::now();
        (10..20).for_each(|number| trial.on_sent(2 * number));
        assert_eq!(trial.allow(now, BUDGET, MTU).bytes, 0, "nothing more before that is known");
        assert!(!trial.on_ack(now, &[33..=33, 0..=19]), "the last may be under way");
        assert!(trial.on_ack(now, &[35..=35, 0..=19]));
        assert!(!trial.on_ack(now, &[20..=40, 0..=19]), "once");
        let later = now + RETRY;
        assert_eq!(trial.allow(later - Duration::from_nanos(1), BUDGET, MTU), OffloadBudget::default());
        assert_eq!(trial.allow(later, BUDGET, MTU).bytes, 2000);
        assert!(!trial.has_passed());
        trial.on_sent(50);
        assert!(!trial.on_ack(later, &[50..=50]));
        assert!(trial.has_passed());
    }

    /// A host that routes by the owner of a socket: nothing that the kernel sends arrives, ever.
    #[test]
    fn path_that_loses_all_costs_few_packets_a_day() {
        let mut trial = OffloadTrial::new();
        let start = Instant::now();
        let mut lost = 0;
        let mut trials = 0;
        for second in 0..24 * 3600 {
            let now = start + Duration::from_secs(second);
            while trial.allow(now, BUDGET, MTU).bytes > 0 {
                trial.on_sent(10 * second + lost % 10);
                lost += 1;
            }
            // Packets that userspace has sent do arrive.
            trials += u64::from(trial.on_ack(now, &[10 * second + 10..=10 * second + 10]));
        }
        assert!((20..=35).contains(&trials), "{trials}");
        assert_eq!(lost, 8 + 2 * (trials - 1));
    }
}
