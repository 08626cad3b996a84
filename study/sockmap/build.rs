//! Compiles bypass.bpf.c with clang, with libbpf's headers from the copy that `libbpf-sys` builds.

use std::{env, error::Error, path::PathBuf, process::Command};

/// Directories of the kernel's headers: `-target bpf` leaves out that of the host's architecture.
const KERNEL_HEADERS: [&str; 2] = ["/usr/include/x86_64-linux-gnu", "/usr/include/aarch64-linux-gnu"];

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-env-changed=CLANG");
    println!("cargo::rerun-if-changed=src");
    let object = PathBuf::from(env::var("OUT_DIR")?).join("bypass.bpf.o");
    let named = env::var("CLANG").into_iter();
    let usual =
        ["clang".to_owned()].into_iter().chain((16..=24).rev().map(|version| format!("clang-{version}")));
    let runs = |clang: &String| Command::new(clang).arg("--version").output().is_ok();
    let clang = named.chain(usual).find(runs).ok_or("clang is missing: `apt-get install clang`")?;
    let status = Command::new(&clang)
        .args(["-target", "bpf", "-mcpu=v3", "-g", "-O2", "-std=gnu11", "-Wall", "-Werror"])
        .arg(format!("-I{}", env::var("DEP_BPF_INCLUDE")?))
        .args(KERNEL_HEADERS.iter().flat_map(|directory| ["-idirafter", directory]))
        .args(["-c", "src/bypass.bpf.c", "-o"])
        .arg(&object)
        .status()?;
    if !status.success() {
        return Err(format!("{clang} could not compile src/bypass.bpf.c").into());
    }
    Ok(())
}
