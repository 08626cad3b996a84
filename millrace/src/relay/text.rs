//! A relay's status as tables.

use std::{collections::BTreeMap, fmt::Write as _, net::SocketAddr};

use millrace_proto::moq::TrackName;
use millrace_relay::status as relay;

use super::status::{Session, Status, Track};
use crate::render::{bytes, percent, span, table};

/// All of a status, with rates since `before`.
pub fn render(status: &Status, before: Option<&Status>) -> String {
    let mut out = String::new();
    summary(&mut out, status, before);
    if !status.sessions.is_empty() {
        let sessions = || status.sessions.iter();
        table(&mut out, &["SESSION", "REMOTE", "ROLE", "CIPHER", "SUBS", "PUBS"], sessions().map(who_row));
        table(&mut out, &PATH, sessions().map(path_row));
        let head = ["SESSION", "QUINN pkt", "MEDIA pkt", "LOST", "RESENT", "PENDING", "DROPPED"];
        table(&mut out, &head, sessions().map(sent_row));
    }
    let mut by_kernel = status.sessions.iter().filter(|session| session.kernel_copies.is_some()).peekable();
    if by_kernel.peek().is_some() {
        let head = [
            "SESSION",
            "KERNEL pkt",
            "SHARE %",
            "AHEAD",
            "STALE",
            "DRY",
            "QUIET ack",
            "UNREGISTERED",
            "DECLINED",
        ];
        table(&mut out, &head, by_kernel.map(kernel_row));
    }
    outcomes(&mut out, ["RECEIVED", "PACKETS"], &status.engine.received);
    outcomes(&mut out, ["FRAMES", "COUNT"], &status.engine.frames);
    outcomes(&mut out, ["OPENINGS", "STREAMS"], &status.engine.openings);
    outcomes(&mut out, ["COPIES", "PACKETS"], &status.engine.copies);
    if !status.gate.refused.is_empty() {
        outcomes(&mut out, ["REFUSED BY GATE", "PACKETS"], &Some(status.gate.refused.clone()));
    }
    if !status.tracks.is_empty() {
        let head = ["TRACK", "ALIAS", "PUBLISHERS", "SUBSCRIBERS", "GROUPS", "OBJECTS", "CACHED", "LARGEST"];
        table(&mut out, &head, status.tracks.iter().map(track_row));
    }
    let mut drops = status.drops.iter().filter(|(_, count)| **count > 0).peekable();
    if drops.peek().is_some() {
        let rows = drops.map(|(reason, count)| vec![reason.clone(), count.to_string()]);
        table(&mut out, &["DROPPED", "COUNT"], rows);
    }
    out
}

fn summary(out: &mut String, status: &Status, before: Option<&Status>) {
    let relay::Status { engine, totals, cache, .. } = &status.relay;
    let state = if status.draining { "draining" } else { "serving" };
    let listen: Vec<_> = status.listen.iter().map(SocketAddr::to_string).collect();
    let _ = writeln!(out, "millrace {}, {state} on {}", status.version, listen.join(", "));
    let _ = writeln!(out, "up {}, engine {}: {}", span(status.uptime_s), engine.name, engine.reason);
    let refused: u64 = status.gate.refused.values().sum();
    match status.gate.on || refused > 0 {
        true => drop(writeln!(out, "gate {}, {refused} packets refused", status.gate.reason)),
        false => drop(writeln!(out, "no gate: {}", status.gate.reason)),
    }
    let _ = writeln!(
        out,
        "cache {} of {} in {} groups, {} groups evicted",
        bytes(cache.bytes),
        bytes(cache.limit),
        cache.groups,
        cache.evicted
    );
    let _ = writeln!(
        out,
        "in {} objects ({}), out {} media packets ({}) in {} calls, {} lost",
        totals.objects_received,
        bytes(totals.object_bytes_received),
        totals.data_plane.packets,
        bytes(totals.data_plane.bytes),
        totals.send_calls,
        totals.packets_lost
    );
    if engine.name == "kernel" {
        let _ = writeln!(
            out,
            "by kernel out {} media packets ({}), {} % of all; {} streams at the moment, {} packets unregistered",
            totals.kernel.packets,
            bytes(totals.kernel.bytes),
            percent(totals.kernel.packets, totals.data_plane.packets),
            engine.streams,
            totals.kernel_unregistered
        );
    }
    if let Some(upstream) = &status.upstream {
        let _ = match upstream.session {
            Some(session) => writeln!(out, "upstream {}: session {session}", upstream.host),
            None => writeln!(out, "upstream {} is away: {}", upstream.host, upstream.reason),
        };
    }
    if totals.log_lines_dropped > 0 {
        let _ = writeln!(out, "{} log lines lost", totals.log_lines_dropped);
    }
    if let Some(before) = before {
        let seconds = (status.uptime_s - before.uptime_s).max(0.001);
        let rate = |now: u64, then: u64| now.saturating_sub(then) as f64 / seconds;
        let _ = writeln!(
            out,
            "now {:.0} objects/s in, {:.0} media packets/s ({}/s) out, {:.0} packets/s ({}/s) by kernel",
            rate(totals.objects_received, before.totals.objects_received),
            rate(totals.data_plane.packets, before.totals.data_plane.packets),
            bytes(rate(totals.data_plane.bytes, before.totals.data_plane.bytes) as u64),
            rate(totals.kernel.packets, before.totals.kernel.packets),
            bytes(rate(totals.kernel.bytes, before.totals.kernel.bytes) as u64)
        );
    }
}

/// Of a session's path: RTT, how much of that is queues on the way, and how long media waited here, ms.
const PATH: [&str; 10] =
    ["SESSION", "RTT ms", "PATH ms", "HERE ms", "Mbit/s", "LOSS %", "MARKED", "CWND", "FLIGHT", "MTU"];

fn who_row(session: &Session) -> Vec<String> {
    let roles = [(session.upstream, "up"), (session.publisher, "pub"), (session.subscriber, "sub")];
    let roles: Vec<_> = roles.iter().filter(|(is, _)| *is).map(|(_, role)| *role).collect();
    vec![
        session.id.to_string(),
        session.remote.to_string(),
        if roles.is_empty() { "-".to_owned() } else { roles.join("+") },
        session.cipher.replace("-poly1305", ""),
        session.subscriptions.to_string(),
        session.publications.to_string(),
    ]
}

fn path_row(session: &Session) -> Vec<String> {
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

fn sent_row(session: &Session) -> Vec<String> {
    vec![
        session.id.to_string(),
        session.quinn.packets.to_string(),
        session.data_plane.packets.to_string(),
        session.packets_lost.to_string(),
        bytes(session.bytes_retransmitted),
        bytes(session.pending),
        reasons(&session.drops),
    ]
}

/// A track as a user types it: `live/1.m4s`; in the draft's form where that would be another one.
pub fn typed(track: &str) -> String {
    let read = |name: &TrackName| {
        let fields = name.namespace().fields().iter().chain([name.name()]);
        let words: Option<Vec<_>> =
            fields.map(|field| str::from_utf8(field).ok().filter(|it| is_word(it))).collect();
        words.map(|words| words.join("/"))
    };
    track.parse().ok().and_then(|name| read(&name)).unwrap_or_else(|| track.to_owned())
}

/// What stands for itself between slashes on a terminal.
fn is_word(field: &str) -> bool {
    !field.is_empty()
        && !field.contains(|c: char| c == '/' || c.is_control() || c.is_whitespace())
        && !field.contains("--")
}

/// `late 3, evicted 1`.
fn reasons(counts: &BTreeMap<String, u64>) -> String {
    let counts: Vec<_> = counts.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
    if counts.is_empty() { "-".to_owned() } else { counts.join(", ") }
}

fn track_row(track: &Track) -> Vec<String> {
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

/// What the kernel did for a session, and did not.
fn kernel_row(session: &Session) -> Vec<String> {
    let sealed = session.keystreams.unwrap_or_default().sealed;
    let declined = session.kernel_copies.iter().flatten().filter(|(outcome, _)| *outcome != "sent");
    let declined = declined.map(|(reason, count)| format!("{reason} {count}"));
    let declined: Vec<_> = session.kernel_refused.iter().cloned().chain(declined).collect();
    vec![
        session.id.to_string(),
        session.kernel.packets.to_string(),
        percent(session.kernel.packets, session.data_plane.packets),
        sealed.hit.to_string(),
        sealed.stale.to_string(),
        sealed.miss.to_string(),
        session.kernel_deferred.to_string(),
        session.kernel_unregistered.to_string(),
        if declined.is_empty() { "-".to_owned() } else { declined.join(", ") },
    ]
}

fn outcomes(out: &mut String, head: [&str; 2], counts: &Option<BTreeMap<String, u64>>) {
    let rows: Vec<_> =
        counts.iter().flatten().map(|(outcome, count)| vec![outcome.clone(), count.to_string()]).collect();
    if !rows.is_empty() {
        table(out, &head, rows.into_iter());
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::relay::status::{Engine, KeystreamUse, Keystreams, Sent, Totals};

    #[test]
    fn the_kernels_part_is_shown() {
        let counts = |counts: &[(&str, u64)]| {
            Some(counts.iter().map(|(name, count)| ((*name).to_owned(), *count)).collect())
        };
        let sealed = KeystreamUse { hit: 51, stale: 52, miss: 53 };
        let session = Session {
            id: 4,
            kernel: Sent { packets: 300, bytes: 1 },
            data_plane: Sent { packets: 100, bytes: 1 },
            kernel_copies: counts(&[("sent", 300), ("window", 5), ("before", 6)]),
            kernel_deferred: 9,
            keystreams: Some(Keystreams { sealed, opened: KeystreamUse::default() }),
            ..session()
        };
        let status = relay::Status {
            engine: Engine {
                name: "kernel".into(),
                reason: "attached to eth0 by TCX".into(),
                streams: 2,
                received: counts(&[("forwarded", 70), ("no_slot", 8)]),
                frames: counts(&[("ahead", 2), ("good", 68)]),
                openings: counts(&[("bound", 21), ("order", 1)]),
                copies: counts(&[("sent", 300)]),
                ..Engine::default()
            },
            totals: Totals { kernel: session.kernel, data_plane: session.data_plane, ..Totals::default() },
            sessions: vec![session],
            ..relay::Status::default()
        };
        let text = render(&status.into(), None);
        for part in [
            "by kernel out 300 media packets (1), 75.0 % of all; 2 streams",
            "4         300     75.0     51     52   53          9             0  before 6, window 5",
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

    pub fn session() -> Session {
        Session {
            id: 1,
            remote: ([192, 0, 2, 1], 4443).into(),
            upstream: false,
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
            cipher: String::new(),
            quinn: Sent::default(),
            data_plane: Sent::default(),
            kernel: Sent::default(),
            kernel_refused: None,
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
    fn tracks_are_shown_as_they_are_typed() {
        let named = |namespace: &str, name: &[u8]| {
            let namespace = millrace_proto::moq::Namespace::from_path(namespace).unwrap();
            typed(&TrackName::new(namespace, name.to_vec()).unwrap().to_string())
        };
        assert_eq!(named("live", b"1.m4s"), "live/1.m4s");
        assert_eq!(named("live/cam-2", b"video hi"), "live-cam.2d2--video.20hi");
        assert_eq!(named("live/cam-2", b"video"), "live/cam-2/video");
        assert_eq!(named("live", b"a/b"), "live--a.2fb");
        assert_eq!(typed("no track"), "no track");
    }

    #[test]
    fn tables_fit_a_terminal() {
        let busy = Session {
            id: 12_345,
            remote: "[2001:db8:85a3::8a2e:370:7334]:54321".parse().unwrap(),
            publisher: true,
            rtt_us: 1_234_560,
            path_queue_us: 1_234_000,
            queue_us: 123_000,
            bandwidth: Some(12_500_000_000 / 8),
            loss: Some(0.123),
            cwnd: 123_456_789,
            in_flight: 12_345_678,
            cipher: "chacha20-poly1305".into(),
            quinn: Sent { packets: 123_456_789, bytes: 1 },
            data_plane: Sent { packets: 1_234_567_890, bytes: 1 },
            packets_lost: 1_234_567,
            bytes_retransmitted: 123_456_789,
            pending: 123_456,
            ..session()
        };
        let status = relay::Status {
            sessions: vec![busy],
            upstream: Some(relay::Upstream {
                host: "relay.example:4443".into(),
                session: None,
                reason: "timed out".into(),
            }),
            totals: Totals { log_lines_dropped: 3, ..Totals::default() },
            ..relay::Status::default()
        };
        let text = render(&status.into(), None);
        for line in text.lines() {
            assert!(line.chars().count() <= 80, "{} wide: {line}", line.chars().count());
        }
        for part in ["upstream relay.example:4443 is away: timed out", "3 log lines lost"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    #[test]
    fn everything_an_operator_asks_for_is_shown() {
        let track = Track {
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
            engine: Engine { name: "user".into(), reason: "no kernel engine".into(), ..Engine::default() },
            uptime_s: 61.0,
            tracks: vec![track],
            drops: [("too_far_behind".to_owned(), 5)].into(),
            totals: Totals { objects_received: 150, ..Totals::default() },
            ..relay::Status::default()
        };
        let before = relay::Status {
            uptime_s: 60.0,
            totals: Totals { objects_received: 100, ..Totals::default() },
            ..status.clone()
        };
        let text = render(&status.into(), Some(&before.into()));
        for part in
            ["serving", "engine user: no kernel engine", "live-bbb", "7/29", "too_far_behind", "50 objects/s"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}
