//! Faults on the path of the tunnel between the daemons: cut connections, blocked packets, and changed addresses.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::daemons::note;
use super::outcome::FaultOutcome;
use super::pair::{CARRIERS, DETOUR, FaultPair, Middlebox, Setting, address, count, flowing, moved, run};
use super::traffic::{FaultTraffic, TrafficLoad, all_reset, all_whole};
use super::{FaultCase, FaultedCarrier};
use crate::bench::site::{PUBLISHER_LINK, SUBSCRIBERS_LINK, device};
use crate::lab::LabNode;

/// Largest number of tunnelled bytes between two cuts of the tunnel.
const APART: u64 = 2 << 20;
const CONNECTIONS: u64 = 3;
/// Number of times that the NAT loses its state.
const REBINDINGS: u64 = 5;
/// First port that the NAT assigns.
const TRANSLATED: u16 = 20_000;
/// Length of a path outage that a tunnel connection (carrier) must survive.
const AWAY: Duration = Duration::from_secs(3);

fn drops(ways: &[&str]) -> Vec<(&'static str, String)> {
    let both = |way: &&str| [format!("{way} dport {CARRIERS} drop"), format!("{way} sport {CARRIERS} drop")];
    let [comes, goes] = ["prerouting", "postrouting"];
    ways.iter()
        .flat_map(both)
        .zip([comes, goes].into_iter().cycle())
        .map(|(rule, hook)| (hook, rule))
        .collect()
}

fn block<'a>(node: &'a LabNode, ways: &[&str]) -> anyhow::Result<Middlebox<'a>> {
    Middlebox::new(node, &drops(ways))
}

/// Stops the traffic. Checks that every connection delivered all data, and that no data remain in the daemons' buffers.
fn finish(
    pair: &FaultPair<'_>,
    traffic: FaultTraffic<'_>,
    reports: Vec<super::end::Reports>,
    outcome: &mut FaultOutcome,
) -> anyhow::Result<()> {
    outcome.check(reports.iter().all(all_whole), || "a connection did not deliver all data".into());
    traffic.end(reports, outcome)?;
    pair.wait_for_end()?;
    let kept = count(&pair.client, "kept_bytes")? + count(&pair.server, "kept_bytes")?;
    outcome.check(kept == 0, || format!("the daemons still keep {kept} bytes of ended connections"));
    note(pair, outcome)
}

pub fn cut(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let setting = Setting { more: "window-kib = 512", ..Setting::from_kinds(&kinds) };
    let pair = FaultPair::new(&case.site, &setting)?;
    let _daemons = pair.start()?;
    let traffic = FaultTraffic::new(&pair)?;
    let batch = traffic.begin(TrafficLoad::steady(CONNECTIONS))?;
    flowing(&pair, 1)?;
    let mut random = fastrand::Rng::with_seed(case.args.seed);
    let mut begun_again = Duration::ZERO;
    let mut turns = [0; 2];
    for number in 0..case.args.cuts {
        let offset = moved(&pair)? + random.u64(..APART);
        let before = count(&pair.client, "resumed")?;
        pair.wait("tunnelled bytes", || Ok(moved(&pair)? >= offset))?;
        match (case.kind, number % 2) {
            // The kernel of either host closes the tunnel's TCP connection.
            (FaultedCarrier::Tcp, 0) => {
                let node = [pair.client.node, pair.server.node][random.usize(..2)];
                let filter = format!("( dport = :{CARRIERS} or sport = :{CARRIERS} )");
                run(node, "ss", &["-K", "-t", &filter])?;
            }
            // The daemon of either host closes the tunnel connection (carrier).
            _ => {
                let end = random.usize(..2);
                turns[end] = 1 - turns[end];
                again(&pair, &setting, end, turns[end])?;
            }
        }
        let resumed = pair.wait("a resumed connection", || Ok(count(&pair.client, "resumed")? > before))?;
        begun_again = begun_again.max(resumed);
    }
    outcome.runs = case.args.cuts;
    outcome.seen.push(format!(
        "the first connection continued after at most {:.0} ms",
        begun_again.as_secs_f64() * 1e3
    ));
    let resumed = count(&pair.client, "resumed")?;
    outcome.check(resumed >= case.args.cuts, || format!("{resumed} resumptions"));
    let reports = vec![batch.end()?];
    finish(&pair, traffic, reports, &mut outcome)?;
    Ok(outcome)
}

/// Changes the settings of the peer on one host. The daemon then closes its tunnel connections (carriers) to that peer,
/// whatever their state.
fn again(pair: &FaultPair<'_>, setting: &Setting<'_>, end: usize, turn: usize) -> anyhow::Result<()> {
    let host = match end {
        0 => {
            pair.configure_client(setting, turn)?;
            &pair.client
        }
        _ => {
            pair.configure_server(setting, turn)?;
            &pair.server
        }
    };
    let answer = host.ask("reload")?;
    ensure!(answer["ok"] == true, "reload: {answer}");
    Ok(())
}

pub fn blackhole(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let pair = FaultPair::new(&case.site, &Setting::from_kinds(&kinds))?;
    let _daemons = pair.start()?;
    let traffic = FaultTraffic::new(&pair)?;
    let batch = traffic.begin(TrafficLoad::steady(CONNECTIONS))?;
    flowing(&pair, 1 << 20)?;
    let blocked = block(pair.server.node, &["udp", "tcp"])?;
    let start = Instant::now();
    // The first new connection makes the daemon notice the outage, and is delayed until the daemon has noticed it.
    let finder = traffic.begin(TrafficLoad::with_size(1, 100_000))?;
    pair.wait("notice of the outage", || Ok(pair.state()? != "warm"))?;
    outcome.seen.push(format!("noticed after {:.0} ms", start.elapsed().as_secs_f64() * 1e3));
    let cold = count(&pair.client, "verdicts/cold")?;
    let redirected = count(&pair.client, "verdicts/redirected")?;
    let meanwhile = traffic.whole(TrafficLoad::with_size(5, 100_000))?;
    outcome.check(all_whole(&meanwhile), || {
        "a connection outside of the tunnel did not deliver all data".into()
    });
    let in_place = count(&pair.client, "verdicts/cold")? - cold;
    let redirected = count(&pair.client, "verdicts/redirected")? - redirected;
    outcome.check((in_place, redirected) == (5, 0), || {
        format!("of 5 connections, {in_place} stayed outside of the tunnel and {redirected} were tunnelled")
    });
    std::thread::sleep(AWAY.saturating_sub(start.elapsed()));
    drop(blocked);
    let again = pair.wait_warm()?;
    outcome.seen.push(format!(
        "warm again {:.0} ms after an outage, at {:.1} s",
        again.as_secs_f64() * 1e3,
        start.elapsed().as_secs_f64()
    ));
    flowing(&pair, 1 << 20)?;
    let reports = vec![batch.end()?, finder.end()?, meanwhile];
    finish(&pair, traffic, reports, &mut outcome)?;
    Ok(outcome)
}

pub fn lost(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let pair = FaultPair::new(&case.site, &Setting::from_kinds(&kinds))?;
    be_impatient(&pair, case.kind)?;
    let _daemons = pair.start()?;
    let traffic = FaultTraffic::new(&pair)?;
    let batch = traffic.begin(TrafficLoad::steady(CONNECTIONS))?;
    flowing(&pair, 1 << 20)?;
    let _blocked = block(pair.server.node, &["udp", "tcp"])?;
    let start = Instant::now();
    let lost = batch.ended()?;
    outcome.seen.push(format!("both sides saw the reset after {:.0} s", start.elapsed().as_secs_f64()));
    outcome.check(all_reset(&lost), || "a connection without a carrier was not reset".into());
    let after = traffic.whole(TrafficLoad::with_size(3, 100_000))?;
    outcome.check(all_whole(&after), || "a connection outside of the tunnel did not deliver all data".into());
    pair.wait("the end of all connections", || Ok(count(&pair.server, "connections")? == 0))?;
    traffic.end([lost, after], &mut outcome)?;
    note(&pair, &mut outcome)?;
    Ok(outcome)
}

pub fn udp_blocked(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [FaultedCarrier::Quic, FaultedCarrier::Tcp];
    "quic, tcp".clone_into(&mut outcome.carrier);
    let pair =
        FaultPair::new(&case.site, &Setting { more: "window-kib = 512", ..Setting::from_kinds(&kinds) })?;
    let _daemons = pair.start()?;
    pair.wait("a QUIC carrier", || Ok(pair.kind()? == "quic"))?;
    pair.wait("carriers of both kinds", || {
        let status = pair.client.status()?;
        Ok(status
            .pointer("/status/carry/carriers")
            .and_then(|it| it.as_array())
            .is_some_and(|all| all.len() == 2))
    })?;
    let traffic = FaultTraffic::new(&pair)?;
    let batch = traffic.begin(TrafficLoad::steady(CONNECTIONS))?;
    flowing(&pair, 1 << 20)?;
    for _ in 0..3 {
        let before = count(&pair.client, "resumed")?;
        let blocked = block(pair.server.node, &["udp"])?;
        pair.wait("a TCP carrier", || Ok(pair.kind()? == "tcp"))?;
        pair.wait("resumed connections", || Ok(count(&pair.client, "resumed")? >= before + CONNECTIONS))?;
        flowing(&pair, 1 << 20)?;
        drop(blocked);
        pair.wait("a QUIC carrier", || Ok(pair.kind()? == "quic"))?;
        // An application's connection stays on the tunnel connection (carrier) over TCP, although QUIC is preferred and
        // available again. It moves to the QUIC carrier only when the TCP carrier ends.
        let before = count(&pair.client, "resumed")?;
        run(pair.client.node, "ss", &["-K", "-t", &format!("dport = :{CARRIERS}")])?;
        pair.wait("resumed connections", || Ok(count(&pair.client, "resumed")? >= before + CONNECTIONS))?;
        pair.wait("carriers of both kinds", || Ok(pair.carrier(1, "state")?.as_deref() == Some("warm")))?;
    }
    outcome.runs = 3;
    let reports = vec![batch.end()?];
    finish(&pair, traffic, reports, &mut outcome)?;
    Ok(outcome)
}

/// Makes MPTCP give up a dead path sooner, by the sysctl `tcp_retries2`, which an operator could set as well. The
/// kernel then gives up after some 13 s. MPTCP has no time-out of its own for a dead path.
fn be_impatient(pair: &FaultPair<'_>, kind: FaultedCarrier) -> anyhow::Result<()> {
    for node in [pair.client.node, pair.server.node].into_iter().filter(|_| kind == FaultedCarrier::Mptcp) {
        node.enter(|| std::fs::write("/proc/sys/net/ipv4/tcp_retries2", "5"))?.context("tcp_retries2")?;
    }
    Ok(())
}

/// Gives the client a second route to the server, through the third host. The route is used when the direct link is
/// gone. The server also sends through the third host to the client's address on that second route.
fn detour(pair: &FaultPair<'_>) -> anyhow::Result<()> {
    let [client, server] = [pair.client.node, pair.server.node];
    let via = |link| anyhow::Ok(address(pair.stranger, link)?.to_string());
    // A route to a single address would be preferred to the direct link, which has a route to the whole network. So the
    // second route is to the whole network too.
    let route = |node: &LabNode, to: IpAddr, via: &str, metric: &str| {
        let IpAddr::V4(to) = to else { bail!("{to} is not of IPv4") };
        let [first, second, third, _] = to.octets();
        let network = format!("{first}.{second}.{third}.0/24");
        run(node, "ip", &["route", "replace", &network, "via", via, "metric", metric]).map(drop)
    };
    for link in [SUBSCRIBERS_LINK, PUBLISHER_LINK] {
        route(client, address(server, link)?, &via(DETOUR)?, "2000")?;
    }
    route(server, address(client, DETOUR)?, &via(PUBLISHER_LINK)?, "0")?;
    // Turn off reverse-path filtering: packets may arrive on another interface than the route to their source uses.
    for node in [client, server, pair.stranger] {
        node.enter(|| {
            for name in ["all", "default"] {
                let _ = std::fs::write(format!("/proc/sys/net/ipv4/conf/{name}/rp_filter"), "0");
            }
        })?;
    }
    Ok(())
}

/// Removes the client's address on the direct link, and adds it again.
pub fn path_change(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let pair =
        FaultPair::new(&case.site, &Setting { more: "window-kib = 512", ..Setting::from_kinds(&kinds) })?;
    be_impatient(&pair, case.kind)?;
    detour(&pair)?;
    let _daemons = pair.start()?;
    let traffic = FaultTraffic::new(&pair)?;
    let batch = traffic.begin(TrafficLoad::steady(CONNECTIONS))?;
    flowing(&pair, 1 << 20)?;
    let node = pair.client.node;
    let device = device(pair.client.node, SUBSCRIBERS_LINK)?;
    let near = address(node, SUBSCRIBERS_LINK)?;
    let start = Instant::now();
    run(node, "ip", &["address", "del", &format!("{near}/24"), "dev", &device])?;
    flowing(&pair, 1 << 20).context("no data arrived after the address was removed")?;
    outcome.seen.push(format!(
        "1 MiB more had arrived {:.1} s after the address was removed",
        start.elapsed().as_secs_f64()
    ));
    // New connections use the remaining address once the daemon has noticed the change. The daemon checks its addresses
    // once a second.
    let mut reports = Vec::new();
    pair.wait("connections from the address that is left", || {
        let after = traffic.whole(TrafficLoad::with_size(3, 300_000))?;
        outcome.check(all_whole(&after), || "a new connection did not deliver all data".into());
        let is_gone = |own: SocketAddr| own.ip() == near;
        let gone = after.values().filter(|it| it.own.is_some_and(is_gone)).count();
        reports.push(after);
        Ok(gone == 0)
    })?;
    reports.push(batch.end()?);
    finish(&pair, traffic, reports, &mut outcome)?;
    Ok(outcome)
}

/// Removes one of the two server addresses that the tunnel can connect to.
pub fn address_change(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let mut setting = Setting { more: "window-kib = 512", ..Setting::from_kinds(&kinds) };
    let pair = FaultPair::new(&case.site, &setting)?;
    be_impatient(&pair, case.kind)?;
    detour(&pair)?;
    // Applications use the server's address that remains.
    let [goes, stays] = [pair.other_address()?, pair.address()?].map(|it| (it, CARRIERS).into());
    setting.carry = vec![goes, stays];
    pair.configure(&setting, 0)?;
    let _daemons = pair.start()?;
    let way = || anyhow::Ok(pair.carrier(0, "way")?.unwrap_or_default());
    pair.wait("a carrier to the first address", || Ok(way()?.contains(&goes.to_string())))?;
    pair.wait("carriers to both addresses", || Ok(pair.carrier(1, "state")?.as_deref() == Some("warm")))?;
    let traffic = FaultTraffic::new(&pair)?;
    let batch = traffic.begin(TrafficLoad::steady(CONNECTIONS))?;
    flowing(&pair, 1 << 20)?;
    let device = device(pair.server.node, PUBLISHER_LINK)?;
    let start = Instant::now();
    run(pair.server.node, "ip", &["address", "del", &format!("{}/24", goes.ip()), "dev", &device])?;
    pair.wait("a carrier to the other address", || Ok(way()?.contains(&stays.to_string())))?;
    pair.wait("resumed connections", || Ok(count(&pair.client, "resumed")? >= CONNECTIONS))?;
    outcome.seen.push(format!(
        "all connections continued {:.0} ms after the address was removed",
        start.elapsed().as_secs_f64() * 1e3
    ));
    flowing(&pair, 1 << 20)?;
    let after = traffic.whole(TrafficLoad::with_size(3, 300_000))?;
    outcome.check(all_whole(&after), || "a new connection did not deliver all data".into());
    let reports = vec![batch.end()?, after];
    finish(&pair, traffic, reports, &mut outcome)?;
    Ok(outcome)
}

/// Returns the local ports of the client's tunnel connections (carriers), as the kernel assigned them.
fn ports(pair: &FaultPair<'_>, kind: FaultedCarrier) -> anyhow::Result<Vec<u16>> {
    let local = |line: &str, at: usize| {
        let field = line.split_whitespace().nth(at)?;
        field.rsplit_once(':')?.1.parse::<u16>().ok()
    };
    let (arguments, at) = match kind {
        FaultedCarrier::Quic => (vec!["-Huan".to_owned()], 3),
        _ => (vec!["-Htn".to_owned(), format!("dport = :{CARRIERS}")], 3),
    };
    let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
    let said = run(pair.client.node, "ss", &arguments)?;
    Ok(said.lines().filter_map(|line| local(line, at)).collect())
}

/// Makes a NAT between the hosts assign another port to the tunnel connection (carrier). QUIC treats that as a new path
/// of the same connection. For TCP, the NAT has lost its state: it drops packets of old connections and passes new
/// ones.
pub fn nat_rebinding(case: &FaultCase<'_>) -> anyhow::Result<FaultOutcome> {
    let mut outcome = case.outcome();
    let kinds = [case.kind];
    let pair =
        FaultPair::new(&case.site, &Setting { more: "window-kib = 512", ..Setting::from_kinds(&kinds) })?;
    be_impatient(&pair, case.kind)?;
    let _daemons = pair.start()?;
    let traffic = FaultTraffic::new(&pair)?;
    let batch = traffic.begin(TrafficLoad::steady(CONNECTIONS))?;
    flowing(&pair, 1 << 20)?;
    let mut translator = None;
    for number in 1..=REBINDINGS {
        let known = ports(&pair, case.kind)?;
        let before = count(&pair.client, "resumed")?;
        let rules = match case.kind {
            FaultedCarrier::Quic => {
                ensure!(known.len() == 1, "expected one UDP socket, found {known:?}");
                let own = known[0];
                let other = TRANSLATED + u16::try_from(number)?;
                vec![
                    ("postrouting", format!("udp dport {CARRIERS} udp sport {own} udp sport set {other}")),
                    // Packets to any port but the latest are dropped, as the NAT has forgotten the earlier ports.
                    ("prerouting", format!("udp sport {CARRIERS} udp dport != {other} drop")),
                    ("prerouting", format!("udp sport {CARRIERS} udp dport {other} udp dport set {own}")),
                ]
            }
            FaultedCarrier::Tcp | FaultedCarrier::Mptcp => {
                let known: Vec<_> = known.iter().map(u16::to_string).collect();
                let known = known.join(", ");
                vec![
                    ("postrouting", format!("tcp dport {CARRIERS} tcp sport {{ {known} }} drop")),
                    ("prerouting", format!("tcp sport {CARRIERS} tcp dport {{ {known} }} drop")),
                ]
            }
        };
        drop(translator.take());
        translator = Some(Middlebox::new(pair.client.node, &rules)?);
        if case.kind != FaultedCarrier::Quic {
            let start = Instant::now();
            pair.wait("resumed connections", || Ok(count(&pair.client, "resumed")? >= before + CONNECTIONS))?;
            outcome.seen.push(format!(
                "all connections continued after {:.0} ms",
                start.elapsed().as_secs_f64() * 1e3
            ));
        }
        flowing(&pair, 4 << 20)?;
    }
    let resumed = count(&pair.client, "resumed")?;
    match case.kind {
        FaultedCarrier::Quic => outcome.check(resumed == 0, || {
            format!("{resumed} connections were resumed: the carrier did not survive")
        }),
        _ => outcome.check(resumed >= REBINDINGS * CONNECTIONS, || format!("{resumed} resumptions")),
    }
    outcome.runs = REBINDINGS;
    let reports = vec![batch.end()?];
    finish(&pair, traffic, reports, &mut outcome)?;
    drop(translator);
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn carrier_packets_are_dropped_in_both_directions() {
        let rules = drops(&["udp", "tcp"]);
        let text: Vec<_> = rules.iter().map(|(hook, rule)| format!("{hook} {rule}")).collect();
        assert_eq!(
            text,
            [
                "prerouting udp dport 9188 drop",
                "postrouting udp sport 9188 drop",
                "prerouting tcp dport 9188 drop",
                "postrouting tcp sport 9188 drop"
            ]
        );
    }
}
