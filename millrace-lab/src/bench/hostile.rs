//! `millrace bench hostile`: what a bystander's media suffer while another client of the relay means no good, and what it
//! costs the relay.

use std::env;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use serde_json::{Value, json};

use super::contender::{Contender, PORT};
use super::figures::{Load, error};
use super::owed::Owed;
use super::process::Process;
use super::site::{SUBSCRIBERS_LINK, Site, device};
use super::stats::Spread;
use super::table::{columns, write_json};
use super::traffic::Traffic;
use super::usage::{Reading, rss_bytes, warn_if_busy};
use crate::hostile::scenario;
use crate::lab::Topology;
use crate::progress::Progress;
use crate::transport::Transport;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Relays to attack: those of Millrace, interleaved
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user")]
    relays: Vec<Contender>,
    /// How the client comes to the relay, interleaved; what is about one of them only is left out of the other
    #[arg(long, value_enum, value_delimiter = ',', default_value = "raw", value_name = "TRANSPORT")]
    transport: Vec<Transport>,
    /// What the client does (millrace lab hostile --list); everything without it
    #[arg(long, value_delimiter = ',', value_name = "NAME")]
    scenarios: Vec<String>,
    /// How long each scenario is repeated; media flow as long without it before
    #[arg(long, default_value_t = 20.0)]
    seconds: f64,
    /// Times that every relay meets every scenario
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// The bystanders'.
const LOAD: Load = Load { transport: Transport::Raw, subscribers: 1, object_bytes: 1200, rate_hz: 250 };
/// Of the asked packet rate, from which on media count as flowing.
const FLOWING: f64 = 0.8;
/// What the publisher sends beyond the measured time: start-up, and the first second, which is not owed.
const SPARE_SECONDS: f64 = 3.0;
/// A scenario ends by itself long before.
const SCENARIO_LIMIT: Duration = Duration::from_secs(120);
const ATTACKER: &str = "attacker";

pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.seconds >= 1.0, "--rounds and --seconds are at least 1");
    let mut rows = args.rows()?;
    warn_if_busy()?;
    let mut topology = Topology::standard(1, 1);
    topology.connect("relay", ATTACKER);
    let site = Site::new(&topology)?;
    let progress = Progress::of(args.rounds * rows.len());
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
    ensure!(rows.iter().any(|row| row.rounds.iter().any(Result::is_ok)), "nothing could be measured");
    Ok(())
}

struct Row {
    relay: Contender,
    /// The client's.
    transport: Transport,
    scenario: &'static str,
    rounds: Vec<Result<Figures, String>>,
}

#[derive(Debug, Clone, Copy)]
struct Figures {
    quiet: Stretch,
    meanwhile: Stretch,
    /// How often the scenario ran.
    attacks: u32,
    /// After the first of them, and after the last.
    rss_bytes: [u64; 2],
}

/// One of them.
type Figure = fn(&Figures) -> f64;

/// Some seconds of media.
#[derive(Debug, Clone, Copy)]
struct Stretch {
    owed: Owed,
    /// Of the relay's process, of one CPU.
    cpu_percent: f64,
}

impl Stretch {
    fn p99_us(&self) -> f64 {
        self.owed.latency_us.p99.unwrap_or(f64::INFINITY)
    }

    fn json(&self) -> Value {
        json!({ "owed": self.owed, "relay_cpu_percent": self.cpu_percent })
    }
}

impl Figures {
    fn p99_ratio(&self) -> f64 {
        self.meanwhile.p99_us() / self.quiet.p99_us()
    }

    fn json(&self) -> Value {
        json!({
            "quiet": self.quiet.json(), "meanwhile": self.meanwhile.json(), "p99_ratio": self.p99_ratio(),
            "attacks": self.attacks, "rss_bytes_first": self.rss_bytes[0], "rss_bytes_last": self.rss_bytes[1],
        })
    }
}

impl Row {
    fn label(&self) -> String {
        self.relay.label_over(self.transport)
    }

    fn spread(&self, of: impl Fn(&Figures) -> f64) -> Option<Spread> {
        Spread::of(&self.rounds.iter().flatten().map(of).collect::<Vec<_>>())
    }

    fn json(&self, seconds: f64) -> Value {
        let round = |round: &Result<Figures, String>| match round {
            Ok(figures) => figures.json(),
            Err(error) => json!({ "error": error }),
        };
        json!({
            "relay": self.relay.relay(), "engine": self.relay.engine(), "transport": self.transport.name(),
            "scenario": self.scenario, "seconds": seconds,
            "p99_ratio": self.spread(Figures::p99_ratio),
            "rounds": self.rounds.iter().map(round).collect::<Vec<_>>(),
        })
    }
}

fn told(figures: &Result<Figures, String>) -> String {
    match figures {
        Ok(it) => format!(
            "p99 {:.0} us, {:.0} before; {:.2} % delivered; {:.1} % of a CPU, {:.1} before; {} attacks",
            it.meanwhile.p99_us(),
            it.quiet.p99_us(),
            it.meanwhile.owed.delivered_percent(),
            it.meanwhile.cpu_percent,
            it.quiet.cpu_percent,
            it.attacks
        ),
        Err(error) => error.clone(),
    }
}

fn render(rows: &[Row]) -> String {
    let head = [
        "scenario",
        "engine",
        "over",
        "attacks",
        "p99 us",
        "before",
        "ratio",
        "delivered %",
        "CPU %",
        "before",
        "RSS MiB",
        "after 1st",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let median = |of: Figure| row.spread(of).map(|spread| spread.median);
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let cells: [(Figure, usize); 6] = [
            (|it| f64::from(it.attacks), 0),
            (|it| it.meanwhile.p99_us(), 0),
            (|it| it.quiet.p99_us(), 0),
            (Figures::p99_ratio, 2),
            (|it| it.meanwhile.owed.delivered_percent(), 2),
            (|it| it.meanwhile.cpu_percent, 1),
        ];
        let engine = row.relay.engine().unwrap_or_default();
        let mut line = [row.scenario, engine, row.transport.name()].map(str::to_owned).to_vec();
        line.extend(cells.iter().filter_map(|(of, digits)| Some(format!("{:.digits$}", median(*of)?))));
        line.extend(median(|it| it.quiet.cpu_percent).map(|percent| format!("{percent:.1}")));
        let rss = [row.spread(|it| it.rss_bytes[1] as f64), row.spread(|it| it.rss_bytes[0] as f64)];
        line.extend(rss.iter().flatten().map(|spread| format!("{:.1}", mib(spread.median as u64))));
        if line.len() == head.len() {
            lines.push(line);
        }
    }
    let mut text = columns(&lines);
    for row in rows {
        if let Some(error) = error(&row.rounds) {
            text += &format!("{}, {}: {error}\n", row.scenario, row.label());
        }
    }
    text
}

impl Args {
    /// Relays vary fastest.
    fn rows(&self) -> anyhow::Result<Vec<Row>> {
        if let Some(other) = self.relays.iter().find(|relay| relay.engine().is_none()) {
            bail!("{}: the scenarios are for Millrace (kernel, user)", other.label());
        }
        let find = |name: &String| {
            scenario::find(name).ok_or_else(|| anyhow!("no scenario `{name}`: see lab hostile --list"))
        };
        let mut scenarios = self.scenarios.iter().map(find).collect::<anyhow::Result<Vec<_>>>()?;
        if scenarios.is_empty() {
            scenarios.extend(scenario::ALL);
        }
        let mut rows = Vec::new();
        for scenario in scenarios {
            for transport in self.transport.iter().filter(|transport| scenario.is_over(**transport)) {
                rows.extend(self.relays.iter().map(|relay| Row {
                    relay: *relay,
                    transport: *transport,
                    scenario: scenario.name,
                    rounds: Vec::new(),
                }));
            }
        }
        ensure!(!rows.is_empty(), "the scenarios are about WebTransport: --transport webtransport");
        Ok(rows)
    }

    fn round(&self, site: &Site, row: &Row) -> anyhow::Result<Figures> {
        let relay = site.start_relay(row.relay)?;
        let (quiet, ()) = self.stretch(site, row.relay, &relay, || Ok(()))?;
        let (meanwhile, (attacks, rss_bytes)) =
            self.stretch(site, row.relay, &relay, || self.attack(site, row, &relay))?;
        Ok(Figures { quiet, meanwhile, attacks, rss_bytes })
    }

    /// Media for the asked time, and something else meanwhile.
    fn stretch<T>(
        &self,
        site: &Site,
        contender: Contender,
        relay: &Process,
        meanwhile: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<(Stretch, T)> {
        let node = site.relay()?;
        let flows = super::run::flow_detector(node, device(node, SUBSCRIBERS_LINK)?, &LOAD, FLOWING);
        let seconds = self.seconds + SPARE_SECONDS;
        let traffic = Traffic::start(contender, &site.route()?, &LOAD, seconds, site.directory(), flows)?;
        // Only what the relay and the kernel take is to be in the way.
        traffic.go_first()?;
        let (start, before) = (Instant::now(), Reading::take(relay.id())?);
        let done = meanwhile()?;
        std::thread::sleep(Duration::from_secs_f64(self.seconds).saturating_sub(start.elapsed()));
        let used = Reading::take(relay.id())?.used_since(&before);
        let received = traffic.finish()?;
        let owed = received.owed.context("too little was delivered to tell what was owed")?;
        Ok((Stretch { owed, cpu_percent: used.process_percent() }, done))
    }

    /// How often the scenario ran, and the relay's memory after the first time and the last.
    fn attack(&self, site: &Site, row: &Row, relay: &Process) -> anyhow::Result<(u32, [u64; 2])> {
        let until = Instant::now() + Duration::from_secs_f64(self.seconds);
        let url = format!("{}://{}:{PORT}", row.transport.scheme(), site.relay()?.addr_v4());
        let (mut attacks, mut first) = (0, 0);
        while Instant::now() < until {
            // A machine of its own would have a CPU of its own: here it gets what nobody else wants.
            let mut command = site.node(ATTACKER)?.command("chrt");
            command.args(["--idle", "0"]).arg(env::current_exe()?);
            command.args(["lab", "hostile", row.scenario, "--relay", &url, "--json"]);
            Process::start("hostile", command, site.directory())?.finish(SCENARIO_LIMIT)?;
            attacks += 1;
            if attacks == 1 {
                first = rss_bytes(relay.id())?;
            }
        }
        Ok((attacks, [first, rss_bytes(relay.id())?]))
    }
}
