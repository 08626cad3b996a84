//! Mirrors of `bpf/graft_gateway_intf.h`. The test compares them with the BTF of the compiled object.

use millrace_kernel::intf::mirror;

use super::super::hook::intf::End;

pub(crate) const PREFIXES: usize = 2048;
pub(crate) const OPEN: u32 = 2;
pub(crate) const FORWARD: u32 = 3;

mirror!(Config = "gateway_config" { mark: u32, mark_again: u32, port4: u16, port6: u16 });

mirror!(PrefixKey = "gateway_prefix" { bits: u32, address: [u8; 16] });

mirror!(RawFlow = "gateway_flow" { client: End, server: End });

mirror!(State = "gateway_state" { until_ns: u64, state: u32, pad: u32 });

mirror!(RawAsk = "gateway_ask" { flow: RawFlow, bytes: u32, old: u32, syn: [[u8; 16]; 4] });

#[cfg(test)]
mod tests {
    use millrace_kernel::intf::{assert_layouts, enum_names};

    use super::*;

    #[test]
    fn mirrors_match_btf() {
        assert_layouts(
            env!("OUT_DIR"),
            "graft_gateway.bpf.o",
            &[Config::LAYOUT, PrefixKey::LAYOUT, RawFlow::LAYOUT, State::LAYOUT, RawAsk::LAYOUT],
        );
    }

    #[test]
    fn verdicts_have_the_names_of_c() {
        let names: Vec<_> = super::super::VERDICTS.iter().map(|name| name.replace('-', "_")).collect();
        assert_eq!(names, enum_names(env!("OUT_DIR"), "graft_gateway.bpf.o", "gateway_verdict", "gateway_"));
    }
}
