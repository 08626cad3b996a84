//! Makes a report for each period from the kernel's counters and sampled stacks.

mod adapt;
mod config;
mod names;
mod tables;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use millrace_kernel::programs::Statistics;

use crate::kernel::{self, CallTimes, CostPrograms, CpuSums, StackRecord, StackTransport};

use crate::arguments;
use crate::cgroups::Cgroups;
use crate::choice::{MethodStep, TimingBudget};
use crate::energy::EnergyMeter;
use crate::fold::{Fold, Resolver, share_out};
use crate::interval;
use crate::procstat::{self, CpuClocks};
use crate::report::{
    CpuCost, Event, EventCost, EventPart, HARD_INTERRUPTS, LostObservations, MissingMeasurement, Report,
    ReportHost, ReportMethod, ReportMode, TaskCost, VERSION,
};
use crate::share::{ns, rounded, share};
use crate::symbols::Symbols;
use crate::users::{ProcessPlace, ProfileFold, Users};
use adapt::{AdaptiveSampling, CallPrices, Frequency};
pub use config::{Config, Error, MAX_FREQUENCY_HZ};
use tables::{ObserverUsage, Processes, ProgramTable, Skipped};

/// The longest allowed time between calls of [`Observer::poll`]. After a longer time, the stack buffers may be full.
pub const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// Size of a CPU's stack buffer in bytes, for each Hz of the sampling frequency. With the deepest stacks, the buffer is
/// full after [`POLL_INTERVAL`], and with usual stacks after twice that time.
const BUFFER_BYTES_PER_HZ: u32 = 256;
/// Shortest time between two readings of all symbols. A reading takes tens of milliseconds.
const SYMBOLS_INTERVAL: Duration = Duration::from_secs(5);
const TOP_OTHERS: usize = 20;
const NS_PER_S: f64 = 1e9;

/// The observer of the kernel's networking, from [`start`](Self::start) until it is dropped. Needs root.
///
/// # Order of calls
///
/// [`Self::start`] loads the programs and begins the first period. [`Self::next`] waits for the period's end and makes
/// the report. A program with its own loop calls [`Self::poll`] at least every [`POLL_INTERVAL`], and [`Self::report`]
/// for a report, which begins the next period. With a [budget](Config::budget), the observer may change between timing
/// and only sampling the kernel's networking, but never within a report's period. While it only samples, `poll`
/// sometimes tries whether timing has become cheap enough.
///
/// ```no_run
/// use std::time::{Duration, Instant};
/// use millrace_cost::{Config, Observer, POLL_INTERVAL};
///
/// let mut observer = Observer::start(Config { all: true, ..Config::new()? })?;
/// let began = Instant::now();
/// while began.elapsed() < Duration::from_secs(10) {
///     std::thread::sleep(POLL_INTERVAL);
///     observer.poll();
/// }
/// let report = observer.report()?;
/// for process in report.processes.iter().take(5) {
///     println!("{} {}: {:.1} % of a CPU", process.pid, process.name, process.share * 100.0);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Observer {
    config: Config,
    /// Whether times are now measured by BPF programs or estimated from samples. Initially [`Config::mode`].
    mode: ReportMode,
    adaptive: Option<AdaptiveSampling>,
    cost: CostPrograms,
    resolver: Resolver,
    symbols_read: Instant,
    /// Kinds of kernel work (events), such as softirqs and sends, that BPF programs time. All other kinds are only
    /// sampled.
    timed: Vec<Event>,
    missing: Vec<MissingMeasurement>,
    host: ReportHost,
    cgroups: Cgroups,
    users: Users,
    meter: EnergyMeter,
    statistics: Option<Statistics>,
    programs: ProgramTable,
    skipped: Skipped,
    processes: Processes,
    usage: ObserverUsage,
    /// CPUs that are observed now: those online, restricted to [`Config::cpus`] if set.
    cpus: BTreeSet<u32>,
    last: Instant,
    last_totals: Vec<CpuSums>,
    last_times: CpuClocks,
    samples: Samples,
    sequence: u64,
}

/// The identity of a process in samples.
#[derive(Debug, PartialEq, Eq, Hash)]
struct SampledTask {
    pid: u32,
    cgroup: u64,
    /// The thread's name, only if the process has no number in this PID namespace. Other processes are identified by
    /// their number, since their threads may have different names.
    name: Option<[u8; 16]>,
}

/// Samples since the last report.
struct Samples {
    fold: Fold,
    /// Numbers of samples, by CPU and kernel event (such as a softirq).
    counts: HashMap<(u32, Event), EventCount>,
    profiles: HashMap<u32, ProfileFold>,
    /// Time of each process in kernel work that is only sampled, not timed, and the name of one of its threads.
    tasks: HashMap<SampledTask, (TaskCost, [u8; 16])>,
}

/// Numbers of samples in a kernel event, such as a softirq or send. Samples taken while programs timed the event divide
/// the measured time among parts of the network stack. Each other sample adds one sampling interval to the time.
/// Every sample is used in only one of these two ways, so no time counts twice.
#[derive(Debug, Clone, Copy, Default)]
struct EventCount {
    timed: u64,
    timed_observer: u64,
    sampled: u64,
    sampled_observer: u64,
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

    fn sampled_processes(&self) -> impl Iterator<Item = ((u32, u64), String, TaskCost)> {
        self.tasks.iter().map(|(task, (cost, name))| ((task.pid, task.cgroup), kernel::name(name), *cost))
    }

    fn count(&mut self, cpu: u32, event: Event, timed: bool, observer: bool) {
        let count = self.counts.entry((cpu, event)).or_default();
        let slot = match (timed, observer) {
            (true, false) => &mut count.timed,
            (true, true) => &mut count.timed_observer,
            (false, false) => &mut count.sampled,
            (false, true) => &mut count.sampled_observer,
        };
        *slot += 1;
    }
}

impl Observer {
    /// Loads the programs, attaches them, and begins the first period.
    ///
    /// # Errors
    /// Fails if the settings contradict each other, a CPU, process or cgroup does not exist, or the kernel refuses the
    /// programs. See [`Error`].
    pub fn start(mut config: Config) -> Result<Self, Error> {
        config.budget = config.budget.filter(|_| config.mode == ReportMode::Events);
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
        // Trial calls are measured before and after the programs are attached. The difference is the price of timing a
        // call.
        let bare = config.budget.map(|_| CallTimes::measure()).transpose().map_err(Error::Price)?;
        let mut timed = Vec::new();
        if config.mode == ReportMode::Events {
            let ways = cost.attach()?;
            timed.extend(
                kernel::KernelEvent::ALL.into_iter().filter(|event| is_timed(*event, &ways)).map(Event::from),
            );
            missing.extend(ways.into_iter().map(MissingMeasurement::from));
            missing.extend(missing_by_method(&cost));
        }
        missing.extend(missing_by_frequency(config.frequency_hz));
        let adaptive = match config.budget.zip(bare) {
            Some((budget, bare)) => {
                let prices = CallPrices::between(bare, CallTimes::measure().map_err(Error::Price)?);
                Some(AdaptiveSampling::new(budget, prices, frequency, cpus.iter().copied().collect()))
            }
            None => None,
        };
        for pid in &config.profile {
            cost.watch(*pid, true)?;
        }
        for cpu in 0..cost.cpus() {
            cost.show_processes(cpu, config.cpus.as_ref().is_none_or(|asked| asked.contains(&cpu)));
        }
        if config.frequency_hz > 0 {
            for cpu in &cpus {
                cost.sample(*cpu, config.frequency_hz)?;
            }
        }
        let symbols = Symbols::read().map_err(Error::Symbols)?;
        let mut resolver = Resolver::new(symbols, config.taxonomy.clone());
        missing.extend(missing_names(&mut resolver));
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
            meter: EnergyMeter::new(config.idle_watts),
            programs: ProgramTable::new(cost.program_ids()),
            skipped: Skipped::new(cost.program_fds().map_err(Error::Programs)?),
            statistics,
            processes: Processes::default(),
            usage: ObserverUsage::default(),
            last: now,
            last_totals: Vec::new(),
            last_times: times,
            samples: Samples::new(&config),
            sequence: 0,
            cpus,
            config,
            cost,
        };
        observer.begin()?;
        observer.adaptive = adaptive;
        Ok(observer)
    }

    /// Returns the figures that cannot be measured on this kernel.
    pub fn missing(&self) -> &[MissingMeasurement] {
        &self.missing
    }

    /// Checks which figures are missing with the process's present privileges. Call it after privileges were dropped.
    pub fn look_at_rights(&mut self) {
        let new = missing_names(&mut self.resolver).filter(|new| !self.missing.contains(new));
        self.missing.extend(new);
    }

    /// Returns the kernel functions at which calls are timed.
    pub fn functions(&self) -> Vec<&'static str> {
        self.cost.functions()
    }

    /// Replaces the limit of the CPU time that the BPF programs may take to time the kernel's networking.
    pub fn set_budget(&mut self, budget: TimingBudget) -> Result<(), Error> {
        config::check_budget(budget)?;
        self.adaptive.as_mut().ok_or(Error::NoBudget)?.set_budget(budget);
        self.config.budget = Some(budget);
        Ok(())
    }

    /// Waits until `period` has passed since the last report, or the start, and returns a report.
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

    /// Reads the sampled stacks. Call it at least every [`POLL_INTERVAL`], or stacks may be lost, which reports count.
    pub fn poll(&mut self) {
        let Self { cost, resolver, samples, users, config, mode, .. } = self;
        let mut functions = Vec::new();
        let mut refreshed = false;
        cost.drain(|record| {
            // The list of BPF programs is read after the buffer of stacks, so it has every program that occurs in these
            // stacks.
            if !std::mem::replace(&mut refreshed, true) {
                // An error is not reported here: reports have listed the missing program names since the observer's
                // start.
                let _ = resolver.refresh();
                users.refresh();
            }
            take(&record, *mode, config, resolver, users, samples, &mut functions);
        });
        if self.resolver.outdated && self.symbols_read.elapsed() >= SYMBOLS_INTERVAL {
            self.read_symbols();
        }
        self.try_timing();
    }

    /// Tries from time to time whether timing the kernel's networking is cheap enough, if it is only sampled because of
    /// a budget. Reports use measured times only after a successful trial.
    fn try_timing(&mut self) {
        let Some(adaptive) = &mut self.adaptive else { return };
        match adaptive.poll(Instant::now(), || self.cost.totals()) {
            MethodStep::Try => match self.cost.attach() {
                Ok(_) => adaptive.tried(Some(self.cost.totals())),
                Err(_) => {
                    self.cost.detach();
                    adaptive.tried(None);
                }
            },
            MethodStep::Sample => self.cost.detach(),
            MethodStep::Stay | MethodStep::Time => {}
        }
    }

    /// Changes between timing and only sampling. It is called between two reports, so that each report's whole period
    /// was either timed or only sampled.
    fn change(&mut self, step: MethodStep) {
        match step {
            MethodStep::Sample => {
                self.mode = ReportMode::Sampling;
                self.cost.detach();
            }
            // The timing programs are attached since the trial, so they measure the whole next period.
            MethodStep::Time => self.mode = ReportMode::Events,
            MethodStep::Stay | MethodStep::Try => {}
        }
    }

    /// Returns a report of the time since the last one, or since the start.
    pub fn report(&mut self) -> Result<Report, Error> {
        let times = procstat::read().map_err(Error::ProcStat)?;
        let spent = procstat::since(&times, &self.last_times);
        // The period ends here: read the clock and the sums without anything in between, then the samples.
        let now = Instant::now();
        let totals = self.cost.totals();
        let period = now - self.last;
        self.poll();
        let programs = self.statistics.as_ref().map(|statistics| self.programs.read(statistics, period));
        let (processes, forget) = self.processes.read(self.cost.processes()?);
        for id in forget {
            self.cost.forget(id)?;
        }
        let samples = std::mem::replace(&mut self.samples, Samples::new(&self.config));
        // If this report rests on samples only, the times that BPF programs summed up come from a trial of timing. They
        // must not be mixed with times from samples.
        let mut processes = if self.mode == ReportMode::Events { processes } else { Vec::new() };
        tables::add_sampled(&mut processes, samples.sampled_processes());
        let (auto, step) = match &mut self.adaptive {
            Some(adaptive) => {
                let (auto, step) = adaptive.report(now, &totals, &self.last_totals, period);
                (Some(auto), step)
            }
            None => (None, MethodStep::Stay),
        };

        let cpus: Vec<CpuCost> =
            self.cpus().map(|cpu| self.cpu(cpu, &totals, &spent, &samples, period)).collect();
        let by_event = sum_by_event(&cpus);
        let events = cpus.iter().flat_map(|cpu| &cpu.events);
        let networking_ns = events.filter(|of| of.event.is_networking()).map(|of| of.ns).sum();
        let busy_ns = procstat::busy_ns(&spent);
        let per_call = PerCall::new(&cpus);
        let (processes, cgroups) =
            tables::describe(processes, per_call, &mut self.cgroups, &self.config, period);
        let mut processes = self.with_profiles(processes, &samples, period);
        if self.config.arguments {
            arguments::read(&mut processes);
        }
        let mut report = Report {
            version: VERSION,
            sequence: self.sequence,
            time_unix_ms: unix_ms(),
            period_ns: ns(period),
            mode: self.mode,
            sampled_ns: if self.mode == ReportMode::Sampling { ns(period) } else { 0 },
            auto,
            method: self.cost.method().filter(|_| self.mode == ReportMode::Events).map(ReportMethod::from),
            frequency_hz: self.config.frequency_hz,
            host: self.host.clone(),
            other: samples
                .fold
                .other_functions(TOP_OTHERS, |event| by_event.get(&event).copied().unwrap_or(0.0)),
            stacks: samples.fold.stacks(|cpu, event| self.ns_per_sample(&cpus, cpu, event)),
            processes,
            cgroups,
            energy: self.meter.read(period, networking_ns, busy_ns),
            observer: self.usage.read(&cpus, programs.as_deref(), period),
            lost: lost(&totals, &self.last_totals, self.skipped.read()),
            missing: self
                .missing
                .iter()
                .cloned()
                .chain(missing_by_mode(self.mode))
                .chain([unsampled(&cpus, &times)])
                .collect(),
            programs,
            cpus,
        };
        interval::fill(&mut report);
        self.sequence += 1;
        self.last = now;
        self.last_totals = totals;
        self.follow(&times);
        self.last_times = times;
        self.change(step);
        Ok(report)
    }

    /// Starts and stops sampling as CPUs go online and offline. A CPU that comes back needs a new sampler, since the
    /// kernel closes the clocks of a CPU that goes offline.
    fn follow(&mut self, online: &CpuClocks) {
        let asked = |cpu: &u32| self.config.cpus.as_ref().is_none_or(|asked| asked.contains(cpu));
        let now: BTreeSet<u32> = online.keys().copied().filter(asked).collect();
        if now == self.cpus {
            return;
        }
        for cpu in self.cpus.difference(&now) {
            self.cost.stop_sampling(*cpu);
        }
        if self.config.frequency_hz > 0 {
            for cpu in now.difference(&self.cpus) {
                // An error means that the CPU is offline again, which the next report will notice.
                let _ = self.cost.sample(*cpu, self.config.frequency_hz);
            }
        }
        if let Some(adaptive) = &mut self.adaptive {
            adaptive.set_cpus(now.iter().copied().collect());
        }
        self.cpus = now;
    }

    /// Makes a report and discards it, so that all counters start from now.
    fn begin(&mut self) -> Result<(), Error> {
        self.report()?;
        self.sequence = 0;
        Ok(())
    }

    /// Reads the kernel's symbols again. After a failure, names are missing until the next attempt.
    fn read_symbols(&mut self) {
        self.symbols_read = Instant::now();
        let _ = self.resolver.renew(Symbols::read_again);
    }

    fn cpus(&self) -> impl Iterator<Item = u32> {
        self.cpus.iter().copied()
    }

    /// Returns the kernel events (such as softirqs) that reports contain: with sampling all of them, otherwise those
    /// that BPF programs time.
    fn measured(&self) -> impl Iterator<Item = Event> {
        let sampled = self.config.frequency_hz > 0;
        Event::ALL.into_iter().filter(move |event| match event {
            Event::Kernel => self.config.all,
            event => sampled || self.timed.contains(event),
        })
    }

    fn cpu(
        &self,
        cpu: u32,
        totals: &[CpuSums],
        spent: &CpuClocks,
        samples: &Samples,
        period: Duration,
    ) -> CpuCost {
        let at = cpu as usize;
        let after = cpu_totals(totals, at);
        let before = cpu_totals(&self.last_totals, at);
        let distance_ns = self.distance_ns(cpu);
        let events: Vec<EventCost> = self
            .measured()
            .map(|event| {
                let taken = samples.counts.get(&(cpu, event)).copied().unwrap_or_default();
                let timed = names::timed(event)
                    .filter(|_| self.mode == ReportMode::Events && self.timed.contains(&event));
                let total = timed.map_or(0, |event| after.ns(event).saturating_sub(before.ns(event)));
                // The kernel event's time was measured by BPF programs and includes their own. Samples only divide it
                // between networking and these programs.
                let timed_observer_ns =
                    share_out(total, taken.timed_observer, taken.timed + taken.timed_observer);
                let ns = total - timed_observer_ns + taken.sampled * distance_ns;
                let count = taken.timed + taken.sampled;
                EventCost {
                    event,
                    ns,
                    share: share(ns, period),
                    calls: timed.map(|event| after.calls(event).saturating_sub(before.calls(event))),
                    observer_ns: timed_observer_ns + taken.sampled_observer * distance_ns,
                    samples: count,
                    sampled: taken.sampled,
                    interval: None,
                    parts: parts(&samples.fold, cpu, event, ns, count, period),
                }
            })
            .collect();
        let networking = events.iter().filter(|event| event.event.is_networking());
        // The samples behind `observer_share`: those of the same events.
        let counts = self.measured().filter_map(|event| samples.counts.get(&(cpu, event)));
        CpuCost {
            cpu,
            networking_share: rounded(networking.map(|event| event.share).sum()),
            networking_interval: None,
            observer_share: share(events.iter().map(|event| event.observer_ns).sum(), period),
            observer_samples: counts.map(|count| count.timed_observer + count.sampled_observer).sum(),
            observer_interval: None,
            events,
            procstat: spent.get(&cpu).copied().unwrap_or_default(),
            samples: after.samples.saturating_sub(before.samples),
            lost_samples: after.lost_samples.saturating_sub(before.lost_samples),
        }
    }

    /// Returns the time in ns that one sample of a CPU stands for.
    fn distance_ns(&self, cpu: u32) -> u64 {
        kernel::period_ns(cpu, self.config.frequency_hz)
    }

    fn ns_per_sample(&self, cpus: &[CpuCost], cpu: u32, event: Option<Event>) -> f64 {
        let Some(event) = event else { return NS_PER_S / f64::from(self.config.frequency_hz.max(1)) };
        let events = cpus.iter().find(|of| of.cpu == cpu).map_or(&[][..], |of| &of.events);
        let cost = events.iter().find(|of| of.event == event);
        cost.map_or(0.0, |cost| cost.ns as f64 / cost.samples.max(1) as f64)
    }

    fn with_profiles(
        &self,
        mut processes: Vec<crate::report::ProcessCost>,
        samples: &Samples,
        period: Duration,
    ) -> Vec<crate::report::ProcessCost> {
        for (pid, profile) in &samples.profiles {
            let profile = profile.finish(NS_PER_S / f64::from(self.config.frequency_hz.max(1)), period);
            match processes.iter_mut().find(|process| process.pid == *pid) {
                Some(process) => process.profile = Some(profile),
                // The process ran but made no socket call.
                None => processes.push(tables::idle(*pid, profile)),
            }
        }
        processes
    }
}

fn load(config: &Config) -> Result<CostPrograms, Error> {
    let watch = !config.profile.is_empty();
    // Stacks of profiled processes contain user-mode frames too.
    let bytes_per_hz = if watch { 2 * BUFFER_BYTES_PER_HZ } else { BUFFER_BYTES_PER_HZ };
    let loaded = CostPrograms::load(&kernel::Config {
        events: config.mode == ReportMode::Events,
        method: config.method.map(kernel::TimingMethod::from),
        transport: if config.ring_buffer { StackTransport::RingBuffer } else { StackTransport::DoubleBuffer },
        buffer_bytes: config.frequency_hz.saturating_mul(bytes_per_hz),
        watch,
    });
    loaded.map_err(|error| {
        // Without privileges, the probes of features fail as well, and their result would mean nothing.
        let features = if error.is_denied() { Vec::new() } else { kernel::missing_features() };
        if features.is_empty() { error.into() } else { Error::Old { kernel: host().kernel, features } }
    })
}

fn statistics(config: &Config, missing: &mut Vec<MissingMeasurement>) -> Option<Statistics> {
    if !config.program_statistics {
        return None;
    }
    let what = "run times of BPF programs";
    Statistics::enable()
        .map_err(|error| missing.push(MissingMeasurement::new(None, what, error.to_string())))
        .ok()
}

/// Reads the list of BPF programs. If that fails, returns a note for reports that the programs' names are missing.
fn missing_names(resolver: &mut Resolver) -> Option<MissingMeasurement> {
    let what = "names of BPF programs that are loaded later";
    resolver.refresh().err().map(|error| MissingMeasurement::new(None, what, error.to_string()))
}

/// Reports whether BPF programs time this kind of kernel work. Softirqs are always timed. Sends and receives are timed
/// if at least one of their system calls and requests is.
fn is_timed(event: kernel::KernelEvent, missing: &[kernel::MissingPoint]) -> bool {
    let mut ways = kernel::WAYS.iter().filter(|way| way.event == event).peekable();
    ways.peek().is_none() || ways.any(|way| missing.iter().all(|missing| missing.what != way.name))
}

/// Returns the figures that timing at system calls misses, and the reason why functions are not timed.
fn missing_by_method(cost: &CostPrograms) -> Vec<MissingMeasurement> {
    if cost.method() != Some(kernel::TimingMethod::SystemCalls) {
        return Vec::new();
    }
    let refused = cost.refused().and_then(|reason| reason.lines().next());
    let refused = refused.map(|reason| MissingMeasurement::new(None, "timing at functions", reason));
    let of_calls = [Event::Send, Event::Receive].into_iter().flat_map(|event| {
        [
            (
                "calls on the kernel's own sockets",
                "timing at system calls does not see them: their time is sampled, and they are not counted",
            ),
            (
                "calls of 32-bit programs",
                "timing at system calls ignores them: their time is sampled, and they are not counted",
            ),
            (
                "io_uring requests that had to wait, and io_uring's splice",
                "timing at system calls sees only the work inside the call: the rest counts for io_uring's threads",
            ),
            (
                "io_uring's requests for registered sockets",
                "timing at system calls cannot look them up: reads and writes are sampled, not counted, and AF_UNIX counts as networking",
            ),
        ]
        .map(|(what, reason)| MissingMeasurement::new(Some(event), what, reason))
    });
    refused.into_iter().chain(of_calls).collect()
}

/// Returns the figures that reports lack if the kernel's networking is only sampled, not timed.
fn missing_by_mode(mode: ReportMode) -> Option<MissingMeasurement> {
    (mode == ReportMode::Sampling)
        .then(|| MissingMeasurement::new(None, "counts of calls", "events are sampled, not timed"))
}

/// If the sampling frequency is 0, returns a note for reports that names the kinds of kernel work that only samples can
/// measure.
fn missing_by_frequency(hz: u32) -> Option<MissingMeasurement> {
    let is_sampled_only = |event: &Event| names::timed(*event).is_none() && event.is_networking();
    let events: Vec<&str> =
        Event::ALL.iter().filter(|event| is_sampled_only(event)).map(|event| event.name()).collect();
    let reason = "these events are only sampled, and a frequency of 0 takes no samples";
    (hz == 0).then(|| MissingMeasurement::new(None, events.join(", "), reason))
}

/// Returns the CPU time (of hard interrupts) that neither BPF programs nor samples measure. A kernel without
/// CONFIG_IRQ_TIME_ACCOUNTING does not measure it either, and reports it as 0 on all CPUs since boot. In this case the
/// returned value has a reason but no time.
fn unsampled(cpus: &[CpuCost], since_boot: &CpuClocks) -> MissingMeasurement {
    let reason = "the sampling clock's interrupt waits until they end, so they count for the work that they interrupted";
    if since_boot.values().all(|times| times.irq_ns == 0) {
        let reason = format!("this kernel does not measure their time; {reason}");
        return MissingMeasurement::new(None, HARD_INTERRUPTS, reason);
    }
    let ns = cpus.iter().map(|cpu| cpu.procstat.irq_ns).sum();
    MissingMeasurement { ns: Some(ns), ..MissingMeasurement::new(None, HARD_INTERRUPTS, reason) }
}

/// Counts one sampled stack.
fn take(
    record: &StackRecord<'_>,
    mode: ReportMode,
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
    // During a trial, programs time the kernel's networking, but the report must still rest on samples only.
    let timed = record.event.filter(|_| mode == ReportMode::Events).map(Event::from);
    // A call on a local socket runs the same functions as one on a network socket until it reaches the protocol.
    let told = owner.event.map(|event| match event {
        Event::Send | Event::Receive | Event::Sockets if record.local => Event::Local,
        event => event,
    });
    let event = timed.or(told).filter(|event| config.all || *event != Event::Kernel);
    if let Some(event) = event {
        samples.count(record.cpu, event, timed.is_some(), owner.observer);
    }
    if let Some(event) = event
        && !owner.observer
    {
        if timed.is_none() {
            let name = (record.pid == 0).then_some(record.name);
            let task = SampledTask { pid: record.pid, cgroup: record.cgroup, name };
            let ns = kernel::period_ns(record.cpu, config.frequency_hz);
            if let Some(cost) = TaskCost::from_sample(event, ns) {
                // Keep the name: a process that ends before the report has none in `/proc`.
                samples.tasks.entry(task).or_insert((TaskCost::default(), record.name)).0.add(&cost);
            }
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
            Some(Event::NetRx | Event::NetTx | Event::Timers) => ProcessPlace::Softirq,
            _ if record.kernel.is_empty() => ProcessPlace::User(&names),
            _ => ProcessPlace::Kernel,
        };
        samples.profiles.entry(record.pid).or_default().add(resolver.taxonomy(), place);
        if config.stacks && place != ProcessPlace::Softirq {
            let kernel = functions.iter().map(|number| resolver.name(*number));
            let user = names.iter().map(|name| name.unwrap_or("[unknown]"));
            samples.fold.add_stack(record.cpu, event, Some(record.pid), kernel.chain(user));
        }
    }
}

/// The mean time that the observer's BPF programs add to a send, to a receive and to a call on a local socket, in ns,
/// over all CPUs.
#[derive(Debug, Clone, Copy, Default)]
struct PerCall {
    send_ns: f64,
    receive_ns: f64,
    local_ns: f64,
}

impl PerCall {
    fn new(cpus: &[CpuCost]) -> Self {
        let mean = |event: Event| {
            let costs = || cpus.iter().flat_map(|cpu| &cpu.events).filter(|cost| cost.event == event);
            let calls: u64 = costs().filter_map(|cost| cost.calls).sum();
            costs().map(|cost| cost.observer_ns).sum::<u64>() as f64 / calls.max(1) as f64
        };
        Self { send_ns: mean(Event::Send), receive_ns: mean(Event::Receive), local_ns: mean(Event::Local) }
    }

    /// Returns the process's networking times without the time that the observer's programs added to its calls.
    fn without(self, cost: &TaskCost) -> TaskCost {
        let less = |ns: u64, calls: u64, each: f64| ns.saturating_sub((calls as f64 * each) as u64);
        TaskCost {
            send_ns: less(cost.send_ns, cost.send_calls, self.send_ns),
            receive_ns: less(cost.receive_ns, cost.receive_calls, self.receive_ns),
            local_ns: less(cost.local_ns, cost.local_calls, self.local_ns),
            ..*cost
        }
    }
}

fn parts(fold: &Fold, cpu: u32, event: Event, total: u64, samples: u64, period: Duration) -> Vec<EventPart> {
    let part = |(name, taken): (&str, u64)| {
        let ns = share_out(total, taken, samples);
        EventPart { name: name.to_owned(), ns, share: share(ns, period), samples: taken, interval: None }
    };
    fold.parts(cpu, event).into_iter().map(part).collect()
}

/// Returns how many nanoseconds one sample in each kernel event (such as a softirq) stands for, averaged over all CPUs.
fn sum_by_event(cpus: &[CpuCost]) -> HashMap<Event, f64> {
    let mut sums: BTreeMap<Event, (u64, u64)> = BTreeMap::new();
    for event in cpus.iter().flat_map(|cpu| &cpu.events).filter(|event| event.samples > 0) {
        let sum = sums.entry(event.event).or_default();
        *sum = (sum.0 + event.ns, sum.1 + event.samples);
    }
    sums.into_iter().map(|(event, (ns, samples))| (event, ns as f64 / samples as f64)).collect()
}

fn lost(after: &[CpuSums], before: &[CpuSums], skipped_runs: u64) -> LostObservations {
    let sum = |of: fn(&CpuSums) -> u64| -> u64 {
        let total = |totals: &[CpuSums]| -> u64 { totals.iter().map(of).sum() };
        total(after).saturating_sub(total(before))
    };
    LostObservations {
        samples: sum(|totals| totals.lost_samples),
        stacks: sum(|totals| totals.lost_stacks),
        processes: sum(|totals| totals.lost_processes),
        tasks: sum(|totals| totals.lost_tasks),
        skipped_runs,
    }
}

fn cpu_totals(totals: &[CpuSums], cpu: usize) -> CpuSums {
    totals.get(cpu).copied().unwrap_or_default()
}

fn unix_ms() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_millis()).unwrap_or(u64::MAX)
}

fn host() -> ReportHost {
    nix::sys::utsname::uname().map_or_else(
        |_| ReportHost::default(),
        |names| ReportHost {
            name: names.nodename().to_string_lossy().into_owned(),
            kernel: names.release().to_string_lossy().into_owned(),
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::ProcStat;
    use crate::samples::report;

    fn missing(ways: impl Iterator<Item = &'static kernel::SocketCall>) -> Vec<kernel::MissingPoint> {
        ways.map(|way| kernel::MissingPoint { event: way.event, what: way.name, reason: String::new() })
            .collect()
    }

    #[test]
    fn kernel_event_counts_as_timed_if_any_of_its_calls_is_timed() {
        let sends = || kernel::WAYS.iter().filter(|way| way.event == kernel::KernelEvent::Send);
        let all = missing(sends());
        let but_one = missing(sends().skip(1));
        let timed = |missing: &[kernel::MissingPoint]| {
            kernel::KernelEvent::ALL.into_iter().filter(|event| is_timed(*event, missing)).collect::<Vec<_>>()
        };
        let but_send: Vec<_> = kernel::KernelEvent::ALL
            .into_iter()
            .filter(|event| *event != kernel::KernelEvent::Send)
            .collect();
        assert_eq!(timed(&all), but_send);
        assert_eq!(timed(&but_one), kernel::KernelEvent::ALL);
        assert_eq!(timed(&[]), kernel::KernelEvent::ALL);
    }

    fn is_root(test: &str) -> bool {
        let root = nix::unistd::geteuid().is_root();
        if !root {
            println!("SKIP {test}: needs root");
        }
        root
    }

    /// The test removes a CPU from the observer's list, as if it had been offline, and the next report finds it online.
    #[test]
    fn cpu_that_comes_online_is_sampled() {
        if !is_root("cpu_that_comes_online_is_sampled") {
            return;
        }
        let mut observer = Observer::start(Config::new().expect("a taxonomy")).expect("it starts");
        let online = observer.cpus.clone();
        let Some(last) = online.last().copied().filter(|_| online.len() > 1) else {
            return println!("SKIP cpu_that_comes_online_is_sampled: one CPU");
        };
        let without: CpuClocks =
            online.iter().filter(|cpu| **cpu != last).map(|cpu| (*cpu, ProcStat::default())).collect();
        observer.follow(&without);
        assert!(!observer.cost.sampled().contains(&last));
        let cpus = |report: &Report| report.cpus.iter().map(|cpu| cpu.cpu).collect::<BTreeSet<_>>();
        let gone = observer.report().expect("a report");
        assert!(!cpus(&gone).contains(&last));
        // Making the report has read which CPUs are online.
        assert_eq!(observer.cost.sampled(), online);
        millrace_testkit::wait_for("samples of the CPU that came", || {
            let report = observer.next(Duration::from_millis(100)).expect("a report");
            assert_eq!(cpus(&report), online);
            report.cpus.iter().any(|cpu| cpu.cpu == last && cpu.samples > 0)
        });
    }

    /// The kernel counts how often it skipped a BPF program even if it keeps no run-time statistics of BPF programs.
    #[test]
    fn skipped_program_runs_are_counted_without_bpf_statistics() {
        if !is_root("skipped_program_runs_are_counted_without_bpf_statistics") {
            return;
        }
        let recursion = millrace_lab_kernel::recursion::Recursion::attach().expect("it attaches");
        let mut observer = Observer::start(Config::new().expect("a taxonomy")).expect("it starts");
        observer.skipped.add(recursion.program_fd().expect("a descriptor"));
        observer.report().expect("a report");
        recursion.run().expect("it runs");
        let lost = observer.report().expect("a report").lost;
        assert!(lost.skipped_runs > 0, "{lost:?}");
        assert!(!lost.is_nothing());
    }

    /// On a kernel without CONFIG_IRQ_TIME_ACCOUNTING the time of hard interrupts is 0 in `/proc/stat` since boot.
    #[test]
    fn time_of_hard_interrupts_is_unknown_if_the_kernel_does_not_measure_it() {
        let mut cpus = report(0).cpus;
        let stat = |irq_ns| ProcStat { irq_ns, user_ns: 5, ..ProcStat::default() };
        let since_boot = |irq_ns| CpuClocks::from([(0, stat(0)), (1, stat(irq_ns))]);
        let unmeasured = unsampled(&cpus, &since_boot(0));
        assert_eq!(unmeasured.ns, None);
        assert!(unmeasured.reason.starts_with("this kernel does not measure their time"), "{unmeasured:?}");
        // A CPU has had interrupts since boot, but none in the period.
        assert_eq!(unsampled(&cpus, &since_boot(9)).ns, Some(0));
        cpus[1].procstat.irq_ns = 7;
        let measured = unsampled(&cpus, &since_boot(9));
        assert_eq!((measured.ns, measured.what.as_str()), (Some(7), HARD_INTERRUPTS));
    }

    #[test]
    fn observer_time_is_subtracted_from_each_call() {
        let mut cpus = report(0).cpus;
        for cost in cpus.iter_mut().flat_map(|cpu| &mut cpu.events) {
            (cost.event, cost.calls, cost.observer_ns) = (Event::Send, Some(1000), 20_000);
        }
        cpus[1].events[0].observer_ns = 60_000;
        let per_call = PerCall::new(&cpus);
        let cost = TaskCost {
            send_ns: 1000,
            send_calls: 10,
            receive_ns: 7,
            receive_calls: 9,
            ..TaskCost::default()
        };
        assert_eq!(per_call.without(&cost), TaskCost { send_ns: 600, ..cost });
        // A call that began in this period and ends in the next one has less time than the observer's programs add on
        // average. The result is 0, not negative.
        let begun = TaskCost { send_ns: 20, send_calls: 1, ..TaskCost::default() };
        assert_eq!(per_call.without(&begun), TaskCost { send_ns: 0, ..begun });
        assert_eq!(PerCall::new(&[]).without(&cost), cost);
    }
}
