//! Measures the one-way delay of messages sent at a fixed rate on a link without delay or loss: the time that a graft
//! adds, and its jitter.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
use nix::libc::ENOBUFS;
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::{Value, json};

use super::super::packets::forget_words;
use super::super::repair::datagrams::{message, read};
use super::{FIRST_PORT, PORT, SessionArgs, SessionPair};
use crate::bench::site::BenchSite;
use crate::bench::table::columns;
use crate::progress::BenchProgress;
use crate::stats::Percentiles;

struct SessionDelayVariant {
    name: &'static str,
    functions: &'static [&'static str],
    parameters: &'static str,
}

const ENDLESS: &str = "[sessions.parameters.repair]\ntries = 0\n";

const CANDIDATES: [SessionDelayVariant; 7] = [
    SessionDelayVariant { name: "canonical", functions: &[], parameters: "" },
    SessionDelayVariant { name: "once", functions: &["number"], parameters: "" },
    SessionDelayVariant {
        name: "stop-and-wait",
        functions: &["window", "number", "repair", "acknowledge"],
        parameters: "[sessions.parameters.window]\npackets = 1\n[sessions.parameters.repair]\ntries = 0\n",
    },
    SessionDelayVariant {
        name: "Go-Back-N",
        functions: &["window", "gobackn", "number", "acknowledge"],
        parameters: "",
    },
    SessionDelayVariant {
        name: "Selective Repeat",
        functions: &["window", "number", "repair", "acknowledge"],
        parameters: ENDLESS,
    },
    SessionDelayVariant {
        name: "partial",
        functions: &["window", "number", "partial", "acknowledge"],
        parameters: "",
    },
    SessionDelayVariant { name: "fec", functions: &["number", "fec"], parameters: "" },
];
/// Time for which a sender waits if the session's send window has no space for a message.
const NO_ROOM: Duration = Duration::from_micros(50);
/// Longest wait for messages that are still on their way after the last one was sent.
const GRACE: Duration = Duration::from_millis(500);

/// Result of one run: the number of messages that were sent, and the delays of those that arrived.
struct SessionDelayOutcome {
    sent: u64,
    delays_us: Vec<f64>,
}

/// Delays and jitter over all rounds, for one list of packet functions and one number of sessions.
struct SessionDelayFigures {
    delays: Percentiles,
    /// Mean absolute distance of a delay from the median, us.
    deviation_us: f64,
}

pub fn run(args: &SessionArgs, site: &BenchSite) -> anyhow::Result<(Vec<Value>, String)> {
    let cells: Vec<(&SessionDelayVariant, u16)> = CANDIDATES
        .iter()
        .flat_map(|candidate| args.sessions.iter().map(move |sessions| (candidate, *sessions)))
        .collect();
    let progress = BenchProgress::with_steps(cells.len() * args.rounds);
    let mut outcomes: Vec<Vec<SessionDelayOutcome>> = cells.iter().map(|_| Vec::new()).collect();
    for round in 1..=args.rounds {
        for ((candidate, sessions), outcomes) in cells.iter().zip(&mut outcomes) {
            let label = format!("round {round}, {}, {sessions} sessions", candidate.name);
            progress.begin(label.clone());
            outcomes.push(args.measure(site, candidate, *sessions)?);
            progress.next(label);
        }
    }
    drop(progress);
    let head =
        ["graft", "sessions", "messages", "lost", "p50 us", "p99 us", "p99 - p50", "mean deviation us"];
    let mut rows = Vec::new();
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for ((candidate, sessions), outcomes) in cells.iter().zip(&outcomes) {
        let sent: u64 = outcomes.iter().map(|outcome| outcome.sent).sum();
        let delays: Vec<f64> = outcomes.iter().flat_map(|outcome| outcome.delays_us.clone()).collect();
        let lost = sent - delays.len() as u64;
        let Some(SessionDelayFigures { delays, deviation_us }) = SessionDelayFigures::from_delays(delays)
        else {
            continue;
        };
        rows.push(json!({
            "part": "delay", "graft": candidate.name, "functions": candidate.functions, "sessions": sessions, "rate": args.rate,
            "bytes": args.bytes, "seconds": args.seconds, "rounds": args.rounds, "sent": sent, "lost": lost,
            "delay_us": delays, "p99_less_p50_us": delays.p99 - delays.p50, "mean_deviation_us": deviation_us,
        }));
        let mut line =
            vec![candidate.name.to_owned(), sessions.to_string(), sent.to_string(), lost.to_string()];
        line.extend(
            [delays.p50, delays.p99, delays.p99 - delays.p50, deviation_us].map(|us| format!("{us:.0}")),
        );
        lines.push(line);
    }
    Ok((rows, columns(&lines)))
}

impl SessionDelayFigures {
    fn from_delays(delays_us: Vec<f64>) -> Option<Self> {
        let delays = Percentiles::from_samples(delays_us.clone())?;
        let distance: f64 = delays_us.iter().map(|us| (us - delays.p50).abs()).sum();
        Some(Self { delays, deviation_us: distance / delays_us.len() as f64 })
    }
}

impl SessionArgs {
    fn measure(
        &self,
        site: &BenchSite,
        candidate: &SessionDelayVariant,
        sessions: u16,
    ) -> anyhow::Result<SessionDelayOutcome> {
        // The daemon's limit of memory for all sessions, `memory-mib`, grows with their number, so that no session
        // reaches it.
        let memory = format!("memory-mib = {}\n", 64 + 3 * u64::from(sessions));
        let _pair =
            SessionPair::start(site, sessions, candidate.functions, &(memory + candidate.parameters))?;
        let near = site.relay()?;
        let far = site.subscribers()?;
        let from = near.enter(|| {
            (0..sessions)
                .map(|at| UdpSocket::bind((near.addr_v4(), FIRST_PORT + at)))
                .collect::<Result<Vec<_>, _>>()
        })??;
        for socket in &from {
            socket.connect((far.addr_v4(), PORT))?;
            setsockopt(socket, sockopt::Ipv4RecvErr, &true)?;
        }
        let to = far.enter(|| UdpSocket::bind((far.addr_v4(), PORT)))??;
        setsockopt(&to, sockopt::RcvBufForce, &(64 << 20))?;
        forget_words(&to)?;
        to.set_read_timeout(Some(Duration::from_millis(20)))?;
        let base = Instant::now();
        let is_over = AtomicBool::new(false);
        let (outcome, wrong) = std::thread::scope(|scope| {
            let receiving = scope.spawn(|| self.receive(&to, base, &is_over));
            let sent = self.send(&from, base);
            std::thread::sleep(GRACE);
            is_over.store(true, Ordering::Relaxed);
            let (delays_us, wrong) = receiving.join().map_err(|_| anyhow!("the receiver panicked"))?;
            Ok::<_, anyhow::Error>((SessionDelayOutcome { sent: sent?, delays_us }, wrong))
        })?;
        ensure!(wrong == 0, "{}: {wrong} messages were altered or duplicated", candidate.name);
        Ok(outcome)
    }

    /// Sends messages through the sessions in turn.
    fn send(&self, from: &[UdpSocket], base: Instant) -> anyhow::Result<u64> {
        let count = self.seconds * u64::from(self.rate);
        for (number, socket) in (0..count).zip(from.iter().cycle()) {
            let due = base + Duration::from_secs(number) / self.rate;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            loop {
                match socket.send(&message(number, base.elapsed(), self.bytes)) {
                    Ok(_) => break,
                    Err(error) if error.raw_os_error() == Some(ENOBUFS) => std::thread::sleep(NO_ROOM),
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(count)
    }

    fn receive(&self, to: &UdpSocket, base: Instant, is_over: &AtomicBool) -> (Vec<f64>, u64) {
        let mut seen =
            vec![false; usize::try_from(self.seconds * u64::from(self.rate)).unwrap_or(usize::MAX)];
        let mut delays_us = Vec::new();
        let mut wrong = 0;
        let mut buffer = [0; 2048];
        while !is_over.load(Ordering::Relaxed) {
            let Ok(got) = to.recv(&mut buffer) else { continue };
            let found = read(&buffer[..got], base, self.bytes);
            let place = found.and_then(|(number, _)| seen.get_mut(usize::try_from(number).ok()?));
            match (found, place) {
                (Some((_, delay_ms)), Some(seen)) if !*seen => {
                    *seen = true;
                    delays_us.push(delay_ms * 1e3);
                }
                _ => wrong += 1,
            }
        }
        (delays_us, wrong)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_is_the_mean_distance_from_the_median() {
        let figures = SessionDelayFigures::from_delays(vec![10.0, 12.0, 14.0, 30.0]).expect("figures");
        assert_eq!((figures.delays.p50, figures.deviation_us), (12.0, 5.5));
        assert!(SessionDelayFigures::from_delays(Vec::new()).is_none());
    }
}
