//! Repeats the experiment of the eQUIC paper: honest clients request one body after the other, and attackers exceed
//! their quota of connections.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::ScopedJoinHandle,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, ensure};
use millrace_kernel::{clock::monotonic_ns, programs::Statistics};
use millrace_lab_kernel::syscalls::Syscalls;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot};

use super::{
    super::{
        process::{BenchProcess, InterfacePackets},
        usage::UsageReading,
    },
    defence::{Defence, DefenceGuard, DefenceLimits},
    http3::{self, Attempts, BodyTimes},
    site::{ATTACKERS, CLIENTS, GateBenchSite, addresses, interface, rss_bytes},
};
use crate::stats::Percentiles;

/// Limit that the defences enforce: one connection per client.
const LIMITS: DefenceLimits = DefenceLimits::Connections(1);
/// Length of the intervals in which requests are counted, and interval at which CPU and memory are sampled.
pub const BIN: Duration = Duration::from_millis(100);
/// Time for which the rate of honest requests must be normal again before the server counts as recovered. A rate is
/// normal if it is at least the share `RECOVERED` of the rate before the attack.
const RECOVERED_OVER: Duration = Duration::from_millis(500);
const RECOVERED: f64 = 0.9;
const SETTLE: Duration = Duration::from_millis(500);
/// Period over which the CPU time of an idle server is measured.
const STILL: Duration = Duration::from_secs(1);
/// CPU time per second below which a server counts as idle, ns.
const STILL_NS: f64 = 5e6;
/// Longest wait for the server to become idle. By then it has abandoned all handshakes that clients did not finish.
const GIVEN_UP: Duration = Duration::from_secs(40);

#[derive(Debug, Clone, Copy)]
pub struct QuotaLoad {
    /// Number of connection attempts of each attacker, in each of the two attacks.
    pub requests: u64,
    /// Connection attempts per second of each attacker.
    pub rate_hz: u32,
    /// Time without attack, before and after each attack.
    pub calm: Duration,
}

impl QuotaLoad {
    fn attack(&self) -> Duration {
        Duration::from_secs_f64(self.requests as f64 / f64::from(self.rate_hz))
    }
}

/// Measured values of one run with a defence. Values that do not apply are `null`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct QuotaFigures {
    /// HTTP response bodies that honest clients got per second during the attack. `calm_requests_per_second` is the
    /// rate before it.
    pub requests_per_second: f64,
    pub calm_requests_per_second: f64,
    /// Mean duration of the honest clients' requests that ended during the attack.
    pub mean_duration_ms: f64,
    pub honest_goodput_ratio: f64,
    /// Time from the attackers' last attempt until the rate of honest requests is normal again (90 % of the rate before
    /// the attack), seconds.
    pub recovery_s: Option<f64>,
    /// Number of all attackers' connection attempts during the attack, number of attempts that got a response body, and
    /// mean time after which the other attempts failed.
    pub attempts: u64,
    pub served_attempts: u64,
    pub refused_after_ms: Option<f64>,
    /// Time from the first attempt to the last, seconds. It is longer than planned if attackers do not get enough CPU.
    pub attack_s: f64,
    /// CPU of the server in percent of one core, and its memory, both sampled during the attack.
    pub server_cpu_percent: Option<Percentiles>,
    pub server_rss_mib: Option<Percentiles>,
    /// Packets that attackers sent in a second attack, without honest traffic. The fields from `attack_packets` to
    /// `syscalls` are measured in the second attack. `refused_packets` is the defence's own count.
    pub attack_packets: u64,
    pub refused_packets: Option<u64>,
    /// CPU time per refused packet, ns: the server's CPU time beyond what it uses without clients, plus the run time of
    /// the packet gate's BPF programs. `cpu_ns_per_refused_attempt` is the same CPU time per connection attempt, since
    /// attempts that get further in the handshake send more packets.
    pub cpu_ns_per_refused_packet: Option<f64>,
    pub bpf_ns_per_refused_packet: Option<f64>,
    pub cpu_ns_per_refused_attempt: Option<f64>,
    /// CPU of the gate's daemon, in percent of one core. The daemon does the same work each second, however many
    /// packets the gate refuses.
    pub gate_cpu_percent: Option<f64>,
    /// Number of the server's system calls.
    pub syscalls: u64,
    /// Number of response bodies that honest clients got in each interval of `BIN`, from the start of the run.
    pub series: Vec<u64>,
}

pub fn run(site: &GateBenchSite, defence: Defence, load: &QuotaLoad) -> anyhow::Result<QuotaFigures> {
    let place = site.place()?;
    let guard = DefenceGuard::install(&place, defence, LIMITS)?;
    let mut server = site.start_server(defence, LIMITS)?;
    let target = site.target()?;
    let _answers = site.take_answers()?;
    let clients = site.node(CLIENTS)?;
    let attackers = site.node(ATTACKERS)?;
    let (go, ready) = mpsc::channel(1);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = {
        let stop = stop.clone();
        move || stop.load(Ordering::Relaxed)
    };
    std::thread::scope(|scope| {
        let honest_target = target.clone();
        let attacked = target.clone();
        let attack = scope.spawn(move || {
            attackers.enter(|| {
                http3::attack(&attacked, &addresses(attackers), load.requests, load.rate_hz, ready)
            })?
        });
        let honest = scope.spawn(move || {
            clients.enter(|| http3::honest(&honest_target, &addresses(clients), Duration::ZERO, stopped))?
        });
        let watched = watch(&mut server, load, &go);
        stop.store(true, Ordering::Relaxed);
        let got = joined(honest);
        // Report the first error, since it caused the later ones.
        let (watched, got) = (watched.and_then(|watched| Ok((watched, got?))))?;
        std::thread::sleep(SETTLE);
        // A second attack, without honest clients, shows what refusals cost.
        let refusals = Refusals::measure(site, &guard, &server, &go, defence)?;
        drop(go);
        joined(attack)?;
        watched.figures(&got, refusals, load)
    })
}

fn joined<T>(thread: ScopedJoinHandle<'_, anyhow::Result<T>>) -> anyhow::Result<T> {
    thread.join().map_err(|_| anyhow!("a client panicked"))?
}

type Go = mpsc::Sender<oneshot::Sender<Attempts>>;

fn strike(go: &Go) -> anyhow::Result<oneshot::Receiver<Attempts>> {
    let (tell, told) = oneshot::channel();
    go.blocking_send(tell).map_err(|_| anyhow!("the attackers have ended: none got its first connection"))?;
    Ok(told)
}

/// Times of the experiment's phases, and the server's CPU and memory during the attack.
struct QuotaPhases {
    calm_ns: (u64, u64),
    attack_ns: (u64, u64),
    last_ns: u64,
    end_ns: u64,
    attempts: Attempts,
    cpu_percent: Vec<f64>,
    rss_mib: Vec<f64>,
}

fn watch(server: &mut BenchProcess, load: &QuotaLoad, go: &Go) -> anyhow::Result<QuotaPhases> {
    std::thread::sleep(SETTLE);
    let start_ns = monotonic_ns();
    std::thread::sleep(load.calm);
    let calm_ns = (start_ns, monotonic_ns());
    let told = strike(go)?;
    let attack_start = monotonic_ns();
    let attack_ns = (attack_start, attack_start + load.attack().as_nanos() as u64);
    let mut cpu_percent = Vec::new();
    let mut rss_mib = Vec::new();
    let mut before = UsageReading::take(server.id())?;
    while monotonic_ns() < attack_ns.1 {
        std::thread::sleep(BIN);
        let now = UsageReading::take(server.id())?;
        cpu_percent.push(now.used_since(&before).process_percent());
        rss_mib.push(rss_bytes(server.id())? as f64 / f64::from(1 << 20));
        before = now;
    }
    let attempts = told.blocking_recv().context("the attackers ended")?;
    let last_ns = attempts.last_ns.max(attack_ns.1);
    std::thread::sleep(load.calm);
    server.check_runs()?;
    Ok(QuotaPhases { calm_ns, attack_ns, last_ns, end_ns: monotonic_ns(), attempts, cpu_percent, rss_mib })
}

impl QuotaPhases {
    fn figures(
        self,
        got: &[BodyTimes],
        refusals: Refusals,
        load: &QuotaLoad,
    ) -> anyhow::Result<QuotaFigures> {
        let calm = rate(got, self.calm_ns);
        ensure!(calm > 0.0, "honest clients got nothing before the attack");
        let attacked: Vec<&BodyTimes> = within(got, self.attack_ns.0, self.attack_ns.1).collect();
        let duration_ns: u64 = attacked.iter().map(|got| got.done_ns - got.asked_ns).sum();
        let requests_per_second = attacked.len() as f64 / load.attack().as_secs_f64();
        Ok(QuotaFigures {
            requests_per_second,
            calm_requests_per_second: calm,
            mean_duration_ms: duration_ns as f64 / attacked.len().max(1) as f64 / 1e6,
            honest_goodput_ratio: requests_per_second / calm,
            recovery_s: recovery_s(got, self.last_ns, self.end_ns, calm),
            attempts: self.attempts.made,
            served_attempts: self.attempts.served,
            refused_after_ms: self.attempts.refused_after_ms(),
            attack_s: (self.last_ns - self.attack_ns.0) as f64 / 1e9,
            server_cpu_percent: Percentiles::from_samples(self.cpu_percent),
            server_rss_mib: Percentiles::from_samples(self.rss_mib),
            attack_packets: refusals.packets,
            refused_packets: refusals.refused,
            cpu_ns_per_refused_packet: refusals.cpu_ns.map(|ns| ns / refusals.packets.max(1) as f64),
            bpf_ns_per_refused_packet: refusals.bpf_ns.map(|ns| ns / refusals.packets.max(1) as f64),
            cpu_ns_per_refused_attempt: refusals.cpu_ns.map(|ns| ns / refusals.attempts.max(1) as f64),
            gate_cpu_percent: refusals.gate_cpu_percent,
            syscalls: refusals.syscalls,
            series: series(got, self.calm_ns.0, self.end_ns),
        })
    }
}

/// Numbers of packets and connection attempts, and CPU times, of an attack on a server that has no honest clients.
struct Refusals {
    packets: u64,
    attempts: u64,
    refused: Option<u64>,
    /// CPU time of the refusals, ns. `None` if the defence is in the kernel (not the gate) and its time cannot be
    /// separated from the attackers', or if there is no defence.
    cpu_ns: Option<f64>,
    bpf_ns: Option<f64>,
    gate_cpu_percent: Option<f64>,
    syscalls: u64,
}

/// Waits until the server has finished its earlier work. Then returns the CPU time per second that it uses without
/// clients.
fn still_ns_per_second(server: &BenchProcess) -> anyhow::Result<f64> {
    let start = Instant::now();
    loop {
        let before = UsageReading::take(server.id())?;
        std::thread::sleep(STILL);
        let used = UsageReading::take(server.id())?.used_since(&before);
        let still = used.process_ns as f64 / used.elapsed_ns.max(1) as f64 * 1e9;
        if still < STILL_NS || start.elapsed() > GIVEN_UP {
            return Ok(still);
        }
    }
}

impl Refusals {
    fn measure(
        site: &GateBenchSite,
        guard: &DefenceGuard<'_>,
        server: &BenchProcess,
        go: &Go,
        defence: Defence,
    ) -> anyhow::Result<Self> {
        let node = site.node(ATTACKERS)?;
        let device = &interface(node, ATTACKERS)?.device;
        let packets = || {
            node.enter(|| InterfacePackets::read_device(device))?.context("the attackers' interface is gone")
        };
        let sent = || anyhow::Ok(packets()?.sent);
        let still = still_ns_per_second(server)?;
        let mut calls = Syscalls::attach(server.id())?;
        let _statistics = Statistics::enable()?;
        let sent_before = sent()?;
        let refused_before = guard.refused()?;
        let bpf_before = guard.bpf_time()?;
        let calls_before = calls.counts()?.iter().sum::<u64>();
        let gate = |process| UsageReading::take(process).map_err(anyhow::Error::from);
        let gate_before = guard.process().map(gate).transpose()?;
        let before = UsageReading::take(server.id())?;
        let attempts = strike(go)?.blocking_recv().context("the attackers ended")?.made;
        let used = UsageReading::take(server.id())?.used_since(&before);
        let gate_used = guard.process().map(gate).transpose()?.zip(gate_before);
        // Subtract the CPU time that the server uses without clients.
        let server_ns = (used.process_ns as f64 - still * used.elapsed_ns as f64 / 1e9).max(0.0);
        let syscalls = calls.counts()?.iter().sum::<u64>() - calls_before;
        let bpf_ns = guard.bpf_time()?.zip(bpf_before).map(|(after, before)| after.since(before).ns as f64);
        let refused = guard.refused()?.zip(refused_before).map(|(after, before)| after - before);
        let is_known = defence.is_in_user_space() || defence.is_gate();
        Ok(Self {
            packets: sent()? - sent_before,
            attempts,
            refused,
            cpu_ns: is_known.then(|| server_ns + bpf_ns.unwrap_or(0.0)),
            bpf_ns,
            gate_cpu_percent: gate_used.map(|(after, before)| after.used_since(&before).process_percent()),
            syscalls,
        })
    }
}

fn within(got: &[BodyTimes], from: u64, to: u64) -> impl Iterator<Item = &BodyTimes> {
    got.iter().filter(move |got| (from..to).contains(&got.done_ns))
}

/// Returns the number of response bodies per second that were received in a period.
pub fn rate(got: &[BodyTimes], span: (u64, u64)) -> f64 {
    within(got, span.0, span.1).count() as f64 / ((span.1 - span.0).max(1) as f64 / 1e9)
}

/// Returns the seconds from `from` until the rate of honest requests is normal again. A rate is normal if it is at
/// least the share `RECOVERED` of `calm`, the rate before the attack. Returns `None` if the rate is not normal before
/// `end`.
fn recovery_s(got: &[BodyTimes], from: u64, end: u64, calm: f64) -> Option<f64> {
    let over = RECOVERED_OVER.as_nanos() as u64;
    let step = over / 50;
    let starts = (from..end.saturating_sub(over)).step_by(step as usize);
    let found = starts.into_iter().find(|start| rate(got, (*start, start + over)) >= RECOVERED * calm)?;
    Some((found - from) as f64 / 1e9)
}

fn series(got: &[BodyTimes], from: u64, to: u64) -> Vec<u64> {
    let bin = BIN.as_nanos() as u64;
    let mut bins = vec![0; ((to - from) / bin) as usize];
    for got in within(got, from, to) {
        if let Some(count) = bins.get_mut(((got.done_ns - from) / bin) as usize) {
            *count += 1;
        }
    }
    bins
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Returns the times of requests for response bodies. A body is received every `every_ms` milliseconds.
    fn steady(from_s: u64, to_s: u64, every_ms: u64) -> Vec<BodyTimes> {
        let times = (from_s * SECOND..to_s * SECOND).step_by(every_ms as usize * 1_000_000);
        times.map(|done_ns| BodyTimes { asked_ns: done_ns - 1_000_000, done_ns }).collect()
    }

    #[test]
    fn request_rate_is_computed_over_a_period_and_as_a_time_series() {
        let got = steady(1, 3, 10);
        assert!((rate(&got, (SECOND, 3 * SECOND)) - 100.0).abs() < 1e-9);
        assert_eq!(series(&got, SECOND, 2 * SECOND), vec![10; 10]);
    }

    #[test]
    fn recovery_ends_when_the_request_rate_reaches_90_percent_of_normal() {
        let at_once = steady(1, 6, 10);
        assert_eq!(recovery_s(&at_once, 2 * SECOND, 6 * SECOND, 100.0), Some(0.0));
        let late = steady(4, 6, 10);
        let recovered = recovery_s(&late, 2 * SECOND, 6 * SECOND, 100.0).expect("a recovery");
        // In the half second from 1.95 s on, 45 of the normal 50 response bodies are received, the required 90 %.
        assert!((recovered - 1.95).abs() < 0.02, "{recovered}");
        assert_eq!(recovery_s(&steady(1, 6, 20), 2 * SECOND, 6 * SECOND, 100.0), None);
    }
}
