//! `millrace-lab bench memory`: what a session costs a relay.
//!
//! Sessions connect in two crowds, and the relay's memory is read after each. The difference, divided by the size of the
//! second crowd, is the memory per session. What the relay takes at its start, however much it is, does not count. A bare
//! quinn server is measured in the same way, in the same run.

pub mod bare;

use std::{fs, path::PathBuf, time::Duration};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::{
    contender::Contender,
    crowd::{Crowd, CrowdTrack},
    site::BenchSite,
    table::{columns, dash, write_json},
    usage::{UsageReading, warn_if_busy},
};
use crate::{lab::Topology, progress::BenchProgress, stats::Spread};

#[derive(Debug, clap::Args)]
pub struct MemoryArgs {
    /// Relays to measure, in interleaved runs, beside a bare quinn server
    #[arg(long, value_enum, value_delimiter = ',', default_value = "user,kernel")]
    relays: Vec<Contender>,
    /// States of the sessions, in interleaved runs
    #[arg(long, value_enum, value_delimiter = ',', default_value = "idle,active")]
    states: Vec<SessionState>,
    /// Numbers of sessions between which memory is compared
    #[arg(long, value_delimiter = ',', default_value = "100,1000", value_name = "FEW,MANY")]
    sessions: Vec<usize>,
    /// Objects per second to each active session
    #[arg(long, default_value_t = 2, value_name = "HZ")]
    rate_hz: u32,
    /// Payload of an object, bytes
    #[arg(long, default_value_t = 1200, value_name = "BYTES")]
    object_bytes: u32,
    /// Time from the last session's handshake until memory is read. A relay returns free memory every 5 seconds
    #[arg(long, default_value_t = 12.0, value_name = "SECONDS")]
    settle: f64,
    /// Time for which the relay's CPU use is measured with all sessions, seconds
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Number of measurements of every relay
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum SessionState {
    /// A session that is connected and asks for nothing
    Idle,
    /// A session that receives one track
    Active,
}

pub fn run(args: MemoryArgs) -> anyhow::Result<()> {
    let [few, many] = args.check()?;
    warn_if_busy()?;
    let site = BenchSite::new(&Topology::standard(1, 1))?;
    let mut rows = args.rows();
    let progress = BenchProgress::with_steps(args.rounds * rows.len());
    for round in 1..=args.rounds {
        for row in &mut rows {
            progress.begin(format!("round {round}, {}, {}", row.server.label(), row.state.name()));
            let figures = args.round(&site, row, [few, many]).map_err(|error| format!("{error:#}"));
            progress.end(&match &figures {
                Ok(it) => format!("{:.1} KiB per session", it.anonymous_bytes / 1024.0),
                Err(error) => error.clone(),
            })?;
            row.rounds.push(figures);
        }
    }
    drop(progress);
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(|row| row.json(&args, &rows)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    super::figures::ensure_measured(rows.iter().map(|row| row.rounds.as_slice()))
}

struct MemoryRow {
    server: Contender,
    state: SessionState,
    rounds: Vec<Result<MemoryFigures, String>>,
}

/// Measured values of one round.
#[derive(Debug, Clone, Copy)]
struct MemoryFigures {
    /// Growth of the server's anonymous memory per session, bytes: heap and stacks.
    anonymous_bytes: f64,
    /// Growth of the server's proportional set size (PSS) per session, bytes. It contains pages of mapped BPF maps.
    pss_bytes: f64,
    /// CPU time of the server's process with all sessions, percent of one CPU.
    cpu_percent: f64,
    /// Number of objects that arrived, and of those that never did.
    objects: u64,
    missing: u64,
}

type Figure = fn(&MemoryFigures) -> f64;

impl SessionState {
    fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Active => "active",
        }
    }
}

impl MemoryRow {
    fn spread(&self, of: Figure) -> Option<Spread> {
        Spread::from_values(&self.rounds.iter().flatten().map(of).collect::<Vec<_>>())
    }

    /// Returns how much more memory a session takes than a bare quinn connection, bytes.
    fn beyond_quinn(&self, rows: &[Self]) -> Option<f64> {
        let bare = rows.iter().find(|row| row.server == Contender::Quinn)?;
        let median = |row: &Self| row.spread(|it| it.anonymous_bytes).map(|spread| spread.median);
        (self.server != Contender::Quinn).then(|| Some(median(self)? - median(bare)?))?
    }

    fn json(&self, args: &MemoryArgs, rows: &[Self]) -> Value {
        let round = |round: &Result<MemoryFigures, String>| match round {
            Ok(it) => json!({
                "anonymous_bytes": it.anonymous_bytes, "pss_bytes": it.pss_bytes, "cpu_percent": it.cpu_percent,
                "objects": it.objects, "missing": it.missing,
            }),
            Err(error) => json!({ "error": error }),
        };
        json!({
            "server": self.server.relay(), "engine": self.server.engine(), "state": self.state.name(),
            "sessions": args.sessions,
            "rate_hz": (self.state == SessionState::Active).then_some(args.rate_hz),
            "anonymous_bytes_per_session": self.spread(|it| it.anonymous_bytes),
            "pss_bytes_per_session": self.spread(|it| it.pss_bytes),
            "beyond_quinn_bytes_per_session": self.beyond_quinn(rows),
            "cpu_percent": self.spread(|it| it.cpu_percent),
            "rounds": self.rounds.iter().map(round).collect::<Vec<_>>(),
        })
    }
}

fn render(rows: &[MemoryRow]) -> String {
    let head =
        ["server", "sessions", "KiB each", "min-max", "PSS KiB each", "beyond quinn", "CPU %", "missing"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows.iter().filter(|row| row.rounds.iter().any(Result::is_ok)) {
        let median = |of: Figure, scale: f64, digits: usize| {
            row.spread(of).map_or_else(dash, |it| format!("{:.digits$}", it.median / scale))
        };
        let range = row.spread(|it| it.anonymous_bytes);
        lines.push(vec![
            row.server.label(),
            row.state.name().to_owned(),
            median(|it| it.anonymous_bytes, 1024.0, 1),
            range.map_or_else(dash, |it| format!("{:.1}-{:.1}", it.min / 1024.0, it.max / 1024.0)),
            median(|it| it.pss_bytes, 1024.0, 1),
            row.beyond_quinn(rows).map_or_else(dash, |bytes| format!("{:.1}", bytes / 1024.0)),
            median(|it| it.cpu_percent, 1.0, 1),
            median(|it| it.missing as f64, 1.0, 0),
        ]);
    }
    let mut text = columns(&lines);
    for row in rows {
        if let Some(error) = super::figures::error(&row.rounds) {
            text += &format!("{}, {}: {error}\n", row.server.label(), row.state.name());
        }
    }
    text
}

impl MemoryArgs {
    /// Returns the two numbers of sessions.
    fn check(&self) -> anyhow::Result<[usize; 2]> {
        let [few, many] = self.sessions[..] else { bail!("--sessions needs two numbers, such as 100,1000") };
        ensure!(0 < few && few < many, "--sessions needs a number and a larger one, such as 100,1000");
        ensure!(self.rate_hz > 0 && self.rounds > 0, "--rate-hz and --rounds must be at least 1");
        ensure!(
            self.seconds > 0.0 && self.settle >= 0.0,
            "--seconds must be more than 0, --settle at least 0"
        );
        if let Some(plain) = self.relays.iter().find(|relay| relay.is_plain()) {
            bail!("{}: only relays with QUIC connections can be measured", plain.label());
        }
        Ok([few, many])
    }

    fn rows(&self) -> Vec<MemoryRow> {
        let row = |server, state| MemoryRow { server, state, rounds: Vec::new() };
        let relays =
            self.relays.iter().flat_map(|relay| self.states.iter().map(move |state| (*relay, *state)));
        let bare = row(Contender::Quinn, SessionState::Idle);
        [bare].into_iter().chain(relays.map(|(relay, state)| row(relay, state))).collect()
    }

    fn round(
        &self,
        site: &BenchSite,
        row: &MemoryRow,
        [few, many]: [usize; 2],
    ) -> anyhow::Result<MemoryFigures> {
        let mut server = site.start_relay(row.server)?;
        let track = CrowdTrack { rate_hz: self.rate_hz, object_bytes: self.object_bytes };
        let is_active = row.state == SessionState::Active;
        let publisher = is_active.then(|| track.publish(site)).transpose()?;
        let first = Crowd::start(site, few, is_active, &mut server)?;
        self.settle();
        let before = ProcessMemory::read(server.id())?;
        let second = Crowd::start(site, many - few, is_active, &mut server)?;
        self.settle();
        let used = UsageReading::take(server.id())?;
        std::thread::sleep(Duration::from_secs_f64(self.seconds));
        let used = UsageReading::take(server.id())?.used_since(&used);
        let after = ProcessMemory::read(server.id())?;
        server.check_runs()?;
        let reports = [first.finish()?, second.finish()?];
        drop(publisher);
        let each = |after: u64, before: u64| (after as f64 - before as f64) / (many - few) as f64;
        Ok(MemoryFigures {
            anonymous_bytes: each(after.anonymous_bytes, before.anonymous_bytes),
            pss_bytes: each(after.pss_bytes, before.pss_bytes),
            cpu_percent: used.process_percent(),
            objects: reports.iter().map(|report| report.objects).sum(),
            missing: reports.iter().map(|report| report.missing).sum(),
        })
    }

    fn settle(&self) {
        std::thread::sleep(Duration::from_secs_f64(self.settle));
    }
}

/// Memory of a process (proc(5), `smaps_rollup`), bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ProcessMemory {
    pss_bytes: u64,
    anonymous_bytes: u64,
}

impl ProcessMemory {
    fn read(process: u32) -> anyhow::Result<Self> {
        let path = format!("/proc/{process}/smaps_rollup");
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
        Self::parse(&text).with_context(|| format!("{path} has no Pss or Anonymous"))
    }

    fn parse(text: &str) -> Option<Self> {
        let bytes = |name: &str| {
            let kib = text.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix("kB"));
            kib?.trim().parse::<u64>().ok().map(|kib| kib * 1024)
        };
        Some(Self { pss_bytes: bytes("Pss:")?, anonymous_bytes: bytes("Anonymous:")? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn process_memory_is_read_from_smaps_rollup() {
        let text = "55d0-7ffe ---p 0 00:00 0 [rollup]\nRss: 900 kB\nPss:                 812 kB\nPss_Anon: 3 kB\n\
                    Anonymous:           640 kB\n";
        let expected = ProcessMemory { pss_bytes: 812 << 10, anonymous_bytes: 640 << 10 };
        assert_eq!(ProcessMemory::parse(text), Some(expected));
        assert_eq!(ProcessMemory::parse("Pss: 1 kB\n"), None);
        assert!(ProcessMemory::read(std::process::id()).unwrap().anonymous_bytes > 1 << 16);
    }

    #[test]
    fn memory_row_reports_bytes_beyond_those_of_bare_quinn() {
        let row = |server, kib: &[f64]| {
            let round = |kib: &f64| {
                let anonymous_bytes = kib * 1024.0;
                let pss_bytes = anonymous_bytes;
                Ok(MemoryFigures { anonymous_bytes, pss_bytes, cpu_percent: 1.0, objects: 0, missing: 0 })
            };
            MemoryRow { server, state: SessionState::Idle, rounds: kib.iter().map(round).collect() }
        };
        let rows = [row(Contender::Quinn, &[20.0, 22.0, 90.0]), row(Contender::User, &[52.0, 50.0, 60.0])];
        assert_eq!(rows[0].beyond_quinn(&rows), None);
        assert_eq!(rows[1].beyond_quinn(&rows), Some(30.0 * 1024.0));
        assert!(render(&rows).contains("30.0"), "{}", render(&rows));
    }
}
