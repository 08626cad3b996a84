//! Measures a sender that is stopped by a full send window. Either the daemon notifies the sender of space in the
//! window, or the sender polls.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, bail};
use millrace_messages::{Error, Received, Session};
use nix::sys::resource::{UsageWho, getrusage};
use serde_json::{Value, json};

use super::super::peers::Peers;
use super::super::repair::datagrams::{message, read};
use super::super::repair::{PacketWindow, site};
use super::SessionArgs;
use super::receive::thread_time;
use crate::bench::table::columns;
use crate::bench::usage::UsageReading;
use crate::progress::BenchProgress;
use crate::stats::Spread;

const WINDOW: u32 = 64;
/// Payload of a message, bytes: some 1300 on the wire with headers.
const BYTES: usize = 1200;
const ON_THE_WIRE: u64 = 1300;
/// Intervals of a sender that polls: the first one, which doubles with each attempt, and the longest.
const AGAIN: Duration = Duration::from_micros(100);
const AGAIN_MOST: Duration = Duration::from_millis(4);
const TURN: Duration = Duration::from_millis(50);

#[derive(Clone, Copy)]
enum RoomVariant {
    Told,
    Tries,
}

const CANDIDATES: [RoomVariant; 2] = [RoomVariant::Told, RoomVariant::Tries];

/// Result of one run with a sender that is stopped by a full send window.
struct RoomOutcome {
    /// Received messages per second.
    messages: f64,
    /// CPU time of the sending thread per message, us.
    sender_us: f64,
    /// Number of times that the sender slept, per message.
    sleeps: f64,
    /// CPU time of the daemon on the sender's host per message, us.
    daemon_us: f64,
}

type Figure = fn(&RoomOutcome) -> f64;

const FIGURES: [(&str, Figure); 4] = [
    ("messages_s", |it| it.messages),
    ("sender_us_per_message", |it| it.sender_us),
    ("sleeps_per_message", |it| it.sleeps),
    ("daemon_us_per_message", |it| it.daemon_us),
];

impl RoomVariant {
    fn name(self) -> &'static str {
        match self {
            Self::Told => "told",
            Self::Tries => "tries",
        }
    }
}

pub fn run(args: &SessionArgs) -> anyhow::Result<(Vec<Value>, String)> {
    let progress = BenchProgress::with_steps(args.room_rtt_ms.len() * CANDIDATES.len() * args.rounds);
    let head = ["RTT ms", "room is", "messages/s", "sender us", "sleeps", "daemon us"];
    let mut rows = Vec::new();
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for rtt_ms in &args.room_rtt_ms {
        let site = site(*rtt_ms, 0.0, Some(PacketWindow { packets: WINDOW, bytes: ON_THE_WIRE }))?;
        let grafts = format!(
            "[[graft]]\nname = \"all\"\nfunctions = [\"window\", \"number\", \"repair\", \"acknowledge\"]\n\
             [sessions.parameters.window]\npackets = {WINDOW}\n[sessions.parameters.repair]\ntries = 0\nretry_us = {}\n",
            u64::from(*rtt_ms) * 1500 + 10_000
        );
        let peers = Peers::start(&site, &grafts, "")?;
        let listener = peers.asks("far").listen()?;
        let mut outcomes = CANDIDATES.map(|_| Vec::new());
        for round in 1..=args.rounds {
            for (candidate, outcomes) in CANDIDATES.iter().zip(&mut outcomes) {
                let label = format!("round {round}, {}, {rtt_ms} ms", candidate.name());
                progress.begin(label.clone());
                let near = peers.opened(&["reliability"]).with_context(|| label.clone())?;
                let far = listener.accept()?;
                outcomes
                    .push(args.fill(*candidate, near, far, peers.near.id()).with_context(|| label.clone())?);
                progress.next(label);
            }
        }
        for (candidate, outcomes) in CANDIDATES.iter().zip(&outcomes) {
            let spread = |of: Figure| {
                Spread::from_values(&outcomes.iter().map(of).collect::<Vec<_>>()).context("no rounds")
            };
            let spreads = FIGURES.iter().map(|(_, of)| spread(*of)).collect::<anyhow::Result<Vec<_>>>()?;
            let mut row = json!({
                "part": "room", "room": candidate.name(), "rtt_ms": rtt_ms, "window": WINDOW, "bytes": BYTES,
                "seconds": args.seconds, "rounds": args.rounds,
            });
            for ((name, _), spread) in FIGURES.iter().zip(&spreads) {
                row[name] = json!(spread);
            }
            rows.push(row);
            let mut line = vec![rtt_ms.to_string(), candidate.name().to_owned()];
            line.extend(spreads.iter().zip([0, 1, 3, 1]).map(|(it, digits)| {
                format!("{:.digits$} ({:.digits$} to {:.digits$})", it.median, it.min, it.max)
            }));
            lines.push(line);
        }
    }
    drop(progress);
    Ok((rows, columns(&lines)))
}

impl SessionArgs {
    /// Sends as many messages as the send window allows, for the run's length.
    fn fill(
        &self,
        candidate: RoomVariant,
        mut near: Session,
        mut far: Session,
        daemon: u32,
    ) -> anyhow::Result<RoomOutcome> {
        let base = Instant::now();
        let is_over = AtomicBool::new(false);
        far.set_timeout(Some(TURN));
        std::thread::scope(|scope| {
            let receiving = scope.spawn(|| count(&mut far, base, &is_over));
            let sending = scope.spawn(|| self.send_until_over(candidate, &mut near, base, daemon, &is_over));
            let sent = sending.join().map_err(|_| anyhow!("the sender panicked"));
            is_over.store(true, Ordering::Relaxed);
            let come = receiving.join().map_err(|_| anyhow!("the receiver panicked"))??;
            let [sender_us, sleeps, daemon_us] = sent??.map(|it| it / come.max(1) as f64);
            Ok(RoomOutcome { messages: come as f64 / self.seconds as f64, sender_us, sleeps, daemon_us })
        })
    }

    /// Sends messages until `is_over` is set. Returns the thread's CPU time in us, how often it slept, and the daemon's
    /// CPU time in us.
    fn send_until_over(
        &self,
        candidate: RoomVariant,
        near: &mut Session,
        base: Instant,
        daemon: u32,
        is_over: &AtomicBool,
    ) -> anyhow::Result<[f64; 3]> {
        match candidate {
            RoomVariant::Told => near.set_timeout(Some(TURN)),
            RoomVariant::Tries => near.set_nonblocking(true),
        }
        let slept = || getrusage(UsageWho::RUSAGE_THREAD).map(|usage| usage.voluntary_context_switches());
        let cpu = thread_time()?;
        let sleeps = slept()?;
        let at_daemon = UsageReading::take(daemon)?;
        let mut number = 0;
        let mut pause = AGAIN;
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
        // With `is_over`, the receiver stops counting, so messages that are still on their way do not count.
        is_over.store(true, Ordering::Relaxed);
        let used = UsageReading::take(daemon)?.used_since(&at_daemon);
        let us = |time: Duration| time.as_nanos() as f64 / 1e3;
        Ok([us(thread_time()? - cpu), (slept()? - sleeps) as f64, used.process_ns as f64 / 1e3])
    }
}

fn count(far: &mut Session, base: Instant, is_over: &AtomicBool) -> anyhow::Result<u64> {
    let mut come = 0;
    while !is_over.load(Ordering::Relaxed) {
        match far.receive() {
            Ok(Received::Message(bytes)) => {
                read(&bytes, base, BYTES).context("a message was altered")?;
                come += 1;
            }
            Ok(Received::Finished) => bail!("the sender has finished too early"),
            Err(Error::TimedOut) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(come)
}
