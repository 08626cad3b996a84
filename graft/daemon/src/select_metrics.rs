//! Metrics about the choice of congestion controls for connections.

use std::{collections::BTreeMap, fmt};

use millrace_daemon::openmetrics::Out;
use millrace_graft::status::SelectionStatus;
use prometheus_client::registry::Unit;

pub fn encode(selection: &SelectionStatus, out: &mut Out<'_>) -> fmt::Result {
    let help = "Connections of rules with select, by tier and candidate";
    out.counters("selected_connections", help, label_by_candidate(&selection.connections))?;
    out.gauges(
        "selected_connections_now",
        "Live connections of rules with select, by tier and candidate",
        label_by_candidate(&selection.live),
    )?;
    out.counts(
        "selected_reasons",
        "Connections of rules with select, by the reason for the choice",
        "why",
        &selection.reasons,
    )?;
    out.counts(
        "selected_outcomes",
        "Ended connections of rules with select: good, bad, not-judged",
        "outcome",
        &selection.outcomes,
    )?;
    out.counter(
        "selected_forgotten",
        "Connections without an outcome: more than 16384 at once, or their end was not reported",
        None,
        selection.forgotten,
    )?;
    out.gauge("selected_paths", "Paths for which a congestion control was chosen", None, selection.chosen)?;
    out.gauge(
        "selected_gain_paths",
        "Paths on which the time of plain TCP is known",
        None,
        selection.gain_paths,
    )?;
    if let Some(gain) = selection.gain {
        let help = "Time of plain TCP as a multiple of the chosen candidate's, geometric mean over the compared paths";
        out.gauge_f64("selected_gain", help, Unit::Other("ratio".to_owned()), gain)?;
    }
    Ok(())
}

fn label_by_candidate(counts: &BTreeMap<String, u64>) -> impl Iterator<Item = ([(&str, &str); 2], u64)> {
    counts.iter().map(|(name, count)| {
        let (tier, candidate) = name.split_once('/').unwrap_or(("", name));
        ([("tier", tier), ("candidate", candidate)], *count)
    })
}

#[cfg(test)]
mod tests {
    use millrace_graft::status::Status;

    use super::*;

    const DOCUMENTED: &str = include_str!("../../../docs/guide/selection.md");
    const METRICS: &str = include_str!("../../../docs/reference/metrics.md");

    #[test]
    fn metric_names_follow_the_documentation() {
        let one = |name: &str, count| [(name.to_owned(), count)].into();
        let selection = SelectionStatus {
            chosen: 1,
            live: one("in-place/bbr", 2),
            connections: one("carried/carried-warm", 3),
            reasons: one("explored", 4),
            outcomes: one("bad", 5),
            forgotten: 6,
            gain_paths: 7,
            gain: Some(2.5),
            ..SelectionStatus::default()
        };
        let status = Status { selection: Some(selection), ..Status::default() };
        let text = crate::metrics::encode(status).unwrap();
        for line in [
            r#"millrace_graft_selected_connections_total{tier="carried",candidate="carried-warm"} 3"#,
            r#"millrace_graft_selected_connections_now{tier="in-place",candidate="bbr"} 2"#,
            r#"millrace_graft_selected_reasons_total{why="explored"} 4"#,
            r#"millrace_graft_selected_outcomes_total{outcome="bad"} 5"#,
            "millrace_graft_selected_forgotten_total 6",
            "millrace_graft_selected_paths 1",
            "millrace_graft_selected_gain_paths 7",
            "millrace_graft_selected_gain_ratio 2.5",
        ] {
            assert!(text.contains(line), "{line} is not in\n{text}");
            let name = line.split(['{', ' ']).next().unwrap();
            assert!(METRICS.contains(name), "{name} is not in docs/reference/metrics.md");
        }
        for why in ["learned", "explored", "doubted", "found", "first", "fallback", "rule"] {
            assert!(DOCUMENTED.contains(&format!("| `{why}` |")), "{why}");
        }
    }
}
