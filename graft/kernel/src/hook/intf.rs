//! Structures and constants of `bpf/graft_hook_intf.h` and of the headers beside it, as the build writes them from these.

pub(crate) use generated::{
    HookConfig as Config, HookEnd as End, HookGuest as Guest, HookLed as Led, HookPeer as Peer,
    HookRule as Rule,
};

pub(crate) mod generated {
    #![allow(dead_code, reason = "not all that C has is of use here")]

    include!(concat!(env!("OUT_DIR"), "/graft_hook_intf.rs"));
}

pub(crate) const RULES: usize = generated::HOOK_RULES as usize;

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::enum_names;

    #[test]
    fn verdicts_have_the_names_of_c() {
        let names: Vec<_> = super::super::Verdict::ALL.iter().map(|it| it.name().replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "graft_hook.bpf.o", "hook_verdict", "hook_"));
    }
}
