//! `bench graft carried-paths`: the throughput of a tunnelled connection over two paths, and the longest time without
//! data when one of the paths is cut.

pub mod drain;

use std::fs;
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, anyhow, ensure};
use serde_json::{Value, json};

use self::drain::{Drained, pour};
use super::carrying::{Carrying, CarryingSettings};
use super::two_links::{FIRST, LinkEndNames, LinkProperties, SECOND};
use crate::bench::at_once::at_once;
use crate::bench::process::BenchProcess;
use crate::bench::site::BenchSite;
use crate::bench::table::{columns, write_json};
use crate::bench::usage::warn_if_busy;
use crate::lab::{Directions, LabNode, Settings};
use crate::progress::BenchProgress;
use crate::stats::{Spread, median_by};

const PORT: u16 = 7300;
/// Size of a full TCP packet, bytes.
const PACKET_BYTES: u64 = 1500;
/// Time that tunnels get before the measurement to open their congestion windows.
const WARMING: Duration = Duration::from_secs(3);
/// Time that a process may take to start and to end, in addition to the transfer.
const GRACE: Duration = Duration::from_secs(60);

#[derive(Debug, clap::Args)]
pub struct CarriedPathArgs {
    #[command(flatten)]
    links: LinkProperties,
    /// Length of a run; one of the paths is cut in the middle of the run
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Number of runs of each measurement
    #[arg(long, default_value_t = 10)]
    rounds: usize,
    /// Number of runs at the same time, each in its own lab
    #[arg(long, default_value_t = 1)]
    labs: usize,
    /// Measure only variants (a tunnel protocol, and the paths that it may use) whose names contain this text, such as
    /// `mptcp, first`
    #[arg(long, default_value = "", value_name = "TEXT")]
    only: String,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy)]
struct CarriedPathVariant {
    name: &'static str,
    /// Protocol of the tunnel connection (the carrier), such as `mptcp`; `None`: plain TCP on the first path, without a
    /// tunnel.
    carrier: Option<&'static str>,
    /// Whether MPTCP's path managers announce both paths, so that the tunnel uses both.
    is_spread: bool,
    /// Whether the client's setting `carry`, which says where the tunnel leads, lists both of the server's addresses.
    is_listed: bool,
    cut: Option<LinkEndNames>,
}

const ONE: CarriedPathVariant = CarriedPathVariant {
    name: "TCP, one path",
    carrier: None,
    is_spread: false,
    is_listed: false,
    cut: None,
};
const ONE_CARRIED: CarriedPathVariant = CarriedPathVariant { name: "carried, MPTCP, one path", ..MPTCP };
const MPTCP: CarriedPathVariant = CarriedPathVariant { carrier: Some("mptcp"), ..ONE };
const BOTH: CarriedPathVariant = CarriedPathVariant { is_spread: true, ..MPTCP };

const CANDIDATES: [CarriedPathVariant; 9] = [
    ONE,
    ONE_CARRIED,
    CarriedPathVariant { name: "carried, MPTCP, two paths", ..BOTH },
    CarriedPathVariant { name: "carried, QUIC, one path", carrier: Some("quic"), ..ONE },
    CarriedPathVariant { name: "MPTCP, first cut", cut: Some(FIRST), ..BOTH },
    CarriedPathVariant { name: "MPTCP, second cut", cut: Some(SECOND), ..BOTH },
    CarriedPathVariant {
        name: "QUIC to two addresses, first cut",
        carrier: Some("quic"),
        is_listed: true,
        cut: Some(FIRST),
        ..ONE
    },
    CarriedPathVariant {
        name: "TCP to two addresses, first cut",
        carrier: Some("tcp"),
        is_listed: true,
        cut: Some(FIRST),
        ..ONE
    },
    CarriedPathVariant {
        name: "MPTCP to two addresses, first cut",
        is_listed: true,
        cut: Some(FIRST),
        ..MPTCP
    },
];

/// Result of one run of `bench graft carried-paths`.
struct CarriedPathFigures {
    mbit_s: f64,
    drained: Drained,
}

pub fn run(args: CarriedPathArgs) -> anyhow::Result<()> {
    ensure!(
        args.rounds > 0 && args.labs > 0 && args.seconds > 1,
        "--rounds and --labs must be at least 1, --seconds at least 2"
    );
    args.links.check()?;
    let mptcp = fs::read_to_string("/proc/sys/net/mptcp/enabled").unwrap_or_default();
    ensure!(mptcp.trim() == "1", "this host has no MPTCP: net.mptcp.enabled is 0, or the kernel lacks MPTCP");
    warn_if_busy()?;
    let only = args.only.to_lowercase();
    let candidates: Vec<_> =
        CANDIDATES.iter().filter(|candidate| candidate.name.to_lowercase().contains(&only)).collect();
    ensure!(!candidates.is_empty(), "--only {}: no variant has this text in its name", args.only);
    let jobs: Vec<(usize, &CarriedPathVariant)> = (1..=args.rounds)
        .flat_map(|round| candidates.iter().map(move |candidate| (round, *candidate)))
        .collect();
    let progress = BenchProgress::with_lanes(jobs.len(), args.labs);
    let done = at_once(args.labs, &jobs, |(round, candidate)| {
        let what = format!("round {round}, {}", candidate.name);
        let work = || args.measure(candidate, *round as u64).with_context(|| what.clone());
        progress.step(&what, work, told)?
    })?;
    drop(progress);
    let mut figures: Vec<Vec<CarriedPathFigures>> = candidates.iter().map(|_| Vec::new()).collect();
    for (at, came) in done.into_iter().enumerate() {
        figures[at % candidates.len()].push(came);
    }
    let one = candidates.iter().position(|candidate| candidate.name == ONE_CARRIED.name);
    let one = one.map(|at| median_by(&figures[at], |it| it.mbit_s));
    let head = ["way", "Mbit/s", "least", "most", "times one", "longest gap ms", "most"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    lines.extend(candidates.iter().zip(&figures).map(|(candidate, figures)| candidate.line(figures, one)));
    print!("{}", columns(&lines));
    let rows: Vec<_> = candidates
        .iter()
        .zip(&figures)
        .map(|(candidate, figures)| candidate.json(&args, figures, one))
        .collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &rows))
}

fn told(came: &anyhow::Result<CarriedPathFigures>) -> String {
    match came {
        Ok(it) => format!("{:.1} Mbit/s, nothing for {:.0} ms", it.mbit_s, it.drained.gap_ms),
        Err(error) => format!("{error:#}"),
    }
}

impl CarriedPathArgs {
    fn measure(&self, candidate: &CarriedPathVariant, seed: u64) -> anyhow::Result<CarriedPathFigures> {
        let site = self.links.site(PACKET_BYTES, seed)?;
        let place = CarriedPathHosts::new(&site)?;
        if candidate.is_spread {
            place.spread()?;
        }
        let (pair, _daemons) = match candidate.carrier {
            Some(carrier) => {
                let pair = place.pair(carrier, candidate.is_listed)?;
                let daemons = pair.start()?;
                pair.client.wait_warm(if candidate.is_listed { 2 } else { 1 })?;
                thread::sleep(WARMING);
                (Some(pair), Some(daemons))
            }
            None => (None, None),
        };
        let drained = self.transfer(&site, &place, pair.as_ref(), candidate)?;
        if let Some(pair) = &pair {
            pair.check_redirected(1)?;
        }
        // The throughput is computed for runs with a cut path as well, but it cannot be compared with that of other
        // runs.
        let mbit_s = drained.bytes as f64 * 8e-6 / self.seconds as f64;
        Ok(CarriedPathFigures { mbit_s, drained })
    }

    /// Sends from the server's host to the client's for the run's length, and cuts a link halfway if the variant says
    /// so.
    fn transfer(
        &self,
        site: &BenchSite,
        place: &CarriedPathHosts<'_>,
        pair: Option<&Carrying<'_>>,
        candidate: &CarriedPathVariant,
    ) -> anyhow::Result<Drained> {
        let at = SocketAddr::new(place.servers[0].into(), PORT);
        let listener = place.server.enter(|| TcpListener::bind(at))??;
        let mut command = place.client.command(std::env::current_exe()?);
        command.args(["bench", "graft", "drain", "--from", &at.to_string()]);
        command.args(["--seconds", &self.seconds.to_string()]);
        if let Some(pair) = pair {
            command = pair.client.cgroup.command(&command);
        }
        let mut client = BenchProcess::start("drain", command, site.directory())?;
        let stream = client.accept(&listener, GRACE)?;
        let sending = Duration::from_secs(self.seconds);
        let ending = stream.try_clone()?;
        thread::scope(|scope| {
            let pouring = scope.spawn(|| pour(stream, sending + GRACE));
            if let Some(cut) = &candidate.cut {
                thread::sleep(sending / 2);
                site.link(cut.near)?.change(Directions::Both, &Settings::parse("loss=100%")?)?;
            }
            let said = client.finish(sending + GRACE)?;
            // A tunnel whose path was cut may deliver the end of the connection late, so the sender is stopped here.
            let _ = ending.shutdown(Shutdown::Both);
            pouring.join().map_err(|_| anyhow!("the sender panicked"))??;
            serde_json::from_str(said.trim())
                .with_context(|| format!("cannot parse the client's output {said:?}"))
        })
    }
}

/// Client and server, with their addresses on both links.
struct CarriedPathHosts<'a> {
    client: &'a LabNode,
    server: &'a LabNode,
    clients: [Ipv4Addr; 2],
    servers: [Ipv4Addr; 2],
    directory: &'a Path,
}

impl<'a> CarriedPathHosts<'a> {
    fn new(site: &'a BenchSite) -> anyhow::Result<Self> {
        let client = site.subscribers()?;
        let server = site.relay()?;
        let address = |node: &LabNode, link| anyhow::Ok(node.interface(link).context("no interface")?.v4);
        let clients = [address(client, FIRST.far)?, address(client, SECOND.far)?];
        let servers = [address(server, FIRST.near)?, address(server, SECOND.near)?];
        let place = Self { client, server, clients, servers, directory: site.directory() };
        [client, server].into_iter().try_for_each(|node| ip(node, "mptcp endpoint flush"))?;
        Ok(place)
    }

    /// Configures MPTCP as an operator would: the server announces its second address, and the client also connects to
    /// it.
    fn spread(&self) -> anyhow::Result<()> {
        let device = &self.server.interface(SECOND.near).context("no interface")?.device;
        let limits = "mptcp limits set subflows 2 add_addr_accepted 2";
        [self.client, self.server].into_iter().try_for_each(|node| ip(node, limits))?;
        ip(self.server, &format!("mptcp endpoint add {} dev {device} signal", self.servers[1]))
    }

    fn pair(&self, carrier: &str, is_listed: bool) -> anyhow::Result<Carrying<'a>> {
        let hosts = [(self.client, self.clients.to_vec()), (self.server, self.servers.to_vec())];
        let called = if is_listed { 2 } else { 1 };
        let wanted =
            CarryingSettings { carry: &format!("carrier = {carrier:?}\n"), ..CarryingSettings::default() };
        Carrying::by(hosts, called, self.directory, &[PORT], &wanted)
    }
}

fn ip(node: &LabNode, arguments: &str) -> anyhow::Result<()> {
    let done = node.command("ip").args(arguments.split(' ')).output()?;
    let errors = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "ip {arguments}: {}", errors.trim());
    Ok(())
}

impl CarriedPathVariant {
    fn line(&self, figures: &[CarriedPathFigures], one: Option<f64>) -> Vec<String> {
        let rates = Spread::by(figures, |it| it.mbit_s);
        let gaps = Spread::by(figures, |it| it.drained.gap_ms);
        let mut line = vec![self.name.to_owned()];
        let (Some(rates), Some(gaps)) = (rates, gaps) else { return line };
        line.extend([rates.median, rates.min, rates.max].map(|mbit| format!("{mbit:.1}")));
        line.push(one.map_or_else(String::new, |one| format!("{:.2}", rates.median / one)));
        line.extend([gaps.median, gaps.max].map(|ms| format!("{ms:.0}")));
        line
    }

    fn json(&self, args: &CarriedPathArgs, figures: &[CarriedPathFigures], one: Option<f64>) -> Value {
        let rounds: Vec<_> =
            figures.iter().map(|it| json!({ "mbit_s": it.mbit_s, "drained": it.drained })).collect();
        let links = &args.links;
        json!({
            "way": self.name, "rate_mbit": links.rate_mbit, "rtt_ms": links.rtt_ms, "loss_percent": links.loss,
            "seconds": args.seconds, "times_one": one.map(|one| median_by(figures, |it| it.mbit_s) / one), "rounds": rounds,
        })
    }
}
