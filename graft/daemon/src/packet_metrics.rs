//! Metrics of packet grafts, collected whenever they are scraped.

use std::fmt;

use millrace_daemon::openmetrics::{self, Out};
use millrace_graft::packet::{PeerStatus, SessionStatus, Status};
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, registry::Unit};

const PREFIX: &str = "millrace_packet_graft";

/// Encodes the metrics of the daemon's worker process for datagram sessions, for one scrape.
pub fn encode(status: Status) -> Result<String, fmt::Error> {
    openmetrics::encode(PREFIX, PacketSnapshot(status))
}

#[derive(Debug)]
struct PacketSnapshot(Status);

impl Collector for PacketSnapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        let troubles = self.0.trouble.len() as u64;
        out.gauge(
            "troubles",
            "Problems that the status lists; with any, /healthz answers 503",
            None,
            troubles,
        )?;
        // The settings have at most 64 sessions, so a label with session names has few values.
        let sessions = &self.0.sessions;
        let help = "1 for the graft that a session uses";
        out.gauges(
            "session",
            help,
            sessions.iter().map(|it| ([session_label(it), ("graft", it.graft.as_str())], 1)),
        )?;
        let times = sessions.iter().flat_map(|it| {
            it.mean_ns.iter().map(move |(hook, ns)| ([session_label(it), ("hook", hook.as_str())], *ns))
        });
        out.gauges(
            "mean_ns",
            "Mean time that a hook of the kernel took for a packet in the latest second, in nanoseconds",
            times,
        )?;
        let packets = sessions.iter().flat_map(|it| {
            it.packets
                .iter()
                .map(move |(reason, count)| ([session_label(it), ("reason", reason.as_str())], *count))
        });
        out.counters("packets", "Packets by the reason why they were passed or dropped", packets)?;
        let swaps = sessions.iter().flat_map(|it| {
            let outcomes = [("agreed", it.swaps), ("failed", it.swaps_failed)];
            outcomes.map(|(outcome, count)| ([session_label(it), ("outcome", outcome)], count))
        });
        out.counters("swaps", "Changes of a session's graft: agreed, failed", swaps)?;
        let lost = sessions.iter().flat_map(|it| {
            let directions = [("sent", it.lost_sent), ("received", it.lost_received)];
            directions.map(|(direction, count)| ([session_label(it), ("direction", direction)], count))
        });
        out.counters("lost", "Datagrams that were lost when a session restarted, by direction", lost)?;
        let over = sessions.iter().map(|it| ([session_label(it)], it.over_budget));
        out.counters(
            "over_budget",
            "Samples of the time for a packet that exceeded the graft's budget",
            over,
        )?;
        paths(&mut out, sessions)?;
        peers(&mut out, &self.0)
    }
}

fn paths(out: &mut Out<'_>, sessions: &[SessionStatus]) -> fmt::Result {
    let each = || {
        sessions.iter().flat_map(|it| {
            it.paths
                .iter()
                .map(move |path| ([session_label(it), ("interface", path.interface.as_str())], path))
        })
    };
    let up = each().map(|(labels, path)| (labels, u64::from(path.is_up)));
    out.gauges("path_up", "1 if packets that the session sends on this path are known to arrive", up)?;
    let weights = each().map(|(labels, path)| (labels, u64::from(path.weight)));
    out.gauges(
        "path_weight",
        "Share of the session's packets that this path carries, relative to the other paths: 0 to 16",
        weights,
    )?;
    let packets = each().flat_map(|([session, interface], path)| {
        let directions = [("sent", path.sent), ("received", path.came)];
        directions.map(|(direction, count)| ([session, interface, ("direction", direction)], count))
    });
    out.counters("path_packets", "Packets by path and direction, with those of the daemons", packets)
}

fn peers(out: &mut Out<'_>, status: &Status) -> fmt::Result {
    fn peer_label(peer: &PeerStatus) -> (&str, &str) {
        ("peer", &peer.name)
    }
    let peers = &status.peers;
    let up = peers.iter().map(|it| ([peer_label(it)], u64::from(it.is_there)));
    out.gauges("peer_up", "1 if the peer's daemon was heard in the latest 10 s", up)?;
    let known = peers.iter().filter_map(|it| Some(([peer_label(it)], it.round_trip_us? as f64 / 1e6)));
    let help = "Smallest recent round trip between the daemons";
    out.gauges_f64("peer_round_trip", help, &Unit::Seconds, known)?;
    let lost = peers.iter().filter_map(|it| Some(([peer_label(it)], it.loss_percent? / 100.0)));
    out.gauges_f64("peer_loss", "Share of packets to the peer that are lost", &Unit::Ratios, lost)?;
    let sessions = peers.iter().flat_map(|it| {
        let free = it.pooled_sockets.saturating_sub(it.lent);
        [("lent", it.lent), ("free", free)]
            .map(|(state, count)| ([peer_label(it), ("state", state)], count as u64))
    });
    out.gauges("client_sessions", "Pooled sockets by state: lent to an application, or free", sessions)?;
    let opened = peers.iter().map(|it| ([peer_label(it)], it.opened));
    out.counters("sessions_opened", "Sessions that applications of this host have opened", opened)?;
    let refused = status.refusals.iter().map(|(why, count)| ([("reason", why.as_str())], *count));
    out.counters("sessions_refused", "Requests of applications that were refused, by reason", refused)
}

fn session_label(session: &SessionStatus) -> (&str, &str) {
    ("session", &session.name)
}

#[cfg(test)]
mod tests {
    use millrace_graft::packet::PathStatus;
    use millrace_graft_kernel::packet::PacketReason;

    use super::*;

    #[test]
    fn metric_names_follow_the_documentation() {
        let session = SessionStatus {
            name: "telemetry".into(),
            graft: "newest".into(),
            packets: [("delivered".to_owned(), 7)].into(),
            mean_ns: [("rx".to_owned(), 250)].into(),
            over_budget: 3,
            swaps: 2,
            swaps_failed: 1,
            lost_sent: 5,
            paths: vec![PathStatus {
                interface: "eth0".into(),
                is_up: true,
                weight: 16,
                sent: 11,
                came: 12,
                ..PathStatus::default()
            }],
            ..SessionStatus::default()
        };
        let peer = PeerStatus {
            name: "station".into(),
            is_there: true,
            round_trip_us: Some(2500),
            loss_percent: Some(25.0),
            pooled_sockets: 8,
            lent: 3,
            opened: 9,
            ..PeerStatus::default()
        };
        let status = Status {
            trouble: vec!["something".into()],
            sessions: vec![session],
            peers: vec![peer],
            refusals: [("exhausted".to_owned(), 4)].into(),
            ..Status::default()
        };
        let text = encode(status).unwrap();
        let documented = include_str!("../../../docs/reference/metrics.md");
        for line in [
            "millrace_packet_graft_troubles 1",
            r#"millrace_packet_graft_session{session="telemetry",graft="newest"} 1"#,
            r#"millrace_packet_graft_mean_ns{session="telemetry",hook="rx"} 250"#,
            r#"millrace_packet_graft_packets_total{session="telemetry",reason="delivered"} 7"#,
            r#"millrace_packet_graft_swaps_total{session="telemetry",outcome="agreed"} 2"#,
            r#"millrace_packet_graft_swaps_total{session="telemetry",outcome="failed"} 1"#,
            r#"millrace_packet_graft_lost_total{session="telemetry",direction="sent"} 5"#,
            r#"millrace_packet_graft_lost_total{session="telemetry",direction="received"} 0"#,
            r#"millrace_packet_graft_over_budget_total{session="telemetry"} 3"#,
            r#"millrace_packet_graft_path_up{session="telemetry",interface="eth0"} 1"#,
            r#"millrace_packet_graft_path_weight{session="telemetry",interface="eth0"} 16"#,
            r#"millrace_packet_graft_path_packets_total{session="telemetry",interface="eth0",direction="sent"} 11"#,
            r#"millrace_packet_graft_path_packets_total{session="telemetry",interface="eth0",direction="received"} 12"#,
            r#"millrace_packet_graft_peer_up{peer="station"} 1"#,
            r#"millrace_packet_graft_peer_round_trip_seconds{peer="station"} 0.0025"#,
            r#"millrace_packet_graft_peer_loss_ratios{peer="station"} 0.25"#,
            r#"millrace_packet_graft_client_sessions{peer="station",state="lent"} 3"#,
            r#"millrace_packet_graft_client_sessions{peer="station",state="free"} 5"#,
            r#"millrace_packet_graft_sessions_opened_total{peer="station"} 9"#,
            r#"millrace_packet_graft_sessions_refused_total{reason="exhausted"} 4"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(documented.contains(name), "{name} is not in docs/reference/metrics.md");
        }
    }

    #[test]
    fn every_packet_verdict_reason_is_documented() {
        let documented = include_str!("../../../docs/reference/reasons.md");
        for reason in PacketReason::ALL {
            assert!(documented.contains(&format!("| `{}` |", reason.name())), "{}", reason.name());
        }
    }
}
