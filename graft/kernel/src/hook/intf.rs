//! Structures and constants that the build generates from `bpf/graft_hook_intf.h` and the headers that it includes.

pub(crate) use generated::{
    HookConfig as Config, HookEnd as End, HookGuest as Guest, HookPeer as Peer, HookRedirected as Redirected,
    HookRule as Rule,
};

pub(crate) mod generated {
    #![allow(dead_code, reason = "the C header has more than Rust uses")]

    include!(concat!(env!("OUT_DIR"), "/graft_hook_intf.rs"));
}

pub(crate) const RULES: usize = generated::HOOK_RULES as usize;

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::enum_names;

    #[test]
    fn tunnel_hook_verdicts_are_named_as_in_the_bpf_program() {
        let names: Vec<_> =
            super::super::HookVerdict::ALL.iter().map(|it| it.name().replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "graft_hook.bpf.o", "hook_verdict", "hook_"));
    }
}
