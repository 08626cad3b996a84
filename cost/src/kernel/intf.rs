//! Mirrors of `bpf/cost_intf.h`. The test compares them with the BTF of the compiled object.

#![allow(unsafe_code)]

use std::sync::atomic::{AtomicU32, AtomicU64};

use millrace_kernel::intf::{mirror, shared};
use millrace_kernel::memory::Shared;

use super::calls::Table;

pub(crate) const EVENTS: usize = 8;
/// `COST_SOFTIRQ`: softirqs that are not networking.
pub(crate) const SOFTIRQ: usize = 6;
pub(crate) const POINTS: usize = 32;

mirror!(Config = "cost_config" {
    pidns_ino: u32,
    half_bytes: u32,
    ring: u8,
    watch: u8,
    pad: [u8; 2],
    point_events: [u8; POINTS],
    calls: Table,
});

shared!(Cpu = "cost_cpu" {
    task: AtomicU64,
    softirq: AtomicU64,
    base: AtomicU64,
    softirq_ns: AtomicU64,
    ns: [AtomicU64; EVENTS],
    calls: [AtomicU64; EVENTS],
    seen_ns: [AtomicU64; EVENTS],
    seen_calls: [AtomicU64; EVENTS],
    samples: AtomicU64,
    user_samples: AtomicU64,
    lost_samples: AtomicU64,
    lost_stacks: AtomicU64,
    lost_processes: AtomicU64,
    lost_tasks: AtomicU64,
    writing: AtomicU64,
    check_tid: AtomicU64,
    checked: [AtomicU64; EVENTS],
    epoch: AtomicU64,
    system_calls: AtomicU64,
    switches: AtomicU64,
    other_storage: AtomicU64,
    pad: [AtomicU64; 8],
});

// SAFETY: atomics only; the layout test finds padding.
unsafe impl Shared for Cpu {}

shared!(Control = "cost_control" { half: AtomicU32, always: AtomicU32 });

// SAFETY: as above.
unsafe impl Shared for Control {}

mirror!(Record = "cost_record" {
    pid: u32,
    cpu: u32,
    kernel_frames: u16,
    user_frames: u16,
    event: u8,
    watched: u8,
    pad: u16,
    cgroup: u64,
    name: [u8; 16],
});

mirror!(ProcessKey = "cost_process_key" { cgroup: u64, pid: u32, pad: u32 });

mirror!(Process = "cost_process" { ns: [u64; EVENTS], calls: [u64; EVENTS], pid: u32, pad: u32, name: [u8; 16] });

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::assert_layouts;

    use super::*;

    #[test]
    fn mirrors_match_btf() {
        assert_layouts(
            env!("OUT_DIR"),
            "cost.bpf.o",
            &[
                Config::LAYOUT,
                Cpu::LAYOUT,
                Control::LAYOUT,
                Record::LAYOUT,
                ProcessKey::LAYOUT,
                Process::LAYOUT,
            ],
        );
    }
}
