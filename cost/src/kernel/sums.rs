//! Sums of times and calls that the BPF programs keep, by CPU and by process.

use super::config::KernelEvent;
use super::intf::EVENTS;

/// Times and counts of one CPU since the BPF programs were loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuSums {
    pub(super) ns: [u64; EVENTS],
    pub(super) calls: [u64; EVENTS],
    /// How often the sampler ran.
    pub samples: u64,
    /// Number of samples that were lost because the stack buffer was full.
    pub lost_samples: u64,
    /// Number of samples whose stack the kernel could not walk.
    pub lost_stacks: u64,
    /// How often time could not be added to the sums of a process, because the table of processes was full.
    pub lost_processes: u64,
    /// Number of times that a task left the CPU within a socket call and the rest of the call was not timed, since no
    /// memory was allocated to save the call's state.
    pub lost_tasks: u64,
    pub(super) other_softirqs: u64,
    pub(super) system_calls: u64,
    pub(super) switches: u64,
}

impl CpuSums {
    /// Returns the time that the CPU spent in this kind of kernel work, such as a softirq, in nanoseconds.
    pub fn ns(&self, event: KernelEvent) -> u64 {
        self.ns.get(event as usize).copied().unwrap_or(0)
    }

    /// Returns how often the CPU began this kind of kernel work, such as a softirq or a send.
    pub fn calls(&self, event: KernelEvent) -> u64 {
        self.calls.get(event as usize).copied().unwrap_or(0)
    }

    /// Returns how often the BPF programs that time softirqs and socket calls have run.
    pub fn probed(&self) -> ProbedCalls {
        let calls = self.calls(KernelEvent::Send) + self.calls(KernelEvent::Receive);
        let softirqs = self.calls(KernelEvent::NetRx) + self.calls(KernelEvent::NetTx) + self.other_softirqs;
        ProbedCalls {
            timed: calls + softirqs + self.switches,
            // `calls` includes io_uring requests, which are no system calls, so `calls` may exceed `system_calls`.
            other_calls: self.system_calls.saturating_sub(calls),
        }
    }
}

/// Numbers of runs of the BPF programs that time softirqs and socket calls. [`CpuSums::probed`] returns them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProbedCalls {
    /// Number of calls that send or receive, of softirqs, and of task switches. The BPF programs take about the same
    /// time at each of them.
    pub timed: u64,
    /// Number of system calls that ran the BPF programs but were not timed, since they neither send nor receive.
    pub other_calls: u64,
}

/// The key of an entry in the table of processes: a process in a cgroup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId {
    /// The process's number in the initial PID namespace.
    pub pid: u32,
    /// ID of the cgroup (v2), which is the inode number of its directory.
    pub cgroup: u64,
}

/// Networking times and numbers of calls of a process in a cgroup, summed since the process was added to the kernel's
/// table of processes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProcessSums {
    /// The process and its cgroup.
    pub id: ProcessId,
    /// The process's number in the observer's PID namespace; 0 if it is outside of the namespace.
    pub pid: u32,
    /// Name of the process's thread that was running when the entry was created.
    pub name: String,
    pub(super) ns: [u64; EVENTS],
    pub(super) calls: [u64; EVENTS],
}

impl ProcessSums {
    /// Returns the time that the process spent in this kind of kernel work, such as a send, in nanoseconds.
    pub fn ns(&self, event: KernelEvent) -> u64 {
        self.ns.get(event as usize).copied().unwrap_or(0)
    }

    /// Returns how often the process began this kind of kernel work, such as a send.
    pub fn calls(&self, event: KernelEvent) -> u64 {
        self.calls.get(event as usize).copied().unwrap_or(0)
    }
}
