//! Structures of `bpf/intf.h` and `bpf/flood_intf.h`, which the build generates from these headers.

pub(crate) use generated::{FloodConfig, ProbeConfig, ProbeSample, SoftirqsConfig, SyscallsConfig};

mod generated {
    #![allow(dead_code, reason = "Rust does not use all of the header")]

    include!(concat!(env!("OUT_DIR"), "/intf.rs"));
}

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::Plain as _;

    use super::*;

    #[test]
    fn probe_samples_are_unchanged_by_conversion_to_bytes() {
        let sample = ProbeSample { time_ns: 7, destination_port: [1, 2], pad: 9, ..Default::default() };
        assert_eq!(ProbeSample::from_bytes(sample.as_bytes()), Some(sample));
        assert_eq!(ProbeSample::from_bytes(&sample.as_bytes()[1..]), None);
    }
}
