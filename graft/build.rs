//! The shared library's name, by which programs find it at run time. Its number is `MILLRACE_GRAFT_ABI` of the header.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmillrace_graft.so.0");
}
