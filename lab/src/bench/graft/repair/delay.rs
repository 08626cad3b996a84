//! Measures the delay of messages sent at a fixed rate: with full reliability, bounded loss, parity, QUIC datagrams,
//! and TCP.

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
use serde_json::{Value, json};

use super::datagrams::{DatagramPace, DatagramRun, FunctionListSettings, RepairOutcome, message, read};
use super::{RepairArgs, quic, site};
use crate::bench::graft::flow::BegunTransfer;
use crate::bench::site::BenchSite;
use crate::bench::table::columns;
use crate::progress::BenchProgress;
use crate::stats::Percentiles;

/// Number of packets that each parity packet protects.
const PROTECTED: u64 = 8;

enum DelayMethod {
    Functions(DelayFunctions),
    Tcp(&'static str),
    Quic,
}

struct DelayFunctions {
    name: &'static str,
    functions: &'static [&'static str],
    /// Largest share of messages that the packet function `partial` (bounded loss) may leave undelivered, per mille.
    give_up: u64,
}

const fn list(name: &'static str, functions: &'static [&'static str], give_up: u64) -> DelayMethod {
    DelayMethod::Functions(DelayFunctions { name, functions, give_up })
}

const PARTIAL: &[&str] = &["window", "number", "partial", "acknowledge"];

const CANDIDATES: [DelayMethod; 9] = [
    list("repair", &["window", "number", "repair", "acknowledge"], 0),
    list("gobackn", &["window", "gobackn", "number", "acknowledge"], 0),
    list("partial 20", PARTIAL, 20),
    list("partial 5", PARTIAL, 5),
    list("fec", &["number", "fec"], 0),
    list("fec, repair", &["window", "number", "fec", "repair", "acknowledge"], 0),
    DelayMethod::Tcp("cubic"),
    DelayMethod::Tcp("bbr"),
    DelayMethod::Quic,
];

pub fn run(args: &RepairArgs) -> anyhow::Result<(Vec<Value>, String)> {
    let site = site(args.delay_rtt_ms, args.delay_loss, None)?;
    let progress = BenchProgress::with_steps(CANDIDATES.len() * args.rounds);
    let mut outcomes: Vec<Vec<RepairOutcome>> = CANDIDATES.iter().map(|_| Vec::new()).collect();
    for round in 1..=args.rounds {
        for (candidate, outcomes) in CANDIDATES.iter().zip(&mut outcomes) {
            let label = format!("round {round}, {}", candidate.name());
            progress.begin(label.clone());
            outcomes.push(args.measure_candidate(&site, candidate)?);
            progress.next(label);
        }
    }
    drop(progress);
    let rows = CANDIDATES
        .iter()
        .zip(&outcomes)
        .map(|(candidate, outcomes)| candidate.json(args, outcomes))
        .collect();
    let head = ["messages", "sent", "lost", "lost %", "p50 ms", "p99 ms", "max ms", "p99 of owed ms"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let owed = args.owed();
    lines.extend(
        CANDIDATES.iter().zip(&outcomes).filter_map(|(candidate, outcomes)| candidate.line(outcomes, owed)),
    );
    Ok((rows, columns(&lines)))
}

impl RepairArgs {
    fn measure_candidate(&self, site: &BenchSite, candidate: &DelayMethod) -> anyhow::Result<RepairOutcome> {
        let outcome = match candidate {
            DelayMethod::Functions(list) => self.functions(site, list)?,
            DelayMethod::Tcp(control) => self.tcp(site, control)?,
            DelayMethod::Quic => quic::measure(site, &self.plan())?,
        };
        ensure!(
            outcome.wrong == 0,
            "{}: {} messages were altered or duplicated",
            candidate.name(),
            outcome.wrong
        );
        if let DelayMethod::Functions(DelayFunctions { functions: PARTIAL, give_up, .. }) = candidate {
            let sent = outcome.sent;
            let lost = outcome.sent.saturating_sub(outcome.received);
            ensure!(
                lost * 1000 <= sent * give_up,
                "{}: {lost} of {sent} messages were lost, more than allowed",
                candidate.name()
            );
        }
        Ok(outcome)
    }

    fn functions(&self, site: &BenchSite, list: &DelayFunctions) -> anyhow::Result<RepairOutcome> {
        let rtt_us = u64::from(self.delay_rtt_ms) * 1000;
        let parameters = format!(
            "[sessions.parameters.window]\npackets = 256\n[sessions.parameters.fec]\npackets = {PROTECTED}\n\
             [sessions.parameters.repair]\ntries = 0\nretry_us = {retry}\n[sessions.parameters.gobackn]\nretry_us = {back}\n\
             [sessions.parameters.partial]\nretry_us = {retry}\ndeadline_ms = {deadline}\ngive_up_permille = {give_up}\n",
            retry = rtt_us * 3 / 2 + 10_000,
            back = rtt_us * 3 + 20_000,
            deadline = self.delay_rtt_ms / 4 + 1,
            give_up = list.give_up,
        );
        let functions = list.functions;
        self.plan()
            .measure(site, &FunctionListSettings { functions, parameters, ..FunctionListSettings::default() })
    }

    /// Returns how many messages are due in all rounds together.
    fn owed(&self) -> u64 {
        u64::from(self.rate) * self.seconds * self.rounds as u64
    }

    fn plan(&self) -> DatagramRun {
        DatagramRun {
            pace: DatagramPace::Rate(self.rate),
            bytes: self.bytes,
            sending: Duration::from_secs(self.seconds),
            // Time to wait for messages after the last one was sent. It is long enough to repair a lost message several
            // times.
            grace: Duration::from_millis(500 + 6 * u64::from(self.delay_rtt_ms)),
        }
    }

    /// Sends the messages of a run over a TCP connection instead of a session of packet grafts.
    fn tcp(&self, site: &BenchSite, control: &str) -> anyhow::Result<RepairOutcome> {
        let plan = self.plan();
        let BegunTransfer { mut sender, mut receiver, .. } =
            BegunTransfer::open(site.relay()?, site.subscribers()?, control)?;
        sender.set_nodelay(true)?;
        receiver.set_read_timeout(Some(Duration::from_secs(60)))?;
        let base = Instant::now();
        let bytes = self.bytes;
        let reading = std::thread::spawn(move || {
            let mut outcome = RepairOutcome::default();
            let mut buffer = vec![0; bytes];
            while receiver.read_exact(&mut buffer).is_ok() {
                match read(&buffer, base, bytes) {
                    Some((_, delay_ms)) => {
                        outcome.received += 1;
                        outcome.delays_ms.push(delay_ms);
                    }
                    None => outcome.wrong += 1,
                }
            }
            outcome
        });
        let mut sent = 0;
        while let Some(due) = plan.due(sent, base) {
            std::thread::sleep(due.saturating_sub(base.elapsed()));
            sender.write_all(&message(sent, due, bytes))?;
            sent += 1;
        }
        drop(sender);
        let outcome = reading.join().map_err(|_| anyhow!("the receiver panicked"))?;
        Ok(RepairOutcome { sent, ..outcome })
    }
}

impl DelayMethod {
    fn name(&self) -> String {
        match self {
            Self::Functions(list) => list.name.to_owned(),
            Self::Tcp(control) => format!("TCP {control}"),
            Self::Quic => "QUIC datagrams".to_owned(),
        }
    }

    fn line(&self, outcomes: &[RepairOutcome], owed: u64) -> Option<Vec<String>> {
        let (sent, lost) = lost(outcomes);
        let delays = delays(outcomes)?;
        let mut line = vec![self.name(), sent.to_string(), lost.to_string()];
        line.push(format!("{:.2}", lost as f64 * 100.0 / sent.max(1) as f64));
        line.extend([delays.p50, delays.p99, delays.max].map(|ms| format!("{ms:.0}")));
        line.push(p99_of_owed(outcomes, owed).map_or_else(|| "lost".to_owned(), |ms| format!("{ms:.0}")));
        Some(line)
    }

    fn json(&self, args: &RepairArgs, outcomes: &[RepairOutcome]) -> Value {
        let (sent, lost) = lost(outcomes);
        let of = |outcome: &RepairOutcome| {
            json!({
                "sent": outcome.sent, "received": outcome.received, "disordered": outcome.disordered,
                "delay_ms": Percentiles::from_samples(outcome.delays_ms.clone()),
                "sender": outcome.sender, "receiver": outcome.receiver,
            })
        };
        let functions = match self {
            Self::Functions(list) => json!(list.functions),
            Self::Tcp(_) | Self::Quic => Value::Null,
        };
        json!({
            "part": "delay", "candidate": self.name(), "functions": functions, "rtt_ms": args.delay_rtt_ms,
            "loss_percent": args.delay_loss, "rate": args.rate, "bytes": args.bytes, "seconds": args.seconds,
            "sent": sent, "lost": lost, "delay_ms": delays(outcomes), "owed": args.owed(), "p99_of_owed_ms": p99_of_owed(outcomes, args.owed()),
            "rounds": outcomes.iter().map(of).collect::<Vec<_>>(),
        })
    }
}

fn lost(outcomes: &[RepairOutcome]) -> (u64, u64) {
    let sum = |of: fn(&RepairOutcome) -> u64| outcomes.iter().map(of).sum::<u64>();
    let sent = sum(|outcome| outcome.sent);
    (sent, sent.saturating_sub(sum(|outcome| outcome.received)))
}

/// Returns the 99th percentile of the delays of all messages that were due, ms. A message that was lost, or not sent in
/// time, counts as infinitely late. Returns `None` if the percentile is infinite.
fn p99_of_owed(outcomes: &[RepairOutcome], owed: u64) -> Option<f64> {
    let mut delays: Vec<f64> = outcomes.iter().flat_map(|outcome| outcome.delays_ms.clone()).collect();
    delays.resize(delays.len().max(usize::try_from(owed).ok()?), f64::INFINITY);
    Percentiles::from_samples(delays).map(|delays| delays.p99).filter(|p99| p99.is_finite())
}

/// Returns the percentiles of the delays of all rounds together.
fn delays(outcomes: &[RepairOutcome]) -> Option<Percentiles> {
    Percentiles::from_samples(outcomes.iter().flat_map(|outcome| outcome.delays_ms.clone()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Builds the result of a run in which `come` messages arrive, with delays of 1, 2, 3 ... ms, and `lost` messages
    /// are lost.
    fn outcome(come: u64, lost: u64) -> RepairOutcome {
        let delays_ms = (1..=come).map(|ms| ms as f64).collect();
        RepairOutcome { sent: come + lost, received: come, delays_ms, ..RepairOutcome::default() }
    }

    #[test]
    fn p99_delay_is_infinite_if_over_one_percent_of_messages_are_lost() {
        assert_eq!(p99_of_owed(&[outcome(100, 0)], 100), Some(99.0));
        assert_eq!(p99_of_owed(&[outcome(99, 1)], 100), Some(99.0));
        assert_eq!(p99_of_owed(&[outcome(98, 2)], 100), None);
        assert_eq!(p99_of_owed(&[outcome(98, 0)], 100), None, "two were never sent");
        assert_eq!(p99_of_owed(&[outcome(200, 0), outcome(196, 4)], 400), Some(200.0));
        assert_eq!(p99_of_owed(&[], 0), None);
    }
}
