//! Reads the kernel's own accounting of CPU time from `/proc/stat`, see `proc_stat(5)`.

use std::collections::BTreeMap;
use std::{fs, io};

use nix::unistd::{SysconfVar, sysconf};

use crate::report::ProcStat;

/// Times of each CPU since boot, by its number.
pub type CpuClocks = BTreeMap<u32, ProcStat>;

const NS_PER_S: u64 = 1_000_000_000;

pub fn read() -> io::Result<CpuClocks> {
    let hz = sysconf(SysconfVar::CLK_TCK)?.and_then(|hz| u64::try_from(hz).ok()).filter(|hz| *hz > 0);
    Ok(parse(&fs::read_to_string("/proc/stat")?, NS_PER_S / hz.unwrap_or(100)))
}

fn parse(text: &str, ns_per_tick: u64) -> CpuClocks {
    text.lines().filter_map(|line| cpu(line, ns_per_tick)).collect()
}

/// Parses the line of one CPU. The fields for guests are ignored: `user` and `nice` contain them. Returns `None` for
/// other lines, also for the sum of all CPUs, which has no number.
fn cpu(line: &str, ns_per_tick: u64) -> Option<(u32, ProcStat)> {
    let (cpu, times) = line.strip_prefix("cpu")?.split_once(' ')?;
    let cpu = cpu.parse().ok()?;
    let mut fields = times.split_ascii_whitespace();
    let mut next = || -> Option<u64> { Some(fields.next()?.parse::<u64>().ok()? * ns_per_tick) };
    let user = next()?;
    let nice = next()?;
    let system = next()?;
    let idle = next()?;
    let iowait = next()?;
    let irq = next()?;
    let softirq = next()?;
    let steal = next().unwrap_or(0);
    let times = ProcStat {
        user_ns: user + nice,
        system_ns: system,
        softirq_ns: softirq,
        irq_ns: irq,
        steal_ns: steal,
        idle_ns: idle + iowait,
    };
    Some((cpu, times))
}

/// Returns the time of each CPU between two readings.
pub fn since(after: &CpuClocks, before: &CpuClocks) -> CpuClocks {
    let before = |cpu| before.get(cpu).copied().unwrap_or_default();
    after.iter().map(|(cpu, times)| (*cpu, difference(times, &before(cpu)))).collect()
}

/// Returns the busy time of all CPUs.
pub fn busy_ns(times: &CpuClocks) -> u64 {
    times.values().map(ProcStat::busy_ns).sum()
}

/// Returns `after - before`, at least 0: `proc_stat(5)` warns that some times may decrease.
fn difference(after: &ProcStat, before: &ProcStat) -> ProcStat {
    ProcStat {
        user_ns: after.user_ns.saturating_sub(before.user_ns),
        system_ns: after.system_ns.saturating_sub(before.system_ns),
        softirq_ns: after.softirq_ns.saturating_sub(before.softirq_ns),
        irq_ns: after.irq_ns.saturating_sub(before.irq_ns),
        steal_ns: after.steal_ns.saturating_sub(before.steal_ns),
        idle_ns: after.idle_ns.saturating_sub(before.idle_ns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_lines_of_proc_stat_are_parsed() {
        let text = "cpu  9 9 9 9 9 9 9 9 9 9\ncpu0 1 2 3 4 5 6 7 8 1 2\ncpu11 1 0 0 0 0 0 0\nintr 1 2\n";
        let times = parse(text, 10);
        let first =
            ProcStat { user_ns: 30, system_ns: 30, idle_ns: 90, irq_ns: 60, softirq_ns: 70, steal_ns: 80 };
        assert_eq!(
            times.into_iter().collect::<Vec<_>>(),
            [(0, first), (11, ProcStat { user_ns: 10, ..ProcStat::default() })]
        );
    }

    #[test]
    fn busy_times_of_cpus_add_up() {
        let times = |first, second| {
            let stat = |ns| ProcStat { user_ns: ns, softirq_ns: ns, idle_ns: 1, ..ProcStat::default() };
            CpuClocks::from([(0, stat(first)), (1, stat(second))])
        };
        assert_eq!(busy_ns(&since(&times(10, 20), &times(4, 5))), 2 * (6 + 15));
        assert_eq!(busy_ns(&since(&times(10, 20), &CpuClocks::new())), 2 * (10 + 20));
    }

    #[test]
    fn cpu_time_that_runs_backwards_counts_as_zero() {
        let before = ProcStat { idle_ns: 20, user_ns: 5, ..ProcStat::default() };
        let after = ProcStat { idle_ns: 10, user_ns: 7, ..ProcStat::default() };
        assert_eq!(difference(&after, &before), ProcStat { user_ns: 2, ..ProcStat::default() });
    }
}
