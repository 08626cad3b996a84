//! Mirrors of `bpf/gate_intf.h`. The test compares them with the BTF of the compiled object.

use millrace_kernel::intf::mirror;

pub(crate) const SCOPES: u32 = 64;
pub(crate) const ID_MAX: usize = 20;
pub(crate) const VERSIONS: usize = 4;
pub(crate) const PORTS: usize = 32;
/// Sizes of networks that an address is in: a client, and two wider ones.
pub(crate) const LEVELS: usize = 3;
/// The part of a count that is about connections.
pub(crate) const CONNECTIONS: u64 = 0xff_ffff;
/// Per nanosecond.
pub(crate) const TICKS: u64 = 64;
pub(crate) const TOKEN_KEYS: usize = 2;
pub(crate) const TRACERS: usize = 8;
pub(crate) const MODES: usize = 24;

pub(crate) const TRACK: u32 = 1;
pub(crate) const COUNT: u32 = 2;

pub(crate) const LOOKUP_BOTH: u32 = 1;
pub(crate) const LOOKUP_ADDRESS: u32 = 2;
pub(crate) const LOOKUP_PORT: u32 = 4;
pub(crate) const LOOKUP_PREFIXES: u32 = 8;

pub(crate) const TABLE_V6: u16 = 2;
/// Of an entry in its rank, which has the prefix length in front of it.
pub(crate) const ENTRY_BITS: u32 = 2;

/// Maps that are walked over once a second, in the order of `enum gate_walk`.
pub(crate) const WALKED: [&str; WALKS] = ["connections", "paths", "clients", "handshakes", "openings"];
const WALKS: usize = 5;

mirror!(Level = "gate_level" { mask: [u8; 16], times: u64 });

mirror!(Levels = "gate_levels" { v4: [Level; LEVELS], v6: [Level; LEVELS] });

mirror!(Config = "gate_config" {
    levels: Levels,
    sample_ticks: u64,
    mark_seed: u64,
    client_ids: u64,
    ids: u64,
    fresh_rates: u64,
    nests: u64,
});

mirror!(Rate = "bucket_rate" { cost: u64, burst: u64 });

mirror!(Policy = "gate_policy" {
    modes: [u8; MODES],
    flags: u32,
    id_bytes: u32,
    quota: u32,
    token_seconds: u32,
    idle_ns: u64,
    unsure_ns: u64,
    token_scope: u64,
    retry_above: Rate,
    live: [Rate; 3],
    unknown: [Rate; 3],
    client: [Rate; 3],
    versions: [[u8; 4]; VERSIONS],
    ports: [[u8; 2]; PORTS],
    answers: u32,
    pad: u32,
});

mirror!(#[derive(PartialOrd, Ord)] ScopeKey = "gate_scope_key" { address: [u8; 16], port: [u8; 2], half: u16 });

mirror!(#[derive(PartialOrd, Ord)] PrefixKey = "gate_prefix_key" {
    prefix_bits: u32,
    table: [u8; 2],
    scope: [u8; 2],
    address: [u8; 16],
});

mirror!(Client = "gate_client" { address: [u8; 16], scope: u16, level: u16 });

mirror!(Path = "gate_path" { address: [u8; 16], scope: u32, port: [u8; 2], pad: u16 });

mirror!(BucketKey = "gate_bucket_key" { client: [u8; 16], scope: u16, kind: u8, level: u8 });

mirror!(Count = "gate_count" { all: u64, zero_ns: u64 });

mirror!(Id = "gate_id" { scope: u32, bytes: [u8; ID_MAX], len: u32 });

mirror!(Counter = "gate_counter" { packets: u64, bytes: u64, monitored: u64 });

mirror!(Sample = "gate_sample" {
    time_ns: u64,
    scope: u16,
    reason: u8,
    first: u8,
    monitored: u32,
    source: [u8; 16],
    destination: [u8; 16],
    source_port: [u8; 2],
    destination_port: [u8; 2],
    bytes: u32,
    version: [u8; 4],
    id_len: u8,
    id: [u8; ID_MAX],
    tracers: u8,
    kind: u8,
    pad: [u8; 5],
});

mirror!(Tracer = "gate_tracer" {
    mask: [u8; 16],
    address: [u8; 16],
    rate: Rate,
    full_at: u64,
    scopes: u64,
    rules: u32,
    family: u32,
});

mirror!(Traced = "gate_traced" { matched: u64, left_out: u64, lost: u64 });

mirror!(TokenKey = "gate_token_key" { key: [u64; 2], valid: u32, pad: u32 });

mirror!(Active = "gate_active" {
    turn: u32,
    lookups: u32,
    token_key: u32,
    age: u32,
    unix_seconds: i64,
    since_ns: u64,
    fill_ticks: u64,
    tracers: u32,
    bare: u32,
});

mirror!(CountCall = "gate_count_call" { client: Client, change: i32, connections: u32, error: i32 });

mirror!(PublishCall = "gate_publish_call" { id: Id, error: i32 });

mirror!(ForgetCall = "gate_forget_call" { age: u64 });

mirror!(ExpireCall = "gate_expire_call" {
    now_ns: u64,
    expired: u64,
    walk: u32,
    at: u32,
    from: u32,
    to: u32,
    removed: u32,
    pad: u32,
});

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::{assert_layouts, enum_names};

    use super::*;
    use crate::kernel::{Event, Pass, Rule};

    #[test]
    fn mirrors_match_btf() {
        assert_layouts(
            env!("OUT_DIR"),
            "gate.bpf.o",
            &[
                Level::LAYOUT,
                Levels::LAYOUT,
                Config::LAYOUT,
                Rate::LAYOUT,
                Policy::LAYOUT,
                ScopeKey::LAYOUT,
                PrefixKey::LAYOUT,
                Client::LAYOUT,
                Path::LAYOUT,
                BucketKey::LAYOUT,
                Count::LAYOUT,
                Id::LAYOUT,
                Counter::LAYOUT,
                Sample::LAYOUT,
                Tracer::LAYOUT,
                Traced::LAYOUT,
                TokenKey::LAYOUT,
                Active::LAYOUT,
                CountCall::LAYOUT,
                PublishCall::LAYOUT,
                ForgetCall::LAYOUT,
                ExpireCall::LAYOUT,
            ],
        );
    }

    #[test]
    fn names_and_order_are_the_programs() {
        let names = |kind: &str| enum_names(env!("OUT_DIR"), "gate.bpf.o", kind, "gate_");
        assert_eq!(names("gate_rule"), Rule::ALL.map(Rule::name));
        assert_eq!(names("gate_pass"), Pass::ALL.map(Pass::name));
        assert_eq!(names("gate_event"), Event::ALL.map(Event::name));
    }
}
