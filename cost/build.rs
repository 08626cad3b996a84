//! Compiles the BPF programs in `src/bpf` and generates their Rust bindings.

fn main() {
    millrace_kernel_build::main();
}
