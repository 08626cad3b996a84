//! Opens the perf software clock of a CPU, whose interrupts run the sampler.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use libbpf_sys::{PERF_COUNT_SW_CPU_CLOCK, PERF_TYPE_SOFTWARE, perf_event_attr};
use millrace_kernel::energy::perf_event_open;
use nix::sched::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};
use nix::unistd::Pid;

/// Opens a clock that interrupts `cpu` about `hz` times a second, also when idle, until the descriptor is closed. A BPF
/// program attached to the clock runs in this interrupt.
pub fn clock(cpu: u32, hz: u32) -> io::Result<OwnedFd> {
    let mut attr = perf_event_attr {
        type_: PERF_TYPE_SOFTWARE,
        size: size_of::<perf_event_attr>() as u32,
        config: u64::from(PERF_COUNT_SW_CPU_CLOCK),
        ..perf_event_attr::default()
    };
    attr.__bindgen_anon_1.sample_period = period_ns(cpu, hz);
    perf_event_open(&attr, cpu)
}

/// Returns the clock's period on a CPU in nanoseconds. It differs from CPU to CPU, by up to 0.5 % from the mean. With
/// equal periods, the interrupt of one CPU would always follow that of another after the same delay. If the first CPU's
/// work feeds the second, every sample of the second might find it idle.
pub fn period_ns(cpu: u32, hz: u32) -> u64 {
    let mean = 1_000_000_000 / u64::from(hz.max(1));
    // Multiples of the golden ratio modulo 1, in units of 2^-32, stay evenly spread for any number of CPUs.
    let phase = u64::from(cpu.wrapping_mul(0x9e37_79b9));
    mean - mean / 200 + ((mean / 100 * phase) >> 32)
}

/// Measures how long an interrupt of the clock takes on this machine, without a program attached. `None` if other load
/// leaves too few measurements. Keeps this thread busy for at most 200 ms.
pub fn interrupt_time() -> io::Result<Option<Duration>> {
    let this = Pid::from_raw(0);
    let allowed = sched_getaffinity(this)?;
    let cpu = sched_getcpu()?;
    let mut only = CpuSet::new();
    only.set(cpu)?;
    sched_setaffinity(this, &only)?;
    let listened = clock(u32::try_from(cpu).map_err(io::Error::other)?, LISTEN_HZ).map(|_clock| listen());
    sched_setaffinity(this, &allowed)?;
    let (on_cpu, gaps) = listened?;
    Ok(typical(on_cpu, gaps))
}

const LISTEN_HZ: u32 = 4000;
/// Shortest gap in this thread's running time that counts as another task's time slice, not as an interrupt.
const TURN: Duration = Duration::from_micros(200);

/// Returns how long this thread ran, and the gaps in its running time, which interrupts cause. Reading the clock takes
/// less than a tenth of the shortest gap that is returned.
fn listen() -> (Duration, Vec<Duration>) {
    const ENOUGH: Duration = Duration::from_millis(30);
    const LONGEST: Duration = Duration::from_millis(200);
    const SHORTEST: Duration = Duration::from_nanos(500);
    let mut on_cpu = Duration::ZERO;
    let mut gaps = Vec::new();
    let start = Instant::now();
    let mut last = start;
    while on_cpu < ENOUGH && last - start < LONGEST {
        let now = Instant::now();
        let gap = now - last;
        last = now;
        if gap < TURN {
            on_cpu += gap;
        }
        if (SHORTEST..TURN).contains(&gap) {
            gaps.push(gap);
        }
    }
    (on_cpu, gaps)
}

/// Returns the median of the N longest gaps in this thread's running time, where N is the number of the clock's
/// interrupts. Shorter gaps may be softirqs. `None` with fewer than 40 gaps.
fn typical(on_cpu: Duration, mut gaps: Vec<Duration>) -> Option<Duration> {
    const LEAST: usize = 40;
    let interrupts = (on_cpu.as_secs_f64() * f64::from(LISTEN_HZ)) as usize;
    gaps.sort_unstable_by(|a, b| b.cmp(a));
    gaps.truncate(interrupts);
    gaps.get(gaps.len() / 2).copied().filter(|_| gaps.len() >= LEAST)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn clock_interrupts_are_distinguished_from_softirqs() {
        let us = |us, count| std::iter::repeat_n(Duration::from_micros(us), count);
        // In 30 ms there are 120 interrupts of the clock. 8 gaps in the thread's running time are longer than such an
        // interrupt, and many are shorter.
        let gaps = || us(2, 5000).chain(us(90, 8)).chain(us(16, 115));
        let listened = Duration::from_millis(30);
        assert_eq!(typical(listened, gaps().collect()), Some(Duration::from_micros(16)));
        assert_eq!(typical(listened, us(16, 39).collect()), None);
        assert_eq!(typical(Duration::from_millis(5), gaps().collect()), None);
    }

    #[test]
    fn sampling_periods_differ_between_cpus() {
        for hz in [1, 100, 1000, 10_000, 20_000] {
            let mean = 1_000_000_000 / u64::from(hz);
            let periods: Vec<u64> = (0..64).map(|cpu| period_ns(cpu, hz)).collect();
            assert_eq!(periods.iter().collect::<BTreeSet<_>>().len(), 64, "{hz} Hz: {periods:?}");
            assert!(periods.iter().all(|period| period.abs_diff(mean) <= mean / 200), "{hz} Hz");
            assert!(periods.is_sorted_by(|a, b| a.abs_diff(*b) > mean / 400), "{hz} Hz: neighbours");
        }
    }
}
