//! A sender that a full window stops: it is told by the daemon when there is room, or tries again by itself.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use millrace_graft::message::{Error, Received, Session};
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::{Value, json};

use super::super::peers::Peers;
use super::super::repair::datagrams::{message, read};
use super::super::repair::{Fill, site};
use super::Args;
use super::receive::thread_time;
use crate::bench::table::columns;
use crate::bench::usage::Reading;
use crate::progress::Progress;
use crate::stats::Spread;

const WINDOW: u32 = 64;
/// With headers some 1300 on the wire.
const BYTES: usize = 1200;
const ON_THE_WIRE: u64 = 1300;
/// Between two tries of a sender that nobody tells: at first, and at most.
const AGAIN: Duration = Duration::from_micros(100);
const AGAIN_MOST: Duration = Duration::from_millis(4);
const TURN: Duration = Duration::from_millis(50);

#[derive(Clone, Copy)]
enum Arm {
    Told,
    Tries,
}

const ARMS: [Arm; 2] = [Arm::Told, Arm::Tries];

/// Of one run.
struct Outcome {
    /// A second.
    messages: f64,
    /// Of the thread that sends, for a message.
    sender_us: f64,
    /// Times that it has slept, for a message.
    sleeps: f64,
    /// Of the daemon at its host, for a message.
    daemon_us: f64,
}

type Figure = fn(&Outcome) -> f64;

const FIGURES: [(&str, Figure); 4] = [
    ("messages_s", |it| it.messages),
    ("sender_us_per_message", |it| it.sender_us),
    ("sleeps_per_message", |it| it.sleeps),
    ("daemon_us_per_message", |it| it.daemon_us),
];

impl Arm {
    fn name(self) -> &'static str {
        match self {
            Self::Told => "told",
            Self::Tries => "tries",
        }
    }
}

pub fn run(args: &Args) -> anyhow::Result<(Vec<Value>, String)> {
    let progress = Progress::of(args.room_rtt_ms.len() * ARMS.len() * args.rounds);
    let head = ["RTT ms", "room is", "messages/s", "sender us", "sleeps", "daemon us"];
    let (mut rows, mut lines) = (Vec::new(), vec![head.map(str::to_owned).to_vec()]);
    for rtt_ms in &args.room_rtt_ms {
        let site = site(*rtt_ms, 0.0, Some(Fill { packets: WINDOW, bytes: ON_THE_WIRE }))?;
        let grafts = format!(
            "[[graft]]\nname = \"all\"\nfunctions = [\"window\", \"number\", \"repair\", \"acknowledge\"]\n\
             [parameters.window]\npackets = {WINDOW}\n[parameters.repair]\ntries = 0\nretry_us = {}\n",
            u64::from(*rtt_ms) * 1500 + 10_000
        );
        let peers = Peers::start(&site, &grafts, "")?;
        let listener = peers.asks("far").listen()?;
        let mut outcomes = ARMS.map(|_| Vec::new());
        for round in 1..=args.rounds {
            for (arm, outcomes) in ARMS.iter().zip(&mut outcomes) {
                let label = format!("round {round}, {}, {rtt_ms} ms", arm.name());
                progress.begin(label.clone());
                let near = peers.opened(&["reliability"]).with_context(|| label.clone())?;
                let far = listener.accept()?;
                outcomes.push(args.fill(*arm, near, far, peers.near.id()).with_context(|| label.clone())?);
                progress.next(label);
            }
        }
        for (arm, outcomes) in ARMS.iter().zip(&outcomes) {
            let spread =
                |of: Figure| Spread::of(&outcomes.iter().map(of).collect::<Vec<_>>()).context("no rounds");
            let spreads = FIGURES.iter().map(|(_, of)| spread(*of)).collect::<anyhow::Result<Vec<_>>>()?;
            let mut row = json!({
                "part": "room", "room": arm.name(), "rtt_ms": rtt_ms, "window": WINDOW, "bytes": BYTES,
                "seconds": args.seconds, "rounds": args.rounds,
            });
            for ((name, _), spread) in FIGURES.iter().zip(&spreads) {
                row[name] = json!(spread);
            }
            rows.push(row);
            let mut line = vec![rtt_ms.to_string(), arm.name().to_owned()];
            line.extend(spreads.iter().zip([0, 1, 3, 1]).map(|(it, digits)| {
                format!("{:.digits$} ({:.digits$} to {:.digits$})", it.median, it.min, it.max)
            }));
            lines.push(line);
        }
    }
    drop(progress);
    Ok((rows, columns(&lines)))
}

impl Args {
    /// As much as the window lets through.
    fn fill(&self, arm: Arm, mut near: Session, mut far: Session, daemon: u32) -> anyhow::Result<Outcome> {
        let (base, is_over) = (Instant::now(), AtomicBool::new(false));
        far.set_timeout(Some(TURN));
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| count(&mut far, base, &is_over));
            let sending = scope.spawn(|| self.send_until_over(arm, &mut near, base, daemon, &is_over));
            let sent = sending.join().map_err(|_| anyhow!("the sender panicked"));
            is_over.store(true, Ordering::Relaxed);
            let come = receiving.join().map_err(|_| anyhow!("the receiver panicked"))??;
            let [sender_us, sleeps, daemon_us] = sent??.map(|it| it / come.max(1) as f64);
            Ok(Outcome { messages: come as f64 / self.seconds as f64, sender_us, sleeps, daemon_us })
        })
    }

    /// CPU time in us, how often it has slept, and the daemon's CPU time in us.
    fn send_until_over(
        &self,
        arm: Arm,
        near: &mut Session,
        base: Instant,
        daemon: u32,
        is_over: &AtomicBool,
    ) -> anyhow::Result<[f64; 3]> {
        match arm {
            Arm::Told => near.set_timeout(Some(TURN)),
            Arm::Tries => near.set_nonblocking(true),
        }
        let slept = || getrusage(UsageWho::RUSAGE_THREAD).map(|usage| usage.voluntary_context_switches());
        let (cpu, sleeps, at_daemon) = (thread_time()?, slept()?, Reading::take(daemon)?);
        let (mut number, mut pause) = (0, AGAIN);
        while base.elapsed() < Duration::from_secs(self.seconds) {
            match near.send(&message(number, base.elapsed(), BYTES)) {
                Ok(()) => (number, pause) = (number + 1, AGAIN),
                Err(Error::TimedOut) => {}
                Err(Error::WouldBlock) => {
                    std::thread::sleep(pause);
                    pause = (2 * pause).min(AGAIN_MOST);
                }
                Err(error) => return Err(error.into()),
            }
        }
        // What comes later is not counted.
        is_over.store(true, Ordering::Relaxed);
        let used = Reading::take(daemon)?.used_since(&at_daemon);
        let us = |time: Duration| time.as_nanos() as f64 / 1e3;
        Ok([us(thread_time()? - cpu), (slept()? - sleeps) as f64, used.process_ns as f64 / 1e3])
    }
}

fn count(far: &mut Session, base: Instant, is_over: &AtomicBool) -> anyhow::Result<u64> {
    let mut come = 0;
    while !is_over.load(Ordering::Relaxed) {
        match far.receive() {
            Ok(Received::Message(bytes)) => {
                read(&bytes, base, BYTES).context("a message is not as it was sent")?;
                come += 1;
            }
            Ok(Received::Finished) => bail!("the sender has finished"),
            Err(Error::TimedOut) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(come)
}
