//! Text that the commands print about the choice of congestion controls.

use millrace_daemon::render::{
    Fit::{self, Name, Text, Whole},
    bytes, line, span, table,
};
use millrace_graft::status::{ChosenStatus, GraftConnectionStatus, SelectionStatus};

/// Writes how many connections got each congestion control, and for which reason, and the choices for the paths with
/// the most connections.
pub fn status(out: &mut String, selection: &SelectionStatus, width: usize) {
    let gain = match selection.gain {
        Some(gain) => format!(
            "; of {} it is known that {} takes {gain:.2} times as long",
            selection.gain_paths, selection.plain
        ),
        None => String::new(),
    };
    line(out, width, &format!("chosen for {} paths{gain}", selection.chosen));
    let counts =
        [("by", &selection.connections), ("why", &selection.reasons), ("ended", &selection.outcomes)];
    let counts = counts.into_iter().flat_map(|(what, all)| all.iter().map(move |it| (what, it)));
    let rows: Vec<_> = counts
        .filter(|(_, (_, count))| **count > 0)
        .map(|(what, (name, count))| {
            let live = selection.live.get(name).filter(|_| what == "by");
            let live = live.map_or("-".to_owned(), u64::to_string);
            vec![what.to_owned(), name.clone(), count.to_string(), live]
        })
        .collect();
    if !rows.is_empty() {
        const COUNTS: [(&str, Fit); 4] =
            [("CHOSEN", Whole), ("WHAT", Text), ("COUNT", Whole), ("NOW", Whole)];
        table(out, width, &COUNTS, rows.into_iter());
    }
    const SHOWN: usize = 10;
    let rows: Vec<_> = selection
        .paths
        .iter()
        .take(SHOWN)
        .map(|it| {
            vec![
                it.peer.map_or("-".to_owned(), |peer| peer.to_string()),
                it.rule.clone(),
                it.candidate.clone(),
                it.why.clone(),
                it.connections.to_string(),
                it.gain.map_or("-".to_owned(), |gain| format!("{gain:.2}")),
            ]
        })
        .collect();
    if !rows.is_empty() {
        const PATHS: [(&str, Fit); 6] = [
            ("PATH TO", Whole),
            ("RULE", Name),
            ("CANDIDATE", Name),
            ("WHY", Whole),
            ("ENDED", Whole),
            ("GAIN", Whole),
        ];
        table(out, width, &PATHS, rows.into_iter());
    }
}

/// Calls `say` with the name and the value of each line of text that describes which congestion control the model has
/// chosen for a path.
pub fn chosen(chosen: &ChosenStatus, say: &mut impl FnMut(&'static str, String)) {
    let right = chosen.right * 100.0;
    let way = chosen.way.join("; ");
    let why = match chosen.why.as_str() {
        "learned" => String::new(),
        why => format!("{why}: {}, ", reason(why)),
    };
    say(
        "by the model",
        format!("{} for {}, {why}right for {right:.0} % of such cases: {way}", chosen.candidate, chosen.rule),
    );
    let ended = chosen.connections;
    let explored = chosen.explored;
    say("learned from", format!("{ended} connections, {explored} of them tried another choice"));
    for tried in &chosen.tried {
        let cost = tried.cost.map_or("too few to compare".to_owned(), |cost| {
            format!("{cost:.1} times what the path would allow")
        });
        let bad = format!("{} of the latest {} bad", tried.bad, tried.outcomes);
        say("outcomes", format!("{}: {bad}, {cost}", tried.candidate));
    }
}

/// Returns the explanation of the choice for one connection.
pub fn connection(it: &GraftConnectionStatus, width: usize) -> String {
    let mut out = String::new();
    let end = |end: Option<std::net::SocketAddr>| end.map_or("-".to_owned(), |end| end.to_string());
    let how = if it.tier == "carried" { "carried" } else { "in place" };
    line(&mut out, width, &format!("{}-{}: {how}, {}", end(it.local), end(it.remote), it.candidate));
    let mut say = |name: &str, value: String| line(&mut out, width, &format!("  {name}: {value}"));
    say("why", format!("{}: {}", it.why, reason(&it.why)));
    say("rule", format!("{}, at the {}'s side", it.rule, it.side));
    if let Some(carrier) = &it.carrier {
        say("carrier", carrier.clone());
    }
    say("begun", format!("{} ago", span(it.age_s)));
    if let Some(ended) = &it.ended {
        let judged = match (ended.cost, ended.is_bad) {
            (Some(cost), Some(is_bad)) => {
                let verdict = if is_bad { "bad" } else { "good" };
                format!("{verdict}, {cost:.1} times what the path would allow")
            }
            _ => "not judged".to_owned(),
        };
        let sent = bytes(ended.sent);
        let received = bytes(ended.received);
        let ms = ended.duration_ms;
        say("ended", format!("after {ms:.0} ms, {sent} sent, {received} received: {judged}"));
    }
    let gain = match it.gain {
        _ if it.candidate == it.plain => format!("none: it is plain TCP, {}", it.plain),
        Some(gain) => format!("{} takes {gain:.2} times as long on this path, by what was tried", it.plain),
        None => format!("not known: too few connections to this peer have used {}", it.plain),
    };
    say("gain", gain);
    if let Some(purpose) = &it.purpose {
        say("profile", purpose.to_string());
    }
    if let Some(choice) = &it.chosen {
        say("known", choice.known.clone());
        chosen(choice, &mut |name, value| say(name, value));
    }
    out
}

fn reason(why: &str) -> &'static str {
    match why {
        "learned" => "the model expects it to be the best on such a path",
        "explored" => "a trial, to find out whether another choice is better on this path",
        "doubted" => "the model's choice had bad outcomes on this path: plain TCP until more is known",
        "found" => "it had better outcomes on this path than the model's choice",
        "first" => "the path was not known yet, or nothing could be chosen",
        "fallback" => "it was to be tunnelled, and no carrier took it",
        "rule" => "the rule names it, and no model is asked",
        _ => "not known",
    }
}

#[cfg(test)]
mod tests {
    use millrace_graft::status::{CandidateStatus, EndedStatus, PurposeStatus};

    use super::*;

    fn path() -> ChosenStatus {
        let tried = |candidate: &str, cost| CandidateStatus {
            candidate: candidate.into(),
            outcomes: 8,
            bad: 1,
            cost,
        };
        ChosenStatus {
            rule: "web".into(),
            peer: Some("2001:db8:0:1234:5678:9abc:def0:1234".parse().unwrap()),
            candidate: "carried-warm".into(),
            why: "found".into(),
            profile: "time-and-loss".into(),
            right: 0.934,
            way: vec!["rtt is 300 ms: more than 50 ms".into(), "offer is carrier".into()],
            known: "rtt 300 ms, loss 1 %, size 64 KiB".into(),
            connections: 12_345,
            explored: 246,
            tried: vec![tried("bbr", Some(3.21)), tried("mr_longhaul", None)],
            gain: Some(2.5),
        }
    }

    #[test]
    fn transport_selection_lines_fit_the_width_and_name_their_reason() {
        let connection = GraftConnectionStatus {
            local: Some("192.0.2.1:54321".parse().unwrap()),
            remote: Some("[2001:db8::1]:443".parse().unwrap()),
            side: "client".into(),
            rule: "web".into(),
            tier: "carried".into(),
            candidate: "carried-warm".into(),
            carrier: Some("quic to 203.0.113.7:9188".into()),
            why: "explored".into(),
            age_s: 3.0,
            ended: Some(EndedStatus {
                sent: 1,
                received: 65_536,
                duration_ms: 812.4,
                cost: Some(1.2),
                is_bad: Some(false),
            }),
            gain: Some(2.5),
            plain: "cubic".into(),
            purpose: Some(PurposeStatus {
                profile: "time".into(),
                size_kib: Some(64),
                source: "port".into(),
                why: "what the port is usually for".into(),
                ..PurposeStatus::default()
            }),
            chosen: Some(path()),
        };
        let text = super::connection(&connection, 80);
        for wanted in [
            "carried, carried-warm",
            "to find out",
            "cubic takes 2.50 times as long",
            "offer is carrier",
            "profile: time, 64 KiB (port): what the port is usually for",
            "good, 1.2",
        ] {
            let said = text.split_whitespace().collect::<Vec<_>>().join(" ");
            assert!(said.contains(wanted), "{wanted}: {text}");
        }
        let unknown = GraftConnectionStatus { gain: None, chosen: None, ..connection };
        assert!(super::connection(&unknown, 80).contains("gain: not known"));
        let mut out = String::new();
        let selection = SelectionStatus {
            plain: "cubic".into(),
            chosen: 3,
            gain: Some(1.5),
            gain_paths: 1,
            live: [("in-place/bbr".to_owned(), 4)].into(),
            connections: [("in-place/bbr".to_owned(), u64::MAX)].into(),
            reasons: [("explored".to_owned(), 2)].into(),
            paths: vec![path()],
            ..SelectionStatus::default()
        };
        status(&mut out, &selection, 80);
        assert!(out.contains("in-place/bbr") && out.contains("2.50"), "{out}");
        for line in text.lines().chain(out.lines()) {
            assert!(line.chars().count() <= 80, "{} wide: {line}", line.chars().count());
        }
    }
}
