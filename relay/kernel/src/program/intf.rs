//! Mirrors of `bpf/relay_intf.h`. The test compares them with the BTF of the compiled object.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicU32, AtomicU64};

use millrace_kernel::fan::NetPath;
use millrace_kernel::intf::{mirror, shared};

pub(crate) const ID_MAX: usize = 20;
pub(crate) const PORTS: usize = 4;
pub(crate) const SEEN_WORDS: usize = 8;
pub(crate) const NUMBER_WORDS: usize = 128;
/// `RELAY_END`: no further egress in the slot.
pub(crate) const END: u32 = u32::MAX;
/// `RELAY_SUBSCRIBER`: in `ids`, beside the index of a downstream.
pub(crate) const SUBSCRIBER: u32 = 1 << 31;
/// `RELAY_ARRIVALS`.
pub(crate) const ARRIVALS: u32 = 4096;

mirror!(Config = "relay_config" {
    max_copies_per_run: u32,
    max_runs: u32,
    id_bytes: u32,
    ports: [[u8; 2]; PORTS],
});

mirror!(Id = "relay_id" { bytes: [u8; ID_MAX] });

/// `enum relay_kind`.
pub(crate) const STREAM: u32 = 0;
pub(crate) const DATAGRAMS: u32 = 1;
pub(crate) const TRACK: u32 = 2;
/// `RELAY_OPENINGS`.
pub(crate) const OPENINGS: usize = 64;
/// `WEB_BARE`: in place of a WebTransport session's ID.
pub(crate) const BARE: u64 = u64::MAX;
/// `RELAY_UNBOUND`: ID of an ingress whose stream has not begun.
pub(crate) const UNBOUND: u64 = u64::MAX;
/// `RELAY_UNOPENED` and its like: IDs of an egress without a stream.
pub(crate) const UNOPENED: u64 = u64::MAX;
pub(crate) const OPENING: u64 = u64::MAX - 1;
pub(crate) const CLOSED: u64 = u64::MAX - 2;

mirror!(Slot = "relay_slot" { id: u64, upstream: u32, kind: u32 });

/// `RELAY_UNKNOWN`: size of a stream whose end has not come.
pub(crate) const UNKNOWN: u64 = u64::MAX;
/// `enum subgroup_field`, some of it.
pub(crate) const OPAQUE: u8 = 11;
/// Nothing goes any more.
pub(crate) const BROKEN: u8 = 13;
/// `enum subgroup_flags`.
pub(crate) const HAS_PREVIOUS: u8 = 1;
pub(crate) const WITH_PROPERTIES: u8 = 2;
pub(crate) const ENDED: u8 = 4;

mirror!(State = "subgroup_state" {
    value: u64,
    left: u64,
    previous: u64,
    field: u8,
    missing: u8,
    flags: u8,
    kind: u8,
    pad: u32,
});

mirror!(Path = "relay_path" { way: NetPath, id_bytes: u8, id: [u8; ID_MAX], pad: [u8; 3] });

mirror!(Forwarded = "relay_forwarded" {
    time_ns: u64,
    number: u64,
    tag: u64,
    id: u64,
    offset: u64,
    object: u64,
    downstream: u32,
    epoch: u32,
    len: u16,
    size: u16,
    generation: u16,
    fin: u8,
    kind: u8,
});

mirror!(Event = "relay_event" {
    arrived_ns: u64,
    time_ns: u64,
    received: u64,
    number: u64,
    group: u64,
    stream_id: u64,
    offset: u64,
    publisher: u32,
    subscriber: u32,
    track: u32,
    len: u16,
    size: u16,
    is_copy: u8,
    outcome: u8,
    fin: u8,
    pad: [u8; 5],
});

shared!(Ring = "relay_ring" { run: AtomicU64 });

shared!(Keystream = "relay_keystream" {
    word: AtomicU64,
    bytes: AtomicU32,
    pad: AtomicU32,
    keystream: UnsafeCell<millrace_kernel::crypto::Keystream>,
});

shared!(Upstream = "relay_upstream" {
    expected: AtomicU64,
    seen: [AtomicU64; NUMBER_WORDS],
    streams: [AtomicU64; SEEN_WORDS],
    preambles: [AtomicU64; SEEN_WORDS],
    late: [AtomicU64; SEEN_WORDS],
    web: AtomicU64,
    generations: [AtomicU32; 2],
    ring: Ring,
    lookups: [AtomicU64; super::outcome::Lookup::ALL.len()],
    session: AtomicU32,
    deferred_socket: AtomicU32,
    deferred: AtomicU32,
    tracks: AtomicU32,
});

shared!(Track = "relay_track" {
    alias: AtomicU64,
    upstream: AtomicU32,
    lock: AtomicU32,
    group: AtomicU64,
    subgroup: AtomicU64,
    put: AtomicU32,
    taken: AtomicU32,
    low: AtomicU32,
    missed: AtomicU32,
    openings: [AtomicU32; OPENINGS],
});

shared!(Ingress = "relay_ingress" {
    id: AtomicU64,
    upstream: AtomicU32,
    kind: AtomicU32,
    first: AtomicU32,
    lock: AtomicU32,
    next: AtomicU64,
    final_size: AtomicU64,
    run: AtomicU64,
    run_end: AtomicU64,
    apart: AtomicU64,
    apart_end: AtomicU64,
    contradicted: AtomicU32,
    pad: AtomicU32,
    state: UnsafeCell<State>,
    scratch: UnsafeCell<State>,
});

shared!(Egress = "relay_egress" {
    upstream_id: AtomicU64,
    id: AtomicU64,
    shift: AtomicU64,
    from: AtomicU64,
    max_offset: AtomicU64,
    tag: AtomicU64,
    group: AtomicU64,
    counted: AtomicU64,
    next: AtomicU32,
    downstream: AtomicU32,
    upstream: AtomicU32,
    epoch: AtomicU32,
    level: AtomicU32,
    track: AtomicU32,
    kind: AtomicU32,
    exclusive: AtomicU32,
    alias: AtomicU64,
    first_group: AtomicU64,
    first_object: AtomicU64,
    last_group: AtomicU64,
    ingress: AtomicU32,
    pad: AtomicU32,
});

shared!(Deferral = "relay_deferral" {
    packets: AtomicU64,
    wakes: AtomicU64,
    wakes_read: AtomicU64,
    media: AtomicU64,
    taken: AtomicU64,
    room: AtomicU64,
});

shared!(Arrival = "relay_arrival" { word: AtomicU64 });

shared!(Downstream = "relay_downstream" {
    number: AtomicU64,
    max_data: AtomicU64,
    data: AtomicU64,
    streams: AtomicU64,
    web: AtomicU64,
    max_bytes: AtomicU64,
    bytes: AtomicU64,
    epoch: AtomicU32,
    mtu: AtomicU32,
    generations: [AtomicU32; 2],
    path: AtomicU32,
    session: AtomicU32,
    waiting: AtomicU32,
    max_datagram: AtomicU32,
    stream_bits: AtomicU32,
    pad: AtomicU32,
    deferred_socket: AtomicU32,
    deferred_bytes: AtomicU32,
    deferred_until: AtomicU64,
    deferred: AtomicU64,
    ring: Ring,
    lookups: [AtomicU64; super::outcome::Lookup::ALL.len()],
    paths: UnsafeCell<[Path; 2]>,
    outcomes: [AtomicU64; super::outcome::EgressOutcome::ALL.len()],
});

shared!(Tracing = "relay_tracing" {
    every: AtomicU32,
    track: AtomicU32,
    session: AtomicU32,
    pad: AtomicU32,
    lost: AtomicU64,
});

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::{assert_layouts, enum_names};

    use super::*;
    use crate::program::outcome::{EgressOutcome, FrameOutcome, FurtherRun, Lookup, OpeningOutcome, Outcome};

    #[test]
    fn mirrors_match_btf() {
        assert_layouts(
            env!("OUT_DIR"),
            "relay.bpf.o",
            &[
                Config::LAYOUT,
                Id::LAYOUT,
                Slot::LAYOUT,
                Path::LAYOUT,
                Forwarded::LAYOUT,
                Event::LAYOUT,
                Tracing::LAYOUT,
                Ring::LAYOUT,
                Keystream::LAYOUT,
                Upstream::LAYOUT,
                State::LAYOUT,
                Track::LAYOUT,
                Ingress::LAYOUT,
                Egress::LAYOUT,
                Deferral::LAYOUT,
                Arrival::LAYOUT,
                Downstream::LAYOUT,
            ],
        );
    }

    #[test]
    fn outcomes_have_the_programs_names_and_order() {
        let names = |kind: &str, prefix: &str| enum_names(env!("OUT_DIR"), "relay.bpf.o", kind, prefix);
        assert_eq!(names("relay_outcome", "relay_"), Outcome::ALL.map(Outcome::name));
        assert_eq!(names("relay_lookup", "relay_lookup_"), Lookup::ALL.map(Lookup::name));
        assert_eq!(
            names("relay_egress_outcome", "relay_egress_"),
            EgressOutcome::ALL.map(EgressOutcome::name)
        );
        assert_eq!(names("relay_further_run", "relay_run_"), FurtherRun::ALL.map(FurtherRun::name));
        assert_eq!(names("relay_frame_outcome", "relay_frame_"), FrameOutcome::ALL.map(FrameOutcome::name));
        assert_eq!(names("relay_opening", "relay_opening_"), OpeningOutcome::ALL.map(OpeningOutcome::name));
    }
}
