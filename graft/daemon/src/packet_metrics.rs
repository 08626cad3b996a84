//! Metrics of packet grafts, made anew for each scrape.

use std::fmt;

use millrace_daemon::openmetrics::{self, Out};
use millrace_graft::packet::{PeerStatus, SessionStatus, Status};
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, registry::Unit};

const PREFIX: &str = "millrace_packet_graft";

/// The text of one scrape.
pub fn encode(status: Status) -> Result<String, fmt::Error> {
    openmetrics::encode(PREFIX, Snapshot(status))
}

#[derive(Debug)]
struct Snapshot(Status);

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        out.gauge_f64("uptime", "Time since start", Unit::Seconds, self.0.uptime_s)?;
        if let Some(reload) = &self.0.reload {
            let help = "1 if the settings are what was read last";
            out.gauge("reload_ok", help, None, u64::from(reload.error.is_none()))?;
            let help = "When the settings were read last";
            out.gauge_f64("reload_timestamp", help, Unit::Seconds, reload.time_s)?;
        }
        let troubles = self.0.trouble.len() as u64;
        out.gauge("troubles", "What is not as it should be, as the status says", None, troubles)?;
        // Sessions are at most 64, by the settings.
        let sessions = &self.0.sessions;
        let help = "1 for the graft that a session has";
        out.gauges("session", help, sessions.iter().map(|it| ([of(it), ("graft", it.graft.as_str())], 1)))?;
        let times = sessions.iter().flat_map(|it| {
            it.mean_ns.iter().map(move |(joint, ns)| ([of(it), ("joint", joint.as_str())], *ns))
        });
        out.gauges("mean_ns", "Time that a joint takes for a packet, of the latest second", times)?;
        let packets = sessions.iter().flat_map(|it| {
            it.packets.iter().map(move |(reason, count)| ([of(it), ("reason", reason.as_str())], *count))
        });
        out.counters("packets", "Packets by what became of them", packets)?;
        let swaps = sessions.iter().flat_map(|it| {
            let outcomes = [("agreed", it.swaps), ("failed", it.swaps_failed)];
            outcomes.map(|(outcome, count)| ([of(it), ("outcome", outcome)], count))
        });
        out.counters("swaps", "Changes of a session's graft", swaps)?;
        let lost = sessions.iter().flat_map(|it| {
            let directions = [("sent", it.lost_sent), ("received", it.lost_received)];
            directions.map(|(direction, count)| ([of(it), ("direction", direction)], count))
        });
        out.counters("lost", "Datagrams that had not come when a session began anew", lost)?;
        let over = sessions.iter().map(|it| ([of(it)], it.over_budget));
        out.counters("over_budget", "Samples above the budget", over)?;
        paths(&mut out, sessions)?;
        peers(&mut out, &self.0)
    }
}

fn paths(out: &mut Out<'_>, sessions: &[SessionStatus]) -> fmt::Result {
    let each = || {
        sessions.iter().flat_map(|it| {
            it.paths.iter().map(move |path| ([of(it), ("interface", path.interface.as_str())], path))
        })
    };
    let up = each().map(|(labels, path)| (labels, u64::from(path.is_up)));
    out.gauges("path_up", "1 if what is sent by a path of a session comes, as far as is known", up)?;
    let weights = each().map(|(labels, path)| (labels, u64::from(path.weight)));
    out.gauges("path_weight", "How much of the session it carries, beside the others", weights)?;
    let packets = each().flat_map(|([session, interface], path)| {
        let directions = [("sent", path.sent), ("received", path.came)];
        directions.map(|(direction, count)| ([session, interface, ("direction", direction)], count))
    });
    out.counters("path_packets", "Packets by a path of a session, those of the daemons, too", packets)
}

fn peers(out: &mut Out<'_>, status: &Status) -> fmt::Result {
    fn of(peer: &PeerStatus) -> (&str, &str) {
        ("peer", &peer.name)
    }
    let peers = &status.peers;
    let up = peers.iter().map(|it| ([of(it)], u64::from(it.is_there)));
    out.gauges("peer_up", "1 if its daemon was heard of late", up)?;
    let known = peers.iter().filter_map(|it| Some(([of(it)], it.round_trip_us? as f64 / 1e6)));
    let help = "Least round trip of late between the daemons";
    out.gauges_f64("peer_round_trip", help, &Unit::Seconds, known)?;
    let lost = peers.iter().filter_map(|it| Some(([of(it)], it.loss_percent? / 100.0)));
    out.gauges_f64("peer_loss", "Part of the packets that is lost one way", &Unit::Ratios, lost)?;
    let leases = peers.iter().flat_map(|it| {
        let free = it.seats.saturating_sub(it.lent);
        [("lent", it.lent), ("free", free)].map(|(state, count)| ([of(it), ("state", state)], count as u64))
    });
    out.gauges("leases", "Sessions for applications that ask", leases)?;
    let opened = peers.iter().map(|it| ([of(it)], it.opened));
    out.counters("leases_opened", "Sessions that applications have got", opened)?;
    let refused = status.refusals.iter().map(|(why, count)| ([("reason", why.as_str())], *count));
    out.counters("leases_refused", "Requests of applications that were refused", refused)
}

fn of(session: &SessionStatus) -> (&str, &str) {
    ("session", &session.name)
}

#[cfg(test)]
mod tests {
    use millrace_graft::packet::PathStatus;
    use millrace_graft::status::Reload;
    use millrace_graft_kernel::joint::Reason;

    use super::*;

    #[test]
    fn names_follow_the_documentation() {
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
            seats: 8,
            lent: 3,
            opened: 9,
            ..PeerStatus::default()
        };
        let status = Status {
            uptime_s: 1.5,
            reload: Some(Reload { time_s: 2.5, error: Some("no".into()) }),
            trouble: vec!["something".into()],
            sessions: vec![session],
            peers: vec![peer],
            refusals: [("exhausted".to_owned(), 4)].into(),
            ..Status::default()
        };
        let text = encode(status).unwrap();
        let documented = include_str!("../../../docs/packet-grafts.md");
        for line in [
            "millrace_packet_graft_uptime_seconds 1.5",
            "millrace_packet_graft_reload_ok 0",
            "millrace_packet_graft_reload_timestamp_seconds 2.5",
            "millrace_packet_graft_troubles 1",
            r#"millrace_packet_graft_session{session="telemetry",graft="newest"} 1"#,
            r#"millrace_packet_graft_mean_ns{session="telemetry",joint="rx"} 250"#,
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
            r#"millrace_packet_graft_leases{peer="station",state="lent"} 3"#,
            r#"millrace_packet_graft_leases{peer="station",state="free"} 5"#,
            r#"millrace_packet_graft_leases_opened_total{peer="station"} 9"#,
            r#"millrace_packet_graft_leases_refused_total{reason="exhausted"} 4"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(documented.contains(name), "{name} is not in docs/packet-grafts.md");
        }
    }

    #[test]
    fn reasons_are_documented() {
        let documented = include_str!("../../../docs/packet-grafts.md");
        for reason in Reason::ALL {
            assert!(documented.contains(&format!("| `{}` |", reason.name())), "{}", reason.name());
        }
    }
}
