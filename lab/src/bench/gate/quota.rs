//! eQUIC's experiment: clients that ask for one body after the other, and attackers over their quota.

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
        process::{Packets, Process},
        usage::Reading,
    },
    defence::{Defence, Guard, Limits},
    http3::{self, Attempts, Got},
    site::{ATTACKERS, CLIENTS, Site, addresses, interface, rss_bytes},
};
use crate::stats::Percentiles;

/// One connection per client.
const LIMITS: Limits = Limits::Connections(1);
/// Resolution of requests over time, and of CPU and memory samples.
pub const BIN: Duration = Duration::from_millis(100);
/// Recovered: over this time as many requests as this part of the calm rate.
const RECOVERED_OVER: Duration = Duration::from_millis(500);
const RECOVERED: f64 = 0.9;
const SETTLE: Duration = Duration::from_millis(500);
/// For what a server takes that does nothing.
const STILL: Duration = Duration::from_secs(1);
/// More CPU per second than a server takes that does nothing.
const STILL_NS: f64 = 5e6;
/// After which a server has given up all handshakes that nobody answers.
const GIVEN_UP: Duration = Duration::from_secs(40);

#[derive(Debug, Clone, Copy)]
pub struct Load {
    /// Of each attacker, in each of the two attacks.
    pub requests: u64,
    /// Of each attacker.
    pub rate_hz: u32,
    /// Before the attack, and after.
    pub calm: Duration,
}

impl Load {
    fn attack(&self) -> Duration {
        Duration::from_secs_f64(self.requests as f64 / f64::from(self.rate_hz))
    }
}

/// One defence, once. What does not apply is `null`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Figures {
    /// Bodies that honest clients got per second, during the attack and before it.
    pub requests_per_second: f64,
    pub calm_requests_per_second: f64,
    /// Of honest clients' requests that ended during the attack.
    pub mean_duration_ms: f64,
    pub honest_goodput_ratio: f64,
    /// From the attackers' last attempt.
    pub recovery_s: Option<f64>,
    /// Attempts of all attackers during the attack, those that got their body, and after how long on average the others
    /// were given up, by which side ever.
    pub attempts: u64,
    pub served_attempts: u64,
    pub refused_after_ms: Option<f64>,
    /// From the first attempt to the last one: attackers who do not get the CPU are late.
    pub attack_s: f64,
    /// CPU of the server, in percent of one core, and its memory; samples during the attack.
    pub server_cpu_percent: Option<Percentiles>,
    pub server_rss_mib: Option<Percentiles>,
    /// The rest is of a second attack, without honest traffic. Packets that attackers sent then, and that were refused
    /// by the defence's own count.
    pub attack_packets: u64,
    pub refused_packets: Option<u64>,
    /// CPU time of the server process beyond what it takes when nothing happens, and run time of the gate's BPF programs
    /// that packets meet; the latter alone; and the sum by attempts, which send more packets the further they get.
    pub cpu_ns_per_refused_packet: Option<f64>,
    pub bpf_ns_per_refused_packet: Option<f64>,
    pub cpu_ns_per_refused_attempt: Option<f64>,
    /// Of the gate's process, in percent of one core, whatever is refused: what it does every second.
    pub gate_cpu_percent: Option<f64>,
    /// Of the server process.
    pub syscalls: u64,
    /// Bodies that honest clients got, per `BIN` from the start.
    pub series: Vec<u64>,
}

pub fn run(site: &Site, defence: Defence, load: &Load) -> anyhow::Result<Figures> {
    let place = site.place()?;
    let guard = Guard::install(&place, defence, LIMITS)?;
    let mut server = site.start_server(defence, LIMITS)?;
    let target = site.target()?;
    let _answers = site.take_answers()?;
    let (clients, attackers) = (site.node(CLIENTS)?, site.node(ATTACKERS)?);
    let (go, ready) = mpsc::channel(1);
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = {
        let stop = stop.clone();
        move || stop.load(Ordering::Relaxed)
    };
    std::thread::scope(|scope| {
        let (honest_target, attacked) = (target.clone(), target.clone());
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
        // The first cause is the one to tell.
        let (watched, got) = (watched.and_then(|watched| Ok((watched, got?))))?;
        std::thread::sleep(SETTLE);
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

/// When what happened, and what the server used meanwhile.
struct Watched {
    calm_ns: (u64, u64),
    attack_ns: (u64, u64),
    last_ns: u64,
    end_ns: u64,
    attempts: Attempts,
    cpu_percent: Vec<f64>,
    rss_mib: Vec<f64>,
}

fn watch(server: &mut Process, load: &Load, go: &Go) -> anyhow::Result<Watched> {
    std::thread::sleep(SETTLE);
    let start_ns = monotonic_ns();
    std::thread::sleep(load.calm);
    let calm_ns = (start_ns, monotonic_ns());
    let told = strike(go)?;
    let attack_start = monotonic_ns();
    let attack_ns = (attack_start, attack_start + load.attack().as_nanos() as u64);
    let (mut cpu_percent, mut rss_mib) = (Vec::new(), Vec::new());
    let mut before = Reading::take(server.id())?;
    while monotonic_ns() < attack_ns.1 {
        std::thread::sleep(BIN);
        let now = Reading::take(server.id())?;
        cpu_percent.push(now.used_since(&before).process_percent());
        rss_mib.push(rss_bytes(server.id())? as f64 / f64::from(1 << 20));
        before = now;
    }
    let attempts = told.blocking_recv().context("the attackers ended")?;
    let last_ns = attempts.last_ns.max(attack_ns.1);
    std::thread::sleep(load.calm);
    server.check_runs()?;
    Ok(Watched { calm_ns, attack_ns, last_ns, end_ns: monotonic_ns(), attempts, cpu_percent, rss_mib })
}

impl Watched {
    fn figures(self, got: &[Got], refusals: Refusals, load: &Load) -> anyhow::Result<Figures> {
        let calm = rate(got, self.calm_ns);
        ensure!(calm > 0.0, "honest clients got nothing before the attack");
        let attacked: Vec<&Got> = within(got, self.attack_ns).collect();
        let duration_ns: u64 = attacked.iter().map(|got| got.done_ns - got.asked_ns).sum();
        let requests_per_second = attacked.len() as f64 / load.attack().as_secs_f64();
        Ok(Figures {
            requests_per_second,
            calm_requests_per_second: calm,
            mean_duration_ms: duration_ns as f64 / attacked.len().max(1) as f64 / 1e6,
            honest_goodput_ratio: requests_per_second / calm,
            recovery_s: recovery_s(got, self.last_ns, self.end_ns, calm),
            attempts: self.attempts.made,
            served_attempts: self.attempts.served,
            refused_after_ms: self.attempts.refused_after_ms(),
            attack_s: (self.last_ns - self.attack_ns.0) as f64 / 1e9,
            server_cpu_percent: Percentiles::of(self.cpu_percent),
            server_rss_mib: Percentiles::of(self.rss_mib),
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

/// An attack on a server that does nothing else.
struct Refusals {
    packets: u64,
    attempts: u64,
    refused: Option<u64>,
    /// `None`: nothing is refused, or the kernel does it and the time cannot be told from the attackers'.
    cpu_ns: Option<f64>,
    bpf_ns: Option<f64>,
    gate_cpu_percent: Option<f64>,
    syscalls: u64,
}

/// What a process takes per second that is left alone, once it has done with what went before.
fn still_ns_per_second(server: &Process) -> anyhow::Result<f64> {
    let start = Instant::now();
    loop {
        let before = Reading::take(server.id())?;
        std::thread::sleep(STILL);
        let used = Reading::take(server.id())?.used_since(&before);
        let still = used.process_ns as f64 / used.elapsed_ns.max(1) as f64 * 1e9;
        if still < STILL_NS || start.elapsed() > GIVEN_UP {
            return Ok(still);
        }
    }
}

impl Refusals {
    fn measure(
        site: &Site,
        guard: &Guard<'_>,
        server: &Process,
        go: &Go,
        defence: Defence,
    ) -> anyhow::Result<Self> {
        let node = site.node(ATTACKERS)?;
        let device = &interface(node, ATTACKERS)?.device;
        let packets = || node.enter(|| Packets::of(device))?.context("the attackers' interface is gone");
        let sent = || anyhow::Ok(packets()?.sent);
        let still = still_ns_per_second(server)?;
        let mut calls = Syscalls::attach(server.id())?;
        let _statistics = Statistics::enable()?;
        let (sent_before, refused_before) = (sent()?, guard.refused()?);
        let (bpf_before, calls_before) = (guard.bpf_time()?, calls.counts()?.iter().sum::<u64>());
        let gate = |process| Reading::take(process).map_err(anyhow::Error::from);
        let gate_before = guard.process().map(gate).transpose()?;
        let before = Reading::take(server.id())?;
        let attempts = strike(go)?.blocking_recv().context("the attackers ended")?.made;
        let used = Reading::take(server.id())?.used_since(&before);
        let gate_used = guard.process().map(gate).transpose()?.zip(gate_before);
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

fn within(got: &[Got], (from, to): (u64, u64)) -> impl Iterator<Item = &Got> {
    got.iter().filter(move |got| (from..to).contains(&got.done_ns))
}

/// Per second.
pub fn rate(got: &[Got], span: (u64, u64)) -> f64 {
    within(got, span).count() as f64 / ((span.1 - span.0).max(1) as f64 / 1e9)
}

/// When, from `from` on, the rate is what it was for the first time; `None`: not before `end`.
fn recovery_s(got: &[Got], from: u64, end: u64, calm: f64) -> Option<f64> {
    let over = RECOVERED_OVER.as_nanos() as u64;
    let step = over / 50;
    let starts = (from..end.saturating_sub(over)).step_by(step as usize);
    let found = starts.into_iter().find(|start| rate(got, (*start, start + over)) >= RECOVERED * calm)?;
    Some((found - from) as f64 / 1e9)
}

fn series(got: &[Got], from: u64, to: u64) -> Vec<u64> {
    let bin = BIN.as_nanos() as u64;
    let mut bins = vec![0; ((to - from) / bin) as usize];
    for got in within(got, (from, to)) {
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

    /// One body every `every_ms` milliseconds.
    fn steady(from_s: u64, to_s: u64, every_ms: u64) -> Vec<Got> {
        let times = (from_s * SECOND..to_s * SECOND).step_by(every_ms as usize * 1_000_000);
        times.map(|done_ns| Got { asked_ns: done_ns - 1_000_000, done_ns }).collect()
    }

    #[test]
    fn requests_over_time() {
        let got = steady(1, 3, 10);
        assert!((rate(&got, (SECOND, 3 * SECOND)) - 100.0).abs() < 1e-9);
        assert_eq!(series(&got, SECOND, 2 * SECOND), vec![10; 10]);
    }

    #[test]
    fn recovery_is_when_the_rate_is_back() {
        let at_once = steady(1, 6, 10);
        assert_eq!(recovery_s(&at_once, 2 * SECOND, 6 * SECOND, 100.0), Some(0.0));
        let late = steady(4, 6, 10);
        let recovered = recovery_s(&late, 2 * SECOND, 6 * SECOND, 100.0).expect("a recovery");
        // Half a second from 1.95 s on has 45 of the 50.
        assert!((recovered - 1.95).abs() < 0.02, "{recovered}");
        assert_eq!(recovery_s(&steady(1, 6, 20), 2 * SECOND, 6 * SECOND, 100.0), None);
    }
}
