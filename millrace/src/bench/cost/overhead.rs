//! What the observer takes: throughput with and without it, in turn, while the same traffic runs on.

use std::thread;
use std::time::{Duration, Instant};

use millrace_cost::report::Mode;
use millrace_cost::{Config, Observer};
use serde::Serialize;

use super::network::{Scenario, Traffic};

/// After attaching and detaching, which are not part of what is measured.
const SETTLE: Duration = Duration::from_millis(200);
/// As the command reports.
const PERIOD: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy)]
pub enum Variant {
    Array,
    RingBuffer,
    Sampling,
}

impl Variant {
    pub fn mode(self) -> Mode {
        match self {
            Variant::Array | Variant::RingBuffer => Mode::Events,
            Variant::Sampling => Mode::Sampling,
        }
    }

    pub fn transport(self) -> &'static str {
        match self {
            Variant::Array | Variant::Sampling => "array",
            Variant::RingBuffer => "ring_buffer",
        }
    }
}

#[derive(Debug, Serialize)]
pub struct Figures {
    pub pairs_pct: Vec<f64>,
    /// What arrived per second without the observer: bytes of TCP, datagrams of UDP; the median.
    delivered_per_second: f64,
    /// User and system time of the observer's process, of one CPU.
    pub observer_cpu_pct: f64,
    lost_samples: u64,
}

pub fn measure(
    scenario: Scenario,
    variant: Variant,
    sample_hz: u32,
    pairs: usize,
    length: Duration,
) -> anyhow::Result<Figures> {
    let config = Config {
        mode: variant.mode(),
        frequency_hz: sample_hz,
        ring_buffer: matches!(variant, Variant::RingBuffer),
        ..Config::new()?
    };
    let mut traffic = Traffic::start(scenario)?;
    let (mut own, mut pairs_pct, mut without_all) = (Own::default(), Vec::new(), Vec::new());
    for pair in 0..pairs {
        // Every other pair the other way round: a drift of the machine meets both alike.
        let (with, without) = if pair % 2 == 0 {
            let without = bare(&mut traffic, length)?;
            (observed(&mut traffic, &config, length, &mut own)?, without)
        } else {
            let with = observed(&mut traffic, &config, length, &mut own)?;
            (with, bare(&mut traffic, length)?)
        };
        pairs_pct.push((1.0 - with / without) * 100.0);
        without_all.push(without);
    }
    Ok(Figures {
        pairs_pct,
        delivered_per_second: super::stats::median(&without_all).unwrap_or_default(),
        observer_cpu_pct: own.cpu_ns as f64 * 100.0 / own.period_ns.max(1) as f64,
        lost_samples: own.lost_samples,
    })
}

/// The observer's own, over all stretches.
#[derive(Default)]
struct Own {
    cpu_ns: u64,
    period_ns: u64,
    lost_samples: u64,
}

/// What arrives per second.
fn bare(traffic: &mut Traffic, length: Duration) -> anyhow::Result<f64> {
    thread::sleep(SETTLE);
    rate(traffic, || {
        thread::sleep(length);
        Ok(())
    })
}

fn observed(traffic: &mut Traffic, config: &Config, length: Duration, own: &mut Own) -> anyhow::Result<f64> {
    let mut observer = Observer::start(config.clone())?;
    observer.next(SETTLE)?;
    rate(traffic, || {
        let start = Instant::now();
        while let Some(left) = length.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            let report = observer.next(PERIOD.min(left))?;
            own.cpu_ns += report.observer.user_ns + report.observer.system_ns;
            own.period_ns += report.period_ns;
            own.lost_samples += report.lost.samples;
        }
        Ok(())
    })
}

fn rate(traffic: &mut Traffic, work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let (start, before) = (Instant::now(), traffic.delivered()?);
    work()?;
    Ok((traffic.delivered()? - before) as f64 / start.elapsed().as_secs_f64())
}
