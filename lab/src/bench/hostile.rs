//! `millrace-lab bench hostile`: the effect of a hostile client on another client's media, and its cost for the relay.
//! A harmless client that sends as many packets is measured for comparison.

use std::env;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use serde::Deserialize;
use serde_json::{Value, json};

use super::contender::{Contender, PORT};
use super::figures::{RowLoad, error};
use super::newcomers::{NewcomerRoute, Newcomers};
use super::owed::OwedFigures;
use super::process::BenchProcess;
use super::site::{BenchSite, SUBSCRIBERS_LINK, device};
use super::table::{columns, write_json};
use super::traffic::RelayTraffic;
use super::usage::{UsageReading, rss_bytes, warn_if_busy};
use crate::hostile::scenario;
use crate::lab::Topology;
use crate::progress::BenchProgress;
use crate::stats::Spread;
use crate::transport::LabTransport;

#[derive(Debug, clap::Args)]
pub struct HostileArgs {
    /// Relays to attack, in interleaved runs; only those of Millrace
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user")]
    relays: Vec<Contender>,
    /// Transports of the hostile client, in interleaved runs; a scenario that works over one transport only is skipped
    /// with the other transport
    #[arg(long, value_enum, value_delimiter = ',', default_value = "raw", value_name = "TRANSPORT")]
    transport: Vec<LabTransport>,
    /// Scenarios of the hostile client (millrace-lab lab hostile --list); all by default
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    scenarios: Vec<String>,
    /// Number of hostile clients that run the scenario at the same time
    #[arg(long, default_value_t = 1, value_name = "N")]
    clients: usize,
    /// Time for which each scenario is repeated. Media are also measured for this time without a hostile client, and
    /// for this time with a harmless client that sends as many packets from one port
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    /// Number of attacks on every relay with every scenario
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Media load of the publisher and the subscriber. Neither of the two is hostile.
const LOAD: RowLoad =
    RowLoad { transport: LabTransport::Raw, subscribers: 1, object_bytes: 1200, rate_hz: 250 };
/// Media count as flowing once at least this share of the published packet rate arrives.
const FLOWING: f64 = 0.8;
/// Extra time that the publisher sends, seconds: for the start, and for the first second, whose objects are not
/// counted.
const SPARE_SECONDS: f64 = 3.0;
/// Time limit of running a hostile scenario once. A scenario normally ends much sooner.
const SCENARIO_LIMIT: Duration = Duration::from_secs(120);
const ATTACKER: &str = "attacker";
const NEWCOMER: &str = "newcomer";
/// Name of the scenario that a harmless client runs.
const STEADY: &str = "steady";

pub fn run(args: HostileArgs) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.seconds >= 1.0, "--rounds and --seconds must be at least 1");
    ensure!(args.clients > 0, "--clients must be at least 1");
    let mut rows = args.rows()?;
    warn_if_busy()?;
    let mut topology = Topology::standard(1, 1);
    topology.connect("relay", ATTACKER);
    topology.connect("relay", NEWCOMER);
    let site = BenchSite::new(&topology)?;
    let progress = BenchProgress::with_steps(args.rounds * rows.len());
    for round in 1..=args.rounds {
        for row in &mut rows {
            progress.begin(format!("round {round}, {}, {}", row.scenario, row.label()));
            let figures = args.round(&site, row).map_err(|error| format!("{error:#}"));
            progress.end(&told(&figures))?;
            row.rounds.push(figures);
        }
    }
    drop(progress);
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(|row| row.json(args.seconds)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    super::figures::ensure_measured(rows.iter().map(|row| row.rounds.as_slice()))
}

struct HostileRow {
    relay: Contender,
    /// Transport of the hostile client.
    transport: LabTransport,
    scenario: &'static str,
    rounds: Vec<Result<HostileFigures, String>>,
    /// Packets per second that all hostile clients together sent in the latest round.
    packets_per_s: Option<f64>,
}

#[derive(Debug, Clone, Copy)]
struct HostileFigures {
    quiet: MediaStretch,
    meanwhile: MediaStretch,
    alike: MediaStretch,
    /// Results of the hostile clients. `meanwhile` measures media during their attack, and `quiet` measures media
    /// without any attack. `steady` has the results of the harmless clients, and `alike` measures media while harmless
    /// clients run.
    attacks: Attacks,
    steady: Attacks,
}

/// A function that returns one measured value, such as a latency, from the results of a round.
type Figure = fn(&HostileFigures) -> f64;

/// Measured values of media, relay and newcomers (clients that connect) in one period.
#[derive(Debug, Clone, Copy)]
struct MediaStretch {
    owed: OwedFigures,
    /// CPU time of the relay's process, percent of one CPU.
    cpu_percent: f64,
    newcomers: Newcomers,
}

/// Results of the hostile or harmless clients of a period.
#[derive(Debug, Clone, Copy, Default)]
struct Attacks {
    /// Number of times that each client ran the scenario.
    count: u32,
    /// Packets per second that all these clients together sent.
    packets_per_s: f64,
    /// The relay's resident memory after the first and after the last round, bytes.
    rss_bytes: [u64; 2],
}

impl MediaStretch {
    fn p99_us(&self) -> f64 {
        self.owed.latency_us.p99.unwrap_or(f64::INFINITY)
    }

    /// Returns the 99th percentile of the time until the kernel forwards media to a new subscriber, ms.
    fn ready_ms(&self) -> f64 {
        self.newcomers.ready_ms.map_or(f64::NAN, |ready| ready.p99)
    }

    fn json(&self) -> Value {
        json!({
            "owed": self.owed, "relay_cpu_percent": self.cpu_percent, "newcomers": self.newcomers,
        })
    }
}

impl HostileFigures {
    fn p99_ratio(&self) -> f64 {
        self.meanwhile.p99_us() / self.quiet.p99_us()
    }

    /// Returns the ratio of two 99th percentiles of latency: under attack, and with harmless clients that send as many
    /// packets.
    fn alike_ratio(&self) -> f64 {
        self.meanwhile.p99_us() / self.alike.p99_us()
    }

    fn json(&self) -> Value {
        json!({
            "quiet": self.quiet.json(), "meanwhile": self.meanwhile.json(), "alike": self.alike.json(),
            "p99_ratio": self.p99_ratio(), "alike_ratio": self.alike_ratio(), "attacks": self.attacks.count,
            "packets_per_s": self.attacks.packets_per_s, "alike_packets_per_s": self.steady.packets_per_s,
            "rss_bytes_first": self.attacks.rss_bytes[0], "rss_bytes_last": self.attacks.rss_bytes[1],
        })
    }
}

impl HostileRow {
    fn label(&self) -> String {
        self.relay.label_over(self.transport)
    }

    fn spread(&self, of: impl Fn(&HostileFigures) -> f64) -> Option<Spread> {
        Spread::from_values(&self.rounds.iter().flatten().map(of).collect::<Vec<_>>())
    }

    fn json(&self, seconds: f64) -> Value {
        let round = |round: &Result<HostileFigures, String>| match round {
            Ok(figures) => figures.json(),
            Err(error) => json!({ "error": error }),
        };
        json!({
            "relay": self.relay.relay(), "engine": self.relay.engine(), "transport": self.transport.name(),
            "scenario": self.scenario, "seconds": seconds,
            "p99_ratio": self.spread(HostileFigures::p99_ratio), "alike_ratio": self.spread(HostileFigures::alike_ratio),
            "rounds": self.rounds.iter().map(round).collect::<Vec<_>>(),
        })
    }
}

fn told(figures: &Result<HostileFigures, String>) -> String {
    match figures {
        Ok(it) => format!(
            "p99 {:.0} us, {:.0} before, {:.0} alike; {:.2} % delivered; {:.1} % of a CPU, {:.1} before, {:.1} alike; newcomers ready in {:.0} ms; {} \
             attacks of {:.0} packets/s",
            it.meanwhile.p99_us(),
            it.quiet.p99_us(),
            it.alike.p99_us(),
            it.meanwhile.owed.delivered_percent(),
            it.meanwhile.cpu_percent,
            it.quiet.cpu_percent,
            it.alike.cpu_percent,
            it.meanwhile.ready_ms(),
            it.attacks.count,
            it.attacks.packets_per_s
        ),
        Err(error) => error.clone(),
    }
}

/// Columns of the table: heading, measured value, number of decimals.
const COLUMNS: [(&str, Figure, usize); 13] = [
    ("attacks", |it| f64::from(it.attacks.count), 0),
    ("packets/s", |it| it.attacks.packets_per_s, 0),
    ("p99 us", |it| it.meanwhile.p99_us(), 0),
    ("before", |it| it.quiet.p99_us(), 0),
    ("alike", |it| it.alike.p99_us(), 0),
    ("ratio", HostileFigures::alike_ratio, 2),
    ("delivered %", |it| it.meanwhile.owed.delivered_percent(), 2),
    ("CPU %", |it| it.meanwhile.cpu_percent, 1),
    ("before", |it| it.quiet.cpu_percent, 1),
    ("alike", |it| it.alike.cpu_percent, 1),
    ("ready ms", |it| it.meanwhile.ready_ms(), 0),
    ("RSS MiB", |it| mib(it.attacks.rss_bytes[1]), 1),
    ("after 1st", |it| mib(it.attacks.rss_bytes[0]), 1),
];

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn render(rows: &[HostileRow]) -> String {
    let head = ["scenario", "engine", "over"].into_iter().chain(COLUMNS.map(|(name, ..)| name));
    let mut lines = vec![head.map(str::to_owned).collect::<Vec<_>>()];
    for row in rows.iter().filter(|row| row.rounds.iter().any(Result::is_ok)) {
        let engine = row.relay.engine().unwrap_or_default();
        let mut line = [row.scenario, engine, row.transport.name()].map(str::to_owned).to_vec();
        let cell = |(_, of, digits): (&str, Figure, usize)| match row.spread(of) {
            Some(spread) if !spread.median.is_nan() => format!("{:.digits$}", spread.median),
            _ => "-".to_owned(),
        };
        line.extend(COLUMNS.map(cell));
        lines.push(line);
    }
    let mut text = columns(&lines);
    for row in rows {
        if let Some(error) = error(&row.rounds) {
            text += &format!("{}, {}: {error}\n", row.scenario, row.label());
        }
    }
    text
}

impl HostileArgs {
    /// Lists the result rows. Consecutive rows have different relays, so that a drift of the machine affects all relays
    /// alike.
    fn rows(&self) -> anyhow::Result<Vec<HostileRow>> {
        if let Some(other) = self.relays.iter().find(|relay| relay.engine().is_none()) {
            bail!("{}: the scenarios are made for Millrace's relays only (kernel, user)", other.label());
        }
        let find = |name: &String| {
            scenario::find(name)
                .ok_or_else(|| anyhow!("unknown scenario `{name}`: see millrace-lab lab hostile --list"))
        };
        let mut scenarios = self.scenarios.iter().map(find).collect::<anyhow::Result<Vec<_>>>()?;
        if scenarios.is_empty() {
            scenarios.extend(scenario::ALL);
        }
        let mut rows = Vec::new();
        for scenario in scenarios {
            for transport in self.transport.iter().filter(|transport| scenario.is_over(**transport)) {
                rows.extend(self.relays.iter().map(|relay| HostileRow {
                    relay: *relay,
                    transport: *transport,
                    scenario: scenario.name,
                    rounds: Vec::new(),
                    packets_per_s: None,
                }));
            }
        }
        ensure!(!rows.is_empty(), "the scenarios need WebTransport: use --transport webtransport");
        Ok(rows)
    }

    /// Runs a round. In every second round the harmless client comes first, with the packet rate that the hostile
    /// client had in the previous round.
    fn round(&self, site: &BenchSite, row: &mut HostileRow) -> anyhow::Result<HostileFigures> {
        let relay = site.start_relay(row.relay)?;
        let contender = row.relay;
        let transport = row.transport;
        let attack = |scenario: &str, rate: Option<f64>| {
            let attack = RepeatedAttack { site, relay: &relay, transport, scenario, rate };
            self.stretch(site, contender, &relay, || self.attack(&attack))
        };
        let (quiet, ()) = self.stretch(site, contender, &relay, || Ok(()))?;
        let is_before = row.rounds.len() % 2 == 1;
        let before = row.packets_per_s.filter(|_| is_before).map(|rate| attack(STEADY, Some(rate)));
        let (meanwhile, attacks) = attack(row.scenario, None)?;
        row.packets_per_s = Some(attacks.packets_per_s);
        let (alike, steady) = match before {
            Some(before) => before?,
            None => attack(STEADY, row.packets_per_s)?,
        };
        Ok(HostileFigures { quiet, meanwhile, alike, attacks, steady })
    }

    /// Measures media for `--seconds` while the function `meanwhile` runs and new subscribers join.
    fn stretch<T>(
        &self,
        site: &BenchSite,
        contender: Contender,
        relay: &BenchProcess,
        meanwhile: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<(MediaStretch, T)> {
        let node = site.relay()?;
        let flows = super::run::flow_detector(node, device(node, SUBSCRIBERS_LINK)?, &LOAD, FLOWING);
        let seconds = self.seconds + SPARE_SECONDS;
        let traffic =
            RelayTraffic::start(contender, &site.route()?, &LOAD, seconds, site.directory(), flows)?;
        // Publisher and subscribers run with priority, so that the attack can slow down only the relay and the kernel.
        traffic.go_first()?;
        let way = NewcomerRoute { from: site.node(NEWCOMER)?, relay: node };
        let is_over = AtomicBool::new(false);
        let (done, newcomers, used) = std::thread::scope(|scope| {
            let newcomers = scope.spawn(|| way.watch(&is_over));
            let measured = || {
                let start = Instant::now();
                let before = UsageReading::take(relay.id())?;
                let done = meanwhile()?;
                std::thread::sleep(Duration::from_secs_f64(self.seconds).saturating_sub(start.elapsed()));
                anyhow::Ok((done, UsageReading::take(relay.id())?.used_since(&before)))
            };
            let measured = measured();
            is_over.store(true, Ordering::Relaxed);
            let newcomers = newcomers.join().map_err(|_| anyhow!("the newcomers' thread panicked"))??;
            let (done, used) = measured?;
            anyhow::Ok((done, newcomers, used))
        })?;
        let received = traffic.finish()?;
        let owed = received.owed.context("too few objects arrived to compute which objects were owed")?;
        Ok((MediaStretch { owed, cpu_percent: used.process_percent(), newcomers }, done))
    }

    /// Repeats a scenario for `--seconds`. The first repetition runs in a process of its own, so that the relay's
    /// memory can be read after it.
    fn attack(&self, attack: &RepeatedAttack<'_>) -> anyhow::Result<Attacks> {
        let began = Instant::now();
        let time = Duration::from_secs_f64(self.seconds);
        let mut done = Attacks::default();
        let mut packets = 0;
        while began.elapsed() < time {
            let rest = (done.count > 0).then(|| time.saturating_sub(began.elapsed()));
            let hostile =
                BenchProcess::start("hostile", self.command(attack, rest)?, attack.site.directory())?;
            let output = hostile.finish(SCENARIO_LIMIT + time)?;
            let reports: Vec<HostileReport> =
                serde_json::from_str(&output).context("cannot parse the report of lab hostile")?;
            for round in reports.iter().flat_map(|it| &it.rounds) {
                packets += round.counts.packets_sent;
                done.count += 1;
            }
            let rss = rss_bytes(attack.relay.id())?;
            done.rss_bytes = if rest.is_none() { [rss; 2] } else { [done.rss_bytes[0], rss] };
        }
        done.packets_per_s = packets as f64 / began.elapsed().as_secs_f64();
        Ok(done)
    }

    fn command(&self, attack: &RepeatedAttack<'_>, time: Option<Duration>) -> anyhow::Result<Command> {
        let url = format!("{}://{}:{PORT}", attack.transport.scheme(), attack.site.relay()?.addr_v4());
        // A real attacker has a machine of its own. Here the attacker shares a machine with the relay, so the scheduler
        // gives the attacker only time that no other process wants.
        let mut command = attack.site.node(ATTACKER)?.command("chrt");
        command.args(["--idle", "0"]).arg(env::current_exe()?);
        command.args(["lab", "hostile", attack.scenario, "--relay", &url, "--json", "--clients"]);
        command.arg(self.clients.to_string());
        if let Some(time) = time {
            command.arg("--duration").arg(format!("{}ms", time.as_millis()));
        }
        if let Some(rate) = attack.rate {
            let each = (rate / self.clients as f64).round().max(1.0);
            command.args(["--packets-per-s", &each.to_string()]);
        }
        Ok(command)
    }
}

/// A scenario that is repeated against a relay.
struct RepeatedAttack<'run> {
    site: &'run BenchSite,
    relay: &'run BenchProcess,
    transport: LabTransport,
    scenario: &'run str,
    /// Packets per second that all clients of the scenario send together. `None` if the scenario does not send at a
    /// fixed rate.
    rate: Option<f64>,
}

/// Fields of the report of `lab hostile --json` that this benchmark uses.
#[derive(Deserialize)]
struct HostileReport {
    rounds: Vec<HostileRound>,
}

#[derive(Deserialize)]
struct HostileRound {
    counts: HostileCounts,
}

#[derive(Deserialize)]
struct HostileCounts {
    packets_sent: u64,
}
