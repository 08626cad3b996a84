//! `millrace-lab bench cost`: how accurate the observer's figures of networking's CPU cost are, and what the observer
//! itself costs.

mod accuracy;
mod calibration;
mod contexts;
mod loads;
mod names;
mod network;
mod overhead;
mod period;
mod profile;
mod sums;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::ensure;
use clap::ValueEnum;
use millrace_cost::MAX_FREQUENCY_HZ;
use millrace_cost::report::ReportMode;
use serde::Serialize;

use super::table::write_json;
use super::usage::warn_if_busy;
use crate::progress::BenchProgress;
use crate::stats::Spread;
pub use names::{ContextNames, names_by_load};
use network::{NetworkProtocol, NetworkScenario};

#[derive(Debug, clap::Args)]
pub struct CostArgs {
    /// Sampling rates of the observer at which its overhead is measured
    #[arg(long, value_delimiter = ',', default_value = "100,1000,10000")]
    hz: Vec<u32>,
    /// Pairs of periods, one with and one without the observer, for each overhead; 0 skips overhead
    #[arg(long, default_value_t = 10)]
    pairs: usize,
    /// Length of each period, with or without the observer, whose throughputs are compared
    #[arg(long, default_value_t = 2.0, value_name = "SECONDS")]
    pair_seconds: f64,
    /// Length of each run for accuracy; 0 skips accuracy
    #[arg(long, default_value_t = 8.0, value_name = "SECONDS")]
    accuracy_seconds: f64,
    /// Number of rounds of accuracy runs, each with all scenarios
    #[arg(long, default_value_t = 3, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    accuracy_rounds: u32,
    /// Samples per second in the runs for accuracy
    #[arg(long, default_value_t = 1000, value_name = "HZ")]
    accuracy_hz: u32,
    /// Run only scenarios whose names contain all words of one of these entries, such as `veth tcp,gro=on`
    #[arg(long, value_delimiter = ',', value_name = "WORDS")]
    only: Vec<String>,
    /// Configurations of the observer whose overhead is measured
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = overhead::Variant::value_variants().to_vec())]
    observers: Vec<overhead::Variant>,
    /// Only compare the observer with perf and a clock in each context where the kernel runs networking, for
    /// `--accuracy-seconds` each; fails if they differ too much
    #[arg(long)]
    scenarios: bool,
    /// Write the results to this file, as JSON; it is rewritten after each row
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Protocols whose overhead is measured. UDP packets are smaller than TCP's here, so the same data needs more of them.
const OVERHEADS: [NetworkProtocol; 2] = [NetworkProtocol::Tcp, NetworkProtocol::Udp];

pub fn run(args: CostArgs) -> anyhow::Result<()> {
    args.check()?;
    crate::lab::remove_on_signal()?;
    warn_if_busy()?;
    if args.scenarios {
        return contexts::run(&contexts::ContextSettings {
            only: &args.only,
            length: Duration::from_secs_f64(args.accuracy_seconds),
            hz: args.accuracy_hz,
            json: args.json.as_deref(),
        });
    }
    let progress = BenchProgress::with_steps(args.steps());
    let mut rows = CostRows { rows: Vec::new(), json: args.json.as_deref(), progress };
    args.accuracies(&mut rows)?;
    args.overheads(&mut rows)?;
    let CostRows { rows, .. } = rows;
    rows.iter().for_each(|row| println!("{}", row.line()));
    ensure!(rows.iter().any(|row| row.error.is_none()), "nothing could be measured");
    Ok(())
}

/// Result rows. Each is written to the file at once, so that it is kept if a later measurement fails.
struct CostRows<'a> {
    rows: Vec<CostRow>,
    json: Option<&'a Path>,
    progress: BenchProgress,
}

impl CostRows<'_> {
    fn push(&mut self, row: CostRow) -> anyhow::Result<()> {
        let came = row.told();
        self.rows.push(row);
        if let Some(path) = self.json {
            write_json(path, &self.rows.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?)?;
        }
        Ok(self.progress.end(came.trim_start())?)
    }
}

impl CostArgs {
    fn check(&self) -> anyhow::Result<()> {
        let rates = || self.hz.iter().chain([&self.accuracy_hz]);
        ensure!(
            rates().all(|hz| (1..=MAX_FREQUENCY_HZ).contains(hz)),
            "samples per second are 1 to {MAX_FREQUENCY_HZ}"
        );
        ensure!(self.pair_seconds > 0.0, "--pair-seconds must be more than 0");
        ensure!(self.accuracy_seconds >= 0.0, "--accuracy-seconds must not be negative");
        ensure!(
            self.scenarios || self.steps() > 0,
            "nothing is left to measure: --pairs, --accuracy-seconds and --only leave all out"
        );
        Ok(())
    }

    /// Returns the number of steps that the progress display counts: runs for accuracy with calibration, and rows of
    /// overhead.
    fn steps(&self) -> usize {
        let scenarios = if self.accuracy_seconds > 0.0 { self.scenarios().count() } else { 0 };
        let accuracies = scenarios * self.accuracy_rounds as usize + usize::from(scenarios > 0);
        let overheads = OVERHEADS.iter().filter(|of| self.wants(&NetworkScenario::veth(**of))).count();
        let overheads = overheads * self.observers.len() * self.hz.len();
        accuracies + if self.pairs > 0 { overheads } else { 0 }
    }

    fn scenarios(&self) -> impl Iterator<Item = NetworkScenario> {
        NetworkScenario::all().filter(|scenario| self.wants(scenario))
    }

    fn wants(&self, scenario: &NetworkScenario) -> bool {
        let name = scenario.to_string();
        let has =
            |words: &String| words.split_whitespace().all(|word| name.split(' ').any(|own| own == word));
        self.only.is_empty() || self.only.iter().any(has)
    }

    fn accuracies(&self, rows: &mut CostRows<'_>) -> anyhow::Result<()> {
        if self.accuracy_seconds == 0.0 {
            return Ok(());
        }
        let scenarios: Vec<NetworkScenario> = self.scenarios().collect();
        if scenarios.is_empty() {
            return Ok(());
        }
        let length = Duration::from_secs_f64(self.accuracy_seconds);
        rows.progress.begin("calibration");
        rows.push(CostRow::from_calibration(calibration::measure(length)))?;
        let mut open: Vec<_> = scenarios.into_iter().map(|scenario| Some((scenario, Vec::new()))).collect();
        for number in 1..=self.accuracy_rounds {
            for slot in &mut open {
                // A scenario that fails is not put back into `open`, the list of scenarios still to measure.
                let Some((scenario, mut rounds)) = slot.take() else { continue };
                rows.progress.begin(format!("round {number}, {scenario}"));
                let row = |figures| CostRow::from_accuracy(scenario, self.accuracy_hz, figures);
                match accuracy::measure(scenario, self.accuracy_hz, length) {
                    Err(error) => rows.push(row(Err(error)))?,
                    Ok(round) => {
                        rounds.push(round);
                        match number == self.accuracy_rounds {
                            true => rows.push(row(Ok(accuracy::AccuracyFigures::from_rounds(&rounds))))?,
                            false => {
                                rows.progress.end("done")?;
                                *slot = Some((scenario, rounds));
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    fn overheads(&self, rows: &mut CostRows<'_>) -> anyhow::Result<()> {
        let length = Duration::from_secs_f64(self.pair_seconds);
        let scenarios = OVERHEADS.map(NetworkScenario::veth);
        for &variant in self.observers.iter().filter(|_| self.pairs > 0) {
            for scenario in scenarios.into_iter().filter(|scenario| self.wants(scenario)) {
                for &hz in &self.hz {
                    rows.progress.begin(format!("{scenario}, {} at {hz} Hz", variant.name()));
                    let figures = overhead::measure(scenario, variant, hz, self.pairs, length);
                    rows.push(CostRow::from_overhead(scenario, variant, hz, figures))?;
                }
            }
        }
        Ok(())
    }
}

#[derive(Debug, Serialize)]
struct CostRow {
    scenario: String,
    observer: &'static str,
    /// Mode of the observer (timing or sampling) for most of the time. `None` in the configuration that takes sampling
    /// interrupts but records no samples.
    mode: Option<ReportMode>,
    /// How stacks reach userspace: `array` (mapped memory), `ring_buffer`, or `none`.
    transport: &'static str,
    sample_hz: u32,
    /// Share of throughput lost to the observer, percent. It is negative if throughput was higher with the observer.
    overhead_pct: Option<Spread>,
    /// Error of the kernel's time on the CPU with the largest error: the observer's networking time plus the profile's
    /// other kernel time, minus the kernel time of `/proc/stat`. Median of the rounds.
    procstat_error_pct: Option<f64>,
    /// Error like `procstat_error_pct`, but compared with busy time by a clock that is read at task switches.
    /// `/proc/stat` counts ticks instead. Median of the rounds.
    clock_error_pct: Option<f64>,
    /// Largest error of the time for any network stack layer (such as TCP) in any kernel context, on the CPU where it
    /// is largest, in percentage points. Median of the rounds.
    worst_subevent_error_points: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    calibration: Option<Vec<calibration::CalibrationFigures>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    accuracy: Option<accuracy::AccuracyFigures>,
    #[serde(skip_serializing_if = "Option::is_none")]
    overhead: Option<overhead::OverheadFigures>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl CostRow {
    fn new(
        scenario: impl fmt::Display,
        variant: overhead::Variant,
        sample_hz: u32,
        error: Option<String>,
    ) -> Self {
        Self {
            scenario: scenario.to_string(),
            observer: variant.name(),
            mode: variant.mode(),
            transport: variant.transport(),
            sample_hz,
            overhead_pct: None,
            procstat_error_pct: None,
            clock_error_pct: None,
            worst_subevent_error_points: None,
            calibration: None,
            accuracy: None,
            overhead: None,
            error,
        }
    }

    fn from_calibration(figures: anyhow::Result<Vec<calibration::CalibrationFigures>>) -> Self {
        let row = |error| Self::new("calibration", overhead::Variant::Array, 0, error);
        match figures {
            Err(error) => row(Some(format!("{error:#}"))),
            Ok(figures) => Self { calibration: Some(figures), ..row(None) },
        }
    }

    fn from_accuracy(
        scenario: NetworkScenario,
        hz: u32,
        figures: anyhow::Result<accuracy::AccuracyFigures>,
    ) -> Self {
        let row = |error| Self::new(scenario, overhead::Variant::Array, hz, error);
        match figures {
            Err(error) => row(Some(format!("{error:#}"))),
            Ok(figures) => Self {
                procstat_error_pct: figures.procstat_error_pct().map(|spread| spread.median),
                clock_error_pct: figures.clock_error_pct().map(|spread| spread.median),
                worst_subevent_error_points: figures.parts.first().map(accuracy::PartError::points),
                accuracy: Some(figures),
                ..row(None)
            },
        }
    }

    fn from_overhead(
        scenario: NetworkScenario,
        variant: overhead::Variant,
        hz: u32,
        figures: anyhow::Result<overhead::OverheadFigures>,
    ) -> Self {
        let row = |error| Self::new(scenario, variant, hz, error);
        match figures {
            Err(error) => row(Some(format!("{error:#}"))),
            Ok(figures) => {
                let mode = figures.mode();
                Self {
                    mode,
                    overhead_pct: Spread::from_values(&figures.pairs_pct),
                    overhead: Some(figures),
                    ..row(None)
                }
            }
        }
    }

    fn line(&self) -> String {
        format!("{:<24} {:>6} Hz{}", self.scenario, self.sample_hz, self.told())
    }

    fn told(&self) -> String {
        let mut line = String::new();
        if let Some(error) = &self.error {
            line += &format!("  {error}");
        }
        if let Some(Spread { median, min, max }) = self.overhead_pct {
            let observer = self.observer;
            line += &format!("  {observer:<11}  overhead {median:5.2} % ({min:.2} to {max:.2})");
        }
        if let Some(figures) = &self.overhead {
            line += &format!(", observer {:.2} % of a CPU", figures.observer_cpu_pct);
            if let Some(hz) = figures.frequency_hz {
                line += &format!("; {hz} Hz, {:.0} % of the time sampled only", figures.sampled_pct);
            }
        }
        for cpu in self.calibration.iter().flatten() {
            line += &format!(
                "  CPU {}: load {:.2} to {:.2} %, busy {:.2} %; /proc/stat {:.2} %, its ticks {:.2} %, perf {:.2} %;",
                cpu.cpu,
                cpu.bursts_pct,
                cpu.thread_pct,
                cpu.clock_busy_pct,
                cpu.busy_pct,
                cpu.ticks_pct,
                cpu.profile_busy_pct
            );
        }
        if let Some(Spread { median, min, max }) =
            self.accuracy.as_ref().and_then(|it| it.procstat_error_pct())
        {
            line += &format!("  /proc/stat {median:+.2} % of a CPU ({min:+.2} to {max:+.2})");
        }
        if let Some(outside) = self.accuracy.as_ref().and_then(|it| it.procstat_outside_pct()) {
            line += &format!(", {:+.2} % of it not explained by its uncounted time", outside.median);
        }
        if let Some(Spread { median, min, max }) = self.accuracy.as_ref().and_then(|it| it.clock_error_pct())
        {
            line += &format!(", clock {median:+.2} % ({min:+.2} to {max:+.2})");
        }
        if let Some(worst) = self.accuracy.as_ref().and_then(|figures| figures.parts.first()) {
            line += &format!(
                ", parts {:.2} points, sampling alone {:.2} ({}, {}: {:.2} %, perf {:.2} %)",
                worst.points(),
                worst.sampling_error_points,
                worst.event,
                worst.part,
                worst.observer_pct,
                worst.profile_pct
            );
        }
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_minimum_and_maximum_of_measurements_are_computed() {
        assert_eq!(Spread::from_values(&[]), None);
        assert_eq!(Spread::from_values(&[3.0, -1.0, 2.0]), Some(Spread { median: 2.0, min: -1.0, max: 3.0 }));
    }

    #[test]
    fn every_network_scenario_occurs_once() {
        let names: Vec<String> = NetworkScenario::all().map(|scenario| scenario.to_string()).collect();
        assert_eq!(names.len(), 12);
        assert!(names.contains(&"bridge udp gro=on".to_owned()), "{names:?}");
        assert_eq!(names.iter().collect::<std::collections::BTreeSet<_>>().len(), 12);
    }
}
