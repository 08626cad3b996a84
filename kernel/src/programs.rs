//! What the kernel tells of all BPF programs: run times and numbers of runs, and where their functions are.

#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io;
use std::ops::AddAssign;
use std::os::fd::OwnedFd;

use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::Func;
use libbpf_rs::query::{ProgInfoIter, ProgInfoQueryOptions, ProgramInfo};

use crate::Error;
use crate::raw::{check, owned};

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
        // A process may have several descriptors of one program.
        let mut programs = BTreeMap::new();
        for entry in fs::read_dir(format!("/proc/{process}/fdinfo"))? {
            // A descriptor that was closed meanwhile is of no interest.
            let info = fs::read_to_string(entry?.path()).unwrap_or_default();
            programs.extend(Self::parse(&info, kind));
        }
        let mut total = Self::default();
        programs.into_values().for_each(|time| total += time);
        Ok(total)
    }

    /// A program's ID and figures. `None`: the file is not such a program.
    fn parse(info: &str, kind: Option<Kind>) -> Option<(u64, Self)> {
        let field =
            |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.trim().parse::<u64>().ok());
        field("prog_type:").filter(|is| kind.is_none_or(|kind| *is == u64::from(kind.program_type())))?;
        Some((field("prog_id:")?, Self { runs: field("run_cnt:")?, ns: field("run_time_ns:")? }))
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

/// A compiled function of a BPF program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Function {
    /// Address of its first byte.
    pub start: u64,
    pub bytes: u32,
    /// In full, as `/proc/kallsyms` has it behind the tag; the tag of a program that has none.
    pub name: String,
}

/// The functions of all programs that are loaded, kept up to date by [`refresh`](Self::refresh).
#[derive(Debug, Default)]
pub struct Functions {
    /// The largest ID so far.
    newest: u32,
    by_program: HashMap<u32, Vec<Function>>,
}

impl Functions {
    /// Whether programs were loaded since the last time. One system call if not. Programs that were unloaded are forgotten
    /// only when others come: nothing runs at their addresses before.
    ///
    /// # Errors
    /// Without CAP_SYS_ADMIN.
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
        for info in ProgInfoIter::with_query_opts(options) {
            let functions = known.remove(&info.id).unwrap_or_else(|| functions(&info, &mut types));
            self.by_program.insert(info.id, functions);
        }
        self.newest = newest;
        Ok(true)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Function> {
        self.by_program.values().flatten()
    }
}

/// The largest ID of a program, if `known` was it before. The kernel counts upwards, and begins again only after 2^31.
fn newest(known: u32) -> io::Result<u32> {
    let mut newest = known;
    loop {
        // SAFETY: the call writes one number.
        match unsafe { check(libbpf_sys::bpf_prog_get_next_id(newest, &raw mut newest)) } {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(newest),
            Err(error) => return Err(error),
        }
    }
}

/// `types`: by ID of the BTF, which all programs of an object share.
fn functions(info: &ProgramInfo, types: &mut HashMap<u32, Option<Btf<'static>>>) -> Vec<Function> {
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
    // Addresses may be hidden (kernel.kptr_restrict, no CAP_SYSLOG).
    let places = places.filter(|(_, (start, _))| !start.is_null());
    places
        .map(|(at, (start, bytes))| Function {
            start: start.addr() as u64,
            bytes: *bytes,
            name: name(at).unwrap_or_else(own_name),
        })
        .collect()
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
        assert_eq!(RunTime::parse(program, None), Some((77, RunTime { runs: 5, ns: 1234 })));
        assert!(RunTime::parse(program, Some(Kind::Tc)).is_some());
        assert_eq!(RunTime::parse(program, Some(Kind::Xdp)), None);
        assert_eq!(RunTime::parse("pos:\t0\nmap_type:\t2\n", None), None);
    }
}
