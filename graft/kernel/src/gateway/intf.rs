//! Structures and constants of `bpf/graft_gateway_intf.h`, which the build generates together with those of
//! `bpf/graft_hook_intf.h`.

pub(crate) use crate::hook::intf::generated::{
    GATEWAY_FORWARD as FORWARD, GATEWAY_OPEN as OPEN, GatewayAsk as RawAsk, GatewayConfig as Config,
    GatewayFlow as RawFlow, GatewayPrefix as PrefixKey, GatewayState as State,
};

pub(crate) const PREFIXES: usize = crate::hook::intf::generated::GATEWAY_PREFIXES as usize;

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::enum_names;

    #[test]
    fn gateway_verdicts_are_named_as_in_the_bpf_program() {
        let names: Vec<_> = super::super::VERDICTS.iter().map(|name| name.replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "graft_gateway.bpf.o", "gateway_verdict", "gateway_"));
    }
}
