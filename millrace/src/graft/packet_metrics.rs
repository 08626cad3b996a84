//! Metrics of packet grafts, made anew for each scrape.

use std::fmt;

use millrace_graft::packet::{SessionStatus, Status};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};

use crate::openmetrics::{self, Out};

const PREFIX: &str = "millrace_packet_graft";

/// The text of one scrape.
pub fn encode(status: Status) -> Result<String, fmt::Error> {
    openmetrics::encode(PREFIX, Snapshot(status))
}

#[derive(Debug)]
struct Snapshot(Status);

/// Of a session: labels behind its name, and the figure.
type Figures = Vec<(&'static str, String, u64)>;

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
        self.gauges(&mut out, "session", "1 for the graft that a session has", |it| {
            vec![("graft", it.graft.clone(), 1)]
        })?;
        self.gauges(
            &mut out,
            "mean_ns",
            "Time that a joint takes for a packet, of the latest second",
            |it| it.mean_ns.iter().map(|(joint, ns)| ("joint", joint.clone(), *ns)).collect(),
        )?;
        self.counters(&mut out, "packets", "Packets by what became of them", |it| {
            it.packets.iter().map(|(reason, count)| ("reason", reason.clone(), *count)).collect()
        })?;
        self.counters(&mut out, "swaps", "Changes of a session's graft", |it| {
            vec![
                ("outcome", "agreed".to_owned(), it.swaps),
                ("outcome", "failed".to_owned(), it.swaps_failed),
            ]
        })?;
        out.labelled("over_budget", "Samples above the budget", MetricType::Counter, |family| {
            self.0.sessions.iter().try_for_each(|it| {
                let labels = [("session", it.name.as_str())];
                ConstCounter::new(it.over_budget).encode(family.encode_family(&labels)?)
            })
        })
    }
}

impl Snapshot {
    fn gauges(
        &self,
        out: &mut Out<'_>,
        name: &str,
        help: &str,
        of: impl Fn(&SessionStatus) -> Figures,
    ) -> fmt::Result {
        out.labelled(name, help, MetricType::Gauge, |family| {
            self.each(of, |labels, value| ConstGauge::new(value).encode(family.encode_family(&labels)?))
        })
    }

    fn counters(
        &self,
        out: &mut Out<'_>,
        name: &str,
        help: &str,
        of: impl Fn(&SessionStatus) -> Figures,
    ) -> fmt::Result {
        out.labelled(name, help, MetricType::Counter, |family| {
            self.each(of, |labels, value| ConstCounter::new(value).encode(family.encode_family(&labels)?))
        })
    }

    /// Sessions are at most 64, by the settings.
    fn each(
        &self,
        of: impl Fn(&SessionStatus) -> Figures,
        mut write: impl FnMut([(&str, &str); 2], u64) -> fmt::Result,
    ) -> fmt::Result {
        self.0.sessions.iter().try_for_each(|session| {
            of(session).iter().try_for_each(|(label, what, value)| {
                write([("session", session.name.as_str()), (*label, what.as_str())], *value)
            })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_bpf::graft::joint::Reason;
    use millrace_graft::status::Reload;

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
            ..SessionStatus::default()
        };
        let status = Status {
            uptime_s: 1.5,
            reload: Some(Reload { time_s: 2.5, error: Some("no".into()) }),
            trouble: vec!["something".into()],
            sessions: vec![session],
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
            r#"millrace_packet_graft_over_budget_total{session="telemetry"} 3"#,
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
