//! What has been reported: whole reports as long as there is room for them, their sums for longer.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Arc;

use millrace_cost::report::{Event, Report};
use serde::Serialize;

/// An hour at the usual period.
const POINTS: usize = 3600;

pub(super) struct History {
    reports: VecDeque<(Arc<Report>, usize)>,
    bytes: usize,
    limit_bytes: usize,
    forgotten: u64,
    points: VecDeque<Point>,
    cpus: Vec<u32>,
}

/// A report, summed up.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Point {
    time_unix_ms: u64,
    period_ns: u64,
    /// Shares in the order of [`Event::ALL`], over all CPUs; `null` is not measured.
    events: [Option<f32>; Event::ALL.len()],
    /// Networking's share of each of [`Points::cpus`].
    cpus: Vec<f32>,
}

#[derive(Debug, Serialize)]
pub(super) struct Points {
    live: bool,
    cpus: Vec<u32>,
    points: Vec<Point>,
    /// The end of the oldest report that is still there in full.
    whole_since_unix_ms: Option<u64>,
}

impl History {
    pub fn new(limit_bytes: usize) -> Self {
        Self {
            reports: VecDeque::new(),
            bytes: 0,
            limit_bytes,
            forgotten: 0,
            points: VecDeque::new(),
            cpus: Vec::new(),
        }
    }

    /// `json_bytes`: without stacks.
    pub fn push(&mut self, report: Arc<Report>, json_bytes: usize) {
        if self.points.len() >= POINTS {
            self.points.pop_front();
        }
        self.points.push_back(Point::new(&report));
        self.cpus = report.cpus.iter().map(|cpu| cpu.cpu).collect();
        let bytes = memory(&report, json_bytes);
        self.bytes += bytes;
        self.reports.push_back((report, bytes));
        // The last one stays, however large it is.
        while self.bytes > self.limit_bytes && self.reports.len() > 1 {
            let Some((_, bytes)) = self.reports.pop_front() else { break };
            self.bytes -= bytes;
            self.forgotten += 1;
        }
    }

    pub fn forgotten(&self) -> u64 {
        self.forgotten
    }

    pub fn latest(&self) -> Option<Arc<Report>> {
        self.reports.back().map(|(report, _)| Arc::clone(report))
    }

    /// Reports whose periods end within `range`, milliseconds since 1970.
    pub fn range(&self, range: &RangeInclusive<u64>) -> Vec<Arc<Report>> {
        let reports = self.reports.iter().filter(|(report, _)| range.contains(&report.time_unix_ms));
        reports.map(|(report, _)| Arc::clone(report)).collect()
    }

    pub fn points(&self, live: bool) -> Points {
        Points {
            live,
            cpus: self.cpus.clone(),
            points: self.points.iter().cloned().collect(),
            whole_since_unix_ms: self.reports.front().map(|(report, _)| report.time_unix_ms),
        }
    }
}

impl Point {
    fn new(report: &Report) -> Self {
        let mut events = [None; Event::ALL.len()];
        for cost in report.cpus.iter().flat_map(|cpu| &cpu.events) {
            if let Some(sum) = events.get_mut(cost.event.index()) {
                *sum = Some(sum.unwrap_or(0.0) + cost.share as f32);
            }
        }
        // Four digits are more than a screen shows.
        let short = |share: f32| (share * 1e4).round() / 1e4;
        Self {
            time_unix_ms: report.time_unix_ms,
            period_ns: report.period_ns,
            events: events.map(|share| share.map(short)),
            cpus: report.cpus.iter().map(|cpu| short(cpu.networking_share as f32)).collect(),
        }
    }
}

/// Names and lists take about as much again as their text.
fn memory(report: &Report, json_bytes: usize) -> usize {
    let stacks = report.stacks.as_ref().map_or(0, |stacks| {
        let names: usize = stacks.functions.iter().map(|name| name.len() + size_of::<String>()).sum();
        let frames: usize =
            stacks.stacks.iter().map(|stack| size_of_val(&*stack.frames) + size_of_val(stack)).sum();
        names + frames
    });
    2 * json_bytes + stacks
}
