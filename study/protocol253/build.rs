//! Compiles the BPF programs in `src/bpf`.

fn main() {
    millrace_kernel_build::main();
}
