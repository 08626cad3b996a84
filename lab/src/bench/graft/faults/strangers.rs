//! Peers of another version, and who is no peer at all.

use std::fmt;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use millrace_graft_proto::carry::frame::ALPN;

use super::callers::Identity;
use super::daemons::note;
use super::outcome::Outcome;
use super::pair::{CARRIERS, PORT, Pair, Setting, count};
use super::recorded::Recorded;
use super::traffic::{Load, Traffic, all_whole};
use super::{Case, Kind};
use crate::bench::graft::host::{Host, LIMIT};
use crate::bench::process::Process;
use crate::bench::usage::rss_bytes;

/// A version of carriers that there is not.
const OTHER: &[u8] = b"millrace-carry/0";
const HANDSHAKES: u64 = 100;
const GARBAGE: u64 = 500;
const REPLAYS: usize = 5;
/// Of memory, that an allocator keeps or not.
pub const SLACK: u64 = 16 << 20;

/// By a daemon.
#[derive(Clone, Copy)]
pub struct Held {
    pub memory: u64,
    pub descriptors: usize,
}

impl Held {
    pub fn by(daemon: &Process) -> anyhow::Result<Self> {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", daemon.id()))?.count();
        Ok(Self { memory: rss_bytes(daemon.id())?, descriptors })
    }
}

impl fmt::Display for Held {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{:.1} MiB and {} descriptors", self.memory as f64 / f64::from(1 << 20), self.descriptors)
    }
}

/// The peer that is called speaks another version, and one that speaks another version calls.
pub fn other_version(case: &Case<'_>) -> anyhow::Result<Outcome> {
    let (mut outcome, kinds) = (case.outcome(), [case.kind]);
    let identity = Identity::new()?;
    let mut setting = Setting::of(&kinds);
    let pair = Pair::new(&case.site, &setting)?;
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
    // Whoever calls has the other version, with whatever key.
    let called = pair.stranger.enter(|| identity.call(case.kind, pair.at(CARRIERS)?, OTHER))?;
    called?;
    pair.wait("its count", || Ok(count(&pair.server, "ended/other-version")? > 0))?;
    let traffic = Traffic::new(&pair)?;
    let reports = traffic.whole(Load::of(5, 300_000))?;
    outcome.check(all_whole(&reports), || "a connection in place was not whole".into());
    let led = count(&pair.client, "verdicts/led")?;
    outcome.check(led == 0, || format!("{led} connections were led to nobody"));
    traffic.end([reports], &mut outcome)?;
    note(&pair, &mut outcome)?;
    Ok(outcome)
}

pub fn stranger(case: &Case<'_>) -> anyhow::Result<Outcome> {
    let (mut outcome, kinds) = (case.outcome(), [case.kind]);
    let pair = Pair::new(&case.site, &Setting::of(&kinds))?;
    let far = pair.server.start()?;
    let recording = Recorded::begin(&pair, case.kind)?;
    let _near = pair.client.start()?;
    pair.wait_warm()?;
    let recorded = recording.end()?;
    ensure!(!recorded.is_empty(), "nothing of the carrier's beginning was recorded");
    let (traffic, identity) = (Traffic::new(&pair)?, Identity::new()?);
    let carried = traffic.begin(Load::steady(2))?;
    let host = Host::new("stranger", pair.stranger, &case.site.directory().join("stranger"))?;
    // Once before it is measured: code and tables that are used for the first time stay.
    harass(&pair, case.kind, &identity, &recorded, 3)?;
    quiet(&pair)?;
    let before = Held::by(&far)?;
    harass(&pair, case.kind, &identity, &recorded, HANDSHAKES)?;
    let unknown = count(&pair.server, "ended/unknown-caller")?;
    outcome.check(unknown >= HANDSHAKES, || format!("{unknown} of {HANDSHAKES} handshakes were counted"));
    pair.wait("the last of its descriptors", || Ok(Held::by(&far)?.descriptors <= before.descriptors))?;
    let after = Held::by(&far)?;
    outcome.seen.push(format!("the server's daemon: {before} before, {after} after"));
    outcome.check(after.memory <= before.memory + SLACK, || "its memory has grown".into());
    outcome.seen.push(format!("recorded and sent again: {recorded}"));
    // The stranger's applications, and applications that it serves.
    let theirs = traffic.begin_on(&host, Load::of(5, 300_000))?.end()?;
    outcome.check(all_whole(&theirs), || "a connection of the stranger was not whole".into());
    let (led, carried_there) = (count(&pair.client, "verdicts/led")?, count(&pair.server, "connections")?);
    let to = Traffic::between(&pair.client, &host, SocketAddr::new(pair.stranger.addr_v4().into(), PORT))?;
    let ours = to.whole(Load::of(5, 300_000))?;
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

/// Until handshakes that nobody goes on with are given up.
fn quiet(pair: &Pair<'_>) -> anyhow::Result<()> {
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

/// Handshakes with an unknown key, garbage, and what was recorded once more.
fn harass(
    pair: &Pair<'_>,
    kind: Kind,
    identity: &Identity,
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
        Kind::Quic => send_datagrams(at, &pieces),
        Kind::Tcp | Kind::Mptcp => pieces.iter().take(100).try_for_each(|piece| say(at, piece)),
    })??;
    for _ in 0..REPLAYS {
        pair.stranger.enter(|| match kind {
            Kind::Quic => send_datagrams(at, &recorded.payloads),
            Kind::Tcp | Kind::Mptcp => say(at, &recorded.payloads.concat()),
        })??;
        // As if they came from the client.
        if kind == Kind::Quic {
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

/// All of it, and waits for the other end to have enough.
fn say(at: SocketAddr, bytes: &[u8]) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect_timeout(&at, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    // It may have been closed already.
    let _ = stream.write_all(bytes);
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
            anyhow::bail!("a stranger was not let go within {LIMIT:?}")
        }
        _ => Ok(()),
    }
}
