//! Computes differences between two reports from tables that the kernel keeps as growing sums.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use millrace_kernel::programs::{self, Statistics};

use crate::kernel::{self, ProcessId};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use super::{Config, PerCall};
use crate::cgroups::Cgroups;
use crate::report::{CgroupCost, CpuCost, ObserverCost, ProcessCost, ProcessProfile, ProgramCost, TaskCost};
use crate::share::share;

/// The processes' sums at the last report. A process that has exited is removed from the kernel's table once its sums
/// have not changed for a whole report.
#[derive(Debug, Default)]
pub(super) struct Processes {
    last: HashMap<ProcessId, TaskCost>,
}

/// A process with its costs since the last report.
pub(super) struct ProcessCosts {
    pid: u32,
    cgroup: u64,
    name: String,
    cost: TaskCost,
}

/// Adds the sampled costs of processes, each with its PID, its cgroup and the name of a thread.
pub(super) fn add_sampled(
    taken: &mut Vec<ProcessCosts>,
    sampled: impl Iterator<Item = ((u32, u64), String, TaskCost)>,
) {
    let mut places: HashMap<(u32, u64), usize> =
        taken.iter().zip(0..).map(|(of, at)| ((of.pid, of.cgroup), at)).collect();
    for ((pid, cgroup), name, cost) in sampled {
        // Processes outside of the PID namespace all have the PID 0, so their entries are not combined.
        let known = places.get(&(pid, cgroup)).filter(|_| pid > 0).and_then(|at| taken.get_mut(*at));
        match known {
            Some(of) => of.cost.add(&cost),
            None => {
                places.insert((pid, cgroup), taken.len());
                taken.push(ProcessCosts { pid, cgroup, name, cost });
            }
        }
    }
}

impl Processes {
    /// Returns the processes whose sums have grown since the last report, and the IDs of exited processes, whose
    /// entries the kernel's table no longer needs.
    pub fn read(&mut self, sums: Vec<kernel::ProcessSums>) -> (Vec<ProcessCosts>, Vec<ProcessId>) {
        let mut taken = Vec::new();
        let mut forget = Vec::new();
        let mut now = HashMap::new();
        for process in sums {
            let sum = sum(&process);
            let cost = since(&sum, self.last.get(&process.id));
            if cost != TaskCost::default() {
                taken.push(ProcessCosts {
                    pid: process.pid,
                    cgroup: process.id.cgroup,
                    name: process.name,
                    cost,
                });
            } else if !is_alive(process.pid) {
                forget.push(process.id);
                continue;
            }
            now.insert(process.id, sum);
        }
        self.last = now;
        (taken, forget)
    }
}

fn sum(process: &kernel::ProcessSums) -> TaskCost {
    TaskCost {
        send_ns: process.ns(kernel::KernelEvent::Send),
        receive_ns: process.ns(kernel::KernelEvent::Receive),
        io_uring_ns: process.ns(kernel::KernelEvent::IoUring),
        local_ns: process.ns(kernel::KernelEvent::Local),
        send_calls: process.calls(kernel::KernelEvent::Send),
        receive_calls: process.calls(kernel::KernelEvent::Receive),
        local_calls: process.calls(kernel::KernelEvent::Local),
        ..TaskCost::default()
    }
}

/// Returns the increase of a sum. A sum smaller than before has restarted at 0: its entry was removed, and the ID was
/// reused.
fn since(sum: &TaskCost, before: Option<&TaskCost>) -> TaskCost {
    let Some(before) = before else { return *sum };
    let mut grown = true;
    let mut less = |of: fn(&TaskCost) -> u64| {
        grown &= of(sum) >= of(before);
        of(sum).saturating_sub(of(before))
    };
    let since = TaskCost {
        send_ns: less(|cost| cost.send_ns),
        receive_ns: less(|cost| cost.receive_ns),
        io_uring_ns: less(|cost| cost.io_uring_ns),
        local_ns: less(|cost| cost.local_ns),
        send_calls: less(|cost| cost.send_calls),
        receive_calls: less(|cost| cost.receive_calls),
        local_calls: less(|cost| cost.local_calls),
        ..TaskCost::default()
    };
    if grown { since } else { *sum }
}

fn is_alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// Returns the processes that the settings select, with their names, and the sums of their cgroups.
pub(super) fn describe(
    taken: Vec<ProcessCosts>,
    per_call: PerCall,
    cgroups: &mut Cgroups,
    config: &Config,
    period: Duration,
) -> (Vec<ProcessCost>, Vec<CgroupCost>) {
    let mut processes = Vec::new();
    let mut sums: BTreeMap<u64, CgroupCost> = BTreeMap::new();
    for ProcessCosts { pid, cgroup, name, cost } in taken {
        let path = cgroups.path(cgroup).map(str::to_owned);
        if !is_wanted(config, pid, path.as_deref()) {
            continue;
        }
        let cost = per_call.without(&cost);
        let sum = sums.entry(cgroup).or_insert_with(|| CgroupCost {
            id: cgroup,
            path: path.clone(),
            share: 0.0,
            interval: None,
            processes: 0,
            cost: TaskCost::default(),
        });
        sum.processes += 1;
        sum.cost.add(&cost);
        processes.push(ProcessCost {
            pid,
            name: process_name(pid).unwrap_or(name),
            arguments: None,
            cgroup: path,
            share: share(cost.ns(), period),
            interval: None,
            cost,
            profile: None,
        });
    }
    let mut cgroups: Vec<CgroupCost> = sums.into_values().collect();
    cgroups.iter_mut().for_each(|cgroup| cgroup.share = share(cgroup.cost.ns(), period));
    cgroups.sort_by_key(|cgroup| std::cmp::Reverse(cgroup.cost.ns()));
    processes.sort_by_key(|process| std::cmp::Reverse(process.cost.ns()));
    (processes, cgroups)
}

fn is_wanted(config: &Config, pid: u32, cgroup: Option<&str>) -> bool {
    let below = |wanted: &String| {
        let wanted = wanted.trim_end_matches('/');
        cgroup
            .and_then(|path| path.strip_prefix(wanted))
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    (config.pids.is_empty() || config.pids.contains(&pid)) && config.cgroup.as_ref().is_none_or(below)
}

/// Returns the name of a process, not of one of its threads, or `None` if the process has exited.
fn process_name(pid: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_end().to_owned())
}

/// Returns the costs of a profiled process that made no socket call.
pub(super) fn idle(pid: u32, profile: ProcessProfile) -> ProcessCost {
    ProcessCost {
        pid,
        name: process_name(pid).unwrap_or_default(),
        arguments: None,
        cgroup: None,
        share: 0.0,
        interval: None,
        cost: TaskCost::default(),
        profile: Some(profile),
    }
}

/// The run time and number of runs of each BPF program at the last report.
#[derive(Debug)]
pub(super) struct ProgramTable {
    own: HashSet<u32>,
    last: HashMap<u32, programs::ProgramFigures>,
}

impl ProgramTable {
    pub fn new(own: Vec<u32>) -> Self {
        Self { own: own.into_iter().collect(), last: HashMap::new() }
    }

    pub fn read(&mut self, statistics: &Statistics, period: Duration) -> Vec<ProgramCost> {
        let now: HashMap<u32, programs::ProgramFigures> =
            statistics.read().into_iter().map(|program| (program.id, program)).collect();
        let mut programs: Vec<ProgramCost> =
            now.values().filter_map(|program| self.ran(program, period)).collect();
        programs.sort_by(|a, b| b.run_ns.cmp(&a.run_ns).then(a.id.cmp(&b.id)));
        self.last = now;
        programs
    }

    fn ran(&self, program: &programs::ProgramFigures, period: Duration) -> Option<ProgramCost> {
        let before = self.last.get(&program.id);
        let since =
            |of: fn(&programs::ProgramFigures) -> u64| of(program).saturating_sub(before.map_or(0, of));
        let run_ns = since(|program| program.run_ns);
        let runs = since(|program| program.runs);
        let skipped = since(|program| program.skipped);
        (runs > 0 || skipped > 0).then(|| ProgramCost {
            id: program.id,
            name: program.name.clone(),
            kind: program.kind.clone(),
            run_ns,
            runs,
            skipped,
            share: share(run_ns, period),
            own: self.own.contains(&program.id),
        })
    }
}

/// Counts how often the kernel skipped a run of the observer's BPF programs. The kernel counts this even if run-time
/// statistics of BPF programs are off.
#[derive(Debug)]
pub(super) struct Skipped {
    programs: Vec<OwnedFd>,
    last: u64,
}

impl Skipped {
    pub fn new(programs: Vec<OwnedFd>) -> Self {
        Self { programs, last: 0 }
    }

    /// Returns how often the kernel has skipped an observer's BPF program since the last call of this function.
    pub fn read(&mut self) -> u64 {
        let sum = self.programs.iter().map(|program| programs::skipped_runs(program.as_fd())).sum();
        sum - std::mem::replace(&mut self.last, sum)
    }

    #[cfg(test)]
    pub fn add(&mut self, program: OwnedFd) {
        self.programs.push(program);
    }
}

/// The CPU time of the observer's process at the last report.
#[derive(Debug, Default)]
pub(super) struct ObserverUsage {
    user_ns: u64,
    system_ns: u64,
}

impl ObserverUsage {
    pub fn read(
        &mut self,
        cpus: &[CpuCost],
        programs: Option<&[ProgramCost]>,
        period: Duration,
    ) -> ObserverCost {
        let (user_ns, system_ns) =
            getrusage(UsageWho::RUSAGE_SELF).map_or((self.user_ns, self.system_ns), |usage| {
                let ns = |micros: i64| u64::try_from(micros).unwrap_or(0).saturating_mul(1000);
                (ns(usage.user_time().num_microseconds()), ns(usage.system_time().num_microseconds()))
            });
        let own = || programs.map(|programs| programs.iter().filter(|program| program.own));
        let program_ns = own().map(|own| own.map(|program| program.run_ns).sum());
        let observer = ObserverCost {
            user_ns: user_ns.saturating_sub(self.user_ns),
            system_ns: system_ns.saturating_sub(self.system_ns),
            events_ns: cpus.iter().flat_map(|cpu| &cpu.events).map(|event| event.observer_ns).sum(),
            program_ns,
            program_runs: own().map(|own| own.map(|program| program.runs).sum()),
            share: 0.0,
        };
        (self.user_ns, self.system_ns) = (user_ns, system_ns);
        ObserverCost { share: share(observer.ns(), period), ..observer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(send_ns: u64, send_calls: u64) -> TaskCost {
        TaskCost { send_ns, send_calls, ..TaskCost::default() }
    }

    #[test]
    fn map_totals_become_differences_per_report() {
        assert_eq!(since(&cost(7, 2), None), cost(7, 2));
        assert_eq!(since(&cost(7, 2), Some(&cost(4, 1))), cost(3, 1));
        // A sum of times that is smaller than in the last report means that the process ID was reused.
        assert_eq!(since(&cost(3, 2), Some(&cost(4, 1))), cost(3, 2));
    }

    #[test]
    fn sampled_and_timed_costs_of_one_process_are_added() {
        let of = |pid, other_ns| ((pid, 9), String::new(), TaskCost { other_ns, ..TaskCost::default() });
        let mut taken = vec![ProcessCosts { pid: 7, cgroup: 9, name: "server".to_owned(), cost: cost(5, 1) }];
        add_sampled(&mut taken, [of(7, 3), of(8, 4), of(0, 1), of(0, 2)].into_iter());
        let sums: Vec<_> = taken.iter().map(|of| (of.pid, of.cost.ns())).collect();
        assert_eq!(sums, [(7, 8), (8, 4), (0, 1), (0, 2)]);
        assert_eq!((taken[0].cost.send_ns, taken[0].cost.send_calls), (5, 1));
    }

    #[test]
    fn cgroup_filter_matches_whole_path_components_only() {
        let mut config = Config::new().expect("the taxonomy parses");
        config.cgroup = Some("/system.slice/".to_owned());
        for (path, want) in [
            (Some("/system.slice"), true),
            (Some("/system.slice/a.service"), true),
            (Some("/system.slices"), false),
            (Some("/"), false),
            (None, false),
        ] {
            assert_eq!(is_wanted(&config, 1, path), want, "{path:?}");
        }
        config.cgroup = Some("/".to_owned());
        assert!(is_wanted(&config, 1, Some("/a")));
        config.pids.insert(2);
        assert!(!is_wanted(&config, 1, Some("/a")));
    }
}
