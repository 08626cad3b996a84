//! Checks the observer (`millrace cost`) in each context where the kernel runs networking. Its networking time is
//! compared with a count of networking stacks in a `perf` profile, and its total kernel time with a clock.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use millrace_cost::report::{Event, Report};
use millrace_cost::{Config, Observer};
use serde::Serialize;

use super::super::table::write_json;
use super::loads::{ALL, CostLoad};
use super::period::MeasuredPeriod;
use super::sums::{AIM_POINTS, KernelSum};

/// Result of one scenario. Times are percent of one CPU, summed over all CPUs.
#[derive(Debug, Serialize)]
struct ContextRow {
    scenario: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    figures: Option<ContextFigures>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Debug, Serialize)]
struct ContextFigures {
    observer_pct: f64,
    profile_pct: f64,
    /// Allowed difference between the networking times of observer and profile: 5 % of the profile's, or three standard
    /// errors of sampling. In scenarios without networking it is the largest networking time that the observer may
    /// report. That time is not 0. A stack at the beginning of a system call does not show the socket's address
    /// family, and so not whether the call is networking.
    allowed_points: f64,
    within: bool,
    /// Time of each kernel event (such as NET_RX) that occurred in this scenario, percent of one CPU.
    events: BTreeMap<&'static str, f64>,
    /// The network stack layers that took the most time: kernel context (such as NET_RX), layer (such as TCP), and
    /// percent of one CPU.
    parts: Vec<(&'static str, String, f64)>,
    /// The sum of all kernel time that the observer reports for a CPU, compared with a clock; one entry for each CPU.
    kernel_sums: Vec<KernelSum>,
    /// Kernel contexts (such as NET_RX) and network stack layers that the observer must report in this scenario, but
    /// did not.
    absent: Vec<String>,
}

const MOST_PARTS: usize = 12;
/// Largest allowed difference between the networking times of observer and profile, as a share of the profile's.
const TOLERANCE: f64 = 0.05;
/// Largest networking time that the observer may report for a scenario without networking, percent of one CPU.
const MOST_LOCAL_PCT: f64 = 1.0;

/// Selection of scenarios, and the way to measure them.
pub(super) struct ContextSettings<'a> {
    /// Parts of scenarios' names. Only scenarios with one of them are measured; all if empty.
    pub only: &'a [String],
    /// Length of the measurement of each scenario. Must not be 0.
    pub length: Duration,
    /// Samples per second of the observer.
    pub hz: u32,
    /// File for the results, as JSON.
    pub json: Option<&'a Path>,
}

/// Measures and prints the scenarios.
///
/// # Errors
/// Fails if no scenario can be measured. Also fails, after all scenarios were measured, if the figures of one are
/// wrong: they differ too much from `perf` or from the clock, or the observer did not report an expected name.
pub(super) fn run(settings: &ContextSettings<'_>) -> anyhow::Result<()> {
    let &ContextSettings { only, length, hz, json } = settings;
    ensure!(!length.is_zero(), "--scenarios needs --accuracy-seconds");
    let wanted =
        |load: &&CostLoad| only.is_empty() || only.iter().any(|only| load.name.contains(only.as_str()));
    let mut rows = Vec::new();
    let mut faults = Vec::new();
    for load in ALL.iter().filter(wanted) {
        let row = match measure(load, hz, length) {
            Ok(figures) => ContextRow { scenario: load.name, figures: Some(figures), error: None },
            Err(error) => {
                ContextRow { scenario: load.name, figures: None, error: Some(format!("{error:#}")) }
            }
        };
        println!("{}", row.line());
        let found = row.figures.as_ref().map(ContextFigures::faults).unwrap_or_default();
        faults.extend((!found.is_empty()).then(|| format!("{} ({})", load.name, found.join(", "))));
        rows.push(serde_json::to_value(&row)?);
        if let Some(path) = json {
            write_json(path, &rows)?;
        }
    }
    ensure!(!rows.is_empty(), "--only matches no scenario");
    ensure!(rows.iter().any(|row| row.get("error").is_none()), "nothing could be measured");
    ensure!(faults.is_empty(), "scenarios with wrong figures: {}", faults.join("; "));
    Ok(())
}

fn measure(load: &CostLoad, hz: u32, length: Duration) -> anyhow::Result<ContextFigures> {
    let running = load.start()?;
    let mut observer = Observer::start(Config { frequency_hz: hz, all: true, ..Config::new()? })?;
    let (period, recording) = MeasuredPeriod::measure(&mut observer, length, || ())?;
    running.check()?;
    let profile = recording.finish(period.start_ns, period.end_ns, None)?;
    drop(observer);
    drop(running);
    let mut profile_pct = 0.0;
    let mut variance = 0.0;
    let report = &period.report;
    let mut sums = Vec::new();
    for cpu in &report.cpus {
        let it = profile.get(&cpu.cpu).with_context(|| format!("no profile of CPU {}", cpu.cpu))?;
        let busy = period.busy_pct(cpu.cpu);
        sums.push(KernelSum::new(cpu, it, busy, hz, report.period_ns));
        // A sampling interrupt takes some 15 us on such a machine. Times of kernel contexts that the observer times
        // include these interrupts, and those of contexts that it only samples do not. So the profile's time for the
        // comparison is a mean of the times with and without interrupts, weighted by the share of sampled contexts.
        let events = || cpu.events.iter().filter(|of| of.event.is_networking());
        let sampled_ns = events().map(|of| of.sampled as f64 * 1e9 / f64::from(hz)).sum::<f64>();
        let all_ns = events().map(|of| of.ns as f64).sum::<f64>();
        let is_sampled = (sampled_ns / all_ns.max(1.0)).min(1.0);
        let by_clock = it.networking as f64 * busy / it.busy().max(1) as f64;
        let by_samples = it.percent(it.networking, report.period_ns);
        let share = is_sampled * by_samples + (1.0 - is_sampled) * by_clock;
        profile_pct += share;
        variance += share * (100.0 - share).max(0.0) / it.due(report.period_ns);
        let one = 1e11 / f64::from(hz) / report.period_ns as f64;
        let sampled: u64 = events().map(|of| of.sampled).sum();
        variance += sampled as f64 * one * one;
    }
    Ok(ContextFigures {
        kernel_sums: sums,
        ..ContextFigures::new(load, report, profile_pct, variance.sqrt())
    })
}

impl ContextFigures {
    fn new(load: &CostLoad, report: &Report, profile_pct: f64, standard_error: f64) -> Self {
        let observer_pct = report.cpus.iter().map(|cpu| cpu.networking_share).sum::<f64>() * 100.0;
        let is_local = load.shows.iter().all(|(event, _)| *event == Event::Local);
        let allowed_points =
            if is_local { MOST_LOCAL_PCT } else { (profile_pct * TOLERANCE).max(3.0 * standard_error) };
        let events: BTreeMap<&'static str, f64> = Event::ALL
            .into_iter()
            .map(|event| (event.name(), report.share_of(event) * 100.0))
            .filter(|(_, pct)| *pct > 0.0)
            .collect();
        let sums = parts_of(report);
        let absent = load.absent(|event, part| sums.contains_key(&(event, part.to_owned())));
        let parts = sums.into_iter().filter(|((event, _), _)| *event != Event::Kernel);
        let mut parts: Vec<_> = parts.map(|((event, part), pct)| (event.name(), part, pct)).collect();
        parts.sort_by(|a, b| b.2.total_cmp(&a.2));
        parts.truncate(MOST_PARTS);
        let off = if is_local { observer_pct } else { (observer_pct - profile_pct).abs() };
        let within = off <= allowed_points;
        let kernel_sums = Vec::new();
        Self { observer_pct, profile_pct, allowed_points, within, events, parts, kernel_sums, absent }
    }

    /// Returns the kernel time of that CPU on which the observer's sum differs most from the clock.
    fn worst_sum(&self) -> Option<&KernelSum> {
        let size = |sum: &KernelSum| sum.difference_points.abs();
        self.kernel_sums.iter().max_by(|a, b| size(a).total_cmp(&size(b)))
    }

    /// Returns what is wrong with the figures: they differ too much from `perf` or from the clock, or the observer did
    /// not report the name of an expected kernel context or layer.
    fn faults(&self) -> Vec<&'static str> {
        [
            (!self.within, "networking differs from perf"),
            (self.kernel_sums.iter().any(|sum| !sum.is_within()), "the kernel's sum differs from the clock"),
            (!self.absent.is_empty(), "names are missing"),
        ]
        .into_iter()
        .filter_map(|(is_wrong, what)| is_wrong.then_some(what))
        .collect()
    }
}

/// Returns the time of each network stack layer in each kernel context (such as NET_RX), percent of one CPU, over all
/// CPUs.
pub(super) fn parts_of(report: &Report) -> BTreeMap<(Event, String), f64> {
    let mut sums = BTreeMap::new();
    for of in report.cpus.iter().flat_map(|cpu| &cpu.events) {
        for part in &of.parts {
            *sums.entry((of.event, part.name.clone())).or_default() += part.share * 100.0;
        }
    }
    sums
}

impl ContextRow {
    fn line(&self) -> String {
        let Some(it) = &self.figures else {
            return format!("{:<12}  {}", self.scenario, self.error.as_deref().unwrap_or_default());
        };
        let events: Vec<String> = it.events.iter().map(|(event, pct)| format!("{event} {pct:.2}")).collect();
        let verdict = if it.within { "within" } else { "NOT within" };
        let mut line = format!(
            "{:<12}  networking {:6.2} % of a CPU, perf {:6.2} %, {verdict} {:.2} points; {}",
            self.scenario,
            it.observer_pct,
            it.profile_pct,
            it.allowed_points,
            events.join(", ")
        );
        if let Some(sum) = it.worst_sum() {
            line += &format!(
                "; sum of the kernel {:+.2} points from the clock on CPU {} (standard error {:.2}), {} the aim of {AIM_POINTS}",
                sum.difference_points,
                sum.cpu,
                sum.standard_error_points,
                if sum.meets_aim() { "within" } else { "NOT within" }
            );
        }
        if !it.absent.is_empty() {
            line += &format!("; not seen: {}", it.absent.join(", "));
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_figures_outside_their_tolerance_are_named() {
        let figures = |within, difference_points, absent: &[&str]| ContextFigures {
            observer_pct: 10.0,
            profile_pct: 10.0,
            allowed_points: 0.5,
            within,
            events: BTreeMap::new(),
            parts: Vec::new(),
            kernel_sums: [0.2, difference_points]
                .map(|points| KernelSum::with_difference(points, 0.5))
                .to_vec(),
            absent: absent.iter().map(|name| (*name).to_owned()).collect(),
        };
        assert!(figures(true, -1.4, &[]).faults().is_empty());
        assert_eq!(figures(true, -1.6, &[]).faults(), ["the kernel's sum differs from the clock"]);
        assert_eq!(figures(false, 0.0, &[]).faults(), ["networking differs from perf"]);
        assert_eq!(figures(true, 0.0, &["timers: TCP"]).faults(), ["names are missing"]);
        // A smaller difference is wrong as well if the samples of that CPU are many.
        let mut small = figures(true, -1.4, &[]);
        small.kernel_sums.push(KernelSum::with_difference(1.2, 0.1));
        assert_eq!(small.faults(), ["the kernel's sum differs from the clock"]);
        let figures = Some(figures(true, -1.4, &[]));
        let row = ContextRow { scenario: "nat", figures, error: None };
        assert!(row.line().contains("-1.40 points from the clock on CPU 0"), "{}", row.line());
        assert!(row.line().contains("NOT within the aim of 1"), "{}", row.line());
    }

    #[test]
    fn network_layers_missing_in_a_cost_report_are_named() {
        let load = ALL.iter().find(|load| load.name == "tc").expect("a load");
        assert_eq!(load.absent(|event, part| event == Event::NetRx && part == "TC"), [""; 0]);
        assert_eq!(load.absent(|event, part| event == Event::Send && part == "TC"), ["net_rx: TC"]);
    }

    #[test]
    fn scenario_names_are_unique() {
        let names: std::collections::BTreeSet<_> = ALL.iter().map(|load| load.name).collect();
        assert_eq!(names.len(), ALL.len());
        assert_eq!(ALL.len(), 12);
        assert!(ALL.iter().all(|load| !load.shows.is_empty()));
    }
}
