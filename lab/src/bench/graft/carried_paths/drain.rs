//! The receiver of a transfer. It is a process of its own, since its cgroup decides whether its connection is
//! tunnelled. The data are consecutive 64-bit numbers, so that missing, repeated and misplaced bytes are detected.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use serde::{Deserialize, Serialize};

const WORD: usize = size_of::<u64>();
const BLOCK: usize = 1 << 16;

#[derive(Debug, clap::Args)]
pub struct DrainArgs {
    #[arg(long)]
    from: SocketAddr,
    /// How long the receiver reads, counted from the first byte
    #[arg(long)]
    seconds: u64,
}

/// The number of received bytes, and the longest time without data, which the receiver prints.
#[derive(Debug, Default, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Drained {
    pub bytes: u64,
    /// Longest time without data, ms.
    pub gap_ms: f64,
    /// Time from the first byte to the start of the longest gap, seconds.
    pub gap_at_s: f64,
}

pub fn run(args: &DrainArgs) -> anyhow::Result<()> {
    let stream = TcpStream::connect(args.from).with_context(|| args.from.to_string())?;
    let drained = drain(stream, Duration::from_secs(args.seconds))?;
    println!("{}", serde_json::to_string(&drained)?);
    Ok(())
}

/// Reads data for `time` from the first byte on, or until the sender closes the connection.
fn drain(mut stream: TcpStream, time: Duration) -> anyhow::Result<Drained> {
    let mut drained = Drained::default();
    let mut count = DrainCount::default();
    let mut buffer = vec![0; BLOCK];
    let first = stream.read(&mut buffer)?;
    ensure!(first > 0, "the connection was closed before the first byte");
    let start = Instant::now();
    let mut last = Duration::ZERO;
    count.check(&buffer[..first])?;
    loop {
        let left = time.saturating_sub(start.elapsed());
        if left.is_zero() {
            break;
        }
        stream.set_read_timeout(Some(left))?;
        let read = match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(read) => read,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => break,
            Err(error) => return Err(error).context("the connection failed in mid-transfer"),
        };
        count.check(&buffer[..read])?;
        let now = start.elapsed();
        drained.silent(last, now);
        last = now;
    }
    // The time since the last byte counts as a gap too.
    drained.silent(last, start.elapsed());
    drained.bytes = count.at;
    Ok(drained)
}

impl Drained {
    /// Records a gap between two reads, if it is the longest so far.
    fn silent(&mut self, since: Duration, until: Duration) {
        let gap_ms = until.saturating_sub(since).as_secs_f64() * 1e3;
        if gap_ms > self.gap_ms {
            (self.gap_ms, self.gap_at_s) = (gap_ms, since.as_secs_f64());
        }
    }
}

/// Checks that a byte stream consists of consecutive 64-bit numbers in network byte order.
#[derive(Debug, Default)]
struct DrainCount {
    at: u64,
}

impl DrainCount {
    fn byte(at: u64) -> u8 {
        (at / WORD as u64).to_be_bytes()[at as usize % WORD]
    }

    fn fill(&mut self, block: &mut [u8]) {
        for byte in block {
            *byte = Self::byte(self.at);
            self.at += 1;
        }
    }

    fn check(&mut self, block: &[u8]) -> anyhow::Result<()> {
        for byte in block {
            ensure!(*byte == Self::byte(self.at), "byte {} differs from the one that was sent", self.at);
            self.at += 1;
        }
        Ok(())
    }
}

/// Sends consecutive 64-bit numbers, in network byte order, until the receiver closes the connection.
pub fn pour(mut stream: TcpStream, limit: Duration) -> anyhow::Result<()> {
    stream.set_write_timeout(Some(limit))?;
    let start = Instant::now();
    let mut count = DrainCount::default();
    let mut block = vec![0; BLOCK];
    while start.elapsed() < limit {
        count.fill(&mut block);
        if stream.write_all(&block).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_and_repeated_numbers_in_a_test_stream_are_errors() {
        let mut bytes = vec![0; 1003];
        DrainCount::default().fill(&mut bytes);
        assert_eq!(bytes[8..16], 1_u64.to_be_bytes());
        let mut count = DrainCount::default();
        for piece in [&bytes[..3], &bytes[3..700], &bytes[700..]] {
            count.check(piece).expect("in order");
        }
        assert_eq!(count.at, 1003);
        let mut count = DrainCount::default();
        count.check(&bytes[..16]).expect("in order");
        // The numbers 0 and 1 are received. Then number 3 is an error, since 2 is missing. In a new stream, a second 1
        // is an error.
        assert!(count.check(&bytes[24..32]).is_err());
        let mut count = DrainCount::default();
        count.check(&bytes[..16]).expect("in order");
        assert!(count.check(&bytes[8..16]).is_err());
    }

    #[test]
    fn longest_gap_between_received_bytes_is_reported_with_its_start() {
        let mut drained = Drained::default();
        for (since, until) in [(0, 100), (100, 400), (400, 600)] {
            drained.silent(Duration::from_millis(since), Duration::from_millis(until));
        }
        assert_eq!(drained, Drained { bytes: 0, gap_ms: 300.0, gap_at_s: 0.1 });
    }

    #[test]
    fn sent_bytes_are_all_drained() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a socket");
        let sender = TcpStream::connect(listener.local_addr().expect("an address")).expect("connected");
        let (receiver, _) = listener.accept().expect("a connection");
        let sending = std::thread::spawn(move || {
            let mut sender = sender;
            let mut count = DrainCount::default();
            let mut block = [0; 100_003];
            for _ in 0..4 {
                count.fill(&mut block);
                sender.write_all(&block).expect("sent");
            }
        });
        let drained = drain(receiver, Duration::from_secs(60)).expect("drained");
        sending.join().expect("sent");
        assert_eq!(drained.bytes, 400_012);
    }
}
