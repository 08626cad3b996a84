//! Mirrors of `bpf/graft_hook_intf.h`. The test compares them with the BTF of the compiled object.

use millrace_kernel::intf::mirror;

use super::super::caller::intf as caller;

pub(crate) const RULES: usize = 64;

mirror!(Config = "hook_config" { namespace_cookie: u64, port4: [u16; 2], port6: [u16; 2] });

mirror!(End = "hook_end" { address: [u8; 16], port: u16, pad: u16 });

mirror!(Rule = "hook_rule" {
    peer: [u8; 16],
    mask: [u8; 16],
    first_port: u16,
    last_port: u16,
    strict: u32,
    choice: u32,
    in_place: u32,
    caller: caller::Wanted,
});

mirror!(Peer = "hook_peer" { near: [u8; 16], warm: u32, pad: u32 });

mirror!(Led = "hook_led" {
    far: End,
    near: End,
    command: [u8; caller::NAME_BYTES],
    cgroup: u64,
    rule: u32,
    serial: u32,
    explored: u32,
    uid: u32,
    gid: u32,
    mark: u32,
});

mirror!(Guest = "hook_guest" { broker: End, server_port: u16, pad: u16 });

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::{assert_layouts, enum_names};

    use super::*;

    #[test]
    fn mirrors_match_btf() {
        assert_layouts(
            env!("OUT_DIR"),
            "graft_hook.bpf.o",
            &[Config::LAYOUT, End::LAYOUT, Rule::LAYOUT, Peer::LAYOUT, Led::LAYOUT, Guest::LAYOUT],
        );
    }

    #[test]
    fn verdicts_have_the_names_of_c() {
        let names: Vec<_> = super::super::Verdict::ALL.iter().map(|it| it.name().replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "graft_hook.bpf.o", "hook_verdict", "hook_"));
    }
}
