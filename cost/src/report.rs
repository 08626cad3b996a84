//! The data model: one [`Report`] per period. Its JSON is what `millrace cost --json` prints, one per line.
//!
//! * Times are nanoseconds on CPU within the period; shares are of one CPU (1.0 is one CPU, all of the period).
//! * Parts, processes and stacks that did not occur are absent. What could not be measured is in
//!   [`Report::missing`], what was measured but lost in [`Report::lost`].
//! * Fields may be added within a [`VERSION`]; a change of meaning or a removal raises it.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The version of the reports' format. It rises when a field changes its meaning or goes.
pub const VERSION: u32 = 3;

/// A context in which the kernel works. Every nanosecond belongs to one event or to none: what is innermost wins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The NET_RX softirq, and kernel threads that poll a NIC.
    NetRx,
    /// The NET_TX softirq.
    NetTx,
    /// Calls that send on a socket, by whatever system call or io_uring request, and the kernel's own.
    Send,
    /// Calls that receive from a socket, likewise.
    Receive,
    /// io_uring's own threads (workers, SQPOLL) outside of socket calls.
    IoUring,
    /// Other softirqs, while they run networking: pacing, retransmission, small queues, what is freed after a grace period.
    Timers,
    /// Calls that neither send nor receive and run networking: connect, accept, close, setsockopt and the like.
    Sockets,
    /// poll, select and epoll, while they ask sockets or poll a NIC.
    Poll,
    /// Reads and writes of TUN and TAP devices, and vhost's threads.
    Devices,
    /// Other kernel threads, while they run networking: WireGuard, MPTCP, XDP's cpumap.
    Workers,
    /// Calls on AF_UNIX and netlink sockets. They reach no network, and are no networking.
    Local,
    /// The kernel's other work. It is not networking, and reports contain it only on request.
    Kernel,
}

impl Event {
    /// The events, in the order in which reports have them.
    pub const ALL: [Self; 12] = [
        Self::NetRx,
        Self::NetTx,
        Self::Send,
        Self::Receive,
        Self::IoUring,
        Self::Timers,
        Self::Sockets,
        Self::Poll,
        Self::Devices,
        Self::Workers,
        Self::Local,
        Self::Kernel,
    ];
    /// How many of [`ALL`](Self::ALL), from the first one on, are networking.
    pub const NETWORKING: usize = Self::Local as usize;

    /// Returns whether its share is in [`CpuCost::networking_share`].
    pub const fn is_networking(self) -> bool {
        self.index() < Self::NETWORKING
    }

    /// The name in JSON, metrics and flags.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NetRx => "net_rx",
            Self::NetTx => "net_tx",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::IoUring => "io_uring",
            Self::Timers => "timers",
            Self::Sockets => "sockets",
            Self::Poll => "poll",
            Self::Devices => "devices",
            Self::Workers => "workers",
            Self::Local => "local",
            Self::Kernel => "kernel",
        }
    }

    /// Position in [`ALL`](Self::ALL).
    pub const fn index(self) -> usize {
        self as usize
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Event {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        Self::ALL
            .into_iter()
            .find(|event| event.name() == name)
            .ok_or_else(|| format!("no event is called {name:?}"))
    }
}

/// The way in which times are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReportMode {
    /// Events that programs can time are timed exactly, stacks split them into parts and tell the others.
    #[default]
    Events,
    /// Stacks alone, always: a time is the number of samples times their distance. There are no `calls`.
    Sampling,
}

/// The places where calls that send or receive are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReportMethod {
    /// The kernel's functions.
    Functions,
    /// System calls and io_uring requests, since the kernel allows no programs on functions.
    SystemCalls,
}

/// The state of the automatic choice between timing and sampling (`--mode auto`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Auto {
    /// The share of each CPU that timing events may take.
    pub budget_share: f64,
    /// The share that it takes on the CPU where it takes most: runs of the programs, times the measured cost of one. In mode `sampling`,
    /// the share when it was last in use or tried.
    pub timing_share: f64,
    /// Milliseconds from the end of the period until timing is tried again, in mode `sampling`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_ms: Option<u64>,
    /// How often the mode has changed since the start.
    pub changes: u64,
    /// Duration of a sample's interrupt; absent if it could not be measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interrupt_ns: Option<u64>,
    /// [`Report::frequency_hz`] was this, and was lowered since interrupts take so much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lowered_from_hz: Option<u32>,
}

/// The figures of one period.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`VERSION`].
    pub version: u32,
    /// Counts the observer's reports from 0.
    pub sequence: u64,
    /// The end of the period, milliseconds since 1970.
    pub time_unix_ms: u64,
    /// Length of the period, nanoseconds.
    pub period_ns: u64,
    /// How the figures came about; of a sum of reports, those of the last one.
    pub mode: ReportMode,
    /// The part of `period_ns` in mode `sampling`: all or nothing, but for a sum of reports. There are no `calls` of it.
    #[serde(default)]
    pub sampled_ns: u64,
    /// Why the mode is what it is; absent if it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<Auto>,
    /// Absent in mode `sampling`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<ReportMethod>,
    /// Samples per second and CPU; 0 when no stacks are sampled, and there are no parts then.
    pub frequency_hz: u32,
    /// The machine.
    pub host: ReportHost,
    /// The observed CPUs, in the order of their numbers.
    pub cpus: Vec<CpuCost>,
    /// The innermost functions of the parts called [`OTHER`], most time first, over all CPUs.
    pub other: Vec<OtherFunctions>,
    /// Most time first.
    pub processes: Vec<ProcessCost>,
    /// Sums of `processes`, most time first.
    pub cgroups: Vec<CgroupCost>,
    /// Every BPF program that ran in the period, most time first; absent if that was not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub programs: Option<Vec<ProgramCost>>,
    /// The energy that the machine has used, and networking's part in it.
    pub energy: Energy,
    /// The observer's own cost.
    pub observer: ObserverCost,
    /// Counts of what the figures miss. All are 0 in a report that is complete.
    pub lost: LostObservations,
    /// Figures that cannot be measured here, the same in every report of a mode.
    pub missing: Vec<MissingMeasurement>,
    /// Sampled stacks, for flame graphs; only on request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stacks: Option<Stacks>,
}

impl Report {
    /// Copies everything but the tables, which are empty.
    pub(crate) fn without_tables(&self) -> Self {
        Self {
            version: self.version,
            sequence: self.sequence,
            time_unix_ms: self.time_unix_ms,
            period_ns: self.period_ns,
            mode: self.mode,
            sampled_ns: self.sampled_ns,
            auto: self.auto,
            method: self.method,
            frequency_hz: self.frequency_hz,
            host: self.host.clone(),
            cpus: Vec::new(),
            other: Vec::new(),
            processes: Vec::new(),
            cgroups: Vec::new(),
            programs: None,
            energy: self.energy.clone(),
            observer: self.observer,
            lost: self.lost,
            missing: self.missing.clone(),
            stacks: None,
        }
    }

    /// An event's share, over all CPUs.
    pub fn share_of(&self, event: Event) -> f64 {
        self.cpus.iter().flat_map(|cpu| &cpu.events).filter(|of| of.event == event).map(|of| of.share).sum()
    }

    /// Returns whether at least one way of an event is measured.
    pub fn measures(&self, event: Event) -> bool {
        self.cpus.iter().flat_map(|cpu| &cpu.events).any(|of| of.event == event)
    }

    /// Returns whether the event's calls are counted, in all of the period.
    pub fn counts(&self, event: Event) -> bool {
        let mut costs = self.cpus.iter().flat_map(|cpu| &cpu.events);
        self.sampled_ns == 0 && costs.any(|of| of.event == event && of.calls.is_some())
    }

    /// The time that one sample stands for; 0 when none are taken.
    pub fn sample_ns(&self) -> u64 {
        1_000_000_000_u64.checked_div(self.frequency_hz.into()).unwrap_or(0)
    }

    /// Returns whether any process has its command line.
    pub fn has_arguments(&self) -> bool {
        self.processes.iter().any(|process| process.arguments.is_some())
    }

    /// Stacks are larger than all the rest.
    #[must_use]
    pub fn without_stacks(&self) -> Self {
        Self {
            cpus: self.cpus.clone(),
            other: self.other.clone(),
            processes: self.processes.clone(),
            cgroups: self.cgroups.clone(),
            programs: self.programs.clone(),
            ..self.without_tables()
        }
    }
}

/// The name of the part that no rule of the taxonomy knows.
pub const OTHER: &str = "other";

/// Shares of one CPU between which a figure is with 95 % confidence: by the number of its samples, as if these were independent.
pub type Interval = [f64; 2];

/// The machine that was observed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ReportHost {
    /// The host's name.
    pub name: String,
    /// `uname -r`.
    pub kernel: String,
}

/// The time of one CPU.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct CpuCost {
    /// The CPU's number, from 0.
    pub cpu: u32,
    /// Sum of the shares of those `events` that [are networking](Event::is_networking).
    pub networking_share: f64,
    /// Interval of `networking_share` with 95 % confidence; absent if it is exact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub networking_interval: Option<Interval>,
    /// Time that the observer used inside of all `events`: the sum of their `observer_ns`. It is in none of their shares.
    pub observer_share: f64,
    /// Each of [`Event::ALL`] that is measured here, also if it did not occur; [`Event::Kernel`] only on request.
    pub events: Vec<EventCost>,
    /// The kernel's own accounting of the same CPU, from `/proc/stat`; in steps of a clock tick (10 ms).
    pub procstat: ProcStat,
    /// Samples taken, of whatever the CPU was doing.
    pub samples: u64,
    /// Samples for which the buffer had no room; in [`Report::lost`] too.
    pub lost_samples: u64,
}

/// The time of one CPU in one event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventCost {
    /// The event.
    pub event: Event,
    /// Without `observer_ns`.
    pub ns: u64,
    /// `ns` as a share of the period, 0 to 1.
    pub share: f64,
    /// How often it began: softirqs, socket calls, threads that were switched to. Absent in mode `sampling`, and of events
    /// that no program times.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calls: Option<u64>,
    /// Time of the observer's programs inside the event, and of the kernel to call programs. It is a share of the time from the event's
    /// beginnings to its ends, by samples. Both together are that time, which is exact; 0 without samples.
    pub observer_ns: u64,
    /// Samples that `parts` rest on, and in mode `sampling` the event too.
    pub samples: u64,
    /// Number of `samples` that no program timed. Each adds its distance in time to `ns`.
    #[serde(default)]
    pub sampled: u64,
    /// Interval of the share with 95 % confidence; absent if the share is exact. The interval of `observer_ns` has the same width.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
    /// Most time first. Their `ns` add up to the event's, but for rounding; empty without samples.
    pub parts: Vec<EventPart>,
}

/// A part of an event, by the taxonomy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventPart {
    /// The taxonomy's name; `bpf:NAME` for a BPF program; [`OTHER`].
    pub name: String,
    /// Time in the part, nanoseconds.
    pub ns: u64,
    /// The share of the CPU, not of the event.
    pub share: f64,
    /// Samples that the part rests on.
    pub samples: u64,
    /// Interval of the share with 95 % confidence; absent if it rests on no samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
}

/// `/proc/stat`, nanoseconds within the period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProcStat {
    /// Includes `nice` and guests.
    pub user_ns: u64,
    /// Time in kernel mode, apart from interrupts.
    pub system_ns: u64,
    /// Time in softirqs.
    pub softirq_ns: u64,
    /// Time in hardware interrupts.
    pub irq_ns: u64,
    /// Time that the hypervisor gave to others.
    pub steal_ns: u64,
    /// Includes `iowait`.
    pub idle_ns: u64,
}

impl ProcStat {
    /// Returns the time in which the CPU worked: all but idle and stolen time.
    pub const fn busy_ns(&self) -> u64 {
        self.user_ns + self.system_ns + self.softirq_ns + self.irq_ns
    }
}

/// The innermost functions of one event's part [`OTHER`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OtherFunctions {
    /// The event.
    pub event: Event,
    /// The functions, most time first.
    pub functions: Vec<FunctionCost>,
}

/// The time of a function.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FunctionCost {
    /// The function's name.
    pub name: String,
    /// Time in the function itself, nanoseconds.
    pub ns: u64,
    /// Samples that the time rests on.
    pub samples: u64,
    /// Interval of the share with 95 % confidence; absent if it rests on no samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
}

/// Time of a process in its own calls and threads, without the observer: each timed call without what the observer took in a
/// call on average. Softirqs are nobody's. What belongs to an event that is not [measured](Report::measures) or
/// [counted](Report::counts) is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TaskCost {
    /// Time in [`Event::Send`], nanoseconds.
    pub send_ns: u64,
    /// Time in [`Event::Receive`], nanoseconds.
    pub receive_ns: u64,
    /// Time in [`Event::IoUring`], nanoseconds.
    pub io_uring_ns: u64,
    /// Time in [`Event::Sockets`], [`Event::Poll`], [`Event::Devices`] and [`Event::Workers`] together, by samples.
    #[serde(default)]
    pub other_ns: u64,
    /// Time in [`Event::Local`]. It is in no share.
    #[serde(default)]
    pub local_ns: u64,
    /// Calls that send.
    pub send_calls: u64,
    /// Calls that receive.
    pub receive_calls: u64,
    /// Calls on AF_UNIX and netlink sockets.
    #[serde(default)]
    pub local_calls: u64,
    /// Samples that networking's time rests on where no program timed it: each adds its distance in time.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub samples: u64,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde wants it so")]
fn is_zero(samples: &u64) -> bool {
    *samples == 0
}

impl TaskCost {
    /// Networking's.
    pub const fn ns(&self) -> u64 {
        self.send_ns + self.receive_ns + self.io_uring_ns + self.other_ns
    }

    /// The sum of an event that is a process' own.
    pub(crate) fn event_mut(&mut self, event: Event) -> Option<&mut u64> {
        match event {
            Event::Send => Some(&mut self.send_ns),
            Event::Receive => Some(&mut self.receive_ns),
            Event::IoUring => Some(&mut self.io_uring_ns),
            Event::Sockets | Event::Poll | Event::Devices | Event::Workers => Some(&mut self.other_ns),
            Event::Local => Some(&mut self.local_ns),
            Event::NetRx | Event::NetTx | Event::Timers | Event::Kernel => None,
        }
    }

    /// Adds the times and counts of `more`.
    pub fn add(&mut self, more: &Self) {
        self.send_ns += more.send_ns;
        self.receive_ns += more.receive_ns;
        self.io_uring_ns += more.io_uring_ns;
        self.other_ns += more.other_ns;
        self.local_ns += more.local_ns;
        self.send_calls += more.send_calls;
        self.receive_calls += more.receive_calls;
        self.local_calls += more.local_calls;
        self.samples += more.samples;
    }
}

/// The networking of one process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessCost {
    /// The number in the observer's PID namespace. 0: outside of it, as for an observer in a container.
    pub pid: u32,
    /// The name that the kernel keeps, at most 15 bytes.
    pub name: String,
    /// The command line, printable and cut. Only on request, for the processes with the largest figures, while they live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arguments: Option<String>,
    /// Path below the mount of cgroup v2; absent if it has none any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// The share of one CPU; a process with many threads can have more than 1.
    pub share: f64,
    /// Interval of the share with 95 % confidence; absent if it rests on no samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
    /// Times and calls of the process.
    #[serde(flatten)]
    pub cost: TaskCost,
    /// The breakdown of all its CPU time, for chosen processes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<ProcessProfile>,
}

/// The CPU time of one process, by samples, in user and kernel mode.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ProcessProfile {
    /// Samples of the process, on all CPUs.
    pub samples: u64,
    /// Samples in user mode.
    pub user_samples: u64,
    /// Parts by the taxonomy of user space, most time first. Kernel mode is `system call`, and stacks without any name are `unknown`.
    /// Shares are of one CPU.
    pub parts: Vec<EventPart>,
    /// Innermost functions with the most samples.
    pub functions: Vec<FunctionCost>,
    /// Samples in user mode whose stack had no function that could be named.
    pub unknown_samples: u64,
}

/// The networking of one cgroup, without that of the cgroups below.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CgroupCost {
    /// The kernel's ID, which is the directory's inode number.
    pub id: u64,
    /// The path below the mount of cgroup v2. Absent if the cgroup is gone or not visible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Networking's share of one CPU.
    pub share: f64,
    /// Interval of the share with 95 % confidence; absent if it rests on no samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
    /// Processes of the cgroup in the report.
    pub processes: u32,
    /// Times and calls of these processes.
    #[serde(flatten)]
    pub cost: TaskCost,
}

/// A BPF program, by the kernel's run-time statistics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProgramCost {
    /// The kernel's number of the program.
    pub id: u32,
    /// The program's name, which the kernel cuts after 15 characters.
    pub name: String,
    /// `tracing`, `sched_cls`, `xdp`, ...
    pub kind: String,
    /// Time in the program, nanoseconds.
    pub run_ns: u64,
    /// Times that it ran.
    pub runs: u64,
    /// Runs that the kernel skipped because the program was running on that CPU already.
    pub skipped: u64,
    /// The share of one CPU, summed over all CPUs.
    pub share: f64,
    /// The program is one of the observer's own.
    pub own: bool,
}

/// The energy in the period.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Energy {
    /// The energy cannot be read here.
    Absent {
        /// The reason why not.
        reason: String,
    },
    /// The hardware has counted the energy.
    Measured {
        /// `powercap` or `perf`.
        source: String,
        /// Parts of the hardware whose energy is counted separately.
        domains: Vec<EnergyDomain>,
        /// The energy of all packages and their memory.
        total_joules: f64,
        /// The part of it above `idle_watts`; absent if those are not known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        active_joules: Option<f64>,
        /// Networking's part of `active_joules`, else of `total_joules`: as its time on the CPUs of this report is to the busy time
        /// of all.
        networking_joules: f64,
        /// `networking_joules` by the length of the period, watts.
        networking_watts: f64,
        /// The configured idle power of packages and memory.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        idle_watts: Option<f64>,
    },
}

/// A part of the hardware whose energy is counted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EnergyDomain {
    /// `package-0`, `dram`, ... as the hardware's driver calls it.
    pub name: String,
    /// Energy in the period, joules.
    pub joules: f64,
    /// Mean power, watts.
    pub watts: f64,
}

/// The observer's own cost. None of it is in the events, but for the interrupts that sample: no sample sees them.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct ObserverCost {
    /// Time of the observer's process in user mode, nanoseconds.
    pub user_ns: u64,
    /// Time of the observer's process in kernel mode, nanoseconds.
    pub system_ns: u64,
    /// The sum of [`EventCost::observer_ns`] over all CPUs.
    pub events_ns: u64,
    /// Run time of its BPF programs, over all CPUs; absent without [`Report::programs`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program_ns: Option<u64>,
    /// Runs of the observer's programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program_runs: Option<u64>,
    /// The share of one CPU: its process, and its programs by the larger of both figures.
    pub share: f64,
}

impl ObserverCost {
    /// Returns the time of its process and of its programs, nanoseconds.
    pub fn ns(&self) -> u64 {
        self.user_ns + self.system_ns + self.events_ns.max(self.program_ns.unwrap_or(0))
    }
}

/// Observations that are not in the figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LostObservations {
    /// Stacks for which the buffer had no room.
    pub samples: u64,
    /// Stacks that the kernel could not walk.
    pub stacks: u64,
    /// Times a process' cost found no room in the table of processes.
    pub processes: u64,
    /// Times a task's place inside a call could not be kept while it was off the CPU.
    pub tasks: u64,
    /// Runs of the observer's programs that the kernel skipped.
    pub skipped_runs: u64,
}

impl LostObservations {
    /// Reports whether nothing was lost.
    pub const fn is_nothing(&self) -> bool {
        self.samples == 0
            && self.stacks == 0
            && self.processes == 0
            && self.tasks == 0
            && self.skipped_runs == 0
    }
}

/// Something that cannot be measured on this kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingMeasurement {
    /// The event whose time is incomplete by it; absent if it concerns none of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<Event>,
    /// `sendfile and splice`, `BPF program statistics`, ...
    pub what: String,
    /// The reason why it cannot be measured.
    pub reason: String,
    /// How much time it is, where something else measures that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ns: Option<u64>,
}

/// Stacks with shared function names.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Stacks {
    /// Names of functions, each once.
    pub functions: Vec<String>,
    /// The stacks, which name functions by position.
    pub stacks: Vec<ProfiledStack>,
}

/// A stack, with the time of all samples that had it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfiledStack {
    /// The CPU of the samples.
    pub cpu: u32,
    /// Absent for stacks of a chosen process outside of all events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<Event>,
    /// Set for stacks of a chosen process, which begin with its user-mode functions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Outermost first: positions in [`Stacks::functions`].
    pub frames: Vec<u32>,
    /// Samples with this stack.
    pub samples: u64,
    /// Time that these samples stand for, nanoseconds.
    pub ns: u64,
}

impl ProfiledStack {
    /// The outermost frame: the event, or the chosen process, whose stacks inside of events are among those of the events
    /// already.
    pub(crate) fn root(&self) -> Cow<'static, str> {
        match (self.pid, self.event) {
            (Some(pid), _) => format!("process {pid}").into(),
            (None, Some(event)) => event.name().into(),
            (None, None) => "none".into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_names_equal_those_in_json() {
        for event in Event::ALL {
            assert_eq!(serde_json::to_string(&event).expect("JSON"), format!("\"{}\"", event.name()));
            assert_eq!(event.name().parse(), Ok(event));
            assert_eq!(Event::ALL[event.index()], event);
        }
        assert!("net".parse::<Event>().is_err());
    }

    /// A reader of logs meets reports of older versions of the same `VERSION`: what was added has a default.
    #[test]
    fn optional_fields_may_be_absent() {
        let process = r#"{"pid":1,"name":"init","share":0.5,"send_ns":1,"receive_ns":2,"io_uring_ns":3,
            "send_calls":4,"receive_calls":5}"#;
        let process: ProcessCost = serde_json::from_str(process).expect("a process");
        assert_eq!(process.cost.ns(), 6);
        assert_eq!((process.cgroup, process.profile), (None, None));
        let energy: Energy =
            serde_json::from_str(r#"{"status":"absent","reason":"no RAPL"}"#).expect("energy");
        assert_eq!(energy, Energy::Absent { reason: "no RAPL".to_owned() });
    }
}
