//! `bench graft apps`: applications as they are, by plain TCP and carried, one way after the other on the same network.

mod application;
mod material;
mod rows;
mod saturate;
mod server;
pub mod video;
mod worse;

use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use self::application::{Application, Came, Server};
use self::material::Material;
use self::rows::{Case, Row, render};
use self::worse::Worse;
use super::carrying::Carrying;
use super::network::Network;
use crate::bench::at_once::at_once;
use crate::bench::process::Process;
use crate::bench::site::{SUBSCRIBERS_LINK, Site, device};
use crate::bench::table::write_json;
use crate::bench::usage::warn_if_busy;
use crate::beside;
use crate::lab::{Directions, Node};
use crate::progress::Progress;

/// In which carriers open their windows.
const WARMING: Duration = Duration::from_secs(3);

#[derive(Debug, clap::Args)]
pub struct Args {
    /// web:KIB, iperf3:KIB, go:KIB, redis, redis-many, rsync, film
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "web:64,web:1024,web:8192,redis,redis-many,rsync,iperf3:4096,go:256,film"
    )]
    apps: Vec<Application>,
    /// Loss each way, at random or in bursts of so many packets on average, and round trip without queue
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "0:1,0:100,1:100,1/8:100,5:100,1:600",
        value_name = "PERCENT[/BURST]:MS"
    )]
    networks: Vec<Network>,
    /// TCP's congestion controls that take turns with carriers
    #[arg(long, value_delimiter = ',', default_value = "cubic,bbr", value_name = "NAME")]
    controls: Vec<String>,
    /// Rate of the link
    #[arg(long, default_value_t = 100, value_name = "MBIT")]
    rate_mbit: u32,
    /// After which a run counts as over
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    limit: u64,
    /// Of the film
    #[arg(long, default_value_t = 3, value_name = "MBIT")]
    film_mbit: u32,
    /// Of the film
    #[arg(long, default_value_t = 20, value_name = "SECONDS")]
    film_seconds: u32,
    /// Chosen is what is in place where the round trip is shorter, and else what is carried
    #[arg(long, default_value_t = 10, value_name = "MS")]
    in_place_below_ms: u32,
    /// Runs of each
    #[arg(long, default_value_t = 10)]
    rounds: usize,
    /// Rounds at once, each in a lab of its own
    #[arg(long, default_value_t = 1)]
    labs: usize,
    /// Of the losses; rounds count on from it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// File with rows of an earlier run, whose rounds are added, repeatable
    #[arg(long, value_name = "FILE")]
    add: Vec<PathBuf>,
    /// Measure nothing; only put those together
    #[arg(long, requires = "add")]
    only_add: bool,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw them here (SVG)
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

pub use saturate::saturate;

/// How an application's connections get to the other host.
#[derive(Debug, Clone, PartialEq)]
enum Way {
    InPlace(String),
    Carried,
}

impl Way {
    fn name(&self) -> &str {
        match self {
            Self::InPlace(control) => control,
            Self::Carried => "carried",
        }
    }
}

pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(
        args.rounds > 0 && args.limit > 0 && args.labs > 0,
        "--rounds, --limit and --labs are at least 1"
    );
    ensure!(args.rate_mbit > 0, "--rate-mbit is at least 1");
    ensure!(
        (1..=100).contains(&args.film_mbit) && (2..=600).contains(&args.film_seconds),
        "--film-mbit is from 1 to 100, --film-seconds from 2 to 600"
    );
    args.networks.iter().try_for_each(Network::check)?;
    let mut rows = Vec::new();
    for path in &args.add {
        rows.extend(rows::read(path)?);
    }
    if !args.only_add {
        rows.extend(args.all()?);
    }
    let rows = rows::joined(rows);
    print!("{}", render(&rows));
    let worse = Worse::all(&rows, &args.controls, args.in_place_below_ms);
    worse.iter().for_each(|it| println!("{}", it.text()));
    let mut json = rows.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
    for it in &worse {
        json.push(serde_json::to_value(it)?);
    }
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))?;
    let (panels, ways) = rows::panels(&rows);
    args.plot.as_deref().map_or(Ok(()), |path| beside::draw(&panels, &ways, 2, path))
}

impl Args {
    /// With what there is here for it.
    fn all(&self) -> anyhow::Result<Vec<Row>> {
        let lacking: Vec<_> =
            Server::ALL.into_iter().filter_map(|server| Some((server, server.lacks()?))).collect();
        let is_here = |app: &&Application| !lacking.iter().any(|(server, _)| *server == app.server());
        let apps: Vec<_> = self.apps.iter().filter(is_here).copied().collect();
        for (_, program) in
            lacking.iter().filter(|(server, _)| self.apps.iter().any(|app| app.server() == *server))
        {
            println!("no {program}: what needs it is left out");
        }
        ensure!(!apps.is_empty(), "no application could be run");
        warn_if_busy()?;
        let is_used = |server: Server| apps.iter().any(|app| app.server() == server);
        let film = is_used(Server::Film).then_some((self.film_mbit, self.film_seconds));
        let material = Material::new(is_used(Server::Go), film)?;
        self.measure(&apps, &material)
    }

    fn ways(&self, round: usize) -> Vec<Way> {
        let mut ways: Vec<_> = self.controls.iter().cloned().map(Way::InPlace).collect();
        ways.push(Way::Carried);
        let first = round % ways.len();
        ways.rotate_left(first);
        ways
    }

    /// Round after round, in each the networks; on a network each application by one way after the other.
    fn measure(&self, apps: &[Application], material: &Material) -> anyhow::Result<Vec<Row>> {
        let networks = || self.networks.iter().copied();
        let jobs: Vec<(usize, Network)> =
            (1..=self.rounds).flat_map(|round| networks().map(move |network| (round, network))).collect();
        let runs = jobs.len() * apps.len() * (self.controls.len() + 1);
        let progress = Progress::of_lanes(runs, self.labs);
        let done = at_once(self.labs, &jobs, |(round, network)| {
            self.on(*network, *round, (apps, material), &progress)
        })?;
        Ok(done.into_iter().flatten().collect())
    }

    fn on(
        &self,
        network: Network,
        round: usize,
        (apps, material): (&[Application], &Material),
        progress: &Progress,
    ) -> anyhow::Result<Vec<Row>> {
        // Each round loses other packets.
        let seed = self.seed.wrapping_add(round as u64);
        let site = Site::new(&network.topology(self.rate_mbit, Directions::Both, seed)?)?;
        let hosts = Hosts::new(&site, apps, material)?;
        let _servers = hosts.serve()?;
        let _brokers = hosts.pair.start()?;
        std::thread::sleep(WARMING);
        if let Some(film) = material.film.as_ref().filter(|_| round == 1) {
            let [_, carried] = Server::Film.ports();
            film.check(&hosts.pair.client, SocketAddr::new(site.relay()?.addr_v4().into(), carried))?;
        }
        let mut came = Vec::new();
        for app in apps {
            for way in self.ways(round) {
                let case = Case {
                    application: app.label(),
                    loss_percent: network.loss,
                    burst_packets: network.burst,
                    rtt_ms: network.rtt_ms,
                    way: way.name().to_owned(),
                };
                let what = format!("round {round}, {}", case.text());
                let work = || hosts.measure(*app, &way, self.limit);
                let it = progress.step(&what, work, |it| rows::told(it.as_ref()))?;
                came.push(Row::new(case, it.with_context(|| what)?));
            }
        }
        hosts.pair.check_led(apps.len())?;
        Ok(came)
    }
}

struct Hosts<'a> {
    pair: Carrying<'a>,
    apps: Vec<Application>,
    served: PathBuf,
}

impl<'a> Hosts<'a> {
    fn new(site: &'a Site, apps: &[Application], material: &Material) -> anyhow::Result<Self> {
        let carried: Vec<_> = Server::ALL.iter().map(|server| server.ports()[1]).collect();
        let pair = Carrying::new(site.subscribers()?, site.relay()?, site.directory(), &carried)?;
        let served = site.directory().join("served");
        fs::create_dir_all(&served)?;
        apps.iter().try_for_each(|app| app.prepare(&served))?;
        material.place(&served)?;
        Ok(Self { pair, apps: apps.to_vec(), served })
    }

    fn serve(&self) -> anyhow::Result<Vec<Process>> {
        for node in [self.pair.client.node, self.pair.server.node] {
            // Metrics of earlier connections are not kept: each is the first to its peer.
            node.enter(|| fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1"))??;
        }
        let used = |server: &Server| self.apps.iter().any(|app| app.server() == *server);
        let servers = Server::ALL.into_iter().filter(used);
        let started = servers.map(|server| server.start(&self.pair.server, &self.served));
        Ok(started.collect::<anyhow::Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    fn measure(&self, app: Application, way: &Way, limit: u64) -> anyhow::Result<Came> {
        let [in_place, carried] = app.server().ports();
        let port = match way {
            Way::InPlace(control) => {
                self.control(control)?;
                in_place
            }
            Way::Carried => carried,
        };
        let server = self.pair.server.node.addr_v4();
        app.run(&self.pair.client, (server, port), &self.served, limit)
    }

    /// The routes have it: a namespace may not choose freely.
    fn control(&self, name: &str) -> anyhow::Result<()> {
        let (client, server) = (self.pair.client.node, self.pair.server.node);
        route(client, server, name)?;
        route(server, client, name)
    }
}

fn route(from: &Node, to: &Node, control: &str) -> anyhow::Result<()> {
    let (near, far) = (from.addr_v4().to_string(), format!("{}/32", to.addr_v4()));
    let mut command = from.command("ip");
    let device = device(from, SUBSCRIBERS_LINK)?;
    command.args(["route", "replace", &far, "dev", &device, "src", &near, "congctl", control]);
    let done = command.output()?;
    let errors = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "TCP with {control}: {}", errors.trim());
    Ok(())
}
