//! The receiver of a transfer. It is a process of its own, since its cgroup decides whether its connection is
//! tunnelled.

use std::io::{ErrorKind, Read as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use millrace_graft_proto::select::profile::{ByteArrivals, LADDER_KIB};
use serde::{Deserialize, Serialize};

#[derive(Debug, clap::Args)]
pub struct FetchArgs {
    #[arg(long)]
    from: SocketAddr,
    #[arg(long)]
    limit: u64,
}

/// The result that the receiver prints. Times count from the start of the receiver.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct FetchResult {
    rungs_ms: Vec<f64>,
    bytes: u64,
    over_ms: f64,
}

impl FetchResult {
    /// Returns the times at which data arrived. Each time is increased by `later_ms`, the time that it took to set up a
    /// new tunnel before the transfer.
    pub fn came(&self, later_ms: f64) -> ByteArrivals {
        let rung = |at: usize| self.rungs_ms.get(at).map(|ms| ms + later_ms);
        ByteArrivals {
            rungs_ms: std::array::from_fn(rung),
            bytes: self.bytes,
            over_ms: self.over_ms + later_ms,
        }
    }
}

pub fn run(args: &FetchArgs) -> anyhow::Result<()> {
    let limit = Duration::from_secs(args.limit);
    let start = Instant::now();
    let stream = match TcpStream::connect_timeout(&args.from, limit) {
        Ok(stream) => Some(stream),
        Err(error) if error.kind() == ErrorKind::TimedOut => None,
        Err(error) => return Err(error).context(args.from),
    };
    let mut got = FetchResult::default();
    if let Some(stream) = stream {
        got.fill(stream, start, limit)?;
    }
    got.over_ms = start.elapsed().min(limit).as_secs_f64() * 1e3;
    println!("{}", serde_json::to_string(&got)?);
    Ok(())
}

impl FetchResult {
    fn fill(&mut self, mut stream: TcpStream, start: Instant, limit: Duration) -> anyhow::Result<()> {
        let mut buffer = vec![0; 1 << 18];
        loop {
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            stream.set_read_timeout(Some(left))?;
            match stream.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(read) => self.note(read as u64, start.elapsed()),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                    return Ok(());
                }
                Err(error) => return Err(error).context("the connection failed in mid-transfer"),
            }
        }
    }

    fn note(&mut self, read: u64, after: Duration) {
        self.bytes += read;
        let reached = |got: &Self| {
            LADDER_KIB.get(got.rungs_ms.len()).is_some_and(|kib| u64::from(*kib) << 10 <= got.bytes)
        };
        while reached(self) {
            self.rungs_ms.push(after.as_secs_f64() * 1e3);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfer_size_is_recorded_when_all_its_bytes_arrived() {
        let mut got = FetchResult::default();
        got.note(1023, Duration::from_millis(10));
        assert!(got.rungs_ms.is_empty());
        got.note(1, Duration::from_millis(20));
        got.note(64 << 10, Duration::from_millis(30));
        assert_eq!(got.rungs_ms, [20.0, 30.0, 30.0, 30.0]);
        let came = got.came(5.0);
        assert_eq!((came.rungs_ms[0], came.rungs_ms[3], came.rungs_ms[4]), (Some(25.0), Some(35.0), None));
    }
}
