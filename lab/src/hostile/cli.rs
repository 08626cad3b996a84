//! `millrace-lab lab hostile`: runs scenarios of a hostile client against a relay.

use std::{
    net::{SocketAddr, ToSocketAddrs as _},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use millrace_client::session::{parse_url, path_of};
use millrace_daemon::{address, duration};
use url::Url;

use super::{
    peer::PeerTarget,
    scenario::{self, Effort, HostileScenario, ScenarioRepeat, ScenarioReport},
    watch::Http,
};

use crate::{progress::BenchProgress, transport::LabTransport};

/// Address of a relay on this machine, which is attacked by default.
const RELAY: &str = "moqt://127.0.0.1:4443";

#[derive(Debug, clap::Args)]
pub struct HostileCommandArgs {
    /// Scenario to run, or `all`; --list shows them
    #[arg(required_unless_present = "list")]
    scenario: Option<String>,
    /// Show the scenarios; with --relay only those for its transport
    #[arg(long)]
    list: bool,
    /// The relay: moqt://HOST:PORT, or https://HOST:PORT for WebTransport; its certificate is not verified [default:
    /// moqt://127.0.0.1:4443]
    #[arg(long, value_name = "URL")]
    relay: Option<String>,
    /// Address of the relay's /status; if given, the relay must release everything after each round
    #[arg(long, value_name = "ADDR:PORT", value_parser = address::ask)]
    status: Option<SocketAddr>,
    /// File with the relay's token [default: that of this user's relay; none if it does not exist]
    #[arg(long, value_name = "FILE")]
    http_token_file: Option<PathBuf>,
    /// Number of rounds of the scenario
    #[arg(long, default_value_t = 1, value_name = "N")]
    rounds: u32,
    /// Repeat the scenario for this time, instead of for a number of rounds
    #[arg(long, value_parser = duration::parse, value_name = "TIME", conflicts_with = "rounds")]
    duration: Option<Duration>,
    /// Number of hostile clients that run the scenario at the same time
    #[arg(long, default_value_t = 1, value_name = "N")]
    clients: usize,
    /// Packets per second of each client in path-hop, key-update, id-churn and steady
    #[arg(long, default_value_t = 500, value_name = "N")]
    packets_per_s: u32,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Runs the scenarios and prints their results.
///
/// # Errors
///
/// Fails if the scenario or the relay does not exist, or if the relay still holds sessions, streams or other objects of
/// the hostile clients afterwards.
pub fn run(args: &HostileCommandArgs) -> Result<()> {
    if args.list {
        return list(args.relay.as_deref());
    }
    let target = resolve(args.relay.as_deref().unwrap_or(RELAY))?;
    let effort = args.effort()?;
    let http = Http::from_address(args.status, args.http_token_file.as_deref())?;
    let mut reports = Vec::new();
    let chosen = chosen(args.scenario.as_deref().unwrap_or_default(), target.transport)?;
    let progress = BenchProgress::with_steps(chosen.len());
    for scenario in chosen {
        progress.begin(scenario.name);
        let report = scenario::run(scenario, &target, effort, http.as_ref())
            .with_context(|| format!("scenario {}", scenario.name))?;
        progress.end("done")?;
        if !args.json {
            show(&report);
        }
        reports.push(report);
    }
    drop(progress);
    if args.json {
        println!("{}", serde_json::to_string_pretty(&reports)?);
    }
    Ok(())
}

impl HostileCommandArgs {
    fn effort(&self) -> Result<Effort> {
        ensure!(self.clients > 0, "--clients must be at least 1");
        ensure!((1..=100_000).contains(&self.packets_per_s), "--packets-per-s must be 1 to 100,000");
        let repeat = self.duration.map_or(ScenarioRepeat::Rounds(self.rounds), ScenarioRepeat::For);
        Ok(Effort { clients: self.clients, repeat, packets_per_s: self.packets_per_s })
    }
}

fn list(relay: Option<&str>) -> Result<()> {
    let transport = relay.map(|relay| transport_of(&parse_url(relay)?)).transpose()?;
    let is_wanted =
        |scenario: &&HostileScenario| transport.is_none_or(|transport| scenario.is_over(transport));
    let width = scenario::ALL.iter().map(|scenario| scenario.name.len()).max().unwrap_or_default();
    for scenario in scenario::ALL.iter().filter(is_wanted) {
        println!("{:width$}  {}", scenario.name, scenario.about);
    }
    Ok(())
}

fn chosen(name: &str, transport: LabTransport) -> Result<Vec<&'static HostileScenario>> {
    if name == "all" {
        return Ok(scenario::over(transport).collect());
    }
    match scenario::find(name) {
        Some(scenario) if scenario.is_over(transport) => Ok(vec![scenario]),
        Some(_) => bail!("scenario `{name}` needs WebTransport: use --relay https://HOST:PORT"),
        None => bail!("unknown scenario `{name}`: --list shows them"),
    }
}

fn resolve(text: &str) -> Result<PeerTarget> {
    let url = parse_url(text)?;
    let transport = transport_of(&url)?;
    let host = url.host_str().unwrap_or_default().trim_start_matches('[').trim_end_matches(']').to_owned();
    let port = url.port().unwrap_or(443);
    let addr =
        (host.as_str(), port).to_socket_addrs()?.next().with_context(|| format!("{host} has no address"))?;
    let path = path_of(&url).to_owned();
    Ok(PeerTarget { addr, name: host, path, transport })
}

fn transport_of(url: &Url) -> Result<LabTransport> {
    LabTransport::from_scheme(url.scheme()).with_context(|| format!("{url} is neither moqt:// nor https://"))
}

fn show(report: &ScenarioReport) {
    println!("{}", report.scenario);
    if let Some(before) = &report.before {
        println!("  before: {before}");
    }
    for (number, round) in report.rounds.iter().enumerate() {
        let counts = &round.counts;
        println!(
            "  round {}: {:.1} s, {} connections, {} packets, {} streams, {} bytes in them",
            number + 1,
            round.seconds,
            counts.connections,
            counts.packets_sent,
            counts.streams_opened,
            counts.stream_bytes
        );
        if let Some(ended) = &round.ended {
            println!("    ended: {ended}");
        }
        if let Some(left) = &round.left {
            println!("    left: {left}");
        }
    }
}
