//! Run time and number of runs of BPF programs, by the kernel's own statistics.

#![allow(unsafe_code)]

use std::fs;
use std::io;
use std::ops::AddAssign;
use std::os::fd::OwnedFd;

use libbpf_rs::query::ProgInfoIter;

use crate::Error;
use crate::raw::owned;

/// While this lives, the kernel keeps run-time statistics of all programs (`BPF_ENABLE_STATS`); it reads a clock twice
/// per run for it, which adds some 50 ns to each.
pub struct Statistics {
    _enabled: OwnedFd,
}

/// A program's figures since it was loaded; they grow while some [`Statistics`] lives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Program {
    pub id: u32,
    pub name: String,
    /// `tracing`, `sched_cls`, `xdp`, ...
    pub kind: String,
    pub run_ns: u64,
    pub runs: u64,
    /// Runs that were skipped because the program was running on that CPU already.
    pub skipped: u64,
}

impl Statistics {
    pub fn enable() -> Result<Self, Error> {
        // SAFETY: no pointers are passed; the call makes the descriptor.
        let enabled = unsafe { owned(libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME)) };
        Ok(Self { _enabled: enabled.map_err(Error::Statistics)? })
    }

    /// Every program that is loaded now.
    pub fn read(&self) -> Vec<Program> {
        ProgInfoIter::default()
            .map(|info| Program {
                id: info.id,
                name: info.name.to_string_lossy().into_owned(),
                kind: snake_case(&format!("{:?}", info.ty)),
                run_ns: info.run_time_ns,
                runs: info.run_cnt,
                skipped: info.recursion_misses,
            })
            .collect()
    }
}

/// Where programs are attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Tc,
    Xdp,
}

impl Kind {
    fn program_type(self) -> libbpf_sys::bpf_prog_type {
        match self {
            Self::Tc => libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
            Self::Xdp => libbpf_sys::BPF_PROG_TYPE_XDP,
        }
    }
}

/// Totals of some programs since they were loaded, of the times when statistics were enabled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunTime {
    pub runs: u64,
    pub ns: u64,
}

impl RunTime {
    /// Of all programs that a process holds.
    pub fn of_process(process: u32) -> io::Result<Self> {
        Self::of(process, None)
    }

    /// Of those that are attached in one place.
    pub fn of_kind(process: u32, kind: Kind) -> io::Result<Self> {
        Self::of(process, Some(kind))
    }

    fn of(process: u32, kind: Option<Kind>) -> io::Result<Self> {
        let mut total = Self::default();
        for entry in fs::read_dir(format!("/proc/{process}/fdinfo"))? {
            // One that was closed meanwhile is no program of interest.
            let info = fs::read_to_string(entry?.path()).unwrap_or_default();
            total += Self::parse(&info, kind).unwrap_or_default();
        }
        Ok(total)
    }

    /// `None`: the file is not such a program.
    fn parse(info: &str, kind: Option<Kind>) -> Option<Self> {
        let field =
            |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        field("prog_type:").filter(|is| kind.is_none_or(|kind| *is == u64::from(kind.program_type())))?;
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

/// `SchedCls` as the kernel writes it.
fn snake_case(name: &str) -> String {
    let mut text = String::with_capacity(name.len() + 4);
    for (at, letter) in name.char_indices() {
        if letter.is_ascii_uppercase() && at > 0 {
            text.push('_');
        }
        text.push(letter.to_ascii_lowercase());
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_are_written_as_the_kernel_does() {
        assert_eq!(snake_case("SchedCls"), "sched_cls");
        assert_eq!(snake_case("Xdp"), "xdp");
        assert_eq!(snake_case("RawTracepointWritable"), "raw_tracepoint_writable");
    }

    #[test]
    fn reads_what_the_kernel_prints() {
        let program = "pos:\t0\nprog_type:\t3\nprog_id:\t77\nrun_time_ns:\t1234\nrun_cnt:\t5\n";
        assert_eq!(RunTime::parse(program, None), Some(RunTime { runs: 5, ns: 1234 }));
        assert!(RunTime::parse(program, Some(Kind::Tc)).is_some());
        assert_eq!(RunTime::parse(program, Some(Kind::Xdp)), None);
        assert_eq!(RunTime::parse("pos:\t0\nmap_type:\t2\n", None), None);
    }
}
