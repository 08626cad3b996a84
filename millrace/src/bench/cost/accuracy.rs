//! The observer against `/proc/stat` and against a profile of the same time.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::Context;
use millrace_bpf::clock::monotonic_ns;
use millrace_cost::report::{Event, Report};
use millrace_cost::{Config, Observer};
use serde::Serialize;

use super::network::{Scenario, Traffic};
use super::profile::{self, Recording};

#[derive(Debug, Serialize)]
pub struct Figures {
    pub cpus: Vec<CpuError>,
    /// The largest difference first.
    pub parts: Vec<PartError>,
    lost_samples: u64,
}

/// Percent of the CPU.
#[derive(Debug, Serialize)]
pub struct CpuError {
    cpu: u32,
    /// All of the observer's events.
    events_pct: f64,
    /// By the profile: the kernel outside of all events.
    rest_pct: f64,
    /// System, softirq and hardware interrupts.
    procstat_pct: f64,
    /// `/proc/stat` leaves it out of the others; the observer's clock runs on.
    steal_pct: f64,
    error_pct: f64,
    /// The same events by the profile.
    profile_events_pct: f64,
}

/// Percent of the CPU.
#[derive(Debug, Serialize)]
pub struct PartError {
    cpu: u32,
    pub event: Event,
    pub part: String,
    pub observer_pct: f64,
    pub profile_pct: f64,
}

impl PartError {
    pub fn points(&self) -> f64 {
        (self.observer_pct - self.profile_pct).abs()
    }
}

impl Figures {
    /// With its sign.
    pub fn worst_cpu_error_pct(&self) -> Option<f64> {
        let errors = self.cpus.iter().map(|cpu| cpu.error_pct);
        errors.max_by(|a, b| a.abs().total_cmp(&b.abs()))
    }

    fn new(report: &Report, profile: &BTreeMap<u32, profile::Cpu>) -> anyhow::Result<Self> {
        let (mut cpus, mut parts) = (Vec::new(), Vec::new());
        for cpu in &report.cpus {
            let it = profile.get(&cpu.cpu).with_context(|| format!("no profile of CPU {}", cpu.cpu))?;
            let percent = |ns: u64| ns as f64 * 100.0 / report.period_ns.max(1) as f64;
            let events_pct = cpu.networking_share * 100.0;
            let sampled = |samples| profile::percent(samples, report.period_ns);
            let rest_pct = sampled(it.rest);
            let kernel = cpu.procstat.system_ns + cpu.procstat.softirq_ns + cpu.procstat.irq_ns;
            cpus.push(CpuError {
                cpu: cpu.cpu,
                events_pct,
                rest_pct,
                procstat_pct: percent(kernel),
                steal_pct: percent(cpu.procstat.steal_ns),
                error_pct: events_pct + rest_pct - percent(kernel),
                profile_events_pct: sampled(it.parts.values().sum()),
            });
            let observed: BTreeMap<(Event, String), u64> = cpu
                .events
                .iter()
                .flat_map(|event| event.parts.iter().map(|part| ((event.event, part.name.clone()), part.ns)))
                .collect();
            let names: BTreeSet<_> = observed.keys().chain(it.parts.keys()).collect();
            parts.extend(names.into_iter().map(|name| PartError {
                cpu: cpu.cpu,
                event: name.0,
                part: name.1.clone(),
                observer_pct: percent(observed.get(name).copied().unwrap_or(0)),
                profile_pct: sampled(it.parts.get(name).copied().unwrap_or(0)),
            }));
        }
        parts.sort_by(|a, b| b.points().total_cmp(&a.points()));
        Ok(Self { cpus, parts, lost_samples: report.lost.samples })
    }
}

pub fn measure(scenario: Scenario, sample_hz: u32, length: Duration) -> anyhow::Result<Figures> {
    let traffic = Traffic::start(scenario)?;
    let mut observer = Observer::start(Config { frequency_hz: sample_hz, ..Config::new()? })?;
    let recording = Recording::start(length)?;
    observer.report()?;
    let start = monotonic_ns();
    let report = observer.next(length)?;
    let end = monotonic_ns();
    // Programs that are gone have no names any more: perf wants the observer's at its end.
    let profile = recording.finish(start, end);
    drop(observer);
    drop(traffic);
    Figures::new(&report, &profile?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_error_keeps_its_sign() {
        let cpu = |error_pct| CpuError {
            cpu: 0,
            events_pct: 0.0,
            rest_pct: 0.0,
            procstat_pct: 0.0,
            steal_pct: 0.0,
            error_pct,
            profile_events_pct: 0.0,
        };
        let figures = |errors: &[f64]| Figures {
            cpus: errors.iter().copied().map(cpu).collect(),
            parts: Vec::new(),
            lost_samples: 0,
        };
        assert_eq!(figures(&[1.0, -3.0, 2.0]).worst_cpu_error_pct(), Some(-3.0));
        assert_eq!(figures(&[]).worst_cpu_error_pct(), None);
    }
}
