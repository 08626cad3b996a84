//! Stores reports for the dashboard. Recent reports are stored in full. Of older reports, only their shares of CPU time
//! are stored, as points of a chart. If the reports come from a log, every report is stored: when memory is full,
//! neighbouring reports are added up.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Arc;

use millrace_cost::merge;
use millrace_cost::report::{Event, Report};
use serde::Serialize;

/// Largest number of points in the dashboard's chart of past CPU shares: one hour with the usual period of 1 s.
const POINTS: usize = 3600;
/// Number of consecutive reports that are added up to one report when memory is full.
const STEPS: usize = 4;

pub(super) struct ReportHistory {
    /// True for live reports: when memory is full, the oldest ones are dropped. False for a log: when memory is full,
    /// neighbouring reports are added up.
    live: bool,
    reports: HistorySteps<(Arc<Report>, usize)>,
    bytes: usize,
    limit_bytes: usize,
    forgotten: u64,
    points: HistorySteps<HistoryPoint>,
    cpus: Vec<u32>,
}

/// A point of the dashboard's history: the shares of one report, or their means over several reports.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct HistoryPoint {
    time_unix_ms: u64,
    period_ns: u64,
    /// Share of CPU time of each event of networking, such as a softirq or system call, in the order of [`Event::ALL`].
    /// Shares are summed over all CPUs; `null` if the event was not measured.
    events: [Option<f32>; Event::NETWORKING],
    /// Networking's share of each CPU, in the order of [`Points::cpus`].
    cpus: Vec<f32>,
}

#[derive(Debug, Serialize)]
pub(super) struct Points {
    live: bool,
    cpus: Vec<u32>,
    points: Vec<HistoryPoint>,
    /// Number of reports that each point averages.
    point_reports: usize,
    /// End of the oldest report that is stored with all its tables, milliseconds since 1970.
    whole_since_unix_ms: Option<u64>,
    /// Number of consecutive reports in each stored sum of reports. A viewer cannot select a range of time that begins
    /// or ends within a sum.
    whole_reports: usize,
}

/// Sums of `length` consecutive items each, in the order of time. An item is a report or a point of the dashboard's
/// chart. The latest items wait in `latest` until there are `length` of them.
struct HistorySteps<T> {
    sums: VecDeque<T>,
    length: usize,
    latest: Vec<T>,
    /// Number of reports or chart points that `latest` contains. Its first element may be the sum of several.
    pending: usize,
}

/// Largest length of [`HistorySteps::latest`]. When it is reached, all elements are added up to one, to save memory.
const WAITING: usize = 16;

impl<T> HistorySteps<T> {
    fn new() -> Self {
        Self { sums: VecDeque::new(), length: 1, latest: Vec::new(), pending: 0 }
    }

    /// Adds `item`, which is the sum of `items` reports or chart points.
    fn push(&mut self, item: T, items: usize, sum: impl Fn(&[T]) -> T) {
        if self.length == 1 {
            return self.sums.push_back(item);
        }
        self.latest.push(item);
        self.pending += items;
        if self.pending >= self.length {
            self.sums.push_back(sum(&self.latest));
            self.latest.clear();
            self.pending = 0;
        } else if self.latest.len() >= WAITING {
            self.latest = vec![sum(&self.latest)];
        }
    }

    fn len(&self) -> usize {
        self.sums.len() + self.latest.len()
    }

    fn iter(&self) -> impl DoubleEndedIterator<Item = &T> {
        self.sums.iter().chain(&self.latest)
    }

    /// Merges each [`STEPS`] consecutive sums into one, so that every sum again consists of `length` reports or points.
    fn lengthen(&mut self, sum: impl Fn(&[T]) -> T) {
        let mut sums: Vec<T> = std::mem::take(&mut self.sums).into();
        let left_over = sums.split_off(sums.len() - sums.len() % STEPS);
        self.pending += left_over.len() * self.length;
        // The left-over sums are older than the waiting items, so they are inserted before them.
        self.latest.splice(0..0, left_over);
        self.length *= STEPS;
        self.sums = sums.chunks(STEPS).map(sum).collect();
    }
}

impl ReportHistory {
    pub fn new(limit_bytes: usize, live: bool) -> Self {
        Self {
            live,
            reports: HistorySteps::new(),
            bytes: 0,
            limit_bytes,
            forgotten: 0,
            points: HistorySteps::new(),
            cpus: Vec::new(),
        }
    }

    /// Adds a report, or the sum of `reports` reports. A sum may have at most as many reports as one point of the chart
    /// and one stored sum have ([`steps`](Self::steps)), and must not be part of two of them.
    pub fn push(&mut self, report: Arc<Report>, reports: usize) {
        self.points.push(HistoryPoint::new(&report), reports, HistoryPoint::mean);
        if self.points.len() > POINTS {
            match self.live {
                true => drop(self.points.sums.pop_front()),
                false => self.points.lengthen(HistoryPoint::mean),
            }
        }
        self.cpus = report.cpus.iter().map(|cpu| cpu.cpu).collect();
        let bytes = memory(&report);
        self.reports.push((report, bytes), reports, sum);
        // If the push above added up several stored reports, the total size in bytes must be computed again.
        let summed = self.reports.length > 1 && self.reports.latest.len() <= 1;
        self.bytes = if summed { self.sizes() } else { self.bytes + bytes };
        // The last report is kept, however large it is.
        while self.bytes > self.limit_bytes && self.reports.sums.len() > 1 {
            if self.live {
                let Some((_, bytes)) = self.reports.sums.pop_front() else { break };
                self.bytes -= bytes;
                self.forgotten += 1;
            } else {
                self.reports.lengthen(sum);
                self.bytes = self.sizes();
            }
        }
    }

    fn sizes(&self) -> usize {
        self.reports.iter().map(|(_, bytes)| bytes).sum()
    }

    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }

    /// Returns the number of reports in each point of the history, and in each stored sum of reports.
    pub fn steps(&self) -> (usize, usize) {
        (self.points.length, self.reports.length)
    }

    pub fn latest(&self) -> Option<Arc<Report>> {
        self.reports.iter().next_back().map(|(report, _)| Arc::clone(report))
    }

    /// Returns the reports whose periods end within `range`, in milliseconds since 1970.
    pub fn range(&self, range: &RangeInclusive<u64>) -> Vec<Arc<Report>> {
        let reports = self.reports.iter().filter(|(report, _)| range.contains(&report.time_unix_ms));
        reports.map(|(report, _)| Arc::clone(report)).collect()
    }

    pub fn points(&self) -> Points {
        Points {
            live: self.live,
            cpus: self.cpus.clone(),
            points: self.points.iter().cloned().collect(),
            point_reports: self.points.length,
            whole_since_unix_ms: self.reports.iter().next().map(|(report, _)| report.time_unix_ms),
            whole_reports: self.reports.length,
        }
    }
}

/// Returns the sum of consecutive reports, and its size in bytes.
fn sum(reports: &[(Arc<Report>, usize)]) -> (Arc<Report>, usize) {
    let report = merge::merge(reports.iter().map(|(report, _)| &**report)).map(Arc::new);
    // `reports` has at least one report, so the index is valid.
    report.map_or_else(|| reports[0].clone(), |report| (Arc::clone(&report), memory(&report)))
}

impl HistoryPoint {
    fn new(report: &Report) -> Self {
        let mut events = [None; Event::NETWORKING];
        for cost in report.cpus.iter().flat_map(|cpu| &cpu.events) {
            if let Some(sum) = events.get_mut(cost.event.index()) {
                *sum = Some(sum.unwrap_or(0.0) + cost.share as f32);
            }
        }
        // Shares are rounded to four decimal places, more than the dashboard can show.
        let short = |share: f32| (share * 1e4).round() / 1e4;
        Self {
            time_unix_ms: report.time_unix_ms,
            period_ns: report.period_ns,
            events: events.map(|share| share.map(short)),
            cpus: report.cpus.iter().map(|cpu| short(cpu.networking_share as f32)).collect(),
        }
    }

    /// Returns the mean of the points, weighted by their periods. Gaps between the periods do not count.
    fn mean(points: &[Self]) -> Self {
        let period_ns: u64 = points.iter().map(|point| point.period_ns).sum();
        let mean = |share: &dyn Fn(&Self) -> Option<f32>| {
            let known = || points.iter().filter_map(|point| Some((share(point)?, point.period_ns)));
            let sum: f64 = known().map(|(share, ns)| f64::from(share) * ns as f64).sum();
            known().next().map(|_| (sum / period_ns.max(1) as f64) as f32)
        };
        let cpus = points.iter().map(|point| point.cpus.len()).max().unwrap_or(0);
        Self {
            time_unix_ms: points.last().map_or(0, |point| point.time_unix_ms),
            period_ns,
            events: std::array::from_fn(|at| mean(&|point| point.events.get(at).copied().flatten())),
            cpus: (0..cpus).map(|at| mean(&|point| point.cpus.get(at).copied()).unwrap_or(0.0)).collect(),
        }
    }
}

/// Estimates the memory that a report takes, in bytes.
fn memory(report: &Report) -> usize {
    /// Estimated bytes of a name on the heap. Each entry of a table has at least one name.
    const NAME: usize = 48;
    fn list_bytes<T>(list: &[T]) -> usize {
        list.len() * (size_of::<T>() + NAME)
    }
    let events = report.cpus.iter().flat_map(|cpu| &cpu.events);
    let profiles = report.processes.iter().filter_map(|process| process.profile.as_ref());
    let arguments = report.processes.iter().filter_map(|process| process.arguments.as_ref());
    let stacks = report.stacks.as_ref().map_or(0, |stacks| {
        list_bytes(&stacks.functions)
            + stacks.stacks.iter().map(|stack| list_bytes(&[()]) + size_of_val(&*stack.frames)).sum::<usize>()
            + size_of_val(&*stacks.stacks)
    });
    size_of::<Report>()
        + list_bytes(&report.cpus)
        + events.map(|event| size_of_val(event) + list_bytes(&event.parts)).sum::<usize>()
        + report.other.iter().map(|other| list_bytes(&other.functions)).sum::<usize>()
        + 2 * list_bytes(&report.processes)
        + profiles.map(|profile| list_bytes(&profile.parts) + list_bytes(&profile.functions)).sum::<usize>()
        + arguments.map(String::len).sum::<usize>()
        + list_bytes(&report.cgroups)
        + report.programs.as_ref().map_or(0, |programs| list_bytes(programs))
        + 2 * list_bytes(&report.missing)
        + stacks
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tests::example;

    fn report(at: u64) -> Arc<Report> {
        let mut report = Report { sequence: at, time_unix_ms: 1000 * (at + 1), ..example() };
        report.cpus[0].events[0].share = at as f64 / 1e6;
        Arc::new(report)
    }

    /// A log of any length is stored completely: the longer it is, the more reports are added up in each stored sum.
    /// `point_reports` and `whole_reports` are the numbers of reports in a sum. Every report is in exactly one sum.
    #[test]
    fn long_log_is_stored_completely_as_sums_of_reports() {
        const REPORTS: u64 = 20_000;
        let limit = 40 * memory(&report(0));
        let mut history = ReportHistory::new(limit, false);
        (0..REPORTS).for_each(|at| history.push(report(at), 1));
        let points = history.points();
        assert!(points.points.len() <= POINTS && points.point_reports == 16, "{}", points.point_reports);
        assert_eq!(points.points.iter().map(|point| point.period_ns).sum::<u64>(), REPORTS * 1_000_000_000);
        assert_eq!(points.points.last().map(|point| point.time_unix_ms), Some(1000 * REPORTS));
        let first = &points.points[0];
        // The chart's first point covers reports 0 to 15. CPU 0's share grows from report to report, and CPU 1's share
        // is the same in all reports.
        assert_eq!((first.time_unix_ms, first.period_ns), (16_000, 16_000_000_000));
        assert!((first.events[0].expect("measured") - 0.25).abs() < 1e-3, "{first:?}");
        let all = history.range(&(0..=u64::MAX));
        assert!(history.bytes <= limit && all.len() > 40 / STEPS / 2, "{} of {}", history.bytes, all.len());
        assert_eq!(all.iter().map(|report| report.period_ns).sum::<u64>(), REPORTS * 1_000_000_000);
        assert_eq!(all[0].time_unix_ms, 1000 * points.whole_reports as u64);
        assert_eq!((history.forgotten(), history.steps()), (0, (16, points.whole_reports)));
        let calls = all.iter().map(|report| report.cpus[0].events[0].calls.expect("counted")).sum::<u64>();
        assert_eq!(calls, 7 * REPORTS);
    }

    /// The reader of a log may add up reports before it stores them. A point and a stored sum must then have as many
    /// reports as if the reader had added up none.
    #[test]
    fn history_of_summed_reports_equals_that_of_single_reports() {
        const REPORTS: u64 = 20_000;
        // When reports are added up, the sum's share of CPU time is computed from its nanoseconds. So nanoseconds and
        // share must agree in each report of this test.
        let report = |at: u64| {
            let mut report = (*report(at)).clone();
            let event = &mut report.cpus[0].events[0];
            (event.ns, event.share) = (at * 1000, at as f64 / 1e6);
            Arc::new(report)
        };
        let limit = 40 * memory(&report(0));
        let mut one = ReportHistory::new(limit, false);
        let mut summed = ReportHistory::new(limit, false);
        (0..REPORTS).for_each(|at| one.push(report(at), 1));
        let mut at = 0;
        while at < REPORTS {
            let (point, range) = summed.steps();
            let most = point.min(range).min(16) as u64;
            let count = (most - at % most).min(REPORTS - at);
            let reports: Vec<Arc<Report>> = (at..at + count).map(report).collect();
            let sum = merge::merge(reports.iter().map(|report| &**report)).expect("a report");
            summed.push(Arc::new(sum), count as usize);
            at += count;
        }
        assert_eq!(summed.steps(), one.steps());
        let one_points = one.points();
        let points = summed.points();
        assert_eq!(points.points.len(), one_points.points.len());
        for (a, b) in points.points.iter().zip(&one_points.points) {
            assert_eq!((a.time_unix_ms, a.period_ns), (b.time_unix_ms, b.period_ns));
            let [a, b] = [a, b].map(|point| point.events[0].expect("measured"));
            assert!((a - b).abs() < 1e-3, "{a} {b}");
        }
        let all = |history: &ReportHistory| {
            let reports = history.range(&(0..=u64::MAX));
            merge::merge(reports.iter().map(|report| &**report)).expect("a report")
        };
        assert_eq!(all(&summed), all(&one));
    }

    #[test]
    fn full_live_history_drops_the_oldest_reports() {
        let mut history = ReportHistory::new(10 * memory(&report(0)), true);
        (0..5000).for_each(|at| history.push(report(at), 1));
        let points = history.points();
        assert_eq!((points.points.len(), points.point_reports, points.whole_reports), (POINTS, 1, 1));
        assert_eq!(history.range(&(0..=u64::MAX)).len(), 10);
        assert_eq!(history.forgotten(), 4990);
    }

    #[test]
    fn history_counts_the_memory_of_reports() {
        let mut large = (*report(0)).clone();
        large.processes = vec![large.processes[0].clone(); 1000];
        assert!(memory(&large) > memory(&report(0)) + 1000 * size_of::<millrace_cost::report::ProcessCost>());
    }
}
