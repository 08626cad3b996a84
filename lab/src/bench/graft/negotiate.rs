//! `bench graft negotiate`: how long two daemons take to agree on grafts, divided into the steps of a negotiation.

use std::fs;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use serde_json::{Value, json};

use super::host::{GraftHost, LIMIT};
use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK};
use crate::bench::table::{columns, write_json};
use crate::bench::usage::warn_if_busy;
use crate::lab::{Directions, Topology};
use crate::program::product;
use crate::progress::BenchProgress;
use crate::stats::Percentiles;

#[derive(Debug, clap::Args)]
pub struct NegotiateArgs {
    /// Round-trip time between the hosts; 0 adds no delay
    #[arg(long, value_delimiter = ',', default_value = "0,20,100", value_name = "MS")]
    rtt_ms: Vec<u32>,
    /// Number of grafts that each host offers in a negotiation, in addition to the built-in ones
    #[arg(long, value_delimiter = ',', default_value = "0,50,250", value_name = "COUNT")]
    pools: Vec<usize>,
    /// Number of negotiations of each measurement
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Number of TCP connections of each measurement: as many with a negotiated graft as without
    #[arg(long, default_value_t = 200)]
    connections: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Port of the TLS connection over which the two daemons negotiate. The next constant, `PORT`, is the port of the
/// application whose TCP handshakes are timed.
const CONTROL: u16 = 9187;
const PORT: u16 = 7200;
/// Names of a negotiation's steps in the daemon's status, which has the duration of each.
const STEPS: [&str; 4] = ["connect_us", "tls_us", "offer_us", "bind_us"];

struct NegotiateRow {
    rtt_ms: u32,
    pool: usize,
    steps: [Vec<f64>; 4],
    plain: Vec<f64>,
    bound: Vec<f64>,
}

pub fn run(args: NegotiateArgs) -> anyhow::Result<()> {
    ensure!(args.rounds > 0 && args.connections > 0, "--rounds and --connections must be at least 1");
    warn_if_busy()?;
    let mut rows = Vec::new();
    let progress = BenchProgress::with_steps(args.rtt_ms.len() * args.pools.len() * args.rounds);
    for rtt_ms in &args.rtt_ms {
        let mut topology = Topology::standard(1, 1);
        if *rtt_ms > 0 {
            topology.impair(SUBSCRIBERS_LINK, Directions::Both, &format!("delay={}us", rtt_ms * 500))?;
        }
        let site = BenchSite::new(&topology)?;
        for pool in &args.pools {
            rows.push(args.measure(&site, *rtt_ms, *pool, &progress)?);
        }
    }
    drop(progress);
    print!("{}", render(&rows));
    let json: Vec<_> = rows.iter().map(NegotiateRow::json).collect();
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &json))
}

impl NegotiateArgs {
    fn measure(
        &self,
        site: &BenchSite,
        rtt_ms: u32,
        pool: usize,
        progress: &BenchProgress,
    ) -> anyhow::Result<NegotiateRow> {
        let hosts = NegotiateHosts::new(site, pool)?;
        let listener = hosts.listen()?;
        let mut row =
            NegotiateRow { rtt_ms, pool, steps: Default::default(), plain: Vec::new(), bound: Vec::new() };
        for _ in 0..self.connections {
            row.plain.push(hosts.connect(&listener)?);
        }
        drop(listener);
        let _called = hosts.called.start()?;
        let listener = hosts.listen()?;
        for round in 1..=self.rounds {
            progress.begin(format!("round {round}, {rtt_ms} ms, {pool} grafts"));
            let caller = hosts.caller.start()?;
            let negotiated = negotiated(&hosts.caller)?;
            for (times, step) in row.steps.iter_mut().zip(STEPS) {
                times.push(negotiated.get(step).and_then(Value::as_f64).context(step)?);
            }
            if round == self.rounds {
                for _ in 0..self.connections {
                    row.bound.push(hosts.connect(&listener)?);
                }
            }
            caller.interrupt(LIMIT)?;
            progress.end("")?;
        }
        Ok(row)
    }
}

/// Two hosts with settings for a daemon each.
struct NegotiateHosts<'a> {
    caller: GraftHost<'a>,
    called: GraftHost<'a>,
}

impl<'a> NegotiateHosts<'a> {
    fn new(site: &'a BenchSite, pool: usize) -> anyhow::Result<Self> {
        let directory = |name: &str| site.directory().join(format!("{name}-{pool}"));
        let caller = GraftHost::new("caller", site.relay()?, &directory("caller"))?;
        let called = GraftHost::new("called", site.subscribers()?, &directory("called"))?;
        [&caller, &called].into_iter().try_for_each(|host| fill(host, pool))?;
        let at = SocketAddr::new(called.node.addr_v4().into(), CONTROL);
        let near = caller.key()?;
        let far = called.key()?;
        let rule = |side: &str| {
            format!(
                "[[rule]]\nname = \"r\"\nside = \"{side}\"\nport = {PORT}\nagree = \"bound\"\ncongestion = \"cubic\"\n"
            )
        };
        let peer = format!("[[peer]]\nname = \"p\"\nprobe = false\naddress = \"{at}\"\nkey = \"{far}\"\n");
        let own = "pool = [\"pool\"]\n[agreement]\nkey = \"host.key\"\n";
        caller.configure(&format!("{own}{peer}{}", rule("client")))?;
        let peer = format!("[[peer]]\nname = \"p\"\nkey = \"{near}\"\n");
        called.configure(&format!("{own}listen = \"{at}\"\n{peer}{}", rule("server")))?;
        Ok(Self { caller, called })
    }

    fn listen(&self) -> anyhow::Result<TcpListener> {
        let at = (self.called.node.addr_v4(), PORT);
        Ok(self.called.cgroup.enter(|| self.called.node.enter(|| TcpListener::bind(at)))???)
    }

    /// Makes one connection. Returns the duration of the TCP handshake, us.
    fn connect(&self, listener: &TcpListener) -> anyhow::Result<f64> {
        let at = listener.local_addr()?;
        let connect = || {
            let start = Instant::now();
            TcpStream::connect(at).map(|stream| (start.elapsed(), stream))
        };
        let (time, _near) = self.caller.cgroup.enter(|| self.caller.node.enter(connect))???;
        listener.accept()?;
        Ok(super::micros(time))
    }
}

/// Adds the same graft under many names to those that a host offers.
fn fill(host: &GraftHost<'_>, count: usize) -> anyhow::Result<()> {
    let pool = host.directory.join("pool");
    fs::create_dir_all(&pool)?;
    let mut export = Command::new(product()?);
    let exported = export.args(["graft", "export"]).arg(&pool).arg("longhaul").output()?;
    ensure!(exported.status.success(), "{}", String::from_utf8_lossy(&exported.stderr));
    let text = fs::read_to_string(pool.join("longhaul.toml"))?;
    fs::remove_file(pool.join("longhaul.toml"))?;
    for at in 0..count {
        let text = text.replace("name = \"longhaul\"", &format!("name = \"longhaul{at}\""));
        fs::write(pool.join(format!("longhaul{at}.toml")), text)?;
    }
    Ok(())
}

/// Waits until the daemons have agreed on grafts. Returns the durations of the negotiation's steps.
fn negotiated(host: &GraftHost<'_>) -> anyhow::Result<Value> {
    let start = Instant::now();
    loop {
        let peer = host.status()?.pointer("/status/peers/0").cloned().unwrap_or_default();
        if peer.get("state").and_then(Value::as_str) == Some("agreed") {
            return peer
                .get("negotiated")
                .cloned()
                .context("the status has no durations of the negotiation's steps");
        }
        if start.elapsed() > LIMIT {
            bail!("no agreement within {LIMIT:?}: {peer}");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

impl NegotiateRow {
    fn total(&self) -> Vec<f64> {
        let rounds = self.steps[0].len();
        (0..rounds).map(|at| self.steps.iter().filter_map(|times| times.get(at)).sum()).collect()
    }

    fn json(&self) -> Value {
        let steps = STEPS.iter().zip(&self.steps);
        let steps: serde_json::Map<_, _> = steps
            .map(|(name, times)| ((*name).to_owned(), json!(Percentiles::from_samples(times.clone()))))
            .collect();
        json!({
            "rtt_ms": self.rtt_ms, "pool": self.pool, "rounds": self.steps[0].len(),
            "total_us": Percentiles::from_samples(self.total()), "steps": steps,
            "connections": self.plain.len(),
            "tcp_plain_us": Percentiles::from_samples(self.plain.clone()),
            "tcp_bound_us": Percentiles::from_samples(self.bound.clone()),
        })
    }
}

fn render(rows: &[NegotiateRow]) -> String {
    let head =
        ["RTT ms", "pool", "p50 ms", "p99 ms", "TCP", "TLS", "offer", "bind", "TCP plain us", "TCP bound us"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for row in rows {
        let p50 = |times: &[f64]| Percentiles::from_samples(times.to_vec()).map_or(0.0, |it| it.p50);
        let Some(total) = Percentiles::from_samples(row.total()) else { continue };
        let mut line = vec![row.rtt_ms.to_string(), row.pool.to_string()];
        line.extend([total.p50, total.p99].map(|us| format!("{:.2}", us / 1e3)));
        line.extend(row.steps.iter().map(|times| format!("{:.2}", p50(times) / 1e3)));
        line.extend([p50(&row.plain), p50(&row.bound)].map(|us| format!("{us:.0}")));
        lines.push(line);
    }
    columns(&lines)
}
