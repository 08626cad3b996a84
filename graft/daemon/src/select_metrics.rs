//! Metrics of what is chosen.

use std::{collections::BTreeMap, fmt};

use millrace_daemon::openmetrics::Out;
use millrace_graft::status::Selection;
use prometheus_client::registry::Unit;

pub fn encode(selection: &Selection, out: &mut Out<'_>) -> fmt::Result {
    let help = "Connections that a rule with select fits, by what they got";
    out.counters("selected_connections", help, by_arm(&selection.connections))?;
    out.gauges("selected_connections_now", "Those that live", by_arm(&selection.live))?;
    out.counts("selected_reasons", "Why they got it", "why", &selection.reasons)?;
    out.counts("selected_outcomes", "How they went", "outcome", &selection.outcomes)?;
    out.counter("selected_forgotten", "Those that were lost sight of", None, selection.forgotten)?;
    out.gauge("selected_paths", "Paths with a choice", None, selection.chosen)?;
    out.gauge(
        "selected_gain_paths",
        "Of which it is known what plain TCP would do",
        None,
        selection.gain_paths,
    )?;
    if let Some(gain) = selection.gain {
        let help = "How many times as long plain TCP takes on those";
        out.gauge_f64("selected_gain", help, Unit::Other("ratio".to_owned()), gain)?;
    }
    Ok(())
}

fn by_arm(counts: &BTreeMap<String, u64>) -> impl Iterator<Item = ([(&str, &str); 2], u64)> {
    counts.iter().map(|(name, count)| {
        let (tier, arm) = name.split_once('/').unwrap_or(("", name));
        ([("tier", tier), ("arm", arm)], *count)
    })
}

#[cfg(test)]
mod tests {
    use millrace_graft::status::Status;

    use super::*;

    const DOCUMENTED: &str = include_str!("../../../docs/selection.md");

    #[test]
    fn names_follow_the_documentation() {
        let one = |name: &str, count| [(name.to_owned(), count)].into();
        let selection = Selection {
            chosen: 1,
            live: one("in-place/bbr", 2),
            connections: one("carried/carried-warm", 3),
            reasons: one("explored", 4),
            outcomes: one("bad", 5),
            forgotten: 6,
            gain_paths: 7,
            gain: Some(2.5),
            ..Selection::default()
        };
        let status = Status { selection: Some(selection), ..Status::default() };
        let text = crate::metrics::encode(status, Vec::new()).unwrap();
        for line in [
            r#"millrace_graft_selected_connections_total{tier="carried",arm="carried-warm"} 3"#,
            r#"millrace_graft_selected_connections_now{tier="in-place",arm="bbr"} 2"#,
            r#"millrace_graft_selected_reasons_total{why="explored"} 4"#,
            r#"millrace_graft_selected_outcomes_total{outcome="bad"} 5"#,
            "millrace_graft_selected_forgotten_total 6",
            "millrace_graft_selected_paths 1",
            "millrace_graft_selected_gain_paths 7",
            "millrace_graft_selected_gain_ratio 2.5",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(DOCUMENTED.contains(name), "{name} is not in docs/selection.md");
        }
        for why in ["learned", "explored", "doubted", "found", "first", "fallback", "rule"] {
            assert!(DOCUMENTED.contains(&format!("| `{why}` |")), "{why}");
        }
    }
}
