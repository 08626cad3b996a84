//! Decides whether BPF programs time the kernel's networking events, such as softirqs and system calls, or only sample
//! the CPUs. Timing adds a cost to each system call, so the decision depends on the rate of calls.
//!
//! [`MethodChoice`] does no I/O: the observer reports how much CPU time timing took, and executes the returned step.

use std::time::{Duration, Instant};

/// The CPU time that BPF programs may take to time the kernel's networking, and the pause after they took more.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TimingBudget {
    /// Largest share of each CPU's time that the timing programs may take: 0.01 is 1 %.
    pub share: f64,
    /// How long the CPUs are only sampled before the observer again tries to time the kernel's networking. Each failed
    /// trial doubles this pause, up to 320 s.
    pub pause: Duration,
}

impl Default for TimingBudget {
    fn default() -> Self {
        Self { share: 0.01, pause: Duration::from_secs(10) }
    }
}

const MAX_PAUSE: Duration = Duration::from_secs(320);
/// CPU time by which the timing programs may exceed their budget before networking is only sampled. If they take twice
/// the default budget of 1 %, that happens after two seconds.
const DEBT: Duration = Duration::from_millis(20);
/// Fraction of the budget that a trial may use. A trial near the whole budget would soon be followed by a switch back
/// to sampling.
const MARGIN: f64 = 0.5;
/// Shortest duration of a trial, in which networking is timed to measure how much CPU time the timing programs take.
pub(crate) const TRIAL: Duration = Duration::from_millis(100);

/// The step that the observer must take next with the BPF programs that time the kernel's networking.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MethodStep {
    /// Change nothing: networking continues to be timed, or to be only sampled.
    Stay,
    /// Detach the BPF programs that time networking. From the next report on, times are estimated from samples.
    Sample,
    /// Attach the BPF programs that time networking, to measure how much CPU time they take. Reports are still made
    /// from samples.
    Try,
    /// Keep the timing programs attached after a successful trial. From the next report on, networking's times are
    /// measured and not estimated from samples.
    Time,
}

/// State of [`MethodChoice`], which describes who changes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum MethodState {
    /// The timing programs are attached, and reports have measured times, since this moment.
    Timing { since: Instant },
    /// The CPUs are only sampled until this moment, when timing is tried again.
    Sampling { until: Instant },
    /// The timing programs are attached since this moment to measure what they cost. Reports still come from samples.
    Trying { since: Instant },
}

/// The state machine that chooses between timing and sampling.
///
/// The first state is *timing*. When the time beyond the budget, summed over reports, exceeds [`DEBT`], the state
/// becomes *sampling* until the pause is over. [`Self::poll`] then returns [`MethodStep::Try`], and the observer
/// answers with [`Self::tried`]. The state becomes *trying*, or *sampling* again if the programs could not be attached.
/// An expensive trial ends at the next `poll`. A cheap trial ends with the next report, and the state becomes *timing*.
/// Reports change their mode only in [`Self::report`], so no report mixes both modes.
#[derive(Debug)]
pub(crate) struct MethodChoice {
    budget: TimingBudget,
    state: MethodState,
    /// CPU time that the timing programs took beyond their budget, in nanoseconds, on the CPU where they took most.
    debt_ns: f64,
    /// Length of the next pause in which networking is only sampled, before timing it is tried again.
    pause: Duration,
    /// Number of times that reports changed between timing and sampling.
    changes: u64,
}

impl MethodChoice {
    /// Creates a choice in the state *timing*.
    pub fn new(budget: TimingBudget, now: Instant) -> Self {
        Self {
            budget,
            state: MethodState::Timing { since: now },
            debt_ns: 0.0,
            pause: budget.pause,
            changes: 0,
        }
    }

    pub fn budget(&self) -> TimingBudget {
        self.budget
    }

    /// Replaces the budget. A running pause still ends at its scheduled time.
    pub fn set_budget(&mut self, budget: TimingBudget) {
        self.budget = budget;
        self.pause = budget.pause;
        self.debt_ns = 0.0;
    }

    /// Returns how often reports changed between measured times and times that are only estimated from samples.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// Returns how long the CPUs are only sampled until timing is tried again; `None` while networking is timed.
    pub fn remaining(&self, now: Instant) -> Option<Duration> {
        match self.state {
            MethodState::Timing { .. } => None,
            MethodState::Sampling { until } => Some(until.saturating_duration_since(now)),
            MethodState::Trying { .. } => Some(Duration::ZERO),
        }
    }

    /// Returns the next step. May be called at any time. `share` is the fraction of a CPU that timing has taken since
    /// the trial began.
    pub fn poll(&mut self, now: Instant, share: f64) -> MethodStep {
        match self.state {
            MethodState::Sampling { until } if now >= until => MethodStep::Try,
            MethodState::Trying { since } if now - since >= TRIAL && share > self.budget.share * MARGIN => {
                self.sample(now);
                MethodStep::Sample
            }
            _ => MethodStep::Stay,
        }
    }

    /// Returns the next step at the end of a report's period, after [`poll`](Self::poll). `share` is the fraction of a
    /// CPU that timing took in this period.
    pub fn report(&mut self, now: Instant, period: Duration, share: f64) -> MethodStep {
        match self.state {
            MethodState::Sampling { .. } => MethodStep::Stay,
            MethodState::Trying { since } if now - since < TRIAL => MethodStep::Stay,
            MethodState::Trying { .. } => {
                self.state = MethodState::Timing { since: now };
                self.debt_ns = 0.0;
                self.changes += 1;
                MethodStep::Time
            }
            MethodState::Timing { since } => {
                let excess = (share - self.budget.share) * period.as_nanos() as f64;
                self.debt_ns = (self.debt_ns + excess).max(0.0);
                if self.debt_ns <= DEBT.as_nanos() as f64 {
                    return MethodStep::Stay;
                }
                // If timing lasted longer than the next pause would, timing and sampling do not alternate quickly. The
                // next pause then gets its initial length again.
                if now - since >= self.pause {
                    self.pause = self.budget.pause;
                }
                self.changes += 1;
                self.sample(now);
                MethodStep::Sample
            }
        }
    }

    /// Records the result of [`MethodStep::Try`]. `done` is true if the timing programs are attached now.
    pub fn tried(&mut self, now: Instant, done: bool) {
        match done {
            true => self.state = MethodState::Trying { since: now },
            false => self.sample(now),
        }
    }

    fn sample(&mut self, now: Instant) {
        self.state = MethodState::Sampling { until: now + self.pause };
        self.pause = (self.pause * 2).min(MAX_PAUSE.max(self.budget.pause));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);
    const BUDGET: TimingBudget = TimingBudget { share: 0.01, pause: Duration::from_secs(10) };

    /// A clock that moves on by a second with each report.
    struct TestClock(Instant);

    impl TestClock {
        fn report(&mut self, choice: &mut MethodChoice, share: f64) -> MethodStep {
            self.0 += S;
            choice.report(self.0, S, share)
        }
    }

    fn begin() -> (MethodChoice, TestClock) {
        let now = Instant::now();
        (MethodChoice::new(BUDGET, now), TestClock(now))
    }

    /// Returns a state machine that has just changed from timing to sampling for the first time.
    fn sampling() -> (MethodChoice, TestClock) {
        let (mut choice, mut clock) = begin();
        assert_eq!(clock.report(&mut choice, 0.2), MethodStep::Sample);
        (choice, clock)
    }

    #[test]
    fn auto_mode_stays_within_its_cpu_budget() {
        let (mut choice, mut clock) = begin();
        for _ in 0..1000 {
            assert_eq!(clock.report(&mut choice, 0.01), MethodStep::Stay);
            assert_eq!(choice.poll(clock.0, 0.0), MethodStep::Stay);
        }
        assert_eq!((choice.changes(), choice.remaining(clock.0)), (0, None));
    }

    #[test]
    fn higher_cpu_cost_ends_timing_mode_sooner() {
        for (share, reports) in [(0.2, 1), (0.025, 2), (0.02, 3), (0.012, 11)] {
            let (mut choice, mut clock) = begin();
            let steps = (1..).find(|_| clock.report(&mut choice, share) == MethodStep::Sample);
            assert_eq!(steps, Some(reports), "{share}");
        }
    }

    /// CPU time that the timing programs did not use is not saved for later. But reports below the budget reduce an
    /// earlier excess.
    #[test]
    fn reports_below_the_cpu_budget_reduce_an_earlier_excess() {
        let (mut choice, mut clock) = begin();
        for _ in 0..100 {
            assert_eq!(clock.report(&mut choice, 0.025), MethodStep::Stay);
            assert_eq!(clock.report(&mut choice, 0.0), MethodStep::Stay);
            assert_eq!(clock.report(&mut choice, 0.0), MethodStep::Stay);
        }
        clock.report(&mut choice, 0.025);
        assert_eq!(clock.report(&mut choice, 0.025), MethodStep::Sample);
    }

    #[test]
    fn timing_trial_within_the_cpu_budget_switches_sampling_to_timing() {
        let (mut choice, mut clock) = sampling();
        assert_eq!(choice.remaining(clock.0), Some(BUDGET.pause));
        assert_eq!(choice.poll(clock.0 + 9 * S, 0.0), MethodStep::Stay);
        assert_eq!(clock.report(&mut choice, 0.0), MethodStep::Stay);
        clock.0 += 9 * S;
        assert_eq!(choice.poll(clock.0, 0.0), MethodStep::Try);
        choice.tried(clock.0, true);
        // A trial of timing that has run for less than `TRIAL` does not end, even if timing is expensive.
        assert_eq!(choice.poll(clock.0 + TRIAL / 2, 0.5), MethodStep::Stay);
        assert_eq!(choice.report(clock.0 + TRIAL / 2, S, 0.0), MethodStep::Stay);
        assert_eq!(choice.poll(clock.0 + TRIAL, 0.005), MethodStep::Stay);
        assert_eq!(choice.report(clock.0 + TRIAL, S, 0.005), MethodStep::Time);
        assert_eq!((choice.changes(), choice.remaining(clock.0)), (2, None));
    }

    #[test]
    fn timing_trial_over_the_cpu_budget_doubles_the_wait_for_the_next() {
        let (mut choice, mut clock) = sampling();
        let mut waits = Vec::new();
        for _ in 0..8 {
            let wait = choice.remaining(clock.0).expect("it samples");
            waits.push(wait.as_secs());
            clock.0 += wait;
            assert_eq!(choice.poll(clock.0, 0.0), MethodStep::Try);
            choice.tried(clock.0, true);
            clock.0 += TRIAL;
            assert_eq!(choice.poll(clock.0, 0.006), MethodStep::Sample);
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 320, 320]);
        assert_eq!(choice.changes(), 1, "trials are not seen in reports");
    }

    #[test]
    fn new_cpu_budget_applies_from_the_next_timing_trial() {
        let (mut choice, mut clock) = sampling();
        choice.set_budget(TimingBudget { share: 0.5, pause: S });
        assert_eq!(choice.remaining(clock.0), Some(BUDGET.pause));
        clock.0 += BUDGET.pause;
        assert_eq!(choice.poll(clock.0, 0.0), MethodStep::Try);
        choice.tried(clock.0, true);
        clock.0 += TRIAL;
        assert_eq!(choice.poll(clock.0, 0.2), MethodStep::Stay);
        assert_eq!(choice.report(clock.0, S, 0.2), MethodStep::Time);
        choice.set_budget(BUDGET);
        assert_eq!(clock.report(&mut choice, 0.2), MethodStep::Sample);
        assert_eq!(choice.remaining(clock.0), Some(BUDGET.pause));
    }

    #[test]
    fn timing_programs_failing_to_attach_double_the_wait_for_the_next_trial() {
        let (mut choice, mut clock) = sampling();
        clock.0 += BUDGET.pause;
        assert_eq!(choice.poll(clock.0, 0.0), MethodStep::Try);
        choice.tried(clock.0, false);
        assert_eq!(choice.remaining(clock.0), Some(2 * BUDGET.pause));
    }

    /// Each change to sampling doubles the pause before the next trial of timing. If timing has lasted longer than the
    /// pause, the pause gets its initial length again.
    #[test]
    fn pause_between_timing_trials_is_reset_if_timing_lasts_longer() {
        let (mut choice, mut clock) = sampling();
        let again = |choice: &mut MethodChoice, clock: &mut TestClock, timed: u32| {
            clock.0 += choice.remaining(clock.0).expect("it samples");
            assert_eq!(choice.poll(clock.0, 0.0), MethodStep::Try);
            choice.tried(clock.0, true);
            clock.0 += TRIAL;
            assert_eq!(choice.report(clock.0, S, 0.0), MethodStep::Time);
            (1..timed).for_each(|_| assert_eq!(clock.report(choice, 0.0), MethodStep::Stay));
            assert_eq!(clock.report(choice, 0.2), MethodStep::Sample);
            choice.remaining(clock.0).map(|left| left.as_secs())
        };
        assert_eq!(again(&mut choice, &mut clock, 5), Some(20));
        assert_eq!(again(&mut choice, &mut clock, 5), Some(40));
        assert_eq!(again(&mut choice, &mut clock, 81), Some(10));
    }
}
