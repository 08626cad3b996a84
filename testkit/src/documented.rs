//! Checks that the tables in the documentation list all counters.

use std::collections::BTreeSet;

/// Text of the guide to `millrace cost`.
pub const COST: &str = include_str!("../../docs/guide/cost.md");
/// Text of the guide to fan-out, the forwarding of RTP by the kernel.
pub const FANOUT: &str = include_str!("../../docs/guide/fanout.md");
/// Text of the guide for operators.
pub const OPERATIONS: &str = include_str!("../../docs/guide/operations.md");
/// Text of the generated list of all metrics.
pub const METRICS: &str = include_str!("../../docs/reference/metrics.md");
/// Text of the generated list of outcomes, verdicts and reasons.
pub const REASONS: &str = include_str!("../../docs/reference/reasons.md");

/// Returns the first cell of each row of all tables under this heading.
fn named<'a>(document: &'a str, heading: &str) -> BTreeSet<&'a str> {
    let mut lines = document.lines();
    let mut names = BTreeSet::new();
    // A document may have several tables with this heading. `by_ref` keeps the position, so each search continues
    // behind the previous table.
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

/// Asserts that every name has a row in the tables under this heading.
#[track_caller]
pub fn assert_named<'a>(document: &str, heading: &str, names: impl IntoIterator<Item = &'a str>) {
    let known = named(document, heading);
    let missing: Vec<_> = names.into_iter().filter(|name| !known.contains(name)).collect();
    assert!(missing.is_empty(), "the table of {heading} has no line for {missing:?}");
}

/// Asserts that every metric family of a scrape has a row in the generated list of metrics.
#[track_caller]
pub fn assert_families_named(prefix: &str, scrape: &str) {
    let known = named(METRICS, "metric");
    let families = scrape.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    // In OpenMetrics, the `# TYPE` line of a counter omits the suffix that the counter's samples have.
    let families = families.map(|(name, kind)| match kind {
        "counter" => format!("{name}_total"),
        _ => name.to_owned(),
    });
    let mut mine = families.filter(|name| name.starts_with(prefix)).peekable();
    // With a wrong prefix or an empty scrape no family would be missing, and the check below would pass.
    assert!(mine.peek().is_some(), "no family of {prefix} in\n{scrape}");
    let missing: Vec<_> = mine.filter(|name| !known.contains(name.as_str())).collect();
    assert!(
        missing.is_empty(),
        "docs/reference/metrics.md has no line for {missing:?}: run scripts/reference.py"
    );
}

#[test]
fn undocumented_name_is_reported() {
    let document = "| event | what |\n| --- | --- |\n| `a`, `b{c}` | `d` |\n\n| event |\n| --- |\n| `e` |\n";
    assert_eq!(named(document, "event"), ["a", "b{c}", "e"].into());
    let missing = std::panic::catch_unwind(|| assert_named(document, "event", ["a", "d"]));
    assert!(missing.is_err());
}
