//! The applications of the fault benchmark: a client and a server, in processes that do not know whether they are
//! tunnelled. Each reports how every connection ended on its side.
//!
//! Both sides send at the same time. The bytes are pseudorandom, and their seed is the connection's number, so each
//! side knows in advance what it must receive. Even after a reset, a side can check that the bytes received so far are
//! right.

use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use millrace_graft::identity::hex;
use nix::sys::socket::{setsockopt, sockopt};
use parking_lot::Mutex;
use ring::digest;
use serde::{Deserialize, Serialize};

/// Largest block of data that is written to a socket at once, bytes.
const PIECE: usize = 64 << 10;
/// Length of a connection's first message, bytes: the connection's number, and how many bytes each side sends.
const HEAD: usize = 16;
/// Bit that is set in the seed of the server's random bytes, so that they differ from the client's.
const SERVERS: u64 = 1 << 63;
/// Size of each socket buffer, bytes. Small buffers hold few bytes, so that most sent bytes have left the application's
/// socket and are in the tunnel when a fault happens.
const BUFFER: usize = PIECE;
/// Time without data after which client or server gives up a connection.
const SILENCE: Duration = Duration::from_secs(90);
/// Number of threads that make connections if the load has a rate of connections per second.
const MAKERS: usize = 32;

#[derive(Debug, clap::Args)]
pub struct EndArgs {
    #[command(subcommand)]
    role: EndRole,
}

#[derive(Debug, clap::Subcommand)]
enum EndRole {
    /// Accepts connections until standard input ends
    Serve {
        #[arg(long)]
        at: SocketAddr,
        #[arg(long, default_value_t = 0)]
        pause_us: u64,
    },
    /// Makes connections, and sends data until standard input ends
    Connect {
        #[arg(long)]
        to: SocketAddr,
        #[arg(long, default_value_t = 1)]
        connections: u64,
        /// Number of the first connection; later connections count up from it
        #[arg(long, default_value_t = 0)]
        first: u64,
        #[arg(long, default_value_t = 0)]
        pause_us: u64,
        /// Bytes in each direction of a connection; if absent, data is sent until standard input ends
        #[arg(long)]
        bytes: Option<u64>,
        /// Connections per second; if absent, all are made at once
        #[arg(long)]
        per_second: Option<u64>,
    },
}

/// How one direction of a connection ended, as its receiver saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DirectionEnd {
    /// Every byte arrived, with the hash that the sender announced.
    Whole,
    /// The kernel reported a reset of the connection.
    Reset,
    /// The stream ended early, without a reset.
    Short,
    /// The received bytes differ from those that were sent.
    Differs,
    /// The connection carried no data for too long.
    Silent,
    /// The connection could not be made.
    Refused,
}

/// Result of one connection, as the client or the server reports it.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct EndReport {
    pub came: DirectionEnd,
    pub sent: u64,
    pub received: u64,
    pub sent_hash: String,
    pub received_hash: String,
    /// Longest time without received data after the first byte of the connection, ms.
    pub pause_ms: f64,
    /// Address of the peer (client or server), as the reporting application sees it.
    pub peer: Option<SocketAddr>,
    pub own: Option<SocketAddr>,
}

pub type Reports = BTreeMap<u64, EndReport>;

pub fn run(args: &EndArgs) -> anyhow::Result<()> {
    let reports = match args.role {
        EndRole::Serve { at, pause_us } => serve(at, Duration::from_micros(pause_us))?,
        EndRole::Connect { to, connections, first, pause_us, bytes, per_second } => {
            let pause = Duration::from_micros(pause_us);
            let wanted = SendPlan { to, pause, bytes, enough: Arc::default() };
            match per_second {
                None => wanted.send_at_once(first..first + connections),
                Some(rate) => wanted.send_at_rate(first..first + connections, rate)?,
            }
        }
    };
    println!("{}", serde_json::to_string(&reports)?);
    Ok(())
}

fn wait_for_end_of_input() {
    let _ = io::copy(&mut io::stdin(), &mut io::sink());
}

fn serve(at: SocketAddr, pause: Duration) -> anyhow::Result<Reports> {
    let listener = TcpListener::bind(at).with_context(|| at.to_string())?;
    println!("ready");
    let reports = Arc::new(Mutex::new(Reports::new()));
    let (said, done) = mpsc::channel::<()>();
    let taken = reports.clone();
    // This thread is never joined; it ends with the process.
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { continue };
            let reports = taken.clone();
            let said = said.clone();
            std::thread::spawn(move || {
                answer(&stream, pause, &reports);
                drop(said);
            });
        }
    });
    wait_for_end_of_input();
    // Waits for connections that are still open, so that their results are in the output too.
    let start = Instant::now();
    while reports.lock().values().any(|report| report.pause_ms < 0.0) && start.elapsed() < SILENCE {
        let _ = done.recv_timeout(Duration::from_millis(20));
    }
    let mut reports = std::mem::take(&mut *reports.lock());
    reports.values_mut().for_each(|report| report.pause_ms = report.pause_ms.max(0.0));
    Ok(reports)
}

/// Serves a connection, and adds its result to `reports`. Until the connection has ended, the result is `Silent`.
fn answer(stream: &TcpStream, pause: Duration, reports: &Mutex<Reports>) {
    let mut head = [0; HEAD];
    let _ = stream.set_read_timeout(Some(SILENCE));
    if { stream }.read_exact(&mut head).is_err() {
        return;
    }
    let [id, most] = [0, 8].map(|at| head[at..].first_chunk().copied().map_or(0, u64::from_be_bytes));
    let open = EndReport { pause_ms: -1.0, ..EndReport::from_outcome(DirectionEnd::Silent) };
    reports.lock().insert(id, open);
    // If the client's first message asks for a number of bytes, the server sends them without pauses. Otherwise it
    // sends with pauses until the client has finished.
    let enough = AtomicBool::new(false);
    let most = (most > 0).then_some(most);
    let pause = most.map_or(pause, |_| Duration::ZERO);
    let sending = SendingSide { seed: id | SERVERS, most, pause, enough: &enough };
    let report = both(stream, &sending, id);
    reports.lock().insert(id, report);
}

#[derive(Clone)]
struct SendPlan {
    to: SocketAddr,
    pause: Duration,
    bytes: Option<u64>,
    enough: Arc<AtomicBool>,
}

impl SendPlan {
    fn one(&self, id: u64) -> EndReport {
        let connected = TcpStream::connect_timeout(&self.to, SILENCE);
        let Ok(stream) = connected else { return EndReport::from_outcome(DirectionEnd::Refused) };
        let most = self.bytes.unwrap_or(0);
        let head: Vec<u8> = [id, most].into_iter().flat_map(u64::to_be_bytes).collect();
        let _ = stream.set_read_timeout(Some(SILENCE));
        if { &stream }.write_all(&head).is_err() {
            return EndReport::from_outcome(DirectionEnd::Reset);
        }
        let sending = SendingSide { seed: id, most: self.bytes, pause: self.pause, enough: &self.enough };
        both(&stream, &sending, id | SERVERS)
    }

    fn send_at_once(&self, ids: std::ops::Range<u64>) -> Reports {
        let enough = self.enough.clone();
        std::thread::spawn(move || {
            wait_for_end_of_input();
            enough.store(true, Ordering::Relaxed);
        });
        std::thread::scope(|scope| {
            let threads: Vec<_> = ids.map(|id| (id, scope.spawn(move || self.one(id)))).collect();
            println!("ready");
            let joined = threads.into_iter().map(|(id, it)| (id, it.join()));
            joined.filter_map(|(id, it)| Some((id, it.ok()?))).collect()
        })
    }

    /// Makes each connection when it is due, even if earlier connections are still open, as long as a thread is free.
    fn send_at_rate(&self, ids: std::ops::Range<u64>, rate: u64) -> anyhow::Result<Reports> {
        ensure!(rate > 0 && self.bytes.is_some(), "--per-second requires --bytes");
        let start = Instant::now();
        let first = ids.start;
        let next = Mutex::new(ids);
        let reports = Mutex::new(Reports::new());
        std::thread::scope(|scope| {
            for _ in 0..MAKERS {
                scope.spawn(|| {
                    loop {
                        let Some(id) = next.lock().next() else { return };
                        let due = start + Duration::from_secs_f64((id - first) as f64 / rate as f64);
                        std::thread::sleep(due.saturating_duration_since(Instant::now()));
                        let report = self.one(id);
                        reports.lock().insert(id, report);
                    }
                });
            }
        });
        Ok(reports.into_inner())
    }
}

impl EndReport {
    fn from_outcome(came: DirectionEnd) -> Self {
        let sent_hash = String::new();
        let received_hash = String::new();
        Self { came, sent: 0, received: 0, sent_hash, received_hash, pause_ms: 0.0, peer: None, own: None }
    }
}

/// Sends and receives at the same time until both directions have ended.
fn both(stream: &TcpStream, sending: &SendingSide<'_>, theirs: u64) -> EndReport {
    let peer = stream.peer_addr().ok();
    let own = stream.local_addr().ok();
    let _ = stream.set_nodelay(true).and_then(|()| stream.set_write_timeout(Some(SILENCE)));
    let _ = setsockopt(stream, sockopt::SndBuf, &BUFFER)
        .and_then(|()| setsockopt(stream, sockopt::RcvBuf, &BUFFER));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let sent = scope.spawn(|| sending.run(stream, &is_over));
        let mut receiving = ReceivingSide::new(theirs);
        let came = receiving.run(stream);
        // This side receives no more data. It therefore also stops sending, so that the connection ends.
        is_over.store(true, Ordering::Relaxed);
        let (sent, sent_hash, failed) = sent.join().unwrap_or_default();
        let came = with_both_directions(came, failed);
        let received_hash = hex(receiving.hash.finish().as_ref());
        EndReport {
            came,
            sent,
            received: receiving.received,
            sent_hash,
            received_hash,
            pause_ms: receiving.pause.as_secs_f64() * 1e3,
            peer,
            own,
        }
    })
}

/// Combines a connection's results of receiving (`came`) and sending (`failed`). The kernel reports a reset only once,
/// to the read or the write that comes first; later reads return an end of stream. After an end of stream, writes fail
/// with a broken pipe instead of a reset.
fn with_both_directions(came: DirectionEnd, failed: Option<ErrorKind>) -> DirectionEnd {
    match (came, failed) {
        // The sender timed out, since the receiving application has not read the bytes.
        (DirectionEnd::Whole | DirectionEnd::Short, Some(ErrorKind::WouldBlock | ErrorKind::TimedOut)) => {
            DirectionEnd::Silent
        }
        (DirectionEnd::Short, Some(ErrorKind::ConnectionReset)) | (DirectionEnd::Whole, Some(_)) => {
            DirectionEnd::Reset
        }
        _ => came,
    }
}

struct SendingSide<'a> {
    seed: u64,
    most: Option<u64>,
    pause: Duration,
    enough: &'a AtomicBool,
}

impl SendingSide<'_> {
    /// Returns the number of bytes written to the socket, their hash, and the error if the kernel did not accept all.
    fn run(&self, mut to: &TcpStream, is_over: &AtomicBool) -> (u64, String, Option<ErrorKind>) {
        let has_enough = || self.enough.load(Ordering::Relaxed) || is_over.load(Ordering::Relaxed);
        let mut noise = Noise::new(self.seed);
        let mut hash = digest::Context::new(&digest::SHA256);
        let mut sent = 0;
        while self.most.map_or_else(|| !has_enough(), |most| sent < most) {
            let left = self.most.map_or(u64::MAX, |most| most - sent);
            let piece = noise.piece(left);
            hash.update(&piece);
            let head = u32::try_from(piece.len()).unwrap_or(u32::MAX).to_be_bytes();
            if let Err(error) = to.write_all(&head).and_then(|()| to.write_all(&piece)) {
                return (sent, hex(hash.finish().as_ref()), Some(error.kind()));
            }
            sent += piece.len() as u64;
            std::thread::sleep(self.pause);
        }
        let hash = hash.finish();
        let end = to.write_all(&[0; 4]).and_then(|()| to.write_all(hash.as_ref()));
        let failed = end.and_then(|()| to.shutdown(Shutdown::Write)).err();
        (sent, hex(hash.as_ref()), failed.map(|error| error.kind()))
    }
}

struct ReceivingSide {
    noise: Noise,
    hash: digest::Context,
    received: u64,
    pause: Duration,
    latest: Option<Instant>,
}

impl ReceivingSide {
    fn new(seed: u64) -> Self {
        let noise = Noise::new(seed);
        let hash = digest::Context::new(&digest::SHA256);
        Self { noise, hash, received: 0, pause: Duration::ZERO, latest: None }
    }

    fn run(&mut self, mut from: &TcpStream) -> DirectionEnd {
        match self.all(&mut from) {
            Ok(came) => came,
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => DirectionEnd::Short,
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                DirectionEnd::Silent
            }
            Err(_) => DirectionEnd::Reset,
        }
    }

    fn all(&mut self, from: &mut impl Read) -> io::Result<DirectionEnd> {
        let mut head = [0; 4];
        let mut piece = vec![0; PIECE];
        loop {
            self.fill(from, &mut head)?;
            let length = u32::from_be_bytes(head) as usize;
            if length == 0 {
                return self.end(from);
            }
            let Some(piece) = piece.get_mut(..length) else { return Ok(DirectionEnd::Differs) };
            if !self.take(from, piece)? {
                return Ok(DirectionEnd::Differs);
            }
        }
    }

    /// Reads a block of bytes into `piece`, and compares every byte with the expected one, even if the stream ends
    /// within the block.
    fn take(&mut self, from: &mut impl Read, piece: &mut [u8]) -> io::Result<bool> {
        let wanted = self.noise.piece(u64::MAX);
        let mut at = 0;
        // If the stream has a fixed number of bytes, its last block is shorter than the block of expected bytes.
        while at < piece.len() {
            let got = self.read(from, &mut piece[at..])?;
            let is_same = wanted.get(at..at + got) == piece.get(at..at + got);
            self.hash.update(&piece[at..at + got]);
            self.received += got as u64;
            at += got;
            if !is_same {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn end(&mut self, from: &mut impl Read) -> io::Result<DirectionEnd> {
        let mut theirs = [0; digest::SHA256_OUTPUT_LEN];
        self.fill(from, &mut theirs)?;
        let is_same = self.hash.clone().finish().as_ref() == theirs;
        let is_over = from.read(&mut [0])? == 0;
        Ok(if is_same && is_over { DirectionEnd::Whole } else { DirectionEnd::Differs })
    }

    fn fill(&mut self, from: &mut impl Read, buffer: &mut [u8]) -> io::Result<()> {
        let mut at = 0;
        while at < buffer.len() {
            at += self.read(from, &mut buffer[at..])?;
        }
        Ok(())
    }

    fn read(&mut self, from: &mut impl Read, buffer: &mut [u8]) -> io::Result<usize> {
        let got = from.read(buffer)?;
        if got == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        let now = Instant::now();
        if let Some(latest) = self.latest.replace(now) {
            self.pause = self.pause.max(now - latest);
        }
        Ok(got)
    }
}

/// Generator of pseudorandom bytes in blocks of any length. Lost or repeated bytes are always detected, as the bytes
/// have no pattern.
struct Noise(fastrand::Rng);

impl Noise {
    fn new(seed: u64) -> Self {
        Self(fastrand::Rng::with_seed(seed))
    }

    fn piece(&mut self, most: u64) -> Vec<u8> {
        let length = self.0.usize(1..=PIECE);
        let bytes = (0..length.div_ceil(8)).flat_map(|_| self.0.u64(..).to_ne_bytes());
        let mut bytes: Vec<_> = bytes.take(length).collect();
        bytes.truncate(usize::try_from(most).unwrap_or(PIECE));
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the bytes that a sender with this seed puts on the wire.
    fn stream(seed: u64, pieces: usize) -> Vec<u8> {
        let mut noise = Noise::new(seed);
        let mut hash = digest::Context::new(&digest::SHA256);
        let mut wire = Vec::new();
        for _ in 0..pieces {
            let piece = noise.piece(u64::MAX);
            hash.update(&piece);
            wire.extend_from_slice(&(piece.len() as u32).to_be_bytes());
            wire.extend_from_slice(&piece);
        }
        wire.extend_from_slice(&[0; 4]);
        wire.extend_from_slice(hash.finish().as_ref());
        wire
    }

    fn came(seed: u64, wire: &[u8]) -> (Option<DirectionEnd>, u64) {
        let mut receiving = ReceivingSide::new(seed);
        let came = receiving.all(&mut { wire });
        (came.ok(), receiving.received)
    }

    #[test]
    fn altered_or_truncated_stream_is_never_reported_as_complete() {
        let whole = stream(7, 5);
        let length = (whole.len() - 5 * 4 - 4 - 32) as u64;
        assert_eq!(came(7, &whole), (Some(DirectionEnd::Whole), length));
        assert_eq!(came(8, &whole).0, Some(DirectionEnd::Differs), "of another connection");
        for at in [4, 1000, whole.len() / 2, whole.len() - 1] {
            let mut changed = whole.clone();
            changed[at] ^= 1;
            assert_eq!(came(7, &changed).0, Some(DirectionEnd::Differs), "at {at}");
            // A stream cut anywhere must be detected, since it ends with a FIN like a complete one.
            assert_eq!(came(7, &whole[..at]).0, None, "cut at {at}");
        }
        let doubled = [&whole[..1000], &whole[900..]].concat();
        assert_ne!(came(7, &doubled).0, Some(DirectionEnd::Whole));
        let more = [&whole[..], &[0]].concat();
        assert_eq!(came(7, &more).0, Some(DirectionEnd::Differs));
    }

    /// Transfers data in both directions of a connection. Then calls `then` with the socket of one side, and returns
    /// how the connection ended for the other side.
    fn said(then: impl FnOnce(TcpStream)) -> DirectionEnd {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (far, _) = listener.accept().unwrap();
        let enough = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let sending = SendingSide { seed: 1, most: None, pause: Duration::ZERO, enough: &enough };
            let near = scope.spawn(move || both(&near, &sending, 7).came);
            (&far).write_all(&stream(7, 3)[..1000]).unwrap();
            (&far).read_exact(&mut [0; 10_000]).unwrap();
            then(far);
            near.join().unwrap()
        })
    }

    #[test]
    fn reset_differs_from_an_early_end_in_either_direction() {
        for turn in 0..200 {
            // Closing a socket that has unread bytes sends a reset.
            let unread = |far: &TcpStream| far.peek(&mut [0]).unwrap();
            let reset = said(|far| assert_eq!(unread(&far), 1));
            assert_eq!(reset, DirectionEnd::Reset, "turn {turn}");
            // The kernel does not report a reset to a reader that has reached the end of the stream (FIN) before.
            let ended = said(|far| {
                far.shutdown(Shutdown::Write).unwrap();
                unread(&far);
            });
            assert_eq!(ended, DirectionEnd::Short, "turn {turn}");
        }
    }
}
