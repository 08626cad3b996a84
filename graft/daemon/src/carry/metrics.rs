//! Its metrics.

use std::{collections::BTreeMap, fmt};

use millrace_daemon::openmetrics::Out;
use millrace_graft::status::{Carrier, Carry};

/// Of each peer and kind, in the order of the settings' names.
type Sums<'a> = BTreeMap<(&'a str, &'a str), u64>;

const STATES: [&str; 4] = ["warm", "suspect", "full", "cold"];

pub fn encode(carry: &Carry, out: &mut Out<'_>) -> fmt::Result {
    let help = "Connections to hosts with a broker that a rule fits";
    out.counts("hook_verdicts", help, "verdict", &carry.verdicts)?;
    out.counts("held_packets", "Packets where SYNs are held back", "verdict", &carry.held)?;
    if let Some(firewall) = &carry.firewall {
        let help = "Connections to be carried, by what this host's firewall says";
        out.counts("openings", help, "verdict", &firewall.openings)?;
        out.counts("opening_packets", "First packets behind the firewall", "verdict", &firewall.packets)?;
        out.gauge(
            "plain_rules",
            "Rules for which connections are plain TCP",
            None,
            firewall.rules.len() as u64,
        )?;
    }
    if let Some(gateway) = &carry.gateway {
        let help = "Packets of hosts behind this one";
        out.counts("gateway_packets", help, "verdict", &gateway.verdicts)?;
        out.gauge("gateway_waiting", "SYNs of theirs that are held back", None, gateway.waiting)?;
    }
    out.counts("carried_ended", "What became of carried connections", "how", &carry.ended)?;
    let carriers = STATES.iter().map(|state| {
        let count = carry.carriers.iter().filter(|it| it.state == *state).count() as u64;
        ([("state", *state)], count)
    });
    out.gauges("carriers", "Carriers by how they are", carriers)?;
    out.gauge("carried_connections", "Connections that are carried", None, carry.connections)?;
    out.gauge("carried_kept_bytes", "Bytes that are not confirmed yet", None, carry.kept_bytes)?;
    let bytes = [([("way", "sent")], carry.sent_bytes), ([("way", "received")], carry.received_bytes)];
    out.counters("carried_bytes", "Bytes of applications", bytes.into_iter())?;
    out.counter("carried_resumed", "Times that one went on with another carrier", None, carry.resumed)?;
    out.counter("carried_untold", "Reports of them that were lost", None, carry.untold)?;
    let bytes = by_carrier(carry, |it| it.sent_bytes + it.received_bytes);
    out.counters("carrier_bytes", "Bytes of carriers, both ways", labelled(&bytes))?;
    let lost = by_carrier(carry, |it| it.lost_packets);
    out.counters("carrier_lost_packets", "Their lost packets", labelled(&lost))?;
    let (idle, busy) = (by_carrier(carry, |it| it.pool_idle), by_carrier(carry, |it| it.pool_busy));
    let state = |sums, state| {
        labelled(sums).map(move |([peer, carrier], count)| ([peer, carrier, ("state", state)], count))
    };
    let pools = state(&idle, "idle").chain(state(&busy, "busy"));
    out.gauges("pool_connections", "Connections of pools", pools)
}

/// Peers of the settings, and what carriers are: few.
fn by_carrier(carry: &Carry, value: fn(&Carrier) -> u64) -> Sums<'_> {
    let mut sums = Sums::new();
    for it in carry.carriers.iter().filter(|it| !it.carrier.is_empty()) {
        *sums.entry((it.peer.as_str(), it.carrier.as_str())).or_default() += value(it);
    }
    sums
}

fn labelled<'a>(sums: &'a Sums<'a>) -> impl Iterator<Item = ([(&'a str, &'a str); 2], u64)> {
    sums.iter().map(|((peer, carrier), sum)| ([("peer", *peer), ("carrier", *carrier)], *sum))
}

#[cfg(test)]
mod tests {
    use millrace_graft::status::{Firewall, Gateway, Status};
    use millrace_graft_kernel::hook::Verdict;
    use millrace_graft_proto::carry::frame::Reason;

    use super::*;

    const DOCUMENTED: &str = include_str!("../../../../docs/carried.md");
    const GATEWAY: &str = include_str!("../../../../docs/gateway.md");

    #[test]
    fn names_follow_the_documentation() {
        let carrier =
            Carrier { peer: "a".into(), state: "warm".into(), lost_packets: 3, ..Carrier::default() };
        let quic = Carrier { carrier: "quic".into(), sent_bytes: 4, received_bytes: 5, ..carrier.clone() };
        let tcp = Carrier { carrier: "tcp".into(), pool_idle: 12, pool_busy: 13, ..carrier };
        let carry = Carry {
            verdicts: [("led".to_owned(), 1)].into(),
            held: [("asked".to_owned(), 2)].into(),
            carriers: vec![quic, tcp],
            connections: 6,
            ended: [("done".to_owned(), 7)].into(),
            resumed: 8,
            sent_bytes: 9,
            received_bytes: 10,
            kept_bytes: 11,
            gateway: Some(Gateway {
                waiting: 14,
                verdicts: [("taken".to_owned(), 15)].into(),
                ..Gateway::default()
            }),
            untold: 16,
            firewall: Some(Firewall {
                is_there: true,
                rules: vec!["inet t out handle 4: quota".to_owned()],
                openings: [("passes".to_owned(), 19)].into(),
                packets: [("out".to_owned(), 20)].into(),
            }),
            ..Carry::default()
        };
        let status = Status { carry: Some(carry), ..Status::default() };
        let text = crate::metrics::encode(status, Vec::new()).unwrap();
        for line in [
            r#"millrace_graft_hook_verdicts_total{verdict="led"} 1"#,
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
            "millrace_graft_carried_untold_total 16",
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
            let page = if name.contains("gateway") { GATEWAY } else { DOCUMENTED };
            assert!(page.contains(name), "{name} is not in the documentation");
        }
    }

    #[test]
    fn what_is_counted_is_documented() {
        for verdict in Verdict::ALL {
            assert!(DOCUMENTED.contains(&format!("| `{}` |", verdict.name())), "{}", verdict.name());
        }
        for verdict in millrace_graft_kernel::hold::VERDICTS {
            assert!(DOCUMENTED.contains(&format!("| `{verdict}` |")), "{verdict}");
        }
        for verdict in millrace_graft_kernel::gateway::VERDICTS {
            assert!(GATEWAY.contains(&format!("| `{verdict}` |")), "{verdict}");
        }
        for verdict in super::super::openings::Verdict::ALL {
            assert!(DOCUMENTED.contains(&format!("| `{}` |", verdict.name())), "{}", verdict.name());
        }
        for verdict in millrace_graft_kernel::opening::VERDICTS {
            assert!(DOCUMENTED.contains(&format!("| `{verdict}` |")), "{verdict}");
        }
        for reason in Reason::ALL {
            assert!(DOCUMENTED.contains(&format!("`{}`", reason.name())), "{}", reason.name());
        }
    }
}
