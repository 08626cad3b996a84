//! Compiles `src/bpf`, and says where its headers are, for the programs of the products.

fn main() {
    millrace_kernel_build::Build::default().shares("barrier.h").run();
}
