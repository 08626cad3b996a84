//! Adds up several reports into one report of all their periods.

use std::cmp::Reverse;
use std::collections::{BTreeMap, btree_map::Entry};

use rustc_hash::FxHashMap;

use crate::interval;
use crate::report::{
    CgroupCost, CpuCost, Energy, Event, EventCost, EventPart, FunctionCost, MissingMeasurement, ObserverCost,
    OtherFunctions, ProcStat, ProcessCost, ProcessProfile, ProfiledStack, ProgramCost, Report, Stacks,
};

/// Adds up reports of one host, in the order of time.
///
/// Times and counts are added. Shares refer to the sum of all periods, without the gaps between them. The mode (events
/// timed, or only sampled), the host and names are those of the last report.
///
/// ```no_run
/// use std::path::Path;
/// use millrace_cost::{log::ReportReader, merge::Merge};
///
/// let mut merge = Merge::default();
/// for report in ReportReader::open(Path::new("/var/lib/millrace/cost.jsonl"))? {
///     merge.add(&report?);
/// }
/// let sum = merge.finish().ok_or("the log is empty")?;
/// println!("{:.1} s are covered", sum.period_ns as f64 / 1e9);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct Merge {
    sum: Option<Report>,
    cpus: BTreeMap<u32, CpuCost>,
    others: BTreeMap<(Event, String), FunctionCost>,
    processes: BTreeMap<(u32, String), ProcessCost>,
    cgroups: BTreeMap<u64, CgroupCost>,
    programs: Option<BTreeMap<u32, ProgramCost>>,
    stacks: Option<MergeStacks>,
    no_stacks: bool,
}

/// Largest number of functions that are listed for each kernel event (such as a softirq) because no rule assigns them
/// to a part of the network stack. It is the same as in a single report.
const TOP_OTHERS: usize = 20;
/// Largest number of processes with which a sum keeps command lines. With more processes, the command lines would take
/// most of the sum's memory.
const PROCESSES_WITH_ARGUMENTS: usize = 10_000;
/// Largest number of entries in a table of processes, cgroups or programs, which come and go without end. In a larger
/// table, the half with the smaller costs becomes one entry with the name [`FURTHER`].
const MOST: usize = 20_000;
/// Largest number of different stacks in a sum.
pub(crate) const MOST_STACKS: usize = 50_000;
/// Largest number of network stack parts into which the time of a kernel event is split. BPF programs count as parts by
/// their names, so the number of parts has no natural limit.
const MOST_PARTS: usize = 200;
/// Largest number of listed functions without a part of the network stack in a sum of reports, and of functions in the
/// profile of one process.
const MOST_FUNCTIONS: usize = 2000;
/// Largest number of entries in the list of figures that a sum of reports lacks, as they could not be measured.
const MOST_MISSING: usize = 200;
/// The name of the entry that holds the sum of all entries for which a table had no room.
pub const FURTHER: &str = "[further]";

impl Merge {
    /// Adds a report. It must be of the same host, and later than the reports added before.
    pub fn add(&mut self, report: &Report) {
        self.add_tables(report);
        if let Some(stacks) = &report.stacks
            && !self.no_stacks
        {
            self.stacks.get_or_insert_default().add(stacks, Some);
        }
    }

    fn add_tables(&mut self, report: &Report) {
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
        self.bound();
    }

    /// Bounds the number of processes, cgroups, programs and stacks in the sum, so that its memory does not depend on
    /// the number of reports.
    fn bound(&mut self) {
        // A process with a profile was chosen by the user, so it always keeps its entry.
        let weight = |process: &ProcessCost| match process.profile {
            Some(_) => u64::MAX,
            None => process.cost.ns(),
        };
        bound(&mut self.processes, MOST, weight, add_process, |process| {
            *process = ProcessCost {
                pid: 0,
                name: FURTHER.to_owned(),
                arguments: None,
                cgroup: None,
                profile: None,
                ..process.clone()
            };
            (0, FURTHER.to_owned())
        });
        bound(
            &mut self.cgroups,
            MOST,
            |cgroup| cgroup.cost.ns(),
            add_cgroup,
            |cgroup| {
                (cgroup.id, cgroup.path) = (0, Some(FURTHER.to_owned()));
                0
            },
        );
        if let Some(programs) = &mut self.programs {
            bound(
                programs,
                MOST,
                |program| program.run_ns,
                add_program,
                |program| {
                    (program.id, program.name) = (0, FURTHER.to_owned());
                    0
                },
            );
        }
        if self.others.len() > MOST_FUNCTIONS {
            let mut all: Vec<_> = std::mem::take(&mut self.others).into_iter().collect();
            all.sort_by_key(|(_, function)| Reverse(function.ns));
            all.truncate(MOST_FUNCTIONS / 2);
            self.others = all.into_iter().collect();
        }
    }

    /// Returns the sum; `None` if no report was added.
    pub fn finish(self) -> Option<Report> {
        let mut report = self.sum?;
        let period = report.period_ns;
        report.cpus = self.cpus.into_values().map(|cpu| shares_of_cpu(cpu, period)).collect();
        report.other = other_functions(self.others);
        report.processes = sort_by_share(self.processes, |process| {
            process.share = share(process.cost.ns(), period);
            for part in process.profile.iter_mut().flat_map(|profile| &mut profile.parts) {
                part.share = share(part.ns, period);
            }
            process.share
        });
        report.cgroups = sort_by_share(self.cgroups, |cgroup| {
            cgroup.share = share(cgroup.cost.ns(), period);
            cgroup.share
        });
        report.programs = self.programs.map(|programs| {
            sort_by_share(programs, |program| {
                program.share = share(program.run_ns, period);
                program.share
            })
        });
        report.stacks = self.stacks.map(MergeStacks::finish);
        report.energy = watts(report.energy, period);
        report.observer.share = share(report.observer.ns(), period);
        interval::fill(&mut report);
        Some(report)
    }

    /// Adds the fields of a report that are single values, not tables.
    fn add_totals(&mut self, report: &Report) {
        let Some(sum) = &mut self.sum else {
            self.sum = Some(report.without_tables());
            return;
        };
        (sum.sequence, sum.time_unix_ms) = (report.sequence, report.time_unix_ms);
        (sum.mode, sum.auto, sum.method) = (report.mode, report.auto, report.method);
        sum.frequency_hz = report.frequency_hz;
        if sum.host != report.host {
            sum.host = report.host.clone();
        }
        sum.period_ns += report.period_ns;
        sum.sampled_ns += report.sampled_ns;
        add_lost(&mut sum.lost, &report.lost);
        add_observer(&mut sum.observer, &report.observer);
        if !matches!(sum.energy, Energy::Absent { .. }) {
            sum.energy = add_energy(sum.energy.clone(), report.energy.clone());
        }
        for missing in &report.missing {
            let same = |of: &MissingMeasurement| {
                (of.event, &of.what, &of.reason) == (missing.event, &missing.what, &missing.reason)
            };
            let is_full = sum.missing.len() >= MOST_MISSING;
            match sum.missing.iter_mut().find(|of| same(of)) {
                Some(into) => into.ns = into.ns.zip(missing.ns).map(|(a, b)| a + b),
                None if is_full => {}
                None => sum.missing.push(missing.clone()),
            }
        }
    }
}

/// Returns the sum of reports, or `None` if there are none.
pub fn merge<'a>(reports: impl IntoIterator<Item = &'a Report>) -> Option<Report> {
    let mut merge = Merge::default();
    for report in reports {
        merge.add(report);
    }
    merge.finish()
}

/// Returns the sum of reports without their stacks, which would take most of the time.
pub fn merge_tables<'a>(reports: impl IntoIterator<Item = &'a Report>) -> Option<Report> {
    let mut merge = Merge { no_stacks: true, ..Merge::default() };
    for report in reports {
        merge.add(report);
    }
    merge.finish()
}

/// Adds up the stacks of the CPUs for which `keep` is true. Each stack occurs once, with 0 as its CPU.
pub fn stacks<'a>(of: impl IntoIterator<Item = &'a Stacks>, keep: impl Fn(u32) -> bool) -> Stacks {
    let mut merge = MergeStacks::default();
    for stacks in of {
        merge.add(stacks, |cpu| keep(cpu).then_some(0));
    }
    merge.finish()
}

/// Adds `more` to the entry of `key`, or inserts it.
fn sum_up<K: Ord, T: Clone>(sums: &mut BTreeMap<K, T>, key: K, more: &T, add: impl FnOnce(&mut T, &T)) {
    match sums.entry(key) {
        Entry::Vacant(entry) => {
            entry.insert(more.clone());
        }
        Entry::Occupied(entry) => add(entry.into_mut(), more),
    }
}

/// Halves a table that has more than `most` entries: those with the largest weights stay. The others are added up to
/// one entry. `rename` gives this entry its name and returns its key.
fn bound<K: Ord, T>(
    sums: &mut BTreeMap<K, T>,
    most: usize,
    weight: impl Fn(&T) -> u64,
    add: impl Fn(&mut T, &T),
    rename: impl FnOnce(&mut T) -> K,
) {
    if sums.len() <= most {
        return;
    }
    let mut all: Vec<(K, T)> = std::mem::take(sums).into_iter().collect();
    all.sort_by_key(|(_, item)| Reverse(weight(item)));
    let mut small = all.split_off(most / 2).into_iter().map(|(_, item)| item);
    sums.extend(all);
    let Some(mut rest) = small.next() else { return };
    small.for_each(|item| add(&mut rest, &item));
    let key = rename(&mut rest);
    match sums.entry(key) {
        Entry::Vacant(entry) => drop(entry.insert(rest)),
        Entry::Occupied(entry) => add(entry.into_mut(), &rest),
    }
}

/// Sorts items by their share, largest first. `set` stores and returns an item's share.
fn sort_by_share<K, T>(items: BTreeMap<K, T>, set: impl Fn(&mut T) -> f64) -> Vec<T> {
    let mut shares: Vec<(f64, T)> = items.into_values().map(|mut item| (set(&mut item), item)).collect();
    shares.sort_by(|a, b| b.0.total_cmp(&a.0));
    shares.into_iter().map(|(_, item)| item).collect()
}

fn share(ns: u64, period_ns: u64) -> f64 {
    (ns as f64 / period_ns.max(1) as f64 * 1e6).round() / 1e6
}

fn add_cpu(sum: &mut CpuCost, more: &CpuCost) {
    for event in &more.events {
        match sum.events.iter_mut().find(|of| of.event == event.event) {
            Some(into) => add_event(into, event),
            None => sum.events.push(event.clone()),
        }
    }
    let a = &mut sum.procstat;
    let b = &more.procstat;
    *a = ProcStat {
        user_ns: a.user_ns + b.user_ns,
        system_ns: a.system_ns + b.system_ns,
        softirq_ns: a.softirq_ns + b.softirq_ns,
        irq_ns: a.irq_ns + b.irq_ns,
        steal_ns: a.steal_ns + b.steal_ns,
        idle_ns: a.idle_ns + b.idle_ns,
    };
    sum.samples += more.samples;
    sum.observer_samples += more.observer_samples;
    sum.lost_samples += more.lost_samples;
}

fn add_event(sum: &mut EventCost, more: &EventCost) {
    sum.ns += more.ns;
    sum.calls = sum.calls.zip(more.calls).map(|(a, b)| a + b);
    sum.observer_ns += more.observer_ns;
    sum.samples += more.samples;
    sum.sampled += more.sampled;
    add_parts(&mut sum.parts, &more.parts);
}

fn add_parts(sum: &mut Vec<EventPart>, more: &[EventPart]) {
    for part in more {
        match sum.iter_mut().find(|of| of.name == part.name) {
            Some(into) => {
                into.ns += part.ns;
                into.samples += part.samples;
            }
            None => sum.push(part.clone()),
        }
    }
    sum.sort_by_key(|part| Reverse(part.ns));
    if sum.len() > MOST_PARTS {
        let small = sum.split_off(MOST_PARTS / 2);
        let (ns, samples) =
            small.iter().fold((0, 0), |(ns, samples), part| (ns + part.ns, samples + part.samples));
        add_parts(sum, &[EventPart { name: FURTHER.to_owned(), ns, share: 0.0, samples, interval: None }]);
    }
}

fn shares_of_cpu(mut cpu: CpuCost, period: u64) -> CpuCost {
    for event in &mut cpu.events {
        event.share = share(event.ns, period);
        for part in &mut event.parts {
            part.share = share(part.ns, period);
        }
    }
    let networking = cpu.events.iter().filter(|event| event.event.is_networking());
    cpu.networking_share = share(networking.map(|event| event.ns).sum(), period);
    cpu.observer_share = share(cpu.events.iter().map(|event| event.observer_ns).sum(), period);
    cpu
}

fn add_function(sum: &mut FunctionCost, more: &FunctionCost) {
    sum.ns += more.ns;
    sum.samples += more.samples;
}

fn other_functions(sums: BTreeMap<(Event, String), FunctionCost>) -> Vec<OtherFunctions> {
    let mut of_event: BTreeMap<Event, Vec<FunctionCost>> = BTreeMap::new();
    for ((event, _), function) in sums {
        of_event.entry(event).or_default().push(function);
    }
    let top = |(event, mut functions): (Event, Vec<FunctionCost>)| {
        functions.sort_by_key(|function| Reverse(function.ns));
        functions.truncate(TOP_OTHERS);
        OtherFunctions { event, functions }
    };
    of_event.into_iter().map(top).collect()
}

fn add_process(sum: &mut ProcessCost, more: &ProcessCost) {
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

fn add_profile(sum: &mut ProcessProfile, more: &ProcessProfile) {
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
    sum.functions.sort_by_key(|function| Reverse(function.samples));
    sum.functions.truncate(MOST_FUNCTIONS);
}

fn add_cgroup(sum: &mut CgroupCost, more: &CgroupCost) {
    sum.cost.add(&more.cost);
    sum.processes = sum.processes.max(more.processes);
    if more.path.is_some() {
        sum.path.clone_from(&more.path);
    }
}

fn add_program(sum: &mut ProgramCost, more: &ProgramCost) {
    sum.run_ns += more.run_ns;
    sum.runs += more.runs;
    sum.skipped += more.skipped;
}

fn add_lost(sum: &mut crate::report::LostObservations, more: &crate::report::LostObservations) {
    sum.samples += more.samples;
    sum.stacks += more.stacks;
    sum.processes += more.processes;
    sum.tasks += more.tasks;
    sum.skipped_runs += more.skipped_runs;
}

fn add_observer(sum: &mut ObserverCost, more: &ObserverCost) {
    let both = |a: Option<u64>, b: Option<u64>| a.or(b).map(|_| a.unwrap_or(0) + b.unwrap_or(0));
    sum.user_ns += more.user_ns;
    sum.system_ns += more.system_ns;
    sum.events_ns += more.events_ns;
    sum.program_ns = both(sum.program_ns, more.program_ns);
    sum.program_runs = both(sum.program_runs, more.program_runs);
}

/// Adds the energy of two periods. If it is absent in one of them, the sum is absent too.
fn add_energy(before: Energy, mut last: Energy) -> Energy {
    let Energy::Measured { domains, total_joules, active_joules, networking_joules, .. } = &mut last else {
        return last;
    };
    let Energy::Measured {
        domains: before_domains,
        total_joules: before_total,
        active_joules: before_active,
        networking_joules: before_networking,
        ..
    } = &before
    else {
        return before;
    };
    for domain in before_domains {
        match domains.iter_mut().find(|of| of.name == domain.name) {
            Some(into) => into.joules += domain.joules,
            None => domains.push(domain.clone()),
        }
    }
    *total_joules += before_total;
    *active_joules = active_joules.zip(*before_active).map(|(a, b)| a + b);
    *networking_joules += before_networking;
    last
}

fn watts(mut energy: Energy, period_ns: u64) -> Energy {
    let watts = |joules: f64| joules * 1e9 / period_ns.max(1) as f64;
    if let Energy::Measured { domains, networking_joules, networking_watts, .. } = &mut energy {
        domains.iter_mut().for_each(|domain| domain.watts = watts(domain.joules));
        *networking_watts = watts(*networking_joules);
    }
    energy
}

#[derive(Debug, Default)]
struct MergeStacks {
    functions: Vec<String>,
    numbers: FxHashMap<String, u32>,
    /// Samples and nanoseconds of each stack.
    sums: FxHashMap<StackKey, (u64, u64)>,
}

/// The identity of a stack: CPU, kernel event (such as a softirq), process, and the functions' numbers from the
/// outermost on.
type StackKey = (u32, Option<Event>, Option<u32>, Vec<u32>);

impl MergeStacks {
    fn add(&mut self, stacks: &Stacks, cpu: impl Fn(u32) -> Option<u32>) {
        let numbers: Vec<u32> = stacks.functions.iter().map(|name| self.number(name)).collect();
        // One key is reused for all lookups: most stacks are known already and need no allocation.
        let mut key = StackKey::default();
        for stack in &stacks.stacks {
            let Some(cpu) = cpu(stack.cpu) else { continue };
            (key.0, key.1, key.2) = (cpu, stack.event, stack.pid);
            key.3.clear();
            // A frame without a function can only come from a damaged file.
            key.3.extend(stack.frames.iter().filter_map(|at| numbers.get(*at as usize).copied()));
            self.count(&key, stack.samples, stack.ns);
        }
        self.keep_bounded();
    }

    fn count(&mut self, key: &StackKey, samples: u64, ns: u64) {
        match self.sums.get_mut(key) {
            Some(sum) => *sum = (sum.0 + samples, sum.1 + ns),
            None => drop(self.sums.insert(key.clone(), (samples, ns))),
        }
    }

    fn keep_bounded(&mut self) {
        if self.sums.len() > MOST_STACKS {
            self.bound();
        }
    }

    /// Keeps the half of the stacks with most time. The others become one stack for each CPU, kernel event (such as a
    /// softirq) and process.
    fn bound(&mut self) {
        let Self { functions, sums, .. } = std::mem::take(self);
        let mut all: Vec<_> = sums.into_iter().collect();
        all.sort_unstable_by(|a, b| b.1.1.cmp(&a.1.1).then_with(|| a.0.cmp(&b.0)));
        for (at, ((cpu, event, pid, frames), (samples, ns))) in all.into_iter().enumerate() {
            let frames = match at < MOST_STACKS / 2 {
                true => frames
                    .iter()
                    .filter_map(|at| functions.get(*at as usize))
                    .map(|name| self.number(name))
                    .collect(),
                false => vec![self.number(FURTHER)],
            };
            let sum = self.sums.entry((cpu, event, pid, frames)).or_default();
            *sum = (sum.0 + samples, sum.1 + ns);
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
        let stack = |((cpu, event, pid, frames), (samples, ns)): (StackKey, (u64, u64))| ProfiledStack {
            cpu,
            event,
            pid,
            frames,
            samples,
            ns,
        };
        let mut stacks: Vec<ProfiledStack> = self.sums.into_iter().map(stack).collect();
        // Stacks of equal time are in the order of their functions' names, since the functions' numbers depend on the
        // order in which reports named them.
        let names: BTreeMap<&String, usize> = self.functions.iter().zip(0..).collect();
        let mut ranks = vec![0; names.len()];
        names.values().zip(0..).for_each(|(at, rank)| ranks[*at] = rank);
        let order =
            |stack: &ProfiledStack| stack.frames.iter().map(|at| ranks[*at as usize]).collect::<Vec<u32>>();
        stacks
            .sort_by_cached_key(|stack| (Reverse(stack.ns), stack.cpu, stack.event, stack.pid, order(stack)));
        Stacks { functions: self.functions, stacks }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::ReportMode;
    use crate::samples::{report, stacks};

    #[test]
    fn two_merged_reports_cover_both_periods() {
        let mut a = report(0);
        let b = report(1);
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
        assert_eq!(first.observer_samples, 2 * b.cpus[0].observer_samples);
        assert_eq!(sum.observer.events_ns, 2 * b.observer.events_ns);
        assert_eq!(first.procstat.user_ns, 2 * b.cpus[0].procstat.user_ns);
        assert_eq!(sum.processes[0].cost.send_calls, 2 * b.processes[0].cost.send_calls);
        assert_eq!(sum.processes[0].share, b.processes[0].share);
        assert_eq!(sum.lost.samples, 2 * b.lost.samples);
        assert_eq!(sum.missing, b.missing);
    }

    #[test]
    fn merged_report_keeps_latest_command_lines_up_to_a_process_limit() {
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
    fn merging_sampled_and_timed_reports_keeps_sampled_time() {
        let sampled = Report { mode: ReportMode::Sampling, sampled_ns: 1_000_000_000, ..report(0) };
        let sum = merge([&sampled, &report(1), &report(2)]).expect("a report");
        assert_eq!(
            (sum.mode, sum.sampled_ns, sum.period_ns),
            (ReportMode::Events, 1_000_000_000, 3_000_000_000)
        );
    }

    #[test]
    fn merging_one_report_changes_nothing() {
        let one = report(3);
        assert_eq!(merge([&one]), Some(one));
        assert_eq!(merge([]), None);
    }

    /// Each report numbers its functions independently, so stacks are matched by names.
    #[test]
    fn stacks_are_merged_by_function_names() {
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

    #[test]
    fn order_of_merged_stacks_depends_on_names_only() {
        let with = |frames| Report { stacks: Some(stacks(&[(frames, 0, 1)])), ..report(0) };
        let [a, b] = ["a;x", "b;x"].map(with);
        let outer = |reports: [&Report; 2]| {
            let merged = merge(reports).and_then(|report| report.stacks).expect("stacks");
            let name = |stack: &ProfiledStack| merged.functions[stack.frames[0] as usize].clone();
            merged.stacks.iter().map(name).collect::<Vec<_>>()
        };
        assert_eq!([outer([&a, &b]), outer([&b, &a])], [["a", "b"], ["a", "b"]]);
    }

    /// A sum of many reports, as over days, keeps its limits of memory, and contains the CPU time of all reports.
    #[test]
    fn report_merged_over_days_has_bounded_memory_and_all_cpu_time() {
        let mut merge = Merge::default();
        let mut stacks_ns = 0;
        let mut process_ns = 0;
        let mut part_ns = 0;
        for round in 0..30_u32 {
            let mut report = report(round.into());
            let process = report.processes[0].clone();
            let cgroup = report.cgroups[0].clone();
            report.processes.clear();
            report.cgroups.clear();
            for at in 0..4000 {
                let number = round * 4000 + at;
                report.processes.push(ProcessCost { pid: number + 1, ..process.clone() });
                report.cgroups.push(CgroupCost { id: u64::from(number) + 1, ..cgroup.clone() });
            }
            let part = report.cpus[0].events[0].parts[0].clone();
            let named = |at: u32| EventPart { name: format!("bpf:{round}-{at}"), ..part.clone() };
            report.cpus[0].events[0].parts = (0..100).map(named).collect();
            let names: Vec<String> = (0..4000).map(|at| format!("outer;f{round}-{at}")).collect();
            let of: Vec<(&str, u32, u64)> = names.iter().map(|name| (&**name, round % 2, 1)).collect();
            let stacks = stacks(&of);
            stacks_ns += stacks.stacks.iter().map(|stack| stack.ns).sum::<u64>();
            process_ns += report.processes.iter().map(|process| process.cost.ns()).sum::<u64>();
            part_ns += 100 * part.ns;
            report.stacks = Some(stacks);
            merge.add(&report);
        }
        let sum = merge.finish().expect("a report");
        let stacks = sum.stacks.expect("stacks");
        assert!(stacks.stacks.len() <= MOST_STACKS && stacks.functions.len() <= MOST_STACKS + 2);
        assert_eq!(stacks.stacks.iter().map(|stack| stack.ns).sum::<u64>(), stacks_ns);
        assert!(stacks.functions.iter().any(|name| name == FURTHER));
        assert!(sum.processes.len() <= MOST && sum.cgroups.len() <= MOST);
        assert_eq!(sum.processes.iter().map(|process| process.cost.ns()).sum::<u64>(), process_ns);
        assert_eq!((sum.processes[0].pid, &*sum.processes[0].name), (0, FURTHER));
        assert_eq!(sum.cgroups.iter().map(|cgroup| cgroup.cost.ns()).sum::<u64>(), process_ns);
        let parts = &sum.cpus[0].events[0].parts;
        assert!(parts.len() <= MOST_PARTS && parts.iter().any(|part| part.name == FURTHER));
        assert_eq!(parts.iter().map(|part| part.ns).sum::<u64>(), part_ns);
    }

    fn owned(stack: (&str, u32, u64)) -> (String, u32, u64) {
        (stack.0.to_owned(), stack.1, stack.2)
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
