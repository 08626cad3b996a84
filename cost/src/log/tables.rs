//! Encodes and decodes the tables of a log file: lists of function names, of stacks, and of figures that could not be
//! measured. The line of the first report that needs such an item contains it. Later lines refer to the item by its
//! position in its list, which grows from line to line.

use std::hash::Hash;
use std::sync::Arc;

use parking_lot::RwLock;
use rustc_hash::FxHashMap;
use serde::{Deserialize, Serialize, de::Error as _};

use crate::report::{Event, MissingMeasurement, ProfiledStack, Report, Stacks};

/// Number of entries at which a log file's table of functions, stacks or unmeasured figures is full. The next report
/// then starts new, empty tables. A reader refuses a line that exceeds this, so its memory is bounded.
const FULL: usize = 1 << 16;
/// The text that begins the tables in a line's JSON, as its last field. No string can contain this text, since the
/// quotes in it would be escaped.
const MARK: &str = ",\"tables\":{\"anew\":";

/// The last field of a log line, `tables`, which follows the report's own fields.
#[derive(Default, Serialize, Deserialize)]
struct LineTables {
    /// True if all tables are emptied before this line, so positions count from 0 again.
    anew: bool,
    /// Names of functions that no earlier line has.
    functions: Vec<String>,
    /// Traces (stacks without their CPU and samples) that no earlier line has.
    traces: Vec<Trace>,
    /// Names and reasons of figures that could not be measured, if no earlier line has them.
    unmeasured: Vec<MissingMeasurement>,
    /// The report's sampled stacks; absent if it has none.
    stacks: Option<Vec<CountedTrace>>,
    /// The figures that this report could not measure. Each has its position in the table of unmeasured figures, and
    /// the CPU time in nanoseconds that was not measured.
    missing: Vec<(u32, Option<u64>)>,
}

/// A stack without its CPU: the kernel event, such as a softirq, in which it was sampled, the profiled process, and the
/// positions of its functions in the table of functions.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Trace(Option<Event>, Option<u32>, Vec<u32>);

/// A trace with its samples: position of the trace in the table, CPU, number of samples, and nanoseconds.
pub(crate) type CountedTrace = (u32, u32, u64, u64);

/// The positions of all table entries (functions, traces, unmeasured figures) that were written to a file so far.
#[derive(Default)]
pub(super) struct WrittenTables {
    functions: FxHashMap<String, u32>,
    traces: FxHashMap<Trace, u32>,
    unmeasured: FxHashMap<(Option<Event>, String, String), u32>,
}

/// The table entries (functions, traces, unmeasured figures) that the lines of a file have defined so far. The thread
/// that reads lines adds entries, and parsers look them up.
#[derive(Debug, Default)]
pub(crate) struct ReadTables {
    functions: RwLock<Vec<String>>,
    traces: RwLock<Vec<Trace>>,
    /// Unmeasured figures, which only the thread that reads lines looks up.
    unmeasured: RwLock<Vec<MissingMeasurement>>,
}

/// The stacks of a line, as positions in `tables`.
#[derive(Debug)]
pub(crate) struct LineStacks {
    pub tables: Arc<ReadTables>,
    pub counted: Vec<CountedTrace>,
}

/// The decoded tables of a line. The stacks still refer to names by position.
#[derive(Debug, Default)]
pub(crate) struct LineRest {
    pub stacks: Option<LineStacks>,
    pub missing: Vec<MissingMeasurement>,
}

impl WrittenTables {
    /// Encodes a report as a line of JSON, without the line break.
    pub fn line(&mut self, report: &Report) -> serde_json::Result<Vec<u8>> {
        let anew = is_any_full([self.functions.len(), self.traces.len(), self.unmeasured.len()]);
        if anew {
            *self = Self::default();
        }
        let mut line = LineTables { anew, ..LineTables::default() };
        for figure in &report.missing {
            let key = (figure.event, figure.what.clone(), figure.reason.clone());
            let at = position(&mut self.unmeasured, key, |_| {
                line.unmeasured.push(MissingMeasurement { ns: None, ..figure.clone() });
            });
            line.missing.push((at, figure.ns));
        }
        line.stacks = report.stacks.as_ref().map(|stacks| self.stacks(stacks, &mut line));
        let mut text = serde_json::to_vec(&Report { missing: Vec::new(), ..report.without_stacks() })?;
        text.pop(); // the closing brace
        let tables = serde_json::to_vec(&line)?;
        text.extend(MARK.bytes());
        text.extend(tables.get("{\"anew\":".len()..).unwrap_or_default());
        text.push(b'}');
        Ok(text)
    }

    fn stacks(&mut self, stacks: &Stacks, line: &mut LineTables) -> Vec<CountedTrace> {
        let mut number = |name: &String| {
            position(&mut self.functions, name.clone(), |name| line.functions.push(name.clone()))
        };
        let functions: Vec<u32> = stacks.functions.iter().map(&mut number).collect();
        let counted = stacks.stacks.iter().map(|stack| {
            let frames = stack.frames.iter().filter_map(|at| functions.get(*at as usize).copied());
            let trace = Trace(stack.event, stack.pid, frames.collect());
            let at = position(&mut self.traces, trace, |trace| line.traces.push(trace.clone()));
            (at, stack.cpu, stack.samples, stack.ns)
        });
        counted.collect()
    }
}

/// Reports whether any of three tables (functions, stacks, unmeasured figures) with these numbers of entries is full.
fn is_any_full(lengths: [usize; 3]) -> bool {
    lengths.into_iter().any(|length| length >= FULL)
}

/// Returns the position of an entry in a table. A new entry is added at the next position.
fn position<K: Hash + Eq>(table: &mut FxHashMap<K, u32>, key: K, add: impl FnOnce(&K)) -> u32 {
    let next = u32::try_from(table.len()).unwrap_or(u32::MAX);
    *table.entry(key).or_insert_with_key(|key| {
        add(key);
        next
    })
}

/// Removes the tables from the text of a line, which leaves the JSON of a report, and decodes them. `None` if the line
/// has no tables.
pub(super) fn cut(text: &mut Vec<u8>, tables: &mut Arc<ReadTables>) -> serde_json::Result<Option<LineRest>> {
    let Some(at) = std::str::from_utf8(text).ok().and_then(|text| text.rfind(MARK)) else { return Ok(None) };
    let mut found = text.split_off(at);
    text.push(b'}');
    let end = found.trim_ascii_end().len().saturating_sub(1); // the closing brace of the report
    found.truncate(end);
    let line: LineTables = serde_json::from_slice(found.get(",\"tables\":".len()..).unwrap_or_default())?;
    if line.anew {
        *tables = Arc::default();
    }
    let mut functions = tables.functions.write();
    let mut traces = tables.traces.write();
    let mut unmeasured = tables.unmeasured.write();
    if is_any_full([functions.len(), traces.len(), unmeasured.len()]) {
        return Err(serde_json::Error::custom("the tables are full and do not start anew"));
    }
    functions.extend(line.functions);
    traces.extend(line.traces);
    unmeasured.extend(line.unmeasured);
    // A position outside the table can only come from a damaged file. Such a figure is left out.
    let missing = |(at, ns): (u32, Option<u64>)| {
        Some(MissingMeasurement { ns, ..unmeasured.get(at as usize)?.clone() })
    };
    let missing = line.missing.into_iter().filter_map(missing).collect();
    let stacks = line.stacks.map(|counted| LineStacks { tables: Arc::clone(tables), counted });
    Ok(Some(LineRest { stacks, missing }))
}

impl ReadTables {
    /// Looks up the given stacks and their functions' names.
    pub fn resolve(&self, counted: impl IntoIterator<Item = CountedTrace>) -> Stacks {
        let names = self.functions.read();
        let traces = self.traces.read();
        let mut stacks = Stacks::default();
        let mut numbers = FxHashMap::default();
        for (at, cpu, samples, ns) in counted {
            let Some(Trace(event, pid, frames)) = traces.get(at as usize) else { continue };
            let functions = &mut stacks.functions;
            let mut number = |at: &u32| {
                let name = names.get(*at as usize)?;
                Some(position(&mut numbers, *at, |_| functions.push(name.clone())))
            };
            let frames = frames.iter().filter_map(&mut number).collect();
            stacks.stacks.push(ProfiledStack { cpu, event: *event, pid: *pid, frames, samples, ns });
        }
        stacks
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples;

    fn read(lines: &[Vec<u8>]) -> Vec<Report> {
        let mut tables = Arc::default();
        let mut read = |line: &Vec<u8>| {
            let mut text = line.clone();
            let rest = cut(&mut text, &mut tables).expect("tables").expect("a line of a log");
            let mut report: Report = serde_json::from_slice(&text).expect("a report");
            report.stacks = rest.stacks.map(|stacks| stacks.tables.resolve(stacks.counted));
            report.missing = rest.missing;
            report
        };
        lines.iter().map(&mut read).collect()
    }

    #[test]
    fn cost_log_line_defines_only_names_not_defined_before() {
        let with = |at, stacks| Report { stacks, ..samples::report(at) };
        let reports = [
            with(0, Some(samples::stacks(&[("a;b", 0, 3), ("a;c", 1, 1)]))),
            with(1, None),
            with(2, Some(samples::stacks(&[("a;c", 0, 2)]))),
            with(3, Some(samples::stacks(&[("d;b", 0, 2), ("a;b", 1, 7)]))),
        ];
        let mut tables = WrittenTables::default();
        let lines: Vec<_> = reports.iter().map(|report| tables.line(report).expect("JSON")).collect();
        assert_eq!(read(&lines), reports);
        let value: serde_json::Value = serde_json::from_slice(&lines[3]).expect("JSON");
        assert_eq!(value["tables"]["functions"], serde_json::json!(["d"]));
        assert_eq!(value["tables"]["traces"].as_array().map(Vec::len), Some(1));
        assert_eq!(value["tables"]["unmeasured"], serde_json::json!([]));
    }

    #[test]
    fn full_name_tables_of_the_cost_log_restart_at_the_next_line() {
        let functions: Vec<String> = (0..FULL).map(|at| format!("f{at}")).collect();
        let stack = ProfiledStack { cpu: 0, event: None, pid: None, frames: vec![7], samples: 1, ns: 5 };
        let many = Stacks { functions, stacks: vec![stack] };
        let few = || Some(samples::stacks(&[("f7;g", 0, 1)]));
        let reports = [
            Report { stacks: Some(many), ..samples::report(0) },
            Report { stacks: few(), ..samples::report(1) },
            Report { stacks: few(), ..samples::report(2) },
        ];
        let mut tables = WrittenTables::default();
        let lines: Vec<_> = reports.iter().map(|report| tables.line(report).expect("JSON")).collect();
        let anew = lines.iter().map(|line| String::from_utf8_lossy(line).contains("\"anew\":true"));
        assert_eq!(anew.collect::<Vec<_>>(), [false, true, false]);
        assert_eq!(tables.functions.len(), 2);
        assert_eq!(read(&lines)[1..], reports[1..]);
    }

    #[test]
    fn log_whose_name_tables_grow_without_end_is_refused() {
        let line = |anew: bool, names: usize| {
            let tables = LineTables { anew, functions: vec!["f".into(); names], ..LineTables::default() };
            format!("{{\"a\":1,\"tables\":{}}}", serde_json::to_string(&tables).expect("JSON")).into_bytes()
        };
        let mut tables = Arc::default();
        let mut read = |anew, names| cut(&mut line(anew, names), &mut tables).map(|rest| rest.is_some());
        assert!(read(false, FULL).is_ok_and(|is_read| is_read));
        assert!(read(false, 0).is_err());
        assert!(read(true, 1).is_ok_and(|is_read| is_read));
        assert!(read(false, 1).is_ok_and(|is_read| is_read));
    }

    #[test]
    fn log_indices_outside_the_name_tables_are_ignored() {
        let mut text = br#"{"a":1,"tables":{"anew":false,"functions":["f"],"traces":[[null,null,[0,9]]],"unmeasured":[],"#.to_vec();
        text.extend(br#""stacks":[[0,0,1,5],[4,0,1,5]],"missing":[[3,null]]}}"#);
        let rest = cut(&mut text, &mut Arc::default()).expect("tables").expect("a line of a log");
        assert_eq!(text, br#"{"a":1}"#);
        assert!(rest.missing.is_empty());
        let stacks = rest.stacks.expect("stacks");
        let stacks = stacks.tables.resolve(stacks.counted);
        assert_eq!(
            (stacks.functions.len(), stacks.stacks.len(), &*stacks.stacks[0].frames),
            (1, 1, &[0][..])
        );
    }
}
