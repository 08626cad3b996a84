//! Compiles `src/bpf`.

fn main() {
    millrace_kernel_build::main();
}
