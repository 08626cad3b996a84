//! Structures and constants that the build generates from `bpf/packet_intf.h`, `bpf/graft_packet.h` and
//! `bpf/seal_intf.h`.

pub(crate) use generated::{
    GraftMigrateCall as MigrateCall, GraftShared as Shared, PacketClockCall as ClockCall,
    PacketConfig as Config, PacketCounts as Counts, PacketKey as Key, PacketMessage as Message,
    PacketPair as Pair, PacketPath as Path, PacketPathCounts as PathCounts, PacketPathIn as PathIn,
    PacketPaths as Paths, PacketSession as Session, PacketTick as Tick, PacketTimes as Times, SealKey,
};

pub(crate) mod generated {
    #![allow(dead_code, reason = "the C header has more than Rust uses")]

    include!(concat!(env!("OUT_DIR"), "/packet_intf.rs"));
}

pub(crate) const SESSIONS: usize = generated::GRAFT_SESSIONS as usize;
pub(crate) const STORING_SESSIONS: usize = generated::GRAFT_STORING_SESSIONS as usize;
pub(crate) const FUNCTIONS: usize = generated::GRAFT_FUNCTIONS as usize;
pub(crate) const LIST: usize = generated::GRAFT_LIST_MAX as usize;
pub(crate) const HOOKS: usize = generated::GRAFT_HOOKS as usize;
pub(crate) const WINDOW: usize = generated::GRAFT_WINDOW as usize;
pub(crate) const PATHS: usize = generated::PACKET_PATHS as usize;

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::enum_names;

    #[test]
    fn packet_verdict_reasons_are_named_as_in_c() {
        let names: Vec<_> =
            super::super::PacketReason::ALL.iter().map(|it| it.name().replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "packet.bpf.o", "graft_reason", "graft_"));
    }
}
