//! Measures the one-way delay and the CPU time of messages that applications send and receive in sessions through
//! Millrace's client library, unencrypted and encrypted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail, ensure};
use millrace_messages::{Error, Received, Session};
use nix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};

use super::super::peers::Peers;
use super::super::repair::datagrams::{message, read};
use super::SessionArgs;
use crate::bench::site::BenchSite;
use crate::bench::table::columns;
use crate::bench::usage::UsageReading;
use crate::progress::BenchProgress;
use crate::stats::Percentiles;

const TURN: Duration = Duration::from_millis(20);
/// Longest wait for messages that are still on their way after the last one was sent.
const GRACE: Duration = Duration::from_millis(500);

#[derive(Clone, Copy)]
struct ReceiveVariant {
    is_sealed: bool,
}

const CANDIDATES: [ReceiveVariant; 2] =
    [ReceiveVariant { is_sealed: false }, ReceiveVariant { is_sealed: true }];

#[derive(Default)]
struct ReceiveOutcome {
    sent: u64,
    delays_us: Vec<f64>,
    /// CPU time of the receiving thread, ns.
    receiver_ns: u64,
    /// CPU time of the whole machine, ns.
    machine_ns: u64,
}

impl ReceiveVariant {
    fn sealed(self) -> &'static str {
        if self.is_sealed { "sealed" } else { "clear" }
    }
}

pub fn run(args: &SessionArgs, site: &BenchSite) -> anyhow::Result<(Vec<Value>, String)> {
    let progress = BenchProgress::with_steps(CANDIDATES.len() * args.rounds);
    let mut outcomes: Vec<Vec<ReceiveOutcome>> = CANDIDATES.iter().map(|_| Vec::new()).collect();
    for round in 1..=args.rounds {
        for (candidate, outcomes) in CANDIDATES.iter().zip(&mut outcomes) {
            let label = format!("round {round}, {}", candidate.sealed());
            progress.begin(label.clone());
            outcomes.push(args.receive_by(site, *candidate).with_context(|| label.clone())?);
            progress.next(label);
        }
    }
    drop(progress);
    let head = ["", "messages", "lost", "p50 us", "p99 us", "receiver ns", "machine ns"];
    let mut rows = Vec::new();
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (candidate, outcomes) in CANDIDATES.iter().zip(&outcomes) {
        let sum = |of: fn(&ReceiveOutcome) -> u64| outcomes.iter().map(of).sum::<u64>();
        let delays: Vec<f64> = outcomes.iter().flat_map(|outcome| outcome.delays_us.clone()).collect();
        let sent = sum(|it| it.sent);
        let come = delays.len() as u64;
        let Some(delays) = Percentiles::from_samples(delays) else { continue };
        let each = |ns: u64| ns as f64 / come as f64;
        let receiver_ns = each(sum(|it| it.receiver_ns));
        let machine_ns = each(sum(|it| it.machine_ns));
        rows.push(json!({
            "part": "receive", "sealed": candidate.is_sealed, "functions": ["number"],
            "rate": args.rate, "bytes": args.bytes, "seconds": args.seconds, "rounds": args.rounds,
            "sent": sent, "lost": sent - come, "delay_us": delays,
            "receiver_ns_per_message": receiver_ns, "machine_ns_per_message": machine_ns,
        }));
        let mut line = vec![candidate.sealed().to_owned()];
        line.extend([sent, sent - come].map(|count| count.to_string()));
        line.extend([delays.p50, delays.p99, receiver_ns, machine_ns].map(|it| format!("{it:.0}")));
        lines.push(line);
    }
    Ok((rows, columns(&lines)))
}

impl SessionArgs {
    fn receive_by(&self, site: &BenchSite, candidate: ReceiveVariant) -> anyhow::Result<ReceiveOutcome> {
        let graft = "[[graft]]\nname = \"once\"\nfunctions = [\"number\"]\n";
        let peers = Peers::start(site, graft, &format!("clear = {}\n", !candidate.is_sealed))?;
        let listener = peers.asks("far").listen()?;
        let mut near = peers.opened(&["once"])?;
        let mut far = listener.accept()?;
        far.set_timeout(Some(TURN));
        let base = Instant::now();
        let is_over = AtomicBool::new(false);
        let before = UsageReading::take(std::process::id())?;
        let (mut outcome, sent) = std::thread::scope(|scope| {
            let receiving = scope.spawn(|| self.take_all(&mut far, base, &is_over));
            let sent = self.send_all(&mut near, base);
            std::thread::sleep(GRACE);
            is_over.store(true, Ordering::Relaxed);
            let outcome = receiving.join().map_err(|_| anyhow!("the receiver panicked"))??;
            Ok::<_, anyhow::Error>((outcome, sent?))
        })?;
        outcome.machine_ns = UsageReading::take(std::process::id())?.used_since(&before).machine_ns;
        outcome.sent = sent;
        Ok(outcome)
    }

    fn send_all(&self, near: &mut Session, base: Instant) -> anyhow::Result<u64> {
        let count = self.seconds * u64::from(self.rate);
        for number in 0..count {
            let due = base + Duration::from_secs(number) / self.rate;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            near.send(&message(number, base.elapsed(), self.bytes))?;
        }
        Ok(count)
    }

    fn take_all(
        &self,
        far: &mut Session,
        base: Instant,
        is_over: &AtomicBool,
    ) -> anyhow::Result<ReceiveOutcome> {
        let begin = thread_time()?;
        let mut outcome = ReceiveOutcome::default();
        let mut seen = std::collections::BTreeSet::new();
        while !is_over.load(Ordering::Relaxed) {
            let got = match far.receive() {
                Ok(Received::Message(bytes)) => bytes,
                Ok(Received::Finished) => bail!("the sender has finished too early"),
                Err(Error::TimedOut) => continue,
                Err(error) => return Err(error.into()),
            };
            let (number, delay_ms) = read(&got, base, self.bytes).context("a message was altered")?;
            ensure!(seen.insert(number), "message {number} arrived twice");
            outcome.delays_us.push(delay_ms * 1e3);
        }
        outcome.receiver_ns = (thread_time()? - begin).as_nanos() as u64;
        Ok(outcome)
    }
}

pub fn thread_time() -> anyhow::Result<Duration> {
    Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?.into())
}
