//! A source, forwarders and sinks of plain UDP. Their results show how much of a relay's measured latency and CPU time
//! comes from the lab and the measuring probe. They are also the reference for the RTP fan-out. Objects are RTP
//! packets.

mod batched;

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use millrace_fanout::{
    message::{ReceiverAction, ReceiverRequest, RelayAnswer, RequestOutcome},
    token::ReceiverToken,
};
use millrace_kernel::clock::monotonic_ns;
use nix::sys::time::TimeSpec;
use nix::time::{ClockId, ClockNanosleepFlags, clock_nanosleep};
use serde::{Deserialize, Serialize};

#[derive(Debug, clap::Subcommand)]
pub enum UdpArgs {
    /// Forward each object to every sink that has registered by sending a hello datagram
    Forward {
        #[arg(long)]
        listen: SocketAddr,
        /// Forward with recvmmsg and sendmmsg
        #[arg(long)]
        batched: bool,
    },
    /// Send objects at a fixed rate
    Source {
        #[arg(long)]
        to: SocketAddr,
        #[arg(long)]
        object_bytes: usize,
        #[arg(long)]
        rate_hz: u64,
        #[arg(long)]
        seconds: f64,
    },
    /// Receive objects until none arrive any more; then print how many arrived, and their latencies
    Sink {
        #[arg(long)]
        from: SocketAddr,
        #[arg(long)]
        subscribers: usize,
        /// Request this RTP stream from Millrace's RTP fan-out
        #[arg(long)]
        stream: Option<String>,
    },
}

/// Objects that all sinks received, in total.
#[derive(Debug, Default, Serialize, Deserialize)]
pub struct UdpReceived {
    pub delivered: u64,
    /// Number of sequence numbers missing between the first and the last that arrived, summed over all sinks.
    pub lost: u64,
    /// Time of sending (`CLOCK_MONOTONIC`) and latency of each object, ns.
    pub objects: Vec<(u64, u64)>,
}

pub fn run(args: UdpArgs) -> anyhow::Result<()> {
    match args {
        UdpArgs::Forward { listen, batched: false } => forward(listen),
        UdpArgs::Forward { listen, batched: true } => batched::forward(listen),
        UdpArgs::Source { to, object_bytes, rate_hz, seconds } => source(to, object_bytes, rate_hz, seconds),
        UdpArgs::Sink { from, subscribers, stream } => sinks(from, subscribers, stream.as_deref()),
    }
}

/// UDP port that the source sends from.
pub const SOURCE_PORT: u16 = 4444;
const HELLO: &[u8] = b"hello";
/// Start of the RTP header: version 2, payload type 96.
const RTP_BYTES: usize = 12;
const RTP_START: [u8; 2] = [0x80, 96];
/// Length of an object's header: the RTP header, then sequence number and time, 8 bytes each in little endian.
const HEADER_BYTES: usize = RTP_BYTES + 16;
const MAX_BYTES: usize = 65_536;
/// Time for which a receiver asks the RTP fan-out to send it the stream, seconds. It is longer than any run.
const LEASE_S: u16 = 3600;
/// Longest wait for the first object. After the first one, traffic has ended when nothing arrives for `SILENCE`.
const PATIENCE: Duration = Duration::from_secs(10);
const SILENCE: Duration = Duration::from_millis(500);
const ATTEMPTS: u32 = 20;

fn forward(listen: SocketAddr) -> anyhow::Result<()> {
    let socket = UdpSocket::bind(listen).with_context(|| format!("cannot listen on {listen}"))?;
    let mut sinks: Vec<SocketAddr> = Vec::new();
    let mut buffer = vec![0; MAX_BYTES];
    loop {
        let (length, from) = socket.recv_from(&mut buffer)?;
        let datagram = buffer.get(..length).unwrap_or_default();
        if datagram == HELLO {
            sinks.push(from);
            continue;
        }
        for sink in &sinks {
            // A send error is ignored: the sink may be gone.
            let _ = socket.send_to(datagram, sink);
        }
    }
}

fn source(to: SocketAddr, object_bytes: usize, rate_hz: u64, seconds: f64) -> anyhow::Result<()> {
    ensure!(object_bytes >= HEADER_BYTES, "--object-bytes must be at least {HEADER_BYTES}");
    ensure!(rate_hz > 0, "--rate-hz must be at least 1");
    let socket = connect_from(to, SOURCE_PORT)?;
    let mut object = vec![0; object_bytes];
    object[..2].copy_from_slice(&RTP_START);
    let start = monotonic_ns();
    for sequence in 0..(rate_hz as f64 * seconds) as u64 {
        sleep_until(start + sequence * 1_000_000_000 / rate_hz)?;
        object[2..4].copy_from_slice(&(sequence as u16).to_be_bytes());
        object[RTP_BYTES..RTP_BYTES + 8].copy_from_slice(&sequence.to_le_bytes());
        object[RTP_BYTES + 8..HEADER_BYTES].copy_from_slice(&monotonic_ns().to_le_bytes());
        // A send error is ignored: it means that no process listens yet.
        let _ = socket.send(&object);
    }
    Ok(())
}

fn sleep_until(deadline_ns: u64) -> nix::Result<()> {
    let deadline = TimeSpec::from_duration(Duration::from_nanos(deadline_ns));
    clock_nanosleep(ClockId::CLOCK_MONOTONIC, ClockNanosleepFlags::TIMER_ABSTIME, &deadline).map(|_| ())
}

fn sinks(from: SocketAddr, subscribers: usize, stream: Option<&str>) -> anyhow::Result<()> {
    let sockets: Vec<_> = (0..subscribers).map(|_| connect_from(from, 0)).collect::<Result<_, _>>()?;
    for socket in &sockets {
        match stream {
            Some(stream) => subscribe(socket, stream)?,
            None => drop(socket.send(HELLO)?),
        }
    }
    let received = std::thread::scope(|scope| {
        let threads: Vec<_> = sockets.iter().map(|socket| scope.spawn(|| sink(socket))).collect();
        let each =
            threads.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Ok(UdpReceived::default())));
        each.collect::<io::Result<Vec<_>>>()
    })?;
    let mut all = UdpReceived::default();
    for one in received {
        all.delivered += one.delivered;
        all.lost += one.lost;
        all.objects.extend(one.objects);
    }
    println!("{}", serde_json::to_string(&all)?);
    Ok(())
}

/// Requests the stream from the fan-out until it grants a lease: the right to receive the stream for a given time.
fn subscribe(socket: &UdpSocket, stream: &str) -> anyhow::Result<()> {
    let mut token = ReceiverToken::default();
    let mut buffer = [0; MAX_BYTES];
    socket.set_read_timeout(Some(SILENCE))?;
    for transaction in 0..ATTEMPTS {
        let what = ReceiverAction::Subscribe { seconds: LEASE_S };
        socket.send(&ReceiverRequest { what, token, transaction, stream: stream.to_owned() }.encode())?;
        let Ok(len) = socket.recv(&mut buffer) else { continue };
        match buffer.get(..len).and_then(RelayAnswer::read).map(|answer| answer.what) {
            Some(RequestOutcome::Prove(proof)) => token = proof,
            Some(RequestOutcome::Lease { .. }) => return Ok(()),
            Some(RequestOutcome::Refused { why, .. }) => bail!("{stream}: {}", why.text()),
            _ => {}
        }
    }
    bail!("the fan-out granted no lease")
}

fn sink(socket: &UdpSocket) -> io::Result<UdpReceived> {
    let mut received = UdpReceived::default();
    let mut sequences: Option<(u64, u64)> = None;
    let mut buffer = vec![0; MAX_BYTES];
    socket.set_read_timeout(Some(PATIENCE))?;
    loop {
        let length = match socket.recv(&mut buffer) {
            Ok(length) => length,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => break,
            Err(e) => return Err(e),
        };
        let now = monotonic_ns();
        let Some((sequence, sent)) = header(buffer.get(..length).unwrap_or_default()) else { continue };
        if sequences.is_none() {
            socket.set_read_timeout(Some(SILENCE))?;
        }
        let (low, high) = sequences.unwrap_or((sequence, sequence));
        sequences = Some((low.min(sequence), high.max(sequence)));
        received.objects.push((sent, now.saturating_sub(sent)));
    }
    received.delivered = received.objects.len() as u64;
    received.lost = sequences.map_or(0, |(low, high)| (high - low + 1).saturating_sub(received.delivered));
    Ok(received)
}

fn header(datagram: &[u8]) -> Option<(u64, u64)> {
    let (sequence, rest) = datagram.get(RTP_BYTES..)?.split_first_chunk()?;
    Some((u64::from_le_bytes(*sequence), u64::from_le_bytes(*rest.first_chunk()?)))
}

fn connect_from(to: SocketAddr, port: u16) -> anyhow::Result<UdpSocket> {
    let any: SocketAddr = match to {
        SocketAddr::V4(_) => ([0; 4], port).into(),
        SocketAddr::V6(_) => ([0; 16], port).into(),
    };
    let socket = UdpSocket::bind(any).with_context(|| format!("cannot bind port {port}"))?;
    socket.connect(to).with_context(|| format!("cannot reach {to}"))?;
    Ok(socket)
}
