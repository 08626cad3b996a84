//! `bench graft repair`: the gain from packet functions that repair losses, by send window, loss and round-trip time.

pub mod datagrams;
mod delay;
mod quic;
mod saturate;
mod window;

use std::path::PathBuf;

use anyhow::ensure;
use serde_json::Value;

use crate::bench::site::{BenchSite, SUBSCRIBERS_LINK};
use crate::bench::table::write_json;
use crate::bench::usage::warn_if_busy;
use crate::lab::{Directions, Topology};

#[derive(Debug, clap::Args)]
pub struct RepairArgs {
    /// Measurements to make: Selective Repeat against Go-Back-N by size of the send window, or the delay of messages
    #[arg(long, value_enum, value_delimiter = ',', default_value = "window,delay", value_name = "PART")]
    parts: Vec<RepairPart>,
    /// Sizes of the send window: the largest number of packets in flight
    #[arg(long, value_delimiter = ',', default_value = "16,64,128,256", value_name = "COUNT")]
    windows: Vec<u32>,
    /// Random loss of the link in the direction of the data
    #[arg(long, value_delimiter = ',', default_value = "1,2,5", value_name = "PERCENT")]
    loss: Vec<f64>,
    /// Round-trip times for the comparison of Selective Repeat with Go-Back-N
    #[arg(long, value_delimiter = ',', default_value = "50,300", value_name = "MS")]
    rtt_ms: Vec<u32>,
    /// Limit the link's rate to one send window per round trip; if absent, the rate is not limited
    #[arg(long)]
    filled: bool,
    /// Round-trip time in the measurement of the delay of messages
    #[arg(long, default_value_t = 300, value_name = "MS")]
    delay_rtt_ms: u32,
    /// Random loss in the measurement of the delay of messages
    #[arg(long, default_value_t = 2.0, value_name = "PERCENT")]
    delay_loss: f64,
    /// Messages per second in the measurement of the delay of messages
    #[arg(long, default_value_t = 200, value_name = "COUNT")]
    rate: u32,
    /// Payload of a packet or message, bytes
    #[arg(long, default_value_t = 200)]
    bytes: usize,
    /// Length of each run, seconds
    #[arg(long, default_value_t = 20)]
    seconds: u64,
    /// Number of runs of each measurement
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Write the results to this file, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum RepairPart {
    Window,
    Delay,
}

pub fn run(args: RepairArgs) -> anyhow::Result<()> {
    ensure!(
        args.rounds > 0 && args.seconds > 0 && args.rate > 0,
        "--rounds, --seconds and --rate must be at least 1"
    );
    ensure!(
        args.windows.iter().all(|packets| (1..=256).contains(packets)),
        "--windows must be from 1 to 256"
    );
    ensure!((16..=1400).contains(&args.bytes), "--bytes must be from 16 to 1400");
    let mut losses = args.loss.iter().chain([&args.delay_loss]);
    ensure!(losses.all(|loss| (0.0..100.0).contains(loss)), "losses are from 0 to less than 100 %");
    warn_if_busy()?;
    let mut rows: Vec<Value> = Vec::new();
    for part in &args.parts {
        let (part, text) = match part {
            RepairPart::Window => window::run(&args)?,
            RepairPart::Delay => delay::run(&args)?,
        };
        rows.extend(part);
        print!("{text}");
    }
    args.json.as_deref().map_or(Ok(()), |path| write_json(path, &rows))
}

pub use saturate::saturate;

/// Number of packets in a send window, and the size of each on the wire in bytes.
#[derive(Clone, Copy)]
pub struct PacketWindow {
    pub packets: u32,
    pub bytes: u64,
}

/// Creates two hosts with a link that loses packets in the direction of the data. With the setting `fills`, the link's
/// rate is one full send window per round trip.
pub fn site(rtt_ms: u32, loss: f64, fills: Option<PacketWindow>) -> anyhow::Result<BenchSite> {
    let mut topology = Topology::standard(1, 1);
    if let Some(PacketWindow { packets, bytes }) = fills {
        let rate = u64::from(packets) * bytes * 8 * 1000 / u64::from(rtt_ms).max(1);
        let rate = format!("rate={rate}bit queue-packets={packets}");
        topology.impair(SUBSCRIBERS_LINK, Directions::Forward, &rate)?;
    }
    topology.impair(SUBSCRIBERS_LINK, Directions::Both, &format!("delay={}us", u64::from(rtt_ms) * 500))?;
    topology.impair(SUBSCRIBERS_LINK, Directions::Forward, &format!("loss={loss}%"))?;
    BenchSite::new(&topology)
}
