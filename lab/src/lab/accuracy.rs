//! `millrace-lab lab accuracy`: how precisely the emulator impairs packets, measured from outside with UDP probes.
//!
//! A probe carries the time of its send call, and the kernel adds the time of its arrival at the receiver's interface.
//! The same probes over a plain veth show how much of the measured delay the kernel and the measurement itself cause.

use std::fmt;
use std::io::IoSliceMut;
use std::net::UdpSocket;
use std::os::fd::AsRawFd as _;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, ensure};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg, setsockopt, sockopt};
use nix::sys::time::{TimeSpec, TimeValLike as _};
use nix::time::{ClockId, clock_gettime};
use serde::Serialize;

use super::emulator::be_punctual;
use super::{Impairment, Lab, LabLink, LinkDirection, Topology};
use crate::progress::BenchProgress;

/// UDP payload of a probe, bytes. It has the size of a media packet.
const PAYLOAD: usize = 1200;
/// Size of a probe as an Ethernet frame, bytes.
const FRAME: usize = PAYLOAD + 8 + 20 + 14;
/// Number of probes for each measured delay.
const PROBES: usize = 2000;
const DELAYS: [&str; 4] = ["0ms", "1ms", "10ms", "50ms"];
const LOSSES: [f64; 3] = [0.01, 0.05, 0.2];
const RATES: [u64; 3] = [1_000_000, 10_000_000, 100_000_000];
/// Rate above which the probes of each millisecond are sent together, probes per second.
const BULK: u64 = 1000;
/// Time without a probe after which the receiver checks whether more are to come.
const SILENCE: Duration = Duration::from_millis(100);

#[derive(Debug, Serialize)]
pub(super) struct AccuracyReport {
    /// Delay with which a real-time thread wakes up from a sleep of a millisecond, us. An emulator on this machine
    /// cannot be more precise.
    timer_us: Quantiles,
    delay: Vec<DelayRow>,
    max_packets_per_second: u64,
    loss: Vec<LossRow>,
    rate: Vec<RateRow>,
}

/// Time from the send call to the arrival, minus the delay that was set, us.
#[derive(Debug, Serialize)]
struct DelayRow {
    link: String,
    probes: usize,
    error_us: Quantiles,
    /// Difference of the delay's 99th percentile and median, us.
    jitter_us: f64,
}

#[derive(Debug, Serialize)]
struct Quantiles {
    min: f64,
    p50: f64,
    p90: f64,
    p99: f64,
    max: f64,
}

#[derive(Debug, Serialize)]
struct LossRow {
    asked: f64,
    measured: f64,
    /// Standard error of the measured share of lost probes.
    sigma: f64,
}

#[derive(Debug, Serialize)]
struct RateRow {
    asked_bits_per_second: u64,
    measured_bits_per_second: f64,
    error_percent: f64,
}

pub(super) fn measure() -> Result<AccuracyReport> {
    // The 3 additional steps of the progress display are the plain link, the timer, and the packet rate.
    let progress = BenchProgress::with_steps(3 + DELAYS.len() + LOSSES.len() + RATES.len());
    progress.begin("a plain link");
    let mut delay = vec![delay_row("plain veth", &AccuracyPath::new(false)?, Duration::ZERO)?];
    let path = AccuracyPath::new(true)?;
    for asked in DELAYS {
        progress.next(format!("delay {asked}"));
        let impairment = Impairment::parse(&format!("delay={asked}"))?;
        path.set(impairment.clone())?;
        delay.push(delay_row(&format!("delay={asked}"), &path, impairment.delay)?);
    }
    path.set(Impairment::default())?;
    progress.next("the timer");
    let timer_us = timer()?;
    progress.next("packets per second");
    let max_packets_per_second = max_packets_per_second(&path)?;
    let loss = LOSSES.iter().map(|asked| {
        progress.next(format!("loss {asked}"));
        loss_row(&path, *asked)
    });
    let loss = loss.collect::<Result<_>>()?;
    let rate = RATES.iter().map(|asked| {
        progress.next(format!("rate {asked}"));
        rate_row(&path, *asked)
    });
    Ok(AccuracyReport { timer_us, delay, max_packets_per_second, loss, rate: rate.collect::<Result<_>>()? })
}

fn timer() -> Result<Quantiles> {
    const SLEEP: Duration = Duration::from_millis(1);
    let late = || {
        be_punctual();
        let lateness = |_| {
            let start = Instant::now();
            std::thread::sleep(SLEEP);
            start.elapsed().saturating_sub(SLEEP).as_secs_f64() * 1e6
        };
        Quantiles::from_samples((0..PROBES).map(lateness).collect())
    };
    std::thread::scope(|scope| scope.spawn(late).join()).map_err(|_| anyhow!("a thread panicked"))
}

fn delay_row(name: &str, path: &AccuracyPath, asked: Duration) -> Result<DelayRow> {
    let arrivals = path.probe(PROBES, 500)?;
    ensure!(arrivals.len() == PROBES, "{name}: only {} of {PROBES} probes arrived", arrivals.len());
    let error =
        |arrival: &AccuracyArrival| (arrival.arrived - arrival.sent - asked.as_nanos() as i64) as f64 / 1e3;
    let probes = arrivals.len();
    let error_us = Quantiles::from_samples(arrivals.iter().map(error).collect());
    let jitter_us = error_us.p99 - error_us.p50;
    Ok(DelayRow { link: name.into(), probes, error_us, jitter_us })
}

impl Quantiles {
    fn from_samples(mut samples: Vec<f64>) -> Self {
        samples.sort_by(f64::total_cmp);
        let at = |q: f64| {
            let index = (q * samples.len().saturating_sub(1) as f64).round() as usize;
            samples.get(index).copied().unwrap_or(f64::NAN)
        };
        Self { min: at(0.0), p50: at(0.5), p90: at(0.9), p99: at(0.99), max: at(1.0) }
    }
}

/// Returns the highest rate at which all probes sent within a second arrive. Each rate tried is 10 % above the previous
/// one.
fn max_packets_per_second(path: &AccuracyPath) -> Result<u64> {
    let whole = |rate: u64| -> Result<Option<u64>> {
        let (arrivals, sending) = path.probe_timed(rate as usize, rate, false)?;
        let reached = (rate as f64 / sending.as_secs_f64()) as u64;
        Ok((arrivals.len() == rate as usize).then_some(reached.min(rate)))
    };
    let mut best = 0;
    let mut rate = 10_000;
    // Stop once the sender cannot reach the rate, since that says nothing about the link.
    while let Some(reached) = whole(rate)?
        && reached > best
    {
        best = reached;
        rate += rate / 10;
    }
    Ok(best)
}

fn loss_row(path: &AccuracyPath, asked: f64) -> Result<LossRow> {
    const PROBES: usize = 50_000;
    path.set(Impairment { loss: asked, ..Impairment::default() })?;
    let arrived = path.probe(PROBES, 10_000)?.len();
    let sigma = (asked * (1.0 - asked) / PROBES as f64).sqrt();
    Ok(LossRow { asked, measured: 1.0 - arrived as f64 / PROBES as f64, sigma })
}

/// Sends 50 % more than the link's rate, and measures the rate between the first and the last arrival. The queue holds
/// 200 ms, so the link never idles while the sender stalls.
fn rate_row(path: &AccuracyPath, asked: u64) -> Result<RateRow> {
    let queue_bytes = Some((asked / 8 / 5) as usize);
    path.set(Impairment { rate: Some(asked), queue_bytes, ..Impairment::default() })?;
    let offered = asked * 3 / 2 / (FRAME as u64 * 8);
    let arrivals = path.probe(offered as usize * 2, offered)?;
    let (first, last) = arrivals.first().zip(arrivals.last()).context("no probe arrived")?;
    let bits = (arrivals.len() - 1) as f64 * FRAME as f64 * 8.0;
    let measured = bits / ((last.arrived - first.arrived) as f64 / 1e9);
    Ok(RateRow {
        asked_bits_per_second: asked,
        measured_bits_per_second: measured,
        error_percent: (measured / asked as f64 - 1.0) * 100.0,
    })
}

/// A lab with two nodes and one link, and a socket on each node.
struct AccuracyPath {
    tx: UdpSocket,
    rx: UdpSocket,
    // The lab is dropped last, since the sockets are in its namespaces.
    lab: Lab,
}

/// Times when a probe was sent and when it arrived, by the real-time clock, ns.
struct AccuracyArrival {
    sent: i64,
    arrived: i64,
}

impl AccuracyPath {
    fn new(emulate: bool) -> Result<Self> {
        let mut topology = Topology::standard(0, 1);
        topology.links.iter_mut().for_each(|link| link.emulate = emulate);
        let lab = Lab::new(&topology)?;
        let bind = |node: &str| -> Result<UdpSocket> {
            let node = lab.node(node)?;
            Ok(node.enter(|| UdpSocket::bind((node.addr_v4(), 0)))??)
        };
        let tx = bind("pub")?;
        let rx = bind("sub1")?;
        tx.connect(rx.local_addr()?)?;
        setsockopt(&rx, sockopt::RcvBufForce, &(256 << 20))?;
        setsockopt(&rx, sockopt::ReceiveTimestampns, &true)?;
        rx.set_read_timeout(Some(SILENCE))?;
        Ok(Self { tx, rx, lab })
    }

    fn link(&self) -> Result<&LabLink> {
        Ok(self.lab.link("pub-sub1")?)
    }

    fn set(&self, impairment: Impairment) -> Result<()> {
        Ok(self.link()?.set(LinkDirection::Forward, impairment)?)
    }

    fn probe(&self, count: usize, per_second: u64) -> Result<Vec<AccuracyArrival>> {
        Ok(self.probe_timed(count, per_second, true)?.0)
    }

    /// Sends probes. Returns the arrivals and the duration of the sending. A `punctual` sender has real-time priority.
    /// Without that priority, the sender may lose the CPU between taking the time and sending, and this delay would be
    /// measured as the link's.
    fn probe_timed(
        &self,
        count: usize,
        per_second: u64,
        punctual: bool,
    ) -> Result<(Vec<AccuracyArrival>, Duration)> {
        let sent_all = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let receiver = scope.spawn(|| self.receive(&sent_all));
            let sender = scope.spawn(|| {
                if punctual {
                    be_punctual();
                }
                self.send(count, per_second)
            });
            let sending = sender.join();
            sent_all.store(true, Ordering::Relaxed);
            let panicked = |_| anyhow!("a thread panicked");
            let arrivals = receiver.join().map_err(panicked)??;
            Ok((arrivals, sending.map_err(panicked)??))
        })
    }

    /// Sends probes evenly. Above [`BULK`] per second, all probes of a millisecond are sent together.
    fn send(&self, count: usize, per_second: u64) -> Result<Duration> {
        let mut payload = [0u8; PAYLOAD];
        let start = Instant::now();
        let tick = Duration::from_secs(1).div_f64(per_second.min(BULK) as f64);
        let mut sent = 0;
        for n in 1.. {
            let due = (tick.as_secs_f64() * per_second as f64 * f64::from(n)).round() as usize;
            while sent < due.min(count) {
                payload[..8].copy_from_slice(&wall_clock()?.to_be_bytes());
                self.tx.send(&payload)?;
                sent += 1;
            }
            if sent == count {
                break;
            }
            std::thread::sleep((start + tick * n).saturating_duration_since(Instant::now()));
        }
        Ok(start.elapsed())
    }

    fn receive(&self, sent_all: &AtomicBool) -> Result<Vec<AccuracyArrival>> {
        let mut arrivals = Vec::new();
        let mut buffer = [0u8; PAYLOAD];
        let mut control = nix::cmsg_space!(TimeSpec);
        let mut last_call = false;
        loop {
            let mut slices = [IoSliceMut::new(&mut buffer)];
            let received =
                recvmsg::<()>(self.rx.as_raw_fd(), &mut slices, Some(&mut control), MsgFlags::empty());
            let arrived = match received {
                Ok(message) => message.cmsgs()?.find_map(|cmsg| match cmsg {
                    ControlMessageOwned::ScmTimestampns(stamp) => Some(stamp.num_nanoseconds()),
                    _ => None,
                }),
                Err(nix::errno::Errno::EAGAIN) if last_call => return Ok(arrivals),
                Err(nix::errno::Errno::EAGAIN) => {
                    // The link is only checked while no probe arrives, since the check locks it, and this thread may
                    // lose the CPU while it holds the lock.
                    last_call = sent_all.load(Ordering::Relaxed) && self.is_idle()?;
                    continue;
                }
                Err(nix::errno::Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
            };
            let sent = buffer.first_chunk().map(|bytes| i64::from_be_bytes(*bytes)).unwrap_or_default();
            arrivals.push(AccuracyArrival { sent, arrived: arrived.context("no receive timestamp")? });
        }
    }

    fn is_idle(&self) -> Result<bool> {
        let counters = self.link()?.counters(LinkDirection::Forward);
        Ok(counters.is_none_or(|counters| counters.queued == 0 && counters.in_flight == 0))
    }
}

fn wall_clock() -> Result<i64> {
    Ok(clock_gettime(ClockId::CLOCK_REALTIME)?.num_nanoseconds())
}

impl fmt::Display for AccuracyReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "time from send to arrival beyond the delay asked for, us")?;
        writeln!(f, "  {:<12} {:>8} {:>8} {:>8} {:>8} {:>8}", "", "min", "p50", "p90", "p99", "max")?;
        let rows = self.delay.iter().map(|row| (row.link.as_str(), &row.error_us));
        for (name, Quantiles { min, p50, p90, p99, max }) in rows.chain([("bare timer", &self.timer_us)]) {
            writeln!(f, "  {name:<12} {min:>8.1} {p50:>8.1} {p90:>8.1} {p99:>8.1} {max:>8.1}")?;
        }
        writeln!(f, "packets per second without loss, {PAYLOAD} bytes: {}", self.max_packets_per_second)?;
        writeln!(f, "loss")?;
        for LossRow { asked, measured, sigma } in &self.loss {
            let [asked, measured, sigma] = [asked, measured, sigma].map(|share| share * 100.0);
            writeln!(f, "  {asked:>5.1} % asked, {measured:.3} % measured (sigma {sigma:.3} %)")?;
        }
        writeln!(f, "rate")?;
        for row in &self.rate {
            let [asked, measured] = [row.asked_bits_per_second as f64, row.measured_bits_per_second];
            writeln!(
                f,
                "  {:>5.0} Mbit/s asked, {:.4} measured, {:+.3} %",
                asked / 1e6,
                measured / 1e6,
                row.error_percent
            )?;
        }
        Ok(())
    }
}
