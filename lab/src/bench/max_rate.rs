//! Finds the highest rate that each relay sustains without loss, and how much media each relay delivers per core.

use std::io;

use serde_json::{Value, json};

use super::contender::Contender;
use super::figures::RowLoad;
use super::run::{BenchRun, LoadTrial};
use super::table::{columns, dash};
use super::traffic::ReceivedObjects;
use crate::progress::BenchProgress;
use crate::stats::median;

/// Share of the rate that must reach each subscriber for the rate to count as sustained.
const SUSTAINED: f64 = 0.97;
/// Median application latency above which the relay is considered to queue instead of keeping up, us.
const QUEUED_US: f64 = 100_000.0;
/// The search ends when the lowest failed rate is at most this multiple of the highest sustained rate.
const PRECISION: f64 = 1.2;
/// Highest rate that is tried, objects per second. Above it the load generator would be the limit.
const CEILING_HZ: u32 = 100_000;
/// Lowest rate that is tried, objects per second.
const LEAST_HZ: u32 = 100;

/// Delivery and CPU use at the highest sustained rate.
#[derive(Debug, Clone, Copy)]
struct Peak {
    rate_hz: u32,
    /// Payload of delivered objects, summed over all subscribers, Mbit/s.
    goodput_mbit_s: f64,
    /// Number of busy CPUs of the machine.
    busy_cpus: f64,
    /// Number of CPUs that the relay's process used.
    relay_cpus: f64,
}

/// Reason why a rate was not sustained.
#[derive(Debug, Clone, PartialEq)]
enum Limit {
    /// The relay did not keep up, for this reason.
    Relay(String),
    /// The publisher made only this many objects per second, so the relay's limit is unknown.
    Generator(f64),
}

/// Result of one round of the search.
#[derive(Debug, Clone, Default)]
struct MaxRateRound {
    best: Option<Peak>,
    /// The lowest rate that was not sustained, and the reason.
    failed: Option<(u32, Limit)>,
}

/// One relay with one number of subscribers, and the highest rate of each round.
pub struct MaxRateRow {
    contender: Contender,
    load: RowLoad,
    rounds: Vec<MaxRateRound>,
}

impl MaxRateRow {
    pub fn new(contender: Contender, load: RowLoad) -> Self {
        Self { contender, load, rounds: Vec::new() }
    }

    fn name(&self) -> String {
        format!("{} x {}", self.contender.label_over(self.load.transport), self.load.subscribers)
    }

    /// Searches for the highest rate: doubles the rate until it is not sustained, then bisects.
    pub fn run(&mut self, bench: &BenchRun, number: usize, progress: &BenchProgress) -> io::Result<()> {
        let mut round = MaxRateRound::default();
        progress.begin(format!("round {number}, {}", self.name()));
        let mut wanted = Some(self.load.rate_hz);
        while let Some(rate_hz) = wanted {
            let load = RowLoad { rate_hz, ..self.load };
            let trial = bench.trial(self.contender, &load);
            match trial
                .map_err(|error| Limit::Relay(format!("{error:#}")))
                .and_then(|trial| judge(&load, &trial))
            {
                Ok(peak) => {
                    progress.note(&format!("{}: {rate_hz} Hz, {}", self.name(), peak.text()))?;
                    round.best = Some(peak);
                }
                Err(limit) => {
                    progress.note(&format!("{}: not {rate_hz} Hz: {}", self.name(), limit.text(rate_hz)))?;
                    round.failed = Some((rate_hz, limit));
                }
            }
            wanted = next(round.best.map(|peak| peak.rate_hz), round.failed.as_ref().map(|(rate, _)| *rate));
        }
        let best = round.best.map_or_else(|| "no rate".to_owned(), |peak| format!("{} Hz", peak.rate_hz));
        self.rounds.push(round);
        progress.end(&best)
    }

    /// Reports whether any rate was sustained in any round.
    pub fn is_measured(&self) -> bool {
        self.rounds.iter().any(|round| round.best.is_some())
    }

    fn middle(&self, of: fn(&Peak) -> f64) -> Option<f64> {
        median(&self.rounds.iter().filter_map(|round| round.best.as_ref()).map(of).collect::<Vec<_>>())
    }

    /// Returns the cells of a table row, with medians over the rounds.
    pub fn line(&self) -> Vec<String> {
        let figure =
            |of: fn(&Peak) -> f64| self.middle(of).map_or_else(dash, |figure| format!("{figure:.0}"));
        let limits = self.rounds.iter().filter_map(|round| round.failed.as_ref());
        vec![
            self.contender.label_over(self.load.transport),
            self.load.subscribers.to_string(),
            figure(|peak| f64::from(peak.rate_hz)),
            figure(|peak| peak.goodput_mbit_s),
            figure(per_core),
            figure(per_relay_core),
            limits
                .map(|(rate, limit)| format!("{rate}: {}", limit.text(*rate)))
                .collect::<Vec<_>>()
                .join("; "),
        ]
    }

    pub fn json(&self) -> Value {
        json!({
            "relay": self.contender.relay(),
            "engine": self.contender.engine(),
            "gate": self.contender.gate(),
            "transport": self.contender.over(self.load.transport),
            "subscribers": self.load.subscribers,
            "object_bytes": self.load.object_bytes,
            "max_rate_hz": self.middle(|peak| f64::from(peak.rate_hz)),
            "goodput_mbit_s": self.middle(|peak| peak.goodput_mbit_s),
            "goodput_mbit_s_per_core": self.middle(per_core),
            "goodput_mbit_s_per_relay_core": self.middle(per_relay_core),
            "rounds": self.rounds.iter().map(MaxRateRound::json).collect::<Vec<_>>(),
        })
    }
}

/// Renders the rows as a table.
pub fn render(rows: &[MaxRateRow]) -> String {
    let head = ["relay", "subs", "max Hz", "Mbit/s", "per core", "per relay core", "not"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    lines.extend(rows.iter().map(MaxRateRow::line));
    columns(&lines)
}

fn judge(load: &RowLoad, trial: &LoadTrial) -> Result<Peak, Limit> {
    let ReceivedObjects { lost, rate_hz, latency_us, offered_hz, .. } = &trial.received;
    let wanted = f64::from(load.rate_hz) * load.subscribers as f64;
    let p50 = latency_us.map_or(f64::INFINITY, |latency| latency.p50);
    // Check the generator first: a slow publisher also looks like a slow relay.
    if let Some(offered) = offered_hz.filter(|offered| *offered < SUSTAINED * f64::from(load.rate_hz)) {
        return Err(Limit::Generator(offered));
    }
    if *lost > 0 {
        return Err(Limit::Relay(format!("{lost} lost")));
    }
    if *rate_hz < SUSTAINED * wanted {
        return Err(Limit::Relay(format!("{:.0} % delivered", 100.0 * rate_hz / wanted)));
    }
    if p50 > QUEUED_US {
        return Err(Limit::Relay(format!("late by {:.0} ms", p50 / 1e3)));
    }
    Ok(Peak {
        rate_hz: load.rate_hz,
        goodput_mbit_s: rate_hz * f64::from(load.object_bytes) * 8.0 / 1e6,
        busy_cpus: trial.used.busy_cpus(),
        relay_cpus: trial.relay_cpus,
    })
}

impl MaxRateRound {
    fn json(&self) -> Value {
        let mut round = self.best.map_or_else(|| json!({}), |peak| peak.json());
        if let Some((rate_hz, limit)) = &self.failed {
            let (by, offered_hz) = match limit {
                Limit::Relay(_) => ("relay", None),
                Limit::Generator(offered_hz) => ("generator", Some(offered_hz)),
            };
            round["not"] = json!({
                "rate_hz": rate_hz,
                "limited_by": by,
                "offered_hz": offered_hz,
                "why": limit.text(*rate_hz),
            });
        }
        round
    }
}

impl Limit {
    fn text(&self, rate_hz: u32) -> String {
        match self {
            Self::Relay(why) => why.clone(),
            Self::Generator(offered) => format!("publisher reached {offered:.0}/s of {rate_hz}"),
        }
    }
}

impl Peak {
    fn json(&self) -> Value {
        json!({
            "rate_hz": self.rate_hz,
            "goodput_mbit_s": self.goodput_mbit_s,
            "busy_cpus": self.busy_cpus,
            "relay_cpus": self.relay_cpus,
        })
    }

    fn text(&self) -> String {
        format!("{:.2} CPUs busy, {:.2} of them the relay's", self.busy_cpus, self.relay_cpus)
    }
}

fn per_core(peak: &Peak) -> f64 {
    peak.goodput_mbit_s / peak.busy_cpus.max(0.01)
}

fn per_relay_core(peak: &Peak) -> f64 {
    peak.goodput_mbit_s / peak.relay_cpus.max(0.01)
}

/// Returns the object rate to try next; `None` once the highest sustained rate is known precisely enough.
fn next(best: Option<u32>, failed: Option<u32>) -> Option<u32> {
    match (best, failed) {
        (Some(best), None) => Some(best.saturating_mul(2).min(CEILING_HZ)).filter(|rate| *rate > best),
        (Some(best), Some(failed)) => {
            // The next rate is the geometric mean of the sustained and the failed rate, since `PRECISION` is a ratio of
            // these rates.
            let middle = (f64::from(best) * f64::from(failed)).sqrt();
            (f64::from(failed) / f64::from(best) > PRECISION).then_some(middle as u32)
        }
        (None, Some(failed)) => Some(failed / 4).filter(|rate| *rate >= LEAST_HZ),
        (None, None) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::usage::Used;
    use crate::stats::Percentiles;
    use crate::transport::LabTransport;

    /// Runs the search on an imaginary relay that sustains exactly the rates up to `limit`, in objects per second.
    /// Returns the highest rate found and the number of trials.
    fn search(limit: u32) -> (Option<u32>, usize) {
        let mut best = None;
        let mut failed = None;
        let mut rate = Some(500);
        let mut trials = 0;
        while let Some(hz) = rate {
            trials += 1;
            if hz <= limit {
                best = Some(hz)
            } else {
                failed = Some(hz)
            }
            rate = next(best, failed);
        }
        (best, trials)
    }

    #[test]
    fn max_rate_search_ends_just_below_the_limit() {
        for limit in [100, 124, 125, 499, 500, 501, 999, 1000, 7777, 100_000] {
            let (best, trials) = search(limit);
            match best {
                Some(best) => assert!(
                    best <= limit && f64::from(limit) < f64::from(best) * PRECISION * 1.01,
                    "{limit}: {best}"
                ),
                None => assert!(limit < 125),
            }
            assert!(trials < 16, "{limit}: {trials}");
        }
        assert_eq!(search(99), (None, 2), "from 500 to 125");
        assert_eq!(search(u32::MAX), (Some(100_000), 9));
    }

    fn trial(offered_hz: f64, lost: u64, rate_hz: f64) -> LoadTrial {
        let latency_us = Some(Percentiles { p50: 100.0, p90: 200.0, p99: 300.0, max: 400.0 });
        let used = Used { elapsed_ns: 1_000_000_000, machine_ns: 1_500_000_000, process_ns: 400_000_000 };
        let offered_hz = Some(offered_hz);
        LoadTrial {
            received: ReceivedObjects {
                delivered: 0,
                lost,
                rate_hz,
                latency_us,
                offered_hz,
                objects: Vec::new(),
                owed: None,
            },
            used,
            relay_cpus: 0.5,
        }
    }

    #[test]
    fn generator_at_its_limit_is_no_failure_of_the_relay() {
        let load =
            RowLoad { transport: LabTransport::Raw, subscribers: 2, object_bytes: 1250, rate_hz: 1000 };
        assert_eq!(judge(&load, &trial(900.0, 5, 100.0)).err(), Some(Limit::Generator(900.0)));
        assert_eq!(judge(&load, &trial(1000.0, 5, 2000.0)).err(), Some(Limit::Relay("5 lost".into())));
        let slow = judge(&load, &trial(1000.0, 0, 1800.0)).err();
        assert_eq!(slow, Some(Limit::Relay("90 % delivered".into())));
        let peak = judge(&load, &trial(1000.0, 0, 2000.0)).expect("sustained");
        assert_eq!((per_core(&peak), per_relay_core(&peak)), (20.0 / 1.5, 40.0));
    }

    #[test]
    fn max_rate_row_names_the_limiting_program() {
        let load = RowLoad { transport: LabTransport::Raw, subscribers: 8, object_bytes: 1200, rate_hz: 500 };
        let mut row = MaxRateRow::new(Contender::Kernel, load);
        let best = Some(Peak { rate_hz: 8000, goodput_mbit_s: 614.4, busy_cpus: 1.0, relay_cpus: 0.5 });
        row.rounds.push(MaxRateRound { best, failed: Some((9600, Limit::Generator(9000.0))) });
        let json = row.json();
        assert_eq!(json["goodput_mbit_s_per_core"], 614.4);
        assert_eq!(json["goodput_mbit_s_per_relay_core"], 1228.8);
        assert_eq!(json["rounds"][0]["not"]["limited_by"], "generator");
        assert_eq!(json["rounds"][0]["not"]["why"], "publisher reached 9000/s of 9600");
        assert!(render(&[row]).contains("9600: publisher reached 9000/s of 9600"));
    }
}
