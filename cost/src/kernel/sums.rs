//! Sums of the kernel side, by CPU and by process.

use super::config::KernelEvent;
use super::intf::EVENTS;

/// Sums since loading, of one CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuSums {
    pub(super) ns: [u64; EVENTS],
    pub(super) calls: [u64; EVENTS],
    /// Runs of the sampler.
    pub samples: u64,
    /// Samples that were lost for want of room in the buffer.
    pub lost_samples: u64,
    /// Samples whose stack could not be walked.
    pub lost_stacks: u64,
    /// Entries of processes that were not made, since their table was full.
    pub lost_processes: u64,
    /// Times that a task's place inside a call could not be kept, for want of memory.
    pub lost_tasks: u64,
    pub(super) other_softirqs: u64,
    pub(super) system_calls: u64,
    pub(super) switches: u64,
}

impl CpuSums {
    /// Returns the time spent in the event, nanoseconds.
    pub fn ns(&self, event: KernelEvent) -> u64 {
        self.ns.get(event as usize).copied().unwrap_or(0)
    }

    /// Returns how often the event began.
    pub fn calls(&self, event: KernelEvent) -> u64 {
        self.calls.get(event as usize).copied().unwrap_or(0)
    }

    /// Returns how often the programs that time events have run.
    pub fn probed(&self) -> ProbedCalls {
        let calls = self.calls(KernelEvent::Send) + self.calls(KernelEvent::Receive);
        let softirqs = self.calls(KernelEvent::NetRx) + self.calls(KernelEvent::NetTx) + self.other_softirqs;
        ProbedCalls {
            timed: calls + softirqs + self.switches,
            // Requests of io_uring count as calls too.
            other_calls: self.system_calls.saturating_sub(calls),
        }
    }
}

/// See [`CpuSums::probed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProbedCalls {
    /// Calls that send or receive, softirqs, task switches: timing one costs about as much as timing another.
    pub timed: u64,
    /// System calls that were looked at and not timed.
    pub other_calls: u64,
}

/// The identity of an entry: a process in a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId {
    /// The number in the initial PID namespace.
    pub pid: u32,
    /// ID of its cgroup (v2): the inode number of the directory.
    pub cgroup: u64,
}

/// Sums of a process in a cgroup, since its entry was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessSums {
    /// The process and its cgroup.
    pub id: ProcessId,
    /// The number in this process's PID namespace; 0: outside of it.
    pub pid: u32,
    /// The name of the thread that was seen first.
    pub name: String,
    pub(super) ns: [u64; EVENTS],
    pub(super) calls: [u64; EVENTS],
}

impl ProcessSums {
    /// Returns the time that the process spent in the event, nanoseconds.
    pub fn ns(&self, event: KernelEvent) -> u64 {
        self.ns.get(event as usize).copied().unwrap_or(0)
    }

    /// Returns how often the process began the event.
    pub fn calls(&self, event: KernelEvent) -> u64 {
        self.calls.get(event as usize).copied().unwrap_or(0)
    }
}
