//! Several reports as one: what came to pass in all of their periods.

use std::collections::{BTreeMap, HashMap, btree_map::Entry};

use crate::report::{
    Cgroup, Cpu, Energy, EnergyDomain, Event, EventCost, Function, Observer, OtherFunctions, Part, ProcStat,
    Process, Profile, Program, Report, Stack, Stacks,
};

/// Adds up reports of one host, in the order of time.
///
/// Times and counts are sums, shares are of all periods together, and what is not a figure (mode, host, names) is
/// that of the last report. Gaps between the periods count for nothing.
#[derive(Debug, Default)]
pub struct Merge {
    sum: Option<Report>,
    cpus: BTreeMap<u32, Cpu>,
    others: BTreeMap<(Event, String), Function>,
    processes: BTreeMap<(u32, String), Process>,
    cgroups: BTreeMap<u64, Cgroup>,
    programs: Option<BTreeMap<u32, Program>>,
    stacks: Option<MergeStacks>,
    no_stacks: bool,
}

/// As many functions of the part `other` as a report has of each event.
const TOP_OTHERS: usize = 20;
/// A sum of more processes, as over days, has no command lines: they would be most of it.
const PROCESSES_WITH_ARGUMENTS: usize = 10_000;

impl Merge {
    pub fn add(&mut self, report: &Report) {
        self.add_totals(report);
        for cpu in &report.cpus {
            sum_up(&mut self.cpus, cpu.cpu, cpu, add_cpu);
        }
        for other in &report.other {
            for function in &other.functions {
                sum_up(&mut self.others, (other.event, function.name.clone()), function, add_function);
            }
        }
        for process in &report.processes {
            sum_up(&mut self.processes, (process.pid, process.name.clone()), process, add_process);
        }
        if self.processes.len() > PROCESSES_WITH_ARGUMENTS {
            self.processes.values_mut().for_each(|process| process.arguments = None);
        }
        for cgroup in &report.cgroups {
            sum_up(&mut self.cgroups, cgroup.id, cgroup, add_cgroup);
        }
        if let Some(programs) = &report.programs {
            let into = self.programs.get_or_insert_default();
            for program in programs {
                sum_up(into, program.id, program, add_program);
            }
        }
        if let Some(stacks) = &report.stacks
            && !self.no_stacks
        {
            self.stacks.get_or_insert_default().add(stacks, Some);
        }
    }

    /// Nothing if no report was added.
    pub fn finish(self) -> Option<Report> {
        let mut report = self.sum?;
        let period = report.period_ns;
        report.cpus = self.cpus.into_values().map(|cpu| shares_of_cpu(cpu, period)).collect();
        report.other = others(self.others);
        report.processes = by_share(self.processes, |process| {
            process.share = share(process.cost.ns(), period);
            for part in process.profile.iter_mut().flat_map(|profile| &mut profile.parts) {
                part.share = share(part.ns, period);
            }
            process.share
        });
        report.cgroups = by_share(self.cgroups, |cgroup| {
            cgroup.share = share(cgroup.cost.ns(), period);
            cgroup.share
        });
        report.programs = self.programs.map(|programs| {
            by_share(programs, |program| {
                program.share = share(program.run_ns, period);
                program.share
            })
        });
        report.stacks = self.stacks.map(MergeStacks::finish);
        report.energy = watts(report.energy, period);
        report.observer.share = share(report.observer.ns(), period);
        Some(report)
    }

    /// Everything that is one value, not a table.
    fn add_totals(&mut self, report: &Report) {
        let before = self.sum.take();
        let sum = self.sum.insert(report.without_tables());
        let Some(before) = before else { return };
        sum.period_ns += before.period_ns;
        sum.sampled_ns += before.sampled_ns;
        add_lost(&mut sum.lost, &before.lost);
        add_observer(&mut sum.observer, &before.observer);
        sum.energy = add_energy(before.energy, sum.energy.clone());
        for missing in before.missing {
            if !sum.missing.contains(&missing) {
                sum.missing.push(missing);
            }
        }
    }
}

/// `None` of no reports.
pub fn merge<'a>(reports: impl IntoIterator<Item = &'a Report>) -> Option<Report> {
    let mut merge = Merge::default();
    for report in reports {
        merge.add(report);
    }
    merge.finish()
}

/// The same without stacks, which cost most.
pub fn merge_tables<'a>(reports: impl IntoIterator<Item = &'a Report>) -> Option<Report> {
    let mut merge = Merge { no_stacks: true, ..Merge::default() };
    for report in reports {
        merge.add(report);
    }
    merge.finish()
}

/// Stacks of the CPUs that are kept, each once; their `cpu` is 0.
pub fn stacks<'a>(of: impl IntoIterator<Item = &'a Stacks>, keep: impl Fn(u32) -> bool) -> Stacks {
    let mut merge = MergeStacks::default();
    for stacks in of {
        merge.add(stacks, |cpu| keep(cpu).then_some(0));
    }
    merge.finish()
}

fn sum_up<K: Ord, T: Clone>(sums: &mut BTreeMap<K, T>, key: K, more: &T, add: impl FnOnce(&mut T, &T)) {
    match sums.entry(key) {
        Entry::Vacant(entry) => {
            entry.insert(more.clone());
        }
        Entry::Occupied(entry) => add(entry.into_mut(), more),
    }
}

/// Most first; `set` computes an item's share.
fn by_share<K, T>(items: BTreeMap<K, T>, set: impl Fn(&mut T) -> f64) -> Vec<T> {
    let mut shares: Vec<(f64, T)> = items.into_values().map(|mut item| (set(&mut item), item)).collect();
    shares.sort_by(|a, b| b.0.total_cmp(&a.0));
    shares.into_iter().map(|(_, item)| item).collect()
}

fn share(ns: u64, period_ns: u64) -> f64 {
    (ns as f64 / period_ns.max(1) as f64 * 1e6).round() / 1e6
}

fn add_cpu(sum: &mut Cpu, more: &Cpu) {
    for event in &more.events {
        match sum.events.iter_mut().find(|of| of.event == event.event) {
            Some(into) => add_event(into, event),
            None => sum.events.push(event.clone()),
        }
    }
    let (a, b) = (&mut sum.procstat, &more.procstat);
    *a = ProcStat {
        user_ns: a.user_ns + b.user_ns,
        system_ns: a.system_ns + b.system_ns,
        softirq_ns: a.softirq_ns + b.softirq_ns,
        irq_ns: a.irq_ns + b.irq_ns,
        steal_ns: a.steal_ns + b.steal_ns,
        idle_ns: a.idle_ns + b.idle_ns,
    };
    sum.samples += more.samples;
    sum.lost_samples += more.lost_samples;
}

fn add_event(sum: &mut EventCost, more: &EventCost) {
    sum.ns += more.ns;
    sum.calls = sum.calls.zip(more.calls).map(|(a, b)| a + b);
    sum.observer_ns += more.observer_ns;
    sum.samples += more.samples;
    add_parts(&mut sum.parts, &more.parts);
}

fn add_parts(sum: &mut Vec<Part>, more: &[Part]) {
    for part in more {
        match sum.iter_mut().find(|of| of.name == part.name) {
            Some(into) => {
                into.ns += part.ns;
                into.samples += part.samples;
            }
            None => sum.push(part.clone()),
        }
    }
    sum.sort_by_key(|part| std::cmp::Reverse(part.ns));
}

fn shares_of_cpu(mut cpu: Cpu, period: u64) -> Cpu {
    for event in &mut cpu.events {
        event.share = share(event.ns, period);
        for part in &mut event.parts {
            part.share = share(part.ns, period);
        }
    }
    cpu.networking_share = share(cpu.events.iter().map(|event| event.ns).sum(), period);
    cpu.observer_share = share(cpu.events.iter().map(|event| event.observer_ns).sum(), period);
    cpu
}

fn add_function(sum: &mut Function, more: &Function) {
    sum.ns += more.ns;
    sum.samples += more.samples;
}

fn others(sums: BTreeMap<(Event, String), Function>) -> Vec<OtherFunctions> {
    let mut of_event: BTreeMap<Event, Vec<Function>> = BTreeMap::new();
    for ((event, _), function) in sums {
        of_event.entry(event).or_default().push(function);
    }
    let top = |(event, mut functions): (Event, Vec<Function>)| {
        functions.sort_by_key(|function| std::cmp::Reverse(function.ns));
        functions.truncate(TOP_OTHERS);
        OtherFunctions { event, functions }
    };
    of_event.into_iter().map(top).collect()
}

fn add_process(sum: &mut Process, more: &Process) {
    sum.cost.add(&more.cost);
    if more.cgroup.is_some() {
        sum.cgroup.clone_from(&more.cgroup);
    }
    if more.arguments.is_some() {
        sum.arguments.clone_from(&more.arguments);
    }
    match (&mut sum.profile, &more.profile) {
        (Some(into), Some(profile)) => add_profile(into, profile),
        (into @ None, profile) => into.clone_from(profile),
        (Some(_), None) => {}
    }
}

fn add_profile(sum: &mut Profile, more: &Profile) {
    sum.samples += more.samples;
    sum.user_samples += more.user_samples;
    sum.unknown_samples += more.unknown_samples;
    add_parts(&mut sum.parts, &more.parts);
    for function in &more.functions {
        match sum.functions.iter_mut().find(|of| of.name == function.name) {
            Some(into) => add_function(into, function),
            None => sum.functions.push(function.clone()),
        }
    }
    sum.functions.sort_by_key(|function| std::cmp::Reverse(function.samples));
}

fn add_cgroup(sum: &mut Cgroup, more: &Cgroup) {
    sum.cost.add(&more.cost);
    sum.processes = sum.processes.max(more.processes);
    if more.path.is_some() {
        sum.path.clone_from(&more.path);
    }
}

fn add_program(sum: &mut Program, more: &Program) {
    sum.run_ns += more.run_ns;
    sum.runs += more.runs;
    sum.skipped += more.skipped;
}

fn add_lost(sum: &mut crate::report::Lost, more: &crate::report::Lost) {
    sum.samples += more.samples;
    sum.stacks += more.stacks;
    sum.processes += more.processes;
    sum.tasks += more.tasks;
    sum.skipped_runs += more.skipped_runs;
}

fn add_observer(sum: &mut Observer, more: &Observer) {
    let both = |a: Option<u64>, b: Option<u64>| a.or(b).map(|_| a.unwrap_or(0) + b.unwrap_or(0));
    sum.user_ns += more.user_ns;
    sum.system_ns += more.system_ns;
    sum.events_ns += more.events_ns;
    sum.program_ns = both(sum.program_ns, more.program_ns);
    sum.program_runs = both(sum.program_runs, more.program_runs);
}

/// Of a time in which it was absent for a while, it is not known.
fn add_energy(before: Energy, last: Energy) -> Energy {
    match (before, last) {
        (
            Energy::Measured {
                domains: before,
                total_joules: total,
                active_joules: active,
                networking_joules: networking,
                ..
            },
            Energy::Measured {
                source,
                mut domains,
                total_joules,
                active_joules,
                networking_joules,
                networking_watts,
                idle_watts,
            },
        ) => {
            for domain in before {
                match domains.iter_mut().find(|of| of.name == domain.name) {
                    Some(into) => into.joules += domain.joules,
                    None => domains.push(domain),
                }
            }
            Energy::Measured {
                source,
                domains,
                total_joules: total_joules + total,
                active_joules: active_joules.zip(active).map(|(a, b)| a + b),
                networking_joules: networking_joules + networking,
                networking_watts,
                idle_watts,
            }
        }
        (absent @ Energy::Absent { .. }, _) | (_, absent) => absent,
    }
}

fn watts(energy: Energy, period_ns: u64) -> Energy {
    let watts = |joules: f64| joules * 1e9 / period_ns.max(1) as f64;
    match energy {
        Energy::Measured {
            source,
            domains,
            total_joules,
            active_joules,
            networking_joules,
            idle_watts,
            ..
        } => Energy::Measured {
            total_joules,
            source,
            domains: domains
                .into_iter()
                .map(|domain| EnergyDomain { watts: watts(domain.joules), ..domain })
                .collect(),
            active_joules,
            networking_joules,
            networking_watts: watts(networking_joules),
            idle_watts,
        },
        absent @ Energy::Absent { .. } => absent,
    }
}

#[derive(Debug, Default)]
struct MergeStacks {
    functions: Vec<String>,
    numbers: HashMap<String, u32>,
    sums: HashMap<StackKey, (u64, u64)>,
}

/// CPU, event, process, functions.
type StackKey = (u32, Option<Event>, Option<u32>, Vec<u32>);

impl MergeStacks {
    fn add(&mut self, stacks: &Stacks, cpu: impl Fn(u32) -> Option<u32>) {
        let numbers: Vec<u32> = stacks.functions.iter().map(|name| self.number(name)).collect();
        for stack in &stacks.stacks {
            let Some(cpu) = cpu(stack.cpu) else { continue };
            // A number that names nothing can only come from a file.
            let frames = stack.frames.iter().filter_map(|at| numbers.get(*at as usize).copied()).collect();
            let sum = self.sums.entry((cpu, stack.event, stack.pid, frames)).or_default();
            *sum = (sum.0 + stack.samples, sum.1 + stack.ns);
        }
    }

    fn number(&mut self, name: &str) -> u32 {
        if let Some(number) = self.numbers.get(name) {
            return *number;
        }
        let number = u32::try_from(self.functions.len()).unwrap_or(u32::MAX);
        self.functions.push(name.to_owned());
        self.numbers.insert(name.to_owned(), number);
        number
    }

    fn finish(self) -> Stacks {
        let stack = |((cpu, event, pid, frames), (samples, ns)): (StackKey, (u64, u64))| Stack {
            cpu,
            event,
            pid,
            frames,
            samples,
            ns,
        };
        let mut stacks: Vec<Stack> = self.sums.into_iter().map(stack).collect();
        // The rest of the order makes equal input give equal output.
        stacks.sort_unstable_by(|a, b| {
            b.ns.cmp(&a.ns)
                .then_with(|| (a.cpu, a.event, a.pid, &a.frames).cmp(&(b.cpu, b.event, b.pid, &b.frames)))
        });
        Stacks { functions: self.functions, stacks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::Mode;
    use crate::samples::{report, stacks};

    #[test]
    fn two_periods_are_one_twice_as_long() {
        let (mut a, b) = (report(0), report(1));
        a.cpus.truncate(1);
        let sum = merge([&a, &b]).expect("a report");
        assert_eq!((sum.sequence, sum.time_unix_ms), (1, b.time_unix_ms));
        assert_eq!(sum.period_ns, 2_000_000_000);
        let [first, second] = &sum.cpus[..] else { panic!("{:?}", sum.cpus) };
        assert_eq!(first.networking_share, b.cpus[0].networking_share);
        assert_eq!(second.networking_share, b.cpus[1].networking_share / 2.0);
        let event = &first.events[0];
        assert_eq!((event.ns, event.samples), (2 * b.cpus[0].events[0].ns, 2 * b.cpus[0].events[0].samples));
        assert_eq!(event.parts.iter().map(|part| part.ns).sum::<u64>(), event.ns);
        assert_eq!(event.observer_ns, 2 * b.cpus[0].events[0].observer_ns);
        assert_eq!(first.observer_share, b.cpus[0].observer_share);
        assert_eq!(sum.observer.events_ns, 2 * b.observer.events_ns);
        assert_eq!(first.procstat.user_ns, 2 * b.cpus[0].procstat.user_ns);
        assert_eq!(sum.processes[0].cost.send_calls, 2 * b.processes[0].cost.send_calls);
        assert_eq!(sum.processes[0].share, b.processes[0].share);
        assert_eq!(sum.lost.samples, 2 * b.lost.samples);
        assert_eq!(sum.missing, b.missing);
    }

    #[test]
    fn the_last_command_line_is_that_of_a_sum_which_has_few_processes() {
        let with = |pid: u32, arguments: Option<&str>| {
            let mut report = report(0);
            (report.processes[0].pid, report.processes[0].arguments) = (pid, arguments.map(str::to_owned));
            report
        };
        let sum =
            merge(&[with(1, Some("starts")), with(1, Some("serves")), with(1, None)]).expect("a report");
        assert_eq!(sum.processes[0].arguments.as_deref(), Some("serves"));
        let pids = 1..=u32::try_from(PROCESSES_WITH_ARGUMENTS).expect("a number");
        let mut many: Vec<Report> = pids.map(|pid| with(pid, Some("serves"))).collect();
        assert!(merge(&many).expect("a report").processes.iter().all(|process| process.arguments.is_some()));
        many.push(with(0, Some("serves")));
        assert!(!merge(&many).expect("a report").has_arguments());
    }

    #[test]
    fn modes_add_up() {
        let sampled = Report { mode: Mode::Sampling, sampled_ns: 1_000_000_000, ..report(0) };
        let sum = merge([&sampled, &report(1), &report(2)]).expect("a report");
        assert_eq!((sum.mode, sum.sampled_ns, sum.period_ns), (Mode::Events, 1_000_000_000, 3_000_000_000));
    }

    #[test]
    fn one_report_is_itself() {
        let one = report(3);
        assert_eq!(merge([&one]), Some(one));
        assert_eq!(merge([]), None);
    }

    /// Two reports number their functions independently.
    #[test]
    fn stacks_are_equal_by_names() {
        let a = Report { stacks: Some(stacks(&[("a;b;c", 0, 3), ("a;b", 1, 1)])), ..report(0) };
        let b =
            Report { stacks: Some(stacks(&[("a;x", 0, 1), ("a;b;c", 0, 2), ("a;b", 0, 4)])), ..report(1) };
        let merged = merge([&a, &b]).and_then(|report| report.stacks).expect("stacks");
        assert_eq!(named(&merged), [("a;b;c", 0, 5), ("a;b", 0, 4), ("a;b", 1, 1), ("a;x", 0, 1)].map(owned));
        assert_eq!(
            named(&super::stacks([&merged], |_| true)),
            [("a;b", 0, 5), ("a;b;c", 0, 5), ("a;x", 0, 1)].map(owned)
        );
        assert_eq!(named(&super::stacks([&merged], |cpu| cpu == 1)), [("a;b", 0, 1)].map(owned));
    }

    fn owned((frames, cpu, samples): (&str, u32, u64)) -> (String, u32, u64) {
        (frames.to_owned(), cpu, samples)
    }

    fn named(stacks: &Stacks) -> Vec<(String, u32, u64)> {
        let name = |at: &u32| stacks.functions[*at as usize].as_str();
        let mut named: Vec<_> = stacks
            .stacks
            .iter()
            .map(|stack| {
                let frames: Vec<&str> = stack.frames.iter().map(name).collect();
                (frames.join(";"), stack.cpu, stack.samples)
            })
            .collect();
        named.sort_by(|a, b| b.2.cmp(&a.2).then_with(|| a.cmp(b)));
        named
    }
}
