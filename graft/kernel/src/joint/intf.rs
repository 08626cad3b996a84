//! Structures and constants of `bpf/joint_intf.h`, `bpf/graft_packet.h` and `bpf/seal_intf.h`, as the build writes them from the headers.

pub(crate) use generated::{
    GraftMigrateCall as MigrateCall, GraftShared as Shared, JointClockCall as ClockCall,
    JointConfig as Config, JointCounts as Counts, JointKey as Key, JointPair as Pair, JointPath as Path,
    JointPathCounts as PathCounts, JointPathIn as PathIn, JointPaths as Paths, JointSession as Session,
    JointTick as Tick, JointTimes as Times, JointWord as Word, SealHeard, SealKey,
};

pub(crate) mod generated {
    #![allow(dead_code, reason = "not all that C has is of use here")]

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
    fn reasons_have_the_names_of_c() {
        let names: Vec<_> = super::super::Reason::ALL.iter().map(|it| it.name().replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "joint.bpf.o", "graft_reason", "graft_"));
    }
}
