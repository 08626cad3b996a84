//! `bench graft crowded`: how long a known peer waits for its tunnel (carrier) while unknown hosts (strangers) hold
//! unfinished handshakes.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use millrace_graft::settings::CarrierKind;
use serde_json::{Value, json};

use super::host::{GraftHost, wait};
use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK};
use crate::bench::table::{columns, write_json};
use crate::bench::usage::warn_if_busy;
use crate::lab::{LabNode, Topology};
use crate::progress::BenchProgress;
use crate::stall::Strangers;
use crate::stats::Percentiles;

#[derive(Debug, clap::Args)]
pub struct CrowdedArgs {
    /// Tunnel protocols (carriers) to measure: `quic`, `tcp`, `mptcp`, `sctp`
    #[arg(long, value_delimiter = ',', default_value = "tcp,quic,sctp", value_name = "KIND")]
    carriers: Vec<String>,
    /// Handshakes that strangers (unknown hosts) start per second: from one IPv6 /64, and as many from one IPv4 address
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rate: u32,
    /// Number of tunnels with each protocol, set up one after the other
    #[arg(long, default_value_t = 200)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

const CARRIERS: u16 = 9188;
/// Number of addresses in one IPv6 /64 from which strangers (unknown hosts) start handshakes.
const STRANGERS: u16 = 16;
/// Addresses from which strangers (unknown hosts) start handshakes. They belong to the client's host, whose daemon does
/// not use them.
const V4: &str = "192.0.2.1";
const V6: &str = "2001:db8:96::";

struct CrowdedRow {
    carrier: String,
    rate: u32,
    /// Times from the start of a tunnel (carrier) until it is warm, that is, ready for connections, ms.
    times: Vec<f64>,
    /// Handshakes per second that strangers (unknown hosts) started during the measurement.
    begun: f64,
}

pub fn run(args: CrowdedArgs) -> anyhow::Result<()> {
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    warn_if_busy()?;
    let progress = BenchProgress::with_steps(args.carriers.len());
    let mut rows = Vec::new();
    for name in &args.carriers {
        progress.begin(format!("{} carriers, {name}", args.rounds));
        match args.measure(name) {
            Ok(row) => {
                progress.end("")?;
                rows.push(row);
            }
            Err(error) if is_unknown_here(&error) => {
                progress.end("skipped: this kernel lacks the protocol")?
            }
            Err(error) => return Err(error),
        }
    }
    drop(progress);
    ensure!(!rows.is_empty(), "this kernel has none of these kinds of carriers");
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(CrowdedRow::json).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))
}

/// Reports whether the error says that the kernel lacks the tunnel's protocol, such as SCTP.
fn is_unknown_here(error: &anyhow::Error) -> bool {
    let error = error.downcast_ref::<std::io::Error>();
    error.and_then(std::io::Error::raw_os_error) == Some(nix::libc::EPROTONOSUPPORT)
}

impl CrowdedArgs {
    fn measure(&self, name: &str) -> anyhow::Result<CrowdedRow> {
        let kind = CarrierKind::ALL.into_iter().find(|kind| kind.name() == name);
        let kind = kind.with_context(|| format!("{name} is not a kind of carrier"))?;
        let site = BenchSite::new(&Topology::standard(1, 1))?;
        let near = site.relay()?;
        let far = site.subscribers()?;
        let from = strangers(near, far)?;
        let (client, server) = hosts(&site, name)?;
        let _far = server.start()?;
        let is_over = AtomicBool::new(false);
        let begun = [AtomicUsize::new(0), AtomicUsize::new(0)];
        let is_over = &is_over;
        let counts = &begun;
        let pace = Duration::from_secs(1) / self.rate;
        std::thread::scope(|scope| {
            let groups = from.iter().zip(counts).zip([far.addr_v4().into(), IpAddr::from(far.addr_v6())]);
            let calls: Vec<_> = groups
                .map(|((from, begun), to)| {
                    let to = SocketAddr::new(to, CARRIERS);
                    let strangers = Strangers { kind, from, to, pace, is_over, begun };
                    scope.spawn(move || near.enter(|| strangers.run()).map_err(anyhow::Error::from)?)
                })
                .collect();
            // Stop the strangers' handshakes even after an error, since `thread::scope` waits for their threads.
            let measured = self.rounds(&client, counts);
            is_over.store(true, Relaxed);
            for call in calls {
                call.join().map_err(|_| anyhow::anyhow!("a thread of the strangers panicked"))??;
            }
            let (times, begun) = measured?;
            Ok(CrowdedRow { carrier: name.to_owned(), rate: self.rate, times, begun })
        })
    }

    fn rounds(
        &self,
        client: &CrowdedClient<'_>,
        counts: &[AtomicUsize; 2],
    ) -> anyhow::Result<(Vec<f64>, f64)> {
        let count = || counts.iter().map(|count| count.load(Relaxed)).sum::<usize>();
        // Measure only once the strangers (unknown hosts) hold unfinished handshakes.
        wait("unfinished handshakes", || Ok(count() > 200))?;
        client.configure(0)?;
        let _near = client.host.start()?;
        client.host.wait_warm(1)?;
        let start = Instant::now();
        let before = count();
        let mut times = Vec::new();
        for round in 1..=self.rounds {
            client.configure(round)?;
            let begin = Instant::now();
            let done = client.host.ask("reload")?;
            ensure!(done.get("ok") == Some(&Value::Bool(true)), "{done}");
            wait("a new carrier", || {
                let status = client.host.status()?;
                let first = status.pointer("/status/carry/carriers/0");
                let is_warm = first.is_some_and(|it| it["state"] == "warm");
                // The wait is for the tunnel (carrier) that is set up after the reload of the settings, and not for an
                // older one.
                let age = first.and_then(|it| it["age_s"].as_f64()).unwrap_or(f64::MAX);
                Ok(is_warm && age < begin.elapsed().as_secs_f64())
            })?;
            times.push(begin.elapsed().as_secs_f64() * 1e3);
        }
        Ok((times, (count() - before) as f64 / start.elapsed().as_secs_f64()))
    }
}

/// Gives the client's host the addresses from which strangers (unknown hosts) start handshakes. Returns the IPv4 and
/// the IPv6 addresses.
fn strangers(near: &LabNode, far: &LabNode) -> anyhow::Result<[Vec<IpAddr>; 2]> {
    let v6: Vec<_> = (1..=STRANGERS).map(|n| format!("{V6}{n:x}")).collect();
    for address in &v6 {
        ip(near, &["addr", "add", &format!("{address}/128"), "dev", "lo"])?;
    }
    ip(near, &["addr", "add", &format!("{V4}/32"), "dev", "lo"])?;
    let way = near.interface(SUBSCRIBERS_LINK).context("the lab has no link between the hosts")?;
    ip(far, &["route", "add", V4, "via", &way.v4.to_string()])?;
    ip(far, &["-6", "route", "add", &format!("{V6}/64"), "via", &way.v6.to_string()])?;
    let v6 = v6.iter().map(|address| address.parse()).collect::<Result<_, _>>()?;
    Ok([vec![V4.parse()?], v6])
}

fn ip(node: &LabNode, arguments: &[&str]) -> anyhow::Result<()> {
    let output = node.command("ip").args(arguments).output()?;
    ensure!(output.status.success(), "ip {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

struct CrowdedClient<'a> {
    host: GraftHost<'a>,
    settings: String,
}

impl CrowdedClient<'_> {
    /// Writes the settings of the client's daemon. They contain an address of the peer that is made from `number`. If
    /// the address changes, the daemon sets up the peer's tunnel again.
    fn configure(&self, number: usize) -> anyhow::Result<()> {
        let address = IpAddr::from([198, 18, (number >> 8) as u8, number as u8]);
        self.host.configure(&format!("{}addresses = [\"{address}\"]\n", self.settings))
    }
}

fn hosts<'a>(site: &'a BenchSite, carrier: &str) -> anyhow::Result<(CrowdedClient<'a>, GraftHost<'a>)> {
    let directory = |name: &str| site.directory().join(format!("{name}-{carrier}"));
    let client = GraftHost::new("client", site.relay()?, &directory("client"))?;
    let server = GraftHost::new("server", site.subscribers()?, &directory("server"))?;
    let keys = (client.key()?, server.key()?);
    let own = format!("[agreement]\nkey = \"host.key\"\n[carry]\ncarrier = \"{carrier}\"\n");
    let near = client.node.interface(SUBSCRIBERS_LINK).context("the lab has no link between the hosts")?;
    let at = server.node.addr_v4();
    let address = near.v4;
    server.configure(&format!(
        "{own}listen = \"[::]:{CARRIERS}\"\n[[peer]]\nname = \"client\"\nkey = \"{}\"\naddresses = [\"{address}\"]\n",
        keys.0
    ))?;
    let settings =
        format!("{own}[[peer]]\nname = \"server\"\nkey = \"{}\"\ncarry = \"{at}:{CARRIERS}\"\n", keys.1);
    Ok((CrowdedClient { host: client, settings }, server))
}

impl CrowdedRow {
    fn json(&self) -> Value {
        json!({
            "carrier": self.carrier, "rate": self.rate, "begun_per_s": self.begun, "rounds": self.times.len(),
            "warm_ms": Percentiles::from_samples(self.times.clone()),
        })
    }
}

fn render(rows: &[CrowdedRow]) -> String {
    let head = ["carrier", "strangers/s", "carriers", "warm p50 ms", "p90", "p99", "most"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let Some(times) = Percentiles::from_samples(row.times.clone()) else { continue };
        let figures = [times.p50, times.p90, times.p99, times.max].map(|ms| format!("{ms:.0}"));
        let mut line = vec![row.carrier.clone(), format!("{:.0}", row.begun), row.times.len().to_string()];
        line.extend(figures);
        lines.push(line);
    }
    columns(&lines)
}
