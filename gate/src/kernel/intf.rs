//! Structures and constants of `bpf/gate_intf.h`, which the build generates from the header.

pub(crate) use generated::{
    BucketRate as Rate, GateActive as Active, GateBucketKey as BucketKey, GateClient as Client,
    GateConfig as Config, GateCount as Count, GateCountCall as CountCall, GateCounter as Counter,
    GateExpireCall as ExpireCall, GateForgetCall as ForgetCall, GateId as Id, GateLevel as Level,
    GateLevels as Levels, GatePath as Path, GatePolicy as Policy, GatePrefixKey as PrefixKey,
    GatePublishCall as PublishCall, GateSample as Sample, GateScopeKey as ScopeKey, GateToken as Token,
    GateTokenKey as TokenKey, GateTraced as Traced, GateTracer as Tracer,
};
pub(crate) use generated::{
    GATE_COUNT as COUNT, GATE_LOOKUP_ADDRESS as LOOKUP_ADDRESS, GATE_LOOKUP_BOTH as LOOKUP_BOTH,
    GATE_LOOKUP_PORT as LOOKUP_PORT, GATE_LOOKUP_PREFIXES as LOOKUP_PREFIXES, GATE_SCOPES as SCOPES,
    GATE_TRACK as TRACK,
};

mod generated {
    #![allow(dead_code, reason = "Rust needs only a part of the header's structures and constants")]

    include!(concat!(env!("OUT_DIR"), "/intf.rs"));
}

pub(crate) const ID_MAX: usize = generated::GATE_ID_MAX as usize;
pub(crate) const VERSIONS: usize = generated::GATE_VERSIONS as usize;
pub(crate) const PORTS: usize = generated::GATE_PORTS as usize;
/// Number of prefix lengths for each address: that of a client, and those of two wider networks.
pub(crate) const LEVELS: usize = generated::GATE_LEVELS as usize;
/// Number of ticks per nanosecond. The programs' token buckets count time in ticks.
pub(crate) const TICKS: u64 = generated::BUCKET_TICKS as u64;
pub(crate) const TOKEN_KEYS: usize = generated::GATE_TOKEN_KEYS as usize;
pub(crate) const TRACERS: usize = generated::GATE_TRACERS as usize;
/// Mask of the bits of `gate_count.all` that are the number of connections.
pub(crate) const CONNECTIONS: u64 = generated::GATE_CONNECTIONS as u64;
pub(crate) const TABLE_V6: u16 = generated::GATE_TABLE_V6 as u16;
/// Number of low bits that hold `enum gate_entry` in the rank of a list entry. The other bits hold the prefix length,
/// so the longest prefix has the highest rank.
pub(crate) const ENTRY_BITS: u32 = generated::GATE_ENTRY.count_ones();

pub(crate) const MODES: usize = generated::GATE_MODES as usize;

/// Maps that `gate_expire` walks over, in the order of `enum gate_walk`.
pub(crate) const WALKED: [&str; WALKS] = ["connections", "paths", "clients", "handshakes", "openings"];
const WALKS: usize = generated::GATE_WALKS as usize;

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::enum_names;

    use crate::kernel::{Event, Pass, Rule};

    #[test]
    fn gate_verdicts_have_the_names_and_order_of_the_bpf_program() {
        let names = |kind: &str| enum_names(env!("OUT_DIR"), "gate.bpf.o", kind, "gate_");
        assert_eq!(names("gate_rule"), Rule::ALL.map(Rule::name));
        assert_eq!(names("gate_pass"), Pass::ALL.map(Pass::name));
        assert_eq!(names("gate_event"), Event::ALL.map(Event::name));
    }
}
