//! Text that the commands of `millrace graft` print.

use std::fmt::Write as _;

use millrace_daemon::render::{
    Fit::{self, Name, Text, Whole},
    bytes, line, span, table,
};
use millrace_graft::{
    GraftPool, PoolGraft, PoolSource,
    status::{self, GraftPeerStatus, NatReport, PeerPath, RuleStatus},
};
use millrace_graft_proto::select::{features::Features, model::ModelDecision};

pub use super::select_text::connection;
use super::{
    control::{self, PeerReport},
    probe::{ProbeRecord, ProbeStatus},
    select_text,
};

/// Returns the text of a status, with lines of at most `width` columns.
pub fn status(control::Status { in_place: status, parts, .. }: &control::Status, width: usize) -> String {
    let mut out = String::new();
    let cgroup = Some(&status.cgroup).filter(|cgroup| !cgroup.is_empty());
    let cgroup = cgroup.map(|cgroup| format!(", cgroup {cgroup}")).unwrap_or_default();
    line(&mut out, width, &format!("up {}{cgroup}", span(status.uptime_s)));
    let parts = parts.iter().map(|part| format!("{} {}", part.name, part.state)).collect::<Vec<_>>();
    if !parts.is_empty() {
        line(&mut out, width, &format!("parts: {}", parts.join(", ")));
    }
    for trouble in &status.trouble {
        line(&mut out, width, &format!("TROUBLE: {trouble}"));
    }
    if status.log_lines_dropped > 0 {
        line(&mut out, width, &format!("{} log lines lost", status.log_lines_dropped));
    }
    let rows = status.loaded.iter().map(|it| {
        let parameters = it.parameters.iter().map(|(name, value)| format!("{name}={value}"));
        vec![
            it.name.clone(),
            it.congestion.clone(),
            it.identity.chars().take(12).collect(),
            it.connections.to_string(),
            format!("{:.1}", (it.open_us + it.load_us + it.attach_us) as f64 / 1e3),
            parameters.collect::<Vec<_>>().join(" "),
        ]
    });
    const LOADED: [(&str, Fit); 6] = [
        ("GRAFT", Name),
        ("IN TCP", Name),
        ("IDENTITY", Whole),
        ("CONNS", Whole),
        ("LOADED IN ms", Whole),
        ("PARAMETERS", Text),
    ];
    if !status.cgroup.is_empty() {
        table(&mut out, width, &LOADED, rows);
    }
    let rows = status.rules.iter().map(|rule| {
        vec![
            rule.name.clone(),
            rule.side.clone(),
            rule.ports.join(","),
            match (rule.agree, rule.bound) {
                (false, _) => "no",
                (true, false) => "yes",
                (true, true) => "bound",
            }
            .to_owned(),
            if rule.waits {
                "waits for a peer".to_owned()
            } else {
                rule.congestion.clone().unwrap_or("-".to_owned())
            },
        ]
    });
    const RULES: [(&str, Fit); 5] =
        [("RULE", Name), ("SIDE", Whole), ("PORTS", Text), ("AGREES", Whole), ("CONGESTION", Name)];
    if !status.cgroup.is_empty() {
        table(&mut out, width, &RULES, rows);
    }
    let mut some = status.rules.iter().filter(|rule| !rule.peers.is_empty()).peekable();
    if some.peek().is_some() {
        let rows = some.map(|rule| vec![rule.name.clone(), rule.peers.join(",")]);
        table(&mut out, width, &[("RULE", Name), ("ONLY FOR PEERS", Text)], rows);
    }
    let mut some = status.rules.iter().filter(|rule| !rule.process.is_empty()).peekable();
    if some.peek().is_some() {
        let whose = |rule: &RuleStatus| {
            let missing = if rule.missing { ", which is not there" } else { "" };
            format!("{}{missing}", rule.process)
        };
        let rows = some.map(|rule| vec![rule.name.clone(), whose(rule)]);
        table(&mut out, width, &[("RULE", Name), ("ONLY FOR", Text)], rows);
    }
    let counted = status.outcomes.iter().filter(|(_, count)| **count > 0);
    let counted: Vec<_> = counted.map(|(outcome, count)| vec![outcome.clone(), count.to_string()]).collect();
    if !counted.is_empty() {
        table(&mut out, width, &[("OUTCOME", Whole), ("COUNT", Whole)], counted.into_iter());
    }
    if !status.peers.is_empty() {
        peers(&mut out, &status.peers, width);
    }
    if let Some(carry) = &status.carry {
        millrace_graft_tunnel::text::status(&mut out, carry, width);
    }
    if let Some(selection) = &status.selection {
        select_text::status(&mut out, selection, width);
    }
    purposes(&mut out, status, width);
    out
}

/// Writes the peers with agreements, and which protocols and packet sizes pass on the paths to them.
fn peers(out: &mut String, peers: &[GraftPeerStatus], width: usize) {
    const WHO: [(&str, Fit); 5] =
        [("PEER", Name), ("STATE", Whole), ("FOR", Whole), ("KERNEL", Name), ("RULES", Text)];
    const PATH: [(&str, Fit); 6] = [
        ("PEER", Name),
        ("OPTIONS", Whole),
        ("UDP", Whole),
        ("MTU", Whole),
        ("NAT", Whole),
        ("DOWNGRADES", Whole),
    ];
    let rows = peers.iter().map(|peer| {
        vec![
            peer.name.clone(),
            peer.state.clone(),
            span(peer.age_s),
            peer.host.as_ref().map_or("-".to_owned(), |host| host.kernel.clone()),
            if peer.rules.is_empty() { "-".to_owned() } else { peer.rules.join(",") },
        ]
    });
    table(out, width, &WHO, rows);
    for peer in peers.iter().filter(|peer| !peer.detail.is_empty()) {
        line(out, width, &format!("{}: {}", peer.name, peer.detail));
    }
    let rows = peers.iter().filter(|peer| peer.path_age_s.is_some()).map(|peer| {
        vec![
            peer.name.clone(),
            whether(peer.path.options),
            whether(peer.path.udp),
            peer.path.mtu.map_or("-".to_owned(), |bytes| bytes.to_string()),
            peer.path.nat.map_or("-", nat).to_owned(),
            peer.downgrades.to_string(),
        ]
    });
    let rows: Vec<_> = rows.collect();
    if !rows.is_empty() {
        table(out, width, &PATH, rows.into_iter());
    }
}

fn whether(passes: Option<bool>) -> String {
    match passes {
        Some(true) => "passes",
        Some(false) => "no",
        None => "-",
    }
    .to_owned()
}

fn nat(nat: NatReport) -> &'static str {
    match nat {
        NatReport::None => "none",
        NatReport::Ours => "here",
        NatReport::Theirs => "there",
        NatReport::Both => "both",
    }
}

/// Describes paths in several tables, since addresses are too wide for one table with all columns.
pub fn paths(paths: &[PeerPath], width: usize) -> String {
    const WHO: [(&str, Fit); 5] =
        [("PEER", Whole), ("CLASS", Name), ("CONNS", Whole), ("REORDERING", Whole), ("IDLE", Whole)];
    const HOW: [(&str, Fit); 6] = [
        ("PEER", Whole),
        ("MIN ms", Whole),
        ("RTT ms", Whole),
        ("VAR ms", Whole),
        ("LOSS %", Whole),
        ("BYTES/s", Whole),
    ];
    const PROBED: [(&str, Fit); 5] =
        [("PROBED", Whole), ("MIN ms", Whole), ("RTT ms", Whole), ("LOSS %", Whole), ("AGE", Whole)];
    let mut out = String::new();
    let who = paths.iter().map(|path| {
        vec![
            path.peer.to_string(),
            path.class.clone(),
            path.connections.to_string(),
            path.reordering.to_string(),
            if path.idle_s == 0 { "-".to_owned() } else { span(path.idle_s as f64) },
        ]
    });
    table(&mut out, width, &WHO, who);
    let ms = |us: u32| format!("{:.1}", f64::from(us) / 1e3);
    let how = paths.iter().map(|path| {
        vec![
            path.peer.to_string(),
            ms(path.rtt_min_us),
            ms(path.rtt_us),
            ms(path.rtt_variation_us),
            format!("{:.2}", path.loss_percent()),
            path.delivery_rate.map_or("-".to_owned(), bytes),
        ]
    });
    table(&mut out, width, &HOW, how);
    let probed: Vec<_> = paths.iter().filter_map(|path| Some((path, path.probed.as_ref()?))).collect();
    if probed.is_empty() {
        return out;
    }
    let lines = probed.iter().map(|(path, probed)| {
        vec![
            path.peer.to_string(),
            ms(probed.rtt_min_us),
            ms(probed.rtt_us),
            format!("{:.2}", probed.loss_percent),
            span(probed.age_s as f64),
        ]
    });
    table(&mut out, width, &PROBED, lines);
    out
}

/// Describes the latest reports on one path, the newest last.
pub fn probed(probed: &ProbeStatus, width: usize) -> String {
    const HEAD: [(&str, Fit); 8] = [
        ("MIN ms", Whole),
        ("RTT ms", Whole),
        ("P95 ms", Whole),
        ("VAR ms", Whole),
        ("LOST", Whole),
        ("BURSTS", Whole),
        ("QUEUE ms/s", Whole),
        ("REORDERED", Whole),
    ];
    let mut out = String::new();
    let class = if probed.class.is_empty() { "nothing came back" } else { &probed.class };
    line(&mut out, width, &format!("{} by {}: {class}", probed.target.peer, probed.target.protocol_name()));
    if let Some(error) = &probed.error {
        line(&mut out, width, &format!("the latest probe failed: {error}"));
    }
    let ms = |us: u32| format!("{:.1}", f64::from(us) / 1e3);
    let rows = probed.history.iter().map(|ProbeRecord { report, .. }| {
        vec![
            ms(report.rtt_min_us),
            ms(report.rtt_us),
            ms(report.rtt_p95_us),
            ms(report.rtt_variation_us),
            format!("{} of {}", report.lost(), report.sent),
            if report.lost() == 0 { "-".to_owned() } else { format!("{:.1}", report.burstiness) },
            format!("{:.2}", report.queue_growth_us_s / 1e3),
            report.reordered.to_string(),
        ]
    });
    table(&mut out, width, &HEAD, rows);
    out
}

/// Largest number of traffic classes that the text of a status shows. The JSON output has all of them.
const KINDS_SHOWN: usize = 20;

fn purposes(out: &mut String, status: &status::Status, width: usize) {
    const KINDS: [(&str, Fit); 6] = [
        ("SIDE", Whole),
        ("PORT", Whole),
        ("COMMAND", Name),
        ("IS FOR", Whole),
        ("KiB", Whole),
        ("SINCE", Text),
    ];
    let shown = status.purposes.iter().take(KINDS_SHOWN);
    let rows: Vec<_> = shown
        .map(|it| {
            vec![
                it.side.clone(),
                it.port.to_string(),
                if it.command.is_empty() { "-".to_owned() } else { it.command.clone() },
                it.profile.clone(),
                it.size_kib.map_or("-".to_owned(), |kib| kib.to_string()),
                format!("{}: {}", it.source, it.why),
            ]
        })
        .collect();
    if !rows.is_empty() {
        table(out, width, &KINDS, rows.into_iter());
    }
}

/// Returns the text of a report on one peer, in lines of at most `width` columns.
pub fn explanation_text(
    PeerReport { in_place: why, sessions, unknown }: &PeerReport,
    width: usize,
) -> String {
    let mut out = String::new();
    unknown.iter().for_each(|unknown| line(&mut out, width, &format!("not complete: {unknown}")));
    for it in sessions {
        let keys = if it.sealed != "clear" && !it.has_keys { ", without keys yet" } else { "" };
        let why = it.changed.iter().filter_map(|change| change.why.as_ref());
        let why = why.map(|why| format!(", by its rule, as {why}")).collect::<String>();
        let of = format!("{} to {}: graft {}{keys}{why}", it.local, it.remote, it.graft);
        line(&mut out, width, &format!("session {}, {of}", it.name));
    }
    if why.peer.is_empty() {
        return out;
    }
    let tier = why.carrier.as_ref().map(millrace_graft_tunnel::text::tier);
    line(&mut out, width, &format!("{}: {}", why.peer, tier.as_ref().unwrap_or(&why.reason)));
    let mut line = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            line(&mut out, width, &format!("  {name}: {value}"));
        }
    };
    line("in place", tier.and(why.outcome.as_ref()).map(|_| why.reason.clone()));
    line("outcome", why.outcome.clone());
    line("rule", why.rule.clone());
    line("its graft", why.peer_graft.clone());
    line("agreed", why.outcome.is_some().then(|| format!("{} times", why.agreed)));
    line("latest connection", why.age_s.map(|age| format!("{} ago", span(age))));
    if let Some(peer) = &why.agreement {
        let detail = if peer.detail.is_empty() { String::new() } else { format!(": {}", peer.detail) };
        let name = &peer.name;
        let state = &peer.state;
        let age = span(peer.age_s);
        line("agreement", Some(format!("{name}, {state} for {age}{detail}")));
        let path = &peer.path;
        let mtu = path.mtu.map_or("-".to_owned(), |bytes| bytes.to_string());
        let age = peer.path_age_s.map_or("never".to_owned(), |age| format!("{} ago", span(age)));
        line(
            "lets through",
            Some(format!(
                "options {}, UDP {}, packets of {mtu} bytes, NAT {}, looked at {age}",
                whether(path.options),
                whether(path.udp),
                path.nat.map_or("-", nat),
            )),
        );
        for it in &peer.latest_downgrades {
            let what =
                format!("option {} on a connection to port {}, {} ago", it.kind, it.port, span(it.age_s));
            line("downgrade", Some(what));
        }
    }
    for chosen in &why.chosen {
        select_text::chosen(chosen, &mut |name, value| line(name, Some(value)));
    }
    for it in &why.purposes {
        line("profile", Some(format!("of rule {}: {it}", it.rule)));
    }
    let path = why.path.as_ref();
    line(
        "path",
        path.map(|path| {
            format!(
                "{}, {:.1} ms, {:.2} % lost",
                path.class,
                f64::from(path.rtt_min_us) / 1e3,
                path.loss_percent()
            )
        }),
    );
    out
}

/// Describes which graft a learned model would choose for a connection, and the decisions that lead to this choice.
pub fn what_if(features: &Features, decision: &ModelDecision<'_>, width: usize) -> String {
    let mut out = String::new();
    let leaf = decision.leaf;
    let known = features.to_string();
    let chosen = decision.rank.map_or_else(
        || "nothing that can be had".to_owned(),
        |rank| {
            let right = rank.right * 100.0;
            let utility = rank.utility * 100.0;
            format!(
                "{}: right for {right:.0} % of the {:.0} cases like this, and {utility:.0} % of what the best of each gives",
                rank.candidate, leaf.examples
            )
        },
    );
    line(&mut out, width, &chosen);
    line(&mut out, width, &format!("  known: {known}"));
    for word in &decision.words {
        line(&mut out, width, &format!("  {word}"));
    }
    line(&mut out, width, &format!("  leaf {}", leaf.number));
    out
}

/// Returns a table of the grafts in a pool, in lines of at most `width` columns.
pub fn pool(pool: &GraftPool, width: usize) -> String {
    const HEAD: [(&str, Fit); 5] =
        [("GRAFT", Name), ("IN TCP", Name), ("IDENTITY", Whole), ("FROM", Name), ("ABOUT", Text)];
    let mut out = String::new();
    let rows = pool.iter().map(|graft| {
        let source = match &graft.source {
            PoolSource::Shipped => "shipped".to_owned(),
            PoolSource::File(path) => path.display().to_string(),
        };
        let identity = graft.identity.to_string().chars().take(12).collect();
        vec![
            graft.manifest.name.clone(),
            graft.congestion.clone(),
            identity,
            source,
            graft.manifest.about.clone(),
        ]
    });
    table(&mut out, width, &HEAD, rows);
    for (path, message) in &pool.unusable {
        line(&mut out, width, &format!("NOT USABLE: {path}: {message}"));
    }
    out
}

/// Returns the text that `check` prints for a graft that this host can use.
pub fn checked(graft: &PoolGraft, kernel: Option<f64>) -> String {
    let mut out = format!(
        "{}: usable\n  in TCP: {}\n  identity: {}\n",
        graft.manifest.name, graft.congestion, graft.identity
    );
    for (name, value) in &graft.defaults {
        match graft.manifest.parameters.get(name) {
            Some(known) => {
                let _ =
                    writeln!(out, "  {name}: {value}, from {} to {}: {}", known.min, known.max, known.about);
            }
            None => {
                let _ = writeln!(out, "  {name}: {value}");
            }
        }
    }
    let _ = match kernel {
        Some(ms) => writeln!(out, "  this kernel takes it, in {ms:.1} ms"),
        None => writeln!(out, "  this kernel was not asked: that needs root"),
    };
    out
}

#[cfg(test)]
mod tests {
    use millrace_graft::{
        paths::ProbedPackets as ByProbe,
        status::{CarrierStatus, CarryStatus, Downgraded, HostOffer, LoadedStatus, PathVerdict, RuleStatus},
    };
    use millrace_testkit::golden::assert_as_reviewed;

    use super::*;

    fn carried(name: &str) -> CarryStatus {
        let carrier = CarrierStatus {
            peer: name.to_owned(),
            state: "suspect".into(),
            detail: "nothing comes back, and that for a time that is longer than three round trips".into(),
            age_s: 86_399.0,
            rtt_us: 1_234_567,
            sent_packets: 3,
            lost_packets: 1,
            sent_bytes: u64::MAX / 2,
            connections: 60_000,
            ..CarrierStatus::default()
        };
        CarryStatus {
            verdicts: [("bound-device".into(), 123_456_789)].into(),
            carriers: vec![carrier],
            connections: 60_000,
            connections_max: 60_000,
            ended: [("unknown-caller".into(), 123_456_789)].into(),
            resumed: 123_456,
            sent_bytes: u64::MAX,
            received_bytes: u64::MAX,
            kept_bytes: u64::MAX,
            ..CarryStatus::default()
        }
    }

    #[test]
    fn status_tables_fit_80_columns() {
        let name = "a-name-of-sixty-characters-that-somebody-has-really-given-it";
        let peer: std::net::IpAddr = "2001:db8:85a3:1234:5678:9abc:def0:1234".parse().unwrap();
        let loaded = LoadedStatus {
            name: name.into(),
            congestion: "millrace_westwood".into(),
            identity: "0123456789abcdef".into(),
            parameters: [("rtt_reference_us".into(), 25_000), ("window_maximum".into(), 1_000_000)].into(),
            connections: 123_456,
            load_us: 12_345_678,
            ..LoadedStatus::default()
        };
        let rule = RuleStatus {
            name: name.into(),
            side: "client".into(),
            ports: vec!["443".into(), "8000-8100".into(), "9000-9999".into()],
            peers: vec![format!("{peer}/128"), "203.0.113.0/24".into()],
            congestion: Some("millrace_westwood".into()),
            ..RuleStatus::default()
        };
        let host = HostOffer {
            program: "0.1.0".into(),
            kernel: "6.12.48+deb13-cloud-amd64".into(),
            abi: 1,
            cpus: 2,
            memory_mib: 4096,
        };
        let with = GraftPeerStatus {
            name: name.into(),
            state: "untrusted".into(),
            detail: "the peer's key is not the one that the settings name, and this goes on and on".into(),
            age_s: 86_399.0,
            address: Some(peer),
            host: Some(host),
            rules: vec![name.into(), "another".into()],
            path: PathVerdict {
                options: Some(false),
                udp: Some(true),
                mtu: Some(1500),
                nat: Some(NatReport::Theirs),
            },
            path_age_s: Some(12.0),
            downgrades: 12_345,
            latest_downgrades: vec![Downgraded { kind: "stripped".into(), port: 65_535, age_s: 59.0 }],
            ..GraftPeerStatus::default()
        };
        let because = status::PeerExplanation {
            peer: peer.to_string(),
            reason: "both sides have agreed".into(),
            agreement: Some(with.clone()),
            ..status::PeerExplanation::default()
        };
        let because = PeerReport { in_place: because, ..PeerReport::default() };
        let now = status::Status {
            cgroup: format!("/sys/fs/cgroup/{name}/{name}"),
            trouble: vec![format!("the graft {name} was not taken back by whoever had it before this one")],
            loaded: vec![loaded],
            rules: vec![rule],
            outcomes: [("agreed".into(), u64::MAX)].into(),
            log_lines_dropped: 3,
            peers: vec![with],
            carry: Some(carried(name)),
            ..status::Status::default()
        };
        let now = control::Status { in_place: now, ..control::Status::default() };
        let path = PeerPath {
            peer,
            class: "terrestrial".into(),
            connections: 12_345,
            rtt_min_us: 1_234_567,
            rtt_us: 1_234_567,
            rtt_variation_us: 123_456,
            delivery_rate: Some(123_456_789),
            delivered: 1,
            lost: 1,
            reordering: 300,
            idle_s: 86_399,
            probed: Some(ByProbe {
                rtt_min_us: 1_234_567,
                rtt_us: 1_234_567,
                loss_percent: 100.0,
                ..ByProbe::default()
            }),
        };
        for (text, what) in [
            (status(&now, 80), "graft-status"),
            (paths(&[path], 80), "graft-monitor"),
            (explanation_text(&because, 80), "graft-why"),
        ] {
            assert_as_reviewed(env!("CARGO_MANIFEST_DIR"), what, &text);
            for line in text.lines() {
                assert!(line.chars().count() <= 80, "{} wide: {line}\n{text}", line.chars().count());
            }
        }
        assert!(status(&now, 80).contains(&u64::MAX.to_string()));
        assert!(status(&now, 80).contains("\n3 log lines lost\n"));
        assert!(status(&now, 80).contains(&format!("{peer}/128")), "addresses are whole");
    }
}
