//! The highest rate that each relay sustains without loss, and what it delivers per core.

use serde_json::{Value, json};

use super::contender::Contender;
use super::figures::Load;
use super::run::Bench;
use super::stats::median;
use super::traffic::Received;
use super::usage::Used;

/// Of the asked rate, that must have been delivered to each subscriber.
const SUSTAINED: f64 = 0.97;
/// Median application latency from which on a relay does not keep up but queues, microseconds.
const QUEUED_US: f64 = 100_000.0;
/// The search ends when the lowest rate that failed is no more than this above the highest that did not.
const PRECISION: f64 = 1.1;
/// Objects per second from which on the generator is measured.
const CEILING_HZ: u32 = 200_000;

/// A relay under a load.
pub struct Trial {
    pub received: Received,
    pub used: Used,
}

/// What a relay delivered at a rate that it sustained.
#[derive(Debug, Clone, Copy)]
struct Peak {
    rate_hz: u32,
    /// Payload of objects, over all subscribers.
    goodput_mbit_s: f64,
    /// Of the whole machine.
    busy_cpus: f64,
}

/// One relay with one number of subscribers: the highest rate of each round.
pub struct Row {
    contender: Contender,
    load: Load,
    rounds: Vec<Option<Peak>>,
}

impl Row {
    pub fn new(contender: Contender, load: Load) -> Self {
        Self { contender, load, rounds: Vec::new() }
    }

    /// Doubles the rate until it is too much, and halves what is between.
    pub fn run(&mut self, bench: &Bench) {
        let (mut best, mut failed) = (None, None);
        let mut rate_hz = self.load.rate_hz;
        loop {
            let load = Load { rate_hz, ..self.load };
            match bench.trial(self.contender, &load).map(|trial| self.judge(&load, &trial)) {
                Ok(Ok(peak)) => {
                    eprintln!("{} x {}: {rate_hz} Hz", self.contender.label(), load.subscribers);
                    best = Some(peak);
                }
                Ok(Err(why)) => {
                    eprintln!("{} x {}: not {rate_hz} Hz: {why}", self.contender.label(), load.subscribers);
                    failed = Some(rate_hz);
                }
                Err(error) => {
                    eprintln!(
                        "{} x {}: not {rate_hz} Hz: {error:#}",
                        self.contender.label(),
                        load.subscribers
                    );
                    failed = Some(rate_hz);
                }
            }
            match next(best.map(|peak| peak.rate_hz), failed) {
                Some(next) => rate_hz = next,
                None => break,
            }
        }
        self.rounds.push(best);
    }

    fn judge(&self, load: &Load, trial: &Trial) -> Result<Peak, String> {
        let Received { lost, rate_hz, latency_us, .. } = &trial.received;
        let wanted = f64::from(load.rate_hz) * load.subscribers as f64;
        let p50 = latency_us.map_or(f64::INFINITY, |latency| latency.p50);
        if *lost > 0 {
            return Err(format!("{lost} lost"));
        }
        if *rate_hz < SUSTAINED * wanted {
            return Err(format!("{:.0} % delivered", 100.0 * rate_hz / wanted));
        }
        if p50 > QUEUED_US {
            return Err(format!("late by {:.0} ms", p50 / 1e3));
        }
        Ok(Peak {
            rate_hz: load.rate_hz,
            goodput_mbit_s: rate_hz * f64::from(load.object_bytes) * 8.0 / 1e6,
            busy_cpus: trial.used.busy_cpus(),
        })
    }

    fn middle(&self, of: fn(&Peak) -> f64) -> Option<f64> {
        median(&self.rounds.iter().flatten().map(of).collect::<Vec<_>>())
    }

    /// Medians over the rounds.
    pub fn line(&self) -> String {
        let name = format!("{} x {}", self.contender.label(), self.load.subscribers);
        let figures = (
            self.middle(|peak| f64::from(peak.rate_hz)),
            self.middle(|peak| peak.goodput_mbit_s),
            self.middle(per_core),
        );
        match figures {
            (Some(rate), Some(goodput), Some(per_core)) => {
                format!("{name:<28} {rate:>8.0} Hz {goodput:>9.1} Mbit/s {per_core:>9.1} Mbit/s per core")
            }
            _ => format!("{name:<28} not even {} Hz", self.load.rate_hz),
        }
    }

    pub fn json(&self) -> Value {
        let rounds = self.rounds.iter().map(|round| round.map(|peak| peak.json()));
        json!({
            "relay": self.contender.relay(),
            "engine": self.contender.engine(),
            "subscribers": self.load.subscribers,
            "object_bytes": self.load.object_bytes,
            "max_rate_hz": self.middle(|peak| f64::from(peak.rate_hz)),
            "goodput_mbit_s": self.middle(|peak| peak.goodput_mbit_s),
            "goodput_mbit_s_per_core": self.middle(per_core),
            "rounds": rounds.collect::<Vec<_>>(),
        })
    }
}

impl Peak {
    fn json(&self) -> Value {
        json!({
            "rate_hz": self.rate_hz,
            "goodput_mbit_s": self.goodput_mbit_s,
            "busy_cpus": self.busy_cpus,
        })
    }
}

fn per_core(peak: &Peak) -> f64 {
    peak.goodput_mbit_s / peak.busy_cpus.max(0.01)
}

/// The rate to try next; `None` once it is known well enough.
fn next(best: Option<u32>, failed: Option<u32>) -> Option<u32> {
    match (best, failed) {
        (Some(best), None) => Some(best.saturating_mul(2)).filter(|rate| *rate <= CEILING_HZ),
        (Some(best), Some(failed)) => {
            let middle = (f64::from(best) * f64::from(failed)).sqrt();
            (f64::from(failed) / f64::from(best) > PRECISION).then_some(middle as u32)
        }
        (None, _) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The highest rate found, and the number of trials, for a relay that takes up to `limit`.
    fn search(limit: u32) -> (Option<u32>, usize) {
        let (mut best, mut failed, mut rate, mut trials) = (None, None, Some(500), 0);
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
    fn the_search_comes_close_from_below() {
        for limit in [500, 501, 999, 1000, 7777, 100_000] {
            let (best, trials) = search(limit);
            let best = best.expect("500 is sustained");
            assert!(
                best <= limit && f64::from(limit) < f64::from(best) * PRECISION * 1.01,
                "{limit}: {best}"
            );
            assert!(trials < 16, "{limit}: {trials}");
        }
        assert_eq!(search(499), (None, 1));
        assert_eq!(search(u32::MAX), (Some(128_000), 9));
    }
}
