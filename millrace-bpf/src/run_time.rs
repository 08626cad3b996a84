//! What BPF programs take, by the kernel's own statistics.

#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::ops::AddAssign;
use std::os::fd::{FromRawFd, OwnedFd};

/// While it is there, the kernel measures every run of every BPF program (`BPF_ENABLE_STATS`), which adds some
/// 50 ns to each.
pub struct Statistics {
    _file: OwnedFd,
}

impl Statistics {
    pub fn enable() -> io::Result<Self> {
        // SAFETY: no pointers; it returns a new file descriptor, or minus the error's number.
        let fd = unsafe { libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME) };
        if fd < 0 {
            return Err(io::Error::from_raw_os_error(-fd));
        }
        // SAFETY: as above; nobody else has it.
        Ok(Self { _file: unsafe { OwnedFd::from_raw_fd(fd) } })
    }
}

/// Totals since the programs were loaded, of the times when statistics were enabled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunTime {
    pub runs: u64,
    pub ns: u64,
}

impl RunTime {
    /// Of all programs that a process holds.
    pub fn of_process(process: u32) -> io::Result<Self> {
        let mut total = Self::default();
        for entry in fs::read_dir(format!("/proc/{process}/fdinfo"))? {
            // One that was closed meanwhile is no program of interest.
            let info = fs::read_to_string(entry?.path()).unwrap_or_default();
            total += Self::parse(&info).unwrap_or_default();
        }
        Ok(total)
    }

    /// `None`: the file is not a program.
    fn parse(info: &str) -> Option<Self> {
        let field =
            |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        Some(Self { runs: field("run_cnt:")?, ns: field("run_time_ns:")? })
    }

    pub fn since(self, earlier: Self) -> Self {
        Self { runs: self.runs.saturating_sub(earlier.runs), ns: self.ns.saturating_sub(earlier.ns) }
    }
}

impl AddAssign for RunTime {
    fn add_assign(&mut self, other: Self) {
        self.runs += other.runs;
        self.ns += other.ns;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_the_kernel_prints() {
        let program = "pos:\t0\nprog_type:\t3\nprog_id:\t77\nrun_time_ns:\t1234\nrun_cnt:\t5\n";
        assert_eq!(RunTime::parse(program), Some(RunTime { runs: 5, ns: 1234 }));
        assert_eq!(RunTime::parse("pos:\t0\nmap_type:\t2\n"), None);
    }
}
