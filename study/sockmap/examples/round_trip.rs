//! Measures round trips of 64 bytes between two sockets on loopback, alternately by TCP and directly between the
//! sockets: `round_trip [COUNT]`. Needs root.

#[path = "../tests/support/mod.rs"]
mod support;

use std::{
    env,
    io::{Read as _, Write as _},
    net::TcpStream,
    thread,
    time::{Duration, Instant},
};

const MESSAGE: usize = 64;
const ROUNDS: usize = 5;

fn main() {
    let count = env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(5000);
    for round in 1..=ROUNDS {
        for (name, window) in [("TCP", None), ("past TCP", Some(u64::MAX >> 1))] {
            let Some((listener, _bypass)) = support::broker("127.0.0.1:0", window) else {
                return println!("this needs root and cgroup v2");
            };
            let (application, broker) = support::connect(&listener);
            let echo = thread::spawn(move || echo(broker));
            let mut times = round_trips(&application, count);
            drop(application);
            // The echo thread ends when the application's socket is closed.
            let _ = echo.join();
            times.sort_unstable();
            let at = |part: usize| times.get(times.len() * part / 100).copied().unwrap_or_default();
            println!("round {round}, {name}: p50 {:?}, p99 {:?}", at(50), at(99));
        }
    }
}

fn round_trips(mut stream: &TcpStream, count: usize) -> Vec<Duration> {
    let mut message = [0; MESSAGE];
    let once = |_| {
        let begin = Instant::now();
        stream.write_all(&message).and_then(|()| stream.read_exact(&mut message)).ok()?;
        Some(begin.elapsed())
    };
    (0..count).map_while(once).collect()
}

fn echo(mut stream: TcpStream) {
    let mut message = [0; MESSAGE];
    while stream.read_exact(&mut message).and_then(|()| stream.write_all(&message)).is_ok() {}
}
