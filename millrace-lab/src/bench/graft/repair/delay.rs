//! The delay of messages at a rate: full reliability, a bounded part of it, parity, QUIC's datagrams, and TCP.

use std::io::{Read as _, Write as _};
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
use serde_json::{Value, json};

use super::datagrams::{Graft, Outcome, Pace, Run, message, read};
use super::{Args, quic, site};
use crate::bench::graft::flow::Flow;
use crate::bench::site::Site;
use crate::bench::stats::Percentiles;
use crate::bench::table::columns;
use crate::progress::Progress;

/// Of the messages that may be given up, per mille.
const GIVE_UP: u64 = 20;
const PROTECTED: u64 = 8;

enum Arm {
    Functions { name: &'static str, functions: &'static [&'static str] },
    Tcp(&'static str),
    Quic,
}

const ARMS: [Arm; 7] = [
    Arm::Functions { name: "repair", functions: &["window", "number", "repair", "acknowledge"] },
    Arm::Functions { name: "gobackn", functions: &["window", "gobackn", "number", "acknowledge"] },
    Arm::Functions { name: "partial", functions: &["window", "number", "partial", "acknowledge"] },
    Arm::Functions { name: "fec", functions: &["number", "fec"] },
    Arm::Tcp("cubic"),
    Arm::Tcp("bbr"),
    Arm::Quic,
];

pub fn run(args: &Args) -> anyhow::Result<(Vec<Value>, String)> {
    let site = site(args.delay_rtt_ms, args.delay_loss, None)?;
    let progress = Progress::of(ARMS.len() * args.rounds);
    let mut outcomes: Vec<Vec<Outcome>> = ARMS.iter().map(|_| Vec::new()).collect();
    for round in 1..=args.rounds {
        for (arm, outcomes) in ARMS.iter().zip(&mut outcomes) {
            let label = format!("round {round}, {}", arm.name());
            progress.begin(label.clone());
            outcomes.push(args.measure_arm(&site, arm)?);
            progress.next(label);
        }
    }
    drop(progress);
    let rows = ARMS.iter().zip(&outcomes).map(|(arm, outcomes)| arm.json(args, outcomes)).collect();
    let head = ["messages", "sent", "lost", "lost %", "p50 ms", "p99 ms", "max ms"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    lines.extend(ARMS.iter().zip(&outcomes).filter_map(|(arm, outcomes)| arm.line(outcomes)));
    Ok((rows, columns(&lines)))
}

impl Args {
    fn measure_arm(&self, site: &Site, arm: &Arm) -> anyhow::Result<Outcome> {
        let outcome = match arm {
            Arm::Functions { functions, .. } => self.functions(site, functions)?,
            Arm::Tcp(control) => self.tcp(site, control)?,
            Arm::Quic => quic::measure(site, &self.plan())?,
        };
        ensure!(outcome.wrong == 0, "{}: {} messages were not as they were sent", arm.name(), outcome.wrong);
        Ok(outcome)
    }

    fn functions(&self, site: &Site, functions: &[&str]) -> anyhow::Result<Outcome> {
        let rtt_us = u64::from(self.delay_rtt_ms) * 1000;
        let parameters = format!(
            "[parameters.window]\npackets = 256\n[parameters.fec]\npackets = {PROTECTED}\n\
             [parameters.repair]\ntries = 0\nretry_us = {retry}\n[parameters.gobackn]\nretry_us = {back}\n\
             [parameters.partial]\nretry_us = {retry}\ndeadline_ms = {deadline}\ngive_up_permille = {GIVE_UP}\n",
            retry = rtt_us * 3 / 2 + 10_000,
            back = rtt_us * 3 + 20_000,
            deadline = self.delay_rtt_ms / 4 + 1,
        );
        self.plan().measure(site, &Graft { functions, parameters })
    }

    fn plan(&self) -> Run {
        Run {
            pace: Pace::Rate(self.rate),
            bytes: self.bytes,
            sending: Duration::from_secs(self.seconds),
            // A few rounds of repair.
            grace: Duration::from_millis(500 + 6 * u64::from(self.delay_rtt_ms)),
        }
    }

    /// The same messages in a stream.
    fn tcp(&self, site: &Site, control: &str) -> anyhow::Result<Outcome> {
        let plan = self.plan();
        let Flow { mut sender, mut receiver, .. } = Flow::open(site.relay()?, site.subscribers()?, control)?;
        sender.set_nodelay(true)?;
        receiver.set_read_timeout(Some(Duration::from_secs(60)))?;
        let (base, bytes) = (Instant::now(), self.bytes);
        let reading = std::thread::spawn(move || {
            let (mut outcome, mut buffer) = (Outcome::default(), vec![0; bytes]);
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
        while base.elapsed() < plan.sending {
            let due = base + Duration::from_secs(sent) / self.rate;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            sender.write_all(&message(sent, base, bytes))?;
            sent += 1;
        }
        drop(sender);
        let outcome = reading.join().map_err(|_| anyhow!("the receiver panicked"))?;
        Ok(Outcome { sent, ..outcome })
    }
}

impl Arm {
    fn name(&self) -> String {
        match self {
            Self::Functions { name, .. } => (*name).to_owned(),
            Self::Tcp(control) => format!("TCP {control}"),
            Self::Quic => "QUIC datagrams".to_owned(),
        }
    }

    fn line(&self, outcomes: &[Outcome]) -> Option<Vec<String>> {
        let (sent, lost) = lost(outcomes);
        let delays = delays(outcomes)?;
        let mut line = vec![self.name(), sent.to_string(), lost.to_string()];
        line.push(format!("{:.2}", lost as f64 * 100.0 / sent.max(1) as f64));
        line.extend([delays.p50, delays.p99, delays.max].map(|ms| format!("{ms:.0}")));
        Some(line)
    }

    fn json(&self, args: &Args, outcomes: &[Outcome]) -> Value {
        let (sent, lost) = lost(outcomes);
        let of = |outcome: &Outcome| {
            json!({
                "sent": outcome.sent, "received": outcome.received, "disordered": outcome.disordered,
                "delay_ms": Percentiles::of(outcome.delays_ms.clone()),
                "sender": outcome.sender, "receiver": outcome.receiver,
            })
        };
        let functions = match self {
            Self::Functions { functions, .. } => json!(functions),
            Self::Tcp(_) | Self::Quic => Value::Null,
        };
        json!({
            "part": "delay", "arm": self.name(), "functions": functions, "rtt_ms": args.delay_rtt_ms,
            "loss_percent": args.delay_loss, "rate": args.rate, "bytes": args.bytes, "seconds": args.seconds,
            "sent": sent, "lost": lost, "delay_ms": delays(outcomes),
            "rounds": outcomes.iter().map(of).collect::<Vec<_>>(),
        })
    }
}

fn lost(outcomes: &[Outcome]) -> (u64, u64) {
    let sum = |of: fn(&Outcome) -> u64| outcomes.iter().map(of).sum::<u64>();
    let sent = sum(|outcome| outcome.sent);
    (sent, sent.saturating_sub(sum(|outcome| outcome.received)))
}

/// Of all rounds.
fn delays(outcomes: &[Outcome]) -> Option<Percentiles> {
    Percentiles::of(outcomes.iter().flat_map(|outcome| outcome.delays_ms.clone()).collect())
}
