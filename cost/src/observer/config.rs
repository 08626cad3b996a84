//! The observer's settings, and their errors.

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;

use crate::cgroups;
use crate::choice::TimingBudget;
use crate::report::{ReportMethod, ReportMode};
use crate::taxonomy::Taxonomy;

/// The reason why the observer cannot start or report.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error(transparent)]
    Kernel(#[from] millrace_kernel::Error),
    /// The kernel refused the programs and lacks features that they need.
    #[error("Linux {kernel} has no {}; `millrace cost` needs Linux 6.1 or newer", features.join(", no "))]
    Old { kernel: String, features: Vec<String> },
    #[error("cannot read the kernel's symbols: {0}")]
    Symbols(io::Error),
    #[error("cannot read /proc/stat: {0}")]
    ProcStat(io::Error),
    #[error("CPU {0} is not online")]
    Cpu(u32),
    #[error("{hz} samples a second are more than the limit of {most}")]
    Frequency { hz: u32, most: u32 },
    #[error("{hz} samples a second are more than kernel.perf_event_max_sample_rate, which is {most}")]
    Sysctl { hz: u32, most: u32 },
    #[error("{0} needs samples: set a frequency above 0")]
    NoFrequency(&'static str),
    #[error("there is no process {0}")]
    Process(u32),
    #[error("there is no cgroup {path} under {}", mount.display())]
    Cgroup { path: String, mount: PathBuf },
    #[error("no cgroup v2 is mounted")]
    NoCgroups,
    #[error("mode `sampling` times no calls: leave out the method")]
    Method,
    #[error("idle power must be a number of watts from 0 on, not {0}")]
    IdleWatts(f64),
    #[error("a budget is a share of a CPU: more than 0, at most 1")]
    Budget,
    #[error("there is no budget to change: the observer was started without one")]
    NoBudget,
    #[error("cannot keep the observer's BPF programs attached: {0}")]
    Programs(io::Error),
    #[error("cannot measure the observer's own cost: {0}")]
    Price(io::Error),
}

/// Largest sampling frequency in Hz. The kernel allows 100 kHz by default, but the observer would measure mostly
/// itself.
pub const MAX_FREQUENCY_HZ: u32 = 20_000;

/// The settings of an [`Observer`](super::Observer).
#[derive(Debug, Clone)]
pub struct Config {
    /// Whether times are at first measured by BPF programs or estimated from samples. With a [budget](Self::budget),
    /// the observer changes this by itself.
    pub mode: ReportMode,
    /// Limit of the CPU time that BPF programs may take to time the kernel's networking. If they take more, networking
    /// is only sampled for a while. How long they take for a call is measured at the start. Needs a frequency above 0.
    pub budget: Option<TimingBudget>,
    /// Allows the observer to lower [`frequency_hz`](Self::frequency_hz) if interrupts are expensive. Needs a budget.
    pub lower_frequency: bool,
    /// Whether calls are timed at kernel functions or at system calls. `None` chooses functions if the kernel allows
    /// it, or else system calls.
    pub method: Option<ReportMethod>,
    /// Number of samples per second on each CPU. With 0, networking is timed, but its time is not split into parts of
    /// the network stack.
    pub frequency_hz: u32,
    /// CPUs to observe; `None` for all that are online.
    pub cpus: Option<BTreeSet<u32>>,
    /// Whether stacks go through one BPF ring buffer for all CPUs, instead of a double buffer for each CPU.
    pub ring_buffer: bool,
    /// The rules that split the time of softirqs and socket calls into parts of the network stack.
    pub taxonomy: Taxonomy,
    /// Processes whose user-mode stacks are sampled too.
    pub profile: BTreeSet<u32>,
    /// Processes to report; all if empty.
    pub pids: BTreeSet<u32>,
    /// If set, only processes in this cgroup or below are reported. The path has the form of
    /// [`ProcessCost::cgroup`](crate::report::ProcessCost::cgroup).
    pub cgroup: Option<String>,
    /// Whether reports contain [`Event::Kernel`](crate::report::Event::Kernel), the kernel's work that is not
    /// networking.
    pub all: bool,
    /// Whether reports contain the processes' [command lines](crate::report::ProcessCost::arguments).
    pub arguments: bool,
    /// Whether reports contain [stacks](crate::report::Report::stacks).
    pub stacks: bool,
    /// Whether the kernel keeps run-time statistics of all BPF programs, which adds two clock readings to each run.
    pub program_statistics: bool,
    /// Idle power of all packages and their memory in watts, if known.
    pub idle_watts: Option<f64>,
}

impl Config {
    /// Returns the default settings: 1000 samples a second on all CPUs, with the built-in taxonomy.
    ///
    /// # Errors
    /// Fails only if the built-in taxonomy does not parse, which a test rules out.
    pub fn new() -> Result<Self, crate::taxonomy::Error> {
        Ok(Self {
            mode: ReportMode::Events,
            budget: None,
            lower_frequency: false,
            method: None,
            frequency_hz: 1000,
            cpus: None,
            ring_buffer: false,
            taxonomy: Taxonomy::builtin()?,
            profile: BTreeSet::new(),
            pids: BTreeSet::new(),
            cgroup: None,
            all: false,
            arguments: false,
            stacks: false,
            program_statistics: false,
            idle_watts: None,
        })
    }
}

/// Checks the settings before anything is loaded.
pub(super) fn check(config: &Config) -> Result<(), Error> {
    if config.mode == ReportMode::Sampling && config.method.is_some() {
        return Err(Error::Method);
    }
    if let Some(watts) = config.idle_watts.filter(|watts| !watts.is_finite() || *watts < 0.0) {
        return Err(Error::IdleWatts(watts));
    }
    config.budget.map_or(Ok(()), check_budget)?;
    if config.all && config.frequency_hz == 0 {
        return Err(Error::NoFrequency("the event `kernel`"));
    }
    check_frequency(config)?;
    if let Some(pid) = config.pids.iter().chain(&config.profile).find(|pid| !is_process(**pid)) {
        return Err(Error::Process(*pid));
    }
    let Some(path) = &config.cgroup else { return Ok(()) };
    let mount = cgroups::mount().ok_or(Error::NoCgroups)?;
    match mount.join(path.trim_start_matches('/')).is_dir() {
        true => Ok(()),
        false => Err(Error::Cgroup { path: path.clone(), mount }),
    }
}

pub(super) fn check_budget(budget: TimingBudget) -> Result<(), Error> {
    if budget.share > 0.0 && budget.share <= 1.0 { Ok(()) } else { Err(Error::Budget) }
}

/// Reports whether a PID is that of a process. The number of another thread would never match a report.
fn is_process(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().filter_map(|line| line.strip_prefix("Tgid:")).any(|group| group.trim() == pid.to_string())
}

fn check_frequency(config: &Config) -> Result<(), Error> {
    match config.frequency_hz {
        0 if config.mode == ReportMode::Sampling => Err(Error::NoFrequency("mode `sampling`")),
        0 if config.budget.is_some() => Err(Error::NoFrequency("a budget")),
        0 if !config.profile.is_empty() => Err(Error::NoFrequency("a profile")),
        hz if hz > MAX_FREQUENCY_HZ => Err(Error::Frequency { hz, most: MAX_FREQUENCY_HZ }),
        // The frequency is checked here, since the kernel would refuse one that is too high only with EINVAL.
        hz => match max_sample_rate() {
            Some(most) if hz > most => Err(Error::Sysctl { hz, most }),
            _ => Ok(()),
        },
    }
}

fn max_sample_rate() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/perf_event_max_sample_rate").ok()?.trim().parse().ok()
}
