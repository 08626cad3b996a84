//! Mirrors of `bpf/intf.h`.

use millrace_kernel::intf::mirror;

mirror!(ProbeConfig = "probe_config" { min_payload_bytes: u32 });

mirror!(ProbeSample = "probe_sample" {
    time_ns: u64,
    ifindex: u32,
    payload_bytes: u32,
    segment_bytes: u32,
    source_port: [u8; 2],
    destination_port: [u8; 2],
    vlan: u16,
    direction: u8,
    family: u8,
    source: [u8; 16],
    destination: [u8; 16],
    pad: u32,
});

mirror!(SyscallsConfig = "syscalls_config" { tgid: u32 });

mirror!(SoftirqsConfig = "softirqs_config" { tgid: u32 });

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::{Plain as _, assert_layouts};

    use super::*;

    #[test]
    fn mirrors_match_btf() {
        assert_layouts(env!("OUT_DIR"), "probe.bpf.o", &[ProbeConfig::LAYOUT, ProbeSample::LAYOUT]);
        assert_layouts(env!("OUT_DIR"), "syscalls.bpf.o", &[SyscallsConfig::LAYOUT]);
        assert_layouts(env!("OUT_DIR"), "softirqs.bpf.o", &[SoftirqsConfig::LAYOUT]);
    }

    #[test]
    fn bytes_round_trip() {
        let sample = ProbeSample { time_ns: 7, destination_port: [1, 2], pad: 9, ..Default::default() };
        assert_eq!(ProbeSample::from_bytes(sample.as_bytes()), Some(sample));
        assert_eq!(ProbeSample::from_bytes(&sample.as_bytes()[1..]), None);
    }
}
