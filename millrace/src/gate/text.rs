//! `millrace gate status` and `top`, as text.

use std::{collections::HashMap, fmt::Write as _, net::IpAddr};

use crate::render::{bytes, span, table};
use millrace_gate::status::{Scope, Status};

/// Sources that `top` lists.
const SOURCES: usize = 10;

/// Counts, or rates since `before`.
pub fn render(status: &Status, before: Option<&Status>) -> String {
    let mut out = String::new();
    summary(&mut out, status);
    let seconds = before.map_or(1.0, |before| (status.uptime_s - before.uptime_s).max(0.001));
    let was = |name: &str| before.and_then(|before| before.scopes.iter().find(|scope| scope.name == name));
    let rows = status.scopes.iter().flat_map(|scope| scope_rows(scope, was(&scope.name), seconds));
    let head = if before.is_some() {
        ["SCOPE", "VERDICT", "MODE", "PACKETS/s", "BYTES/s", "WOULD REFUSE/s"]
    } else {
        ["SCOPE", "VERDICT", "MODE", "PACKETS", "BYTES", "WOULD REFUSE"]
    };
    table(&mut out, &head, rows);
    let events = status.events.iter().filter(|(_, count)| **count > 0);
    let events: Vec<_> = events.map(|(event, count)| vec![event.clone(), count.to_string()]).collect();
    if !events.is_empty() {
        table(&mut out, &["EVENT", "COUNT"], events.into_iter());
    }
    let tables = status.tables.iter().filter(|table| table.entries > 0);
    let tables: Vec<_> = tables
        .map(|table| vec![table.name.clone(), table.entries.to_string(), table.room.to_string()])
        .collect();
    if !tables.is_empty() {
        table(&mut out, &["TABLE", "ENTRIES", "ROOM"], tables.into_iter());
    }
    if !status.listed.is_empty() {
        let rows = status.listed.iter().map(|listed| {
            vec![
                listed.prefix.clone(),
                listed.entry.clone(),
                listed.scope.clone().unwrap_or("(all)".to_owned()),
                listed.seconds.map_or("-".to_owned(), |seconds| span(seconds as f64)),
            ]
        });
        table(&mut out, &["PREFIX", "LISTED", "SCOPE", "FOR"], rows);
    }
    if before.is_some() {
        sources(&mut out, status);
    }
    out
}

fn summary(out: &mut String, status: &Status) {
    let attached = status.interfaces.iter().filter(|it| it.attached);
    let interfaces: Vec<_> = attached.map(|it| format!("{} ({})", it.name, it.mode)).collect();
    let interfaces = if interfaces.is_empty() { vec!["nothing".to_owned()] } else { interfaces };
    let dry = if status.dry_run { ", dry run: nothing is refused" } else { "" };
    let _ = writeln!(out, "millrace {} guards {}{dry}", status.version, interfaces.join(", "));
    let policy = if status.policy.is_empty() { "flags" } else { &status.policy };
    let _ = writeln!(out, "up {}, policy from {policy}", span(status.uptime_s));
    for trouble in &status.trouble {
        let _ = writeln!(out, "TROUBLE: {trouble}");
    }
    for scope in status.scopes.iter().filter(|scope| scope.clients > 0) {
        let _ =
            writeln!(out, "{}: {} connections of {} clients", scope.name, scope.connections, scope.clients);
    }
}

/// Rules that are on or have counted, then reasons to pass that have.
fn scope_rows(scope: &Scope, before: Option<&Scope>, seconds: f64) -> Vec<Vec<String>> {
    let per = |now: u64, then: u64| (now.saturating_sub(then) as f64 / seconds).round() as u64;
    let mut rows = Vec::new();
    for rule in &scope.rules {
        let then = before.and_then(|scope| scope.rules.iter().find(|then| then.rule == rule.rule)).cloned();
        let then = then.unwrap_or_default();
        if rule.packets == 0 && rule.monitored == 0 && (rule.mode == "off" || scope.name == "interface") {
            continue;
        }
        rows.push(vec![
            scope.name.clone(),
            rule.rule.clone(),
            rule.mode.clone(),
            per(rule.packets, then.packets).to_string(),
            bytes(per(rule.bytes, then.bytes)),
            per(rule.monitored, then.monitored).to_string(),
        ]);
    }
    for pass in scope.passed.iter().filter(|pass| pass.packets > 0) {
        let then = before.and_then(|scope| scope.passed.iter().find(|then| then.reason == pass.reason));
        let then = then.cloned().unwrap_or_default();
        rows.push(vec![
            scope.name.clone(),
            pass.reason.clone(),
            "pass".to_owned(),
            per(pass.packets, then.packets).to_string(),
            bytes(per(pass.bytes, then.bytes)),
            "-".to_owned(),
        ]);
    }
    rows
}

/// Who is refused most, of the latest samples.
fn sources(out: &mut String, status: &Status) {
    let mut counts: HashMap<(IpAddr, &str), usize> = HashMap::new();
    for refusal in &status.recent {
        for rule in &refusal.rules {
            *counts.entry((refusal.source.ip(), rule)).or_default() += 1;
        }
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by(|((a, _), x), ((b, _), y)| y.cmp(x).then(a.cmp(b)));
    let rows = counts
        .into_iter()
        .take(SOURCES)
        .map(|((source, rule), count)| vec![source.to_string(), rule.to_owned(), count.to_string()]);
    table(out, &["SOURCE", "RULE", "SAMPLES"], rows);
}

#[cfg(test)]
mod tests {
    use super::*;
    use millrace_gate::status::{Interface, Listed, PassCount, Refusal, RuleCount};

    #[test]
    fn counts_rates_and_sources() {
        let quota = |packets| RuleCount {
            rule: "quota".into(),
            mode: "enforce".into(),
            packets,
            bytes: packets * 1200,
            monitored: 0,
        };
        let status = |uptime_s, packets| Status {
            version: "1.2.3".into(),
            uptime_s,
            interfaces: vec![Interface {
                name: "eth0".into(),
                mode: "native".into(),
                attached: true,
                ..Interface::default()
            }],
            scopes: vec![Scope {
                name: "web".into(),
                clients: 2,
                connections: 3,
                rules: vec![
                    quota(packets),
                    RuleCount { rule: "retry".into(), mode: "off".into(), ..quota(0) },
                ],
                passed: vec![PassCount { reason: "live".into(), packets: 50, bytes: 5000 }],
            }],
            listed: vec![Listed {
                scope: None,
                prefix: "192.0.2.0/24".into(),
                entry: "block".into(),
                seconds: None,
            }],
            recent: vec![Refusal {
                time_ns: 1,
                scope: "web".into(),
                rules: vec!["quota".into()],
                refused: true,
                source: "192.0.2.7:1".parse().unwrap(),
                destination: "192.0.2.1:443".parse().unwrap(),
                bytes: 1200,
            }],
            ..Status::default()
        };
        let text = render(&status(10.0, 1000), None);
        for part in ["guards eth0 (native)", "web: 3 connections of 2 clients", "1000", "192.0.2.0/24"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("retry"), "a rule that is off and has not counted is not shown\n{text}");
        let text = render(&status(12.0, 1000), Some(&status(10.0, 800)));
        for part in ["PACKETS/s", " 100 ", "192.0.2.7"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }
}
