//! Measures the CPU time that BPF programs take to time the kernel's networking, and decides whether to use them.

use std::io;
use std::time::{Duration, Instant};

use crate::kernel::{CallTimes, CpuSums, interrupt_time};

use super::cpu_totals;
use crate::choice::{MethodChoice, MethodStep, TRIAL, TimingBudget};
use crate::report::Auto;
use crate::share::{ns, rounded};

/// The time in ns that the observer's BPF programs add to each call.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct CallPrices {
    timed_ns: f64,
    other_ns: f64,
}

/// Lower bound for the time that a timed call costs, since timing reads the clock twice. On a busy machine the measured
/// time may be too small.
const LEAST_TIMED_NS: f64 = 40.0;

impl CallPrices {
    /// Returns the time that the programs add to a call: the durations of calls with the programs, minus those without.
    pub fn between(without: CallTimes, with: CallTimes) -> Self {
        Self {
            timed_ns: (with.socket_ns - without.socket_ns).max(LEAST_TIMED_NS),
            other_ns: (with.other_ns - without.other_ns).max(0.0),
        }
    }

    /// Returns the fraction of `period` that the timing programs took, on the CPU where they took most.
    fn share(&self, cpus: &[u32], after: &[CpuSums], before: &[CpuSums], period: Duration) -> f64 {
        let ns = |cpu: &u32| {
            let after = cpu_totals(after, *cpu as usize).probed();
            let before = cpu_totals(before, *cpu as usize).probed();
            let runs = |after: u64, before: u64| after.saturating_sub(before) as f64;
            runs(after.timed, before.timed) * self.timed_ns
                + runs(after.other_calls, before.other_calls) * self.other_ns
        };
        cpus.iter().map(ns).fold(0.0, f64::max) / period.as_nanos().max(1) as f64
    }
}

/// The part of the observer that keeps the CPU time of the timing programs within a budget.
#[derive(Debug)]
pub(super) struct AdaptiveSampling {
    choice: MethodChoice,
    prices: CallPrices,
    frequency: Frequency,
    cpus: Vec<u32>,
    /// Start time of the running trial of timing, and the sums of each CPU's times and calls at that time.
    trial: Option<(Instant, Vec<CpuSums>)>,
    /// The share of a CPU that the timing programs took when it was last measured.
    share: f64,
}

impl AdaptiveSampling {
    pub fn new(budget: TimingBudget, prices: CallPrices, frequency: Frequency, cpus: Vec<u32>) -> Self {
        let choice = MethodChoice::new(budget, Instant::now());
        Self { choice, prices, frequency, cpus, trial: None, share: 0.0 }
    }

    pub fn set_budget(&mut self, budget: TimingBudget) {
        self.choice.set_budget(budget);
    }

    pub fn set_cpus(&mut self, cpus: Vec<u32>) {
        self.cpus = cpus;
    }

    /// Measures how much CPU time the running trial of timing takes, and returns what the observer does next.
    pub fn poll(&mut self, now: Instant, totals: impl FnOnce() -> Vec<CpuSums>) -> MethodStep {
        // A share that was measured for less than the time `TRIAL` is mostly noise.
        if let Some((since, before)) = self.trial.as_ref().filter(|(since, _)| now - *since >= TRIAL) {
            self.share = self.prices.share(&self.cpus, &totals(), before, now - *since);
        }
        let step = self.choice.poll(now, self.share);
        if step == MethodStep::Sample {
            self.trial = None;
        }
        step
    }

    /// Records whether the timing programs were attached for a trial. `begun` contains the sums of each CPU's times and
    /// calls at the start of the trial, or `None` if attaching failed.
    pub fn tried(&mut self, begun: Option<Vec<CpuSums>>) {
        let now = Instant::now();
        self.choice.tried(now, begun.is_some());
        self.trial = begun.map(|totals| (now, totals));
    }

    /// Returns the state of the automatic choice for the report whose period ends now, and whether to start or stop
    /// timing.
    pub fn report(
        &mut self,
        now: Instant,
        after: &[CpuSums],
        before: &[CpuSums],
        period: Duration,
    ) -> (Auto, MethodStep) {
        if self.choice.remaining(now).is_none() {
            self.share = self.prices.share(&self.cpus, after, before, period);
        }
        let auto = Auto {
            budget_share: self.choice.budget().share,
            timing_share: rounded(self.share),
            retry_ms: self
                .choice
                .remaining(now)
                .map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            changes: self.choice.changes(),
            interrupt_ns: self.frequency.interrupt.map(ns),
            lowered_from_hz: self.frequency.lowered_from_hz,
        };
        let step = self.choice.report(now, period, self.share);
        if step == MethodStep::Time {
            self.trial = None;
        }
        (auto, step)
    }
}

/// The sampling frequency, and the reason if it was lowered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Frequency {
    /// Number of samples per second on each CPU.
    pub hz: u32,
    /// The configured frequency, if `hz` is lower.
    pub lowered_from_hz: Option<u32>,
    /// Duration of a sample's interrupt, if it was measured.
    interrupt: Option<Duration>,
}

/// The lowest sampling frequency that is chosen automatically. With fewer samples, the times of the network stack's
/// parts would have too wide margins of error.
const LEAST_HZ: u32 = 100;

impl Frequency {
    pub fn as_asked(hz: u32) -> Self {
        Self { hz, lowered_from_hz: None, interrupt: None }
    }

    /// Halves `hz` until the sampling interrupts take at most half of the CPU time budget. Most machines do not need
    /// that.
    pub fn within(budget: TimingBudget, hz: u32) -> io::Result<Self> {
        Ok(Self::with(budget, hz, interrupt_time()?))
    }

    fn with(budget: TimingBudget, asked: u32, interrupt: Option<Duration>) -> Self {
        let dear =
            |hz: u32| interrupt.is_some_and(|time| time.as_secs_f64() * f64::from(hz) > budget.share / 2.0);
        let mut hz = asked;
        while dear(hz) && hz / 2 >= LEAST_HZ {
            hz /= 2;
        }
        Self { hz, lowered_from_hz: (hz < asked).then_some(asked), interrupt }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sampling_interrupts_above_5_us_lower_the_sampling_frequency() {
        let budget = TimingBudget::default();
        for (interrupt_us, asked, hz) in [
            (Some(1), 1000, 1000),
            (Some(5), 1000, 1000),
            (Some(6), 1000, 500),
            (Some(15), 1000, 250),
            (Some(1000), 1000, 125),
            (Some(1000), 100, 100),
            (Some(15), 0, 0),
            (None, 1000, 1000),
        ] {
            let frequency = Frequency::with(budget, asked, interrupt_us.map(Duration::from_micros));
            assert_eq!(frequency.hz, hz, "{interrupt_us:?} us, {asked} Hz");
            assert_eq!(frequency.lowered_from_hz, (hz < asked).then_some(asked));
        }
    }

    #[test]
    fn trial_of_timing_ignores_the_earlier_cpu_share_of_timing() {
        let prices = CallPrices { timed_ns: 100.0, other_ns: 10.0 };
        let mut adaptive =
            AdaptiveSampling::new(TimingBudget::default(), prices, Frequency::as_asked(0), vec![0]);
        let now = Instant::now();
        let second = Duration::from_secs(1);
        let idle = || vec![CpuSums::default()];
        adaptive.share = 0.2;
        assert_eq!(adaptive.choice.report(now, second, adaptive.share), MethodStep::Sample);
        assert_eq!(adaptive.poll(now + TimingBudget::default().pause, idle), MethodStep::Try);
        adaptive.tried(Some(idle()));
        let begun = Instant::now();
        assert_eq!(adaptive.poll(begun, idle), MethodStep::Stay, "too early to tell");
        assert_eq!(
            adaptive.poll(begun + TRIAL, idle),
            MethodStep::Stay,
            "the share before the trial does not count"
        );
        assert_eq!(adaptive.report(begun + TRIAL, &idle(), &idle(), second).1, MethodStep::Time);
        assert!(adaptive.trial.is_none(), "later polls measure no trial");
    }

    #[test]
    fn cost_of_timing_a_call_is_timed_minus_untimed_and_never_zero() {
        let times = |socket_ns, other_ns| CallTimes { socket_ns, other_ns };
        let prices = CallPrices::between(times(500.0, 80.0), times(700.0, 120.0));
        assert_eq!(prices, CallPrices { timed_ns: 200.0, other_ns: 40.0 });
        let noise = CallPrices::between(times(500.0, 80.0), times(490.0, 79.0));
        assert_eq!(noise, CallPrices { timed_ns: LEAST_TIMED_NS, other_ns: 0.0 });
    }
}
