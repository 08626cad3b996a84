//! Structures and constants that the build generates from `bpf/joint_intf.h`, `bpf/graft_packet.h` and
//! `bpf/seal_intf.h`.

pub(crate) use generated::{
    GraftMigrateCall as MigrateCall, GraftShared as Shared, JointClockCall as ClockCall,
    JointConfig as Config, JointCounts as Counts, JointKey as Key, JointPair as Pair, JointPath as Path,
    JointPathCounts as PathCounts, JointPathIn as PathIn, JointPaths as Paths, JointSession as Session,
    JointTick as Tick, JointTimes as Times, JointWord as Word, SealKey,
};

pub(crate) mod generated {
    #![allow(dead_code, reason = "the C header has more than Rust uses")]

    include!(concat!(env!("OUT_DIR"), "/joint_intf.rs"));
}

pub(crate) const SESSIONS: usize = generated::GRAFT_SESSIONS as usize;
pub(crate) const KEEPERS: usize = generated::GRAFT_KEEPERS as usize;
pub(crate) const FUNCTIONS: usize = generated::GRAFT_FUNCTIONS as usize;
pub(crate) const LIST: usize = generated::GRAFT_LIST_MAX as usize;
pub(crate) const JOINTS: usize = generated::GRAFT_JOINTS as usize;
pub(crate) const WINDOW: usize = generated::GRAFT_WINDOW as usize;
pub(crate) const PATHS: usize = generated::JOINT_PATHS as usize;

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::enum_names;

    #[test]
    fn reasons_are_named_as_in_c() {
        let names: Vec<_> =
            super::super::JointReason::ALL.iter().map(|it| it.name().replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "joint.bpf.o", "graft_reason", "graft_"));
    }
}
