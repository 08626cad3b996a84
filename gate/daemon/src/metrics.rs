//! A gate's metrics, of its own daemon or of the relay's gate, made anew for each scrape.

use std::fmt;

use millrace_daemon::openmetrics::{self, Out};
use millrace_gate::status::{Reload, Scope, Status, Table};
use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Unit,
};

const PREFIX: &str = "millrace_gate";

/// The text of one scrape.
pub fn encode(status: Status) -> Result<String, fmt::Error> {
    openmetrics::encode(PREFIX, Snapshot(status))
}

/// For those who have other metrics, too.
pub fn group(status: Status) -> (&'static str, Box<dyn Collector>) {
    (PREFIX, Box::new(Snapshot(status)))
}

#[derive(Debug)]
struct Snapshot(Status);

impl Collector for Snapshot {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Status { scopes, events, interfaces, tables, .. } = &self.0;
        let mut out = Out(encoder);
        out.gauge_f64("uptime", "Time since start", Unit::Seconds, self.0.uptime_s)?;
        if let Some(Reload { time_s, error }) = &self.0.reload {
            let help = "1 if the policy is what was read last";
            out.gauge("reload_ok", help, None, u64::from(error.is_none()))?;
            out.gauge_f64("reload_timestamp", "When the policy was read last", Unit::Seconds, *time_s)?;
        }
        gauges(&mut out, "table_entries", "Entries of a table", tables, of_table, |table| table.entries)?;
        gauges(&mut out, "table_room", "Entries that it has room for", tables, of_table, |table| table.room)?;
        by_rule(&mut out, "refused_packets", "Packets that a rule refused", scopes, |rule| rule.packets)?;
        by_rule(&mut out, "refused_bytes", "The same in UDP payload", scopes, |rule| rule.bytes)?;
        let help = "Packets that a rule would have refused";
        by_rule(&mut out, "monitored_packets", help, scopes, |rule| rule.monitored)?;
        by_reason(&mut out, "passed_packets", "Packets that passed", scopes, |pass| pass.packets)?;
        by_reason(&mut out, "passed_bytes", "The same in UDP payload", scopes, |pass| pass.bytes)?;
        out.counts("events", "What else happened", "event", events)?;
        gauges(&mut out, "clients", "Clients that have connections", scopes, of_scope, |scope| {
            scope.clients
        })?;
        gauges(&mut out, "connections", "Connections of clients", scopes, of_scope, |scope| {
            scope.connections
        })?;
        out.labelled("interfaces", "Interfaces that are guarded", MetricType::Gauge, |family| {
            interfaces.iter().try_for_each(|interface| {
                let labels = [("interface", interface.name.as_str()), ("mode", interface.mode.as_str())];
                ConstGauge::new(i64::from(interface.attached)).encode(family.encode_family(&labels)?)
            })
        })?;
        out.labelled("reattached", "Times that it was attached again", MetricType::Counter, |family| {
            interfaces.iter().try_for_each(|interface| {
                let labels = [("interface", interface.name.as_str())];
                ConstCounter::new(interface.reattached).encode(family.encode_family(&labels)?)
            })
        })
    }
}

fn by_rule(
    out: &mut Out<'_>,
    name: &str,
    help: &str,
    scopes: &[Scope],
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

fn by_reason(
    out: &mut Out<'_>,
    name: &str,
    help: &str,
    scopes: &[Scope],
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

/// One for each of them, by a label.
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

fn of_scope(scope: &Scope) -> (&'static str, &str) {
    ("scope", &scope.name)
}

fn of_table(table: &Table) -> (&'static str, &str) {
    ("table", &table.name)
}

#[cfg(test)]
mod tests {
    use millrace_gate::status::{Interface, PassCount, RuleCount};

    use super::*;

    #[test]
    fn names_follow_the_documentation() {
        let quota = RuleCount { rule: "quota".into(), packets: 3, bytes: 3600, ..RuleCount::default() };
        let live = PassCount { reason: "live".into(), packets: 7, bytes: 700 };
        let scope =
            Scope { name: "web".into(), clients: 2, connections: 5, rules: vec![quota], passed: vec![live] };
        let text = encode(Status {
            uptime_s: 2.5,
            scopes: vec![scope],
            events: [("token_invalid".to_owned(), 4)].into(),
            reload: Some(Reload { time_s: 1_800_000_000.5, error: Some("no".into()) }),
            tables: vec![Table { name: "connections".into(), entries: 7, room: 64 }],
            interfaces: vec![
                Interface {
                    name: "eth0".into(),
                    mode: "native".into(),
                    attached: true,
                    reattached: 2,
                    ..Interface::default()
                },
                Interface { name: "eth1".into(), mode: "generic".into(), ..Interface::default() },
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
