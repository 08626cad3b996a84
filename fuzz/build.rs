//! Compiles the kernel programs' parsers for their targets, with sanitizers and libFuzzer's coverage. The linker must
//! be clang of the same version, which scripts/fuzz.sh ensures.

use std::{env, fs, path::PathBuf, process::Command};

const SOURCE: &str = "../testkit/parsers/src/bpf/parsers.native.c";
const HEADERS: [&str; 5] =
    ["../kernel/src/bpf", "../relay/kernel/src/bpf", "../gate/src/bpf", "../graft/kernel/src/bpf", "../fanout/src/bpf"];
const SANITIZERS: &str = "address,undefined";
/// Prefix of the names of fuzz targets that link the natively compiled parsers.
const KERNEL: &str = "kernel_";

fn main() {
    for path in HEADERS.iter().chain([&SOURCE]) {
        println!("cargo::rerun-if-changed={path}");
    }
    println!("cargo::rerun-if-changed=fuzz_targets");
    println!("cargo::rerun-if-env-changed=CLANG");
    let clang = env::var("CLANG").unwrap_or_else(|_| "clang".to_owned());
    let object = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("parsers.o");
    let status = Command::new(&clang)
        .args(["-g", "-O1", "-std=gnu11", "-fPIC", "-fno-sanitize-recover=all"])
        .arg(format!("-fsanitize=fuzzer-no-link,{SANITIZERS}"))
        .args(HEADERS.map(|folder| format!("-I{folder}")))
        .args(["-c", SOURCE, "-o"])
        .arg(&object)
        .status();
    assert!(status.is_ok_and(|status| status.success()), "{clang} cannot compile the parsers");
    let targets = fs::read_dir("fuzz_targets").expect("targets").map(|entry| entry.expect("a target").path());
    let names = targets.filter_map(|path| Some(path.file_stem()?.to_str()?.to_owned()));
    for target in names.filter(|name| name.starts_with(KERNEL)) {
        println!("cargo::rustc-link-arg-bin={target}={}", object.display());
        println!("cargo::rustc-link-arg-bin={target}=-fsanitize={SANITIZERS}");
    }
}
