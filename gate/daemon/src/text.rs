//! The text output of `millrace gate status` and `millrace gate top`.

use std::{collections::HashMap, net::IpAddr};

use millrace_daemon::render::{
    Fit::{self, Name, Whole},
    bytes, line, span, table,
};
use millrace_gate::status::{NetworkSize, ScopeStatus, Status};

const COUNTS: [(&str, Fit); 6] = [
    ("SCOPE", Name),
    ("VERDICT", Whole),
    ("MODE", Whole),
    ("PACKETS", Whole),
    ("BYTES", Whole),
    ("WOULD REFUSE", Whole),
];
const RATES: [(&str, Fit); 6] = [
    ("SCOPE", Name),
    ("VERDICT", Whole),
    ("MODE", Whole),
    ("PACKETS/s", Whole),
    ("BYTES/s", Whole),
    ("WOULD REFUSE/s", Whole),
];

/// Formats counters in lines of at most `width` columns. Lines are longer only if numbers and addresses need more.
pub fn status(status: &Status, width: usize) -> String {
    let mut out = String::new();
    summary(&mut out, status, width);
    table(&mut out, width, &COUNTS, counts(status, None).into_iter().map(|count| count.cells));
    write_others(&mut out, status, width);
    out
}

/// Formats rates since `before`, and the clients that are refused. The busiest rules and clients are within the first
/// `rows` lines.
pub fn top(status: &Status, before: &Status, width: usize, rows: usize) -> String {
    /// Number of lines of the two tables that are not rows: an empty line and a heading for each table, and one line
    /// with the number of omitted rows.
    const FRAME: usize = 2 + 2 + 1;
    const SOURCES_LEAST: usize = 4;
    let mut out = String::new();
    summary(&mut out, status, width);
    let mut counts = counts(status, Some(before));
    counts.sort_by_key(|count| std::cmp::Reverse(count.busy));
    let sources = sources(status);
    let room = rows.saturating_sub(out.lines().count() + FRAME);
    let rules = counts.len().min(room.saturating_sub(sources.len().min(SOURCES_LEAST)).max(1));
    let quiet = counts.len() - rules;
    table(&mut out, width, &RATES, counts.into_iter().take(rules).map(|count| count.cells));
    if quiet > 0 {
        line(&mut out, width, &format!("and {quiet} with less"));
    }
    let shown = sources.into_iter().take(room.saturating_sub(rules).max(1));
    table(&mut out, width, &[("SOURCE", Whole), ("RULE", Whole), ("SAMPLES", Whole)], shown);
    write_others(&mut out, status, width);
    out
}

/// Formats the counts of events, the fill levels of the kernel's tables, and the entries of the block and allow lists.
fn write_others(out: &mut String, status: &Status, width: usize) {
    let events = status.events.iter().filter(|(_, count)| **count > 0);
    let events: Vec<_> = events.map(|(event, count)| vec![event.clone(), count.to_string()]).collect();
    if !events.is_empty() {
        table(out, width, &[("EVENT", Whole), ("COUNT", Whole)], events.into_iter());
    }
    let tables = status.tables.iter().filter(|table| table.entries > 0);
    let tables: Vec<_> = tables
        .map(|table| vec![table.name.clone(), table.entries.to_string(), table.room.to_string()])
        .collect();
    if !tables.is_empty() {
        table(out, width, &[("TABLE", Whole), ("ENTRIES", Whole), ("ROOM", Whole)], tables.into_iter());
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
        let head = [("PREFIX", Whole), ("LISTED", Whole), ("SCOPE", Name), ("FOR", Whole)];
        table(out, width, &head, rows);
    }
}

fn summary(out: &mut String, status: &Status, width: usize) {
    let mut say = |text: String| line(out, width, &text);
    let attached = status.interfaces.iter().filter(|it| it.attached);
    let interfaces: Vec<_> = attached.map(|it| format!("{} ({})", it.name, it.mode)).collect();
    let interfaces = if interfaces.is_empty() { vec!["nothing".to_owned()] } else { interfaces };
    let dry = if status.dry_run { ", dry run: nothing is refused" } else { "" };
    say(format!("millrace {} guards {}{dry}", status.version, interfaces.join(", ")));
    let policy = if status.policy.is_empty() { "flags" } else { &status.policy };
    say(format!("up {}, policy from {policy}", span(status.uptime_s)));
    if !status.networks.is_empty() {
        say(networks(status));
    }
    for trouble in &status.trouble {
        say(format!("TROUBLE: {trouble}"));
    }
    if status.log_lines_dropped > 0 {
        say(format!("{} log lines lost", status.log_lines_dropped));
    }
    for scope in status.scopes.iter().filter(|scope| scope.clients > 0) {
        say(format!("{}: {} connections of {} clients", scope.name, scope.connections, scope.clients));
    }
}

/// Formats the prefix lengths of clients and of wider networks, and the networks' limits.
fn networks(status: &Status) -> String {
    let of = |wanted: &dyn Fn(u32) -> bool, text: &dyn Fn(&NetworkSize) -> String| {
        let all: Vec<_> = status.networks.iter().filter(|size| wanted(size.times)).map(text).collect();
        all.join(", ")
    };
    let clients = of(&|times| times == 1, &|size| format!("IPv{} /{}", size.family, size.prefix));
    let wider =
        of(&|times| times > 1, &|size| format!("IPv{} /{} {} times", size.family, size.prefix, size.times));
    let wider = if wider.is_empty() { "wider networks have no limits".to_owned() } else { wider };
    format!("a client is {clients}; {wider}")
}

/// A row of the table that shows how many packets each rule refused, and how many passed for which reason.
struct VerdictRow {
    cells: Vec<String>,
    /// Sort key of the row: number of refused (or monitored) packets, then of all packets.
    busy: (u64, u64),
}

/// Returns the rows of the table that shows refused and passed packets: rates if there is an earlier status, else
/// counts.
fn counts(status: &Status, before: Option<&Status>) -> Vec<VerdictRow> {
    let seconds = before.map_or(1.0, |before| (status.uptime_s - before.uptime_s).max(0.001));
    let was = |name: &str| before.and_then(|before| before.scopes.iter().find(|scope| scope.name == name));
    status.scopes.iter().flat_map(|scope| scope_rows(scope, was(&scope.name), seconds)).collect()
}

/// Returns the rows for a scope (an application with rules of its own): first the rules that are on or have counted
/// packets, then the reasons for which packets have passed.
fn scope_rows(scope: &ScopeStatus, before: Option<&ScopeStatus>, seconds: f64) -> Vec<VerdictRow> {
    let per = |now: u64, then: u64| (now.saturating_sub(then) as f64 / seconds).round() as u64;
    let mut rows = Vec::new();
    for rule in &scope.rules {
        let then = before.and_then(|scope| scope.rules.iter().find(|then| then.rule == rule.rule)).cloned();
        let then = then.unwrap_or_default();
        if rule.packets == 0 && rule.monitored == 0 && (rule.mode == "off" || scope.name == "interface") {
            continue;
        }
        let packets = per(rule.packets, then.packets);
        let monitored = per(rule.monitored, then.monitored);
        let cells = vec![
            scope.name.clone(),
            rule.rule.clone(),
            rule.mode.clone(),
            packets.to_string(),
            bytes(per(rule.bytes, then.bytes)),
            monitored.to_string(),
        ];
        rows.push(VerdictRow { cells, busy: (packets + monitored, packets) });
    }
    for pass in scope.passed.iter().filter(|pass| pass.packets > 0) {
        let then = before.and_then(|scope| scope.passed.iter().find(|then| then.reason == pass.reason));
        let then = then.cloned().unwrap_or_default();
        let packets = per(pass.packets, then.packets);
        let cells = vec![
            scope.name.clone(),
            pass.reason.clone(),
            "pass".to_owned(),
            packets.to_string(),
            bytes(per(pass.bytes, then.bytes)),
            "-".to_owned(),
        ];
        rows.push(VerdictRow { cells, busy: (0, packets) });
    }
    rows
}

/// Returns the clients that are refused most in the latest samples.
fn sources(status: &Status) -> Vec<Vec<String>> {
    let mut counts: HashMap<(IpAddr, &str), usize> = HashMap::new();
    for refusal in &status.recent {
        for rule in &refusal.rules {
            *counts.entry((refusal.source.ip(), rule)).or_default() += 1;
        }
    }
    let mut counts: Vec<_> = counts.into_iter().collect();
    counts.sort_by(|((a, _), x), ((b, _), y)| y.cmp(x).then(a.cmp(b)));
    let row = |((source, rule), count): ((IpAddr, &str), usize)| {
        vec![source.to_string(), rule.to_owned(), count.to_string()]
    };
    counts.into_iter().map(row).collect()
}

#[cfg(test)]
mod tests {
    use millrace_gate::status::{GateInterfaceStatus, ListedStatus, PassCount, RefusalStatus, RuleCount};
    use millrace_testkit::golden::assert_as_reviewed;

    use super::*;

    #[test]
    fn status_and_top_show_counts_rates_and_sources() {
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
            interfaces: vec![GateInterfaceStatus {
                name: "eth0".into(),
                mode: "native".into(),
                attached: true,
                ..GateInterfaceStatus::default()
            }],
            networks: [(32, 1), (24, 8)]
                .map(|(prefix, times)| NetworkSize { family: 4, prefix, times })
                .into(),
            scopes: vec![ScopeStatus {
                name: "web".into(),
                clients: 2,
                connections: 3,
                rules: vec![
                    quota(packets),
                    RuleCount { rule: "retry".into(), mode: "off".into(), ..quota(0) },
                ],
                passed: vec![PassCount { reason: "live".into(), packets: 50, bytes: 5000 }],
            }],
            listed: vec![ListedStatus {
                scope: None,
                prefix: "192.0.2.0/24".into(),
                entry: "block".into(),
                seconds: None,
            }],
            recent: vec![RefusalStatus {
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
        let text = super::status(&status(10.0, 1000), 80);
        let sizes = "a client is IPv4 /32; IPv4 /24 8 times";
        for part in ["guards eth0 (native)", sizes, "web: 3 connections of 2 clients", "1000", "192.0.2.0/24"]
        {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
        assert!(!text.contains("retry"), "a rule that is off and has not counted is not shown\n{text}");
        let text = top(&status(12.0, 1000), &status(10.0, 800), 80, 23);
        for part in ["PACKETS/s", " 100 ", "192.0.2.7"] {
            assert!(text.contains(part), "{part} is not in\n{text}");
        }
    }

    /// Checks that a small terminal has the most important lines, and a large one has all, with long names and
    /// addresses.
    #[test]
    fn top_display_fits_a_small_terminal_and_shows_more_on_a_larger_one() {
        let name = "a-scope-of-sixty-characters-that-somebody-has-really-given-x";
        let rule = |n: u64| RuleCount {
            rule: format!("unknown_initial{}", n % 10),
            mode: "enforce".into(),
            packets: 1_234_567_890_123 * n,
            bytes: u64::MAX / 2,
            monitored: 0,
        };
        let refusal = |n: u16| RefusalStatus {
            time_ns: 1,
            scope: name.into(),
            rules: vec!["unknown_initials".into()],
            refused: true,
            source: format!("[2001:db8:85a3:1234:5678:9abc:def0:{n:04x}]:54321").parse().unwrap(),
            destination: "[2001:db8:85a3:1234:5678:9abc:def0:1234]:443".parse().unwrap(),
            bytes: 1200,
        };
        let now = Status {
            uptime_s: 2.0,
            log_lines_dropped: 3,
            policy: format!("/etc/millrace/{name}/{name}.toml"),
            trouble: vec![format!(
                "the latest reload failed, the policy before stays: {name}.toml:4: no such key"
            )],
            scopes: vec![ScopeStatus {
                name: name.into(),
                clients: 1,
                connections: 1,
                rules: (0..20).map(rule).collect(),
                passed: vec![],
            }],
            listed: vec![ListedStatus {
                scope: Some(name.into()),
                prefix: "2001:db8:85a3:1234:5678:9abc:def0:1234/127".into(),
                entry: "block".into(),
                seconds: Some(86_399),
            }],
            recent: (0x1000..0x1014).map(refusal).collect(),
            ..Status::default()
        };
        let before = Status { uptime_s: 1.0, ..Status::default() };
        for (text, what) in
            [(super::status(&now, 80), "gate-status"), (top(&now, &before, 80, 23), "gate-top")]
        {
            assert_as_reviewed(env!("CARGO_MANIFEST_DIR"), what, &text);
            for line in text.lines() {
                assert!(line.chars().count() <= 80, "{what}: {} wide: {line}\n{text}", line.chars().count());
            }
        }
        assert!(super::status(&now, 80).contains("\n3 log lines lost\n"));
        let small = top(&now, &before, 80, 23);
        let screen: Vec<&str> = small.lines().take(23).collect();
        let on = |part: &str| screen.iter().filter(|line| line.contains(part)).count();
        assert!(on("enforce") >= 4 && on("SOURCE") == 1 && on("2001:db8:85a3") >= 4, "{small}");
        assert!(screen.iter().any(|line| line.contains("unknown_initial9")), "the busiest first:\n{small}");
        assert!(on("with less") == 1, "{small}");
        let large = top(&now, &before, 160, 80);
        assert_eq!(large.matches("enforce").count(), 20, "{large}");
        assert_eq!(large.matches("2001:db8:85a3:1234:5678:9abc:def0:10").count(), 20, "{large}");
        assert!(large.contains(&format!("{name}  unknown_initial")), "{large}");
    }
}
