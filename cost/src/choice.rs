//! Whether events are timed or only sampled: timing them costs something in each call, so it is a question of their rate.
//!
//! Pure: the observer says what timing took, and does as it is told.

use std::time::{Duration, Instant};

/// What timing events may take.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Budget {
    /// Of each CPU: 0.01 is 1 %.
    pub share: f64,
    /// How long events are only sampled before timing them is tried again. Twice as long each time that this fails, up to
    /// 320 s.
    pub pause: Duration,
}

impl Default for Budget {
    fn default() -> Self {
        Self { share: 0.01, pause: Duration::from_secs(10) }
    }
}

const MAX_PAUSE: Duration = Duration::from_secs(320);
/// Time of a CPU that may be taken beyond the budget: two seconds of twice the budget of 1 %.
const DEBT: Duration = Duration::from_millis(20);
/// What is tried has to stay below this part of the budget, or it would not last.
const MARGIN: f64 = 0.5;
/// Timing is tried for at least as long.
pub(crate) const TRIAL: Duration = Duration::from_millis(100);

/// What the observer is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Go on.
    Stay,
    /// Stop timing: events are told from samples from here on.
    Sample,
    /// Time events beside sampling them, to see what it takes.
    Try,
    /// Timing goes on, and reports rest on it from here on.
    Time,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Timing { since: Instant },
    Sampling { until: Instant },
    Trying { since: Instant },
}

#[derive(Debug)]
pub(crate) struct Choice {
    budget: Budget,
    state: State,
    /// Beyond the budget, ns of the CPU where timing takes most.
    debt_ns: f64,
    /// The next one.
    pause: Duration,
    changes: u64,
}

impl Choice {
    /// Events are timed.
    pub fn new(budget: Budget, now: Instant) -> Self {
        Self { budget, state: State::Timing { since: now }, debt_ns: 0.0, pause: budget.pause, changes: 0 }
    }

    pub fn budget(&self) -> Budget {
        self.budget
    }

    /// What counts from here on. A pause that runs ends when it would have.
    pub fn set_budget(&mut self, budget: Budget) {
        self.budget = budget;
        self.pause = budget.pause;
        self.debt_ns = 0.0;
    }

    /// How often reports went from one mode to the other.
    pub fn changes(&self) -> u64 {
        self.changes
    }

    /// How long until timing is tried again; `None` while events are timed.
    pub fn left(&self, now: Instant) -> Option<Duration> {
        match self.state {
            State::Timing { .. } => None,
            State::Sampling { until } => Some(until.saturating_duration_since(now)),
            State::Trying { .. } => Some(Duration::ZERO),
        }
    }

    /// At any time. `share`: of a CPU, what timing has taken since the trial began.
    pub fn poll(&mut self, now: Instant, share: f64) -> Step {
        match self.state {
            State::Sampling { until } if now >= until => Step::Try,
            State::Trying { since } if now - since >= TRIAL && share > self.budget.share * MARGIN => {
                self.sample(now);
                Step::Sample
            }
            _ => Step::Stay,
        }
    }

    /// At the end of a report's period, after [`poll`](Self::poll). `share`: of a CPU, what timing took in it.
    pub fn report(&mut self, now: Instant, period: Duration, share: f64) -> Step {
        match self.state {
            State::Sampling { .. } => Step::Stay,
            State::Trying { since } if now - since < TRIAL => Step::Stay,
            State::Trying { .. } => {
                self.state = State::Timing { since: now };
                self.debt_ns = 0.0;
                self.changes += 1;
                Step::Time
            }
            State::Timing { since } => {
                let excess = (share - self.budget.share) * period.as_nanos() as f64;
                self.debt_ns = (self.debt_ns + excess).max(0.0);
                if self.debt_ns <= DEBT.as_nanos() as f64 {
                    return Step::Stay;
                }
                // It has held for longer than the pause that would come: no flapping.
                if now - since >= self.pause {
                    self.pause = self.budget.pause;
                }
                self.changes += 1;
                self.sample(now);
                Step::Sample
            }
        }
    }

    /// The answer to [`Step::Try`]: whether events are timed now, too.
    pub fn tried(&mut self, now: Instant, done: bool) {
        match done {
            true => self.state = State::Trying { since: now },
            false => self.sample(now),
        }
    }

    fn sample(&mut self, now: Instant) {
        self.state = State::Sampling { until: now + self.pause };
        self.pause = (self.pause * 2).min(MAX_PAUSE.max(self.budget.pause));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);
    const BUDGET: Budget = Budget { share: 0.01, pause: Duration::from_secs(10) };

    /// A clock that moves on by a second with each report.
    struct Clock(Instant);

    impl Clock {
        fn report(&mut self, choice: &mut Choice, share: f64) -> Step {
            self.0 += S;
            choice.report(self.0, S, share)
        }
    }

    fn begin() -> (Choice, Clock) {
        let now = Instant::now();
        (Choice::new(BUDGET, now), Clock(now))
    }

    /// Until timing has been given up for the first time.
    fn sampling() -> (Choice, Clock) {
        let (mut choice, mut clock) = begin();
        assert_eq!(clock.report(&mut choice, 0.2), Step::Sample);
        (choice, clock)
    }

    #[test]
    fn within_the_budget_nothing_changes() {
        let (mut choice, mut clock) = begin();
        for _ in 0..1000 {
            assert_eq!(clock.report(&mut choice, 0.01), Step::Stay);
            assert_eq!(choice.poll(clock.0, 0.0), Step::Stay);
        }
        assert_eq!((choice.changes(), choice.left(clock.0)), (0, None));
    }

    #[test]
    fn the_more_the_sooner() {
        for (share, reports) in [(0.2, 1), (0.025, 2), (0.02, 3), (0.012, 11)] {
            let (mut choice, mut clock) = begin();
            let steps = (1..).find(|_| clock.report(&mut choice, share) == Step::Sample);
            assert_eq!(steps, Some(reports), "{share}");
        }
    }

    /// What is saved before is not to be spent later, but what was too much is forgiven slowly.
    #[test]
    fn quiet_reports_pay_back() {
        let (mut choice, mut clock) = begin();
        for _ in 0..100 {
            assert_eq!(clock.report(&mut choice, 0.025), Step::Stay);
            assert_eq!(clock.report(&mut choice, 0.0), Step::Stay);
            assert_eq!(clock.report(&mut choice, 0.0), Step::Stay);
        }
        clock.report(&mut choice, 0.025);
        assert_eq!(clock.report(&mut choice, 0.025), Step::Sample);
    }

    #[test]
    fn a_trial_that_is_cheap_lasts() {
        let (mut choice, mut clock) = sampling();
        assert_eq!(choice.left(clock.0), Some(BUDGET.pause));
        assert_eq!(choice.poll(clock.0 + 9 * S, 0.0), Step::Stay);
        assert_eq!(clock.report(&mut choice, 0.0), Step::Stay);
        clock.0 += 9 * S;
        assert_eq!(choice.poll(clock.0, 0.0), Step::Try);
        choice.tried(clock.0, true);
        // Too short to tell, either way.
        assert_eq!(choice.poll(clock.0 + TRIAL / 2, 0.5), Step::Stay);
        assert_eq!(choice.report(clock.0 + TRIAL / 2, S, 0.0), Step::Stay);
        assert_eq!(choice.poll(clock.0 + TRIAL, 0.005), Step::Stay);
        assert_eq!(choice.report(clock.0 + TRIAL, S, 0.005), Step::Time);
        assert_eq!((choice.changes(), choice.left(clock.0)), (2, None));
    }

    #[test]
    fn each_trial_that_is_dear_waits_for_longer() {
        let (mut choice, mut clock) = sampling();
        let mut waits = Vec::new();
        for _ in 0..8 {
            let wait = choice.left(clock.0).expect("it samples");
            waits.push(wait.as_secs());
            clock.0 += wait;
            assert_eq!(choice.poll(clock.0, 0.0), Step::Try);
            choice.tried(clock.0, true);
            clock.0 += TRIAL;
            assert_eq!(choice.poll(clock.0, 0.006), Step::Sample);
        }
        assert_eq!(waits, [10, 20, 40, 80, 160, 320, 320, 320]);
        assert_eq!(choice.changes(), 1, "trials are not seen in reports");
    }

    #[test]
    fn a_new_budget_counts_from_the_next_trial() {
        let (mut choice, mut clock) = sampling();
        choice.set_budget(Budget { share: 0.5, pause: S });
        assert_eq!(choice.left(clock.0), Some(BUDGET.pause));
        clock.0 += BUDGET.pause;
        assert_eq!(choice.poll(clock.0, 0.0), Step::Try);
        choice.tried(clock.0, true);
        clock.0 += TRIAL;
        assert_eq!(choice.poll(clock.0, 0.2), Step::Stay);
        assert_eq!(choice.report(clock.0, S, 0.2), Step::Time);
        choice.set_budget(BUDGET);
        assert_eq!(clock.report(&mut choice, 0.2), Step::Sample);
        assert_eq!(choice.left(clock.0), Some(BUDGET.pause));
    }

    #[test]
    fn what_cannot_be_tried_waits_likewise() {
        let (mut choice, mut clock) = sampling();
        clock.0 += BUDGET.pause;
        assert_eq!(choice.poll(clock.0, 0.0), Step::Try);
        choice.tried(clock.0, false);
        assert_eq!(choice.left(clock.0), Some(2 * BUDGET.pause));
    }

    /// What flaps does so ever more slowly; what held for long begins anew.
    #[test]
    fn pauses_are_short_again_after_a_long_time() {
        let (mut choice, mut clock) = sampling();
        let again = |choice: &mut Choice, clock: &mut Clock, timed: u32| {
            clock.0 += choice.left(clock.0).expect("it samples");
            assert_eq!(choice.poll(clock.0, 0.0), Step::Try);
            choice.tried(clock.0, true);
            clock.0 += TRIAL;
            assert_eq!(choice.report(clock.0, S, 0.0), Step::Time);
            (1..timed).for_each(|_| assert_eq!(clock.report(choice, 0.0), Step::Stay));
            assert_eq!(clock.report(choice, 0.2), Step::Sample);
            choice.left(clock.0).map(|left| left.as_secs())
        };
        assert_eq!(again(&mut choice, &mut clock, 5), Some(20));
        assert_eq!(again(&mut choice, &mut clock, 5), Some(40));
        assert_eq!(again(&mut choice, &mut clock, 81), Some(10));
    }
}
