//! Encodes the sums of all reports for `/metrics`, in the OpenMetrics text format.
//!
//! Processes and cgroups are left out, since their number over time has no bound.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::Ordering;

use millrace_cost::report::{Auto, CpuCost, Energy, Event, MissingMeasurement, Report};
use millrace_daemon::openmetrics;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeCounterValue, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge};
use prometheus_client::registry::Unit;

use super::DashboardShared;
use crate::losses::ReportLoss;

const PREFIX: &str = "millrace_cost";
/// Largest number of different parts of the network stack in the metrics. All further parts are added up as one part,
/// [`FURTHER`], since new BPF programs may always have new names.
const MAX_PARTS: usize = 100;
const FURTHER: &str = "further parts";

#[derive(Debug, Clone, Default)]
pub(super) struct DashboardTotals {
    reports: u64,
    period_ns: u64,
    sampled_ns: u64,
    auto: Option<Auto>,
    events: BTreeMap<(u32, Event), EventTotals>,
    part_names: BTreeSet<String>,
    times: BTreeMap<(u32, &'static str), u64>,
    samples: u64,
    lost: BTreeMap<&'static str, u64>,
    observer_ns: u64,
    networking_joules: Option<f64>,
    joules: BTreeMap<String, f64>,
    missing: Vec<MissingMeasurement>,
}

#[derive(Debug, Clone, Default)]
struct EventTotals {
    ns: u64,
    /// Number of times that the kernel event, such as a softirq or system call, ran; `None` if only samples were taken.
    calls: Option<u64>,
    /// The part of `ns`, the event's nanoseconds, that was measured while `calls` was counted.
    counted_ns: u64,
    observer_ns: u64,
    parts: BTreeMap<String, u64>,
}

impl DashboardTotals {
    /// Adds a report, which is the sum of `reports` reports.
    pub fn add(&mut self, report: &Report, reports: usize) {
        self.reports += reports as u64;
        self.period_ns += report.period_ns;
        self.sampled_ns += report.sampled_ns;
        self.auto = report.auto;
        for cpu in &report.cpus {
            self.add_cpu(cpu, report);
        }
        let lost = &report.lost;
        for (what, count) in [
            ("samples", lost.samples),
            ("stacks", lost.stacks),
            ("processes", lost.processes),
            ("tasks", lost.tasks),
            ("skipped_runs", lost.skipped_runs),
        ] {
            *self.lost.entry(what).or_default() += count;
        }
        self.observer_ns += report.observer.ns();
        if let Energy::Measured { domains, networking_joules, .. } = &report.energy {
            *self.networking_joules.get_or_insert_default() += networking_joules;
            for domain in domains {
                *self.joules.entry(domain.name.clone()).or_default() += domain.joules;
            }
        }
        self.missing.clone_from(&report.missing);
    }

    fn add_cpu(&mut self, cpu: &CpuCost, report: &Report) {
        self.samples += cpu.samples;
        for event in &cpu.events {
            let sum = self.events.entry((cpu.cpu, event.event)).or_default();
            sum.ns += event.ns;
            if let Some(calls) = event.calls {
                *sum.calls.get_or_insert_default() += calls;
                // Leave out the part of the event's time that was estimated from samples: no calls were counted in it.
                sum.counted_ns += event.ns.saturating_sub(event.sampled * report.sample_ns());
            }
            sum.observer_ns += event.observer_ns;
            for part in &event.parts {
                // Most parts of the network stack have an entry already, so no memory is allocated for their names.
                match sum.parts.get_mut(&part.name) {
                    Some(ns) => *ns += part.ns,
                    None => {
                        *sum.parts.entry(part_name(&mut self.part_names, &part.name)).or_default() += part.ns
                    }
                }
            }
        }
        for (mode, ns) in report.modes(cpu) {
            if let Some(ns) = ns {
                *self.times.entry((cpu.cpu, mode)).or_default() += ns;
            }
        }
    }
}

fn part_name(known: &mut BTreeSet<String>, name: &str) -> String {
    if !known.contains(name) {
        if known.len() >= MAX_PARTS {
            return FURTHER.to_owned();
        }
        known.insert(name.to_owned());
    }
    name.to_owned()
}

/// Returns the text of one scrape.
pub(super) fn encode(shared: &DashboardShared) -> Result<String, fmt::Error> {
    let state = shared.state.lock();
    let snapshot = DashboardSnapshot {
        totals: state.metrics.clone(),
        viewers: state.viewers.iter().filter(|viewer| !viewer.frames.is_closed()).count() as u64,
        dropped_frames: state.dropped_frames,
        skipped_reports: shared.skipped_reports.load(Ordering::Relaxed),
        unwritten: shared.losses.all(),
    };
    drop(state);
    openmetrics::encode(PREFIX, snapshot)
}

#[derive(Debug)]
struct DashboardSnapshot {
    totals: DashboardTotals,
    viewers: u64,
    dropped_frames: u64,
    skipped_reports: u64,
    unwritten: BTreeMap<&'static str, ReportLoss>,
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

impl Collector for DashboardSnapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let out = &mut encoder;
        self.costs(out)?;
        self.energy(out)?;
        self.itself(out)
    }
}

impl DashboardSnapshot {
    fn costs(&self, out: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let totals = &self.totals;
        let s = Some(&Unit::Seconds);
        counter(out, "event", "Time on CPU in networking's events", s, |family| {
            self.by_event(family, |event, sum| event.is_networking().then(|| seconds(sum.ns)))
        })?;
        counter(out, "other_event", "Time on CPU in events that are not networking", s, |family| {
            self.by_event(family, |event, sum| (!event.is_networking()).then(|| seconds(sum.ns)))
        })?;
        let what = "Time of the observer inside an event, from samples; the other figures exclude it";
        counter(out, "event_observer", what, s, |family| {
            self.by_event(family, |_, sum| Some(seconds(sum.observer_ns)))
        })?;
        counter(out, "event_calls", "Number of events while calls were counted", None, |family| {
            self.by_event(family, |_, sum| sum.calls)
        })?;
        let what = "Time in counted events; divided by event_calls, the mean time of one event";
        counter(out, "event_counted", what, s, |family| {
            self.by_event(family, |_, sum| sum.calls.map(|_| seconds(sum.counted_ns)))
        })?;
        let what = "Time of one of networking's events in a part of the network stack, from samples; names after the first 100 are further parts";
        counter(out, "part", what, s, |family| self.parts(family, Event::is_networking))?;
        let what =
            "Time of an event that is not networking (local, kernel) in a part of the kernel, from samples";
        counter(out, "other_event_part", what, s, |family| {
            self.parts(family, |event| !event.is_networking())
        })?;
        counter(out, "cpu", "Time of the CPU in each mode, from /proc/stat", s, |family| {
            totals.times.iter().try_for_each(|((cpu, mode), ns)| {
                encode_one(family, &[("cpu", &cpu.to_string()), ("mode", mode)], seconds(*ns))
            })
        })?;
        let what = "1 for each figure that cannot be measured on this kernel";
        let mut family = out.encode_descriptor("missing", what, None, MetricType::Gauge)?;
        totals.missing.iter().try_for_each(|missing| {
            let event = missing.event.map_or("", Event::name);
            ConstGauge::new(1i64).encode(family.encode_family(&[("event", event), ("what", &missing.what)])?)
        })
    }

    /// Encodes `value` of each CPU and kernel event, such as a softirq, unless it is `None`.
    fn by_event<V: EncodeCounterValue>(
        &self,
        family: &mut MetricEncoder<'_>,
        value: impl Fn(Event, &EventTotals) -> Option<V>,
    ) -> fmt::Result {
        let values = self.totals.events.iter().filter_map(|(of, sum)| Some((of, value(of.1, sum)?)));
        for ((cpu, event), value) in values {
            encode_one(family, &[("cpu", &cpu.to_string()), ("event", event.name())], value)?;
        }
        Ok(())
    }

    /// Encodes the CPU time of each part of the network stack, such as TCP, within each event for which `has` is true.
    /// Events are softirqs, system calls and the like.
    fn parts(&self, family: &mut MetricEncoder<'_>, has: fn(Event) -> bool) -> fmt::Result {
        for ((cpu, event), sum) in self.totals.events.iter().filter(|((_, event), _)| has(*event)) {
            for (part, ns) in &sum.parts {
                let labels = [("cpu", &*cpu.to_string()), ("event", event.name()), ("part", part)];
                encode_one(family, &labels, seconds(*ns))?;
            }
        }
        Ok(())
    }

    fn energy(&self, out: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let Some(networking) = self.totals.networking_joules else { return Ok(()) };
        let j = Some(&Unit::Joules);
        plain(
            out,
            "networking_energy",
            "Networking's part of the energy; absent without RAPL",
            j,
            networking,
        )?;
        counter(out, "energy", "Energy that the hardware measured; absent without RAPL", j, |family| {
            self.totals
                .joules
                .iter()
                .try_for_each(|(name, joules)| encode_one(family, &[("domain", name)], *joules))
        })
    }

    /// Encodes the metrics of the observer and this server.
    fn itself(&self, out: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let totals = &self.totals;
        let s = Some(Unit::Seconds);
        plain(out, "observed", "Sum of all reports' periods", s.as_ref(), seconds(totals.period_ns))?;
        let help = "Length of the periods in which events were only sampled, so calls were not counted";
        plain(out, "sampled", help, s.as_ref(), seconds(totals.sampled_ns))?;
        if let Some(auto) = &totals.auto {
            plain(out, "mode_changes", "Changes between timing and sampling events", None, auto.changes)?;
            let help =
                "Share of a CPU that timing events takes, or would take, on the CPU where it is largest";
            let gauge = out.encode_descriptor("timing_share", help, None, MetricType::Gauge)?;
            ConstGauge::new(auto.timing_share).encode(gauge)?;
        }
        plain(out, "observer", "The observer's own time on CPU", s.as_ref(), seconds(totals.observer_ns))?;
        plain(out, "reports", "Reports in these sums", None, totals.reports)?;
        plain(out, "samples", "Stacks sampled", None, totals.samples)?;
        counter(out, "lost", "Observations that were lost, so the figures lack them", None, |family| {
            totals.lost.iter().try_for_each(|(what, count)| {
                ConstCounter::new(*count).encode(family.encode_family(&[("what", *what)])?)
            })
        })?;
        plain(out, "http_skipped_reports", "Reports dropped by the busy server", None, self.skipped_reports)?;
        counter(
            out,
            "unwritten_reports",
            "Reports that were not written to the log or standard output",
            None,
            |family| {
                self.unwritten.iter().try_for_each(|(output, loss)| {
                    ConstCounter::new(loss.reports).encode(family.encode_family(&[("output", *output)])?)
                })
            },
        )?;
        let help = "Reports that were not sent to slow dashboard pages";
        plain(out, "http_dropped_frames", help, None, self.dropped_frames)?;
        let gauge = out.encode_descriptor("http_viewers", "Open dashboard pages", None, MetricType::Gauge)?;
        ConstGauge::new(self.viewers).encode(gauge)
    }
}

fn counter(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    values: impl FnOnce(&mut MetricEncoder<'_>) -> fmt::Result,
) -> fmt::Result {
    values(&mut out.encode_descriptor(name, help, unit, MetricType::Counter)?)
}

fn encode_one<const N: usize>(
    family: &mut MetricEncoder<'_>,
    labels: &[(&str, &str); N],
    value: impl EncodeCounterValue,
) -> fmt::Result {
    ConstCounter::new(value).encode(family.encode_family(labels)?)
}

fn plain(
    out: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    unit: Option<&Unit>,
    value: impl EncodeCounterValue,
) -> fmt::Result {
    ConstCounter::new(value).encode(out.encode_descriptor(name, help, unit, MetricType::Counter)?)
}

#[cfg(test)]
mod tests {
    use millrace_cost::report::EnergyDomain;

    use super::*;
    use crate::text::tests::example;

    /// Returns the text that a scrape gets after `reports` were added. The text has every metric.
    fn scrape(reports: &[Report]) -> String {
        let mut totals = DashboardTotals::default();
        for report in reports {
            totals.add(report, 1);
        }
        let unwritten = [("log", ReportLoss { reports: 4, reason: None })].into();
        let snapshot =
            DashboardSnapshot { totals, viewers: 1, dropped_frames: 2, skipped_reports: 3, unwritten };
        openmetrics::encode(PREFIX, snapshot).expect("text")
    }

    fn report() -> Report {
        let domain = EnergyDomain { name: "package-0".to_owned(), joules: 2.0, watts: 2.0 };
        let energy = Energy::Measured {
            source: "powercap".to_owned(),
            domains: vec![domain],
            total_joules: 2.0,
            active_joules: None,
            networking_joules: 0.5,
            networking_watts: 0.5,
            idle_watts: None,
        };
        let auto = Auto {
            budget_share: 0.01,
            timing_share: 0.25,
            retry_ms: Some(1000),
            changes: 3,
            interrupt_ns: None,
            lowered_from_hz: None,
        };
        Report { energy, auto: Some(auto), sampled_ns: 500_000_000, ..example() }
    }

    /// Metrics of networking do not contain the time and the parts of kernel work that is not networking.
    #[test]
    fn events_that_are_not_networking_have_their_own_metrics() {
        let mut report = report();
        let mut local = report.cpus[0].events[0].clone();
        local.event = Event::Local;
        local.parts[0].name = "unix".to_owned();
        report.cpus[0].events.push(local);
        let text = scrape(&[report]);
        let labels = "{cpu=\"0\",event=\"local\"";
        for line in [
            "millrace_cost_other_event_seconds_total{cpu=\"0\",event=\"local\"} 0.25",
            "millrace_cost_other_event_part_seconds_total{cpu=\"0\",event=\"local\",part=\"unix\"} 1e-9",
            "millrace_cost_part_seconds_total{cpu=\"0\",event=\"net_rx\",part=\"UDP\"} 1e-9",
        ] {
            assert!(text.lines().any(|of| of == line), "{line} in\n{text}");
        }
        for metric in ["event_seconds", "part_seconds"] {
            assert!(!text.contains(&format!("millrace_cost_{metric}_total{labels}")), "{metric} in\n{text}");
        }
    }

    /// Time that a kernel does not measure has no series, so that it is not taken for 0.
    #[test]
    fn unmeasured_time_of_hard_interrupts_has_no_series() {
        let irq = |text: &str| text.contains("millrace_cost_cpu_seconds_total{cpu=\"0\",mode=\"irq\"}");
        assert!(irq(&scrape(&[report()])));
        let mut unmeasured = report();
        unmeasured.missing[0] = MissingMeasurement {
            event: None,
            what: "hard interrupts".to_owned(),
            reason: "this kernel does not measure their time".to_owned(),
            ns: None,
        };
        let text = scrape(&[unmeasured]);
        assert!(!irq(&text), "{text}");
        assert!(text.contains("millrace_cost_missing{event=\"\",what=\"hard interrupts\"} 1"), "{text}");
    }

    #[test]
    fn prometheus_counters_are_sums_over_all_cost_reports() {
        let text = scrape(&[report(), report()]);
        for line in [
            "# TYPE millrace_cost_event_seconds counter",
            "millrace_cost_event_seconds_total{cpu=\"0\",event=\"net_rx\"} 0.5",
            "millrace_cost_event_observer_seconds_total{cpu=\"0\",event=\"net_rx\"} 0.04",
            "millrace_cost_event_calls_total{cpu=\"1\",event=\"net_rx\"} 14",
            "millrace_cost_event_counted_seconds_total{cpu=\"0\",event=\"net_rx\"} 0.5",
            "millrace_cost_part_seconds_total{cpu=\"0\",event=\"net_rx\",part=\"UDP\"} 2e-9",
            "millrace_cost_energy_joules_total{domain=\"package-0\"} 4.0",
            "millrace_cost_networking_energy_joules_total 1.0",
            "millrace_cost_observed_seconds_total 2.0",
            "millrace_cost_sampled_seconds_total 1.0",
            "millrace_cost_mode_changes_total 3",
            "millrace_cost_timing_share 0.25",
            "millrace_cost_lost_total{what=\"samples\"} 6",
            "millrace_cost_missing{event=\"send\",what=\"sendfile\"} 1",
            "millrace_cost_http_dropped_frames_total 2",
            "millrace_cost_unwritten_reports_total{output=\"log\"} 4",
            "# EOF",
        ] {
            assert!(text.lines().any(|of| of == line), "{line} in\n{text}");
        }
        millrace_testkit::documented::assert_families_named("millrace_cost", &text);
    }

    /// The mean duration of a kernel event is computed only from reports that counted its calls. Reports that estimated
    /// its time from samples are left out.
    #[test]
    fn mean_event_time_excludes_sampled_time() {
        let mut sampled = Report { mode: millrace_cost::report::ReportMode::Sampling, ..report() };
        sampled.cpus.iter_mut().flat_map(|cpu| &mut cpu.events).for_each(|event| event.calls = None);
        assert!(!scrape(std::slice::from_ref(&sampled)).contains("event_counted_seconds_total{"));
        // While calls were not counted, ten samples of 1 ms were taken during the event. These 10 ms are left out of
        // the mean.
        let mut timed = report();
        timed.cpus[0].events[0].sampled = 10;
        let text = scrape(&[sampled.clone(), timed, sampled]);
        let value = |metric: &str| {
            let name = format!("millrace_cost_{metric}_total{{cpu=\"0\",event=\"net_rx\"}} ");
            let line = text.lines().find_map(|line| line.strip_prefix(&name));
            line.and_then(|value| value.parse::<f64>().ok()).expect("a figure")
        };
        assert_eq!(
            [value("event_seconds"), value("event_counted_seconds"), value("event_calls")],
            [0.75, 0.24, 7.0]
        );
    }

    /// Users choose the names of BPF programs, so the number of series must not depend on them.
    #[test]
    fn number_of_metric_series_is_bounded() {
        let named = |number: usize| {
            let mut report = report();
            report.cpus[0].events[0].parts[0].name = format!("bpf:{number}");
            report
        };
        let text = scrape(&(0..1000).map(named).collect::<Vec<_>>());
        let parts = text.lines().filter(|line| line.starts_with("millrace_cost_part_seconds_total")).count();
        // CPU 0 has a series for each of the `MAX_PARTS` known parts except UDP, and one series for the sum of all
        // further parts. CPU 1 has series for the parts UDP and `other`.
        assert_eq!(parts, (MAX_PARTS - 1) + 1 + 2);
        assert!(text.contains("part=\"further parts\"} "));
    }

    /// The dashboard for Grafana queries only metrics and labels that exist.
    #[test]
    fn grafana_dashboard_queries_existing_metrics() {
        let dashboard = include_str!("../../../../contrib/grafana/millrace-cost.json");
        let dashboard: serde_json::Value = serde_json::from_str(dashboard).expect("JSON");
        let text = scrape(&[report()]);
        let mut metrics = BTreeSet::new();
        let panels = dashboard["panels"].as_array().expect("panels");
        for target in panels.iter().flat_map(|panel| panel["targets"].as_array().expect("targets")) {
            let expression = target["expr"].as_str().expect("an expression");
            let words = || expression.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            let of: BTreeSet<&str> = words().filter(|word| word.starts_with("millrace_cost_")).collect();
            assert!(!of.is_empty(), "{expression}");
            for by in expression.split("by (").skip(1).filter_map(|rest| rest.split_once(')')) {
                for label in by.0.split(", ").filter(|label| *label != "instance") {
                    let has = |metric: &str| {
                        let mut lines = text.lines().filter(|line| line.starts_with(&format!("{metric}{{")));
                        lines.any(|line| line.contains(&format!("{label}=\"")))
                    };
                    assert!(of.iter().any(|metric| has(metric)), "{label} in {expression}");
                }
            }
            metrics.extend(of);
        }
        assert!(metrics.len() > 10, "{metrics:?}");
        for metric in metrics {
            let is_there =
                |line: &str| line.strip_prefix(metric).is_some_and(|rest| rest.starts_with(['{', ' ']));
            assert!(text.lines().any(is_there), "{metric} in\n{text}");
        }
    }
}
