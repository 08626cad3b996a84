//! Its metrics.

use std::{collections::BTreeMap, fmt};

use millrace_graft::status::{Carrier, Carry};
use prometheus_client::{
    encoding::EncodeMetric as _,
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use crate::openmetrics::Out;

const STATES: [&str; 4] = ["warm", "suspect", "full", "cold"];

pub fn encode(carry: &Carry, out: &mut Out<'_>) -> fmt::Result {
    let counts: [(&str, &str, &str, &BTreeMap<String, u64>); 2] = [
        ("hook_verdicts", "Connections to hosts with a broker that a rule fits", "verdict", &carry.verdicts),
        ("carried_ended", "What became of carried connections", "how", &carry.ended),
    ];
    for (name, help, label, counts) in counts {
        out.labelled(name, help, MetricType::Counter, |family| {
            counts.iter().try_for_each(|(value, count)| {
                ConstCounter::new(*count).encode(family.encode_family(&[(label, value.as_str())])?)
            })
        })?;
    }
    out.labelled("carriers", "Carriers by how they are", MetricType::Gauge, |family| {
        STATES.iter().try_for_each(|state| {
            let count = carry.carriers.iter().filter(|it| it.state == *state).count() as u64;
            ConstGauge::new(count).encode(family.encode_family(&[("state", *state)])?)
        })
    })?;
    out.gauge("carried_connections", "Connections that are carried", None, carry.connections)?;
    out.gauge("carried_kept_bytes", "Bytes that are not confirmed yet", None, carry.kept_bytes)?;
    out.labelled("carried_bytes", "Bytes of applications", MetricType::Counter, |family| {
        [("sent", carry.sent_bytes), ("received", carry.received_bytes)].into_iter().try_for_each(
            |(way, bytes)| ConstCounter::new(bytes).encode(family.encode_family(&[("way", way)])?),
        )
    })?;
    out.counter("carried_resumed", "Times that one went on with another carrier", None, carry.resumed)?;
    by_peer(out, "carrier_bytes", "Bytes of carriers, both ways", MetricType::Counter, carry, |it| {
        it.sent_bytes + it.received_bytes
    })?;
    by_peer(out, "carrier_lost_packets", "Their lost packets", MetricType::Counter, carry, |it| {
        it.lost_packets
    })
}

/// Peers of the settings: few.
fn by_peer(
    out: &mut Out<'_>,
    name: &str,
    help: &str,
    kind: MetricType,
    carry: &Carry,
    value: fn(&Carrier) -> u64,
) -> fmt::Result {
    out.labelled(name, help, kind, |family| {
        carry.carriers.iter().try_for_each(|it| {
            ConstCounter::new(value(it)).encode(family.encode_family(&[("peer", it.peer.as_str())])?)
        })
    })
}

#[cfg(test)]
mod tests {
    use millrace_bpf::graft::hook::Verdict;
    use millrace_graft::status::Status;
    use millrace_proto::graft::carry::frame::Reason;

    use super::*;

    const DOCUMENTED: &str = include_str!("../../../../docs/carried.md");

    #[test]
    fn names_follow_the_documentation() {
        let carrier =
            Carrier { peer: "a".into(), state: "warm".into(), lost_packets: 3, ..Carrier::default() };
        let carry = Carry {
            verdicts: [("led".to_owned(), 1)].into(),
            carriers: vec![Carrier { sent_bytes: 4, received_bytes: 5, ..carrier }],
            connections: 6,
            ended: [("done".to_owned(), 7)].into(),
            resumed: 8,
            sent_bytes: 9,
            received_bytes: 10,
            kept_bytes: 11,
            ..Carry::default()
        };
        let status = Status { carry: Some(carry), ..Status::default() };
        let text = crate::graft::metrics::encode(status, Vec::new()).unwrap();
        for line in [
            r#"millrace_graft_hook_verdicts_total{verdict="led"} 1"#,
            r#"millrace_graft_carried_ended_total{how="done"} 7"#,
            r#"millrace_graft_carriers{state="warm"} 1"#,
            r#"millrace_graft_carriers{state="cold"} 0"#,
            "millrace_graft_carried_connections 6",
            "millrace_graft_carried_kept_bytes 11",
            r#"millrace_graft_carried_bytes_total{way="sent"} 9"#,
            r#"millrace_graft_carried_bytes_total{way="received"} 10"#,
            "millrace_graft_carried_resumed_total 8",
            r#"millrace_graft_carrier_bytes_total{peer="a"} 9"#,
            r#"millrace_graft_carrier_lost_packets_total{peer="a"} 3"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(DOCUMENTED.contains(name), "{name} is not in docs/carried.md");
        }
    }

    #[test]
    fn what_is_counted_is_documented() {
        for verdict in Verdict::ALL {
            assert!(DOCUMENTED.contains(&format!("| `{}` |", verdict.name())), "{}", verdict.name());
        }
        for reason in Reason::ALL {
            assert!(DOCUMENTED.contains(&format!("`{}`", reason.name())), "{}", reason.name());
        }
    }
}
