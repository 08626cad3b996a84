//! Measures the observer's overhead: throughput with and without the observer, in turn, under the same traffic.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use millrace_cost::kernel::clock;
use millrace_cost::report::{Report, ReportMethod, ReportMode};
use millrace_cost::{Config, Observer, TimingBudget};
use millrace_cost_daemon::sink::ReportSink as _;
use millrace_cost_daemon::web::Dashboard;
use serde::Serialize;

use super::network::{self, NetworkScenario, NetworkTraffic};

/// Memory for the reports that the dashboard keeps, bytes.
const MEMORY_BYTES: usize = 64 << 20;
const SETTLE: Duration = Duration::from_millis(200);
/// Time that the observer's mode `auto` gets, before the measurement, to choose between timing and sampling.
const CHOOSING: Duration = Duration::from_millis(1500);
/// Interval of the observer's reports, which `millrace cost` uses as well.
const PERIOD: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Variant {
    /// The observer reads stacks through mapped memory, as by default
    Array,
    /// The observer reads stacks through a BPF ring buffer
    RingBuffer,
    /// The observer's mode `sampling`
    Sampling,
    /// The observer's mode `auto`
    Auto,
    /// The observer's defaults: the mode `auto`, and the observer may lower its sampling rate
    Default,
    /// Only the sampling interrupts, and no sample is recorded: the cost that every sampler has
    Clock,
    /// The observer behind its dashboard with one viewer, keeping stacks and history
    Http,
}

impl Variant {
    /// Returns the mode in which the observer starts; `None` if only the sampling interrupts run.
    pub fn mode(self) -> Option<ReportMode> {
        match self {
            Variant::Array | Variant::RingBuffer | Variant::Auto | Variant::Default | Variant::Http => {
                Some(ReportMode::Events)
            }
            Variant::Sampling => Some(ReportMode::Sampling),
            Variant::Clock => None,
        }
    }

    pub fn transport(self) -> &'static str {
        match self {
            Variant::RingBuffer => "ring_buffer",
            Variant::Array | Variant::Sampling | Variant::Auto | Variant::Default | Variant::Http => "array",
            Variant::Clock => "none",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Variant::Array => "array",
            Variant::RingBuffer => "ring_buffer",
            Variant::Sampling => "sampling",
            Variant::Auto => "auto",
            Variant::Default => "default",
            Variant::Clock => "clock",
            Variant::Http => "http",
        }
    }
}

#[derive(Debug, Serialize)]
pub struct OverheadFigures {
    pub pairs_pct: Vec<f64>,
    /// Bytes of TCP, or datagrams of UDP, that arrived per second without the observer: the median over the pairs of
    /// periods.
    delivered_per_second: f64,
    /// CPU time of the observer's process, user and system, percent of one CPU.
    pub observer_cpu_pct: f64,
    /// Share of the observed time in which the mode was `sampling`, percent.
    pub sampled_pct: f64,
    /// CPU time that the observer's timing programs take, percent of a CPU, by the latest estimate of its mode `auto`.
    timing_pct: Option<f64>,
    /// Whether the observer timed sends and receives at kernel functions or at system calls; `None` if it timed none.
    method: Option<ReportMethod>,
    /// Samples per second and CPU; `None` if no sample was recorded.
    pub frequency_hz: Option<u32>,
    lost_samples: u64,
}

impl OverheadFigures {
    /// Returns the mode of the observer for most of the time.
    pub fn mode(&self) -> Option<ReportMode> {
        self.frequency_hz
            .map(|_| if self.sampled_pct > 50.0 { ReportMode::Sampling } else { ReportMode::Events })
    }
}

pub fn measure(
    scenario: NetworkScenario,
    variant: Variant,
    sample_hz: u32,
    pairs: usize,
    length: Duration,
) -> anyhow::Result<OverheadFigures> {
    let config = Config {
        mode: variant.mode().unwrap_or(ReportMode::Sampling),
        frequency_hz: sample_hz,
        budget: matches!(variant, Variant::Auto | Variant::Default).then(TimingBudget::default),
        lower_frequency: variant == Variant::Default,
        ring_buffer: variant == Variant::RingBuffer,
        stacks: variant == Variant::Http,
        ..Config::new()?
    };
    let with = |traffic: &mut NetworkTraffic, own: &mut ObserverFigures| match variant {
        Variant::Clock => interrupted(traffic, sample_hz, length),
        _ => observed(traffic, &config, length, own),
    };
    let mut traffic = NetworkTraffic::start(scenario)?;
    let mut own = ObserverFigures::from_variant(variant)?;
    let mut pairs_pct = Vec::new();
    let mut without_all = Vec::new();
    for pair in 0..pairs {
        // In every second pair, the period with the observer comes first. So a drift of the machine's speed affects the
        // periods with and without the observer alike.
        let (with, without) = if pair % 2 == 0 {
            let without = bare(&mut traffic, length)?;
            (with(&mut traffic, &mut own)?, without)
        } else {
            let with = with(&mut traffic, &mut own)?;
            (with, bare(&mut traffic, length)?)
        };
        pairs_pct.push((1.0 - with / without) * 100.0);
        without_all.push(without);
    }
    Ok(OverheadFigures {
        pairs_pct,
        delivered_per_second: crate::stats::median(&without_all).unwrap_or_default(),
        observer_cpu_pct: own.cpu_ns as f64 * 100.0 / own.period_ns.max(1) as f64,
        sampled_pct: own.sampled_ns as f64 * 100.0 / own.period_ns.max(1) as f64,
        timing_pct: own.timing_share.map(|share| share * 100.0),
        method: own.method,
        frequency_hz: own.frequency_hz,
        lost_samples: own.lost_samples,
    })
}

/// Totals of the observer's reports over all observed periods.
#[derive(Default)]
struct ObserverFigures {
    cpu_ns: u64,
    period_ns: u64,
    sampled_ns: u64,
    timing_share: Option<f64>,
    method: Option<ReportMethod>,
    frequency_hz: Option<u32>,
    lost_samples: u64,
    served: Option<ServedDashboard>,
}

impl ObserverFigures {
    fn from_variant(variant: Variant) -> anyhow::Result<Self> {
        let served = (variant == Variant::Http).then(ServedDashboard::start).transpose()?;
        Ok(Self { served, ..Self::default() })
    }

    fn take(&mut self, report: Report) -> anyhow::Result<()> {
        self.cpu_ns += report.observer.user_ns + report.observer.system_ns;
        self.period_ns += report.period_ns;
        self.sampled_ns += report.sampled_ns;
        self.timing_share = report.auto.map(|auto| auto.timing_share);
        self.method = self.method.or(report.method);
        self.frequency_hz = Some(report.frequency_hz);
        self.lost_samples += report.lost.samples;
        self.served.as_mut().map_or(Ok(()), |served| served.dashboard.report(&Arc::new(report)))
    }
}

/// A dashboard with a viewer that reads everything until the connection ends. The viewer runs in this process, so its
/// CPU time counts too.
struct ServedDashboard {
    dashboard: Dashboard,
    _viewer: JoinHandle<()>,
}

impl ServedDashboard {
    fn start() -> anyhow::Result<Self> {
        let dashboard = Dashboard::on_loopback(MEMORY_BYTES)?;
        let addr = dashboard.local_addr;
        let mut stream = TcpStream::connect(addr).context("the dashboard's viewer")?;
        write!(stream, "GET /api/reports HTTP/1.0\r\nHost: {addr}\r\n\r\n")?;
        let mut lines = BufReader::new(stream).lines();
        let hello = lines.by_ref().map_while(Result::ok).any(|line| line == "event: hello");
        ensure!(hello, "the dashboard does not answer");
        let viewer = thread::spawn(move || lines.map_while(Result::ok).for_each(drop));
        Ok(Self { dashboard, _viewer: viewer })
    }
}

/// Measures the throughput without the observer.
fn bare(traffic: &mut NetworkTraffic, length: Duration) -> anyhow::Result<f64> {
    thread::sleep(SETTLE);
    rate(traffic, || {
        thread::sleep(length);
        Ok(())
    })
}

fn interrupted(traffic: &mut NetworkTraffic, hz: u32, length: Duration) -> anyhow::Result<f64> {
    let clocks: Vec<_> = network::cpus()?
        .into_iter()
        .map(|cpu| clock(cpu, hz))
        .collect::<Result<_, _>>()
        .context("the clock")?;
    let delivered = bare(traffic, length);
    drop(clocks);
    delivered
}

fn observed(
    traffic: &mut NetworkTraffic,
    config: &Config,
    length: Duration,
    own: &mut ObserverFigures,
) -> anyhow::Result<f64> {
    let mut observer = Observer::start(config.clone())?;
    let settling = if config.budget.is_some() { CHOOSING } else { SETTLE };
    let start = Instant::now();
    while start.elapsed() < settling {
        observer.next(SETTLE)?;
    }
    rate(traffic, || {
        let start = Instant::now();
        while let Some(left) = length.checked_sub(start.elapsed()).filter(|left| !left.is_zero()) {
            own.take(observer.next(PERIOD.min(left))?)?;
        }
        Ok(())
    })
}

fn rate(traffic: &mut NetworkTraffic, work: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<f64> {
    let start = Instant::now();
    let before = traffic.delivered()?;
    work()?;
    Ok((traffic.delivered()? - before) as f64 / start.elapsed().as_secs_f64())
}
