//! What the documentation's tables have to name: every counter, so that one without a line is noticed.

use std::collections::BTreeSet;

pub const COST: &str = include_str!("../../docs/cost.md");
pub const FANOUT: &str = include_str!("../../docs/fanout.md");
pub const GATE: &str = include_str!("../../docs/gate.md");
pub const OPERATIONS: &str = include_str!("../../docs/operations.md");

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

/// Every name has a line in the tables with such a heading.
#[track_caller]
pub fn assert_named<'a>(document: &str, heading: &str, names: impl IntoIterator<Item = &'a str>) {
    let known = named(document, heading);
    let missing: Vec<_> = names.into_iter().filter(|name| !known.contains(name)).collect();
    assert!(missing.is_empty(), "the table of {heading} has no line for {missing:?}");
}

/// Every family of a scrape has a line, by its whole name or, behind another one, by its end (`_sent_bytes_total`).
#[track_caller]
pub fn assert_families_named(prefix: &str, scrape: &str) {
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
fn a_name_without_a_line_is_noticed() {
    let document = "| event | what |\n| --- | --- |\n| `a`, `b{c}` | `d` |\n\n| event |\n| --- |\n| `e` |\n";
    assert_eq!(named(document, "event"), ["a", "b{c}", "e"].into());
    let missing = std::panic::catch_unwind(|| assert_named(document, "event", ["a", "d"]));
    assert!(missing.is_err());
}
