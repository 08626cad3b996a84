//! What the documentation's tables have to name: every counter, so that one without a line is noticed.

use std::collections::BTreeSet;

use millrace_bpf::relay::{EgressOutcome, FrameOutcome, FurtherRun, Opening, Outcome};
use millrace_gate::{Event, Pass, Rule};

const COST: &str = include_str!("../../docs/cost.md");
const FANOUT: &str = include_str!("../../docs/fanout.md");
const GATE: &str = include_str!("../../docs/gate.md");
const OPERATIONS: &str = include_str!("../../docs/operations.md");

/// Names in the first cells of all tables with such a heading.
fn named<'a>(document: &'a str, heading: &str) -> BTreeSet<&'a str> {
    let mut lines = document.lines();
    let mut names = BTreeSet::new();
    while lines.by_ref().any(|line| first_cell(line) == Some(heading)) {
        let rows = lines.by_ref().map_while(first_cell);
        names.extend(rows.flat_map(|cell| cell.split('`').skip(1).step_by(2)));
    }
    assert!(!names.is_empty(), "there is no table of {heading}");
    names
}

fn first_cell(line: &str) -> Option<&str> {
    Some(line.strip_prefix("| ")?.split(" |").next()?.trim())
}

#[track_caller]
fn assert_named<'a>(document: &str, heading: &str, names: impl IntoIterator<Item = &'a str>) {
    let known = named(document, heading);
    let missing: Vec<_> = names.into_iter().filter(|name| !known.contains(name)).collect();
    assert!(missing.is_empty(), "the table of {heading} has no line for {missing:?}");
}

/// Every family of a scrape has a line, by its whole name or, behind another one, by its end (`_sent_bytes_total`).
#[track_caller]
pub(crate) fn assert_families_named(prefix: &str, scrape: &str) {
    let document = match prefix {
        "millrace_cost" => COST,
        "millrace_fanout" => FANOUT,
        "millrace_gate" => GATE,
        _ => OPERATIONS,
    };
    let known: BTreeSet<String> = named(document, "metric")
        .into_iter()
        .map(|name| name.split('{').next().unwrap_or(name))
        .map(|name| if name.starts_with('_') { format!("{prefix}{name}") } else { name.to_owned() })
        .collect();
    let families = scrape.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    let families = families.map(|(name, kind)| match kind {
        "counter" => format!("{name}_total"),
        _ => name.to_owned(),
    });
    let mut mine = families.filter(|name| name.starts_with(prefix)).peekable();
    assert!(mine.peek().is_some(), "no family of {prefix} in\n{scrape}");
    let missing: Vec<_> = mine.filter(|name| !known.contains(name)).collect();
    assert!(missing.is_empty(), "the table of metrics has no line for {missing:?}");
}

#[test]
fn verdicts_and_events_of_the_gate() {
    assert_named(GATE, "rule", Rule::ALL.map(Rule::name));
    assert_named(GATE, "passed", Pass::ALL.map(Pass::name));
    assert_named(GATE, "event", Event::ALL.map(Event::name));
}

#[test]
fn outcomes_of_the_kernel_engine() {
    assert_named(OPERATIONS, "received", Outcome::ALL.map(Outcome::name));
    assert_named(OPERATIONS, "frames", FrameOutcome::ALL.map(FrameOutcome::name));
    assert_named(OPERATIONS, "openings", Opening::ALL.map(Opening::name));
    assert_named(OPERATIONS, "further runs", FurtherRun::ALL.map(FurtherRun::name));
    let copies = EgressOutcome::ALL.map(EgressOutcome::name);
    assert_named(OPERATIONS, "copies", copies.into_iter().chain(["not_arriving", "client_share"]));
}

#[test]
fn outcomes_of_the_fan_out() {
    use crate::fanout::EVENTS;
    use millrace_bpf::fanout::{FurtherRun, LegOutcome, Outcome};
    assert_named(FANOUT, "packet", Outcome::ALL.map(Outcome::name));
    assert_named(FANOUT, "copy", LegOutcome::ALL.map(LegOutcome::name));
    assert_named(FANOUT, "further run", FurtherRun::ALL.map(FurtherRun::name));
    assert_named(FANOUT, "event", EVENTS);
}

#[test]
fn events_and_losses_of_the_observer() {
    use millrace_cost::report::{Event, Lost};
    assert_named(COST, "event", Event::ALL.map(Event::name));
    let lost = serde_json::to_value(Lost::default()).expect("JSON");
    let lost = lost.as_object().expect("an object");
    assert_named(COST, "lost", lost.keys().map(String::as_str));
}

#[test]
fn a_name_without_a_line_is_noticed() {
    let document = "| event | what |\n| --- | --- |\n| `a`, `b{c}` | `d` |\n\n| event |\n| --- |\n| `e` |\n";
    assert_eq!(named(document, "event"), ["a", "b{c}", "e"].into());
    let missing = std::panic::catch_unwind(|| assert_named(document, "event", ["a", "d"]));
    assert!(missing.is_err());
}
