//! Reads a report log ahead of its reader on background threads, which can also add up consecutive reports.

use std::mem;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::{thread, vec};

use rustc_hash::FxHashMap;

use crate::log::{CountedTrace, Error, LineStacks, ReadTables, ReportLine, ReportReader};
use crate::merge::{MOST_STACKS, Merge};
use crate::report::{Report, ReportMode, Stacks};

/// Largest number of consecutive reports that the threads may add up into one. A sum of this many reports never spans
/// two of the batches of lines that the threads parse.
pub const TOGETHER: usize = 16;
/// Size in bytes from which a batch of lines ends at the next line whose number is a multiple of [`TOGETHER`].
pub(crate) const BATCH_BYTES: usize = 256 << 10;
/// Largest number of batches of lines that wait for each parser, and of parsed batches that wait for the reader.
pub(crate) const BATCHES: usize = 2;
/// Largest number of threads that parse lines.
pub(crate) const PARSERS: usize = 4;

/// A report, or the sum of consecutive reports. In all reports of a sum, CPU time was measured in the same way: timed
/// by BPF programs, or only estimated from samples.
#[derive(Debug)]
pub struct Summed {
    /// The report, or the sum of several reports.
    pub report: Report,
    /// Number of reports in the sum.
    pub reports: usize,
}

/// Iterator over the reports of a log file, in file order. [`ReportReader::ahead`] returns it.
pub struct ReportsAhead {
    /// The parsers' results. Batches go to the parsers in turn, so reading from them in turn keeps the file's order.
    parsed: Vec<mpsc::Receiver<Vec<Result<Summed, Error>>>>,
    /// Index in `parsed` of the receiver that has the next batch.
    turn: usize,
    batch: vec::IntoIter<Result<Summed, Error>>,
    torn: Arc<AtomicBool>,
    together: Arc<AtomicUsize>,
}

/// Consecutive lines of a log, with the position of the first line among all reports.
struct LineBatch {
    first: usize,
    lines: Vec<Result<ReportLine, Error>>,
}

impl ReportReader {
    /// Starts one thread that reads lines from the file and up to four threads that parse them. `before` is the
    /// number of reports read before this file. A sum of N reports begins at a report whose number, counted over all
    /// files, is a multiple of N.
    pub fn ahead(mut self, before: usize) -> ReportsAhead {
        let parsers = thread::available_parallelism().map_or(1, NonZero::get).min(PARSERS);
        let together = Arc::new(AtomicUsize::new(1));
        let mut to_parsers = Vec::new();
        let mut parsed = Vec::new();
        for _ in 0..parsers {
            let (lines, incoming) = mpsc::sync_channel::<LineBatch>(BATCHES);
            let (reports, outgoing) = mpsc::sync_channel(BATCHES);
            let path = self.path.clone();
            let together = Arc::clone(&together);
            thread::spawn(move || {
                let parse = |batch: LineBatch| batch.parse(&path, together.load(Ordering::Relaxed));
                // Sending fails after the reader has dropped `ReportsAhead`; the thread then ends.
                incoming.into_iter().map_while(|batch| reports.send(parse(batch)).ok()).for_each(drop);
            });
            to_parsers.push(lines);
            parsed.push(outgoing);
        }
        let torn = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&torn);
        thread::spawn(move || {
            let mut first = before;
            for parser in to_parsers.iter().cycle() {
                let lines = self.batch(first);
                // Ordering `Relaxed` is enough: the channels order this store before the reader sees the log's end.
                told.store(self.torn(), Ordering::Relaxed);
                let is_last = lines.last().is_none_or(Result::is_err);
                let next = first + lines.len();
                if parser.send(LineBatch { first, lines }).is_err() || is_last {
                    return;
                }
                first = next;
            }
        });
        ReportsAhead { parsed, turn: 0, batch: Vec::new().into_iter(), torn, together }
    }

    /// Returns the next lines, or none at the end of the log. A line that cannot be read ends the batch.
    fn batch(&mut self, first: usize) -> Vec<Result<ReportLine, Error>> {
        let mut batch = Vec::new();
        let mut bytes = 0;
        // The limit of `BATCH_BYTES * TOGETHER` bounds memory if a log has huge lines.
        while (bytes < BATCH_BYTES || !(first + batch.len()).is_multiple_of(TOGETHER))
            && bytes < BATCH_BYTES * TOGETHER
            && let Some(line) = self.next_report().transpose()
        {
            let failed = line.is_err();
            bytes += line.as_ref().map_or(0, ReportLine::bytes);
            batch.push(line);
            if failed {
                break;
            }
        }
        batch
    }
}

impl ReportsAhead {
    /// Reports whether the file ended in the middle of a line, as [`ReportReader::torn`] does. The result is valid once
    /// the iterator has reached the end.
    pub fn torn(&self) -> bool {
        self.torn.load(Ordering::Relaxed)
    }

    /// Lets the threads add up as many as `reports` consecutive reports, at most [`TOGETHER`]. Batches that are parsed
    /// already stay unchanged.
    pub fn add_up(&self, reports: usize) {
        self.together.store(reports.clamp(1, TOGETHER), Ordering::Relaxed);
    }
}

impl Iterator for ReportsAhead {
    type Item = Result<Summed, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            if let Some(report) = self.batch.next() {
                return Some(report);
            }
            self.batch = self.parsed.get(self.turn)?.recv().ok()?.into_iter();
            self.turn = (self.turn + 1) % self.parsed.len();
        }
    }
}

impl LineBatch {
    fn parse(self, path: &Path, together: usize) -> Vec<Result<Summed, Error>> {
        let Self { first, lines } = self;
        if together <= 1 {
            let one = |line: ReportLine| line.parse(path).map(|report| Summed { report, reports: 1 });
            return lines.into_iter().map(|line| line.and_then(one)).collect();
        }
        let mut sums = LogSums { path: path.to_owned(), ..LogSums::default() };
        for (at, line) in (first..).zip(lines) {
            if at.is_multiple_of(together) {
                sums.end();
            }
            if let Err(error) = line.and_then(|line| sums.add(line)) {
                sums.end();
                sums.done.push(Err(error));
            }
        }
        sums.end();
        sums.done
    }
}

/// The sum to which the next report of a batch is added, and the finished sums of earlier reports of the batch.
#[derive(Default)]
struct LogSums {
    path: PathBuf,
    done: Vec<Result<Summed, Error>>,
    sum: Merge,
    /// Number of samples and nanoseconds of each stack on each CPU in the reports of `sum`. The key is the stack's
    /// index in the log file's table of stacks, and the CPU.
    counts: FxHashMap<(u32, u32), (u64, u64)>,
    tables: Option<Arc<ReadTables>>,
    /// The mode (events timed, or only sampled) of the reports in `sum`; `None` while `sum` is empty.
    mode: Option<ReportMode>,
    reports: usize,
}

impl LogSums {
    fn add(&mut self, line: ReportLine) -> Result<(), Error> {
        let (report, stacks) = line.parse_head(&self.path)?;
        if !self.has_room(report.mode, stacks.as_ref()) {
            self.end();
        }
        self.mode = Some(report.mode);
        self.sum.add(&report);
        self.reports += 1;
        if let Some(stacks) = stacks {
            self.count(stacks);
        }
        Ok(())
    }

    fn count(&mut self, LineStacks { tables, counted }: LineStacks) {
        self.tables = Some(tables);
        for (trace, cpu, samples, ns) in counted {
            let sum = self.counts.entry((trace, cpu)).or_default();
            *sum = (sum.0 + samples, sum.1 + ns);
        }
    }

    /// Returns the stacks of all reports in the sum. Each function's name is looked up only once for the whole sum.
    fn take_stacks(&mut self) -> Option<Stacks> {
        let counts = mem::take(&mut self.counts).into_iter();
        let mut counted: Vec<CountedTrace> =
            counts.map(|((trace, cpu), (samples, ns))| (trace, cpu, samples, ns)).collect();
        counted.sort_unstable_by(|a, b| b.3.cmp(&a.3).then_with(|| a.cmp(b))); // most time first, as in a report
        Some(self.tables.take()?.resolve(counted))
    }

    /// Reports whether one more report can be added to the sum. All reports of a sum have the same mode (events timed,
    /// or only sampled), since only the former counts calls. All their stacks refer to the same tables of the log file,
    /// and a sum has a limited number of different stacks.
    fn has_room(&self, mode: ReportMode, stacks: Option<&LineStacks>) -> bool {
        self.mode.is_none_or(|same| same == mode)
            && self.tables.iter().zip(stacks).all(|(same, stacks)| Arc::ptr_eq(same, &stacks.tables))
            && self.counts.len() <= MOST_STACKS
    }

    fn end(&mut self) {
        let stacks = self.take_stacks();
        let reports = mem::take(&mut self.reports);
        self.mode = None;
        if let Some(mut report) = mem::take(&mut self.sum).finish() {
            // A line of `millrace cost --json` contains its stacks, so they are in the sum already. A line of a log
            // file refers to stacks in the file's tables.
            report.stacks = stacks.or(report.stacks);
            self.done.push(Ok(Summed { report, reports }));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::{LogLimits, ReportWriter};
    use crate::merge::merge;
    use crate::samples;

    const REPORTS: usize = 100;
    const SAMPLED: std::ops::Range<usize> = 37..50;

    fn report(at: usize) -> Report {
        let frames = [
            ("a;b", 0, 3),
            ("a;c", at as u32 % 2, 1),
            (if at.is_multiple_of(3) { "x;y" } else { "z" }, 1, 2),
        ];
        let mode = if SAMPLED.contains(&at) { ReportMode::Sampling } else { ReportMode::Events };
        Report { mode, stacks: Some(samples::stacks(&frames)), ..samples::report(at as u64) }
    }

    /// Returns these reports as lines of `millrace cost --json`.
    fn lines(reports: &[Report]) -> Vec<Result<ReportLine, Error>> {
        let text = |report| serde_json::to_vec(report).expect("JSON");
        let line = |(number, report)| Ok(ReportLine { number, text: text(report), rest: None });
        (1..).zip(reports).map(line).collect()
    }

    /// Returns these reports as lines of a log.
    fn log_lines(reports: &[Report]) -> Vec<Result<ReportLine, Error>> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        let limits = LogLimits { bytes: u64::MAX, files: 1 };
        let mut writer = ReportWriter::create(&path, limits).expect("a log");
        reports.iter().for_each(|report| writer.write(report).expect("room"));
        writer.finish().expect("room");
        let mut reader = ReportReader::open(&path).expect("a log");
        std::iter::from_fn(|| reader.next_report().transpose()).collect()
    }

    /// Returns a report whose functions and stacks are in alphabetical order.
    fn ordered(report: Report) -> Report {
        let Some(Stacks { functions, mut stacks }) = report.stacks else { return report };
        let mut names = functions.clone();
        names.sort();
        for stack in &mut stacks {
            for at in &mut stack.frames {
                let found = names.binary_search(&functions[*at as usize]).expect("a name");
                *at = u32::try_from(found).expect("few names");
            }
        }
        stacks.sort_by(|a, b| (a.cpu, &a.frames).cmp(&(b.cpu, &b.frames)));
        Report { stacks: Some(Stacks { functions: names, stacks }), ..report }
    }

    #[test]
    fn consecutive_cost_reports_are_summed_only_within_one_measuring_mode() {
        let reports: Vec<Report> = (0..REPORTS).map(report).collect();
        let steps = [(0, 1), (0, 4), (16, TOGETHER), (5, 4)];
        let kinds: [fn(&[Report]) -> _; 2] = [lines, log_lines];
        for ((first, together), lines) in steps.iter().flat_map(|step| kinds.map(|lines| (*step, lines))) {
            let batch = LineBatch { first, lines: lines(&reports) };
            let sums = batch.parse(Path::new("log"), together);
            let sums: Vec<Summed> = sums.into_iter().map(|sum| sum.expect("a sum")).collect();
            assert_eq!(sums.iter().map(|sum| sum.reports).sum::<usize>(), REPORTS);
            let mut at = 0;
            for sum in &sums {
                let of = &reports[at..at + sum.reports];
                let range = first + at..=first + at + sum.reports - 1;
                assert_eq!(range.start() / together, range.end() / together, "{range:?}");
                assert!(of.iter().all(|report| report.mode == of[0].mode), "{range:?}");
                assert_eq!(ordered(sum.report.clone()), ordered(merge(of).expect("a sum")));
                at += sum.reports;
            }
            let whole = merge(sums.iter().map(|sum| &sum.report)).map(ordered);
            assert_eq!(whole, merge(&reports).map(ordered));
            assert!(together == 1 || sums.len() < REPORTS / 2 + 5, "{}", sums.len());
        }
    }

    #[test]
    fn faulty_log_lines_are_errors() {
        let parse = |text: String| {
            let line = ReportLine { number: 2, text: text.into(), rest: None };
            LineBatch { first: 0, lines: vec![Ok(line)] }.parse(Path::new("log"), TOGETHER)
        };
        let damaged =
            serde_json::to_string(&report(0)).expect("JSON").replace("\"frames\":[0", "\"frames\":[x");
        assert!(matches!(&parse(damaged)[..], [Err(Error::Report { line: 2, .. })]));
        let newer = serde_json::to_string(&Report { version: 99, ..report(0) }).expect("JSON");
        assert!(matches!(&parse(newer)[..], [Err(Error::Version { found: 99, .. })]));
    }
}
