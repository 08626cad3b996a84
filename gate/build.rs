//! Compiles `src/bpf`, and sets the soname of the shared library, by which programs find it at run time. The number in
//! the soname is `MILLRACE_GATE_ABI` of the header.

fn main() {
    millrace_kernel_build::Build::default()
        .shares("bucket_intf.h")
        .ordered("gate_scope_key")
        .ordered("gate_prefix_key")
        .run();
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmillrace_gate.so.0");
}
