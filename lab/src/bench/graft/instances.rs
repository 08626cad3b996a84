//! `bench graft instances`: one daemon for a host, for each of its cgroups, or for each connection: memory, CPU and delay of the same
//! traffic.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde_json::{Value, json};

use super::host::{Host, LIMIT};
use crate::bench::process::Process;
use crate::bench::site::Site;
use crate::bench::table::{columns, write_json};
use crate::bench::usage::{Reading, rss_bytes, warn_if_busy};
use crate::lab::Topology;
use crate::progress::Progress;
use crate::stats::{Percentiles, Spread};

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Of each way to divide them, one after another and again
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Connections at the same time, each of which is carried
    #[arg(long, default_value_t = 16)]
    connections: usize,
    /// Among which they are divided, where there is a daemon for each cgroup
    #[arg(long, default_value_t = 4)]
    cgroups: usize,
    /// Messages of 64 bytes there and back, on each connection in turn
    #[arg(long, default_value_t = 200)]
    messages: usize,
    /// Sent over each connection, one after another
    #[arg(long, default_value_t = 8, value_name = "MIB")]
    mib: u64,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const PORT: u16 = 7200;
const CARRIERS: u16 = 9188;
const MESSAGE: usize = 64;
const BLOCK: usize = 1 << 16;
/// More are no longer a host's cgroups.
const MOST: usize = 64;

/// What a daemon is for.
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

    fn daemons(self, args: &Args) -> usize {
        match self {
            Self::Host => 1,
            Self::Cgroup => args.cgroups.min(args.connections),
            Self::Connection => args.connections,
        }
    }
}

struct Row {
    per: Per,
    daemons: usize,
    /// Resident, of all daemons of the client's host, with their connections; and of the server's one.
    client_mib: Vec<f64>,
    server_mib: Vec<f64>,
    /// Until all of them are warm.
    ready_ms: Vec<f64>,
    /// Of all daemons of the client's host, for each GiB that they carried.
    cpu_s_per_gib: Vec<f64>,
    /// Of all that is idle, in a second.
    idle_cpu_ms: Vec<f64>,
    /// One way.
    latency_us: Vec<f64>,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(
        args.rounds > 0 && args.messages > 0 && args.mib > 0,
        "--rounds, --messages and --mib are at least 1"
    );
    ensure!((1..=MOST).contains(&args.connections), "--connections is from 1 to {MOST}");
    ensure!(args.cgroups > 0, "--cgroups is at least 1");
    warn_if_busy()?;
    let mut rows: Vec<Row> = Per::ALL.into_iter().map(|per| Row::of(per, &args)).collect();
    let progress = Progress::of(rows.len() * args.rounds);
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

fn measure(args: &Args, row: &mut Row) -> anyhow::Result<()> {
    let site = Site::new(&Topology::standard(1, 1))?;
    let hosts = Hosts::new(&site, row.daemons)?;
    let listener = hosts.listen()?;
    let start = Instant::now();
    let (server, clients) = hosts.start()?;
    row.ready_ms.push(start.elapsed().as_secs_f64() * 1e3);
    let mut connections = Vec::new();
    for number in 0..args.connections {
        connections.push(hosts.connect(number % row.daemons, &listener)?);
    }
    let cpu = |before: &[Reading]| used(&clients, before);
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
    let mib = |process: &Process| anyhow::Ok(rss_bytes(process.id())? as f64 / f64::from(1 << 20));
    row.client_mib.push(clients.iter().map(mib).sum::<anyhow::Result<f64>>()?);
    row.server_mib.push(mib(&server)?);
    hosts.check_led(args.connections)
}

fn readings(processes: &[Process]) -> anyhow::Result<Vec<Reading>> {
    processes.iter().map(|process| Ok(Reading::take(process.id())?)).collect()
}

/// Seconds of CPU time since then.
fn used(processes: &[Process], before: &[Reading]) -> anyhow::Result<f64> {
    let now = readings(processes)?;
    let each = now.iter().zip(before).map(|(now, before)| now.used_since(before).process_ns);
    Ok(each.sum::<u64>() as f64 / 1e9)
}

/// There and back, each one timed.
fn say([near, far]: &mut [TcpStream; 2], count: usize, us: &mut Vec<f64>) -> anyhow::Result<()> {
    let mut message = [7; MESSAGE];
    for _ in 0..count {
        let start = Instant::now();
        near.write_all(&message)?;
        far.read_exact(&mut message)?;
        far.write_all(&message)?;
        near.read_exact(&mut message)?;
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
    ensure!(came == bytes, "{came} bytes came, and not {bytes}");
    sending.join().map_err(|_| anyhow::anyhow!("the sender panicked"))?.context("sending")
}

/// A host with servers and one daemon, and one with so many daemons, each with a cgroup and a key of its own.
struct Hosts<'a> {
    server: Host<'a>,
    clients: Vec<Host<'a>>,
}

impl<'a> Hosts<'a> {
    fn new(site: &'a Site, daemons: usize) -> anyhow::Result<Self> {
        let server = Host::new("server", site.relay()?, &site.directory().join("server"))?;
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
            let client = Host::new("client", site.subscribers()?, &directory)?;
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

    /// Until every carrier is warm.
    fn start(&self) -> anyhow::Result<(Process, Vec<Process>)> {
        let server = self.server.start()?;
        let clients = self.clients.iter().map(Host::start).collect::<anyhow::Result<_>>()?;
        self.clients.iter().try_for_each(|client| client.wait_warm(1))?;
        Ok((server, clients))
    }

    /// Both ends of a connection by one of the daemons.
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

    fn check_led(&self, wanted: usize) -> anyhow::Result<()> {
        let led = self.clients.iter().map(Host::led).sum::<anyhow::Result<u64>>()?;
        ensure!(led == wanted as u64, "{led} connections were carried, and not {wanted}");
        Ok(())
    }
}

impl Row {
    fn of(per: Per, args: &Args) -> Self {
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

    fn json(&self, args: &Args) -> Value {
        json!({
            "per": self.per.name(), "daemons": self.daemons, "connections": args.connections, "rounds": self.client_mib.len(),
            "client_rss_mib": Spread::of(&self.client_mib), "server_rss_mib": Spread::of(&self.server_mib),
            "ready_ms": Spread::of(&self.ready_ms), "client_cpu_s_per_gib": Spread::of(&self.cpu_s_per_gib),
            "client_idle_cpu_ms_per_s": Spread::of(&self.idle_cpu_ms), "one_way_us": Percentiles::of(self.latency_us.clone()),
        })
    }
}

fn render(rows: &[Row]) -> String {
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
            Spread::of(values).map_or("-".to_owned(), |it| {
                format!("{:.digits$} ({:.digits$} to {:.digits$})", it.median, it.min, it.max)
            })
        };
        let times = Percentiles::of(row.latency_us.clone());
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
