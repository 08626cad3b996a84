//! Information from the kernel about all BPF programs: run times, numbers of runs, and addresses of functions.

#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::ops::AddAssign;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::Func;
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions, ProgramInfo};

use crate::Error;
use crate::raw::{check, owned};

/// Run-time statistics of all programs, which the kernel keeps while this value exists (`BPF_ENABLE_STATS`). The kernel
/// then reads a clock twice per run, which adds some 50 ns.
pub struct Statistics {
    _enabled: OwnedFd,
}

/// A program's run time and numbers of runs since it was loaded. The kernel updates them only while a [`Statistics`]
/// exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramFigures {
    /// The kernel's ID of the program.
    pub id: u32,
    /// The program's name, which the kernel cuts after 15 characters.
    pub name: String,
    /// Type of the program: `tracing`, `sched_cls`, `xdp`, ...
    pub kind: String,
    /// Total time that the program has run, in nanoseconds.
    pub run_ns: u64,
    /// Number of the program's runs.
    pub runs: u64,
    /// Number of runs that were skipped because the program was already running on that CPU.
    pub skipped: u64,
}

impl Statistics {
    /// Enables statistics until the value is dropped. Needs CAP_SYS_ADMIN.
    pub fn enable() -> Result<Self, Error> {
        // SAFETY: `bpf_enable_stats` takes no pointers, and returns a new descriptor.
        let enabled = unsafe { owned(libbpf_sys::bpf_enable_stats(libbpf_sys::BPF_STATS_RUN_TIME)) };
        Ok(Self { _enabled: enabled.map_err(Error::Statistics)? })
    }

    /// Returns run time and numbers of runs of every program that is loaded at present.
    pub fn read(&self) -> Vec<ProgramFigures> {
        ProgInfoIter::default()
            .map(|info| ProgramFigures {
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

/// The kind of hook that a program is attached to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProgramKind {
    /// A program at TC, ingress or egress.
    Tc,
    /// A program at XDP.
    Xdp,
}

impl ProgramKind {
    fn program_type(self) -> libbpf_sys::bpf_prog_type {
        match self {
            Self::Tc => libbpf_sys::BPF_PROG_TYPE_SCHED_CLS,
            Self::Xdp => libbpf_sys::BPF_PROG_TYPE_XDP,
        }
    }
}

/// Number of runs and run time of several BPF programs together, since they were loaded. The kernel counts only while
/// statistics are enabled.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RunTime {
    /// Number of runs of the programs.
    pub runs: u64,
    /// Total time that the programs have run, in nanoseconds.
    pub ns: u64,
}

impl RunTime {
    /// Returns the total run time and number of runs of all programs that a process has descriptors of. With `kind`,
    /// only programs for this kind of hook count.
    pub fn list_functions(process: u32, kind: Option<ProgramKind>) -> io::Result<Self> {
        // The map removes duplicates, since a process may have several descriptors of one program.
        let mut programs = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{process}/fdinfo"))? {
            // The descriptor may have been closed in the meantime.
            let info = fs::read_to_string(entry?.path()).unwrap_or_default();
            programs.extend(Self::parse(&info, kind));
        }
        let mut total = Self::default();
        programs.into_values().for_each(|time| total += time);
        Ok(total)
    }

    /// Returns a program's ID, number of runs and run time, or `None` if the file is not a program of this kind.
    fn parse(info: &str, kind: Option<ProgramKind>) -> Option<(u64, Self)> {
        field(info, "prog_type:")
            .filter(|is| kind.is_none_or(|kind| *is == u64::from(kind.program_type())))?;
        Some((
            field(info, "prog_id:")?,
            Self { runs: field(info, "run_cnt:")?, ns: field(info, "run_time_ns:")? },
        ))
    }

    /// Returns the number of runs and the run time since `earlier`.
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

/// Returns the number of a program's runs that the kernel skipped because the program was already running on that CPU.
/// The kernel counts these also without [`Statistics`], and reading them needs no privileges.
pub fn skipped_runs(program: BorrowedFd<'_>) -> u64 {
    let path = format!("/proc/self/fdinfo/{}", program.as_raw_fd());
    field(&fs::read_to_string(path).unwrap_or_default(), "recursion_misses:").unwrap_or(0)
}

/// Returns the number after `name` in the text `info` of `/proc/PID/fdinfo/FD`.
fn field(info: &str, name: &str) -> Option<u64> {
    info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok())
}

/// A compiled function of a BPF program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramFunction {
    /// Address of the function's first byte.
    pub start: u64,
    /// Length of the function's code in bytes.
    pub bytes: u32,
    /// The complete name, which `/proc/kallsyms` shows after the program's tag. For a program without a name it is the
    /// tag.
    pub name: String,
}

/// The functions of all loaded programs. [`refresh`](Self::refresh) updates the list.
#[derive(Debug, Default)]
pub struct ProgramFunctions {
    /// The largest program ID so far.
    newest: u32,
    by_program: HashMap<u32, Vec<ProgramFunction>>,
}

impl ProgramFunctions {
    /// Updates the list. Reports whether programs were loaded since the last call; if not, the call makes one system
    /// call. Functions of unloaded programs stay in the list until another program is loaded, because only then can
    /// other code run at their addresses.
    ///
    /// # Errors
    /// Fails if the process lacks CAP_SYS_ADMIN.
    pub fn refresh(&mut self) -> io::Result<bool> {
        let newest = newest(self.newest)?;
        if newest == self.newest {
            return Ok(false);
        }
        let options = ProgInfoQueryOptions::default()
            .include_jited_ksyms(true)
            .include_jited_func_lens(true)
            .include_func_info(true);
        let mut types = HashMap::new();
        let mut known = std::mem::take(&mut self.by_program);
        // If the information about a program cannot be read, the iterator ends there. The next call then finds that
        // newer programs exist, and lists all of them again.
        self.newest = 0;
        for info in ProgInfoIter::with_query_opts(options) {
            let functions = known.remove(&info.id).unwrap_or_else(|| functions(&info, &mut types));
            self.by_program.insert(info.id, functions);
            self.newest = info.id;
        }
        Ok(true)
    }

    /// Returns the functions in the order of their addresses.
    pub fn iter(&self) -> impl Iterator<Item = &ProgramFunction> {
        self.by_program.values().flatten()
    }
}

/// Returns the largest ID of a program. `known` is the largest ID at the last call. The kernel gives IDs in ascending
/// order, and wraps around only after 2^31.
fn newest(known: u32) -> io::Result<u32> {
    let mut newest = known;
    loop {
        // SAFETY: `bpf_prog_get_next_id` only writes a number to `newest`.
        match unsafe { check(libbpf_sys::bpf_prog_get_next_id(newest, &raw mut newest)) } {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(newest),
            Err(error) => return Err(error),
        }
    }
}

/// Returns the functions of a program. `types` caches BTF by its ID, because all programs of an object share it.
fn functions(info: &ProgramInfo, types: &mut HashMap<u32, Option<Btf<'static>>>) -> Vec<ProgramFunction> {
    let btf = types.entry(info.btf_id).or_insert_with(|| Btf::from_prog_id(info.id).ok());
    let own_name = || match info.name.to_string_lossy() {
        name if name.is_empty() => info.tag.0.iter().map(|byte| format!("{byte:02x}")).collect(),
        name => name.into_owned(),
    };
    let name = |at: usize| {
        let function: Func<'_> = btf.as_ref()?.type_by_id(info.func_info.get(at)?.type_id.into())?;
        Some(function.name()?.to_string_lossy().into_owned())
    };
    let places = info.jited_ksyms.iter().zip(&info.jited_func_lens).enumerate();
    // The kernel hides addresses if kernel.kptr_restrict is set, or without CAP_SYSLOG.
    let places = places.filter(|(_, (start, _))| !start.is_null());
    places
        .map(|(at, (start, bytes))| ProgramFunction {
            start: start.addr() as u64,
            bytes: *bytes,
            name: name(at).unwrap_or_else(own_name),
        })
        .collect()
}

/// Converts a name such as `SchedCls` to the kernel's spelling.
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
    fn bpf_program_types_are_named_as_in_the_kernel() {
        assert_eq!(snake_case("SchedCls"), "sched_cls");
        assert_eq!(snake_case("Xdp"), "xdp");
        assert_eq!(snake_case("RawTracepointWritable"), "raw_tracepoint_writable");
    }

    #[test]
    fn program_info_of_the_kernel_is_parsed() {
        let program = "pos:\t0\nprog_type:\t3\nprog_id:\t77\nrun_time_ns:\t1234\nrun_cnt:\t5\n";
        assert_eq!(RunTime::parse(program, None), Some((77, RunTime { runs: 5, ns: 1234 })));
        assert!(RunTime::parse(program, Some(ProgramKind::Tc)).is_some());
        assert_eq!(RunTime::parse(program, Some(ProgramKind::Xdp)), None);
        assert_eq!(RunTime::parse("pos:\t0\nmap_type:\t2\n", None), None);
    }
}
