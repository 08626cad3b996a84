//! `bench graft instances`: compares one daemon for a whole host, one for each cgroup, and one for each connection. It
//! measures memory, CPU and latency of the same traffic.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::host::{GraftHost, LIMIT};
use crate::bench::process::BenchProcess;
use crate::bench::site::BenchSite;
use crate::bench::table::{columns, write_json};
use crate::bench::usage::{UsageReading, rss_bytes, warn_if_busy};
use crate::lab::Topology;
use crate::progress::BenchProgress;
use crate::stats::{Percentiles, Spread};

#[derive(Debug, clap::Args)]
pub struct InstanceArgs {
    /// Number of interleaved rounds of each arrangement of daemons
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Number of connections at the same time, all of them tunnelled
    #[arg(long, default_value_t = 16)]
    connections: usize,
    /// Number of cgroups that the connections are divided among, in the arrangement with a daemon per cgroup
    #[arg(long, default_value_t = 4)]
    cgroups: usize,
    /// Round trips of a 64-byte message on each connection in turn
    #[arg(long, default_value_t = 200)]
    messages: usize,
    /// MiB sent over each connection, one connection after another
    #[arg(long, default_value_t = 8, value_name = "MIB")]
    mib: u64,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const PORT: u16 = 7200;
const CARRIERS: u16 = 9188;
const MESSAGE: usize = 64;
const BLOCK: usize = 1 << 16;
/// Largest number of daemons on one host. Real hosts have fewer.
const MOST: usize = 64;

/// Unit for which one daemon runs: the whole host, a cgroup, or a connection.
#[derive(Clone, Copy, PartialEq)]
enum Per {
    Host,
    Cgroup,
    Connection,
}

impl Per {
    const ALL: [Self; 3] = [Self::Host, Self::Cgroup, Self::Connection];

    fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Cgroup => "cgroup",
            Self::Connection => "connection",
        }
    }

    fn daemons(self, args: &InstanceArgs) -> usize {
        match self {
            Self::Host => 1,
            Self::Cgroup => args.cgroups.min(args.connections),
            Self::Connection => args.connections,
        }
    }
}

struct InstanceRow {
    per: Per,
    daemons: usize,
    /// Resident memory of all daemons on the client's host, MiB. `server_mib` is that of the server's only daemon.
    client_mib: Vec<f64>,
    server_mib: Vec<f64>,
    /// Time from the daemons' start until all their tunnels (carriers) are ready for connections, ms.
    ready_ms: Vec<f64>,
    /// CPU time of all daemons on the client's host per GiB that they tunnelled, seconds.
    cpu_s_per_gib: Vec<f64>,
    /// CPU time per second of all daemons on the client's host while they are idle, ms.
    idle_cpu_ms: Vec<f64>,
    /// Latencies of messages in one direction, us.
    latency_us: Vec<f64>,
}

pub fn run(args: InstanceArgs) -> anyhow::Result<()> {
    ensure!(
        args.rounds > 0 && args.messages > 0 && args.mib > 0,
        "--rounds, --messages and --mib must be at least 1"
    );
    ensure!((1..=MOST).contains(&args.connections), "--connections must be from 1 to {MOST}");
    ensure!(args.cgroups > 0, "--cgroups must be at least 1");
    warn_if_busy()?;
    let mut rows: Vec<InstanceRow> =
        Per::ALL.into_iter().map(|per| InstanceRow::from_args(per, &args)).collect();
    let progress = BenchProgress::with_steps(rows.len() * args.rounds);
    for round in 1..=args.rounds {
        for row in &mut rows {
            progress.begin(format!("round {round}, a daemon for each {}", row.per.name()));
            measure(&args, row)?;
            progress.end("")?;
        }
    }
    drop(progress);
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(|row| row.json(&args)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))
}

fn measure(args: &InstanceArgs, row: &mut InstanceRow) -> anyhow::Result<()> {
    let site = BenchSite::new(&Topology::standard(1, 1))?;
    let hosts = InstanceHosts::new(&site, row.daemons)?;
    let listener = hosts.listen()?;
    let start = Instant::now();
    let (server, clients) = hosts.start()?;
    row.ready_ms.push(start.elapsed().as_secs_f64() * 1e3);
    let mut connections = Vec::new();
    for number in 0..args.connections {
        connections.push(hosts.connect(number % row.daemons, &listener)?);
    }
    let cpu = |before: &[UsageReading]| used(&clients, before);
    let before = readings(&clients)?;
    std::thread::sleep(Duration::from_secs(1));
    row.idle_cpu_ms.push(cpu(&before)? * 1e3);
    for pair in &mut connections {
        say(pair, args.messages, &mut row.latency_us)?;
    }
    let before = readings(&clients)?;
    for pair in connections.iter().take(args.connections) {
        send(pair, args.mib << 20)?;
    }
    let gib = (args.mib * args.connections as u64) as f64 / 1024.0;
    row.cpu_s_per_gib.push(cpu(&before)? / gib);
    let mib = |process: &BenchProcess| anyhow::Ok(rss_bytes(process.id())? as f64 / f64::from(1 << 20));
    row.client_mib.push(clients.iter().map(mib).sum::<anyhow::Result<f64>>()?);
    row.server_mib.push(mib(&server)?);
    hosts.check_redirected(args.connections)
}

fn readings(processes: &[BenchProcess]) -> anyhow::Result<Vec<UsageReading>> {
    processes.iter().map(|process| Ok(UsageReading::take(process.id())?)).collect()
}

/// Returns the CPU time that the processes have used since `before`, seconds.
fn used(processes: &[BenchProcess], before: &[UsageReading]) -> anyhow::Result<f64> {
    let now = readings(processes)?;
    let each = now.iter().zip(before).map(|(now, before)| now.used_since(before).process_ns);
    Ok(each.sum::<u64>() as f64 / 1e9)
}

/// Sends messages back and forth on one connection, and records the latency of each message in one direction.
fn say([near, far]: &mut [TcpStream; 2], count: usize, us: &mut Vec<f64>) -> anyhow::Result<()> {
    let mut message = [7; MESSAGE];
    for _ in 0..count {
        let start = Instant::now();
        near.write_all(&message)?;
        far.read_exact(&mut message)?;
        far.write_all(&message)?;
        near.read_exact(&mut message)?;
        // A round trip consists of two messages, so the latency of one message is half of the round trip's time.
        us.push(super::micros(start.elapsed()) / 2.0);
    }
    Ok(())
}

fn send([near, far]: &[TcpStream; 2], bytes: u64) -> anyhow::Result<()> {
    let mut near = near.try_clone()?;
    let sending = std::thread::spawn(move || -> std::io::Result<()> {
        let block = [7; BLOCK];
        (0..bytes / BLOCK as u64).try_for_each(|_| near.write_all(&block))
    });
    let mut taken = far.take(bytes);
    let came = std::io::copy(&mut taken, &mut std::io::sink())?;
    ensure!(came == bytes, "{came} bytes arrived instead of {bytes}");
    sending.join().map_err(|_| anyhow::anyhow!("the sender panicked"))?.context("sending")
}

/// A host with servers and one daemon, and a host with several daemons, each with its own cgroup and key.
struct InstanceHosts<'a> {
    server: GraftHost<'a>,
    clients: Vec<GraftHost<'a>>,
}

impl<'a> InstanceHosts<'a> {
    fn new(site: &'a BenchSite, daemons: usize) -> anyhow::Result<Self> {
        let server = GraftHost::new("server", site.relay()?, &site.directory().join("server"))?;
        let at = SocketAddr::new(server.node.addr_v4().into(), CARRIERS);
        let far = server.key()?;
        let rule = |side: &str| {
            format!(
                "[[rule]]\nname = \"r\"\nside = \"{side}\"\nport = {PORT}\ntier = \"carried\"\nagree = false\n"
            )
        };
        let mut peers = String::new();
        let mut clients = Vec::new();
        for number in 0..daemons {
            let directory = site.directory().join(format!("client{number}"));
            let client = GraftHost::new("client", site.subscribers()?, &directory)?;
            let key = client.key()?;
            peers += &format!("[[peer]]\nname = \"client{number}\"\nkey = \"{key}\"\n");
            client.configure(&format!(
                "[agreement]\nkey = \"host.key\"\n[carry]\n[[peer]]\nname = \"p\"\nkey = \"{far}\"\ncarry = \"{at}\"\n{}",
                rule("client")
            ))?;
            clients.push(client);
        }
        let own = format!("[agreement]\nkey = \"host.key\"\n[carry]\nlisten = \"{at}\"\n");
        server.configure(&format!("{own}{peers}{}", rule("server")))?;
        Ok(Self { server, clients })
    }

    fn listen(&self) -> anyhow::Result<TcpListener> {
        let bind = || TcpListener::bind((self.server.node.addr_v4(), PORT));
        Ok(self.server.cgroup.enter(|| self.server.node.enter(bind))???)
    }

    /// Starts all daemons and waits until all their tunnels (carriers) are ready for connections.
    fn start(&self) -> anyhow::Result<(BenchProcess, Vec<BenchProcess>)> {
        let server = self.server.start()?;
        let clients = self.clients.iter().map(GraftHost::start).collect::<anyhow::Result<_>>()?;
        self.clients.iter().try_for_each(|client| client.wait_warm(1))?;
        Ok((server, clients))
    }

    /// Connects to the server from the cgroup of the given daemon. Returns the sockets at both ends of the connection.
    fn connect(&self, daemon: usize, listener: &TcpListener) -> anyhow::Result<[TcpStream; 2]> {
        let client = self.clients.get(daemon).context("a daemon")?;
        let at = listener.local_addr()?;
        let near =
            client.cgroup.enter(|| client.node.enter(|| TcpStream::connect_timeout(&at, LIMIT)))???;
        let (far, _) = listener.accept()?;
        for end in [&near, &far] {
            end.set_nodelay(true)?;
            end.set_read_timeout(Some(LIMIT))?;
            end.set_write_timeout(Some(LIMIT))?;
        }
        Ok([near, far])
    }

    fn check_redirected(&self, wanted: usize) -> anyhow::Result<()> {
        let redirected = self.clients.iter().map(GraftHost::redirected).sum::<anyhow::Result<u64>>()?;
        ensure!(redirected == wanted as u64, "{redirected} connections were tunnelled instead of {wanted}");
        Ok(())
    }
}

impl InstanceRow {
    fn from_args(per: Per, args: &InstanceArgs) -> Self {
        let none = Vec::new;
        Self {
            per,
            daemons: per.daemons(args),
            client_mib: none(),
            server_mib: none(),
            ready_ms: none(),
            cpu_s_per_gib: none(),
            idle_cpu_ms: none(),
            latency_us: none(),
        }
    }

    fn json(&self, args: &InstanceArgs) -> Value {
        json!({
            "per": self.per.name(), "daemons": self.daemons, "connections": args.connections, "rounds": self.client_mib.len(),
            "client_rss_mib": Spread::from_values(&self.client_mib), "server_rss_mib": Spread::from_values(&self.server_mib),
            "ready_ms": Spread::from_values(&self.ready_ms), "client_cpu_s_per_gib": Spread::from_values(&self.cpu_s_per_gib),
            "client_idle_cpu_ms_per_s": Spread::from_values(&self.idle_cpu_ms), "one_way_us": Percentiles::from_samples(self.latency_us.clone()),
        })
    }
}

fn render(rows: &[InstanceRow]) -> String {
    let head = [
        "a daemon per",
        "daemons",
        "client MiB",
        "server MiB",
        "ready ms",
        "CPU s per GiB",
        "idle CPU ms/s",
        "p50 us",
        "p99 us",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let figure = |values: &[f64], digits: usize| {
            Spread::from_values(values).map_or("-".to_owned(), |it| {
                format!("{:.digits$} ({:.digits$} to {:.digits$})", it.median, it.min, it.max)
            })
        };
        let times = Percentiles::from_samples(row.latency_us.clone());
        let time = |of: fn(&Percentiles) -> f64| {
            times.as_ref().map_or("-".to_owned(), |it| format!("{:.0}", of(it)))
        };
        lines.push(vec![
            row.per.name().to_owned(),
            row.daemons.to_string(),
            figure(&row.client_mib, 0),
            figure(&row.server_mib, 0),
            figure(&row.ready_ms, 0),
            figure(&row.cpu_s_per_gib, 2),
            figure(&row.idle_cpu_ms, 1),
            time(|it| it.p50),
            time(|it| it.p99),
        ]);
    }
    columns(&lines)
}
