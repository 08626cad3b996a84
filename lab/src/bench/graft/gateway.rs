//! `bench graft gateway`: two gateways tunnel connections of hosts that have nothing installed. It measures the
//! gateways' cost on a good link, and their gain on a long link that loses packets.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context as _, anyhow, bail, ensure};
use nix::sys::socket::{setsockopt, sockopt};
use serde_json::{Value, json};

use super::host::{GraftHost, LIMIT};
use super::network::{self, NetworkProfile};
use crate::bench::process::BenchProcess;
use crate::bench::site::{BenchSite, PUBLISHER_LINK};
use crate::bench::table::{columns, write_json};
use crate::bench::usage::warn_if_busy;
use crate::lab::{Directions, LabNode, Topology};
use crate::progress::BenchProgress;
use crate::stats::{Percentiles, Spread};

#[derive(Debug, clap::Args)]
pub struct GatewayArgs {
    /// Number of interleaved rounds with gateways and without
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Round trips of a 64-byte message in each round
    #[arg(long, default_value_t = 2000)]
    messages: usize,
    /// Size of a transfer from the server, MiB
    #[arg(long, value_name = "MIB", default_value_t = 8)]
    size: usize,
    /// Loss and round-trip time between the gateways, for transfers
    #[arg(long, value_name = "PERCENT:MS", default_value = "1:100")]
    network: NetworkProfile,
    /// Rate between the gateways, for transfers
    #[arg(long, value_name = "MBIT", default_value_t = 100)]
    rate: u32,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const CARRIED: u16 = 7300;
const FORWARDED: u16 = 7301;
const CARRIERS: u16 = 9188;
const BETWEEN: &str = "relay-relay2";
const BEHIND: &str = "relay2-sub1";
const MESSAGE: usize = 64;
/// Number of messages that are exchanged for warm-up, before any message is timed.
const UNTIMED: usize = 100;
/// Congestion control of the servers in all measurements.
const CONTROL: &str = "cubic";

#[derive(Clone, Copy, PartialEq)]
enum GatewayWay {
    Forwarded,
    Carried,
}

impl GatewayWay {
    const ALL: [Self; 2] = [Self::Forwarded, Self::Carried];

    fn name(self) -> &'static str {
        match self {
            Self::Forwarded => "forwarded",
            Self::Carried => "carried",
        }
    }

    fn port(self) -> u16 {
        match self {
            Self::Forwarded => FORWARDED,
            Self::Carried => CARRIED,
        }
    }
}

/// Results of connections that the gateways tunnel, or of those that they only forward. They are the latencies of
/// messages in one direction, us, and the times of transfers from the connection attempt to the last byte, ms.
#[derive(Default)]
struct GatewayRow {
    one_way_us: Vec<f64>,
    transfer_ms: Vec<f64>,
}

pub fn run(args: GatewayArgs) -> anyhow::Result<()> {
    ensure!(
        args.rounds > 0 && args.messages > 0 && args.size > 0,
        "--rounds, --messages and --size must be at least 1"
    );
    args.network.check()?;
    warn_if_busy()?;
    let mut rows = [GatewayRow::default(), GatewayRow::default()];
    let progress = BenchProgress::with_steps(2 * args.rounds * GatewayWay::ALL.len());
    {
        let site = BenchSite::new(&Topology::standard(2, 1))?;
        let hosts = GatewayHosts::start(&site)?;
        hosts.each(&args, &progress, &mut rows, |(stream, _), row| exchange(stream, args.messages, row))?;
    }
    let site = BenchSite::new(&between(&args)?)?;
    let hosts = GatewayHosts::start(&site)?;
    hosts.each(&args, &progress, &mut rows, |stream, row| {
        transfer(stream.0, stream.1, args.size << 20, row)
    })?;
    drop(progress);
    print!("{}", render(&args, &rows));
    let json: Vec<_> = GatewayWay::ALL.iter().zip(&rows).map(|(way, row)| row.json(*way, &args)).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))
}

/// Returns the topology, a chain: client, gateway, gateway, server.
fn between(args: &GatewayArgs) -> anyhow::Result<Topology> {
    let NetworkProfile { loss, burst, rtt_ms } = args.network;
    let rate = args.rate;
    let loss = network::loss(loss, burst);
    let queue = (u64::from(rate) * 125 * u64::from(rtt_ms)).max(64 << 10);
    let mut topology = Topology::standard(2, 1);
    topology.netem = false;
    let settings = format!("delay={}us rate={rate}mbit queue-bytes={queue} {loss}", rtt_ms * 500);
    topology.impair(BETWEEN, Directions::Both, &settings)?;
    Ok(topology)
}

struct GatewayHosts<'a> {
    client: &'a LabNode,
    server: SocketAddr,
    near: GraftHost<'a>,
    _processes: [BenchProcess; 2],
}

impl<'a> GatewayHosts<'a> {
    fn start(site: &'a BenchSite) -> anyhow::Result<Self> {
        let client = site.node("pub")?;
        let server = site.subscribers()?;
        let host = |name, node| GraftHost::new(name, node, &site.directory().join(name));
        let near = host("near", site.relay()?)?;
        let far = host("far", site.node("relay2")?)?;
        let keys = [near.key()?, far.key()?];
        let at = SocketAddr::new(far.node.addr_v4().into(), CARRIERS);
        let settings = |host: &GraftHost<'_>,
                        behind: (&str, &LabNode),
                        listen: &str|
         -> anyhow::Result<String> {
            let interface = host.node.interface(behind.0).with_context(|| format!("no link {}", behind.0))?;
            let interface = &interface.device;
            let network = behind.1.addr_v4();
            Ok(format!(
                "[agreement]\nkey = \"host.key\"\n[carry]\n{listen}[gateway]\ninterface = \"{interface}\"\nnetworks = [\"{network}\"]\n"
            ))
        };
        let peer = |key: &str, behind: &LabNode, side: &str| {
            format!(
                "[[peer]]\nname = \"p\"\nkey = \"{key}\"\nnetworks = [\"{}\"]\n{}[[rule]]\nname = \"r\"\nside = \"{side}\"\n\
                 port = {CARRIED}\ntier = \"carried\"\nagree = false\n",
                behind.addr_v4(),
                if side == "client" { format!("carry = \"{at}\"\n") } else { String::new() }
            )
        };
        let ours = settings(&near, (PUBLISHER_LINK, client), "")?;
        let theirs = settings(&far, (BEHIND, server), &format!("listen = \"{at}\"\n"))?;
        near.configure(&(ours + &peer(&keys[1], server, "client")))?;
        far.configure(&(theirs + &peer(&keys[0], client, "server")))?;
        for way in GatewayWay::ALL {
            let listener = server.enter(|| TcpListener::bind((server.addr_v4(), way.port())))??;
            setsockopt(&listener, sockopt::TcpCongestion, &CONTROL.into())
                .map_err(|error| anyhow!("TCP with {CONTROL}: {error}"))?;
            std::thread::spawn(move || serve(&listener));
        }
        let processes = [far.start()?, near.start()?];
        let hosts =
            Self { client, server: SocketAddr::new(server.addr_v4().into(), 0), near, _processes: processes };
        hosts.wait_warm()?;
        Ok(hosts)
    }

    fn wait_warm(&self) -> anyhow::Result<()> {
        self.near.wait_for("a warm carrier", |status| {
            let of = |what: &str| status.pointer(&format!("/status/carry/carriers/0/{what}"));
            // The tunnel's state `warm` says that the client's gateway can send. Data from the server's gateway must
            // also have opened its congestion window in the other direction.
            let came = of("received_bytes").and_then(Value::as_u64);
            of("state").and_then(Value::as_str) == Some("warm") && came > Some(256 << 10)
        })
    }

    fn carried(&self) -> anyhow::Result<u64> {
        let status = self.near.status()?;
        let count = status.pointer("/status/carry/gateway/verdicts/let-in").and_then(Value::as_u64);
        count.context("the gateway's status has no count of accepted connections")
    }

    /// Runs `measure` in every round over a new tunnelled connection and over a new forwarded one.
    fn each(
        &self,
        args: &GatewayArgs,
        progress: &BenchProgress,
        rows: &mut [GatewayRow; 2],
        measure: impl Fn((TcpStream, Instant), &mut GatewayRow) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        for round in 1..=args.rounds {
            for (way, row) in GatewayWay::ALL.iter().zip(rows.iter_mut()) {
                progress.begin(format!("round {round}, {}", way.name()));
                let to = SocketAddr::new(self.server.ip(), way.port());
                let start = Instant::now();
                let stream = self.client.enter(|| TcpStream::connect_timeout(&to, LIMIT))??;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(LIMIT))?;
                measure((stream, start), row)?;
                progress.end("")?;
            }
        }
        let carried = self.carried()?;
        ensure!(
            carried == args.rounds as u64,
            "{carried} connections were tunnelled instead of {}",
            args.rounds
        );
        Ok(())
    }
}

/// Serves connections. The first eight bytes of each are the number of bytes that the client requests; 0 requests an
/// echo.
fn serve(listener: &TcpListener) {
    for stream in listener.incoming().map_while(Result::ok) {
        std::thread::spawn(move || {
            let _ = answer(stream);
        });
    }
}

fn answer(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut wanted = [0; 8];
    stream.read_exact(&mut wanted)?;
    let mut left = usize::try_from(u64::from_be_bytes(wanted)).unwrap_or_default();
    if left == 0 {
        let mut message = [0; MESSAGE];
        loop {
            stream.read_exact(&mut message)?;
            stream.write_all(&message)?;
        }
    }
    let block = vec![7; 1 << 16];
    while left > 0 {
        let now = left.min(block.len());
        stream.write_all(&block[..now])?;
        left -= now;
    }
    Ok(())
}

fn exchange(mut stream: TcpStream, messages: usize, row: &mut GatewayRow) -> anyhow::Result<()> {
    stream.write_all(&0_u64.to_be_bytes())?;
    let mut message = [7; MESSAGE];
    for count in 0..UNTIMED + messages {
        let start = Instant::now();
        stream.write_all(&message)?;
        stream.read_exact(&mut message)?;
        if count >= UNTIMED {
            row.one_way_us.push(super::micros(start.elapsed()) / 2.0);
        }
    }
    Ok(())
}

fn transfer(mut stream: TcpStream, start: Instant, bytes: usize, row: &mut GatewayRow) -> anyhow::Result<()> {
    stream.write_all(&(bytes as u64).to_be_bytes())?;
    let mut got = 0;
    let mut block = vec![0; 1 << 17];
    while got < bytes {
        match stream.read(&mut block)? {
            0 => bail!("{got} bytes arrived instead of {bytes}"),
            length => got += length,
        }
    }
    row.transfer_ms.push(super::micros(start.elapsed()) / 1e3);
    Ok(())
}

impl GatewayRow {
    fn json(&self, way: GatewayWay, args: &GatewayArgs) -> Value {
        json!({
            "way": way.name(), "one_way_us": Percentiles::from_samples(self.one_way_us.clone()),
            "messages": self.one_way_us.len(), "transfer_ms": Spread::from_values(&self.transfer_ms),
            "transfers": self.transfer_ms.len(), "mib": args.size, "loss_percent": args.network.loss,
            "rtt_ms": args.network.rtt_ms, "rate_mbit": args.rate, "control": CONTROL,
        })
    }
}

fn render(args: &GatewayArgs, rows: &[GatewayRow; 2]) -> String {
    let transfer = format!("{} MiB at {} %, {} ms: ms", args.size, args.network.loss, args.network.rtt_ms);
    let head = ["way", "one way, p50 us", "p99", &transfer, "least", "most"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for (way, row) in GatewayWay::ALL.iter().zip(rows) {
        let times =
            Percentiles::from_samples(row.one_way_us.clone()).zip(Spread::from_values(&row.transfer_ms));
        let Some((delay, transfer)) = times else { continue };
        let whole = |value: f64| format!("{value:.0}");
        let [p50, p99] = [delay.p50, delay.p99].map(whole);
        let [median, least, most] = [transfer.median, transfer.min, transfer.max].map(whole);
        lines.push(vec![way.name().to_owned(), p50, p99, median, least, most]);
    }
    columns(&lines)
}
