//! Checks that the observer reports each kernel context by its name while a traffic load runs networking in it.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use millrace_cost::report::{Event, Report};
use millrace_cost::{Config, Observer};

use super::contexts::parts_of;
use super::loads::{ALL, CostLoad};

/// The names of kernel contexts (such as NET_RX) and network stack layers that the observer reported for a load.
#[derive(Debug)]
pub enum ContextNames {
    /// The observer has reported all names that the load must show.
    Complete,
    /// The observer has not reported all names within the allowed time.
    Incomplete {
        /// Names that are missing.
        absent: Vec<String>,
        /// Names in the last report, each with its percentage of one CPU.
        last: String,
    },
    /// The load did not run, since this machine has not what it needs, such as a program. The text says what.
    Missing(String),
}

/// Time that a report covers.
const PERIOD: Duration = Duration::from_millis(200);
/// Samples per second. Layers that take little time are seen sooner with more samples.
const SAMPLES_HZ: u32 = 2000;

/// Runs each load of `millrace-lab bench cost --scenarios`, one after the other, until the observer has reported all
/// names that it must show, for at most `bound` each. Needs root. Unlike the benchmark, this runs no `perf`.
///
/// Each item of the iterator is a load's name and its result. The result is an error if the load cannot be made, or the
/// observer fails.
pub fn names_by_load(bound: Duration) -> impl Iterator<Item = (&'static str, anyhow::Result<ContextNames>)> {
    ALL.iter().map(move |load| (load.name, names_of(load, bound)))
}

fn names_of(load: &CostLoad, bound: Duration) -> anyhow::Result<ContextNames> {
    if let Err(missing) = load.check() {
        return Ok(ContextNames::Missing(format!("{missing:#}")));
    }
    let mut observer = Observer::start(Config { frequency_hz: SAMPLES_HZ, ..Config::new()? })?;
    let running = load.launch()?;
    let start = Instant::now();
    let mut seen: BTreeSet<(Event, String)> = BTreeSet::new();
    loop {
        let report = observer.next(PERIOD)?;
        running.check()?;
        seen.extend(parts_of(&report).into_keys());
        let absent = load.absent(|event, part| seen.contains(&(event, part.to_owned())));
        if absent.is_empty() {
            return Ok(ContextNames::Complete);
        }
        if start.elapsed() > bound {
            return Ok(ContextNames::Incomplete { absent, last: text(&report) });
        }
    }
}

/// Returns the report's kernel contexts and network stack layers as text.
fn text(report: &Report) -> String {
    let mut text = format!("report {}:", report.sequence);
    for ((event, part), pct) in parts_of(report) {
        let _ = write!(text, " {event}: {part} {pct:.2} %;");
    }
    text
}
