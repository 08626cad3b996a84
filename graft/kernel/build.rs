//! Compiles the BPF programs in `src/bpf`.

fn main() {
    millrace_kernel_build::Build::default()
        .foreign("caller_wanted", "crate::caller::intf::Wanted")
        .foreign("quic_keys", "millrace_kernel::crypto::QuicKeys")
        .types("caller_intf.rs", &["caller_intf.h"])
        .types("graft_intf.rs", &["graft_intf.h"])
        .types(
            "graft_hook_intf.rs",
            &["graft_hook_intf.h", "graft_gateway_intf.h", "graft_hold_intf.h", "graft_opening_intf.h"],
        )
        .types("packet_intf.rs", &["packet_intf.h", "graft_packet.h", "seal_intf.h"])
        .run();
}
