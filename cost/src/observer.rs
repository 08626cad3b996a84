//! From counters and stacks to a report per period.

mod adapt;
mod config;
mod names;
mod tables;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use millrace_kernel::programs::Statistics;

use crate::kernel::{self, CallTimes, Cost, Record, Totals, Transport};

use crate::arguments;
use crate::cgroups::Cgroups;
use crate::choice::{Budget, Step};
use crate::energy::Meter;
use crate::fold::{Fold, Resolver, share_out};
use crate::procstat::{self, CpuTimes};
use crate::report::{
    Cpu, Event, EventCost, Host, Lost, Method, Missing, Mode, Part, Report, TaskCost, VERSION,
};
use crate::share::{ns, rounded, share};
use crate::symbols::Symbols;
use crate::users::{Place, ProfileFold, Users};
use adapt::{Adaptive, Frequency, Prices};
pub use config::{Config, Error, MAX_FREQUENCY_HZ};
use tables::{Processes, Programs, Taken, Usage};

/// How long stacks may stay in the buffer: the most that [`Observer::poll`] may be late by.
pub const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Room for [`POLL_INTERVAL`] at worst, and twice that for usual stacks.
const BUFFER_BYTES_PER_HZ: u32 = 256;
/// Reading all symbols takes tens of milliseconds: not more often than this.
const SYMBOLS_INTERVAL: Duration = Duration::from_secs(5);
const TOP_OTHERS: usize = 20;
const NS_PER_S: f64 = 1e9;

/// Observes from [`start`](Self::start) until it is dropped. Needs root.
pub struct Observer {
    config: Config,
    /// In force; [`Config::mode`] is what it began with.
    mode: Mode,
    adaptive: Option<Adaptive>,
    cost: Cost,
    resolver: Resolver,
    symbols_read: Instant,
    /// Events of which at least one way is; samples tell them all.
    timed: Vec<Event>,
    missing: Vec<Missing>,
    host: Host,
    cgroups: Cgroups,
    users: Users,
    meter: Meter,
    statistics: Option<Statistics>,
    programs: Programs,
    processes: Processes,
    usage: Usage,
    last: Instant,
    last_totals: Vec<Totals>,
    last_times: CpuTimes,
    samples: Samples,
    sequence: u64,
}

/// What samples tell of a process.
#[derive(Debug, PartialEq, Eq, Hash)]
struct Task {
    pid: u32,
    cgroup: u64,
    /// Only if it has no number in this namespace: others have their names in `/proc`, and threads with names of their own.
    name: Option<[u8; 16]>,
}

/// What was sampled since the last report.
struct Samples {
    fold: Fold,
    /// By CPU and event.
    counts: HashMap<(u32, Event), Count>,
    profiles: HashMap<u32, ProfileFold>,
    /// Samples of processes in `send`, `receive`, `io_uring`; in mode `sampling` only.
    tasks: HashMap<Task, [u64; 3]>,
}

/// Samples inside of an event.
#[derive(Debug, Clone, Copy, Default)]
struct Count {
    networking: u64,
    observer: u64,
}

impl Count {
    fn all(self) -> u64 {
        self.networking + self.observer
    }
}

impl Samples {
    fn new(config: &Config) -> Self {
        Self {
            fold: Fold::new(config.stacks),
            counts: HashMap::new(),
            profiles: HashMap::new(),
            tasks: HashMap::new(),
        }
    }

    fn count(&mut self, cpu: u32, event: Event, observer: bool) {
        let count = self.counts.entry((cpu, event)).or_default();
        match observer {
            true => count.observer += 1,
            false => count.networking += 1,
        }
    }
}

impl Observer {
    pub fn start(mut config: Config) -> Result<Self, Error> {
        config.budget = config.budget.filter(|_| config.mode == Mode::Events);
        config::check(&config)?;
        let times = procstat::read().map_err(Error::ProcStat)?;
        let cpus: BTreeSet<u32> = match &config.cpus {
            Some(cpus) => cpus.clone(),
            None => times.keys().copied().collect(),
        };
        if let Some(cpu) = cpus.iter().find(|cpu| !times.contains_key(cpu)) {
            return Err(Error::Cpu(*cpu));
        }
        let mut missing = Vec::new();
        let statistics = statistics(&config, &mut missing);
        let frequency = match config.budget {
            Some(budget) if config.lower_frequency => {
                Frequency::within(budget, config.frequency_hz).map_err(Error::Price)?
            }
            _ => Frequency::as_asked(config.frequency_hz),
        };
        config.frequency_hz = frequency.hz;
        let mut cost = load(&config)?;
        let bare = config.budget.map(|_| CallTimes::measure()).transpose().map_err(Error::Price)?;
        let mut timed = Event::ALL.to_vec();
        if config.mode == Mode::Events {
            let ways = cost.attach()?;
            timed.retain(|event| is_timed((*event).into(), &ways));
            missing.extend(ways.into_iter().map(Missing::from));
            missing.extend(missing_by_method(&cost));
        }
        let adaptive = match config.budget.zip(bare) {
            Some((budget, bare)) => {
                let prices = Prices::between(bare, CallTimes::measure().map_err(Error::Price)?);
                Some(Adaptive::new(budget, prices, frequency, cpus.iter().copied().collect()))
            }
            None => None,
        };
        for pid in &config.profile {
            cost.watch(*pid, true)?;
        }
        if config.frequency_hz > 0 {
            for cpu in &cpus {
                cost.sample(*cpu, config.frequency_hz)?;
            }
        }
        let symbols = Symbols::read().map_err(Error::Symbols)?;
        let mut resolver = Resolver::new(symbols, config.taxonomy.clone());
        missing.extend(resolver.refresh_programs().err().map(|error| Missing {
            event: None,
            what: "names of BPF programs that are loaded later".to_owned(),
            reason: error.to_string(),
        }));
        let now = Instant::now();
        let mut observer = Self {
            mode: config.mode,
            adaptive: None,
            resolver,
            symbols_read: now,
            timed,
            missing,
            host: host(),
            cgroups: Cgroups::new(),
            users: Users::default(),
            meter: Meter::new(config.idle_watts),
            programs: Programs::new(cost.program_ids()),
            statistics,
            processes: Processes::default(),
            usage: Usage::default(),
            last: now,
            last_totals: Vec::new(),
            last_times: times,
            samples: Samples::new(&config),
            sequence: 0,
            config: Config { cpus: Some(cpus), ..config },
            cost,
        };
        observer.begin()?;
        observer.adaptive = adaptive;
        Ok(observer)
    }

    /// What cannot be measured on this kernel.
    pub fn missing(&self) -> &[Missing] {
        &self.missing
    }

    /// Kernel functions at which calls are timed.
    pub fn functions(&self) -> Vec<&'static str> {
        self.cost.functions()
    }

    /// What timing events may take from here on.
    pub fn set_budget(&mut self, budget: Budget) -> Result<(), Error> {
        config::check_budget(budget)?;
        self.adaptive.as_mut().ok_or(Error::NoBudget)?.set_budget(budget);
        self.config.budget = Some(budget);
        Ok(())
    }

    /// Waits until `period` after the last report, or the start, and reports.
    pub fn next(&mut self, period: Duration) -> Result<Report, Error> {
        loop {
            let left = period.saturating_sub(self.last.elapsed());
            if left.is_zero() {
                return self.report();
            }
            thread::sleep(left.min(POLL_INTERVAL));
            self.poll();
        }
    }

    /// Takes the stacks that wait. At least every [`POLL_INTERVAL`], or some may be lost; that is counted.
    pub fn poll(&mut self) {
        let Self { cost, resolver, samples, users, config, mode, .. } = self;
        let (mut functions, mut refreshed) = (Vec::new(), false);
        cost.drain(|record| {
            // Now the buffer is taken: the list has all programs that are in it.
            if !std::mem::replace(&mut refreshed, true) {
                // What keeps it from working is in `missing` since the start.
                let _ = resolver.refresh_programs();
            }
            take(&record, *mode, config, resolver, users, samples, &mut functions);
        });
        if self.resolver.outdated && self.symbols_read.elapsed() >= SYMBOLS_INTERVAL {
            self.read_symbols();
        }
        self.try_timing();
    }

    /// In mode `sampling` with a budget: from time to time events are timed too, which reports do not show before it turns
    /// out to be cheap.
    fn try_timing(&mut self) {
        let Some(adaptive) = &mut self.adaptive else { return };
        match adaptive.poll(Instant::now(), || self.cost.totals()) {
            Step::Try => match self.cost.attach() {
                Ok(_) => adaptive.tried(Some(self.cost.totals())),
                Err(_) => {
                    self.cost.detach();
                    adaptive.tried(None);
                }
            },
            Step::Sample => self.cost.detach(),
            Step::Stay | Step::Time => {}
        }
    }

    /// Between two reports: both modes see all of the time on their side of it.
    fn change(&mut self, step: Step) {
        match step {
            Step::Sample => {
                // Samplers first: what is attached meanwhile takes time, and nothing is missed.
                self.mode = Mode::Sampling;
                self.cost.sample_always(true);
                self.cost.detach();
            }
            // Since the trial began, sums have all that the next report needs.
            Step::Time => {
                self.mode = Mode::Events;
                self.cost.sample_always(false);
            }
            Step::Stay | Step::Try => {}
        }
    }

    /// What came to pass since the last report, or the start.
    pub fn report(&mut self) -> Result<Report, Error> {
        let times = procstat::read().map_err(Error::ProcStat)?;
        let spent = procstat::since(&times, &self.last_times);
        // The moment in which the period ends: at once the sums of events, and the samples.
        let (now, totals) = (Instant::now(), self.cost.totals());
        let period = now - self.last;
        self.poll();
        let programs = self.statistics.as_ref().map(|statistics| self.programs.read(statistics, period));
        let (processes, forget) = self.processes.read(self.cost.processes()?);
        for id in forget {
            self.cost.forget(id)?;
        }
        let samples = std::mem::replace(&mut self.samples, Samples::new(&self.config));
        let processes = match self.mode {
            Mode::Events => processes,
            Mode::Sampling => self.sampled_processes(&samples),
        };
        let (auto, step) = match &mut self.adaptive {
            Some(adaptive) => {
                let (auto, step) = adaptive.report(now, &totals, &self.last_totals, period);
                (Some(auto), step)
            }
            None => (None, Step::Stay),
        };

        let cpus: Vec<Cpu> =
            self.cpus().map(|cpu| self.cpu(cpu, &totals, &spent, &samples, period)).collect();
        let by_event = by_event(&cpus);
        let networking_ns = cpus.iter().flat_map(|cpu| &cpu.events).map(|event| event.ns).sum();
        let busy_ns = procstat::busy_ns(&spent);
        let per_call = PerCall::new(&cpus);
        let (processes, cgroups) =
            tables::describe(processes, per_call, &mut self.cgroups, &self.config, period);
        let mut processes = self.with_profiles(processes, &samples, period);
        if self.config.arguments {
            arguments::read(&mut processes);
        }
        let report = Report {
            version: VERSION,
            sequence: self.sequence,
            time_unix_ms: unix_ms(),
            period_ns: ns(period),
            mode: self.mode,
            sampled_ns: if self.mode == Mode::Sampling { ns(period) } else { 0 },
            auto,
            method: self.cost.method().filter(|_| self.mode == Mode::Events).map(Method::from),
            frequency_hz: self.config.frequency_hz,
            host: self.host.clone(),
            other: samples.fold.others(TOP_OTHERS, |event| by_event.get(&event).copied().unwrap_or(0.0)),
            stacks: samples.fold.stacks(|cpu, event| self.ns_per_sample(&cpus, cpu, event)),
            processes,
            cgroups,
            energy: self.meter.read(period, networking_ns, busy_ns),
            observer: self.usage.read(&cpus, programs.as_deref(), period),
            lost: lost(&totals, &self.last_totals, self.programs.skipped()),
            missing: self.missing.iter().cloned().chain(missing_by_mode(self.mode)).collect(),
            programs,
            cpus,
        };
        self.sequence += 1;
        self.last = now;
        self.last_totals = totals;
        self.last_times = times;
        self.change(step);
        Ok(report)
    }

    /// Everything counts from now on.
    fn begin(&mut self) -> Result<(), Error> {
        self.report()?;
        self.sequence = 0;
        Ok(())
    }

    /// If it fails, names are missing, and the next time comes.
    fn read_symbols(&mut self) {
        self.symbols_read = Instant::now();
        if let Ok(symbols) = Symbols::read() {
            self.resolver.renew(symbols);
        }
    }

    fn cpus(&self) -> impl Iterator<Item = u32> {
        self.config.cpus.iter().flatten().copied()
    }

    fn cpu(&self, cpu: u32, totals: &[Totals], spent: &CpuTimes, samples: &Samples, period: Duration) -> Cpu {
        let at = cpu as usize;
        let (after, before) = (of(totals, at), of(&self.last_totals, at));
        let measured = match self.mode {
            Mode::Events => &self.timed[..],
            Mode::Sampling => &Event::ALL,
        };
        let events: Vec<EventCost> = measured
            .iter()
            .copied()
            .map(|event| {
                let taken = samples.counts.get(&(cpu, event)).copied().unwrap_or_default();
                let (total, calls) = match self.mode {
                    Mode::Events => (
                        after.ns(event.into()).saturating_sub(before.ns(event.into())),
                        Some(after.calls(event.into()).saturating_sub(before.calls(event.into()))),
                    ),
                    Mode::Sampling => (self.sampled_ns(taken.all()), None),
                };
                let observer_ns = share_out(total, taken.observer, taken.all());
                let ns = total - observer_ns;
                EventCost {
                    event,
                    ns,
                    share: share(ns, period),
                    calls,
                    observer_ns,
                    samples: taken.networking,
                    parts: parts(&samples.fold, cpu, event, ns, taken.networking, period),
                }
            })
            .collect();
        Cpu {
            cpu,
            networking_share: rounded(events.iter().map(|event| event.share).sum()),
            observer_share: share(events.iter().map(|event| event.observer_ns).sum(), period),
            events,
            procstat: spent.get(&cpu).copied().unwrap_or_default(),
            samples: after.samples.saturating_sub(before.samples),
            lost_samples: after.lost_samples.saturating_sub(before.lost_samples),
        }
    }

    /// The time that a number of samples stands for.
    fn sampled_ns(&self, samples: u64) -> u64 {
        (samples as f64 * NS_PER_S / f64::from(self.config.frequency_hz.max(1))) as u64
    }

    fn sampled_processes(&self, samples: &Samples) -> Vec<Taken> {
        let taken = |(task, counts): (&Task, &[u64; 3])| {
            let name = task.name.map_or_else(String::new, |name| kernel::name(&name));
            Taken::sampled(task.pid, task.cgroup, name, counts.map(|taken| self.sampled_ns(taken)))
        };
        samples.tasks.iter().map(taken).collect()
    }

    fn ns_per_sample(&self, cpus: &[Cpu], cpu: u32, event: Option<Event>) -> f64 {
        let Some(event) = event else { return NS_PER_S / f64::from(self.config.frequency_hz.max(1)) };
        let events = cpus.iter().find(|of| of.cpu == cpu).map_or(&[][..], |of| &of.events);
        let cost = events.iter().find(|of| of.event == event);
        cost.map_or(0.0, |cost| cost.ns as f64 / cost.samples.max(1) as f64)
    }

    fn with_profiles(
        &self,
        mut processes: Vec<crate::report::Process>,
        samples: &Samples,
        period: Duration,
    ) -> Vec<crate::report::Process> {
        for (pid, profile) in &samples.profiles {
            let profile = profile.finish(NS_PER_S / f64::from(self.config.frequency_hz.max(1)), period);
            match processes.iter_mut().find(|process| process.pid == *pid) {
                Some(process) => process.profile = Some(profile),
                // It was running without any call.
                None => processes.push(tables::idle(*pid, profile)),
            }
        }
        processes
    }
}

fn load(config: &Config) -> Result<Cost, Error> {
    let watch = !config.profile.is_empty();
    // User stacks come on top.
    let bytes_per_hz = if watch { 2 * BUFFER_BYTES_PER_HZ } else { BUFFER_BYTES_PER_HZ };
    Ok(Cost::load(&kernel::Config {
        events: config.mode == Mode::Events,
        method: config.method.map(kernel::Method::from),
        transport: if config.ring_buffer { Transport::RingBuffer } else { Transport::DoubleBuffer },
        buffer_bytes: config.frequency_hz.saturating_mul(bytes_per_hz),
        watch,
    })?)
}

fn statistics(config: &Config, missing: &mut Vec<Missing>) -> Option<Statistics> {
    if !config.program_statistics {
        return None;
    }
    let what = "run times of BPF programs".to_owned();
    Statistics::enable()
        .map_err(|error| missing.push(Missing { event: None, what, reason: error.to_string() }))
        .ok()
}

/// Whether some way of it is; events that have no ways are measured always.
fn is_timed(event: kernel::Event, missing: &[kernel::Missing]) -> bool {
    let mut ways = kernel::WAYS.iter().filter(|way| way.event == event).peekable();
    ways.peek().is_none() || ways.any(|way| missing.iter().all(|missing| missing.what != way.name))
}

/// What timing at system calls does not see, and why it is not done at functions.
fn missing_by_method(cost: &Cost) -> Vec<Missing> {
    if cost.method() != Some(kernel::Method::SystemCalls) {
        return Vec::new();
    }
    let refused = cost.refused().and_then(|reason| reason.lines().next()).map(|reason| Missing {
        event: None,
        what: "timing at functions".to_owned(),
        reason: reason.to_owned(),
    });
    let of_calls = [Event::Send, Event::Receive].into_iter().flat_map(|event| {
        [
            ("sockets of the kernel itself", "timing at system calls does not see them"),
            (
                "io_uring requests that had to wait, and its splice",
                "timing at system calls sees what is done in the call; the rest is time of io_uring's threads",
            ),
            ("io_uring reads and writes of registered sockets", "timing at system calls does not know these"),
        ]
        .map(|(what, reason)| Missing {
            event: Some(event),
            what: what.to_owned(),
            reason: reason.to_owned(),
        })
    });
    refused.into_iter().chain(of_calls).collect()
}

/// What samples do not tell.
fn missing_by_mode(mode: Mode) -> Option<Missing> {
    (mode == Mode::Sampling).then(|| Missing {
        event: None,
        what: "counts of calls".to_owned(),
        reason: "events are sampled, not timed".to_owned(),
    })
}

/// Counts one record.
fn take(
    record: &Record<'_>,
    mode: Mode,
    config: &Config,
    resolver: &mut Resolver,
    users: &mut Users,
    samples: &mut Samples,
    functions: &mut Vec<Option<usize>>,
) {
    if config.cpus.as_ref().is_some_and(|cpus| !cpus.contains(&record.cpu)) {
        return;
    }
    resolver.functions(record.kernel, functions);
    let owner = resolver.owner(functions);
    let event = match mode {
        Mode::Events => record.event.map(Event::from),
        Mode::Sampling => owner.event,
    };
    if let Some(event) = event {
        samples.count(record.cpu, event, owner.observer);
    }
    if let Some(event) = event
        && !owner.observer
    {
        if let (Mode::Sampling, Some(at)) = (mode, event.index().checked_sub(Event::Send.index())) {
            let name = (record.pid == 0).then_some(record.name);
            let task = Task { pid: record.pid, cgroup: record.cgroup, name };
            let counts = samples.tasks.entry(task).or_default();
            counts.iter_mut().skip(at).take(1).for_each(|count| *count += 1);
        }
        samples.fold.add(resolver, record.cpu, event, functions);
        if config.stacks {
            let names = functions.iter().map(|number| resolver.name(*number));
            samples.fold.add_stack(record.cpu, Some(event), None, names);
        }
    }
    if record.watched {
        let names = users.names(record.pid, record.user);
        let place = match event {
            Some(Event::NetRx | Event::NetTx) => Place::Softirq,
            _ if record.kernel.is_empty() => Place::User(&names),
            _ => Place::Kernel,
        };
        samples.profiles.entry(record.pid).or_default().add(resolver.taxonomy(), place);
        if config.stacks && place != Place::Softirq {
            let kernel = functions.iter().map(|number| resolver.name(*number));
            let user = names.iter().map(|name| name.unwrap_or("[unknown]"));
            samples.fold.add_stack(record.cpu, event, Some(record.pid), kernel.chain(user));
        }
    }
}

/// What the observer takes in each call, on average over all CPUs.
#[derive(Debug, Clone, Copy, Default)]
struct PerCall {
    send_ns: f64,
    receive_ns: f64,
}

impl PerCall {
    fn new(cpus: &[Cpu]) -> Self {
        let mean = |event: Event| {
            let costs = || cpus.iter().flat_map(|cpu| &cpu.events).filter(|cost| cost.event == event);
            let calls: u64 = costs().filter_map(|cost| cost.calls).sum();
            costs().map(|cost| cost.observer_ns).sum::<u64>() as f64 / calls.max(1) as f64
        };
        Self { send_ns: mean(Event::Send), receive_ns: mean(Event::Receive) }
    }

    fn without(self, cost: &TaskCost) -> TaskCost {
        let less = |ns: u64, calls: u64, each: f64| ns.saturating_sub((calls as f64 * each) as u64);
        TaskCost {
            send_ns: less(cost.send_ns, cost.send_calls, self.send_ns),
            receive_ns: less(cost.receive_ns, cost.receive_calls, self.receive_ns),
            ..*cost
        }
    }
}

fn parts(fold: &Fold, cpu: u32, event: Event, total: u64, samples: u64, period: Duration) -> Vec<Part> {
    let part = |(name, taken): (&str, u64)| {
        let ns = share_out(total, taken, samples);
        Part { name: name.to_owned(), ns, share: share(ns, period), samples: taken }
    };
    fold.parts(cpu, event).into_iter().map(part).collect()
}

/// Nanoseconds per sample, over all CPUs.
fn by_event(cpus: &[Cpu]) -> HashMap<Event, f64> {
    let mut sums: BTreeMap<Event, (u64, u64)> = BTreeMap::new();
    for event in cpus.iter().flat_map(|cpu| &cpu.events).filter(|event| event.samples > 0) {
        let sum = sums.entry(event.event).or_default();
        *sum = (sum.0 + event.ns, sum.1 + event.samples);
    }
    sums.into_iter().map(|(event, (ns, samples))| (event, ns as f64 / samples as f64)).collect()
}

fn lost(after: &[Totals], before: &[Totals], skipped_runs: u64) -> Lost {
    let sum = |of: fn(&Totals) -> u64| -> u64 {
        let total = |totals: &[Totals]| -> u64 { totals.iter().map(of).sum() };
        total(after).saturating_sub(total(before))
    };
    Lost {
        samples: sum(|totals| totals.lost_samples),
        stacks: sum(|totals| totals.lost_stacks),
        processes: sum(|totals| totals.lost_processes),
        tasks: sum(|totals| totals.lost_tasks),
        skipped_runs,
    }
}

fn of(totals: &[Totals], cpu: usize) -> Totals {
    totals.get(cpu).copied().unwrap_or_default()
}

fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

fn host() -> Host {
    nix::sys::utsname::uname().map_or_else(
        |_| Host::default(),
        |names| Host {
            name: names.nodename().to_string_lossy().into_owned(),
            kernel: names.release().to_string_lossy().into_owned(),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::report;

    fn missing(ways: impl Iterator<Item = &'static kernel::Way>) -> Vec<kernel::Missing> {
        ways.map(|way| kernel::Missing { event: way.event, what: way.name, reason: String::new() }).collect()
    }

    #[test]
    fn an_event_without_any_way_is_not_timed() {
        let sends = || kernel::WAYS.iter().filter(|way| way.event == kernel::Event::Send);
        let (all, but_one) = (missing(sends()), missing(sends().skip(1)));
        let measured = |missing: &[kernel::Missing]| {
            Event::ALL.into_iter().filter(|event| is_timed((*event).into(), missing)).collect::<Vec<_>>()
        };
        assert_eq!(measured(&all), [Event::NetRx, Event::NetTx, Event::Receive, Event::IoUring]);
        assert_eq!(measured(&but_one), Event::ALL);
        assert_eq!(measured(&[]), Event::ALL);
    }

    #[test]
    fn each_call_is_without_the_observer_in_it() {
        let mut cpus = report(0).cpus;
        for cost in cpus.iter_mut().flat_map(|cpu| &mut cpu.events) {
            (cost.event, cost.calls, cost.observer_ns) = (Event::Send, Some(1000), 20_000);
        }
        cpus[1].events[0].observer_ns = 60_000;
        let per_call = PerCall::new(&cpus);
        let cost =
            TaskCost { send_ns: 1000, send_calls: 10, receive_ns: 7, receive_calls: 9, io_uring_ns: 3 };
        assert_eq!(per_call.without(&cost), TaskCost { send_ns: 600, ..cost });
        // A call that began in this period and ends in the next one.
        let begun = TaskCost { send_ns: 20, send_calls: 1, ..TaskCost::default() };
        assert_eq!(per_call.without(&begun), TaskCost { send_ns: 0, ..begun });
        assert_eq!(PerCall::new(&[]).without(&cost), cost);
    }
}
