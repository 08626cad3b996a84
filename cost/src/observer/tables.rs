//! Tables that the kernel keeps as sums, as differences from one report to the next.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

use millrace_kernel::programs::{self, Statistics};

use crate::kernel::{self, ProcessId};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;

use super::{Config, PerCall};
use crate::cgroups::Cgroups;
use crate::report::{Cgroup, Cpu, Observer, Process, Profile, Program, TaskCost};
use crate::share::share;

/// Sums of processes. One that is gone leaves the kernel's table when nothing came from it for a report.
#[derive(Debug, Default)]
pub(super) struct Processes {
    last: HashMap<ProcessId, TaskCost>,
}

/// A process with what it took since the last report.
pub(super) struct Taken {
    pid: u32,
    cgroup: u64,
    name: String,
    cost: TaskCost,
}

impl Taken {
    /// Of a process that was seen in samples, in `send`, `receive` and `io_uring`.
    pub fn sampled(pid: u32, cgroup: u64, name: String, ns: [u64; 3]) -> Self {
        let [send_ns, receive_ns, io_uring_ns] = ns;
        let cost = TaskCost { send_ns, receive_ns, io_uring_ns, ..TaskCost::default() };
        Self { pid, cgroup, name, cost }
    }
}

impl Processes {
    /// Those that took something, and those that the kernel may forget.
    pub fn read(&mut self, sums: Vec<kernel::Process>) -> (Vec<Taken>, Vec<ProcessId>) {
        let (mut taken, mut forget, mut now) = (Vec::new(), Vec::new(), HashMap::new());
        for process in sums {
            let sum = sum(&process);
            let cost = since(&sum, self.last.get(&process.id));
            if cost != TaskCost::default() {
                taken.push(Taken { pid: process.pid, cgroup: process.id.cgroup, name: process.name, cost });
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

fn sum(process: &kernel::Process) -> TaskCost {
    TaskCost {
        send_ns: process.ns(kernel::Event::Send),
        receive_ns: process.ns(kernel::Event::Receive),
        io_uring_ns: process.ns(kernel::Event::IoUring),
        send_calls: process.calls(kernel::Event::Send),
        receive_calls: process.calls(kernel::Event::Receive),
    }
}

/// Sums that are smaller than before began anew: the ID was forgotten, and used again.
fn since(sum: &TaskCost, before: Option<&TaskCost>) -> TaskCost {
    let Some(before) = before else { return *sum };
    let fields = [
        (sum.send_ns, before.send_ns),
        (sum.receive_ns, before.receive_ns),
        (sum.io_uring_ns, before.io_uring_ns),
        (sum.send_calls, before.send_calls),
        (sum.receive_calls, before.receive_calls),
    ];
    if fields.iter().any(|(sum, before)| sum < before) {
        return *sum;
    }
    let [send_ns, receive_ns, io_uring_ns, send_calls, receive_calls] =
        fields.map(|(sum, before)| sum - before);
    TaskCost { send_ns, receive_ns, io_uring_ns, send_calls, receive_calls }
}

fn is_alive(pid: u32) -> bool {
    Path::new(&format!("/proc/{pid}")).exists()
}

/// With names, as the configuration filters them; and the sums of all that were not filtered out, by cgroup.
pub(super) fn describe(
    taken: Vec<Taken>,
    per_call: PerCall,
    cgroups: &mut Cgroups,
    config: &Config,
    period: Duration,
) -> (Vec<Process>, Vec<Cgroup>) {
    let mut processes = Vec::new();
    let mut sums: BTreeMap<u64, Cgroup> = BTreeMap::new();
    for Taken { pid, cgroup, name, cost } in taken {
        let path = cgroups.path(cgroup).map(str::to_owned);
        if !is_wanted(config, pid, path.as_deref()) {
            continue;
        }
        let cost = per_call.without(&cost);
        let sum = sums.entry(cgroup).or_insert_with(|| Cgroup {
            id: cgroup,
            path: path.clone(),
            share: 0.0,
            processes: 0,
            cost: TaskCost::default(),
        });
        sum.processes += 1;
        sum.cost.add(&cost);
        processes.push(Process {
            pid,
            name: process_name(pid).unwrap_or(name),
            arguments: None,
            cgroup: path,
            share: share(cost.ns(), period),
            cost,
            profile: None,
        });
    }
    let mut cgroups: Vec<Cgroup> = sums.into_values().collect();
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

/// Of the process, not of one of its threads. `None`: it is gone.
fn process_name(pid: u32) -> Option<String> {
    fs::read_to_string(format!("/proc/{pid}/comm")).ok().map(|name| name.trim_end().to_owned())
}

/// A chosen process that made no call.
pub(super) fn idle(pid: u32, profile: Profile) -> Process {
    Process {
        pid,
        name: process_name(pid).unwrap_or_default(),
        arguments: None,
        cgroup: None,
        share: 0.0,
        cost: TaskCost::default(),
        profile: Some(profile),
    }
}

/// Run times of BPF programs.
#[derive(Debug)]
pub(super) struct Programs {
    own: HashSet<u32>,
    last: HashMap<u32, programs::Program>,
    skipped: u64,
}

impl Programs {
    pub fn new(own: Vec<u32>) -> Self {
        Self { own: own.into_iter().collect(), last: HashMap::new(), skipped: 0 }
    }

    /// Runs of the observer's programs that were skipped between the last two readings.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    pub fn read(&mut self, statistics: &Statistics, period: Duration) -> Vec<Program> {
        let now: HashMap<u32, programs::Program> =
            statistics.read().into_iter().map(|program| (program.id, program)).collect();
        let mut programs: Vec<Program> =
            now.values().filter_map(|program| self.ran(program, period)).collect();
        programs.sort_by(|a, b| b.run_ns.cmp(&a.run_ns).then(a.id.cmp(&b.id)));
        self.skipped = programs.iter().filter(|program| program.own).map(|program| program.skipped).sum();
        self.last = now;
        programs
    }

    fn ran(&self, program: &programs::Program, period: Duration) -> Option<Program> {
        let before = self.last.get(&program.id);
        let since = |of: fn(&programs::Program) -> u64| of(program).saturating_sub(before.map_or(0, of));
        let (run_ns, runs) = (since(|program| program.run_ns), since(|program| program.runs));
        let skipped = since(|program| program.skipped);
        (runs > 0 || skipped > 0).then(|| Program {
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

/// The observer's process.
#[derive(Debug, Default)]
pub(super) struct Usage {
    user_ns: u64,
    system_ns: u64,
}

impl Usage {
    pub fn read(&mut self, cpus: &[Cpu], programs: Option<&[Program]>, period: Duration) -> Observer {
        let (user_ns, system_ns) =
            getrusage(UsageWho::RUSAGE_SELF).map_or((self.user_ns, self.system_ns), |usage| {
                let ns = |micros: i64| u64::try_from(micros).unwrap_or(0).saturating_mul(1000);
                (ns(usage.user_time().num_microseconds()), ns(usage.system_time().num_microseconds()))
            });
        let own = || programs.map(|programs| programs.iter().filter(|program| program.own));
        let program_ns = own().map(|own| own.map(|program| program.run_ns).sum());
        let observer = Observer {
            user_ns: user_ns.saturating_sub(self.user_ns),
            system_ns: system_ns.saturating_sub(self.system_ns),
            events_ns: cpus.iter().flat_map(|cpu| &cpu.events).map(|event| event.observer_ns).sum(),
            program_ns,
            program_runs: own().map(|own| own.map(|program| program.runs).sum()),
            share: 0.0,
        };
        (self.user_ns, self.system_ns) = (user_ns, system_ns);
        Observer { share: share(observer.ns(), period), ..observer }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cost(send_ns: u64, send_calls: u64) -> TaskCost {
        TaskCost { send_ns, send_calls, ..TaskCost::default() }
    }

    #[test]
    fn sums_become_differences() {
        assert_eq!(since(&cost(7, 2), None), cost(7, 2));
        assert_eq!(since(&cost(7, 2), Some(&cost(4, 1))), cost(3, 1));
        // The same process ID again.
        assert_eq!(since(&cost(3, 2), Some(&cost(4, 1))), cost(3, 2));
    }

    #[test]
    fn cgroups_are_filtered_by_whole_names() {
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
