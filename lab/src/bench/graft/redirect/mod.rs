//! `bench graft redirect`: the cost of a tunnel between two daemons on a good link, compared with a proxy.

pub mod echo;
mod many;
mod way;

use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::ensure;
use serde_json::{Value, json};

use self::many::Many;
use self::way::{RedirectMethod, RedirectRoute};
use super::carrying::{Carrying, CarryingSettings};
use super::host::LIMIT;
use crate::bench::process::BenchProcess;
use crate::bench::site::BenchSite;
use crate::bench::table::{columns, write_json};
use crate::bench::usage::{UsageReading, warn_if_busy};
use crate::beside::{self, Panel};
use crate::lab::Topology;
use crate::progress::BenchProgress;
use crate::stats::{Percentiles, Spread, median};

#[derive(Debug, clap::Args)]
pub struct RedirectArgs {
    /// Measurements to make: a comparison of --ways, or many connections at once
    #[arg(long, value_enum, value_delimiter = ',', default_value = "ways,many", value_name = "PART")]
    parts: Vec<RedirectPart>,
    /// Ways to carry a connection, which are compared; each way that needs daemons has daemons of its own
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        default_value = "tcp,haproxy,in-place,quic,carried-tcp,carried-mptcp",
        value_name = "WAY"
    )]
    ways: Vec<RedirectMethod>,
    /// Number of rounds; each round measures every way once
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Round trips of a 64-byte message in each round
    #[arg(long, default_value_t = 5000)]
    messages: usize,
    /// Seconds of sending at full rate in each round
    #[arg(long, default_value_t = 2.0)]
    seconds: f64,
    /// Number of connections tunnelled by QUIC at once, at most 55000; 0 skips the measurement
    #[arg(long, default_value_t = 10_000)]
    connections: usize,
    /// Number of times that the connections are made and closed
    #[arg(long, default_value_t = 3)]
    waves: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Draw the results to this file, as SVG
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum RedirectPart {
    Ways,
    Many,
}

const MANY: u16 = 7203;
const CONNECTIONS_MAX: usize = 55_000;
const MESSAGE: usize = 64;
/// Number of messages that are exchanged for warm-up, before any message is timed.
const UNTIMED: usize = 200;

struct RedirectRow<'a> {
    route: RedirectRoute<'a>,
    /// Latencies of messages in one direction, us.
    latency: Vec<f64>,
    gbit: Vec<f64>,
    gbit_per_cpu: Vec<f64>,
}

pub fn run(args: RedirectArgs) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.messages > 0, "--rounds and --messages must be at least 1");
    ensure!(args.seconds > 0.0 && args.seconds < 3600.0, "--seconds must be more than 0 and less than 3600");
    ensure!(args.connections <= CONNECTIONS_MAX, "--connections must be at most {CONNECTIONS_MAX}");
    ensure!(args.waves > 0, "--waves must be at least 1");
    ensure!(
        args.plot.is_none() || args.parts.contains(&RedirectPart::Ways),
        "--plot draws the comparison of ways, so --parts must include ways"
    );
    warn_if_busy()?;
    let site = BenchSite::new(&Topology::standard(1, 1))?;
    let mut json = Vec::new();
    if args.parts.contains(&RedirectPart::Ways) {
        json.extend(measure_interleaved(&site, &args)?);
    }
    if args.parts.contains(&RedirectPart::Many) && args.connections > 0 {
        json.push(measure_at_once(&site, args.connections, args.waves)?);
    }
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))
}

fn measure_interleaved(site: &BenchSite, args: &RedirectArgs) -> anyhow::Result<Vec<Value>> {
    let mut rows = Vec::new();
    // haproxy forwards to the server of the direct TCP connections. So with haproxy, direct connections are measured
    // too.
    let direct = args.ways.contains(&RedirectMethod::Haproxy).then_some(RedirectMethod::Tcp);
    let others = args.ways.iter().copied().filter(|way| direct.is_none() || *way != RedirectMethod::Tcp);
    let mut lacking = Vec::new();
    for (number, way) in direct.into_iter().chain(others).enumerate() {
        if let Some(why) = way.lacks() {
            lacking.push(format!("{} is skipped: {why}\n", way.name()));
            continue;
        }
        let route = RedirectRoute::new(site, way, number as u16, |listener| {
            std::thread::spawn(move || serve(&listener));
        })?;
        rows.push(RedirectRow { route, latency: Vec::new(), gbit: Vec::new(), gbit_per_cpu: Vec::new() });
    }
    let progress = BenchProgress::with_steps(rows.len() * args.rounds);
    for round in 1..=args.rounds {
        for row in &mut rows {
            progress.begin(format!("round {round}, {}", row.route.way.name()));
            row.measure(args)?;
            progress.end("")?;
        }
    }
    drop(progress);
    rows.iter().try_for_each(|row| row.route.check(2 * args.rounds))?;
    print!("{}{}", render(&rows), lacking.concat());
    args.plot.as_deref().map_or(Ok(()), |path| beside::draw(&panels(&rows), &["way"], 2, path))?;
    Ok(rows.iter().map(|row| row.json(&rows)).collect())
}

/// Measures many connections with new daemons, which have tunnelled nothing before.
fn measure_at_once(site: &BenchSite, count: usize, waves: usize) -> anyhow::Result<Value> {
    // A daemon that has almost as many connections as it may have stops redirecting new ones. So its limit is higher
    // than the number of connections.
    let carry = format!("connections = {}\n", count + count / 32 + 64);
    let wanted = CarryingSettings { carry: &carry, ..CarryingSettings::default() };
    let directory = site.directory().join("many");
    let pair = Carrying::wanted(site.relay()?, site.subscribers()?, &directory, &[MANY], &wanted)?;
    let server = &pair.server;
    many::make_room(count)?;
    let at = SocketAddr::from((server.node.addr_v4(), MANY));
    let mut command = server.node.command(std::env::current_exe()?);
    command.args(["bench", "graft", "echo", "--at", &at.to_string()]);
    let mut echo = BenchProcess::start("echo", server.cgroup.command(&command), &server.directory)?;
    let is_there = || server.node.enter(|| TcpStream::connect(at).is_ok()).unwrap_or(false);
    echo.wait_until("its port", LIMIT, is_there)?;
    let (far, near) = pair.start()?;
    let many = Many::measure(&pair, [&far, &near], at, count, waves)?;
    // On a busy machine, the daemon may not accept up to 1 % of the redirected connections in time. Those stay outside
    // of the tunnel.
    pair.check_redirected(waves * count * 99 / 100)?;
    print!("{}", many.render());
    Ok(many.json())
}

/// Serves connections. The first byte of each connection requests either an echo of all messages, or a count of the
/// received bytes after the last one.
fn serve(listener: &TcpListener) {
    for stream in listener.incoming().map_while(Result::ok) {
        std::thread::spawn(move || {
            let _ = answer(stream);
        });
    }
}

fn answer(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let mut kind = [0];
    read_all(&mut stream, &mut kind)?;
    if kind == *b"e" {
        let mut message = [0; MESSAGE];
        loop {
            read_all(&mut stream, &mut message)?;
            stream.write_all(&message)?;
        }
    }
    let mut block = vec![0; 1 << 17];
    let mut count = 0_u64;
    loop {
        match read(&mut stream, &mut block)? {
            0 => return stream.write_all(&count.to_be_bytes()),
            length => count += length as u64,
        }
    }
}

/// Reads with a time-out. A read may report its time-out too early on loopback, so it is repeated until the time is
/// over.
fn read(stream: &mut TcpStream, into: &mut [u8]) -> io::Result<usize> {
    let start = Instant::now();
    loop {
        match stream.read(into) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && start.elapsed() < LIMIT => {}
            done => return done,
        }
    }
}

fn read_all(stream: &mut TcpStream, into: &mut [u8]) -> io::Result<()> {
    let mut at = 0;
    while let Some(rest) = into.get_mut(at..).filter(|rest| !rest.is_empty()) {
        match read(stream, rest)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            length => at += length,
        }
    }
    Ok(())
}

impl RedirectRow<'_> {
    fn measure(&mut self, args: &RedirectArgs) -> anyhow::Result<()> {
        let mut stream = self.route.connect()?;
        stream.write_all(b"e")?;
        let mut message = [7; MESSAGE];
        for count in 0..UNTIMED + args.messages {
            let start = Instant::now();
            stream.write_all(&message)?;
            read_all(&mut stream, &mut message)?;
            if count >= UNTIMED {
                self.latency.push(super::micros(start.elapsed()) / 2.0);
            }
        }
        let mut stream = self.route.connect()?;
        stream.write_all(b"s")?;
        let bytes = 1 << 17;
        let block = vec![7; 1 << 17];
        let limit = Duration::from_secs_f64(args.seconds);
        let before = UsageReading::take(std::process::id())?;
        let start = Instant::now();
        let mut sent = 0_u64;
        while start.elapsed() < limit {
            stream.write_all(&block)?;
            sent += bytes;
        }
        stream.shutdown(std::net::Shutdown::Write)?;
        let mut received = [0; 8];
        read_all(&mut stream, &mut received)?;
        ensure!(
            u64::from_be_bytes(received) == sent,
            "{}: the received data differs from the sent data",
            self.route.way.name()
        );
        let used = UsageReading::take(std::process::id())?.used_since(&before);
        let gbit = sent as f64 * 8.0 / 1e9 / start.elapsed().as_secs_f64();
        self.gbit.push(gbit);
        self.gbit_per_cpu.push(gbit / used.busy_cpus().max(0.01));
        Ok(())
    }

    fn percentiles(&self) -> Option<Percentiles> {
        Percentiles::from_samples(self.latency.clone())
    }

    /// Returns the latency that each host adds in one direction, us, at p50 and p99.
    fn added(&self, rows: &[Self]) -> Option<[f64; 2]> {
        let direct = find_row(rows, RedirectMethod::Tcp)?.percentiles()?;
        let own = self.percentiles()?;
        let hosts = self.route.way.hosts()?;
        Some([(own.p50 - direct.p50) / hosts, (own.p99 - direct.p99) / hosts])
    }

    /// Returns this row's throughput relative to plain TCP, and its throughput per busy CPU relative to haproxy, both
    /// in percent. Each is the median over the rounds.
    fn beside(&self, rows: &[Self]) -> [Option<f64>; 2] {
        let of_other = |own: &[f64], other: &[f64]| {
            median(&own.iter().zip(other).map(|(own, other)| 100.0 * own / other).collect::<Vec<_>>())
        };
        let tcp = find_row(rows, RedirectMethod::Tcp).and_then(|tcp| of_other(&self.gbit, &tcp.gbit));
        let haproxy = find_row(rows, RedirectMethod::Haproxy);
        [tcp, haproxy.and_then(|haproxy| of_other(&self.gbit_per_cpu, &haproxy.gbit_per_cpu))]
    }

    fn json(&self, rows: &[Self]) -> Value {
        let added = self.added(rows);
        let [of_tcp, of_haproxy] = self.beside(rows);
        json!({
            "way": self.route.way.name(), "one_way_us": self.percentiles(),
            "added_per_host_p50_us": added.map(|it| it[0]), "added_per_host_p99_us": added.map(|it| it[1]),
            "gbit_s": Spread::from_values(&self.gbit), "gbit_s_per_busy_cpu": Spread::from_values(&self.gbit_per_cpu),
            "gbit_s_of_tcp_percent": of_tcp, "gbit_s_per_busy_cpu_of_haproxy_percent": of_haproxy,
            "messages": self.latency.len(), "rounds": self.gbit.len(),
        })
    }
}

fn find_row<'a, 'b>(rows: &'a [RedirectRow<'b>], way: RedirectMethod) -> Option<&'a RedirectRow<'b>> {
    rows.iter().find(|row| row.route.way == way)
}

fn panels(rows: &[RedirectRow<'_>]) -> [Panel; 2] {
    let panel = |title, figure: fn(&RedirectRow<'_>) -> Option<[f64; 3]>| {
        Panel::from_figures(title, rows.iter().map(|row| (row.route.way.name().to_owned(), figure(row))))
    };
    [
        panel("one way, us: p50 to p99", |row| row.percentiles().map(|it| [it.p50, it.p50, it.p99])),
        panel("Gbit/s: median, least to most", |row| {
            Spread::from_values(&row.gbit).map(|it| [it.median, it.min, it.max])
        }),
    ]
}

fn render(rows: &[RedirectRow<'_>]) -> String {
    let head = [
        "way",
        "p50 us",
        "p99 us",
        "added per host, p50",
        "p99",
        "Gbit/s",
        "of TCP %",
        "per busy CPU",
        "of haproxy %",
    ];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    let whole = |number: Option<f64>| number.map_or_else(|| "-".to_owned(), |it| format!("{it:.0}"));
    for row in rows {
        let Some((times, gbit)) = row.percentiles().zip(Spread::from_values(&row.gbit)) else { continue };
        let added = row.added(rows);
        let [of_tcp, of_haproxy] = row.beside(rows);
        let per_cpu = Spread::from_values(&row.gbit_per_cpu).map_or(0.0, |it| it.median);
        lines.push(vec![
            row.route.way.name().to_owned(),
            format!("{:.0}", times.p50),
            format!("{:.0}", times.p99),
            whole(added.map(|it| it[0])),
            whole(added.map(|it| it[1])),
            format!("{:.2}", gbit.median),
            whole(of_tcp),
            format!("{per_cpu:.2}"),
            whole(of_haproxy),
        ]);
    }
    columns(&lines)
}
