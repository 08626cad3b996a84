//! The metrics of a gate, in its own daemon or in the relay, collected for each scrape.

use std::fmt;

use millrace_daemon::openmetrics::{self, Out};
use millrace_gate::status::{Reload, ScopeStatus, Status, TableStatus};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};

const PREFIX: &str = "millrace_gate";

/// Returns the text of one scrape.
pub fn encode(status: Status) -> Result<String, fmt::Error> {
    openmetrics::encode(PREFIX, GateSnapshot(status))
}

/// Returns the metrics as a group, for a daemon with further metrics.
pub fn group(status: Status) -> (&'static str, Box<dyn Collector>) {
    (PREFIX, Box::new(GateSnapshot(status)))
}

#[derive(Debug)]
struct GateSnapshot(Status);

impl Collector for GateSnapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Status { scopes, events, interfaces, tables, .. } = &self.0;
        let mut out = Out(encoder);
        out.gauge_f64("uptime", "Time since start", Unit::Seconds, self.0.uptime_s)?;
        if let Some(Reload { time_s, error }) = &self.0.reload {
            let help = "1 if the policy in force is the one that was read last";
            out.gauge("reload_ok", help, None, u64::from(error.is_none()))?;
            out.gauge_f64("reload_timestamp", "Time of the last reload", Unit::Seconds, *time_s)?;
        }
        gauges(&mut out, "table_entries", "Entries in use of the table", tables, table_label, |table| {
            table.entries
        })?;
        gauges(
            &mut out,
            "table_room",
            "Largest number of entries of the table",
            tables,
            table_label,
            |table| table.room,
        )?;
        encode_by_rule(
            &mut out,
            "refused_packets",
            "Packets that an enforced rule refused",
            scopes,
            |rule| rule.packets,
        )?;
        encode_by_rule(&mut out, "refused_bytes", "UDP payload of refused packets", scopes, |rule| {
            rule.bytes
        })?;
        let help = "Packets that the rule would have refused in mode enforce";
        encode_by_rule(&mut out, "monitored_packets", help, scopes, |rule| rule.monitored)?;
        encode_by_reason(&mut out, "passed_packets", "Packets that passed, by reason", scopes, |pass| {
            pass.packets
        })?;
        encode_by_reason(&mut out, "passed_bytes", "UDP payload of passed packets", scopes, |pass| {
            pass.bytes
        })?;
        out.counts(
            "events",
            "Other events: connections tracked and forgotten, tables full, invalid tokens, answers",
            "event",
            events,
        )?;
        gauges(&mut out, "clients", "Clients with connections", scopes, scope_label, |scope| scope.clients)?;
        gauges(&mut out, "connections", "Connections of clients", scopes, scope_label, |scope| {
            scope.connections
        })?;
        out.labelled(
            "interfaces",
            "1 if the gate is attached to the interface, 0 if it should be and is not",
            MetricType::Gauge,
            |family| {
                interfaces.iter().try_for_each(|interface| {
                    let labels = [("interface", interface.name.as_str()), ("mode", interface.mode.as_str())];
                    ConstGauge::new(i64::from(interface.attached)).encode(family.encode_family(&labels)?)
                })
            },
        )?;
        out.labelled("reattached", "Times that the gate reattached", MetricType::Counter, |family| {
            interfaces.iter().try_for_each(|interface| {
                let labels = [("interface", interface.name.as_str())];
                ConstCounter::new(interface.reattached).encode(family.encode_family(&labels)?)
            })
        })
    }
}

fn encode_by_rule(
    out: &mut Out<'_>,
    name: &str,
    help: &str,
    scopes: &[ScopeStatus],
    value: fn(&millrace_gate::status::RuleCount) -> u64,
) -> fmt::Result {
    let values = scopes.iter().flat_map(|scope| {
        scope
            .rules
            .iter()
            .map(move |rule| ([("scope", scope.name.as_str()), ("rule", &rule.rule)], value(rule)))
    });
    out.counters(name, help, values)
}

fn encode_by_reason(
    out: &mut Out<'_>,
    name: &str,
    help: &str,
    scopes: &[ScopeStatus],
    value: fn(&millrace_gate::status::PassCount) -> u64,
) -> fmt::Result {
    let values = scopes.iter().flat_map(|scope| {
        scope
            .passed
            .iter()
            .map(move |pass| ([("scope", scope.name.as_str()), ("reason", &pass.reason)], value(pass)))
    });
    out.counters(name, help, values)
}

/// Writes one gauge for each element of `all`, with the label that `label` returns for the element.
fn gauges<T>(
    out: &mut Out<'_>,
    name: &str,
    help: &str,
    all: &[T],
    label: fn(&T) -> (&'static str, &str),
    value: fn(&T) -> u64,
) -> fmt::Result {
    out.gauges(name, help, all.iter().map(|it| ([label(it)], value(it))))
}

fn scope_label(scope: &ScopeStatus) -> (&'static str, &str) {
    ("scope", &scope.name)
}

fn table_label(table: &TableStatus) -> (&'static str, &str) {
    ("table", &table.name)
}

#[cfg(test)]
mod tests {
    use millrace_gate::status::{GateInterfaceStatus, PassCount, RuleCount};

    use super::*;

    #[test]
    fn metric_names_follow_the_documentation() {
        let quota = RuleCount { rule: "quota".into(), packets: 3, bytes: 3600, ..RuleCount::default() };
        let live = PassCount { reason: "live".into(), packets: 7, bytes: 700 };
        let scope = ScopeStatus {
            name: "web".into(),
            clients: 2,
            connections: 5,
            rules: vec![quota],
            passed: vec![live],
        };
        let text = encode(Status {
            uptime_s: 2.5,
            scopes: vec![scope],
            events: [("token_invalid".to_owned(), 4)].into(),
            reload: Some(Reload { time_s: 1_800_000_000.5, error: Some("no".into()) }),
            tables: vec![TableStatus { name: "connections".into(), entries: 7, room: 64 }],
            interfaces: vec![
                GateInterfaceStatus {
                    name: "eth0".into(),
                    mode: "native".into(),
                    attached: true,
                    reattached: 2,
                    ..GateInterfaceStatus::default()
                },
                GateInterfaceStatus {
                    name: "eth1".into(),
                    mode: "generic".into(),
                    ..GateInterfaceStatus::default()
                },
            ],
            ..Status::default()
        })
        .unwrap();
        for line in [
            "millrace_gate_uptime_seconds 2.5",
            r#"millrace_gate_refused_packets_total{scope="web",rule="quota"} 3"#,
            r#"millrace_gate_refused_bytes_total{scope="web",rule="quota"} 3600"#,
            r#"millrace_gate_monitored_packets_total{scope="web",rule="quota"} 0"#,
            r#"millrace_gate_passed_packets_total{scope="web",reason="live"} 7"#,
            r#"millrace_gate_events_total{event="token_invalid"} 4"#,
            "millrace_gate_reload_ok 0",
            "millrace_gate_reload_timestamp_seconds 1800000000.5",
            r#"millrace_gate_table_entries{table="connections"} 7"#,
            r#"millrace_gate_table_room{table="connections"} 64"#,
            r#"millrace_gate_clients{scope="web"} 2"#,
            r#"millrace_gate_connections{scope="web"} 5"#,
            r#"millrace_gate_interfaces{interface="eth0",mode="native"} 1"#,
            r#"millrace_gate_interfaces{interface="eth1",mode="generic"} 0"#,
            r#"millrace_gate_reattached_total{interface="eth0"} 2"#,
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
        }
        millrace_testkit::documented::assert_families_named("millrace_gate", &text);
    }
}
