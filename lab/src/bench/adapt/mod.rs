//! `millrace-lab bench adapt`: what a viewer sees while a link loses most of its bandwidth and gets it back.

mod ends;
mod plot;
mod shown;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, ensure};
use millrace_client::payload;
use serde::Serialize;
use serde_json::{Map, Value, json};

use self::ends::AdaptEnd;
use self::shown::{AdaptFigures, ArrivedObject, SentRates, Stall};
use super::contender::Contender;
use super::process::BenchProcess;
use super::site::{BenchSite, SUBSCRIBERS_LINK};
use super::table::{columns, dash, write_json};
use super::usage::warn_if_busy;
use crate::lab::{Directions, Settings, Topology};
use crate::progress::BenchProgress;

#[derive(Debug, clap::Args)]
pub struct AdaptArgs {
    /// Relays to measure, in interleaved runs
    #[arg(long, value_enum, value_delimiter = ',', default_value = "kernel,user,moq-relay-ietf,moq-relay")]
    relays: Vec<Contender>,
    /// How Millrace treats media where the link has too little bandwidth
    #[arg(long, value_enum, value_delimiter = ',', default_value = "adaptive,live,tail")]
    policies: Vec<AdaptPolicy>,
    /// Rates of the link in the first, second and last third of the time, Mbit/s
    #[arg(long, value_delimiter = ',', default_value = "8,2,8", value_name = "MBIT")]
    rates_mbit: Vec<u32>,
    /// Delay of the link in each direction, ms
    #[arg(long, default_value_t = 30, value_name = "MS")]
    delay_ms: u32,
    /// Time that media are published, seconds
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Number of runs of every relay
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the results to this file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(subcommand)]
    end: Option<AdaptEnd>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum AdaptPolicy {
    /// Send the rendition that fits the bandwidth; drop late media
    Adaptive,
    /// Send one rendition; drop late media
    Live,
    /// Send one rendition; drop the newest media
    Tail,
}

impl AdaptPolicy {
    fn name(self) -> &'static str {
        match self {
            Self::Adaptive => "adaptive",
            Self::Live => "live",
            Self::Tail => "tail",
        }
    }

    fn arguments(self) -> &'static [&'static str] {
        match self {
            Self::Adaptive => &["--adaptive", "catalog"],
            Self::Live => &[],
            Self::Tail => &["--drop-policy", "tail"],
        }
    }
}

/// Size of the link's queue, as the time that the link needs to send a full queue.
const QUEUE_MS: u64 = 100;
/// Longest time that the subscriber may run after publishing has ended.
const SLACK: Duration = Duration::from_secs(60);

pub fn run(args: AdaptArgs) -> anyhow::Result<()> {
    if let Some(end) = &args.end {
        return ends::run(end);
    }
    ensure!(
        !args.relays.iter().any(|relay| relay.is_plain()),
        "plain UDP has no tracks: leave it out of --relays"
    );
    ensure!(args.rounds > 0 && args.seconds >= 3, "--rounds must be at least 1, --seconds at least 3");
    ensure!(
        !args.rates_mbit.is_empty() && args.rates_mbit.iter().all(|rate| *rate > 0),
        "--rates-mbit must be at least 1"
    );
    warn_if_busy()?;
    let mut rows = args.rows();
    let site = args.site()?;
    let progress = BenchProgress::with_steps(args.rounds * rows.len());
    for round in 1..=args.rounds {
        for row in &mut rows {
            progress.begin(format!("round {round}, {}", row.label()));
            let ran = args.round(&site, row).map_err(|error| format!("{error:#}"));
            progress.end(&told(&ran))?;
            row.rounds.push(ran);
        }
    }
    drop((progress, site));
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(|row| row.json(&args)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    ensure!(rows.iter().any(|row| row.rounds.iter().any(Result::is_ok)), "no relay could be measured");
    args.plot.as_deref().map_or(Ok(()), |path| plot::draw(&rows, &args.title(), path))
}

struct AdaptRow {
    relay: Contender,
    /// How Millrace treats media where the link has too little bandwidth; `None` for other relays.
    policy: Option<AdaptPolicy>,
    rounds: Vec<Result<AdaptRound, String>>,
}

/// The result of one run with a link whose bandwidth changes.
#[derive(Serialize)]
struct AdaptRound {
    #[serde(flatten)]
    figures: AdaptFigures,
    renditions: String,
    stalls: Vec<Stall>,
}

impl AdaptRow {
    fn label(&self) -> String {
        let policy = self.policy.map(|policy| format!(", {}", policy.name())).unwrap_or_default();
        format!("{}{policy}", self.relay.label())
    }

    /// Returns what the viewer saw in each successful round: stalls, latency, and shares that arrived on time.
    fn figures(&self) -> Vec<AdaptFigures> {
        self.rounds.iter().flatten().map(|round| round.figures).collect()
    }

    fn median(&self) -> Option<AdaptFigures> {
        AdaptFigures::median(&self.figures())
    }

    fn spread(&self) -> Value {
        let spread = AdaptFigures::spread(&self.figures()).unwrap_or_default();
        let names = AdaptFigures::NAMES.iter().map(|name| (*name).to_owned());
        names.zip(spread.iter().map(|it| json!(it))).collect::<Map<_, _>>().into()
    }

    fn json(&self, args: &AdaptArgs) -> Value {
        let round = |round: &Result<AdaptRound, String>| match round {
            Ok(round) => json!(round),
            Err(error) => json!({ "error": error }),
        };
        let mut row = json!(self.median());
        if !row.is_object() {
            row = json!({});
        }
        row["spread"] = self.spread();
        row["relay"] = self.relay.relay().into();
        row["engine"] = self.relay.engine().into();
        row["policy"] = self.policy.map(AdaptPolicy::name).into();
        row["profile"] = args.profile().into();
        row["delay_ms"] = args.delay_ms.into();
        row["seconds"] = args.seconds.into();
        row["rounds"] = self.rounds.iter().map(round).collect();
        row
    }
}

fn told(round: &Result<AdaptRound, String>) -> String {
    match round {
        Ok(AdaptRound { figures: it, renditions, .. }) => format!(
            "stalls {:.0} ms, audio {:.1} %, key frames {:.1} %, {renditions}",
            it.stall_ms_total, it.audio_on_time_pct, it.key_frames_on_time_pct
        ),
        Err(error) => error.clone(),
    }
}

fn render(rows: &[AdaptRow]) -> String {
    let head =
        ["relay", "stalls ms", "longest ms", "audio %", "key frames %", "shown %", "p95 ms", "switches"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let Some(it) = row.median() else { continue };
        let figures = [
            it.stall_ms_total,
            it.longest_stall_ms,
            it.audio_on_time_pct,
            it.key_frames_on_time_pct,
            it.frames_shown_pct,
        ];
        let mut line = vec![row.label()];
        line.extend(figures.map(|figure| format!("{figure:.1}")));
        line.push(it.latency_p95_ms.map_or_else(dash, |ms| format!("{ms:.0}")));
        line.push(it.switches.to_string());
        lines.push(line);
    }
    let errors = rows.iter().filter_map(|row| {
        let error = row.rounds.iter().find_map(|round| round.as_ref().err())?;
        Some(format!("{}: {error}\n", row.label()))
    });
    columns(&lines) + &errors.collect::<String>()
}

impl AdaptArgs {
    fn rows(&self) -> Vec<AdaptRow> {
        let row = |relay, policy| AdaptRow { relay, policy, rounds: Vec::new() };
        let of_relay = |relay: &Contender| -> Vec<AdaptRow> {
            match relay.engine() {
                Some(_) => self.policies.iter().map(|policy| row(*relay, Some(*policy))).collect(),
                None => vec![row(*relay, None)],
            }
        };
        self.relays.iter().flat_map(of_relay).collect()
    }

    fn profile(&self) -> String {
        self.rates_mbit.iter().map(u32::to_string).collect::<Vec<_>>().join("-")
    }

    fn title(&self) -> String {
        let rates = self.rates_mbit.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        format!("{rates} Mbit/s, {} ms each way, {} s", self.delay_ms, self.seconds)
    }

    fn settings(&self, rate_mbit: u32) -> String {
        let queue_bytes = u64::from(rate_mbit) * 1_000_000 / 8 * QUEUE_MS / 1000;
        format!("delay={}ms rate={rate_mbit}mbit queue-bytes={queue_bytes}", self.delay_ms)
    }

    fn site(&self) -> anyhow::Result<BenchSite> {
        let mut topology = Topology::standard(1, 1);
        let first = self.rates_mbit.first().copied().unwrap_or(1);
        topology.impair(SUBSCRIBERS_LINK, Directions::Both, &self.settings(first))?;
        BenchSite::new(&topology)
    }

    fn set_rate(&self, site: &BenchSite, rate_mbit: u32) -> anyhow::Result<()> {
        let settings = Settings::parse(&self.settings(rate_mbit))?;
        Ok(site.link(SUBSCRIBERS_LINK)?.change(Directions::Both, &settings)?)
    }

    fn round(&self, site: &BenchSite, row: &AdaptRow) -> anyhow::Result<AdaptRound> {
        self.set_rate(site, self.rates_mbit[0])?;
        let relay = site.start_relay_with(row.relay, row.policy.map_or(&[], AdaptPolicy::arguments))?;
        let route = site.route()?;
        let end = |name, node: &crate::lab::LabNode, what: &str| -> anyhow::Result<BenchProcess> {
            let mut command = node.command(std::env::current_exe()?);
            command.args(["bench", "adapt"]).args(what.split_whitespace());
            BenchProcess::start(name, command, site.directory())
        };
        let published = format!("publish --relay {} --seconds {}", route.relay, self.seconds);
        let publisher = end("publisher", route.publisher, &published)?;
        let asked = format!("subscribe --relay {}", route.relay);
        let subscriber = end("subscriber", route.subscribers, &asked)?;
        let mut changes = Vec::new();
        // Each rate of the link is used for an equal part of the publishing time.
        let part = Duration::from_secs_f64(self.seconds as f64 / self.rates_mbit.len() as f64);
        for rate in &self.rates_mbit[1..] {
            std::thread::sleep(part);
            self.set_rate(site, *rate)?;
            changes.push(payload::now());
        }
        let limit = Duration::from_secs(self.seconds) + SLACK;
        let came: Vec<ArrivedObject> =
            serde_json::from_str(&subscriber.finish(limit)?).context("the subscriber's output")?;
        let sent: SentRates =
            serde_json::from_str(&publisher.finish(limit)?).context("the publisher's output")?;
        drop(relay);
        ensure!(!came.is_empty(), "no object has arrived at the subscriber");
        Ok(AdaptRound {
            figures: AdaptFigures::from_arrivals(&sent, &came, &changes),
            renditions: shown::renditions(&sent, &came),
            stalls: shown::stalls(&sent, &came, &changes),
        })
    }
}
