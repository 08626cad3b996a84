//! Measures the errors of `/proc/stat` and of `perf` profiles, with which the observer is compared. For this, it
//! compares both with a load whose CPU time is known.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::Context;
use millrace_cost::{Config, Observer};
use millrace_kernel::clock::monotonic_ns;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use serde::Serialize;

use super::accuracy::ProcStatTimes;
use super::period::{MeasuredPeriod, cpus_of, percent};

/// Mean length of a load's bursts of work and of the pauses between them, ns. A single burst or pause has 0.5 to 1.5
/// times this length. Bursts and pauses are shorter than a tick, and random, so that they are not in step with ticks.
const BURST_NS: u64 = 200_000;

/// Busy time of one CPU by each measuring method, in percent of the CPU's time.
#[derive(Debug, Serialize)]
pub struct CalibrationFigures {
    pub cpu: u32,
    /// Total length of the load's bursts of work by `CLOCK_MONOTONIC`, without the pauses between them.
    pub bursts_pct: f64,
    /// CPU time by the load thread's CPU clock, which includes falling asleep and waking up.
    pub thread_pct: f64,
    /// Time outside of the idle task by a clock that is read at task switches: the load and everything else that ran.
    pub clock_busy_pct: f64,
    pub busy_pct: f64,
    /// Busy time in the columns of `/proc/stat`, which the kernel accounts at ticks.
    pub ticks_pct: f64,
    pub profile_busy_pct: f64,
}

/// Runs a known load on each CPU for `length`. Returns the busy time that each method measured (clocks, `/proc/stat`
/// and `perf`).
pub fn measure(length: Duration) -> anyhow::Result<Vec<CalibrationFigures>> {
    let mut observer = Observer::start(Config { frequency_hz: 0, ..Config::new()? })?;
    let cpus = cpus_of(&observer.report()?);
    let loads: BTreeMap<u32, CalibrationLoad> =
        cpus.into_iter().map(|cpu| (cpu, CalibrationLoad::default())).collect();
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let threads: Vec<_> =
            loads.iter().map(|(cpu, load)| scope.spawn(|| load.run(*cpu as usize, &stop))).collect();
        let figures = observe(&mut observer, &loads, length);
        stop.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().map_err(|_| anyhow::anyhow!("the load panicked"))??;
        }
        figures
    })
}

fn observe(
    observer: &mut Observer,
    loads: &BTreeMap<u32, CalibrationLoad>,
    length: Duration,
) -> anyhow::Result<Vec<CalibrationFigures>> {
    let (period, recording) = MeasuredPeriod::measure(observer, length, || readings(loads))?;
    let report = &period.report;
    let [before, after] = &period.readings;
    let profile = recording.finish(period.start_ns, period.end_ns, None)?;
    let figures = report.cpus.iter().map(|cpu| {
        let sampled = profile.get(&cpu.cpu).with_context(|| format!("no profile of CPU {}", cpu.cpu))?;
        let stat = ProcStatTimes::new(&cpu.procstat, report.period_ns);
        let took = |of: fn(&CalibrationReading) -> u64| {
            let ns = |all: &BTreeMap<u32, CalibrationReading>| all.get(&cpu.cpu).map_or(0, of);
            percent(ns(after) - ns(before), period.length_ns())
        };
        Ok(CalibrationFigures {
            cpu: cpu.cpu,
            bursts_pct: took(|it| it.bursts_ns),
            thread_pct: took(|it| it.thread_ns),
            clock_busy_pct: period.busy_pct(cpu.cpu),
            busy_pct: stat.busy(),
            ticks_pct: stat.counted(),
            profile_busy_pct: sampled.percent(sampled.busy(), report.period_ns),
        })
    });
    figures.collect()
}

/// Running totals of a load, updated after each burst.
#[derive(Debug, Default)]
struct CalibrationLoad {
    bursts_ns: AtomicU64,
    thread_ns: AtomicU64,
}

#[derive(Debug, Clone, Copy)]
struct CalibrationReading {
    bursts_ns: u64,
    thread_ns: u64,
}

fn readings(loads: &BTreeMap<u32, CalibrationLoad>) -> BTreeMap<u32, CalibrationReading> {
    let reading = |load: &CalibrationLoad| CalibrationReading {
        bursts_ns: load.bursts_ns.load(Ordering::Relaxed),
        thread_ns: load.thread_ns.load(Ordering::Relaxed),
    };
    loads.iter().map(|(cpu, load)| (*cpu, reading(load))).collect()
}

impl CalibrationLoad {
    /// Runs bursts until `stop` is set. They copy zeros from `/dev/zero`, so most of their time is kernel time.
    fn run(&self, cpu: usize, stop: &AtomicBool) -> anyhow::Result<()> {
        let mut set = CpuSet::new();
        set.set(cpu)?;
        sched_setaffinity(Pid::from_raw(0), &set)?;
        let mut zeros = File::open("/dev/zero")?;
        let mut buffer = [0; 1 << 14];
        while !stop.load(Ordering::Relaxed) {
            let start = monotonic_ns();
            let length = varied(start);
            while monotonic_ns() - start < length {
                zeros.read_exact(&mut buffer)?;
            }
            self.bursts_ns.fetch_add(monotonic_ns() - start, Ordering::Relaxed);
            let thread = Duration::from(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)?);
            self.thread_ns.store(thread.as_nanos() as u64, Ordering::Relaxed);
            thread::sleep(Duration::from_nanos(varied(start.rotate_left(32))));
        }
        Ok(())
    }
}

/// Returns a pseudorandom length of 0.5 to 1.5 times [`BURST_NS`], computed from the lowest bits of a time.
fn varied(time_ns: u64) -> u64 {
    // This is multiplicative hashing (Knuth, TAOCP 6.4): the product's highest bits depend on all bits of the input.
    let hash = time_ns.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    BURST_NS / 2 + hash * BURST_NS / (1 << 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calibration_bursts_vary_around_their_length() {
        let lengths: Vec<u64> = (0..1000).map(|n| varied(n * 401_234)).collect();
        assert!(lengths.iter().all(|length| (BURST_NS / 2..BURST_NS * 3 / 2).contains(length)));
        let mean = lengths.iter().sum::<u64>() / 1000;
        assert!((BURST_NS * 9 / 10..BURST_NS * 11 / 10).contains(&mean), "{mean}");
    }
}
