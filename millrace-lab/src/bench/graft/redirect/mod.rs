//! `bench graft redirect`: what two brokers and a carrier cost on a link that needs none, beside a proxy.

mod many;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};

use self::many::Many;
use super::carrying::Carrying;
use super::host::LIMIT;
use crate::bench::process::Process;
use crate::bench::site::Site;
use crate::bench::stats::{Percentiles, Spread};
use crate::bench::table::{columns, write_json};
use crate::bench::usage::{Reading, warn_if_busy};
use crate::lab::Topology;
use crate::progress::Progress;

#[derive(Debug, clap::Args)]
pub struct Args {
    /// Of each way, one after another and again
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Messages of 64 bytes there and back, of each round
    #[arg(long, default_value_t = 5000)]
    messages: usize,
    /// Seconds of sending as much as goes, of each round
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Carried at once, three times; 0: that is not measured
    #[arg(long, default_value_t = 2000)]
    connections: usize,
    /// Write the rows here
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const CARRIED: u16 = 7200;
const DIRECT: u16 = 7201;
const PROXY: u16 = 7202;
const MANY: u16 = 7203;
const MESSAGE: usize = 64;
/// Before anything is timed.
const UNTIMED: usize = 200;

/// How a connection gets from the one host to the other.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Direct,
    Haproxy,
    Carried,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Direct => "TCP",
            Self::Haproxy => "haproxy",
            Self::Carried => "carried",
        }
    }

    /// Hosts on which something takes part.
    fn hosts(self) -> f64 {
        match self {
            Self::Direct => 0.0,
            Self::Haproxy => 1.0,
            Self::Carried => 2.0,
        }
    }
}

struct Row {
    way: Way,
    /// One way, microseconds.
    latency: Vec<f64>,
    gbit: Vec<f64>,
    gbit_per_cpu: Vec<f64>,
}

pub fn run(args: Args) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.messages > 0, "--rounds and --messages are at least 1");
    ensure!(args.seconds > 0.0 && args.seconds < 3600.0, "--seconds is more than 0 and less than 3600");
    warn_if_busy()?;
    let site = Site::new(&Topology::standard(1, 1))?;
    let hosts = Hosts::new(&site)?;
    let (server, client) = hosts.start()?;
    let proxy = hosts.haproxy()?;
    let ways = [Some(Way::Direct), proxy.as_ref().map(|_| Way::Haproxy), Some(Way::Carried)];
    let row = |way| Row { way, latency: Vec::new(), gbit: Vec::new(), gbit_per_cpu: Vec::new() };
    let mut rows: Vec<_> = ways.into_iter().flatten().map(row).collect();
    let progress = Progress::of(rows.len() * args.rounds);
    for round in 1..=args.rounds {
        for row in &mut rows {
            progress.begin(format!("round {round}, {}", row.way.name()));
            hosts.measure(&args, row)?;
            progress.end("")?;
        }
    }
    drop(progress);
    hosts.pair.check_led(2 * args.rounds)?;
    let many = match args.connections {
        0 => None,
        count => Some(Many::measure(&hosts.pair, [&server, &client], &hosts.many, count)?),
    };
    print!("{}", render(&rows));
    print!("{}", many.as_ref().map_or_else(String::new, Many::render));
    if proxy.is_none() {
        println!("haproxy is not there: apt-get install haproxy");
    }
    let json: Vec<_> = rows.iter().map(|row| row.json(&rows)).chain(many.iter().map(Many::json)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))
}

struct Hosts<'a> {
    pair: Carrying<'a>,
    listeners: [TcpListener; 2],
    many: TcpListener,
}

impl<'a> Hosts<'a> {
    fn new(site: &'a Site) -> anyhow::Result<Self> {
        let pair = Carrying::new(site.relay()?, site.subscribers()?, site.directory(), &[CARRIED, MANY])?;
        let server = &pair.server;
        let listen = |port| {
            let bind = || TcpListener::bind((server.node.addr_v4(), port));
            anyhow::Ok(server.cgroup.enter(|| server.node.enter(bind))???)
        };
        let listeners = [listen(CARRIED)?, listen(DIRECT)?];
        let many = listen(MANY)?;
        Ok(Self { pair, listeners, many })
    }

    /// Until the carrier is warm.
    fn start(&self) -> anyhow::Result<(Process, Process)> {
        for listener in &self.listeners {
            let listener = listener.try_clone()?;
            std::thread::spawn(move || serve(&listener));
        }
        self.pair.start()
    }

    /// Debian's, as it comes, on the client's host. `None`: it is not there.
    fn haproxy(&self) -> anyhow::Result<Option<Process>> {
        if Command::new("haproxy").arg("-v").output().is_err() {
            return Ok(None);
        }
        let (path, server) =
            (self.pair.client.directory.join("haproxy.cfg"), self.pair.server.node.addr_v4());
        fs::write(
            &path,
            format!(
                "defaults\n  mode tcp\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n\
                 listen p\n  bind 127.0.0.1:{PROXY}\n  server s {server}:{DIRECT}\n"
            ),
        )?;
        let mut command = self.pair.client.node.command("haproxy");
        command.arg("-db").arg("-f").arg(path);
        let mut process = Process::start("haproxy", command, &self.pair.client.directory)?;
        process.wait_until("its port", LIMIT, || self.connect(Way::Haproxy).is_ok())?;
        Ok(Some(process))
    }

    fn connect(&self, way: Way) -> anyhow::Result<TcpStream> {
        let server = self.pair.server.node.addr_v4().into();
        let to = match way {
            Way::Direct => SocketAddr::new(server, DIRECT),
            Way::Carried => SocketAddr::new(server, CARRIED),
            Way::Haproxy => SocketAddr::from(([127, 0, 0, 1], PROXY)),
        };
        let connect = || TcpStream::connect_timeout(&to, LIMIT);
        let stream = self.pair.client.cgroup.enter(|| self.pair.client.node.enter(connect))???;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(LIMIT))?;
        stream.set_write_timeout(Some(LIMIT))?;
        Ok(stream)
    }

    fn measure(&self, args: &Args, row: &mut Row) -> anyhow::Result<()> {
        let mut stream = self.connect(row.way)?;
        stream.write_all(b"e")?;
        let mut message = [7; MESSAGE];
        for count in 0..UNTIMED + args.messages {
            let start = Instant::now();
            stream.write_all(&message)?;
            stream.read_exact(&mut message)?;
            if count >= UNTIMED {
                row.latency.push(super::micros(start.elapsed()) / 2.0);
            }
        }
        let mut stream = self.connect(row.way)?;
        stream.write_all(b"s")?;
        let (bytes, block, limit) = (1 << 17, vec![7; 1 << 17], Duration::from_secs_f64(args.seconds));
        let (before, start, mut sent) = (Reading::take(std::process::id())?, Instant::now(), 0_u64);
        while start.elapsed() < limit {
            stream.write_all(&block)?;
            sent += bytes;
        }
        stream.shutdown(std::net::Shutdown::Write)?;
        let mut received = [0; 8];
        stream.read_exact(&mut received)?;
        ensure!(u64::from_be_bytes(received) == sent, "{}: other bytes came than were sent", row.way.name());
        let used = Reading::take(std::process::id())?.used_since(&before);
        let gbit = sent as f64 * 8.0 / 1e9 / start.elapsed().as_secs_f64();
        row.gbit.push(gbit);
        row.gbit_per_cpu.push(gbit / used.busy_cpus().max(0.01));
        Ok(())
    }
}

/// Each connection says by its first byte whether it is an echo's, or bytes to be counted.
fn serve(listener: &TcpListener) {
    for stream in listener.incoming().map_while(Result::ok) {
        std::thread::spawn(move || {
            let _ = answer(stream);
        });
    }
}

fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut kind = [0];
    stream.read_exact(&mut kind)?;
    if kind == *b"e" {
        let mut message = [0; MESSAGE];
        loop {
            stream.read_exact(&mut message)?;
            stream.write_all(&message)?;
        }
    }
    let (mut block, mut count) = (vec![0; 1 << 17], 0_u64);
    loop {
        match stream.read(&mut block)? {
            0 => return stream.write_all(&count.to_be_bytes()),
            length => count += length as u64,
        }
    }
}

impl Row {
    fn percentiles(&self) -> Option<Percentiles> {
        Percentiles::of(self.latency.clone())
    }

    /// Microseconds that each host adds one way: at p50 and p99.
    fn added(&self, rows: &[Self]) -> Option<[f64; 2]> {
        let direct = rows.iter().find(|row| row.way == Way::Direct)?.percentiles()?;
        let own = self.percentiles()?;
        let each = |own: f64, direct: f64| (own - direct) / self.way.hosts();
        (self.way != Way::Direct).then(|| [each(own.p50, direct.p50), each(own.p99, direct.p99)])
    }

    fn json(&self, rows: &[Self]) -> Value {
        let added = self.added(rows);
        json!({
            "way": self.way.name(), "one_way_us": self.percentiles(),
            "added_per_host_p50_us": added.map(|it| it[0]), "added_per_host_p99_us": added.map(|it| it[1]),
            "gbit_s": Spread::of(&self.gbit), "gbit_s_per_busy_cpu": Spread::of(&self.gbit_per_cpu),
            "messages": self.latency.len(), "rounds": self.gbit.len(),
        })
    }
}

fn render(rows: &[Row]) -> String {
    let head = ["way", "p50 us", "p99 us", "added per host, p50", "p99", "Gbit/s", "per busy CPU"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let Some((times, gbit)) = row.percentiles().zip(Spread::of(&row.gbit)) else { continue };
        let added = row.added(rows).map(|it| it.map(|us| format!("{us:.0}")));
        let [p50, p99] = added.unwrap_or_else(|| ["-", "-"].map(str::to_owned));
        let per_cpu = Spread::of(&row.gbit_per_cpu).map_or(0.0, |it| it.median);
        let (us50, us99) = (format!("{:.0}", times.p50), format!("{:.0}", times.p99));
        let (gbit, per_cpu) = (format!("{:.2}", gbit.median), format!("{per_cpu:.2}"));
        lines.push(vec![row.way.name().to_owned(), us50, us99, p50, p99, gbit, per_cpu]);
    }
    columns(&lines)
}
