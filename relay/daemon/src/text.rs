//! Formats a relay's status as tables of text.

use std::{collections::BTreeMap, net::SocketAddr};

use millrace_daemon::render::{
    Fit::{self, Name, Text, Whole},
    bytes, line, percent, span, table,
};
use millrace_moq::TrackName;
use millrace_relay::status::{self as relay, ClusterDiscoveryStatus, LookupStatus};

use super::status::{MediaShare, RelaySessionStatus, RelayTrackStatus, Status};

/// Renders a whole status. Rates are computed from the difference to the earlier status `before`. Lines fit `width`
/// columns unless numbers or addresses are wider.
pub fn render(status: &Status, before: Option<&Status>, width: usize) -> String {
    let mut out = String::new();
    summary(&mut out, status, before, width);
    // A relay with one shard at each address has the counts of its sessions only.
    if status.shards.iter().any(|shard| shard.shard > 0) {
        table(&mut out, width, &SHARDS, status.shards.iter().map(shard_row));
    }
    if !status.sessions.is_empty() {
        sessions(&mut out, &status.sessions, width);
    }
    if !status.shares.sessions.is_empty() {
        table(
            &mut out,
            width,
            &LATELY,
            status.shares.sessions.iter().map(|(session, share)| share_row(*session, share)),
        );
    }
    outcomes(&mut out, width, ["RECEIVED", "PACKETS"], &status.engine.received);
    outcomes(&mut out, width, ["FRAMES", "COUNT"], &status.engine.frames);
    outcomes(&mut out, width, ["OPENINGS", "STREAMS"], &status.engine.openings);
    outcomes(&mut out, width, ["COPIES", "PACKETS"], &status.engine.copies);
    if !status.gate.refused.is_empty() {
        outcomes(&mut out, width, ["REFUSED BY GATE", "PACKETS"], &Some(status.gate.refused.clone()));
    }
    if !status.tracks.is_empty() {
        table(&mut out, width, &TRACKS, status.tracks.iter().map(track_row));
    }
    let mut drops = status.drops.iter().filter(|(_, count)| **count > 0).peekable();
    if drops.peek().is_some() {
        let rows = drops.map(|(reason, count)| vec![reason.clone(), count.to_string()]);
        table(&mut out, width, &[("DROPPED", Whole), ("COUNT", Whole)], rows);
    }
    out
}

fn sessions(out: &mut String, sessions: &[RelaySessionStatus], width: usize) {
    table(out, width, &WHO, sessions.iter().map(who_row));
    table(out, width, &PATH, sessions.iter().map(path_row));
    table(out, width, &SENT, sessions.iter().map(sent_row));
    let mut dropped = sessions.iter().filter(|session| !session.drops.is_empty()).peekable();
    if dropped.peek().is_some() {
        let rows = dropped.map(|session| vec![session.id.to_string(), reasons(&session.drops)]);
        table(out, width, &[("SESSION", Whole), ("DROPPED FOR IT", Text)], rows);
    }
    let by_kernel: Vec<_> = sessions.iter().filter(|session| session.kernel_copies.is_some()).collect();
    if !by_kernel.is_empty() {
        table(out, width, &KERNEL, by_kernel.iter().map(|session| kernel_row(session)));
    }
    let mut declined =
        by_kernel.iter().filter_map(|session| Some((session.id, declined(session)?))).peekable();
    if declined.peek().is_some() {
        let rows = declined.map(|(id, reasons)| vec![id.to_string(), reasons]);
        table(out, width, &[("SESSION", Whole), ("DECLINED BY KERNEL", Text)], rows);
    }
}

fn summary(out: &mut String, status: &Status, before: Option<&Status>, width: usize) {
    let mut say = |text: String| line(out, width, &text);
    let relay::Status { engine, totals, cache, .. } = &status.relay;
    let state = if status.draining { "draining" } else { "serving" };
    let listen: Vec<_> = status.listen.iter().map(SocketAddr::to_string).collect();
    say(format!("millrace {}, {state} on {}", status.version, listen.join(", ")));
    say(format!("up {}, engine {}: {}", span(status.uptime_s), engine.name, engine.reason));
    let refused: u64 = status.gate.refused.values().sum();
    match status.gate.on || refused > 0 {
        true => say(format!("gate {}, {refused} packets refused", status.gate.reason)),
        false => say(format!("no gate: {}", status.gate.reason)),
    }
    say(format!(
        "cache {} of {} in {} groups, {} groups evicted",
        bytes(cache.bytes),
        bytes(cache.limit),
        cache.groups,
        cache.evicted
    ));
    say(format!(
        "in {} objects ({}), out {} media packets ({}) in {} calls, {} lost",
        totals.objects_received,
        bytes(totals.object_bytes_received),
        totals.data_plane.packets,
        bytes(totals.data_plane.bytes),
        totals.send_calls,
        totals.packets_lost
    ));
    if engine.name == "kernel" {
        say(format!(
            "by kernel out {} media packets ({}), {} % of all; {} streams at the moment, {} packets unregistered",
            totals.kernel.packets,
            bytes(totals.kernel.bytes),
            percent(totals.kernel.packets, totals.data_plane.packets),
            engine.streams,
            totals.kernel_unregistered
        ));
    }
    for (interface, share) in &status.shares.interfaces {
        say(format!("{interface}, last 10 s: {}", lately(share)));
    }
    if let Some(upstream) = &status.upstream {
        match upstream.session {
            Some(session) => say(format!("upstream {}: session {session}", upstream.host)),
            None => say(format!("upstream {} is away: {}", upstream.host, upstream.reason)),
        }
        for source in upstream.sources.iter().filter(|source| source.host != upstream.host) {
            match source.reason.as_str() {
                "" => say(format!("upstream {}: not in use", source.host)),
                reason => say(format!("upstream {} did not answer: {reason}", source.host)),
            }
        }
    }
    if let Some(cluster) = &status.cluster {
        let up = cluster.peers.iter().filter(|peer| peer.session.is_some()).count();
        say(format!(
            "cluster hop {}: {up} of {} peers, {} sessions with relays, {} routes to {} namespaces",
            cluster.hop,
            cluster.peers.len(),
            cluster.links.len(),
            cluster.routes,
            cluster.namespaces
        ));
        for peer in cluster.peers.iter().filter(|peer| peer.session.is_none()) {
            say(format!("peer {} is away: {}", peer.host, peer.reason));
        }
        cluster.discovery.iter().for_each(|discovery| say(found(discovery)));
        let lookup = cluster.discovery.as_ref().and_then(|discovery| discovery.lookup);
        lookup.iter().for_each(|lookup| say(looked_up(lookup, totals)));
    }
    if totals.log_lines_dropped > 0 {
        say(format!("{} log lines lost", totals.log_lines_dropped));
    }
    if let Some(before) = before {
        // The divisor stays positive even if the relay was restarted between the two statuses.
        let seconds = (status.uptime_s - before.uptime_s).max(0.001);
        let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        say(format!(
            "now {:.0} objects/s in, {:.0} media packets/s ({}/s) out, {:.0} packets/s ({}/s) by kernel",
            rate(totals.objects_received, before.totals.objects_received),
            rate(totals.data_plane.packets, before.totals.data_plane.packets),
            bytes(rate(totals.data_plane.bytes, before.totals.data_plane.bytes) as u64),
            rate(totals.kernel.packets, before.totals.kernel.packets),
            bytes(rate(totals.kernel.bytes, before.totals.kernel.bytes) as u64)
        ));
    }
}

const SHARDS: [(&str, Fit); 6] = [
    ("ADDRESS", Whole),
    ("SHARD", Whole),
    ("CONNECTIONS", Whole),
    ("RECEIVED pkt", Whole),
    ("MEDIA pkt", Whole),
    ("MISDIRECTED", Whole),
];

fn shard_row(shard: &relay::ShardStatus) -> Vec<String> {
    let counts = [shard.shard, shard.connections, shard.received, shard.sent.packets, shard.misdirected];
    std::iter::once(shard.address.to_string()).chain(counts.map(|count| count.to_string())).collect()
}

/// Columns of a session's path. RTT, queueing delay on the path (PATH) and waiting time at the relay (HERE) are in ms.
const PATH: [(&str, Fit); 10] = [
    ("SESSION", Whole),
    ("RTT ms", Whole),
    ("PATH ms", Whole),
    ("HERE ms", Whole),
    ("Mbit/s", Whole),
    ("LOSS %", Whole),
    ("MARKED", Whole),
    ("CWND", Whole),
    ("FLIGHT", Whole),
    ("MTU", Whole),
];

/// Columns of a session's peer. A dash in SUBS or PUBS means that the peer does not subscribe or publish.
const WHO: [(&str, Fit); 6] = [
    ("SESSION", Whole),
    ("REMOTE", Whole),
    ("MOQ", Whole),
    ("CIPHER", Whole),
    ("SUBS", Whole),
    ("PUBS", Whole),
];

const SENT: [(&str, Fit); 6] = [
    ("SESSION", Whole),
    ("QUINN pkt", Whole),
    ("MEDIA pkt", Whole),
    ("LOST", Whole),
    ("RESENT", Whole),
    ("PENDING", Whole),
];

const KERNEL: [(&str, Fit); 8] = [
    ("SESSION", Whole),
    ("KERNEL pkt", Whole),
    ("SHARE %", Whole),
    ("AHEAD", Whole),
    ("STALE", Whole),
    ("DRY", Whole),
    ("QUIET ack", Whole),
    ("UNREG", Whole),
];

/// Columns of the share of the last ten seconds' bytes that the kernel sent, in percent, and of the reason why
/// userspace sent the other bytes.
const LATELY: [(&str, Fit); 4] =
    [("SESSION", Whole), ("LAST 10 s %", Whole), ("REASON", Whole), ("REMEDY", Text)];

const TRACKS: [(&str, Fit); 8] = [
    ("TRACK", Name),
    ("ALIAS", Whole),
    ("PUBS", Whole),
    ("SUBS", Whole),
    ("GROUPS", Whole),
    ("OBJECTS", Whole),
    ("CACHED", Whole),
    ("LARGEST", Whole),
];

fn who_row(session: &RelaySessionStatus) -> Vec<String> {
    let count = |takes_part, count: u64| match (takes_part, count) {
        (false, 0) => "-".to_owned(),
        _ => count.to_string(),
    };
    vec![
        session.id.to_string(),
        session.remote.to_string(),
        session.draft.to_string(),
        session.cipher.replace("20-poly1305", "").replace("-gcm", "").replace("aes-", "aes"),
        count(session.subscriber, session.subscriptions),
        count(session.publisher, session.publications),
    ]
}

fn path_row(session: &RelaySessionStatus) -> Vec<String> {
    vec![
        session.id.to_string(),
        format!("{:.1}", session.rtt_us as f64 / 1000.0),
        format!("{:.0}", session.path_queue_us as f64 / 1000.0),
        format!("{:.0}", session.queue_us as f64 / 1000.0),
        session.bandwidth.map_or("-".to_owned(), |bytes| format!("{:.1}", bytes as f64 / 125_000.0)),
        session.loss.map_or("-".to_owned(), |share| format!("{:.1}", share * 100.0)),
        match session.ecn.as_str() {
            "capable" => session.packets_marked.to_string(),
            _ => "-".to_owned(),
        },
        bytes(session.cwnd),
        bytes(session.in_flight),
        session.path_mtu.to_string(),
    ]
}

fn sent_row(session: &RelaySessionStatus) -> Vec<String> {
    vec![
        session.id.to_string(),
        session.quinn.packets.to_string(),
        session.data_plane.packets.to_string(),
        session.packets_lost.to_string(),
        bytes(session.bytes_retransmitted),
        bytes(session.pending),
    ]
}

/// Returns a track's name as a user types it: `live/1.m4s`.
pub fn typed(track: &str) -> String {
    track.parse::<TrackName>().map_or_else(|_| track.to_owned(), |name| name.typed().to_string())
}

/// Formats counts by reason, such as `late 3, evicted 1`.
fn reasons(counts: &BTreeMap<String, u64>) -> String {
    counts.iter().map(|(reason, count)| format!("{reason} {count}")).collect::<Vec<_>>().join(", ")
}

fn track_row(track: &RelayTrackStatus) -> Vec<String> {
    vec![
        typed(&track.name),
        track.alias.to_string(),
        track.publishers.to_string(),
        track.subscribers.to_string(),
        track.groups_cached.to_string(),
        track.objects_cached.to_string(),
        bytes(track.bytes_cached),
        track.largest.map_or("-".to_owned(), |(group, object)| format!("{group}/{object}")),
    ]
}

/// Returns the table row with a session's packets that the kernel engine handled.
fn kernel_row(session: &RelaySessionStatus) -> Vec<String> {
    let sealed = session.keystreams.unwrap_or_default().sealed;
    vec![
        session.id.to_string(),
        session.kernel.packets.to_string(),
        percent(session.kernel.packets, session.data_plane.packets),
        sealed.hit.to_string(),
        sealed.stale.to_string(),
        sealed.miss.to_string(),
        session.kernel_deferred.to_string(),
        session.kernel_unregistered.to_string(),
    ]
}

/// Describes the state of discovery: the relays found in the store, and the store's latest error.
pub fn found(discovery: &ClusterDiscoveryStatus) -> String {
    let ClusterDiscoveryStatus { store, found, registered, error, failures, lookup: _ } = discovery;
    let own = if *registered { ", and has this relay's record" } else { "" };
    match error.as_str() {
        "" => format!("{store} has {found} other relays{own}"),
        error => format!("{store} had {found} other relays, and fails now ({failures} failures): {error}"),
    }
}

/// Describes a relay's registrations in the store, its lookups, and its sessions on demand.
pub fn looked_up(lookup: &LookupStatus, totals: &relay::RelayTotals) -> String {
    let LookupStatus { registered, unwritten, known, known_absent, .. } = lookup;
    let LookupStatus { hits, negatives, found, absent, failed, limited, .. } = lookup;
    let waiting = if *unwritten > 0 { format!(" ({unwritten} not written yet)") } else { String::new() };
    format!(
        "{registered} namespaces registered{waiting}; in memory {known} of other relays, and {known_absent} that no relay has; lookups \
         {hits} + {negatives} absent from memory, {found} + {absent} absent from the store, {failed} without an answer of the store, \
         {limited} over lookup-rate; sessions on demand {} begun, {} not needed any more",
        totals.sessions_on_demand, totals.sessions_unneeded
    )
}

fn share_row(session: u64, share: &MediaShare) -> Vec<String> {
    vec![session.to_string(), share.percent().to_string(), share.reason.clone(), share.remedy.clone()]
}

/// Describes the share of the media that the kernel sent in the last ten seconds, and the reason why userspace sent the
/// other bytes.
pub fn lately(share: &MediaShare) -> String {
    let part = format!("{} % of {} by kernel", share.percent(), bytes(share.bytes));
    match (share.reason.as_str(), share.remedy.as_str()) {
        ("", _) => part,
        (reason, "") => format!("{part}, the rest mostly for {reason}"),
        (reason, remedy) => format!("{part}, the rest mostly for {reason}: {remedy}"),
    }
}

/// Returns the number of packet copies that the kernel left unsent for the session, by reason. `None` if it sent all.
fn declined(session: &RelaySessionStatus) -> Option<String> {
    let counts = session.kernel_copies.iter().flatten().filter(|(outcome, _)| *outcome != "sent");
    let counts = counts.map(|(reason, count)| format!("{reason} {count}"));
    let waits = (session.kernel_ready == Some(false)).then(|| match session.kernel_record.as_deref() {
        Some("held") | None => "no keys or route yet".to_owned(),
        Some(why) => format!("no record: {why}"),
    });
    let all: Vec<_> = waits.into_iter().chain(counts).collect();
    (!all.is_empty()).then(|| all.join(", "))
}

fn outcomes(out: &mut String, width: usize, head: [&str; 2], counts: &Option<BTreeMap<String, u64>>) {
    let rows: Vec<_> =
        counts.iter().flatten().map(|(outcome, count)| vec![outcome.clone(), count.to_string()]).collect();
    if !rows.is_empty() {
        table(out, width, &head.map(|name| (name, Whole)), rows.into_iter());
    }
}

#[cfg(test)]
pub(super) mod tests {
    use millrace_testkit::golden::assert_as_reviewed;

    use super::*;
    use crate::status::{EngineStatus, KeystreamStatus, Keystreams, MediaShares, RelayTotals, SentStatus};

    #[test]
    fn percent_of_bytes_sent_by_kernel_is_shown_with_reason_and_remedy() {
        let share = MediaShare {
            bytes: 2 << 20,
            by_kernel: 30_000,
            reason: "super_packet".into(),
            remedy: "ethtool -K eth0 gro off".into(),
        };
        let shares = MediaShares {
            interfaces: [("eth0".to_owned(), share.clone())].into(),
            sessions: [(4, share.clone())].into(),
        };
        let status = Status { shares, ..Status::default() };
        let text = render(&status, None, 120);
        for part in [
            "eth0, last 10 s: 1 % of 2.0M by kernel, the rest mostly for super_packet: ethtool -K eth0 gro off",
            "1  super_packet  ethtool -K eth0 gro off",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        let all = MediaShare { by_kernel: share.bytes, reason: String::new(), ..share };
        assert_eq!(lately(&all), "100 % of 2.0M by kernel");
    }

    #[test]
    fn shards_are_shown_if_an_address_has_several() {
        let shard = |shard, misdirected| relay::ShardStatus {
            address: ([192, 0, 2, 1], 4443).into(),
            shard,
            connections: 7,
            received: 8,
            misdirected,
            sent: SentStatus { packets: 9, bytes: 10 },
        };
        let text = |shards| render(&relay::Status { shards, ..relay::Status::default() }.into(), None, 120);
        let shown = text(vec![shard(0, 0), shard(1, 3)]);
        assert!(
            shown.contains("192.0.2.1:4443      1            7             8          9            3"),
            "{shown}"
        );
        assert!(!text(vec![shard(0, 0)]).contains("SHARD"));
    }

    #[test]
    fn relay_status_shows_kernel_packet_and_keystream_counters() {
        let counts = |counts: &[(&str, u64)]| {
            Some(counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect())
        };
        let sealed = KeystreamStatus { hit: 51, stale: 52, miss: 53 };
        let session = RelaySessionStatus {
            id: 4,
            kernel: SentStatus { packets: 300, bytes: 1 },
            data_plane: SentStatus { packets: 100, bytes: 1 },
            kernel_ready: Some(false),
            kernel_copies: counts(&[("sent", 300), ("window", 5), ("before", 6)]),
            kernel_deferred: 9,
            keystreams: Some(Keystreams { sealed, opened: KeystreamStatus::default() }),
            ..session()
        };
        let status = relay::Status {
            engine: EngineStatus {
                name: "kernel".into(),
                reason: "attached to eth0 by TCX".into(),
                streams: 2,
                received: counts(&[("forwarded", 70), ("no_slot", 8)]),
                frames: counts(&[("ahead", 2), ("good", 68)]),
                openings: counts(&[("bound", 21), ("order", 1)]),
                copies: counts(&[("sent", 300)]),
                ..EngineStatus::default()
            },
            totals: RelayTotals {
                kernel: session.kernel,
                data_plane: session.data_plane,
                ..RelayTotals::default()
            },
            sessions: vec![session],
            ..relay::Status::default()
        };
        let text = render(&status.into(), None, 80);
        assert_as_reviewed(env!("CARGO_MANIFEST_DIR"), "relay-status-kernel", &text);
        for part in [
            "by kernel out 300 media packets (1), 75.0 % of all; 2 streams",
            "4         300     75.0     51     52   53          9      0\n",
            "SESSION  DECLINED BY KERNEL\n      4  no keys or route yet, before 6, window 5\n",
            "RECEIVED   PACKETS",
            "no_slot          8",
            "FRAMES  COUNT",
            "good       68",
            "OPENINGS  STREAMS",
            "bound          21",
            "sent        300",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    pub fn session() -> RelaySessionStatus {
        RelaySessionStatus {
            id: 1,
            remote: ([192, 0, 2, 1], 4443).into(),
            upstream: false,
            relay: false,
            publisher: false,
            subscriber: true,
            age_s: 0.0,
            rtt_us: 0,
            cwnd: 0,
            bandwidth: None,
            loss: None,
            ecn: String::new(),
            packets_marked: 0,
            path_queue_us: 0,
            queue_us: 0,
            in_flight: 0,
            path_mtu: 1200,
            draft: 18,
            cipher: String::new(),
            quinn: SentStatus::default(),
            data_plane: SentStatus::default(),
            kernel: SentStatus::default(),
            kernel_record: None,
            kernel_ready: None,
            kernel_copies: None,
            kernel_deferred: 0,
            kernel_unregistered: 0,
            keystreams: None,
            packets_lost: 0,
            bytes_retransmitted: 0,
            subscriptions: 0,
            publications: 0,
            pending: 0,
            drops: [("late".to_owned(), 3), ("evicted".to_owned(), 1)].into(),
            identity: None,
            requests: 0,
            requests_refused: 0,
            tracks: 0,
        }
    }

    #[test]
    fn escaped_track_name_is_shown_as_slash_path() {
        assert_eq!(typed("live--1.2em4s"), "live/1.m4s");
        assert_eq!(typed("no track"), "no track");
    }

    #[test]
    fn relay_status_tables_fit_a_terminal() {
        let address = "[2001:db8:85a3:1234:5678:9abc:def0:1234]:54321";
        let declined =
            ["window", "behind", "stream_credit", "data_credit", "stream_limit", "too_large", "no_neighbour"];
        let busy = RelaySessionStatus {
            id: 12_345,
            remote: address.parse().unwrap(),
            publisher: true,
            rtt_us: 1_234_560,
            path_queue_us: 1_234_000,
            queue_us: 123_000,
            bandwidth: Some(12_500_000_000 / 8),
            loss: Some(0.123),
            cwnd: 123_456_789,
            in_flight: 12_345_678,
            draft: 22,
            cipher: "chacha20-poly1305".into(),
            quinn: SentStatus { packets: 123_456_789, bytes: 1 },
            data_plane: SentStatus { packets: 1_234_567_890, bytes: 1 },
            kernel: SentStatus { packets: 1_234_567_890, bytes: 1 },
            kernel_copies: Some(declined.iter().map(|it| ((*it).to_owned(), 1_234_567)).collect()),
            kernel_deferred: 1_234_567,
            keystreams: Some(Keystreams {
                sealed: KeystreamStatus { hit: 1_234_567_890, stale: 1_234_567, miss: 1_234_567 },
                ..Keystreams::default()
            }),
            packets_lost: 1_234_567,
            bytes_retransmitted: 123_456_789,
            pending: 123_456,
            drops: declined.iter().map(|it| (format!("datagram_{it}"), 1_234_567)).collect(),
            ..session()
        };
        let name = "a-namespace-of-many/characters-that-somebody-has-really-given-it/1.m4s";
        let (namespace, last) = name.rsplit_once('/').unwrap();
        let namespace = millrace_moq::Namespace::from_path(namespace).unwrap();
        let track = RelayTrackStatus {
            name: TrackName::new(namespace, last.as_bytes().to_vec()).unwrap().to_string(),
            alias: 12_345,
            publishers: 1,
            subscribers: 12_345,
            groups_cached: 12_345,
            objects_cached: 1_234_567,
            bytes_cached: 123_456_789,
            largest: Some((1_790_000_000_000, 29)),
            owner: None,
        };
        let status = relay::Status {
            engine: EngineStatus {
                name: "kernel".into(),
                reason: "attached to interface-of-a-long-name0, interface-of-a-long-name1 by TCX".into(),
                ..EngineStatus::default()
            },
            sessions: vec![busy],
            tracks: vec![track],
            upstream: Some(relay::UpstreamStatus {
                host: "relay.of-a-provider-with-a-long-name.example:4443".into(),
                session: None,
                reason: "the certificate is not of an authority that is known here".into(),
                sources: vec![],
            }),
            totals: RelayTotals { log_lines_dropped: 3, ..RelayTotals::default() },
            ..relay::Status::default()
        };
        let before = relay::Status::default();
        let text = render(&status.clone().into(), Some(&before.into()), 80);
        assert_as_reviewed(env!("CARGO_MANIFEST_DIR"), "relay-status", &text);
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{} wide: {line}\n{text}", line.chars().count());
        }
        for part in [
            "upstream relay.of-a-provider",
            "3 log lines lost",
            address,
            "1234567890",
            "1790000000000/29",
            "/1.m4s",
        ] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        let wide = render(&status.into(), None, usize::MAX);
        assert!(wide.contains(name), "where there is room names are whole:\n{wide}");
    }

    #[test]
    fn relay_status_shows_engine_tracks_drops_and_rates() {
        let track = RelayTrackStatus {
            name: "live-bbb".into(),
            alias: 3,
            publishers: 1,
            subscribers: 2,
            groups_cached: 4,
            objects_cached: 120,
            bytes_cached: 2048,
            largest: Some((7, 29)),
            owner: None,
        };
        let status = relay::Status {
            version: "1.2.3".into(),
            engine: EngineStatus {
                name: "user".into(),
                reason: "no kernel engine".into(),
                ..EngineStatus::default()
            },
            uptime_s: 61.0,
            tracks: vec![track],
            drops: [("too_far_behind".to_owned(), 5)].into(),
            totals: RelayTotals { objects_received: 150, ..RelayTotals::default() },
            ..relay::Status::default()
        };
        let before = relay::Status {
            uptime_s: 60.0,
            totals: RelayTotals { objects_received: 100, ..RelayTotals::default() },
            ..status.clone()
        };
        let text = render(&status.into(), Some(&before.into()), 80);
        for part in
            ["serving", "engine user: no kernel engine", "live-bbb", "7/29", "too_far_behind", "50 objects/s"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}
