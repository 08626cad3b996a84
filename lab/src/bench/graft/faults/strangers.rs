//! Faults by hosts that are no valid peers: one with another version of the protocol, and one without a known key.

use std::fmt;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use millrace_graft_proto::carry::frame::ALPN;

use super::callers::UnknownIdentity;
use super::daemons::note;
use super::outcome::FaultOutcome;
use super::pair::{CARRIERS, FaultPair, PORT, Setting, count};
use super::recorded::Recorded;
use super::traffic::{FaultTraffic, TrafficLoad, all_whole};
use super::{FaultCase, FaultedCarrier};
use crate::bench::graft::host::{GraftHost, LIMIT};
use crate::bench::process::BenchProcess;
use crate::bench::usage::rss_bytes;

/// ALPN of a nonexistent version of the tunnel protocol.
const OTHER: &[u8] = b"millrace-carry/0";
const HANDSHAKES: u64 = 100;
const GARBAGE: u64 = 500;
const REPLAYS: usize = 5;
/// Growth of a daemon's memory that is no leak, since an allocator may keep freed memory, bytes.
pub const SLACK: u64 = 16 << 20;

/// Resources that a daemon holds: resident memory in bytes, and file descriptors.
#[derive(Clone, Copy)]
pub struct HeldResources {
    pub memory: u64,
    pub descriptors: usize,
}

impl HeldResources {
    pub fn by(daemon: &BenchProcess) -> anyhow::Result<Self> {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", daemon.id()))?.count();
        Ok(Self { memory: rss_bytes(daemon.id())?, descriptors })
    }
}

impl fmt::Display for HeldResources {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:.1} MiB and {} descriptors", self.memory as f64 / f64::from(1 << 20), self.descriptors)
    }
}

/// Tests both directions: the client connects to a server of another version, and a client of another version connects
/// to the server.
pub fn other_version(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let identity = UnknownIdentity::new()?;
    let mut setting = Setting::from_kinds(&kinds);
    let pair = FaultPair::new(&case.site, &setting)?;
    let at = SocketAddr::new(pair.stranger.addr_v4().into(), CARRIERS);
    (setting.carry, setting.key) = (vec![at], Some(identity.key.as_str()));
    pair.configure(&setting, 0)?;
    pair.stranger.enter(|| identity.answer(case.kind, at, OTHER))??;
    let _far = pair.server.start()?;
    let _near = pair.client.start()?;
    let wanted = "another version of carriers";
    pair.wait("a reason in the status", || Ok(pair.client.status()?.to_string().contains(wanted)))?;
    let detail = pair.carrier(0, "detail")?.context("the status has no detail of the carrier")?;
    outcome.seen.push(format!("the client's status says: {detail}"));
    // The version is checked before the key, so it does not matter that the server does not know the connecting
    // client's key.
    let called = pair.stranger.enter(|| identity.call(case.kind, pair.at(CARRIERS)?, OTHER))?;
    called?;
    pair.wait("the count of other versions", || Ok(count(&pair.server, "ended/other-version")? > 0))?;
    let traffic = FaultTraffic::new(&pair)?;
    let reports = traffic.whole(TrafficLoad::with_size(5, 300_000))?;
    outcome
        .check(all_whole(&reports), || "a connection outside of the tunnel did not deliver all data".into());
    let redirected = count(&pair.client, "verdicts/redirected")?;
    outcome.check(redirected == 0, || {
        format!("{redirected} connections were tunnelled without a peer of the same version")
    });
    traffic.end([reports], &mut outcome)?;
    note(&pair, &mut outcome)?;
    Ok(outcome)
}

pub fn stranger(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let pair = FaultPair::new(&case.site, &Setting::from_kinds(&kinds))?;
    let far = pair.server.start()?;
    let recording = Recorded::begin(&pair, case.kind)?;
    let _near = pair.client.start()?;
    pair.wait_warm()?;
    let recorded = recording.end()?;
    ensure!(!recorded.is_empty(), "no packet of the carrier's beginning was recorded");
    let traffic = FaultTraffic::new(&pair)?;
    let identity = UnknownIdentity::new()?;
    let carried = traffic.begin(TrafficLoad::steady(2))?;
    let host = GraftHost::new("stranger", pair.stranger, &case.site.directory().join("stranger"))?;
    // Attack once before the measurement, so that code and tables that the daemon loads at their first use do not count
    // as growth of its memory.
    harass(&pair, case.kind, &identity, &recorded, 3)?;
    quiet(&pair)?;
    let before = HeldResources::by(&far)?;
    harass(&pair, case.kind, &identity, &recorded, HANDSHAKES)?;
    let unknown = count(&pair.server, "ended/unknown-caller")?;
    outcome.check(unknown >= HANDSHAKES, || {
        format!("{unknown} of {HANDSHAKES} handshakes were counted as unknown callers")
    });
    pair.wait("the daemon to close descriptors", || {
        Ok(HeldResources::by(&far)?.descriptors <= before.descriptors)
    })?;
    let after = HeldResources::by(&far)?;
    outcome.seen.push(format!("the server's daemon: {before} before, {after} after"));
    outcome.check(after.memory <= before.memory + SLACK, || {
        "the memory of the server's daemon has grown".into()
    });
    outcome.seen.push(format!("recorded and sent again: {recorded}"));
    // A host without a known key can still use plain TCP, as a client and as a server of applications.
    let theirs = traffic.begin_on(&host, TrafficLoad::with_size(5, 300_000))?.end()?;
    outcome.check(all_whole(&theirs), || "a connection from the stranger did not deliver all data".into());
    let redirected = count(&pair.client, "verdicts/redirected")?;
    let carried_there = count(&pair.server, "connections")?;
    let to =
        FaultTraffic::between(&pair.client, &host, SocketAddr::new(pair.stranger.addr_v4().into(), PORT))?;
    let ours = to.whole(TrafficLoad::with_size(5, 300_000))?;
    outcome.check(all_whole(&ours), || "a connection to the stranger did not deliver all data".into());
    outcome.check(count(&pair.client, "verdicts/redirected")? == redirected, || {
        "a connection to the stranger was tunnelled".into()
    });
    outcome.check(carried_there == 2, || {
        format!("{carried_there} connections are tunnelled instead of the client's two")
    });
    to.end([ours], &mut outcome)?;
    outcome.runs = 2 * HANDSHAKES + GARBAGE;
    let reports = vec![carried.end()?, theirs];
    outcome.check(pair.state()? == "warm", || "the carrier is no longer warm".into());
    traffic.end(reports, &mut outcome)?;
    note(&pair, &mut outcome)?;
    Ok(outcome)
}

/// Waits until the server's daemon has given up all handshakes that the host without a known key left unfinished.
fn quiet(pair: &FaultPair<'_>) -> anyhow::Result<()> {
    let sum = || count(&pair.server, "ended/unknown-caller");
    let mut latest = sum()?;
    loop {
        std::thread::sleep(Duration::from_secs(6));
        let now = sum()?;
        if now == latest {
            return Ok(());
        }
        latest = now;
    }
}

/// Attacks the server's daemon: with handshakes by an unknown key, with garbage, and with the recorded packets.
fn harass(
    pair: &FaultPair<'_>,
    kind: FaultedCarrier,
    identity: &UnknownIdentity,
    recorded: &Recorded,
    handshakes: u64,
) -> anyhow::Result<()> {
    let at = pair.at(CARRIERS)?;
    for _ in 0..handshakes {
        pair.stranger.enter(|| identity.call(kind, at, ALPN))??;
    }
    let mut random = fastrand::Rng::with_seed(handshakes);
    let mut garbage = || -> Vec<u8> { (0..random.usize(1..1400)).map(|_| random.u8(..)).collect() };
    let pieces: Vec<_> = (0..GARBAGE).map(|_| garbage()).collect();
    pair.stranger.enter(|| match kind {
        FaultedCarrier::Quic => send_datagrams(at, &pieces),
        FaultedCarrier::Tcp | FaultedCarrier::Mptcp => {
            pieces.iter().take(100).try_for_each(|piece| say(at, piece))
        }
    })??;
    for _ in 0..REPLAYS {
        pair.stranger.enter(|| match kind {
            FaultedCarrier::Quic => send_datagrams(at, &recorded.payloads),
            FaultedCarrier::Tcp | FaultedCarrier::Mptcp => say(at, &recorded.payloads.concat()),
        })??;
        // Also send the recorded packets with the client's own source address.
        if kind == FaultedCarrier::Quic {
            recorded.repeat(pair)?;
        }
    }
    Ok(())
}

fn send_datagrams(at: SocketAddr, payloads: &[Vec<u8>]) -> anyhow::Result<()> {
    let socket = UdpSocket::bind(("0.0.0.0", 0))?;
    for payload in payloads {
        socket.send_to(payload, at)?;
    }
    Ok(())
}

/// Sends all bytes, and waits until the server closes the connection.
fn say(at: SocketAddr, bytes: &[u8]) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect_timeout(&at, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    // A write error is expected: the server may have closed the connection already.
    let _ = stream.write_all(bytes);
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            anyhow::bail!("the server did not close a stranger's connection within {LIMIT:?}")
        }
        _ => Ok(()),
    }
}
