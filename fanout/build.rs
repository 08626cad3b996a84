//! Compiles `src/bpf`.

fn main() {
    millrace_kernel_build::Build::default()
        .shares("bucket_intf.h")
        .foreign("net_path", "millrace_kernel::fan::NetPath")
        .run();
}
