//! Mirrors of `bpf/joint_intf.h` and of `bpf/graft_packet.h`. The test compares them with the BTF of the compiled object.

use crate::intf::mirror;

pub(crate) const SESSIONS: usize = 64;
pub(crate) const KEEPERS: usize = 16;
pub(crate) const REASONS: usize = 32;
pub(crate) const FUNCTIONS: usize = 64;
pub(crate) const LIST: usize = 8;
pub(crate) const JOINTS: usize = 3;
pub(crate) const WINDOW: usize = 1024;
pub(crate) const PATHS: usize = 4;

mirror!(Config = "joint_config" { mark: u32, clear_mark: u32, word_mark: u32, path_mark: u32 });

mirror!(Key = "joint_key" {
    local: [u8; 16],
    remote: [u8; 16],
    local_port: [u8; 2],
    remote_port: [u8; 2],
});

mirror!(Pair = "joint_pair" { local: [u8; 16], remote: [u8; 16] });

mirror!(Session = "joint_session" {
    lists: [[u64; JOINTS]; 2],
    key: [u64; 2],
    index: u32,
    budget_ns: u32,
    list_ids: [[u8; 2]; 2],
    epoch: u8,
    live: u8,
    is_sealed: u8,
    is_paused: u8,
    tells_room: u8,
    protocol: u8,
    paths: u8,
    pad: [u8; 5],
});

mirror!(Path = "joint_path" { local: [u8; 16], remote: [u8; 16], ifindex: u32, weight: u32 });

mirror!(Paths = "joint_paths" { each: [[[u8; 20]; 2]; PATHS], is_redundant: u32, pad: u32 });

mirror!(PathCounts = "joint_path_counts" { sent: [u64; PATHS], came: [u64; PATHS], turn: u32, pad: u32 });

mirror!(PathIn = "joint_path_in" { session: [[u8; 18]; 2], ifindex: u32, path: u32 });

mirror!(Time = "joint_time" { packets: u64, samples: u64, total_ns: u64, most_ns: u64, over: u64 });

mirror!(Times = "joint_times" { joints: [[u64; 5]; JOINTS] });

impl Times {
    pub fn each(&self) -> [Time; JOINTS] {
        self.joints.map(|[packets, samples, total_ns, most_ns, over]| Time {
            packets,
            samples,
            total_ns,
            most_ns,
            over,
        })
    }
}

mirror!(Counts = "joint_counts" { packets: [u64; REASONS] });

mirror!(Tick = "joint_tick" {
    time_ns: u64,
    sent_ns: u64,
    session: u32,
    next: u32,
    newest: u32,
    acked: u32,
    srtt_us: u32,
    pad: u32,
});

mirror!(Word = "joint_word" { session: u32, number: u32, kind: u8, epoch: u8, pad: [u8; 6] });

mirror!(ClockCall = "joint_clock_call" { period_ns: u64, session: u32, error: i32 });

mirror!(Shared = "graft_shared" {
    next: u32,
    newest: u32,
    sent_ns: u64,
    seen: [[u64; 32]; WINDOW / 32],
    complete: u32,
    begun: u32,
    birth: u32,
    turned: u32,
    acked: u32,
    delivered: u32,
    losses: u32,
    recover: u32,
    room: u32,
    srtt_us: u32,
    rttvar_us: u32,
    min_rtt_us: u32,
    acked_ns: u64,
    went_ns: [[u64; 32]; WINDOW / 32],
    leaves_ns: u64,
    epoch_in: u32,
    refused: u32,
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::intf::{assert_layouts, enum_names};

    #[test]
    fn mirrors_match_btf() {
        assert_layouts(
            "joint.bpf.o",
            &[
                Config::LAYOUT,
                Key::LAYOUT,
                Pair::LAYOUT,
                Session::LAYOUT,
                Path::LAYOUT,
                Paths::LAYOUT,
                PathCounts::LAYOUT,
                PathIn::LAYOUT,
                Time::LAYOUT,
                Times::LAYOUT,
                Counts::LAYOUT,
                Tick::LAYOUT,
                Word::LAYOUT,
                ClockCall::LAYOUT,
                Shared::LAYOUT,
            ],
        );
    }

    #[test]
    fn calls_match_btf() {
        assert_layouts("tally2_test.bpf.o", &[super::super::function::MigrateCall::LAYOUT]);
    }

    #[test]
    fn reasons_have_the_names_of_c() {
        let names: Vec<_> = super::super::Reason::ALL.iter().map(|it| it.name().replace('-', "_")).collect();
        assert_eq!(names, enum_names("joint.bpf.o", "graft_reason", "graft_"));
    }
}
