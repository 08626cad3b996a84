//! The kernel's functions and tracepoints where calls, softirqs and task switches are timed.

use std::collections::HashSet;
use std::{fs, io};

use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::{Func, Typedef};

use super::config::{Event, Method};
use super::intf;
use super::ways::WAYS;

/// Name of the tracepoint, name of the program.
pub(super) type Tracepoint = (&'static str, &'static str);

/// Ends before beginnings, in the order of attaching: a beginning without an end would stay open for ever.
const TRACEPOINTS: [Tracepoint; 3] = [
    ("sched_switch", "cost_sched_switch"),
    ("softirq_exit", "cost_softirq_exit"),
    ("softirq_entry", "cost_softirq_entry"),
];
const OF_SYSTEM_CALLS: [Tracepoint; 2] = [("sys_exit", "cost_sys_exit"), ("sys_enter", "cost_sys_enter")];
/// Not on every kernel. The last two are one tracepoint, before and after 6.5.
const OF_REQUESTS: [Tracepoint; 5] = [
    ("io_uring_complete", "cost_completed"),
    ("io_uring_poll_arm", "cost_polled"),
    ("io_uring_queue_async_work", "cost_queued"),
    ("io_uring_submit_req", "cost_request"),
    ("io_uring_submit_sqe", "cost_request"),
];

/// A function that may be timed, and the pair of programs for it: `cost_begin_N` and `cost_end_N`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Point {
    pub function: &'static str,
    pub event: Event,
}

/// What the running kernel has.
pub(super) struct Kernel {
    btf: Btf<'static>,
    /// Those of the functions in question that have a symbol.
    symbols: HashSet<&'static str>,
}

impl Kernel {
    pub fn read() -> io::Result<Self> {
        let text = fs::read_to_string("/proc/kallsyms")?;
        let wanted: HashSet<&'static str> = all().iter().map(|point| point.function).collect();
        let name = |line: &str| wanted.get(line.split_ascii_whitespace().nth(2)?).copied();
        let symbols = text.lines().filter_map(name).collect();
        Ok(Self { btf: Btf::from_vmlinux().map_err(io::Error::other)?, symbols })
    }

    /// The functions of [`WAYS`], each once.
    pub fn points(&self) -> Vec<Point> {
        let has = |point: &Point| {
            self.symbols.contains(point.function)
                && self.btf.type_by_name::<Func<'_>>(point.function).is_some()
        };
        all().into_iter().filter(has).collect()
    }

    pub fn tracepoints(&self, method: Option<Method>) -> Vec<Tracepoint> {
        let mut tracepoints = Vec::new();
        if method.is_some() {
            tracepoints.extend(TRACEPOINTS);
        }
        if method == Some(Method::SystemCalls) {
            tracepoints.extend(OF_SYSTEM_CALLS);
            let has = |(name, _): &Tracepoint| {
                self.btf.type_by_name::<Typedef<'_>>(&format!("btf_trace_{name}")).is_some()
            };
            tracepoints.extend(OF_REQUESTS.into_iter().filter(has));
        }
        tracepoints
    }
}

fn all() -> Vec<Point> {
    let mut points: Vec<Point> = Vec::new();
    for way in WAYS {
        for function in way.functions {
            if !points.iter().any(|point| point.function == *function) {
                points.push(Point { function, event: way.event });
            }
        }
    }
    points
}

/// The event of each point, for the program.
pub(super) fn events_of(points: &[Point]) -> [u8; intf::POINTS] {
    let mut events = [0; intf::POINTS];
    for (slot, point) in events.iter_mut().zip(points) {
        *slot = point.event as u8;
    }
    events
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::intf::POINTS;

    #[test]
    fn every_function_has_a_pair_of_programs() {
        assert!(all().len() <= POINTS, "{}", all().len());
    }
}
