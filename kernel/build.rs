//! Compiles `src/bpf`, and tells cargo the path of its headers, which the programs of the products include.

fn main() {
    millrace_kernel_build::Build::default().shares("barrier.h").run();
}
