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

pub const VERSION: u32 = 2;

/// What is timed. Every nanosecond belongs to one event or to none: what is innermost wins.
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
}

impl Event {
    pub const ALL: [Self; 5] = [Self::NetRx, Self::NetTx, Self::Send, Self::Receive, Self::IoUring];

    /// The name in JSON, metrics and flags.
    pub const fn name(self) -> &'static str {
        match self {
            Self::NetRx => "net_rx",
            Self::NetTx => "net_tx",
            Self::Send => "send",
            Self::Receive => "receive",
            Self::IoUring => "io_uring",
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

/// How times come about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// Events are timed exactly, stacks split them into parts.
    #[default]
    Events,
    /// Nothing but stacks, always: a time is a number of samples times their distance. There are no `calls`.
    Sampling,
}

/// Where calls that send or receive are timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// At the kernel's functions.
    Functions,
    /// At system calls and io_uring requests, since the kernel allows no programs on functions.
    SystemCalls,
}

/// How the observer keeps to what it may take (`--mode auto`).
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Auto {
    /// What timing events may take of each CPU.
    pub budget_share: f64,
    /// What it takes of the CPU where it takes most: runs of the programs, times what one was measured to add. In mode
    /// `sampling`, what it took when it was last in use or tried.
    pub timing_share: f64,
    /// In mode `sampling`, milliseconds from the end of the period until timing is tried again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub retry_ms: Option<u64>,
    /// How often the mode has changed since the start.
    pub changes: u64,
    /// What the interrupt of a sample takes here; absent if that could not be measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interrupt_ns: Option<u64>,
    /// [`Report::frequency_hz`] was this, and was lowered since interrupts take so much.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lowered_from_hz: Option<u32>,
}

/// What came to pass in one period.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// [`VERSION`].
    pub version: u32,
    /// Counts the observer's reports from 0.
    pub sequence: u64,
    /// The end of the period, milliseconds since 1970.
    pub time_unix_ms: u64,
    pub period_ns: u64,
    /// How the figures came about; of a sum of reports, those of the last one.
    pub mode: Mode,
    /// The part of `period_ns` in mode `sampling`: all or nothing, but for a sum of reports. There are no `calls` of it.
    #[serde(default)]
    pub sampled_ns: u64,
    /// Why the mode is what it is; absent if it was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auto: Option<Auto>,
    /// Absent in mode `sampling`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub method: Option<Method>,
    /// Samples per second and CPU; 0 when no stacks are sampled, and there are no parts then.
    pub frequency_hz: u32,
    pub host: Host,
    pub cpus: Vec<Cpu>,
    /// The innermost functions of the parts called [`OTHER`], most time first, over all CPUs.
    pub other: Vec<OtherFunctions>,
    /// Most time first.
    pub processes: Vec<Process>,
    /// Sums of `processes`, most time first.
    pub cgroups: Vec<Cgroup>,
    /// Every BPF program that ran in the period, most time first; absent if that was not asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub programs: Option<Vec<Program>>,
    pub energy: Energy,
    /// What the observer itself took.
    pub observer: Observer,
    pub lost: Lost,
    /// What cannot be measured here, the same in every report of a mode.
    pub missing: Vec<Missing>,
    /// Sampled stacks, for flame graphs; only on request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stacks: Option<Stacks>,
}

impl Report {
    /// What is not a table; those are empty.
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

    /// Whether any way of an event is measured.
    pub fn measures(&self, event: Event) -> bool {
        self.cpus.iter().flat_map(|cpu| &cpu.events).any(|of| of.event == event)
    }

    /// Whether its calls are counted, in all of the period.
    pub fn counts(&self, event: Event) -> bool {
        self.mode == Mode::Events && self.sampled_ns == 0 && self.measures(event)
    }

    /// Whether any process has its command line.
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

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Host {
    pub name: String,
    /// `uname -r`.
    pub kernel: String,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Cpu {
    pub cpu: u32,
    /// Sum of the shares of `events`.
    pub networking_share: f64,
    /// What the observer took inside of them, in none of those shares: the sum of their `observer_ns`.
    pub observer_share: f64,
    /// Each of [`Event::ALL`] that is measured here, also if it did not occur.
    pub events: Vec<EventCost>,
    /// The kernel's own accounting of the same CPU, from `/proc/stat`; in steps of a clock tick (10 ms).
    pub procstat: ProcStat,
    /// Samples taken, of whatever the CPU was doing.
    pub samples: u64,
    /// Samples for which the buffer had no room; in [`Report::lost`] too.
    pub lost_samples: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventCost {
    pub event: Event,
    /// Without `observer_ns`.
    pub ns: u64,
    pub share: f64,
    /// How often it began: softirqs, socket calls, threads that were switched to. Absent in mode `sampling`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calls: Option<u64>,
    /// What the observer's programs took inside of the event, and the kernel to call programs: a share of the time from
    /// its beginnings to its ends, by samples. Both together are that time, which is exact; 0 without samples.
    pub observer_ns: u64,
    /// Samples that `parts` rest on.
    pub samples: u64,
    /// Most time first. Their `ns` add up to the event's, but for rounding; empty without samples.
    pub parts: Vec<Part>,
}

/// A part of an event, by the taxonomy.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Part {
    /// As the taxonomy calls it; `bpf:NAME` for a BPF program; [`OTHER`].
    pub name: String,
    pub ns: u64,
    /// Of the CPU, not of the event.
    pub share: f64,
    pub samples: u64,
}

/// `/proc/stat`, nanoseconds within the period.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ProcStat {
    /// With `nice` and guests.
    pub user_ns: u64,
    pub system_ns: u64,
    pub softirq_ns: u64,
    pub irq_ns: u64,
    pub steal_ns: u64,
    /// With `iowait`.
    pub idle_ns: u64,
}

impl ProcStat {
    pub const fn busy_ns(&self) -> u64 {
        self.user_ns + self.system_ns + self.softirq_ns + self.irq_ns
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OtherFunctions {
    pub event: Event,
    pub functions: Vec<Function>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Function {
    pub name: String,
    pub ns: u64,
    pub samples: u64,
}

/// Time of a process in its own socket calls and io_uring threads, without the observer: each call without what the
/// observer took in a call on average. Softirqs are nobody's. What belongs to an event that is not
/// [measured](Report::measures) or [counted](Report::counts) is 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct TaskCost {
    pub send_ns: u64,
    pub receive_ns: u64,
    pub io_uring_ns: u64,
    pub send_calls: u64,
    pub receive_calls: u64,
}

impl TaskCost {
    pub const fn ns(&self) -> u64 {
        self.send_ns + self.receive_ns + self.io_uring_ns
    }

    pub fn add(&mut self, more: &Self) {
        self.send_ns += more.send_ns;
        self.receive_ns += more.receive_ns;
        self.io_uring_ns += more.io_uring_ns;
        self.send_calls += more.send_calls;
        self.receive_calls += more.receive_calls;
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Process {
    /// As the observer's PID namespace numbers it. 0: outside of it, as for an observer in a container.
    pub pid: u32,
    /// At most 15 bytes, as the kernel keeps it.
    pub name: String,
    /// Its command line, printable and cut; only on request, for the processes that took most, while they live.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arguments: Option<String>,
    /// Path below the mount of cgroup v2; absent if it has none any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cgroup: Option<String>,
    /// Of one CPU; a process with many threads can have more than 1.
    pub share: f64,
    #[serde(flatten)]
    pub cost: TaskCost,
    /// Where all its CPU time went, for processes that were chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub profile: Option<Profile>,
}

/// All CPU time of one process, by samples, in user and kernel mode.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Profile {
    pub samples: u64,
    pub user_samples: u64,
    /// By the taxonomy of user space; kernel mode is `system call`, stacks without any name are `unknown`. Most time first; shares are
    /// of one CPU.
    pub parts: Vec<Part>,
    /// Innermost functions with the most samples.
    pub functions: Vec<Function>,
    /// Samples in user mode whose stack had no function that could be named.
    pub unknown_samples: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Cgroup {
    /// The kernel's ID, which is the directory's inode number.
    pub id: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    pub share: f64,
    pub processes: u32,
    #[serde(flatten)]
    pub cost: TaskCost,
}

/// A BPF program, by the kernel's run-time statistics.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Program {
    pub id: u32,
    pub name: String,
    /// `tracing`, `sched_cls`, `xdp`, ...
    pub kind: String,
    pub run_ns: u64,
    pub runs: u64,
    /// Runs that the kernel skipped because the program was running on that CPU already.
    pub skipped: u64,
    /// Of one CPU, over all CPUs.
    pub share: f64,
    /// One of the observer's own.
    pub own: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "status", rename_all = "snake_case")]
pub enum Energy {
    Absent {
        reason: String,
    },
    Measured {
        /// `powercap` or `perf`.
        source: String,
        domains: Vec<EnergyDomain>,
        /// Of all packages and their memory.
        total_joules: f64,
        /// What of it is above `idle_watts`; absent if that is not known.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        active_joules: Option<f64>,
        /// Networking's part of `active_joules`, else of `total_joules`: as its time on the CPUs of this report is to the busy time
        /// of all.
        networking_joules: f64,
        networking_watts: f64,
        /// What packages and memory were said to take idle.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        idle_watts: Option<f64>,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EnergyDomain {
    /// `package-0`, `dram`, ... as the hardware's driver calls it.
    pub name: String,
    pub joules: f64,
    pub watts: f64,
}

/// The observer's own cost. None of it is in the events, but for the interrupts that sample: no sample sees them.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Observer {
    pub user_ns: u64,
    pub system_ns: u64,
    /// The sum of [`EventCost::observer_ns`] over all CPUs.
    pub events_ns: u64,
    /// Its BPF programs, over all CPUs, wherever they ran; absent without [`Report::programs`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program_ns: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program_runs: Option<u64>,
    /// Of one CPU: its process, and its programs by the larger of both figures.
    pub share: f64,
}

impl Observer {
    pub fn ns(&self) -> u64 {
        self.user_ns + self.system_ns + self.events_ns.max(self.program_ns.unwrap_or(0))
    }
}

/// What was seen and is not in the figures.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Lost {
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

impl Lost {
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
pub struct Missing {
    /// The event whose time is incomplete by it; absent if it concerns none of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<Event>,
    /// `sendfile and splice`, `BPF program statistics`, ...
    pub what: String,
    pub reason: String,
}

/// Stacks with shared function names.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Stacks {
    pub functions: Vec<String>,
    pub stacks: Vec<Stack>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stack {
    pub cpu: u32,
    /// Absent for stacks of a chosen process outside of all events.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event: Option<Event>,
    /// Set for stacks of a chosen process, which begin with its user-mode functions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Outermost first: positions in [`Stacks::functions`].
    pub frames: Vec<u32>,
    pub samples: u64,
    pub ns: u64,
}

impl Stack {
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
    fn names_of_events_are_those_of_json() {
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
        let process: Process = serde_json::from_str(process).expect("a process");
        assert_eq!(process.cost.ns(), 6);
        assert_eq!((process.cgroup, process.profile), (None, None));
        let energy: Energy =
            serde_json::from_str(r#"{"status":"absent","reason":"no RAPL"}"#).expect("energy");
        assert_eq!(energy, Energy::Absent { reason: "no RAPL".to_owned() });
    }
}
