//! Measures the duration of system calls. The difference between calls with and without programs is the time that
//! timing adds to a call.

use std::hint::black_box;
use std::io;
use std::time::{Duration, Instant};

use nix::unistd::getppid;

use super::sockets::SocketPair;

/// The shortest durations of this thread's calls, in nanoseconds. Other load hardly changes a minimum.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CallTimes {
    /// Duration of a call that sends or receives.
    pub socket_ns: f64,
    /// Duration of a call that uses no socket.
    pub other_ns: f64,
}

const BATCHES: u32 = 32;
/// Number of calls in each measured batch.
const CALLS: u32 = 64;

impl CallTimes {
    /// Measures the durations of calls with and without a socket. The measurement takes some milliseconds.
    pub fn measure() -> io::Result<Self> {
        let sockets = SocketPair::new()?;
        let socket_ns = measure_least(|| {
            sockets.sendto()?;
            sockets.recvfrom().map(drop)
        })?;
        let other_ns = measure_least(|| {
            black_box(getppid());
            Ok(())
        })?;
        Ok(Self { socket_ns: socket_ns / 2.0, other_ns })
    }
}

/// Returns the shortest duration of a call in nanoseconds: the mean of the fastest batch.
fn measure_least(call: impl Fn() -> io::Result<()>) -> io::Result<f64> {
    let mut least = Duration::MAX;
    for _ in 0..BATCHES {
        let start = Instant::now();
        for _ in 0..CALLS {
            call()?;
        }
        least = least.min(start.elapsed());
    }
    Ok(least.as_nanos() as f64 / f64::from(CALLS))
}
