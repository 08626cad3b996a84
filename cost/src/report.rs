//! The data model: one [`Report`] for each period. `millrace cost --json` prints reports as JSON, one in each line.
//!
//! * Times are nanoseconds on a CPU within the period. Shares are of one CPU: 1.0 is one CPU for the whole period.
//! * Parts of the network stack, processes and sampled stacks that did not occur are absent. [`Report::missing`] has
//!   the figures that could not be measured, [`Report::lost`] counts the observations that were lost.
//! * Fields may be added within a [`VERSION`]. A change of meaning or a removal raises it.

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The version of the reports' format. It rises when a field changes its meaning or is removed.
pub const VERSION: u32 = 3;

/// A kind of kernel work, such as a softirq or a system call that sends. Every nanosecond of a CPU belongs to at most
/// one of these events: while a softirq interrupts a system call, the time belongs to the softirq.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The NET_RX softirq, and kernel threads that poll a NIC.
    NetRx,
    /// The NET_TX softirq.
    NetTx,
    /// Calls that send on a socket: every system call and io_uring request that does, and calls on the kernel's own
    /// sockets.
    Send,
    /// Calls that receive from a socket: every system call and io_uring request, and calls on the kernel's own sockets.
    Receive,
    /// io_uring's own threads (workers, SQPOLL) outside of socket calls.
    IoUring,
    /// Other softirqs while they run networking: pacing, retransmission, TCP small queues, and memory freed by RCU.
    Timers,
    /// Calls that run networking but neither send nor receive: connect, accept, close, setsockopt and the like.
    Sockets,
    /// The calls poll, select and epoll, while they query sockets or poll a NIC.
    Poll,
    /// Reads and writes of TUN and TAP devices, and vhost's threads.
    Devices,
    /// Other kernel threads while they run networking: WireGuard, MPTCP, XDP's cpumap.
    Workers,
    /// Calls on AF_UNIX and netlink sockets. They use no network, so they do not count as networking.
    Local,
    /// The kernel's other work, which is not networking. Reports contain it only on request.
    Kernel,
}

impl Event {
    /// All kinds of kernel work (events), in the order in which reports have them.
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
    /// Number of kinds of kernel work in [`ALL`](Self::ALL) that are networking. They come first.
    pub const NETWORKING: usize = Self::Local as usize;

    /// Reports whether this kind of kernel work is part of a CPU's [`networking_share`](CpuCost::networking_share).
    pub const fn is_networking(self) -> bool {
        self.index() < Self::NETWORKING
    }

    /// Returns the name of this kind of kernel work in JSON, metrics and command-line options.
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

    /// Returns the position of this kind of kernel work in [`ALL`](Self::ALL).
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

/// Whether times are measured by BPF programs, or estimated from samples only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReportMode {
    /// BPF programs time softirqs and socket calls exactly. Sampled stacks split these times into parts of the network
    /// stack, and measure all other kernel work.
    #[default]
    Events,
    /// Every time comes from sampled stacks: a time is the number of samples times the sampling interval. Calls are not
    /// counted.
    Sampling,
}

/// Whether calls that send or receive are timed at kernel functions or at system calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReportMethod {
    /// Calls are timed at kernel functions, which the kernel's own sockets use too.
    Functions,
    /// Calls are timed at system calls and io_uring requests, on kernels that allow no BPF programs on functions.
    SystemCalls,
}

/// The state of the automatic choice between timing and sampling (`--mode auto`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Auto {
    /// Largest share of each CPU's time that BPF programs may take to time the kernel's networking.
    pub budget_share: f64,
    /// Share of a CPU's time that the timing BPF programs take, on the CPU where they take most. It is the number of
    /// their runs times the measured time of one. In mode `sampling`, the share when they last ran.
    pub timing_share: f64,
    /// Milliseconds from the end of the report's period until the observer tries to time networking again. Absent while
    /// networking is timed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_ms: Option<u64>,
    /// Number of times that the observer changed between timing and only sampling since its start.
    pub changes: u64,
    /// Duration of a sample's interrupt, nanoseconds; absent if it could not be measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interrupt_ns: Option<u64>,
    /// The configured frequency, if [`Report::frequency_hz`] was lowered because interrupts are expensive; otherwise
    /// absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lowered_from_hz: Option<u32>,
}

/// A report: the figures of one period.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The format's [`VERSION`].
    pub version: u32,
    /// Number of the report, counted from 0 since the observer's start.
    pub sequence: u64,
    /// End of the period, milliseconds since 1970 (UTC).
    pub time_unix_ms: u64,
    /// Length of the period, nanoseconds.
    pub period_ns: u64,
    /// How times were measured; in a sum of reports, the mode of the last one.
    pub mode: ReportMode,
    /// Part of `period_ns` in which times were only estimated from samples and no calls were counted. In a single
    /// report, it is 0 or the whole period.
    #[serde(default)]
    pub sampled_ns: u64,
    /// State of the automatic choice between timing and only sampling; absent if `mode` is fixed by the settings.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<Auto>,
    /// Whether calls are timed at kernel functions or at system calls; absent in mode `sampling`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<ReportMethod>,
    /// Number of samples per second on each CPU. With 0, no stacks are sampled, and times are not split into parts of
    /// the network stack.
    pub frequency_hz: u32,
    /// The name and the kernel of the observed machine.
    pub host: ReportHost,
    /// The observed CPUs, in the order of their numbers.
    pub cpus: Vec<CpuCost>,
    /// The innermost functions of stacks that no rule assigns to a part of the network stack, most time first, over all
    /// CPUs.
    pub other: Vec<OtherFunctions>,
    /// Processes that spent time in networking, most time first.
    pub processes: Vec<ProcessCost>,
    /// Sums of `processes` by cgroup, most time first.
    pub cgroups: Vec<CgroupCost>,
    /// Every BPF program that ran in the period, most time first; absent unless requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub programs: Option<Vec<ProgramCost>>,
    /// The energy that the machine used in the period, and networking's part of it.
    pub energy: Energy,
    /// The CPU time of the observer itself.
    pub observer: ObserverCost,
    /// Numbers of observations that the figures lack. All are 0 in a complete report.
    pub lost: LostObservations,
    /// Figures that cannot be measured on this machine. The list is the same in all reports with the same `mode`.
    pub missing: Vec<MissingMeasurement>,
    /// Sampled stacks, for flame graphs; absent unless requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stacks: Option<Stacks>,
}

impl Report {
    /// Returns a copy of the report whose tables (CPUs, processes, cgroups, programs, stacks) are empty.
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

    /// Returns the share of CPU time that a kind of kernel work, such as a softirq, took, summed over all CPUs.
    pub fn share_of(&self, event: Event) -> f64 {
        self.cpus.iter().flat_map(|cpu| &cpu.events).filter(|of| of.event == event).map(|of| of.share).sum()
    }

    /// Reports whether the report has figures of this kind of kernel work, such as a softirq.
    pub fn measures(&self, event: Event) -> bool {
        self.cpus.iter().flat_map(|cpu| &cpu.events).any(|of| of.event == event)
    }

    /// Reports whether calls of this kind of kernel work, such as sends, were counted in the whole period.
    pub fn counts(&self, event: Event) -> bool {
        let mut costs = self.cpus.iter().flat_map(|cpu| &cpu.events);
        self.sampled_ns == 0 && costs.any(|of| of.event == event && of.calls.is_some())
    }

    /// Returns the time in ns that one sample stands for, or 0 without samples.
    pub fn sample_ns(&self) -> u64 {
        1_000_000_000_u64.checked_div(self.frequency_hz.into()).unwrap_or(0)
    }

    /// Returns the time of one of the report's CPUs in each mode of `/proc/stat`, nanoseconds, with the mode's name.
    /// `None` stands for a time that this kernel does not measure.
    pub fn modes(&self, cpu: &CpuCost) -> [(&'static str, Option<u64>); 6] {
        let stat = &cpu.procstat;
        let is_unknown = |of: &MissingMeasurement| of.what == HARD_INTERRUPTS && of.ns.is_none();
        [
            ("user", Some(stat.user_ns)),
            ("system", Some(stat.system_ns)),
            ("softirq", Some(stat.softirq_ns)),
            ("irq", (!self.missing.iter().any(is_unknown)).then_some(stat.irq_ns)),
            ("steal", Some(stat.steal_ns)),
            ("idle", Some(stat.idle_ns)),
        ]
    }

    /// Reports whether any process has its command line.
    pub fn has_arguments(&self) -> bool {
        self.processes.iter().any(|process| process.arguments.is_some())
    }

    /// Returns a copy without stacks, which are larger than the rest of a report.
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

/// The name of hard interrupts in [`Report::missing`].
pub(crate) const HARD_INTERRUPTS: &str = "hard interrupts";

/// The name that stands for a part of the network stack if no rule of the taxonomy matches a sampled stack.
pub const OTHER: &str = "other";

/// The lowest and the highest share of one CPU that a figure may have, with 95 % confidence. The interval assumes that
/// samples are independent.
pub type Interval = [f64; 2];

/// The machine that was observed.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ReportHost {
    /// The host's name.
    pub name: String,
    /// The kernel's release, as `uname -r` prints it.
    pub kernel: String,
}

/// The time of one CPU.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct CpuCost {
    /// The CPU's number, from 0.
    pub cpu: u32,
    /// Share of the CPU's time that networking took: the sum of the `events` that
    /// [are networking](Event::is_networking).
    pub networking_share: f64,
    /// Interval of `networking_share` with 95 % confidence; absent if it is exact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub networking_interval: Option<Interval>,
    /// Share of the CPU's time that the observer's BPF programs took: the sum of `observer_ns` of all `events`.
    /// `networking_share` does not include it.
    pub observer_share: f64,
    /// Number of samples taken while one of the observer's BPF programs ran, from which `observer_share` is estimated.
    #[serde(default)]
    pub observer_samples: u64,
    /// Interval of `observer_share` with 95 % confidence; absent without samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observer_interval: Option<Interval>,
    /// Times of every kind of kernel work (such as softirqs and sends) that is measured on this machine, even if it did
    /// not occur. [`Event::Kernel`] is present only on request.
    pub events: Vec<EventCost>,
    /// The kernel's own accounting of the same CPU, from `/proc/stat`, in steps of a clock tick (10 ms).
    pub procstat: ProcStat,
    /// Number of samples taken, whatever the CPU was doing.
    pub samples: u64,
    /// Number of samples of this CPU that were lost because the stack buffer was full. [`Report::lost`] includes them.
    pub lost_samples: u64,
}

/// The time of one CPU in one kind of kernel work (event), such as a softirq or sends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventCost {
    /// The kind of kernel work, such as a softirq or sends.
    pub event: Event,
    /// The CPU's time in this kind of kernel work, without `observer_ns`, nanoseconds.
    pub ns: u64,
    /// `ns` as a share of the period, 0 to 1.
    pub share: f64,
    /// Number of softirqs or socket calls, or of task switches to io_uring workers and NAPI threads, whose whole time
    /// belongs to this kind of kernel work. Absent if it was only sampled, not timed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calls: Option<u64>,
    /// Time in nanoseconds that the observer's BPF programs took within this kind of kernel work, including the
    /// kernel's overhead of running them. The sum of `ns` and `observer_ns` is measured. Samples estimate which part is
    /// the observer's, so it is 0 without samples.
    pub observer_ns: u64,
    /// Number of samples from which the times in `parts` are estimated. In mode `sampling`, `ns` is too.
    pub samples: u64,
    /// How many of `samples` were taken in kernel work that no BPF program timed. Each adds one sampling interval to
    /// `ns`.
    #[serde(default)]
    pub sampled: u64,
    /// Confidence interval of `share` (95 %); absent if the share is exact. The interval of `observer_ns` has the same
    /// width.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
    /// Times of the parts of the network stack, such as UDP, most time first. They add up to `ns` above, except for
    /// rounding. Empty without samples.
    pub parts: Vec<EventPart>,
}

/// The time that one part of the network stack, such as UDP, took within one kind of kernel work. The taxonomy's rules
/// assign sampled stacks to parts.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventPart {
    /// The part's name in the taxonomy, `bpf:NAME` for a BPF program, or [`OTHER`].
    pub name: String,
    /// Time in the part, nanoseconds.
    pub ns: u64,
    /// The part's share of the whole CPU's time.
    pub share: f64,
    /// Number of samples from which the part's time is estimated.
    pub samples: u64,
    /// Interval of the share with 95 % confidence; absent if it rests on no samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
}

/// The times of `/proc/stat` within the period, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProcStat {
    /// Time in user mode, including `nice` and guests.
    pub user_ns: u64,
    /// Time in kernel mode, without interrupts and softirqs.
    pub system_ns: u64,
    /// Time in softirqs.
    pub softirq_ns: u64,
    /// Time in hardware interrupts. It is 0 on a kernel that does not measure it; [`Report::missing`] says so.
    pub irq_ns: u64,
    /// Time that the hypervisor gave to other virtual machines.
    pub steal_ns: u64,
    /// Idle time, including `iowait`.
    pub idle_ns: u64,
}

impl ProcStat {
    /// Returns the time in which the CPU worked, which excludes idle and stolen time.
    pub const fn busy_ns(&self) -> u64 {
        self.user_ns + self.system_ns + self.softirq_ns + self.irq_ns
    }
}

/// The innermost functions of stacks in one kind of kernel work that no rule assigns to a part of the network stack.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OtherFunctions {
    /// The kind of kernel work, such as a softirq, in which the stacks were sampled.
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
    /// Number of samples from which the function's time is estimated.
    pub samples: u64,
    /// Interval of the share with 95 % confidence; absent if it rests on no samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
}

/// Time of a process in its own calls and threads, without the observer's mean time in each call. Softirqs belong to no
/// process. Figures that are not [measured](Report::measures) or [counted](Report::counts) are 0.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TaskCost {
    /// Time in [`Event::Send`], nanoseconds.
    pub send_ns: u64,
    /// Time in [`Event::Receive`], nanoseconds.
    pub receive_ns: u64,
    /// Time in [`Event::IoUring`], nanoseconds.
    pub io_uring_ns: u64,
    /// Time in [`Event::Sockets`], [`Event::Poll`], [`Event::Devices`] and [`Event::Workers`] together, estimated from
    /// samples, nanoseconds.
    pub other_ns: u64,
    /// Time in [`Event::Local`] (AF_UNIX and netlink), nanoseconds. The networking share of a process does not include
    /// it.
    pub local_ns: u64,
    /// Number of the process's calls that send.
    pub send_calls: u64,
    /// Number of the process's calls that receive.
    pub receive_calls: u64,
    /// Number of the process's calls on AF_UNIX and netlink sockets.
    pub local_calls: u64,
    /// Number of samples of the process's networking that no BPF program timed. Each adds one sampling interval to
    /// `send_ns`, `receive_ns`, `io_uring_ns` or `other_ns`.
    #[serde(default, skip_serializing_if = "is_default")]
    pub samples: u64,
    /// Numbers of samples that were added to `send_ns`, `receive_ns`, `io_uring_ns`, `other_ns` and `local_ns`, in this
    /// order. Absent if all are 0.
    #[serde(default, skip_serializing_if = "is_default")]
    pub figure_samples: [u64; 5],
    /// Confidence intervals (95 %) of the five times in the order of `figure_samples`, as shares of one CPU. `null`
    /// stands for a time that rests on no samples. Absent if no time rests on samples.
    #[serde(default, skip_serializing_if = "is_default")]
    pub figure_intervals: [Option<Interval>; 5],
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

impl TaskCost {
    /// Returns the process's time in networking, in nanoseconds.
    pub const fn ns(&self) -> u64 {
        self.send_ns + self.receive_ns + self.io_uring_ns + self.other_ns
    }

    /// Returns the times that [`figure_samples`](Self::figure_samples) refers to, nanoseconds.
    pub const fn times(&self) -> [u64; 5] {
        [self.send_ns, self.receive_ns, self.io_uring_ns, self.other_ns, self.local_ns]
    }

    /// Returns the cost of one sample, which stands for `ns` nanoseconds. `None` for softirqs and other work that
    /// belongs to no process.
    pub(crate) fn from_sample(event: Event, ns: u64) -> Option<Self> {
        let mut cost = Self { samples: u64::from(event.is_networking()), ..Self::default() };
        let [send, receive, io_uring, other, local] = &mut cost.figure_samples;
        let (time, samples) = match event {
            Event::Send => (&mut cost.send_ns, send),
            Event::Receive => (&mut cost.receive_ns, receive),
            Event::IoUring => (&mut cost.io_uring_ns, io_uring),
            Event::Sockets | Event::Poll | Event::Devices | Event::Workers => (&mut cost.other_ns, other),
            Event::Local => (&mut cost.local_ns, local),
            Event::NetRx | Event::NetTx | Event::Timers | Event::Kernel => return None,
        };
        (*time, *samples) = (ns, 1);
        Some(cost)
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
        self.figure_samples.iter_mut().zip(more.figure_samples).for_each(|(sum, more)| *sum += more);
    }
}

/// The networking of one process.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProcessCost {
    /// The process's number in the observer's PID namespace. 0 if the process is outside, as for an observer in a
    /// container.
    pub pid: u32,
    /// The process's name in the kernel, at most 15 bytes.
    pub name: String,
    /// The command line, printable and shortened. Present only on request, and only for running processes with the most
    /// networking time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arguments: Option<String>,
    /// Path of the cgroup below the mount of cgroup v2; absent if the cgroup was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Time of the process in networking, as a share of one CPU. A process with several threads can have more than 1.
    pub share: f64,
    /// Interval of the share with 95 % confidence; absent if it rests on no samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
    /// Networking times and calls of the process.
    #[serde(flatten)]
    pub cost: TaskCost,
    /// The breakdown of all the process's CPU time; absent unless the process is profiled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<ProcessProfile>,
}

/// The CPU time of one process in user and kernel mode, estimated from samples.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ProcessProfile {
    /// Number of samples of the process, on all CPUs.
    pub samples: u64,
    /// Number of samples of the process in user mode.
    pub user_samples: u64,
    /// Times of the program's parts by the taxonomy's rules for user mode, most time first. Time in kernel mode has the
    /// name `system call`, and stacks without any known function have the name `unknown`. Shares are of one CPU.
    pub parts: Vec<EventPart>,
    /// The functions that were the innermost one in most samples.
    pub functions: Vec<FunctionCost>,
    /// Number of samples in user mode whose stack has no known function.
    pub unknown_samples: u64,
}

/// The networking of one cgroup, without the cgroups below it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct CgroupCost {
    /// The kernel's ID, which is the directory's inode number.
    pub id: u64,
    /// Path below the mount of cgroup v2; absent if the cgroup was removed or is not visible.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Time of the cgroup's processes in networking, as a share of one CPU.
    pub share: f64,
    /// Interval of the share with 95 % confidence; absent if it rests on no samples.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interval: Option<Interval>,
    /// Number of the cgroup's processes in the report.
    pub processes: u32,
    /// Times and numbers of calls of the cgroup's processes.
    #[serde(flatten)]
    pub cost: TaskCost,
}

/// A BPF program's figures from the kernel's run-time statistics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ProgramCost {
    /// The program's ID in the kernel.
    pub id: u32,
    /// The program's name, which the kernel cuts after 15 characters.
    pub name: String,
    /// The program's type: `tracing`, `sched_cls`, `xdp`, ...
    pub kind: String,
    /// Time in the program, nanoseconds.
    pub run_ns: u64,
    /// Number of the program's runs in the period.
    pub runs: u64,
    /// Number of runs that the kernel skipped because the program was running on that CPU already.
    pub skipped: u64,
    /// Run time of the program as a share of one CPU, summed over all CPUs.
    pub share: f64,
    /// True if the program is the observer's own.
    pub own: bool,
}

/// The energy that the machine used in the period.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Energy {
    /// The energy cannot be read on this machine.
    Absent {
        /// The reason why the energy cannot be read.
        reason: String,
    },
    /// The energy that the hardware's counters have measured.
    Measured {
        /// The interface to the counters: `powercap` or `perf`.
        source: String,
        /// Parts of the hardware whose energy is counted separately.
        domains: Vec<EnergyDomain>,
        /// The energy of all packages and their memory.
        total_joules: f64,
        /// The part of `total_joules` above `idle_watts`; absent if the idle power is not known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        active_joules: Option<f64>,
        /// Networking's part of `active_joules`, or of `total_joules` if the former is absent. The part is networking's
        /// time on the reported CPUs, divided by the busy time of all CPUs.
        networking_joules: f64,
        /// `networking_joules` divided by the length of the period, watts.
        networking_watts: f64,
        /// The configured idle power of packages and memory, watts.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        idle_watts: Option<f64>,
    },
}

/// A part of the hardware whose energy is counted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EnergyDomain {
    /// The domain's name in the driver: `package-0`, `dram`, ...
    pub name: String,
    /// Energy of the domain in the period, joules.
    pub joules: f64,
    /// Mean power of the domain in the period, watts.
    pub watts: f64,
}

/// The CPU time of the observer itself. Networking's times do not include it, except for the sampling interrupts, in
/// which no sample can be taken.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct ObserverCost {
    /// Time of the observer's process in user mode, nanoseconds.
    pub user_ns: u64,
    /// Time of the observer's process in kernel mode, nanoseconds.
    pub system_ns: u64,
    /// The sum of [`EventCost::observer_ns`] over all CPUs.
    pub events_ns: u64,
    /// Run time of the observer's BPF programs, over all CPUs, nanoseconds; absent without [`Report::programs`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program_ns: Option<u64>,
    /// Number of runs of the observer's programs; absent without [`Report::programs`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program_runs: Option<u64>,
    /// The observer's whole share of one CPU: the time of its process and that of its BPF programs. The latter is the
    /// larger of `events_ns` and `program_ns`.
    pub share: f64,
}

impl ObserverCost {
    /// Returns the time of the observer's process and programs, nanoseconds.
    pub fn ns(&self) -> u64 {
        self.user_ns + self.system_ns + self.events_ns.max(self.program_ns.unwrap_or(0))
    }
}

/// Numbers of observations that were lost, so the figures lack them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LostObservations {
    /// Number of samples that were lost because a stack buffer was full.
    pub samples: u64,
    /// Number of samples whose stack the kernel could not walk.
    pub stacks: u64,
    /// How often time could not be added to the sums of a process, because the table of processes was full.
    pub processes: u64,
    /// Number of times that a task left the CPU within a socket call and the rest of the call was not timed, since no
    /// memory was free to save the call's state.
    pub tasks: u64,
    /// Number of runs of the observer's programs that the kernel skipped.
    pub skipped_runs: u64,
}

impl LostObservations {
    /// Reports whether all numbers of lost observations are 0.
    pub const fn is_nothing(&self) -> bool {
        self.samples == 0
            && self.stacks == 0
            && self.processes == 0
            && self.tasks == 0
            && self.skipped_runs == 0
    }
}

/// A figure that cannot be measured on this kernel.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingMeasurement {
    /// The kind of kernel work, such as sends, whose measured time lacks this figure; absent if the figure belongs to
    /// no single kind.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<Event>,
    /// The figure's name: `sendfile`, `run times of BPF programs`, ...
    pub what: String,
    /// The reason why the figure cannot be measured.
    pub reason: String,
    /// The missing time, nanoseconds, if another source such as `/proc/stat` has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ns: Option<u64>,
}

impl MissingMeasurement {
    pub(crate) fn new(event: Option<Event>, what: impl Into<String>, reason: impl Into<String>) -> Self {
        Self { event, what: what.into(), reason: reason.into(), ns: None }
    }
}

/// Sampled stacks. Their functions' names are stored once.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Stacks {
    /// Names of functions, each once.
    pub functions: Vec<String>,
    /// The stacks, which refer to functions by position.
    pub stacks: Vec<ProfiledStack>,
}

/// A stack, with the time of all samples that had it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProfiledStack {
    /// The CPU of the samples.
    pub cpu: u32,
    /// The kind of kernel work, such as a softirq, in which the samples were taken. Absent for stacks of a profiled
    /// process that belong to none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<Event>,
    /// The profiled process, whose stacks begin with its user-mode functions; absent for stacks of the kernel only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Positions of the stack's functions in [`Stacks::functions`], outermost function first.
    pub frames: Vec<u32>,
    /// Number of samples with this stack.
    pub samples: u64,
    /// Time that the stack's samples stand for, nanoseconds.
    pub ns: u64,
}

impl ProfiledStack {
    /// Returns the name of the outermost frame: the profiled process, or else the kind of kernel work, such as
    /// `net_rx`. Stacks of a profiled process in such kernel work exist twice, with `pid` and without.
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

    /// Logs may have reports of older releases with the same `VERSION`, so every added field has a default.
    #[test]
    fn report_without_optional_fields_is_read() {
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
