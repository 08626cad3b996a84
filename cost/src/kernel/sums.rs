//! What was counted.

use super::config::Event;
use super::intf::EVENTS;

/// Sums since loading, of one CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    pub(super) ns: [u64; EVENTS],
    pub(super) calls: [u64; EVENTS],
    /// Runs of the sampler.
    pub samples: u64,
    pub lost_samples: u64,
    pub lost_stacks: u64,
    pub lost_processes: u64,
    pub lost_tasks: u64,
    pub(super) other_softirqs: u64,
    pub(super) system_calls: u64,
    pub(super) switches: u64,
}

impl Totals {
    pub fn ns(&self, event: Event) -> u64 {
        self.ns.get(event as usize).copied().unwrap_or(0)
    }

    /// How often the event began.
    pub fn calls(&self, event: Event) -> u64 {
        self.calls.get(event as usize).copied().unwrap_or(0)
    }

    /// How often the programs that time events were at work.
    pub fn probed(&self) -> Probed {
        let calls = self.calls(Event::Send) + self.calls(Event::Receive);
        let softirqs = self.calls(Event::NetRx) + self.calls(Event::NetTx) + self.other_softirqs;
        Probed {
            timed: calls + softirqs + self.switches,
            // Requests of io_uring count as calls too.
            other_calls: self.system_calls.saturating_sub(calls),
        }
    }
}

/// See [`Totals::probed`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Probed {
    /// Calls that send or receive, softirqs, task switches: timing one costs about as much as timing another.
    pub timed: u64,
    /// System calls that were looked at and not timed.
    pub other_calls: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessId {
    /// As the initial PID namespace numbers it.
    pub pid: u32,
    /// ID of its cgroup (v2): the inode number of the directory.
    pub cgroup: u64,
}

/// Sums of a process in a cgroup, since its entry was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    pub id: ProcessId,
    /// As this process' PID namespace numbers it; 0: outside of it.
    pub pid: u32,
    /// Of the thread that was seen first.
    pub name: String,
    pub(super) ns: [u64; EVENTS],
    pub(super) calls: [u64; EVENTS],
}

impl Process {
    pub fn ns(&self, event: Event) -> u64 {
        self.ns.get(event as usize).copied().unwrap_or(0)
    }

    pub fn calls(&self, event: Event) -> u64 {
        self.calls.get(event as usize).copied().unwrap_or(0)
    }
}
