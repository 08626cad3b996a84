//! `bench graft apps`: unmodified applications over plain TCP and through a tunnel, in turn on the same network.

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

use self::application::{AppServer, Application, RunResult};
use self::material::AppMaterial;
use self::rows::{AppCase, AppRow, render};
use self::worse::Worse;
use super::carrying::Carrying;
use super::network::NetworkProfile;
use crate::bench::at_once::at_once;
use crate::bench::process::BenchProcess;
use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK, device};
use crate::bench::table::write_json;
use crate::bench::usage::warn_if_busy;
use crate::beside;
use crate::lab::{Directions, LabNode};
use crate::progress::BenchProgress;

/// Time that tunnels get before the measurement to open their congestion windows.
const WARMING: Duration = Duration::from_secs(3);

#[derive(Debug, clap::Args)]
pub struct AppArgs {
    /// Applications to run: web:KIB, iperf3:KIB, go:KIB, redis, redis-many, rsync, film
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "web:64,web:1024,web:8192,redis,redis-many,rsync,iperf3:4096,go:256,film"
    )]
    apps: Vec<Application>,
    /// Loss in each direction, random or in bursts of this mean length in packets, and round-trip time while the queue
    /// is empty
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "0:1,0:100,1:100,1/8:100,5:100,1:600",
        value_name = "PERCENT[/BURST]:MS"
    )]
    networks: Vec<NetworkProfile>,
    /// Congestion controls of plain TCP, each measured in turn with the tunnel
    #[arg(long, value_delimiter = ',', default_value = "cubic,bbr", value_name = "NAME")]
    controls: Vec<String>,
    /// Rate of the link
    #[arg(long, default_value_t = 100, value_name = "MBIT")]
    rate_mbit: u32,
    /// Time after which a run is stopped
    #[arg(long, default_value_t = 60, value_name = "SECONDS")]
    limit: u64,
    /// Bit rate of the film
    #[arg(long, default_value_t = 3, value_name = "MBIT")]
    film_mbit: u32,
    /// Length of the film
    #[arg(long, default_value_t = 20, value_name = "SECONDS")]
    film_seconds: u32,
    /// Round-trip time limit of the result `chosen`: it takes plain TCP's durations below this time, and the tunnel's
    /// from it on
    #[arg(long, default_value_t = 10, value_name = "MS")]
    in_place_below_ms: u32,
    /// Number of runs of each measurement
    #[arg(long, default_value_t = 10)]
    rounds: usize,
    /// Number of rounds at the same time, each in its own lab
    #[arg(long, default_value_t = 1)]
    labs: usize,
    /// Seed of the random losses; each further round adds 1
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// File with results of an earlier run, whose rounds are added; may be repeated
    #[arg(long, value_name = "FILE")]
    add: Vec<PathBuf>,
    /// Measure nothing; only combine the files of --add
    #[arg(long, requires = "add")]
    only_add: bool,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the results to this file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

pub use saturate::saturate;

/// How an application's connections reach the other host: plain TCP with a congestion control, or through a tunnel.
#[derive(Debug, Clone, PartialEq)]
enum AppRoute {
    InPlace(String),
    Carried,
}

impl AppRoute {
    fn name(&self) -> &str {
        match self {
            Self::InPlace(control) => control,
            Self::Carried => "carried",
        }
    }
}

pub fn run(args: AppArgs) -> anyhow::Result<()> {
    ensure!(
        args.rounds > 0 && args.limit > 0 && args.labs > 0,
        "--rounds, --limit and --labs must be at least 1"
    );
    ensure!(args.rate_mbit > 0, "--rate-mbit must be at least 1");
    ensure!(
        (1..=100).contains(&args.film_mbit) && (2..=600).contains(&args.film_seconds),
        "--film-mbit must be from 1 to 100, --film-seconds from 2 to 600"
    );
    args.networks.iter().try_for_each(NetworkProfile::check)?;
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

impl AppArgs {
    /// Runs all applications whose programs are installed.
    fn all(&self) -> anyhow::Result<Vec<AppRow>> {
        let lacking: Vec<_> =
            AppServer::ALL.into_iter().filter_map(|server| Some((server, server.lacks()?))).collect();
        let is_here = |app: &&Application| !lacking.iter().any(|(server, _)| *server == app.server());
        let apps: Vec<_> = self.apps.iter().filter(is_here).copied().collect();
        for (_, program) in
            lacking.iter().filter(|(server, _)| self.apps.iter().any(|app| app.server() == *server))
        {
            println!("{program} is not installed: applications that need it are skipped");
        }
        ensure!(!apps.is_empty(), "no application could be run");
        warn_if_busy()?;
        let is_used = |server: AppServer| apps.iter().any(|app| app.server() == server);
        let film = is_used(AppServer::Film).then_some((self.film_mbit, self.film_seconds));
        let material = AppMaterial::new(is_used(AppServer::Go), film)?;
        self.measure(&apps, &material)
    }

    fn ways(&self, round: usize) -> Vec<AppRoute> {
        let mut ways: Vec<_> = self.controls.iter().cloned().map(AppRoute::InPlace).collect();
        ways.push(AppRoute::Carried);
        let first = round % ways.len();
        ways.rotate_left(first);
        ways
    }

    /// Measures round after round. Each round covers all networks. On each network, every application runs in turn over
    /// plain TCP, with each congestion control, and through the tunnel.
    fn measure(&self, apps: &[Application], material: &AppMaterial) -> anyhow::Result<Vec<AppRow>> {
        let networks = || self.networks.iter().copied();
        let jobs: Vec<(usize, NetworkProfile)> =
            (1..=self.rounds).flat_map(|round| networks().map(move |network| (round, network))).collect();
        let runs = jobs.len() * apps.len() * (self.controls.len() + 1);
        let progress = BenchProgress::with_lanes(runs, self.labs);
        let done = at_once(self.labs, &jobs, |(round, network)| {
            self.on(*network, *round, apps, material, &progress)
        })?;
        Ok(done.into_iter().flatten().collect())
    }

    fn on(
        &self,
        network: NetworkProfile,
        round: usize,
        apps: &[Application],
        material: &AppMaterial,
        progress: &BenchProgress,
    ) -> anyhow::Result<Vec<AppRow>> {
        // Each round has its own seed, so that different packets are lost.
        let seed = self.seed.wrapping_add(round as u64);
        let site = BenchSite::new(&network.topology(self.rate_mbit, Directions::Both, seed)?)?;
        let hosts = AppHosts::new(&site, apps, material)?;
        let _servers = hosts.serve()?;
        let _brokers = hosts.pair.start()?;
        std::thread::sleep(WARMING);
        if let Some(film) = material.film.as_ref().filter(|_| round == 1) {
            let [_, carried] = AppServer::Film.ports();
            film.check(&hosts.pair.client, SocketAddr::new(site.relay()?.addr_v4().into(), carried))?;
        }
        let mut came = Vec::new();
        for app in apps {
            for way in self.ways(round) {
                let case = AppCase {
                    application: app.label(),
                    loss_percent: network.loss,
                    burst_packets: network.burst,
                    rtt_ms: network.rtt_ms,
                    way: way.name().to_owned(),
                };
                let what = format!("round {round}, {}", case.text());
                let work = || hosts.measure(*app, &way, self.limit);
                let it = progress.step(&what, work, |it| rows::told(it.as_ref()))?;
                came.push(AppRow::new(case, it.with_context(|| what)?));
            }
        }
        hosts.pair.check_redirected(apps.len())?;
        Ok(came)
    }
}

struct AppHosts<'a> {
    pair: Carrying<'a>,
    apps: Vec<Application>,
    served: PathBuf,
}

impl<'a> AppHosts<'a> {
    fn new(site: &'a BenchSite, apps: &[Application], material: &AppMaterial) -> anyhow::Result<Self> {
        let carried: Vec<_> = AppServer::ALL.iter().map(|server| server.ports()[1]).collect();
        let pair = Carrying::new(site.subscribers()?, site.relay()?, site.directory(), &carried)?;
        let served = site.directory().join("served");
        fs::create_dir_all(&served)?;
        apps.iter().try_for_each(|app| app.prepare(&served))?;
        material.place(&served)?;
        Ok(Self { pair, apps: apps.to_vec(), served })
    }

    fn serve(&self) -> anyhow::Result<Vec<BenchProcess>> {
        for node in [self.pair.client.node, self.pair.server.node] {
            // Forget TCP metrics of earlier connections, so that every connection starts like the first one to its
            // peer.
            node.enter(|| fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1"))??;
        }
        let used = |server: &AppServer| self.apps.iter().any(|app| app.server() == *server);
        let servers = AppServer::ALL.into_iter().filter(used);
        let started = servers.map(|server| server.start(&self.pair.server, &self.served));
        Ok(started.collect::<anyhow::Result<Vec<_>>>()?.into_iter().flatten().collect())
    }

    fn measure(&self, app: Application, way: &AppRoute, limit: u64) -> anyhow::Result<RunResult> {
        let [in_place, carried] = app.server().ports();
        let port = match way {
            AppRoute::InPlace(control) => {
                self.control(control)?;
                in_place
            }
            AppRoute::Carried => carried,
        };
        let server = self.pair.server.node.addr_v4();
        app.run(&self.pair.client, (server, port), &self.served, limit)
    }

    /// Sets the congestion control in both hosts' routing tables (`congctl` of `ip route`), since a network namespace
    /// cannot choose every congestion control by sysctl.
    fn control(&self, name: &str) -> anyhow::Result<()> {
        let client = self.pair.client.node;
        let server = self.pair.server.node;
        route(client, server, name)?;
        route(server, client, name)
    }
}

fn route(from: &LabNode, to: &LabNode, control: &str) -> anyhow::Result<()> {
    let near = from.addr_v4().to_string();
    let far = format!("{}/32", to.addr_v4());
    let mut command = from.command("ip");
    let device = device(from, SUBSCRIBERS_LINK)?;
    command.args(["route", "replace", &far, "dev", &device, "src", &near, "congctl", control]);
    let done = command.output()?;
    let errors = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "TCP with {control}: {}", errors.trim());
    Ok(())
}
