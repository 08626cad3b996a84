//! What the commands print.

use std::fmt::Write as _;

use millrace_graft::{
    Graft, Pool, Source,
    status::{Path, Status, Why},
};

use crate::render::{bytes, span, table};

pub fn status(status: &Status) -> String {
    let mut out = String::new();
    let _ = writeln!(out, "up {}, cgroup {}", span(status.uptime_s), status.cgroup);
    for trouble in &status.trouble {
        let _ = writeln!(out, "TROUBLE: {trouble}");
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
    table(&mut out, &["GRAFT", "IN TCP", "IDENTITY", "CONNECTIONS", "LOADED IN, ms", "PARAMETERS"], rows);
    let rows = status.rules.iter().map(|rule| {
        vec![
            rule.name.clone(),
            rule.side.clone(),
            rule.ports.join(","),
            rule.peers.join(","),
            if rule.agree { "yes" } else { "no" }.to_owned(),
            rule.congestion.clone().unwrap_or("-".to_owned()),
        ]
    });
    table(&mut out, &["RULE", "SIDE", "PORTS", "PEERS", "AGREES", "CONGESTION"], rows);
    let counted = status.outcomes.iter().filter(|(_, count)| **count > 0);
    let counted: Vec<_> = counted.map(|(outcome, count)| vec![outcome.clone(), count.to_string()]).collect();
    if !counted.is_empty() {
        table(&mut out, &["OUTCOME", "COUNT"], counted.into_iter());
    }
    out
}

pub fn paths(paths: &[Path]) -> String {
    let mut out = String::new();
    let ms = |us: u32| format!("{:.1}", f64::from(us) / 1e3);
    let rows = paths.iter().map(|path| {
        vec![
            path.peer.to_string(),
            path.class.clone(),
            path.connections.to_string(),
            ms(path.rtt_min_us),
            ms(path.rtt_us),
            ms(path.rtt_variation_us),
            format!("{:.2}", path.loss_percent()),
            path.delivery_rate.map_or("-".to_owned(), bytes),
            path.reordering.to_string(),
            if path.idle_s == 0 { "-".to_owned() } else { span(path.idle_s as f64) },
        ]
    });
    let head = [
        "PEER",
        "CLASS",
        "CONNECTIONS",
        "RTT MIN, ms",
        "RTT",
        "VARIATION",
        "LOSS %",
        "BYTES/s",
        "REORDERING",
        "IDLE",
    ];
    table(&mut out, &head, rows);
    out
}

pub fn why(why: &Why) -> String {
    let mut out = format!("{}: {}\n", why.peer, why.reason);
    let mut line = |name: &str, value: Option<String>| {
        if let Some(value) = value {
            let _ = writeln!(out, "  {name}: {value}");
        }
    };
    line("outcome", why.outcome.clone());
    line("rule", why.rule.clone());
    line("its graft", why.peer_graft.clone());
    line("agreed", why.outcome.is_some().then(|| format!("{} times", why.agreed)));
    line("latest connection", why.age_s.map(|age| format!("{} ago", span(age))));
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

pub fn pool(pool: &Pool) -> String {
    let mut out = String::new();
    let rows = pool.iter().map(|graft| {
        let source = match &graft.source {
            Source::Shipped => "shipped".to_owned(),
            Source::File(path) => path.display().to_string(),
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
    table(&mut out, &["GRAFT", "IN TCP", "IDENTITY", "FROM", "ABOUT"], rows);
    for (path, message) in &pool.unusable {
        let _ = writeln!(out, "NOT USABLE: {path}: {message}");
    }
    out
}

/// What `check` says of one that is usable.
pub fn checked(graft: &Graft, kernel: Option<f64>) -> String {
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
