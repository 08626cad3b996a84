//! Compiles `src/bpf`, and tells cargo where its headers are, for the programs of the products.

fn main() {
    millrace_kernel_build::Build::default().shares("barrier.h").run();
}
