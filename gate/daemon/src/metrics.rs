//! The metrics of a gate, in its own daemon or in the relay, collected for each scrape.

use std::fmt;

use millrace_daemon::openmetrics::{self, Out};
use millrace_gate::status::{PassCount, Reload, RuleCount, ScopeStatus, Status, TableStatus};
use prometheus_client::{collector::Collector, encoding::DescriptorEncoder, registry::Unit};

const PREFIX: &str = "millrace_gate";

/// Returns the text of one scrape.
pub fn encode(status: Status) -> Result<String, fmt::Error> {
    openmetrics::encode(PREFIX, GateSnapshot(status))
}

/// Returns the metrics as a group, for a daemon with further metrics.
pub fn group(status: Status) -> (&'static str, Box<dyn Collector>) {
    (PREFIX, Box::new(GateSnapshot(status)))
}

/// The name and the help of a counter, and the field that has its value.
type CounterOf<T> = (&'static str, &'static str, fn(&T) -> u64);

/// Counters with a value for each rule of each scope: name, help, value.
const BY_RULE: [CounterOf<RuleCount>; 3] = [
    ("refused_packets", "Packets that an enforced rule refused", |rule| rule.packets),
    ("refused_bytes", "UDP payload of refused packets", |rule| rule.bytes),
    ("monitored_packets", "Packets that the rule would have refused in mode enforce", |rule| rule.monitored),
];

/// Counters with a value for each reason for which packets of a scope pass: name, help, value.
const BY_REASON: [CounterOf<PassCount>; 2] = [
    ("passed_packets", "Packets that passed, by reason", |pass| pass.packets),
    ("passed_bytes", "UDP payload of passed packets", |pass| pass.bytes),
];

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
        let by_table = |value: fn(&TableStatus) -> u64| {
            tables.iter().map(move |it| ([("table", it.name.as_str())], value(it)))
        };
        out.gauges("table_entries", "Entries in use of the table", by_table(|table| table.entries))?;
        out.gauges("table_room", "Largest number of entries of the table", by_table(|table| table.room))?;
        for (name, help, value) in BY_RULE {
            let counts = scopes.iter().flat_map(|scope| {
                let labels = |rule| [("scope", scope.name.as_str()), ("rule", rule)];
                scope.rules.iter().map(move |it| (labels(it.rule.as_str()), value(it)))
            });
            out.counters(name, help, counts)?;
        }
        for (name, help, value) in BY_REASON {
            let counts = scopes.iter().flat_map(|scope| {
                let labels = |reason| [("scope", scope.name.as_str()), ("reason", reason)];
                scope.passed.iter().map(move |it| (labels(it.reason.as_str()), value(it)))
            });
            out.counters(name, help, counts)?;
        }
        let help = "Other events: connections tracked and forgotten, tables full, invalid tokens, answers";
        out.counts("events", help, "event", events)?;
        let by_scope = |value: fn(&ScopeStatus) -> u64| {
            scopes.iter().map(move |it| ([("scope", it.name.as_str())], value(it)))
        };
        out.gauges("clients", "Clients with connections", by_scope(|scope| scope.clients))?;
        out.gauges("connections", "Connections of clients", by_scope(|scope| scope.connections))?;
        let help = "1 if the gate is attached to the interface, 0 if it should be and is not";
        let attached = interfaces.iter().map(|it| {
            ([("interface", it.name.as_str()), ("mode", it.mode.as_str())], u64::from(it.attached))
        });
        out.gauges("interfaces", help, attached)?;
        let reattached = interfaces.iter().map(|it| ([("interface", it.name.as_str())], it.reattached));
        out.counters("reattached", "Times that the gate reattached", reattached)
    }
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
