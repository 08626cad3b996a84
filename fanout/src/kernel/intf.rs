//! Structures and constants of `bpf/fanout_intf.h`, as the build writes them from the header.

pub(super) use generated::{BUCKET_TICKS, FANOUT_SSRC_KNOWN as SSRC_KNOWN};
pub(crate) use generated::{
    FanoutAt as At, FanoutConfig as Config, FanoutEvent as Event, FanoutReceiver as Receiver,
    FanoutStream as Stream, FanoutTracing as Tracing,
};

mod generated {
    #![allow(dead_code, reason = "not all that C has is of use here")]

    include!(concat!(env!("OUT_DIR"), "/intf.rs"));
}

/// Number of latest sender reports that the program stores for each stream.
pub(super) const REPORTS: usize = generated::FANOUT_REPORTS as usize;

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::enum_names;

    use crate::kernel::outcome::{CopyOutcome, FurtherRun, Outcome};

    #[test]
    fn packet_outcomes_match_names_and_order_of_the_bpf_program() {
        let names = |kind: &str, prefix: &str| enum_names(env!("OUT_DIR"), "fanout.bpf.o", kind, prefix);
        assert_eq!(names("fanout_outcome", "fanout_"), Outcome::ALL.map(Outcome::name));
        assert_eq!(names("fanout_copy_outcome", "fanout_copy_"), CopyOutcome::ALL.map(CopyOutcome::name));
        assert_eq!(names("fanout_further_run", "fanout_run_"), FurtherRun::ALL.map(FurtherRun::name));
    }
}
