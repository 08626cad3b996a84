//! `bench graft swap`: the time to swap the congestion control of a connection during a transfer.

use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{anyhow, ensure};
use millrace_graft_kernel::{
    CallerRule, RuleSide, Settings, SocketChange, SocketPrograms, TcpRule, everybody,
};
use serde_json::json;

use super::flow::BegunTransfer;
use super::{micros, packets, register};
use crate::bench::site::BenchSite;
use crate::bench::table::{columns, write_json};
use crate::bench::usage::warn_if_busy;
use crate::lab::Topology;
use crate::progress::BenchProgress;
use crate::stats::Percentiles;

#[derive(Debug, clap::Args)]
pub struct SwapArgs {
    /// The two congestion controls that replace each other, loaded as grafts or built into the kernel
    #[arg(long, value_delimiter = ',', default_value = "mr_longhaul,mr_pcc", value_name = "NAME,NAME")]
    between: Vec<String>,
    /// Number of swaps
    #[arg(long, default_value_t = 1000)]
    rounds: usize,
    /// Time between two swaps
    #[arg(long, default_value_t = 2, value_name = "MS")]
    pause_ms: u64,
    #[command(flatten)]
    packets: packets::PacketBench,
    /// Write the result to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Length of the repeated byte pattern. It is a prime, so that missing and repeated blocks are detected at any offset.
const PATTERN: usize = 251;

pub fn run(args: SwapArgs) -> anyhow::Result<()> {
    if args.packets.is_wanted() {
        warn_if_busy()?;
        let (row, text) = args.packets.run()?;
        print!("{text}");
        return args.json.as_deref().map_or(Ok(()), |path| write_json(path, &[row]));
    }
    let [one, other] = &args.between[..] else {
        return Err(anyhow!("--between must be two names"));
    };
    ensure!(args.rounds > 0, "--rounds must be at least 1");
    warn_if_busy()?;
    let _grafts = register(&args.between)?;
    let site = BenchSite::new(&Topology::standard(1, 1))?;
    let from = site.relay()?;
    let to = site.subscribers()?;
    let mut sockets = SocketPrograms::load()?;
    let BegunTransfer { sender, receiver, .. } = BegunTransfer::open(from, to, one)?;
    let port = sender.peer_addr()?.port();
    let stop = Arc::new(AtomicBool::new(false));
    let asked = stop.clone();
    let sending = sender.try_clone()?;
    let writing = std::thread::spawn(move || write(sending, &asked));
    let reading = std::thread::spawn(move || read(receiver));
    let mut times = Vec::new();
    let progress = BenchProgress::with_steps(args.rounds);
    progress.begin("swapping");
    let swapped = (0..args.rounds).try_for_each(|round| {
        std::thread::sleep(Duration::from_millis(args.pause_ms));
        let (old, new) = if round % 2 == 0 { (one, other) } else { (other, one) };
        let change = change(old, new, port);
        let start = Instant::now();
        let changed = from.enter(|| sockets.set(&change))??;
        times.push(micros(start.elapsed()));
        ensure!(changed.connections == 1 && changed.refused == 0, "swap {round}: {changed:?}");
        progress.next("swapping");
        Ok(())
    });
    drop(progress);
    stop.store(true, Ordering::Relaxed);
    let sent = writing.join().map_err(|_| anyhow!("the sender panicked"))??;
    drop(sender);
    let (got, wrong) = reading.join().map_err(|_| anyhow!("the receiver panicked"))??;
    swapped?;
    let row = json!({
        "between": args.between, "swaps": args.rounds, "walk_us": Percentiles::from_samples(times.clone()),
        "bytes_sent": sent, "bytes_received": got, "bytes_wrong": wrong,
    });
    let Some(walk) = Percentiles::from_samples(times) else { return Ok(()) };
    let head = ["swaps", "p50 us", "p99 us", "max us", "bytes sent", "received", "wrong"];
    let figures = [walk.p50, walk.p99, walk.max].map(|us| format!("{us:.0}"));
    let mut line = vec![args.rounds.to_string()];
    line.extend(figures);
    line.extend([sent, got, wrong].map(|bytes| bytes.to_string()));
    print!("{}", columns(&[head.map(str::to_owned).to_vec(), line]));
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &[row]))?;
    ensure!(sent == got && wrong == 0, "{got} of {sent} bytes arrived, {wrong} of them wrong");
    Ok(())
}

fn change(old: &str, new: &str, port: u16) -> SocketChange {
    let settings = Settings { congestion: Some(new.to_owned()), ..Settings::default() };
    let rule = TcpRule {
        side: RuleSide::Client,
        peer: everybody(),
        ports: port..=port,
        caller: CallerRule::default(),
        agree: false,
        bound: false,
        choice: 0,
        graft: [0; 4],
        settings,
    };
    SocketChange { rule, from: Some(old.to_owned()) }
}

fn write(mut to: std::net::TcpStream, stop: &AtomicBool) -> std::io::Result<u64> {
    let block: Vec<u8> = (0..PATTERN * 256).map(|at| (at % PATTERN) as u8).collect();
    let mut sent = 0;
    while !stop.load(Ordering::Relaxed) {
        to.write_all(&block)?;
        sent += block.len() as u64;
    }
    to.shutdown(std::net::Shutdown::Write)?;
    Ok(sent)
}

/// Reads until the sender closes the connection. Returns how many bytes arrived, and how many of them were altered.
fn read(mut from: std::net::TcpStream) -> std::io::Result<(u64, u64)> {
    let mut buffer = vec![0; 1 << 18];
    let mut got = 0;
    let mut wrong = 0;
    loop {
        let read = from.read(&mut buffer)?;
        if read == 0 {
            return Ok((got, wrong));
        }
        let begin = (got % PATTERN as u64) as usize;
        let expected = (begin..).map(|at| (at % PATTERN) as u8);
        wrong += buffer[..read].iter().zip(expected).filter(|(byte, want)| **byte != *want).count() as u64;
        got += read as u64;
    }
}
