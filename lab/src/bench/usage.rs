//! Measures the use of resources in a period: CPU time of the machine and of a process, and memory.

use std::fs;
use std::io;
use std::time::Duration;

use millrace_kernel::clock::monotonic_ns;
use nix::time::{clock_getcpuclockid, clock_gettime};
use nix::unistd::{Pid, SysconfVar, sysconf};

/// Time for which other programs are observed before a benchmark starts.
const LOOK_AROUND: Duration = Duration::from_secs(1);
/// Number of CPUs that other programs may keep busy without a warning.
const BUSY_CPUS: f64 = 0.1;

/// A reading of the CPU clocks. The difference of two readings is the CPU time used between them.
#[derive(Debug, Clone, Copy)]
pub struct UsageReading {
    at_ns: u64,
    not_busy_ns: u64,
    process_ns: u64,
    cpus: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Used {
    pub elapsed_ns: u64,
    /// Time that all CPUs together were not idle, ns.
    pub machine_ns: u64,
    /// CPU time of all threads of the process, including those that have ended, ns.
    pub process_ns: u64,
}

impl UsageReading {
    pub fn take(process: u32) -> io::Result<Self> {
        let stat = fs::read_to_string("/proc/stat")?;
        let (not_busy_ns, cpus) = not_busy(&stat, tick_ns())
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "cannot parse /proc/stat"))?;
        let clock = clock_getcpuclockid(Pid::from_raw(process.cast_signed()))?;
        let process_ns = Duration::from(clock_gettime(clock)?).as_nanos() as u64;
        Ok(Self { at_ns: monotonic_ns(), not_busy_ns, process_ns, cpus })
    }

    pub fn used_since(&self, earlier: &Self) -> Used {
        let elapsed_ns = self.at_ns - earlier.at_ns;
        Used {
            elapsed_ns,
            machine_ns: (elapsed_ns * self.cpus)
                .saturating_sub(self.not_busy_ns.saturating_sub(earlier.not_busy_ns)),
            process_ns: self.process_ns.saturating_sub(earlier.process_ns),
        }
    }
}

impl Used {
    /// Returns the average number of busy CPUs.
    pub fn busy_cpus(&self) -> f64 {
        self.machine_ns as f64 / self.elapsed_ns.max(1) as f64
    }

    /// Returns the average CPU use of the process, percent of one CPU.
    pub fn process_percent(&self) -> f64 {
        100.0 * self.process_ns as f64 / self.elapsed_ns.max(1) as f64
    }
}

/// Returns the sum of idle, iowait and steal time of all CPUs in ns, and the number of CPUs. The kernel measures idle
/// time at each start and end of idling. Busy time is not used, since it is only sampled at ticks, with which traffic
/// at a fixed rate may be in step.
fn not_busy(stat: &str, tick_ns: u64) -> Option<(u64, u64)> {
    let total = stat.lines().find_map(|line| line.strip_prefix("cpu "))?;
    let columns: Vec<u64> = total.split_whitespace().map_while(|column| column.parse().ok()).collect();
    let [_user, _nice, _system, idle, iowait, _irq, _softirq, steal, ..] = columns[..] else { return None };
    let cpus = stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count();
    Some(((idle + iowait + steal) * tick_ns, cpus as u64))
}

fn tick_ns() -> u64 {
    let per_second = sysconf(SysconfVar::CLK_TCK).ok().flatten().unwrap_or(100);
    1_000_000_000 / per_second.max(1) as u64
}

/// Returns the highest resident memory of a process so far, bytes.
pub fn peak_rss_bytes(process: u32) -> io::Result<u64> {
    memory(process, "VmHWM:")
}

/// Returns the current resident memory of a process, bytes.
pub fn rss_bytes(process: u32) -> io::Result<u64> {
    memory(process, "VmRSS:")
}

fn memory(process: u32, name: &str) -> io::Result<u64> {
    let status = fs::read_to_string(format!("/proc/{process}/status"))?;
    let kib = |line: &str| line.strip_prefix(name)?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok();
    let missing =
        || io::Error::new(io::ErrorKind::InvalidData, format!("no {name} in /proc/{process}/status"));
    status.lines().find_map(kib).map(|kib| kib * 1024).ok_or_else(missing)
}

/// Warns if other programs use CPU, since that affects all measured values.
pub fn warn_if_busy() -> io::Result<()> {
    let before = UsageReading::take(std::process::id())?;
    std::thread::sleep(LOOK_AROUND);
    let busy = UsageReading::take(std::process::id())?.used_since(&before).busy_cpus();
    if busy > BUSY_CPUS {
        eprintln!("warning: other programs keep {busy:.2} CPUs busy; the figures include that");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::time::ClockId;

    #[test]
    fn proc_stat_is_parsed() {
        let stat = "cpu  10 20 30 400 50 6 7 8 0 0\ncpu0 5 10 15 200 25 3 3 4 0 0\ncpu1 5 10 15 200 25 3 4 4 0 0\nintr 1\n";
        assert_eq!(not_busy(stat, 10), Some((4580, 2)));
        assert_eq!(not_busy("cpu  1 2 3\n", 10), None);
        assert_eq!(not_busy("", 10), None);
    }

    /// Half a second of one thread's work must appear in the CPU time of the process and of the machine.
    #[test]
    fn cpu_time_of_a_thread_appears_in_process_and_machine_usage() {
        let before = UsageReading::take(std::process::id()).expect("a reading");
        let work_ns = 500_000_000;
        let start = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).expect("clock");
        let mut worked = 0;
        while worked < work_ns {
            let now = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map(Duration::from).expect("clock");
            worked = (now - start).as_nanos() as u64;
        }
        let used = UsageReading::take(std::process::id()).expect("a reading").used_since(&before);
        assert!(used.elapsed_ns >= work_ns);
        assert!(used.process_ns >= work_ns, "{used:?}");
        // /proc/stat has a resolution of ticks, so a few ticks may be missing.
        assert!(used.machine_ns + 5 * tick_ns() >= work_ns, "{used:?}");
    }

    #[test]
    fn memory_of_this_process_is_read() {
        assert!(peak_rss_bytes(std::process::id()).expect("VmHWM") > 1 << 20);
        assert!(peak_rss_bytes(u32::MAX).is_err());
    }
}
