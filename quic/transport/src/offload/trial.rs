//! A trial whether the kernel offload's packets arrive at the peer.
//!
//! The offload's packets bypass netfilter, IPsec policies, and routing by a socket's owner or mark. On a host that
//! needs these, all packets of the offload would be lost. So the offload may send only a few packets on each path until
//! one of them is acknowledged.

use std::{
    ops::RangeInclusive,
    time::{Duration, Instant},
};

use millrace_quic::plane::downstream::OffloadBudget;

/// Number of packets in the first trial. If the network loses every third packet, one trial in 6000 loses all of them.
const PACKETS: usize = 8;

/// Number of packets in each later trial. The number is small, because all these packets are lost if the host never
/// lets the kernel offload's packets pass.
const LATER_PACKETS: usize = 2;

/// Time from the first failed trial to the next trial. It doubles with each failed trial, up to an hour.
const RETRY: Duration = Duration::from_secs(60);
/// Longest time between two trials.
const RETRY_MOST: Duration = Duration::from_secs(3600);

/// The trial of a kernel offload on one path. It is *open*, *passed* or *failed*; a failed one opens again later.
///
/// All methods are called with the connection's lock held. [`Self::on_sent`] notes the first packets of an open trial,
/// and [`Self::on_ack`] decides it. [`Self::allow`] opens a failed trial again after its pause, and limits an open
/// trial to the bytes of its packets. A trial that has passed never fails. A new path begins with a new trial.
#[derive(Debug)]
pub(in crate::offload) struct OffloadTrial {
    state: TrialState,
    /// Number of failed trials in a row.
    failures: u32,
}

#[derive(Debug, PartialEq)]
enum TrialState {
    /// The trial is open, and has sent packets with these numbers.
    Open(Vec<u64>),
    Passed,
    /// The trial failed at this time. The next trial begins after a pause.
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

    /// Notes that the kernel offload has sent the packet `number`.
    pub fn on_sent(&mut self, number: u64) {
        let packets = self.packets();
        if let TrialState::Open(numbers) = &mut self.state
            && numbers.len() < packets
        {
            numbers.push(number);
        }
    }

    /// Notes acknowledged packet numbers. Returns true if the trial has just failed: all its packets were sent, and a
    /// later packet was acknowledged, but none of the trial's packets.
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

    /// Returns the part of `budget` that may be granted to the kernel offload during the trial. Packets have at most
    /// `mtu` bytes.
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

    /// Returns the time between the last failed trial and the next one.
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
    fn trial_passes_with_one_acknowledged_kernel_packet() {
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
    fn failed_trial_stops_kernel_sending_for_a_minute() {
        let mut trial = OffloadTrial::new();
        let now = Instant::now();
        (10..20).for_each(|number| trial.on_sent(2 * number));
        assert_eq!(trial.allow(now, BUDGET, MTU).bytes, 0, "no more packets before the trial is decided");
        assert!(!trial.on_ack(now, &[33..=33, 0..=19]), "the last packet may be under way");
        assert!(trial.on_ack(now, &[35..=35, 0..=19]));
        assert!(!trial.on_ack(now, &[20..=40, 0..=19]), "the failure is reported once");
        let later = now + RETRY;
        assert_eq!(trial.allow(later - Duration::from_nanos(1), BUDGET, MTU), OffloadBudget::default());
        assert_eq!(trial.allow(later, BUDGET, MTU).bytes, 2000);
        assert!(!trial.has_passed());
        trial.on_sent(50);
        assert!(!trial.on_ack(later, &[50..=50]));
        assert!(trial.has_passed());
    }

    /// The host routes by the owner of a socket, so no packet of the kernel offload ever arrives.
    #[test]
    fn trials_on_a_path_that_loses_all_cost_few_packets_a_day() {
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
            // Packets sent from userspace do arrive.
            trials += u64::from(trial.on_ack(now, &[10 * second + 10..=10 * second + 10]));
        }
        assert!((20..=35).contains(&trials), "{trials}");
        assert_eq!(lost, 8 + 2 * (trials - 1));
    }
}
