//! Mirrors of `bpf/graft_intf.h`. The test compares them with the BTF of the compiled objects.

use millrace_kernel::intf::mirror;

use super::caller::intf as caller;

pub(crate) const RULES: usize = 64;
pub(crate) const NAME_BYTES: usize = 16;

pub(crate) const CHOICES: usize = 4096;

pub(crate) const TOLD_BEGAN: u32 = 0;
pub(crate) const TOLD_ENDED: u32 = 1;

pub(crate) const CLIENT: u8 = 1;
pub(crate) const SERVER: u8 = 2;

pub(crate) const ASK: u8 = 1;
pub(crate) const ASK_BOUND: u8 = 2;

pub(crate) const SET_CONGESTION: u16 = 1;
pub(crate) const SET_PACING: u16 = 2;
pub(crate) const SET_SEND_BUFFER: u16 = 4;
pub(crate) const SET_RECEIVE_BUFFER: u16 = 8;
pub(crate) const SET_WINDOW: u16 = 16;

mirror!(Rule = "graft_rule" {
    peer: [u8; 16],
    mask: [u8; 16],
    first_port: u16,
    last_port: u16,
    side: u8,
    agree: u8,
    set: u16,
    graft: [u8; 4],
    pacing_bytes_s: u32,
    send_buffer_bytes: i32,
    receive_buffer_bytes: i32,
    window_packets: i32,
    generation: u32,
    choice: u32,
    pad: u32,
    congestion: [u8; NAME_BYTES],
    caller: caller::Wanted,
});

mirror!(Peer = "graft_peer" {
    time_ns: u64,
    agreed: u64,
    resent_ns: u64,
    outcome: u32,
    rule: u32,
    graft: [u8; 4],
    pad: u32,
});

mirror!(Bound = "graft_bound" { until_ns: u64, rules: u64, generation: u32, pad: u32 });

mirror!(ConnectionKey = "graft_connection_key" { client_first: u32, server_first: u32, side: u32 });

mirror!(Connection = "graft_connection" {
    peer: [u8; 16],
    time_ns: u64,
    outcome: u32,
    own: [u8; 4],
    heard: [u8; 4],
    port: u16,
    spoke: u8,
    pad: u8,
});

mirror!(ChoiceKey = "graft_choice_key" { peer: [u8; 16], rule: u32 });

mirror!(Choice = "graft_choice" {
    serial: u32,
    lead: u32,
    other_lead: u32,
    grant: u32,
    congestion: [u8; NAME_BYTES],
    other: [u8; NAME_BYTES],
});

mirror!(Figures = "graft_figures" {
    rtt_min_us: u32,
    srtt_us: u32,
    rttvar_us: u32,
    mss_bytes: u32,
    cwnd_packets: u32,
    delivered_packets: u32,
    lost_packets: u32,
    reordering_packets: u32,
    rate_packets: u32,
    rate_interval_us: u32,
});

mirror!(Told = "graft_told" {
    local: [u8; 16],
    remote: [u8; 16],
    cookie: u64,
    time_ns: u64,
    duration_ns: u64,
    sent: u64,
    received: u64,
    netns_cookie: u64,
    jiffies: u64,
    busy_jiffies: u32,
    heard_jiffies: u32,
    local_port: u16,
    remote_port: u16,
    side: u8,
    what: u8,
    explored: u8,
    pad: u8,
    rule: u32,
    serial: u32,
    figures: Figures,
    congestion: [u8; NAME_BYTES],
    command: [u8; caller::NAME_BYTES],
});

mirror!(Socket = "graft_socket" {
    local: [u8; 16],
    remote: [u8; 16],
    cookie: u64,
    bytes_acked: u64,
    local_port: u16,
    remote_port: u16,
    state: u32,
    figures: Figures,
    congestion: [u8; NAME_BYTES],
});

mirror!(Change = "graft_change" { rule: Rule, from: [u8; NAME_BYTES] });

mirror!(Changed = "graft_changed" { cookie: u64, error: i32, state: u32 });

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::{assert_layouts, enum_names};

    use super::*;

    #[test]
    fn mirrors_match_btf() {
        assert_layouts(
            env!("OUT_DIR"),
            "graft_tcp.bpf.o",
            &[
                Peer::LAYOUT,
                Bound::LAYOUT,
                ConnectionKey::LAYOUT,
                Connection::LAYOUT,
                ChoiceKey::LAYOUT,
                Choice::LAYOUT,
                Told::LAYOUT,
            ],
        );
        assert_layouts(
            env!("OUT_DIR"),
            "graft_sockets.bpf.o",
            &[Rule::LAYOUT, Figures::LAYOUT, Socket::LAYOUT, Change::LAYOUT, Changed::LAYOUT],
        );
    }

    #[test]
    fn outcomes_have_the_names_of_c() {
        let names: Vec<_> = super::super::Outcome::ALL.iter().map(|it| it.name().replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "graft_tcp.bpf.o", "graft_outcome", "graft_"));
    }
}
