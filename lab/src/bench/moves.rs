//! `millrace-lab bench moves`: the addresses of thousands of viewers change within a second. It measures the time until
//! the kernel forwards to all of them again.

use std::collections::HashMap;
use std::env;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use millrace_kernel::clock::monotonic_ns;
use millrace_relay::status::{RelaySessionStatus, Status};
use serde_json::{Value, json};

use super::contender::{Contender, PORT};
use super::engine;
use super::process::BenchProcess;
use super::rounds::{MedianColumn, RelayRounds};
use super::site::BenchSite;
use super::usage::{UsageReading, warn_if_busy};
use crate::lab::Topology;
use crate::program::product;
use crate::receivers::report::ReceiversReport;

#[derive(Debug, clap::Args)]
pub struct MoveArgs {
    /// Relays to measure; only those of Millrace that forward in the kernel
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel")]
    relays: Vec<Contender>,
    /// Number of viewers
    #[arg(long, default_value_t = 2000, value_name = "N")]
    sessions: usize,
    /// Objects per second to each viewer
    #[arg(long, default_value_t = 10, value_name = "HZ")]
    rate_hz: u32,
    /// Payload of an object, bytes
    #[arg(long, default_value_t = 1200, value_name = "BYTES")]
    object_bytes: u32,
    /// Time between the first and the last viewer's change of address
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    within: f64,
    /// Number of measurements of every relay
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const NAMESPACE: &str = "bench";
const OBJECTS_PER_GROUP: u32 = 100;
/// Time from the last viewer's handshake to the first change of all viewers' addresses, and from the first change to
/// the second, seconds. The viewers are stopped before the second change.
const SETTLING: u64 = 20;
/// Length of the track, seconds. The publisher is stopped long before its end.
const SHOW_SECONDS: u32 = 600;
/// Longest wait until the kernel forwards to all viewers for the first time.
const START_LIMIT: Duration = Duration::from_secs(180);
/// Longest wait until the kernel forwards to all viewers again after their addresses have changed.
const BACK_LIMIT: Duration = Duration::from_secs(15);
/// Pause between two readings of the relay's status. With thousands of sessions the status is large, so reading it
/// costs the relay CPU time.
const LOOK: Duration = Duration::from_millis(50);
const SOCKETS: &str = "32";

pub fn run(args: MoveArgs) -> anyhow::Result<()> {
    args.check()?;
    warn_if_busy()?;
    let site = BenchSite::new(&Topology::standard(1, 1))?;
    let summary =
        |it: &MoveFigures| format!("all viewers served again {:.0} ms after the last one moved", it.back_ms);
    let rows = RelayRounds::measure(&args.relays, args.rounds, |relay| args.round(&site, relay), summary)?;
    let text = RelayRounds::medians(&rows, &COLUMNS);
    RelayRounds::report(&rows, &text, |row| row.json(&args), args.json.as_deref())
}

struct MoveFigures {
    /// Time from the last viewer's change of address until the kernel had sent to every viewer's new address, ms.
    back_ms: f64,
    /// Time from the last viewer's change of address until the relay's status said `kernel_ready` for every viewer, ms.
    ready_ms: f64,
    /// CPU time of the relay from the first change of a viewer's address until the kernel forwarded to all viewers
    /// again, percent of one CPU.
    cpu_percent: f64,
    /// Number of readings of the relay's status since the first change of a viewer's address. More readings make the
    /// measured times more precise.
    looks: usize,
    /// Largest number of sessions whose changes (path, keys) waited to be written to the kernel's tables, in any
    /// reading of the relay's status.
    queue: u64,
    viewers: ReceiversReport,
}

const COLUMNS: [MedianColumn<MoveFigures>; 9] = [
    ("ready ms", |it| it.ready_ms, 0),
    ("back ms", |it| it.back_ms, 0),
    ("media again p50", |it| it.viewers.resumed_ms.map_or(f64::NAN, |it| it.p50), 0),
    ("p99", |it| it.viewers.resumed_ms.map_or(f64::NAN, |it| it.p99), 0),
    ("missing", |it| it.viewers.missing as f64, 0),
    ("twice", |it| it.viewers.duplicates as f64, 0),
    ("queue", |it| it.queue as f64, 0),
    ("CPU %", |it| it.cpu_percent, 0),
    ("bytes a viewer", |it| it.viewers.bytes_per_session as f64, 0),
];

impl RelayRounds<MoveFigures> {
    fn json(&self, args: &MoveArgs) -> Value {
        let round = |round: &Result<MoveFigures, String>| match round {
            Ok(it) => json!({
                "back_ms": it.back_ms, "ready_ms": it.ready_ms, "relay_cpu_percent": it.cpu_percent,
                "looks": it.looks, "queue": it.queue, "viewers": it.viewers,
            }),
            Err(error) => json!({ "error": error }),
        };
        json!({
            "relay": self.relay.relay(), "engine": self.relay.engine(), "sessions": args.sessions,
            "rate_hz": args.rate_hz, "object_bytes": args.object_bytes, "within_s": args.within,
            "back_ms": self.spread(|it| it.back_ms), "ready_ms": self.spread(|it| it.ready_ms),
            "rounds": self.rounds.iter().map(round).collect::<Vec<_>>(),
        })
    }
}

/// A viewer's address before it changed, and the number of packets that the kernel had sent to it.
#[derive(Clone, Copy)]
struct ViewerBeforeMove {
    remote: SocketAddr,
    kernel_packets: u64,
    /// Number of packets that the kernel had sent when the viewer was first seen at its new address.
    moved: Option<u64>,
}

/// Viewers of a relay, by session ID.
struct Viewers(HashMap<u64, ViewerBeforeMove>);

/// Numbers of viewers: those with a new address, those to which the kernel is ready to send, and those to which it has
/// sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct MovedViewers {
    moved: usize,
    ready: usize,
    served: usize,
}

impl Viewers {
    fn from_status(status: &Status) -> Self {
        let known = |one: &RelaySessionStatus| {
            (one.id, ViewerBeforeMove { remote: one.remote, kernel_packets: one.kernel.packets, moved: None })
        };
        Self(status.sessions.iter().filter(|one| one.subscriber).map(known).collect())
    }

    fn look(&mut self, status: &Status) -> MovedViewers {
        let mut seen = MovedViewers::default();
        for one in &status.sessions {
            let Some(known) = self.0.get_mut(&one.id) else { continue };
            let is_moved = one.remote != known.remote;
            if !is_moved {
                continue;
            }
            let packets = *known.moved.get_or_insert(one.kernel.packets.max(known.kernel_packets));
            let is_ready = one.kernel_ready == Some(true);
            seen.moved += 1;
            seen.ready += usize::from(is_ready);
            seen.served += usize::from(is_ready && one.kernel.packets > packets);
        }
        seen
    }
}

impl MoveArgs {
    fn check(&self) -> anyhow::Result<()> {
        if let Some(other) = self.relays.iter().find(|relay| relay.engine() != Some("kernel")) {
            bail!(
                "{}: only relays that forward in the kernel can be measured (kernel, kernel-gate)",
                other.label()
            );
        }
        ensure!(self.sessions > 0 && self.rounds > 0, "--sessions and --rounds must be at least 1");
        ensure!(self.rate_hz > 0, "--rate-hz must be at least 1");
        ensure!((0.0..10.0).contains(&self.within), "--within must be 0 to 10 seconds");
        Ok(())
    }

    fn round(&self, site: &BenchSite, contender: Contender) -> anyhow::Result<MoveFigures> {
        let relay = site.start_relay(contender)?;
        let publisher = self.publisher(site)?;
        let mut receivers = self.receivers(site)?;
        let node = site.relay()?;
        let ask = || node.enter(engine::ask)?;
        let is_up = |status: &Status| {
            let ready = status.sessions.iter().filter(|one| one.subscriber && one.kernel_ready == Some(true));
            ready.filter(|one| one.kernel.packets > 0).count() >= self.sessions
        };
        let began = Instant::now();
        let status = loop {
            receivers.check_runs()?;
            // The relay accepts connections a moment before it serves its status, so an error is tolerated here.
            match ask() {
                Ok(status) if is_up(&status) => break status,
                _ => {}
            }
            ensure!(
                began.elapsed() < START_LIMIT,
                "the kernel did not forward to all {} viewers at the start",
                self.sessions
            );
            std::thread::sleep(LOOK * 10);
        };
        let mut viewers = Viewers::from_status(&status);
        let mut ready_ns = None;
        let mut looks = 0;
        let mut queue = 0;
        let mut before = None;
        let back_ns = loop {
            receivers.check_runs()?;
            let at_ns = monotonic_ns();
            let status = ask()?;
            let seen = viewers.look(&status);
            if seen.moved > 0 {
                before.get_or_insert((Instant::now(), UsageReading::take(relay.id())?));
                (looks, queue) = (looks + 1, queue.max(status.engine.commands_waiting));
            }
            if seen.ready == self.sessions {
                ready_ns.get_or_insert(at_ns);
            }
            if seen.served == self.sessions {
                break at_ns;
            }
            if let Some((first, _)) = &before {
                let limit = BACK_LIMIT + Duration::from_secs_f64(self.within);
                ensure!(
                    first.elapsed() < limit,
                    "not all {} viewers were served again within {limit:?}: {seen:?}",
                    self.sessions
                );
            }
            std::thread::sleep(LOOK);
        };
        let (_, before) = before.context("no viewer has moved")?;
        let used = UsageReading::take(relay.id())?.used_since(&before);
        let output = receivers.finish_or_interrupt(Duration::ZERO)?;
        drop(publisher);
        let viewers: ReceiversReport =
            serde_json::from_str(&output).context("cannot parse the report of lab receivers")?;
        let moved_ns = viewers.moves.first().context("no wave of moves was reported")?.ended_ns;
        let since_ms = |ns: u64| ns.saturating_sub(moved_ns) as f64 / 1e6;
        Ok(MoveFigures {
            back_ms: since_ms(back_ns),
            ready_ms: since_ms(ready_ns.unwrap_or(back_ns)),
            cpu_percent: used.process_percent(),
            looks,
            queue,
            viewers,
        })
    }

    fn publisher(&self, site: &BenchSite) -> anyhow::Result<BenchProcess> {
        let Self { rate_hz, object_bytes, .. } = self;
        let url = format!("moqt://{}:{PORT}", site.relay()?.addr_v4());
        let arguments = format!(
            "publish --reconnect=false --generate --json --name {NAMESPACE} --track objects --rate-hz {rate_hz} \
             --object-bytes {object_bytes} --objects-per-group {OBJECTS_PER_GROUP} --duration {SHOW_SECONDS} \
             --tls-disable-verify {url}"
        );
        let mut command = site.node("pub")?.command(product()?);
        command.args(arguments.split_whitespace());
        BenchProcess::start("publisher", command, site.directory())
    }

    fn receivers(&self, site: &BenchSite) -> anyhow::Result<BenchProcess> {
        let url = format!("moqt://{}:{PORT}", site.relay()?.addr_v4());
        let mut command = site.subscribers()?.command(env::current_exe()?);
        command.args(["lab", "receivers", &url, "--name", NAMESPACE, "--json", "--sockets", SOCKETS]);
        command.args(["--sessions", &self.sessions.to_string()]);
        command.args(["--move-every", &format!("{SETTLING}s")]);
        command.args(["--move-within", &format!("{}s", self.within)]);
        BenchProcess::start("receivers", command, site.directory())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn session(id: u64, port: u16, ready: bool, kernel_packets: u64) -> Value {
        json!({
            "id": id, "remote": format!("192.0.2.1:{port}"), "upstream": false, "publisher": false, "subscriber": true,
            "age_s": 1.0, "rtt_us": 1, "cwnd": 1, "in_flight": 0, "path_mtu": 1200, "cipher": "",
            "quinn": { "packets": 0, "bytes": 0 }, "data_plane": { "packets": 0, "bytes": 0 },
            "kernel": { "packets": kernel_packets, "bytes": 0 }, "kernel_ready": ready, "packets_lost": 0,
            "bytes_retransmitted": 0, "subscriptions": 1, "publications": 0, "pending": 0, "drops": {},
        })
    }

    fn status(sessions: &[Value]) -> Status {
        let sessions = sessions.iter().map(|one| serde_json::from_value(one.clone()).unwrap()).collect();
        Status { sessions, ..Status::default() }
    }

    #[test]
    fn moved_viewer_is_served_when_kernel_has_sent_to_its_new_address() {
        let mut viewers =
            Viewers::from_status(&status(&[session(1, 1000, true, 5), session(2, 1000, true, 5)]));
        let mut look = |sessions: &[Value]| {
            let MovedViewers { moved, ready, served } = viewers.look(&status(sessions));
            [moved, ready, served]
        };
        assert_eq!(look(&[session(1, 1000, true, 6), session(2, 1000, true, 6)]), [0, 0, 0]);
        assert_eq!(look(&[session(1, 1001, false, 7), session(2, 1000, true, 7)]), [1, 0, 0]);
        assert_eq!(look(&[session(1, 1001, true, 7), session(2, 1001, true, 8)]), [2, 2, 0]);
        assert_eq!(look(&[session(1, 1001, true, 8), session(2, 1001, true, 8)]), [2, 2, 1]);
        // Sessions that did not exist before the viewers' addresses changed do not count.
        assert_eq!(look(&[session(3, 1001, true, 8)]), [0, 0, 0]);
    }
}
