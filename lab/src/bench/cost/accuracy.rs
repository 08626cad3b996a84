//! Compares the figures of the observer (`millrace cost`) with `/proc/stat` and with a `perf` profile of the same
//! period.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Context;
use millrace_cost::report::{self, Event, ProcStat, Report, ReportMethod};
use millrace_cost::{Config, Observer};
use serde::Serialize;

use super::network::{LOAD, NetworkScenario, NetworkTraffic};
use super::period::{MeasuredPeriod, percent};
use super::profile;
use crate::stats::Spread;

/// Errors of the observer's times: medians over all rounds. A value of type [`Spread`] also has its lowest and highest
/// over the rounds.
#[derive(Debug, Serialize)]
pub struct AccuracyFigures {
    rounds: usize,
    pub cpus: Vec<CpuError>,
    /// Errors of the times of network stack layers (such as TCP) in each kernel context (such as NET_RX), largest
    /// first.
    pub parts: Vec<PartError>,
    lost_samples: u64,
}

/// Times on one CPU by each measuring method, percent of the CPU's time. Events are kernel contexts that the observer
/// accounts, such as the NET_RX softirq.
#[derive(Debug, Serialize)]
pub struct CpuError {
    cpu: u32,
    /// Time of all events (kernel contexts such as NET_RX) by the observer, without the observer's own time in them
    /// (`observer_in_events_pct`).
    events_pct: f64,
    observer_in_events_pct: f64,
    /// Time of all events (kernel contexts such as NET_RX) by the `perf` profile.
    profile_events_pct: f64,
    /// Time of the observer's own BPF programs and of the kernel code that calls them, by the `perf` profile.
    observer_pct: f64,
    /// Remaining kernel time, neither in the contexts that the observer accounts nor in the observer itself, by the
    /// `perf` profile.
    rest_pct: f64,
    /// Time in user mode, by the `perf` profile.
    user_pct: f64,
    /// Busy time by the `perf` profile's number of samples, which is too low if the profiler missed samples. The
    /// profile's other times in this structure are therefore shares of `clock_busy_pct`.
    profile_busy_pct: f64,
    /// Time outside of the idle task, by a clock that is read at task switches.
    clock_busy_pct: f64,
    /// Error of the kernel's total time: `events_pct` plus `observer_pct` plus `rest_pct`, minus the non-user part of
    /// `clock_busy_pct`.
    clock_error_pct: Spread,
    /// Time that `/proc/stat` does not count as idle. Tickless kernels measure idle time with a clock.
    busy_pct: f64,
    /// Busy time that is missing in all columns of `/proc/stat`: interrupts of the idle CPU, and time between ticks.
    uncounted_pct: f64,
    /// Time that a hypervisor gave to other virtual machines. `/proc/stat` excludes it from the other columns, but the
    /// observer's clock includes it.
    steal_pct: f64,
    procstat_user_pct: f64,
    /// Sum of the columns system, softirq and irq of `/proc/stat`.
    procstat_pct: f64,
    /// Error of the kernel's total time: `events_pct` plus `observer_pct` plus `rest_pct`, minus `procstat_pct` and the
    /// kernel's share of `steal_pct`.
    procstat_error_pct: Spread,
    /// Part of `procstat_error_pct` that `uncounted_pct` cannot explain. `/proc/stat` does not tell whether the
    /// uncounted time was kernel or idle time. The value is 0 if the measured kernel time is possible according to
    /// `/proc/stat`.
    procstat_outside_pct: Spread,
}

/// Error of the observer's time for one network stack layer (such as TCP) in one kernel context (such as NET_RX), in
/// percent of the CPU's time.
#[derive(Debug, Serialize)]
pub struct PartError {
    cpu: u32,
    pub event: Event,
    pub part: String,
    pub observer_pct: f64,
    pub profile_pct: f64,
    /// The observer's time minus the profile's time: median, lowest and highest of the rounds.
    error_points: Spread,
    /// Standard error of the median of `error_points`, as far as it results from the finite numbers of samples.
    pub sampling_error_points: f64,
}

impl PartError {
    pub fn points(&self) -> f64 {
        self.error_points.median.abs()
    }
}

impl AccuracyFigures {
    pub fn from_rounds(rounds: &[AccuracyRound]) -> Self {
        let cpus: BTreeSet<u32> = rounds.iter().flat_map(|round| round.cpus.keys().copied()).collect();
        let names: BTreeSet<&PartName> = rounds.iter().flat_map(|round| round.parts.keys()).collect();
        let mut parts: Vec<PartError> =
            names.into_iter().filter_map(|name| PartError::from_rounds_of_part(name, rounds)).collect();
        parts.sort_by(|a, b| b.points().total_cmp(&a.points()));
        Self {
            rounds: rounds.len(),
            cpus: cpus.into_iter().filter_map(|cpu| CpuError::from_rounds_of_cpu(cpu, rounds)).collect(),
            parts,
            lost_samples: rounds.iter().map(|round| round.lost_samples).sum(),
        }
    }

    /// Returns the largest error of the kernel's time against `/proc/stat`: that of the CPU with the largest median
    /// error.
    pub fn procstat_error_pct(&self) -> Option<Spread> {
        worst(self.cpus.iter().map(|cpu| cpu.procstat_error_pct))
    }

    /// Returns the largest error against `/proc/stat` that its uncounted time cannot explain: that of the CPU with the
    /// largest median of these errors.
    pub fn procstat_outside_pct(&self) -> Option<Spread> {
        worst(self.cpus.iter().map(|cpu| cpu.procstat_outside_pct))
    }

    /// Returns the largest error of the kernel's time against a clock: that of the CPU with the largest median error.
    pub fn clock_error_pct(&self) -> Option<Spread> {
        worst(self.cpus.iter().map(|cpu| cpu.clock_error_pct))
    }
}

fn worst(errors: impl Iterator<Item = Spread>) -> Option<Spread> {
    errors.max_by(|a, b| a.median.abs().total_cmp(&b.median.abs()))
}

/// Times that the observer, `/proc/stat`, a clock and a `perf` profile measured in one round, in percent of a CPU's
/// time.
#[derive(Debug)]
pub struct AccuracyRound {
    cpus: BTreeMap<u32, AccuracyCpuTimes>,
    parts: BTreeMap<PartName, PartTimes>,
    lost_samples: u64,
}

type PartName = (u32, Event, String);

#[derive(Debug, Default, Clone, Copy)]
struct AccuracyCpuTimes {
    events: f64,
    observer_in_events: f64,
    profile_events: f64,
    observer: f64,
    rest: f64,
    user: f64,
    profile_busy: f64,
    clock_busy: f64,
    stat: ProcStatTimes,
}

/// Times of `/proc/stat`, in percent of a CPU's time.
#[derive(Debug, Default, Clone, Copy, PartialEq)]
pub struct ProcStatTimes {
    kernel: f64,
    user: f64,
    steal: f64,
    idle: f64,
}

#[derive(Debug, Default, Clone, Copy)]
struct PartTimes {
    observer: f64,
    profile: f64,
    /// Variance of the difference between observer and profile that results from the finite numbers of samples.
    variance: f64,
}

impl AccuracyCpuTimes {
    /// Returns the kernel's time: networking contexts and the observer itself as the observer measured them, and all
    /// other kernel time by the `perf` profile.
    fn kernel(self) -> f64 {
        self.events + self.observer + self.rest
    }

    fn clock_error(self) -> f64 {
        self.kernel() - (self.clock_busy - self.user)
    }

    fn procstat_error(self) -> f64 {
        self.kernel() - self.stat.kernel_with_steal()
    }

    fn procstat_outside(self) -> f64 {
        let error = self.procstat_error();
        let uncounted = self.stat.uncounted();
        error - error.clamp(uncounted.min(0.0), uncounted.max(0.0))
    }
}

impl AccuracyRound {
    /// Combines the observer's report and the profile. `clock_busy` returns the busy percentage of a CPU, by its
    /// number.
    fn new(
        report: &Report,
        profile: &BTreeMap<u32, profile::CpuSamples>,
        clock_busy: impl Fn(u32) -> f64,
    ) -> anyhow::Result<Self> {
        let mut cpus = BTreeMap::new();
        let mut parts = BTreeMap::new();
        for cpu in &report.cpus {
            let it = profile.get(&cpu.cpu).with_context(|| format!("no profile of CPU {}", cpu.cpu))?;
            let clock_busy = clock_busy(cpu.cpu);
            let sampled = |samples: u64| samples as f64 * clock_busy / it.busy().max(1) as f64;
            let times = AccuracyCpuTimes {
                events: cpu.events.iter().map(|of| of.share).sum::<f64>() * 100.0,
                observer_in_events: cpu.observer_share * 100.0,
                profile_events: sampled(it.events()),
                observer: sampled(it.observer),
                rest: sampled(it.rest),
                user: sampled(it.user),
                profile_busy: it.percent(it.busy(), report.period_ns),
                clock_busy,
                stat: ProcStatTimes::new(&cpu.procstat, report.period_ns),
            };
            cpus.insert(cpu.cpu, times);
            add_parts(&mut parts, cpu, it, report.period_ns, sampled);
        }
        Ok(Self { cpus, parts, lost_samples: report.lost.samples })
    }
}

fn add_parts(
    parts: &mut BTreeMap<PartName, PartTimes>,
    cpu: &report::CpuCost,
    profile: &profile::CpuSamples,
    period_ns: u64,
    sampled: impl Fn(u64) -> f64,
) {
    for event in &cpu.events {
        let total = percent(event.ns, period_ns);
        for part in &event.parts {
            let times = parts.entry((cpu.cpu, event.event, part.name.clone())).or_default();
            times.observer = percent(part.ns, period_ns);
            let share = part.samples as f64 / event.samples.max(1) as f64;
            times.variance += total * total * share * (1.0 - share) / event.samples.max(1) as f64;
        }
    }
    for ((event, part), samples) in &profile.parts {
        let times = parts.entry((cpu.cpu, *event, part.clone())).or_default();
        times.profile = sampled(*samples);
        times.variance += times.profile * (100.0 - times.profile).max(0.0) / profile.due(period_ns);
    }
}

impl ProcStatTimes {
    pub fn new(stat: &ProcStat, period_ns: u64) -> Self {
        Self {
            kernel: percent(stat.system_ns + stat.softirq_ns + stat.irq_ns, period_ns),
            user: percent(stat.user_ns, period_ns),
            steal: percent(stat.steal_ns, period_ns),
            idle: percent(stat.idle_ns, period_ns),
        }
    }

    pub fn busy(self) -> f64 {
        100.0 - self.idle
    }

    /// Returns the busy time that `/proc/stat` has in its columns.
    pub fn counted(self) -> f64 {
        self.kernel + self.user + self.steal
    }

    /// Returns the kernel's time with a share of the stolen time. A hypervisor takes time from kernel and user mode in
    /// proportion to their use.
    fn kernel_with_steal(self) -> f64 {
        let ticks = self.kernel + self.user;
        if ticks > 0.0 { self.kernel * self.counted() / ticks } else { self.steal }
    }

    fn uncounted(self) -> f64 {
        self.busy() - self.counted()
    }
}

impl CpuError {
    fn from_rounds_of_cpu(cpu: u32, rounds: &[AccuracyRound]) -> Option<Self> {
        let all = |value: &dyn Fn(&AccuracyCpuTimes) -> f64| -> Option<Spread> {
            let values: Vec<f64> =
                rounds.iter().filter_map(|round| round.cpus.get(&cpu)).map(value).collect();
            Spread::from_values(&values)
        };
        let median = |value: &dyn Fn(&AccuracyCpuTimes) -> f64| all(value).map(|spread| spread.median);
        Some(Self {
            cpu,
            events_pct: median(&|it| it.events)?,
            observer_in_events_pct: median(&|it| it.observer_in_events)?,
            profile_events_pct: median(&|it| it.profile_events)?,
            observer_pct: median(&|it| it.observer)?,
            rest_pct: median(&|it| it.rest)?,
            user_pct: median(&|it| it.user)?,
            profile_busy_pct: median(&|it| it.profile_busy)?,
            clock_busy_pct: median(&|it| it.clock_busy)?,
            clock_error_pct: all(&|it| it.clock_error())?,
            busy_pct: median(&|it| it.stat.busy())?,
            uncounted_pct: median(&|it| it.stat.uncounted())?,
            steal_pct: median(&|it| it.stat.steal)?,
            procstat_user_pct: median(&|it| it.stat.user)?,
            procstat_pct: median(&|it| it.stat.kernel)?,
            procstat_error_pct: all(&|it| it.procstat_error())?,
            procstat_outside_pct: all(&|it| it.procstat_outside())?,
        })
    }
}

impl PartError {
    fn from_rounds_of_part(name: &PartName, rounds: &[AccuracyRound]) -> Option<Self> {
        let times: Vec<PartTimes> =
            rounds.iter().map(|round| round.parts.get(name).copied().unwrap_or_default()).collect();
        let all =
            |value: fn(&PartTimes) -> f64| Spread::from_values(&times.iter().map(value).collect::<Vec<_>>());
        let (cpu, event, part) = name.clone();
        Some(Self {
            cpu,
            event,
            part,
            observer_pct: all(|it| it.observer)?.median,
            profile_pct: all(|it| it.profile)?.median,
            error_points: all(|it| it.observer - it.profile)?,
            sampling_error_points: error_of_median(&times),
        })
    }
}

/// Returns the standard error of the median over the rounds. For more than two normal values, a median's variance is pi
/// / 2 times that of the mean.
fn error_of_median(times: &[PartTimes]) -> f64 {
    let rounds = times.len().max(1) as f64;
    let variance = times.iter().map(|it| it.variance).sum::<f64>() / rounds;
    let of_median = if times.len() > 2 { std::f64::consts::FRAC_PI_2 } else { 1.0 };
    (variance * of_median / rounds).sqrt()
}

pub fn measure(scenario: NetworkScenario, sample_hz: u32, length: Duration) -> anyhow::Result<AccuracyRound> {
    let traffic = NetworkTraffic::start(scenario)?;
    let mut observer = Observer::start(Config { frequency_hz: sample_hz, ..Config::new()? })?;
    let (period, recording) = MeasuredPeriod::measure(&mut observer, length, || ())?;
    // perf resolves the names of the observer's BPF programs when it ends, so the observer must still run. If the
    // observer times calls from the entry of the system call on, the profile must count them from that entry as well.
    let socket_files = (period.report.method == Some(ReportMethod::SystemCalls)).then_some(LOAD);
    let profile = recording.finish(period.start_ns, period.end_ns, socket_files);
    drop(observer);
    drop(traffic);
    AccuracyRound::new(&period.report, &profile?, |cpu| period.busy_pct(cpu))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Percentages of `/proc/stat`: 60 kernel, 20 user, 10 idle. The remaining 10 % of the time are in no column.
    const STAT: ProcStatTimes = ProcStatTimes { kernel: 60.0, user: 20.0, steal: 0.0, idle: 10.0 };

    fn round(events: f64, part: (f64, f64)) -> AccuracyRound {
        let times = AccuracyCpuTimes {
            events,
            observer_in_events: 3.0,
            profile_events: 50.0,
            observer: 4.0,
            rest: 1.0,
            user: 26.0,
            profile_busy: 80.0,
            clock_busy: 90.0,
            stat: STAT,
        };
        let part = PartTimes { observer: part.0, profile: part.1, variance: 0.04 };
        AccuracyRound {
            cpus: BTreeMap::from([(0, times)]),
            parts: BTreeMap::from([((0, Event::Send, "TCP".to_owned()), part)]),
            lost_samples: 1,
        }
    }

    #[test]
    fn busy_time_includes_time_in_no_procstat_column() {
        assert_eq!((STAT.busy(), STAT.counted(), STAT.uncounted()), (90.0, 80.0, 10.0));
    }

    #[test]
    fn steal_time_is_split_between_kernel_and_user_mode_by_cpu_time() {
        assert_eq!(STAT.kernel_with_steal(), 60.0);
        let stolen = ProcStatTimes { steal: 8.0, ..STAT };
        assert_eq!((stolen.counted(), stolen.kernel_with_steal()), (88.0, 66.0));
        assert_eq!(ProcStatTimes { kernel: 0.0, user: 0.0, ..stolen }.kernel_with_steal(), 8.0);
    }

    #[test]
    fn rounds_are_combined_into_medians_with_extremes() {
        let figures = AccuracyFigures::from_rounds(&[
            round(57.0, (30.0, 29.0)),
            round(58.0, (30.0, 32.0)),
            round(63.0, (30.0, 30.5)),
        ]);
        let spread = |median, min, max| Spread { median, min, max };
        assert_eq!(figures.procstat_error_pct(), Some(spread(3.0, 2.0, 8.0)));
        assert_eq!(figures.clock_error_pct(), Some(spread(-1.0, -2.0, 4.0)));
        // The 10 % of the time that all columns of `/proc/stat` lack explain the error.
        assert_eq!(figures.procstat_outside_pct(), Some(spread(0.0, 0.0, 0.0)));
        let [part] = &figures.parts[..] else { panic!("{figures:?}") };
        assert_eq!((part.error_points, part.points()), (spread(-0.5, -2.0, 1.0), 0.5));
        let expected = (0.04 * std::f64::consts::FRAC_PI_2 / 3.0).sqrt();
        assert!((part.sampling_error_points - expected).abs() < 1e-9, "{part:?}");
        assert_eq!((figures.rounds, figures.lost_samples), (3, 3));
    }

    #[test]
    fn procstat_error_of_the_worst_cpu_keeps_its_sign() {
        let mut low = round(40.0, (0.0, 0.0));
        let high =
            low.cpus.get(&0).copied().map(|cpu| AccuracyCpuTimes { events: 57.0, ..cpu }).expect("a CPU");
        low.cpus.insert(1, high);
        let worst = AccuracyFigures::from_rounds(&[low]).procstat_error_pct().expect("two CPUs");
        assert_eq!(worst.median, -15.0);
        let [no_more, too_much] = [40.0, 70.5].map(|events| {
            AccuracyFigures::from_rounds(&[round(events, (0.0, 0.0))])
                .procstat_outside_pct()
                .expect("a CPU")
                .median
        });
        assert_eq!((no_more, too_much), (-15.0, 5.5));
    }

    /// A layer of the network stack (such as TCP) that either the observer or the profile missed in one round counts
    /// with the time 0 there.
    #[test]
    fn network_layer_missed_by_observer_or_profile_counts_as_zero_time() {
        let mut other = round(57.0, (30.0, 30.0));
        other
            .parts
            .insert((0, Event::NetRx, "UDP".to_owned()), PartTimes { profile: 3.0, ..PartTimes::default() });
        let figures = AccuracyFigures::from_rounds(&[other, round(57.0, (30.0, 30.0))]);
        assert_eq!((figures.parts[0].part.as_str(), figures.parts[0].points()), ("UDP", 1.5));
    }
}
