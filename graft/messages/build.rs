//! Sets the soname of the shared library, by which programs find it at run time. The soname contains
//! `MILLRACE_MESSAGES_ABI` of the header.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libmillrace_messages.so.0");
}
