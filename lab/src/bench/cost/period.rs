//! A period that the observer, the clock of the idle task and perf measure together.

use std::time::Duration;

use millrace_cost::Observer;
use millrace_cost::report::Report;
use millrace_kernel::clock::monotonic_ns;
use millrace_lab_kernel::idle::Idle;

use super::profile::PerfRecording;

/// The observer's report of a period, and the values of type `R` (such as counters) that the caller read at the
/// period's start and at its end.
pub struct MeasuredPeriod<R> {
    pub report: Report,
    pub readings: [R; 2],
    /// Start and end of the period by `CLOCK_MONOTONIC`, in nanoseconds.
    pub start_ns: u64,
    pub end_ns: u64,
    /// Idle time of each CPU so far, at the start and at the end of the period, in nanoseconds.
    idle: [Vec<u64>; 2],
}

impl<R> MeasuredPeriod<R> {
    /// Measures a period of this length on the observer's CPUs, and calls `read` at the start and at the end. Also
    /// returns the recording of `perf`, on which the caller has to call `finish`.
    pub fn measure(
        observer: &mut Observer,
        length: Duration,
        mut read: impl FnMut() -> R,
    ) -> anyhow::Result<(Self, PerfRecording)> {
        let mut idle = Idle::attach()?;
        let recording = PerfRecording::start(&cpus_of(&observer.report()?), length)?;
        observer.report()?;
        let start_ns = monotonic_ns();
        let before = read();
        let idle_before = idle.times()?;
        let report = observer.next(length)?;
        let end_ns = monotonic_ns();
        let readings = [before, read()];
        let idle = [idle_before, idle.times()?];
        Ok((Self { report, readings, start_ns, end_ns, idle }, recording))
    }

    /// Returns the percentage of the period that the CPU was outside of the idle task.
    pub fn busy_pct(&self, cpu: u32) -> f64 {
        busy_pct(cpu, self.idle.each_ref().map(Vec::as_slice), self.length_ns())
    }

    pub fn length_ns(&self) -> u64 {
        self.end_ns - self.start_ns
    }
}

pub fn cpus_of(report: &Report) -> Vec<u32> {
    report.cpus.iter().map(|cpu| cpu.cpu).collect()
}

pub fn percent(ns: u64, of_ns: u64) -> f64 {
    ns as f64 * 100.0 / of_ns.max(1) as f64
}

/// Returns the percentage of the time `time_ns` that a CPU was outside of the idle task. `idle` has the idle times of
/// all CPUs, read at the start and at the end of that time.
fn busy_pct(cpu: u32, idle: [&[u64]; 2], time_ns: u64) -> f64 {
    let [before, after] = idle.map(|of| of.get(cpu as usize).copied().unwrap_or(0));
    100.0 - percent(after.saturating_sub(before), time_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_outside_idle_task_is_busy() {
        let times = [&[0, 500][..], &[0, 750][..]];
        assert_eq!((busy_pct(0, times, 1000), busy_pct(1, times, 1000)), (100.0, 75.0));
    }
}
