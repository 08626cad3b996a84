//! Measures what the relay's BPF programs did in a period, from the relay's counters and the kernel's run-time
//! statistics.

use anyhow::{Context as _, ensure};
use millrace_kernel::programs::{ProgramKind, RunTime};
use millrace_relay::status::{KeystreamStatus, Status};

use super::contender::STATUS;
use super::figures::{KernelWork, ProgramWork};
use crate::lab::LabNode;

/// A reading of the relay's counters. The difference of two readings is the work between them.
pub struct EngineReading {
    status: Status,
    run_time: RunTime,
    gate: RunTime,
}

impl EngineReading {
    /// Reads the counters of the relay with process ID `relay`, which runs in `node`.
    pub fn take(node: &LabNode, relay: u32) -> anyhow::Result<Self> {
        let run_time = |kind| RunTime::list_functions(relay, Some(kind));
        Ok(Self {
            run_time: run_time(ProgramKind::Tc)?,
            gate: run_time(ProgramKind::Xdp)?,
            status: node.enter(ask)??,
        })
    }

    pub fn since(&self, earlier: &Self) -> ProgramWork {
        let gate = self.gate.since(earlier.gate);
        let gate_ns_per_packet = (gate.runs > 0).then(|| gate.ns as f64 / gate.runs as f64);
        ProgramWork { kernel: self.kernel_since(earlier), gate_ns_per_packet }
    }

    /// Returns what the relay's BPF programs forwarded since the reading `earlier`, and the time it took; `None` if
    /// they forwarded nothing.
    fn kernel_since(&self, earlier: &Self) -> Option<KernelWork> {
        let totals = |field: fn(&Status) -> u64| field(&self.status).saturating_sub(field(&earlier.status));
        let copies = totals(|status| status.totals.kernel.packets);
        let forwarded = totals(|status| {
            let outcomes = status.engine.received.as_ref();
            outcomes.and_then(|outcomes| outcomes.get("forwarded")).copied().unwrap_or(0)
        });
        if copies == 0 || forwarded == 0 {
            return None;
        }
        let userspace = totals(|status| status.totals.data_plane.packets);
        let ahead = totals(|status| keystreams(status, |one| one.hit));
        let all = totals(|status| keystreams(status, |one| one.hit + one.stale + one.miss));
        let run_time = self.run_time.since(earlier.run_time);
        Some(KernelWork {
            sent_percent: percent(copies, copies + userspace),
            ahead_percent: percent(ahead, all),
            bpf_ns_per_packet: run_time.ns as f64 / forwarded as f64,
            bpf_ns_per_copy: run_time.ns as f64 / copies as f64,
        })
    }
}

/// Fetches the status of the relay in the calling thread's network namespace.
pub fn ask() -> anyhow::Result<Status> {
    let (code, body) =
        millrace_daemon::http::fetch(STATUS, "/status", None).context("cannot fetch the relay's status")?;
    ensure!(code == 200, "the relay answered /status with HTTP {code}");
    Ok(serde_json::from_str(&body)?)
}

fn keystreams(status: &Status, count: fn(KeystreamStatus) -> u64) -> u64 {
    let both = status.totals.keystreams;
    count(both.sealed) + count(both.opened)
}

fn percent(part: u64, all: u64) -> f64 {
    100.0 * part as f64 / all.max(1) as f64
}
