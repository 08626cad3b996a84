//! Compiles the kernel programs' parsers for their targets, with sanitizers and libFuzzer's coverage. The linker
//! has to be clang, of the same version (scripts/fuzz.sh sees to it).

use std::{env, path::PathBuf, process::Command};

const SOURCE: &str = "../millrace-bpf/src/bpf";
const SANITIZERS: &str = "address,undefined";
const TARGETS: [&str; 8] = [
    "kernel_ack",
    "kernel_frames",
    "kernel_gate",
    "kernel_graft",
    "kernel_udp",
    "kernel_quic",
    "kernel_subgroup",
    "kernel_web",
];

fn main() {
    println!("cargo::rerun-if-changed={SOURCE}");
    println!("cargo::rerun-if-env-changed=CLANG");
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let object = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("parsers.o");
    let status = Command::new(&clang)
        .args(["-g", "-O1", "-std=gnu11", "-fPIC", "-fno-sanitize-recover=all"])
        .arg(format!("-fsanitize=fuzzer-no-link,{SANITIZERS}"))
        .args(["-c", &format!("{SOURCE}/parsers.native.c"), "-o"])
        .arg(&object)
        .status();
    assert!(status.is_ok_and(|status| status.success()), "{clang} cannot compile the parsers");
    for target in TARGETS {
        println!("cargo::rustc-link-arg-bin={target}={}", object.display());
        println!("cargo::rustc-link-arg-bin={target}=-fsanitize={SANITIZERS}");
    }
}
