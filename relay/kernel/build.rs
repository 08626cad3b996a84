//! Compiles the BPF program in `src/bpf`, and generates Rust types of the structures that it shares with userspace.

fn main() {
    millrace_kernel_build::Build::default()
        .shares("web.h")
        .foreign("net_path", "millrace_kernel::fan::NetPath")
        .foreign("quic_keystream", "millrace_kernel::crypto::Keystream")
        .run();
}
