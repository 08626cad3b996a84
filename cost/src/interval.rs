//! Computes confidence intervals of figures that rest on samples.

use std::collections::BTreeMap;

use crate::report::{Event, EventCost, EventPart, FunctionCost, Interval, Report, TaskCost};
use crate::share::rounded;

/// Quantile of the standard normal distribution for a two-sided interval of 95 %.
const Z: f64 = 1.959_964;

/// The least number of samples for a useful figure. Fewer samples only show that the figure is not 0.
pub const FEW: u64 = 4;

/// A share with its confidence interval, or a sum of such shares with independent errors.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct SampledFigure {
    /// The figure, as a share of one CPU.
    pub share: f64,
    /// Number of samples that the figure rests on.
    pub samples: u64,
    /// Squared distances from the figure to the lower and the upper end of its interval; `None` if the figure is exact.
    errors: Option<[f64; 2]>,
}

impl SampledFigure {
    /// Creates a figure from a report's share, samples and interval. Without an interval, the figure is exact.
    pub fn new(share: f64, samples: u64, interval: Option<Interval>) -> Self {
        Self {
            share,
            samples,
            errors: interval.map(|[low, high]| [share - low, high - share].map(|by| by * by)),
        }
    }

    /// Returns the sum of two figures. Independent errors add up as squares.
    #[must_use]
    pub fn and(self, more: Self) -> Self {
        let errors = match (self.errors, more.errors) {
            (Some([a, b]), Some([c, d])) => Some([a + c, b + d]),
            (one, other) => one.or(other),
        };
        Self { share: self.share + more.share, samples: self.samples + more.samples, errors }
    }

    /// Returns the interval; `None` if the figure is exact.
    pub fn interval(&self) -> Option<Interval> {
        let [below, above] = self.errors?.map(f64::sqrt);
        Some([rounded((self.share - below).max(0.0)), rounded(self.share + above)])
    }

    /// Returns the larger distance from the figure to an end of its interval; `None` if the figure is exact.
    pub fn error(&self) -> Option<f64> {
        self.errors.map(|[below, above]| below.max(above).sqrt())
    }

    /// Reports whether the figure rests on fewer than [`FEW`] samples and its error is at least a third of it.
    pub fn is_poor(&self) -> bool {
        self.share > 0.0 && self.samples < FEW && self.error().is_some_and(|error| error * 3.0 >= self.share)
    }
}

/// Returns Wilson's score interval for the true share, if `samples` of `all` independent samples were taken in it.
/// E. B. Wilson, Probable Inference, the Law of Succession, and Statistical Inference, 1927.
fn wilson(samples: u64, all: u64) -> Interval {
    let n = all.max(samples).max(1) as f64;
    let share = samples as f64 / n;
    let square = Z * Z / n;
    let middle = (share + square / 2.0) / (1.0 + square);
    let half = Z / (1.0 + square) * (share * (1.0 - share) / n + square / (4.0 * n)).sqrt();
    [(middle - half).max(0.0), (middle + half).min(1.0)]
}

/// Returns the interval of a figure that is proportional to `samples` of `all`, or `None` if it rests on no samples.
fn around(share: f64, samples: u64, all: u64) -> Option<Interval> {
    let [low, high] = wilson(samples, all);
    match (samples, all) {
        (_, 0) => None,
        (0, _) => (share == 0.0).then(|| [0.0, rounded(high)]),
        _ => {
            let each = share * all.max(samples) as f64 / samples as f64;
            Some([low, high].map(|of| rounded(of * each)))
        }
    }
}

/// Returns the interval of a kernel event's share of CPU time, for an event (such as a softirq) that BPF programs time.
/// The measured time is exact, but includes the observer's own. How much of it is the observer's is estimated from
/// samples, so only this part has an error.
fn timed(ns: u64, observer_ns: u64, samples: u64, period_ns: u64) -> Option<Interval> {
    let all_ns = (ns + observer_ns) as f64;
    // Number of samples in which the event or the observer ran, estimated from their times. If no sample was taken in
    // the event itself, at least one was taken in the observer.
    let all = match samples {
        0 if ns > 0 => return None,
        0 => 1,
        _ => (samples as f64 * all_ns / ns.max(1) as f64).round() as u64,
    };
    (observer_ns > 0).then(|| wilson(samples, all).map(|of| rounded(of * all_ns / period_ns.max(1) as f64)))
}

/// A figure split by its source: programs that timed it, and samples that each add one sampling interval. The errors of
/// both parts are independent. Samples of several figures are added up before an interval is computed from them, since
/// all were drawn together.
#[derive(Debug, Clone, Copy, Default)]
struct FigureSplit {
    timed: SampledFigure,
    /// The share that rests on samples, and the number of these samples. `None` if the whole figure was timed.
    sampled: Option<(f64, u64)>,
}

impl FigureSplit {
    /// Splits the CPU time of a kernel event, such as a softirq, into timed and sampled time. `each` is the share of
    /// one CPU that one sample stands for.
    fn from_event(cost: &EventCost, each: f64, period_ns: u64) -> Self {
        // Reports in older logs have no field `sampled`. If they have no number of calls, the time rests on samples.
        if cost.calls.is_none() && (cost.sampled == cost.samples || cost.sampled == 0) {
            return Self { timed: SampledFigure::default(), sampled: Some((cost.share, cost.samples)) };
        }
        let samples = cost.samples.saturating_sub(cost.sampled);
        let sampled = (cost.sampled as f64 * each).min(cost.share);
        let ns = cost.ns.saturating_sub((sampled * period_ns as f64).round() as u64);
        let interval = timed(ns, cost.observer_ns, samples, period_ns);
        Self {
            timed: SampledFigure::new(cost.share - sampled, samples, interval),
            sampled: (cost.sampled > 0).then_some((sampled, cost.sampled)),
        }
    }

    /// Splits the networking time of a process or cgroup into timed and sampled time. `each` is the share of one CPU
    /// that one sample stands for. With `sampled`, all times of the report were estimated from samples, so
    /// even a share without any sample has an interval.
    fn from_task(share: f64, samples: u64, each: f64, sampled: bool) -> Self {
        let by_samples = (samples as f64 * each).min(share);
        Self {
            timed: SampledFigure::new(share - by_samples, 0, None),
            sampled: (sampled || samples > 0).then_some((by_samples, samples)),
        }
    }

    fn and(self, more: Self) -> Self {
        let sampled = match (self.sampled, more.sampled) {
            (Some((a, b)), Some((c, d))) => Some((a + c, b + d)),
            (one, other) => one.or(other),
        };
        Self { timed: self.timed.and(more.timed), sampled }
    }

    /// Returns the interval of the whole figure. `all` is the number of samples in the period, of all kinds of work.
    fn interval(&self, all: u64) -> Option<Interval> {
        let Some((share, samples)) = self.sampled else { return self.timed.interval() };
        self.timed.and(SampledFigure::new(share, samples, around(share, samples, all))).interval()
    }

    /// Returns the number of samples to which the samples of one part of the network stack, such as UDP, are compared.
    /// If the kernel event is timed, it is the event's own number of samples. If the event is only sampled, it is
    /// `all`. If part of the event's time was sampled, the number is in between.
    fn base(&self, all: u64) -> u64 {
        match self.sampled {
            Some((_, sampled)) => {
                let own = self.timed.samples + sampled;
                own + (all.saturating_sub(own) as f64 * sampled as f64 / own.max(1) as f64) as u64
            }
            None => self.timed.samples,
        }
    }
}

/// Sets the 95 % confidence interval of every figure of a report that rests on samples.
pub(crate) fn fill(report: &mut Report) {
    let period_ns = report.period_ns;
    let sampled = report.sampled_ns > 0;
    let each = report.sample_ns() as f64 / period_ns.max(1) as f64;
    let all: u64 = report.cpus.iter().map(|cpu| cpu.samples).sum();
    let mut of_events: BTreeMap<Event, FigureSplit> = BTreeMap::new();
    for cpu in &mut report.cpus {
        let mut networking = FigureSplit::default();
        for cost in &mut cpu.events {
            let split = FigureSplit::from_event(cost, each, period_ns);
            cost.interval = split.interval(cpu.samples);
            parts(&mut cost.parts, split.base(cpu.samples));
            if cost.event.is_networking() {
                networking = networking.and(split);
            }
            let sum = of_events.entry(cost.event).or_default();
            *sum = sum.and(split);
        }
        cpu.networking_interval = networking.interval(cpu.samples);
        cpu.observer_interval = around(cpu.observer_share, cpu.observer_samples, cpu.samples);
    }
    for other in &mut report.other {
        let base = of_events.get(&other.event).map_or(0, |split| split.base(all));
        functions(&mut other.functions, base, period_ns);
    }
    let task = |share, samples, sampled| FigureSplit::from_task(share, samples, each, sampled).interval(all);
    let figures = |cost: &mut TaskCost| {
        let times = cost.times().into_iter().zip(cost.figure_samples);
        for ((ns, samples), interval) in times.zip(&mut cost.figure_intervals) {
            *interval = task(ns as f64 / period_ns.max(1) as f64, samples, false);
        }
    };
    for process in &mut report.processes {
        process.interval = task(process.share, process.cost.samples, sampled);
        figures(&mut process.cost);
        if let Some(profile) = &mut process.profile {
            parts(&mut profile.parts, all);
            functions(&mut profile.functions, all, period_ns);
        }
    }
    for cgroup in &mut report.cgroups {
        cgroup.interval = task(cgroup.share, cgroup.cost.samples, sampled);
        figures(&mut cgroup.cost);
    }
}

fn parts(parts: &mut [EventPart], all: u64) {
    parts.iter_mut().for_each(|part| part.interval = around(part.share, part.samples, all));
}

fn functions(functions: &mut [FunctionCost], all: u64, period_ns: u64) {
    for function in functions {
        function.interval = around(function.ns as f64 / period_ns.max(1) as f64, function.samples, all);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    fn near(a: Interval, b: Interval) -> bool {
        a.iter().zip(b).all(|(a, b)| (a - b).abs() < 5e-4)
    }

    /// The expected figures are those of R's `prop.test(correct = FALSE)` and statsmodels'
    /// `proportion_confint(method="wilson")`.
    #[test]
    fn confidence_intervals_match_reference_implementations() {
        for (samples, all, want) in [
            (0, 10, [0.0, 0.2775]),
            (1, 1, [0.2065, 1.0]),
            (15, 148, [0.0624, 0.1605]),
            (50, 100, [0.4038, 0.5962]),
            (10, 10, [0.7225, 1.0]),
        ] {
            let of = wilson(samples, all);
            assert!(near(of, want), "{samples} of {all}: {of:?}");
        }
    }

    /// The interval that is computed from random samples contains the true share in 95 of 100 cases, for small shares
    /// and for large ones.
    #[test]
    fn confidence_interval_contains_the_true_share_in_95_percent() {
        let mut state = 1_u64;
        let mut draw = || {
            // The linear congruential generator of Knuth's MMIX.
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        for truth in [0.02, 0.2, 0.5, 0.9] {
            let rounds = 2000;
            let inside = (0..rounds).filter(|_| {
                let samples = (0..250).filter(|_| draw() < truth).count() as u64;
                let [low, high] = wilson(samples, 250);
                (low..=high).contains(&truth)
            });
            let share = inside.count() as f64 / f64::from(rounds);
            assert!((0.93..0.98).contains(&share), "{truth}: {share}");
        }
    }

    #[test]
    fn confidence_interval_of_timed_event_is_due_to_observer_samples_only() {
        let mut report = samples::report(0);
        report.cpus[1].events[0].observer_ns = 0;
        fill(&mut report);
        let [with, without] = &report.cpus[..] else { panic!("two CPUs") };
        // 250 samples were networking and 20 the observer's, together 0.27 of the CPU.
        let [low, high] = with.events[0].interval.expect("an interval");
        assert!(near([low / 0.27, high / 0.27], wilson(250, 270)), "{low} {high}");
        assert!(low < 0.25 && 0.25 < high && high < 0.27);
        assert_eq!(with.networking_interval, Some([low, high]));
        assert_eq!((without.events[0].interval, without.networking_interval), (None, None));
        let [low, high] = timed(0, with.events[0].observer_ns, 0, report.period_ns).expect("an interval");
        assert!(
            low == 0.0 && (0.01..0.02).contains(&high),
            "some of the 0.02 may have been networking: {high}"
        );
        // The event has 250 samples. The two parts of the network stack that it ran have 150 and 100 of them.
        let part = &without.events[0].parts[0];
        assert!(near(part.interval.expect("one"), wilson(150, 250).map(|of| of * 0.25)), "{part:?}");
        assert_eq!((report.processes[0].interval, report.cgroups[0].interval), (None, None));
    }

    #[test]
    fn sampled_figures_are_shares_of_all_samples() {
        let mut report = samples::report(0);
        report.sampled_ns = report.period_ns;
        for cost in report.cpus.iter_mut().flat_map(|cpu| &mut cpu.events) {
            (cost.calls, cost.sampled) = (None, cost.samples);
        }
        report.processes[0].cost.samples = 3;
        report.processes[0].share = 0.003;
        fill(&mut report);
        let event = &report.cpus[0].events[0];
        assert!(near(event.interval.expect("one"), wilson(250, 1000)), "{event:?}");
        assert_eq!(report.cpus[0].networking_interval, event.interval);
        assert!(near(event.parts[1].interval.expect("one"), wilson(100, 1000)), "{event:?}");
        let process = &report.processes[0];
        assert!(near(process.interval.expect("one"), wilson(3, 2000).map(|of| of * 2.0)), "{process:?}");
        assert!(SampledFigure::new(process.share, process.cost.samples, process.interval).is_poor());
        // If none of 1000 samples was taken in a kernel event, such as a softirq, its true share may still exceed 0.
        assert_eq!(around(0.0, 0, 1000), Some([0.0, rounded(wilson(0, 1000)[1])]));
        assert_eq!((around(0.1, 0, 1000), around(0.1, 0, 0)), (None, None), "exact");
    }

    /// If a report has both measured times and times estimated from samples, only the latter have confidence intervals.
    #[test]
    fn only_sampled_times_have_confidence_intervals_in_a_mixed_report() {
        let mut report = samples::report(0);
        let cpu = &mut report.cpus[0];
        cpu.events[0].observer_ns = 0;
        let of = |event, samples: u64| EventCost {
            event,
            ns: samples * 1_000_000,
            share: samples as f64 / 1e3,
            calls: None,
            observer_ns: 0,
            samples,
            sampled: samples,
            interval: None,
            parts: Vec::new(),
        };
        cpu.events.extend([
            of(Event::Timers, 40),
            of(Event::Poll, 10),
            of(Event::Devices, 0),
            of(Event::Local, 300),
        ]);
        cpu.networking_share = 0.3;
        // Five samples of this kernel event were taken outside of timed calls: they add 0.005 of a CPU to its share.
        report.cpus[1].events[0].observer_ns = 0;
        report.cpus[1].events[0].sampled = 5;
        report.processes[0].share = 0.253;
        report.processes[0].cost.samples = 3;
        fill(&mut report);
        let [one, two] = &report.cpus[..] else { panic!("two CPUs") };
        assert_eq!(one.events[0].interval, None, "exact");
        for (at, samples) in [(1, 40), (2, 10), (3, 0), (4, 300)] {
            let interval = one.events[at].interval.expect("one");
            assert!(near(interval, wilson(samples, 1000)), "{at}: {interval:?}");
        }
        // The networking share rests on the samples of timer softirqs and of poll calls: 40 + 10 = 50. Timed work and
        // AF_UNIX calls add no samples to it.
        let around_all = wilson(50, 1000).map(|of| of + 0.25);
        assert!(near(one.networking_interval.expect("one"), around_all), "{:?}", one.networking_interval);
        let around_few = wilson(5, 1000).map(|of| of + 0.245);
        assert!(near(two.events[0].interval.expect("one"), around_few), "{:?}", two.events[0].interval);
        assert_eq!(two.networking_interval, two.events[0].interval);
        let process = &report.processes[0];
        assert!(
            near(process.interval.expect("one"), wilson(3, 2000).map(|of| of * 2.0 + 0.25)),
            "{process:?}"
        );
        let estimate = SampledFigure::new(process.share, process.cost.samples, process.interval);
        assert!(!estimate.is_poor(), "most of it was timed");
    }

    /// Each time of a process that rests on samples has an interval of its own. Times that were measured are exact.
    #[test]
    fn sampled_times_of_processes_have_intervals() {
        let mut report = samples::report(0);
        let cost = |event, samples| {
            let mut cost = TaskCost::default();
            (0..samples).for_each(|_| cost.add(&TaskCost::from_sample(event, 1_000_000).expect("a time")));
            cost
        };
        let process = &mut report.processes[0].cost;
        for (event, samples) in
            [(Event::Receive, 20), (Event::Poll, 1), (Event::Devices, 2), (Event::Local, 50)]
        {
            process.add(&cost(event, samples));
        }
        process.receive_ns += 100_000_000;
        assert_eq!((process.samples, process.figure_samples), (23, [0, 20, 0, 3, 50]));
        assert_eq!(process.times(), [250_000_000, 120_000_000, 0, 3_000_000, 50_000_000]);
        assert_eq!(TaskCost::from_sample(Event::NetRx, 1), None);
        report.cgroups[0].cost = *process;
        fill(&mut report);
        for intervals in [report.processes[0].cost.figure_intervals, report.cgroups[0].cost.figure_intervals]
        {
            let [None, Some(receive), None, Some(other), Some(local)] = intervals else {
                panic!("{intervals:?}");
            };
            // The two CPUs have 2000 samples, each of which stands for a thousandth of one CPU.
            assert!(near(receive, wilson(20, 2000).map(|of| of * 2.0 + 0.1)), "{receive:?}");
            assert!(near(other, wilson(3, 2000).map(|of| of * 2.0)), "{other:?}");
            assert!(near(local, wilson(50, 2000).map(|of| of * 2.0)), "{local:?}");
        }
        let [one, _] = &report.cpus[..] else { panic!("two CPUs") };
        assert!(near(one.observer_interval.expect("one"), wilson(20, 1000)), "{:?}", one.observer_interval);
    }

    #[test]
    fn errors_of_summed_estimates_add_up_in_quadrature() {
        let one = SampledFigure::new(0.5, 10, Some([0.2, 0.9]));
        let sum = one.and(one).and(SampledFigure::new(0.25, 0, None));
        assert_eq!((sum.share, sum.samples), (1.25, 20));
        let root = 2.0_f64.sqrt();
        assert!(near(sum.interval().expect("one"), [1.25 - 0.3 * root, 1.25 + 0.4 * root]));
        assert!((sum.error().expect("one") - 0.4 * root).abs() < 1e-9 && !sum.is_poor());
        assert_eq!(SampledFigure::new(0.5, 0, None).and(SampledFigure::default()).interval(), None);
    }
}
