//! Metrics of tunnelled connections.

use std::{collections::BTreeMap, fmt};

use millrace_daemon::openmetrics::{self, Out};
use millrace_graft::status::{CarrierStatus, CarryStatus};
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder};

/// Sums of counters by peer and kind of carrier, sorted by name.
type CarrierSums<'a> = BTreeMap<(&'a str, &'a str), u64>;

const STATES: [&str; 4] = ["warm", "suspect", "full", "cold"];

/// Encodes the metrics of the tunnel broker, for one scrape.
pub fn encode(status: CarryStatus) -> Result<String, fmt::Error> {
    openmetrics::encode("millrace_graft", CarrySnapshot(status))
}

#[derive(Debug)]
struct CarrySnapshot(CarryStatus);

impl Collector for CarrySnapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        write(&self.0, &mut Out(encoder))
    }
}

fn write(carry: &CarryStatus, out: &mut Out<'_>) -> fmt::Result {
    let help = "Connections that match a rule, to hosts with a broker, by the broker's verdict";
    out.counts("hook_verdicts", help, "verdict", &carry.verdicts)?;
    out.counts(
        "held_packets",
        "Packets that arrived at the sockets for held SYNs, by verdict",
        "verdict",
        &carry.held,
    )?;
    if let Some(firewall) = &carry.firewall {
        let help = "Connections that carriers could tunnel, by the answer of this host's firewall";
        out.counts("openings", help, "verdict", &firewall.openings)?;
        out.counts(
            "opening_packets",
            "First packets of tunnelled connections that passed the firewall, by verdict",
            "verdict",
            &firewall.packets,
        )?;
        out.gauge(
            "plain_rules",
            "Firewall rules that force connections to be plain TCP",
            None,
            firewall.rules.len() as u64,
        )?;
    }
    if let Some(gateway) = &carry.gateway {
        let help = "Packets of hosts behind this gateway, by verdict";
        out.counts("gateway_packets", help, "verdict", &gateway.verdicts)?;
        out.gauge(
            "gateway_waiting",
            "SYNs of hosts behind this gateway that are held back now",
            None,
            gateway.waiting,
        )?;
    }
    out.counts(
        "carried_ended",
        "Tunnelled connections that ended: done, or the reason why they failed",
        "how",
        &carry.ended,
    )?;
    let carriers = STATES.iter().map(|state| {
        let count = carry.carriers.iter().filter(|it| it.state == *state).count() as u64;
        ([("state", *state)], count)
    });
    out.gauges("carriers", "Carriers by state: warm, suspect (no answer), full, cold", carriers)?;
    out.gauge("carried_connections", "Connections that carriers tunnel now", None, carry.connections)?;
    out.gauge(
        "carried_kept_bytes",
        "Bytes of tunnelled connections that the other end has not confirmed",
        None,
        carry.kept_bytes,
    )?;
    let bytes = [([("way", "sent")], carry.sent_bytes), ([("way", "received")], carry.received_bytes)];
    out.counters(
        "carried_bytes",
        "Bytes of applications that carriers have sent and received",
        bytes.into_iter(),
    )?;
    out.counter(
        "carried_resumed",
        "Tunnelled connections that have moved to another carrier",
        None,
        carry.resumed,
    )?;
    out.counter(
        "carried_lost_reports",
        "Reports about tunnelled connections that did not reach the choice of congestion controls",
        None,
        carry.lost_reports,
    )?;
    let bytes = sum_by_carrier(carry, |it| it.sent_bytes + it.received_bytes);
    out.counters(
        "carrier_bytes",
        "Bytes that carriers have sent and received on the network, with keep-alives and acknowledgements",
        labelled(&bytes),
    )?;
    let lost = sum_by_carrier(carry, |it| it.lost_packets);
    out.counters("carrier_lost_packets", "Packets of carriers that were lost", labelled(&lost))?;
    let idle = sum_by_carrier(carry, |it| it.pool_idle);
    let busy = sum_by_carrier(carry, |it| it.pool_busy);
    let state = |sums, state| {
        labelled(sums).map(move |([peer, carrier], count)| ([peer, carrier, ("state", state)], count))
    };
    let pools = state(&idle, "idle").chain(state(&busy, "busy"));
    out.gauges(
        "pool_connections",
        "Connections of carriers by TCP, MPTCP or SCTP: idle ones wait, busy ones tunnel a connection",
        pools,
    )
}

/// Sums a value over the carriers of each peer and kind. There are few peers and kinds.
fn sum_by_carrier(carry: &CarryStatus, value: fn(&CarrierStatus) -> u64) -> CarrierSums<'_> {
    let mut sums = CarrierSums::new();
    for it in carry.carriers.iter().filter(|it| !it.carrier.is_empty()) {
        *sums.entry((it.peer.as_str(), it.carrier.as_str())).or_default() += value(it);
    }
    sums
}

fn labelled<'a>(sums: &'a CarrierSums<'a>) -> impl Iterator<Item = ([(&'a str, &'a str); 2], u64)> {
    sums.iter().map(|((peer, carrier), sum)| ([("peer", *peer), ("carrier", *carrier)], *sum))
}

#[cfg(test)]
mod tests {
    use millrace_graft::status::{FirewallStatus, GatewayStatus};
    use millrace_graft_kernel::hook::HookVerdict;
    use millrace_graft_proto::carry::frame::CarryReason;

    use super::*;

    const METRICS: &str = include_str!("../../../docs/reference/metrics.md");
    const REASONS: &str = include_str!("../../../docs/reference/reasons.md");

    #[test]
    fn metric_names_follow_the_documentation() {
        let carrier = CarrierStatus {
            peer: "a".into(),
            state: "warm".into(),
            lost_packets: 3,
            ..CarrierStatus::default()
        };
        let quic =
            CarrierStatus { carrier: "quic".into(), sent_bytes: 4, received_bytes: 5, ..carrier.clone() };
        let tcp = CarrierStatus { carrier: "tcp".into(), pool_idle: 12, pool_busy: 13, ..carrier };
        let carry = CarryStatus {
            verdicts: [("redirected".to_owned(), 1)].into(),
            held: [("asked".to_owned(), 2)].into(),
            carriers: vec![quic, tcp],
            connections: 6,
            ended: [("done".to_owned(), 7)].into(),
            resumed: 8,
            sent_bytes: 9,
            received_bytes: 10,
            kept_bytes: 11,
            gateway: Some(GatewayStatus {
                waiting: 14,
                verdicts: [("taken".to_owned(), 15)].into(),
                ..GatewayStatus::default()
            }),
            lost_reports: 16,
            firewall: Some(FirewallStatus {
                is_there: true,
                rules: vec!["inet t out handle 4: quota".to_owned()],
                openings: [("passes".to_owned(), 19)].into(),
                packets: [("out".to_owned(), 20)].into(),
            }),
            ..CarryStatus::default()
        };
        let text = super::encode(carry).unwrap();
        for line in [
            r#"millrace_graft_hook_verdicts_total{verdict="redirected"} 1"#,
            r#"millrace_graft_held_packets_total{verdict="asked"} 2"#,
            r#"millrace_graft_carried_ended_total{how="done"} 7"#,
            r#"millrace_graft_carriers{state="warm"} 2"#,
            r#"millrace_graft_carriers{state="cold"} 0"#,
            r#"millrace_graft_gateway_packets_total{verdict="taken"} 15"#,
            "millrace_graft_gateway_waiting 14",
            "millrace_graft_carried_connections 6",
            "millrace_graft_carried_kept_bytes 11",
            r#"millrace_graft_carried_bytes_total{way="sent"} 9"#,
            r#"millrace_graft_carried_bytes_total{way="received"} 10"#,
            "millrace_graft_carried_resumed_total 8",
            "millrace_graft_carried_lost_reports_total 16",
            r#"millrace_graft_carrier_bytes_total{peer="a",carrier="quic"} 9"#,
            r#"millrace_graft_carrier_lost_packets_total{peer="a",carrier="quic"} 3"#,
            r#"millrace_graft_pool_connections{peer="a",carrier="tcp",state="idle"} 12"#,
            r#"millrace_graft_pool_connections{peer="a",carrier="tcp",state="busy"} 13"#,
            r#"millrace_graft_openings_total{verdict="passes"} 19"#,
            r#"millrace_graft_opening_packets_total{verdict="out"} 20"#,
            "millrace_graft_plain_rules 1",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(METRICS.contains(name), "{name} is not in docs/reference/metrics.md");
        }
    }

    #[test]
    fn every_carrier_metric_is_documented() {
        for verdict in HookVerdict::ALL {
            assert!(REASONS.contains(&format!("| `{}` |", verdict.name())), "{}", verdict.name());
        }
        for verdict in millrace_graft_kernel::hold::VERDICTS {
            assert!(REASONS.contains(&format!("| `{verdict}` |")), "{verdict}");
        }
        for verdict in millrace_graft_kernel::gateway::VERDICTS {
            assert!(REASONS.contains(&format!("| `{verdict}` |")), "{verdict}");
        }
        for verdict in crate::openings::Verdict::ALL {
            assert!(REASONS.contains(&format!("| `{}` |", verdict.name())), "{}", verdict.name());
        }
        for verdict in millrace_graft_kernel::opening::VERDICTS {
            assert!(REASONS.contains(&format!("| `{verdict}` |")), "{verdict}");
        }
        for reason in CarryReason::ALL {
            assert!(REASONS.contains(&format!("`{}`", reason.name())), "{}", reason.name());
        }
    }
}
