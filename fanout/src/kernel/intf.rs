//! Mirrors of `bpf/fanout_intf.h`.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64};

use millrace_kernel::fan::NetPath;
use millrace_kernel::intf::{mirror, shared};

use super::outcome::LegOutcome;

/// Sender reports that are remembered.
pub(super) const REPORTS: usize = 8;
pub(super) const SSRC_KNOWN: u64 = 1 << 32;

mirror!(Config = "fanout_config" { max_copies_per_run: u32, max_runs: u32 });

mirror!(At = "fanout_at" { address: [u8; 16], port: [u8; 2], family: u8, pad: u8 });

shared!(Stream = "fanout_stream" {
    sender: UnsafeCell<[u8; 16]>,
    port: UnsafeCell<[u8; 2]>,
    rtcp_port: UnsafeCell<[u8; 2]>,
    one_ssrc: AtomicU32,
    ssrc: AtomicU64,
    first: AtomicU32,
    legs: AtomicU32,
    packets: AtomicU64,
    bytes: AtomicU64,
    last_ns: AtomicU64,
    sent: AtomicU64,
    reports: [AtomicU64; REPORTS],
    number: AtomicU32,
    pad: AtomicU32,
});

shared!(Rate = "bucket_rate" { cost: AtomicU64, burst: AtomicU64 });

shared!(Leg = "fanout_leg" {
    epoch: AtomicU32,
    number: AtomicU32,
    until_ns: AtomicU64,
    full_at: AtomicU64,
    rate: Rate,
    path: UnsafeCell<NetPath>,
    pad: AtomicU32,
    packets: AtomicU64,
    bytes: AtomicU64,
    outcomes: [AtomicU64; LegOutcome::ALL.len()],
});

shared!(Tracing = "fanout_tracing" {
    every: AtomicU32,
    stream: AtomicU32,
    leg: AtomicU32,
    pad: AtomicU32,
    lost: AtomicU64,
});

mirror!(Event = "fanout_event" {
    arrived_ns: u64,
    time_ns: u64,
    stream: u32,
    leg: u32,
    ssrc: u32,
    timestamp: u32,
    sequence: u16,
    size: u16,
    outcome: u8,
    kind: u8,
    pad: [u8; 2],
});

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::{assert_layouts, enum_names};

    use super::*;
    use crate::kernel::outcome::{FurtherRun, Outcome};

    #[test]
    fn mirrors_match_btf() {
        assert_layouts(
            env!("OUT_DIR"),
            "fanout.bpf.o",
            &[
                Config::LAYOUT,
                At::LAYOUT,
                Stream::LAYOUT,
                Rate::LAYOUT,
                Leg::LAYOUT,
                Tracing::LAYOUT,
                Event::LAYOUT,
            ],
        );
    }

    #[test]
    fn outcomes_have_the_programs_names_and_order() {
        let names = |kind: &str, prefix: &str| enum_names(env!("OUT_DIR"), "fanout.bpf.o", kind, prefix);
        assert_eq!(names("fanout_outcome", "fanout_"), Outcome::ALL.map(Outcome::name));
        assert_eq!(names("fanout_leg_outcome", "fanout_leg_"), LegOutcome::ALL.map(LegOutcome::name));
        assert_eq!(names("fanout_further_run", "fanout_run_"), FurtherRun::ALL.map(FurtherRun::name));
    }
}
