//! `bench graft choice`: the daemon's learned model chooses the wrong congestion control for a network. Counts the
//! connections until the daemon uses another one.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context as _, anyhow, ensure};
use nix::sys::socket::{getsockopt, sockopt};
use serde_json::{Value, json};

use super::host::{GraftHost, LIMIT};
use super::register;
use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK};
use crate::bench::table::{columns, write_json};
use crate::lab::{Directions, LabNode, Topology};
use crate::progress::BenchProgress;

const PORT: u16 = 7100;
/// Number of consecutive connections without the congestion control that the learned model chose, after which the
/// model's choice counts as abandoned.
const SETTLED: usize = 8;

#[derive(Debug, clap::Args)]
pub struct ChoiceArgs {
    /// Networks: round-trip time (ms), loss (%), rate (Mbit/s)
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "30:3:20,60:3:20,60:1:50,120:2:20,120:5:10,250:1:10,300:2:20,500:1:5",
        value_name = "MS:PERCENT:MBIT"
    )]
    networks: Vec<ChoiceNetwork>,
    /// Congestion control that the measured daemon's model chooses on every network
    #[arg(long, default_value = "reno", value_name = "NAME")]
    learned: String,
    /// Cost that the model expects of a connection with the congestion control of --learned, as a multiple of the
    /// lowest cost that the network allows
    #[arg(long, default_value_t = 2.0)]
    usual: f64,
    /// Use this learned model, made by `graft train`, instead of one made from --learned and --usual
    #[arg(long, value_name = "FILE")]
    model: Option<PathBuf>,
    /// Number of connections on each network
    #[arg(long, default_value_t = 100)]
    connections: usize,
    /// Data that each connection transfers
    #[arg(long, default_value_t = 256, value_name = "KIB")]
    size_kib: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug)]
struct ChoiceNetwork {
    rtt_ms: f64,
    loss_percent: f64,
    rate_mbit: f64,
}

impl FromStr for ChoiceNetwork {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parts: Option<Vec<f64>> =
            text.split(':').map(|part| part.parse().ok().filter(|it: &f64| *it >= 0.0)).collect();
        match parts.as_deref() {
            Some([rtt_ms, loss_percent, rate_mbit]) if *rate_mbit > 0.0 => {
                Ok(Self { rtt_ms: *rtt_ms, loss_percent: *loss_percent, rate_mbit: *rate_mbit })
            }
            _ => Err(format!("{text:?} is no MS:PERCENT:MBIT, such as 60:3:20")),
        }
    }
}

/// Congestion control and duration of one connection.
struct Went {
    candidate: String,
    ms: f64,
}

pub fn run(args: ChoiceArgs) -> anyhow::Result<()> {
    ensure!(args.connections > SETTLED, "--connections must be more than {SETTLED}");
    ensure!(args.size_kib > 0, "--size-kib must be at least 1");
    let _grafts = register(std::slice::from_ref(&args.learned))?;
    let progress = BenchProgress::with_steps(args.networks.len());
    let mut rows = Vec::new();
    for (seed, network) in (1..).zip(&args.networks) {
        progress.begin(format!("{} ms, {} %", network.rtt_ms, network.loss_percent));
        rows.push(args.on(network, seed)?);
        progress.next("a network");
    }
    drop(progress);
    print!("{}", text(&rows));
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &rows))
}

impl ChoiceArgs {
    fn on(&self, network: &ChoiceNetwork, seed: u64) -> anyhow::Result<Value> {
        let mut topology = Topology::standard(1, 1);
        (topology.seed, topology.netem) = (seed, false);
        let delay = format!("delay={}us", (network.rtt_ms * 500.0) as u64);
        topology.impair(SUBSCRIBERS_LINK, Directions::Both, &delay)?;
        let bad = format!("loss={}% rate={}mbit", network.loss_percent, network.rate_mbit);
        topology.impair(SUBSCRIBERS_LINK, Directions::Forward, &bad)?;
        let site = BenchSite::new(&topology)?;
        let near = site.relay()?;
        let far = site.subscribers()?;
        // Forget TCP metrics of earlier connections, so that every connection starts like the first one to its peer.
        near.enter(|| fs::write("/proc/sys/net/ipv4/tcp_no_metrics_save", "1"))??;
        let host = GraftHost::new("client", near, &site.directory().join("client"))?;
        fs::write(host.directory.join("model.json"), self.model()?)?;
        host.configure(&format!(
            "model = \"model.json\"\n[[rule]]\nname = \"r\"\nside = \"client\"\nport = {PORT}\nagree = false\nselect = \"loss\"\n\
             size-kib = {}\n",
            self.size_kib
        ))?;
        let _daemon = host.start()?;
        // The daemon's control socket exists before the BPF programs are loaded. The daemon answers on it once they are
        // loaded.
        host.status()?;
        let listener = far.enter(|| TcpListener::bind((far.addr_v4(), PORT)))??;
        let first = self.connect(&host, near, &listener)?;
        host.wait_for("the model's choice", |status| {
            status.pointer("/status/selection/chosen").and_then(Value::as_u64) == Some(1)
        })?;
        let all: Result<Vec<_>, _> =
            (0..self.connections).map(|_| self.connect(&host, near, &listener)).collect();
        self.row(network, &first, &all?, &host.status()?)
    }

    fn model(&self) -> anyhow::Result<String> {
        if let Some(path) = &self.model {
            return fs::read_to_string(path).with_context(|| path.display().to_string());
        }
        let rank = json!([{ "candidate": self.learned, "right": 1.0, "utility": 1.0 }]);
        let leaf = json!({ "number": 0, "examples": 1, "usual": self.usual, "ranking": rank });
        let tree = json!({ "leaf": leaf });
        Ok(json!({ "version": 1, "about": "wrong", "candidates": [self.learned], "tree": tree }).to_string())
    }

    /// Makes one connection. Returns its congestion control and the time from the SYN to the last byte.
    fn connect(&self, host: &GraftHost<'_>, near: &LabNode, listener: &TcpListener) -> anyhow::Result<Went> {
        let at: SocketAddr = listener.local_addr()?;
        let start = Instant::now();
        let connect = || near.enter(|| TcpStream::connect_timeout(&at, LIMIT));
        let mut sender = host.cgroup.enter(connect)???;
        let (mut receiver, _) = listener.accept()?;
        for stream in [&sender, &receiver] {
            stream.set_read_timeout(Some(LIMIT))?;
            stream.set_write_timeout(Some(LIMIT))?;
        }
        let name = getsockopt(&sender, sockopt::TcpCongestion)?;
        let candidate = name.to_string_lossy().trim_end_matches('\0').to_owned();
        let length = self.size_kib << 10;
        let sending = std::thread::spawn(move || -> std::io::Result<()> {
            sender.write_all(&vec![7; length])?;
            sender.shutdown(Shutdown::Write)?;
            sender.read(&mut [0]).map(drop)
        });
        let mut got = Vec::with_capacity(length);
        receiver.read_to_end(&mut got)?;
        let ms = start.elapsed().as_secs_f64() * 1e3;
        drop(receiver);
        sending.join().map_err(|_| anyhow!("a sender panicked"))??;
        ensure!(got.len() == length, "{} of {length} bytes arrived", got.len());
        Ok(Went { candidate, ms })
    }

    fn row(
        &self,
        network: &ChoiceNetwork,
        first: &Went,
        all: &[Went],
        status: &Value,
    ) -> anyhow::Result<Value> {
        let selection = status.pointer("/status/selection").context("the status has no `selection`")?;
        let learned = all.first().map(|went| went.candidate.clone()).unwrap_or_default();
        let median = |is_learned: bool| {
            let mut ms: Vec<f64> =
                all.iter().filter(|it| (it.candidate == learned) == is_learned).map(|it| it.ms).collect();
            ms.sort_unstable_by(f64::total_cmp);
            ms.get(ms.len() / 2).copied()
        };
        let others = all.windows(SETTLED).position(|some| some.iter().all(|it| it.candidate != learned));
        Ok(json!({
            "rtt_ms": network.rtt_ms, "loss_percent": network.loss_percent, "rate_mbit": network.rate_mbit,
            "plain": first.candidate, "learned": learned, "connections": all.len(), "recovered_after": others,
            "learned_ms": median(true), "after_ms": median(false), "reasons": selection["reasons"],
            "explored": selection.pointer("/paths/0/explored"), "gain": selection["gain"],
        }))
    }
}

fn text(rows: &[Value]) -> String {
    let head = ["rtt ms", "loss %", "Mbit/s", "model's", "its ms", "left after", "then ms", "explored"];
    let figure = |value: &Value| match value.as_f64() {
        Some(number) => format!("{number:.0}"),
        None => "-".to_owned(),
    };
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    lines.extend(rows.iter().map(|row| {
        vec![
            figure(&row["rtt_ms"]),
            figure(&row["loss_percent"]),
            figure(&row["rate_mbit"]),
            row["learned"].as_str().unwrap_or("-").to_owned(),
            figure(&row["learned_ms"]),
            figure(&row["recovered_after"]),
            figure(&row["after_ms"]),
            figure(&row["explored"]),
        ]
    }));
    columns(&lines)
}
