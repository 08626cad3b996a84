//! Peers of another version, and callers that are no peers.

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

/// A version of the carriers' protocol that does not exist.
const OTHER: &[u8] = b"millrace-carry/0";
const HANDSHAKES: u64 = 100;
const GARBAGE: u64 = 500;
const REPLAYS: usize = 5;
/// Memory that an allocator may keep.
pub const SLACK: u64 = 16 << 20;

/// Resources that a daemon holds.
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

/// Tests a called peer of another version, and a caller of another version.
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
    pair.wait("a refusal in words", || Ok(pair.client.status()?.to_string().contains(wanted)))?;
    let detail = pair.carrier(0, "detail")?.context("no detail in the status")?;
    outcome.seen.push(format!("the client's status says: {detail}"));
    // Each caller has the other version, with any key.
    let called = pair.stranger.enter(|| identity.call(case.kind, pair.at(CARRIERS)?, OTHER))?;
    called?;
    pair.wait("its count", || Ok(count(&pair.server, "ended/other-version")? > 0))?;
    let traffic = FaultTraffic::new(&pair)?;
    let reports = traffic.whole(TrafficLoad::with_size(5, 300_000))?;
    outcome.check(all_whole(&reports), || "a connection in place was not whole".into());
    let led = count(&pair.client, "verdicts/led")?;
    outcome.check(led == 0, || format!("{led} connections were led to nobody"));
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
    ensure!(!recorded.is_empty(), "nothing of the carrier's beginning was recorded");
    let traffic = FaultTraffic::new(&pair)?;
    let identity = UnknownIdentity::new()?;
    let carried = traffic.begin(TrafficLoad::steady(2))?;
    let host = GraftHost::new("stranger", pair.stranger, &case.site.directory().join("stranger"))?;
    // Attack once before the measurement, since code and tables stay loaded after the first use.
    harass(&pair, case.kind, &identity, &recorded, 3)?;
    quiet(&pair)?;
    let before = HeldResources::by(&far)?;
    harass(&pair, case.kind, &identity, &recorded, HANDSHAKES)?;
    let unknown = count(&pair.server, "ended/unknown-caller")?;
    outcome.check(unknown >= HANDSHAKES, || format!("{unknown} of {HANDSHAKES} handshakes were counted"));
    pair.wait("the last of its descriptors", || {
        Ok(HeldResources::by(&far)?.descriptors <= before.descriptors)
    })?;
    let after = HeldResources::by(&far)?;
    outcome.seen.push(format!("the server's daemon: {before} before, {after} after"));
    outcome.check(after.memory <= before.memory + SLACK, || "its memory has grown".into());
    outcome.seen.push(format!("recorded and sent again: {recorded}"));
    // The stranger's own applications, and applications that it serves, must work.
    let theirs = traffic.begin_on(&host, TrafficLoad::with_size(5, 300_000))?.end()?;
    outcome.check(all_whole(&theirs), || "a connection of the stranger was not whole".into());
    let led = count(&pair.client, "verdicts/led")?;
    let carried_there = count(&pair.server, "connections")?;
    let to =
        FaultTraffic::between(&pair.client, &host, SocketAddr::new(pair.stranger.addr_v4().into(), PORT))?;
    let ours = to.whole(TrafficLoad::with_size(5, 300_000))?;
    outcome.check(all_whole(&ours), || "a connection to the stranger was not whole".into());
    outcome.check(count(&pair.client, "verdicts/led")? == led, || "one to the stranger was led".into());
    outcome
        .check(carried_there == 2, || format!("{carried_there} are carried, and not the two of the client"));
    to.end([ours], &mut outcome)?;
    outcome.runs = 2 * HANDSHAKES + GARBAGE;
    let reports = vec![carried.end()?, theirs];
    outcome.check(pair.state()? == "warm", || "the carrier is not warm any more".into());
    traffic.end(reports, &mut outcome)?;
    note(&pair, &mut outcome)?;
    Ok(outcome)
}

/// Waits until the daemon has given up handshakes that nobody continues.
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

/// Sends handshakes with an unknown key, garbage, and the recorded packets again.
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
        // Send them with the client's address.
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

/// Sends all bytes, and waits for the other end to have enough.
fn say(at: SocketAddr, bytes: &[u8]) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect_timeout(&at, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    // The other end may have closed it already.
    let _ = stream.write_all(bytes);
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            anyhow::bail!("a stranger was not let go within {LIMIT:?}")
        }
        _ => Ok(()),
    }
}
