//! For build scripts: compiles `src/bpf/*.bpf.c` of a crate with clang, and `src/bpf/*.native.c` for its integration tests, which run the
//! same headers in their own process.
//!
//! Headers come from three places: those that programs of several crates share, from `millrace-kernel`; libbpf's, from the copy that
//! `libbpf-sys` builds and links, so that both always match; and the kernel's UAPI headers, from the system.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Every distribution that is supported packages this one or a newer one; older backends are not tried.
const MIN_CLANG: u32 = 16;
const NEWEST_CLANG: u32 = 24;

/// v3 is what 6.1 has.
const BPF: [&str; 3] = ["-target", "bpf", "-mcpu=v3"];

const SOURCE: &str = "src/bpf";

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Compiles what is in the calling crate's `src/bpf` to `OUT_DIR/NAME.bpf.o`, or ends the build with what is wrong. `OUT_DIR/objects.rs`
/// lists all objects, for the test that loads them.
///
/// Needs `DEP_MILLRACE_KERNEL_INCLUDE` and `DEP_MILLRACE_KERNEL_LIBBPF`, which cargo sets for crates that depend on `millrace-kernel`.
/// That crate itself has `DEP_BPF_INCLUDE`, and says where its own headers are.
pub fn main() {
    if let Err(error) = build(&[]) {
        fail(&*error);
    }
}

/// Compiles as [`main`] does, with headers of more crates, by their folders.
pub fn main_with(folders: &[&str]) {
    if let Err(error) = build(folders) {
        fail(&*error);
    }
}

fn fail(error: &dyn Error) -> ! {
    eprintln!("{}: {error}", env::var("CARGO_PKG_NAME").unwrap_or_default());
    std::process::exit(1);
}

fn build(folders: &[&str]) -> Result<()> {
    println!("cargo::rerun-if-env-changed=CLANG");
    println!("cargo::rerun-if-changed={SOURCE}");
    let out = PathBuf::from(env::var("OUT_DIR")?);
    let clang = find_clang()?;
    let mut includes: Vec<String> = Vec::new();
    for folder in folders.iter().map(|folder| (*folder).to_owned()).chain(shared_headers()?) {
        println!("cargo::rerun-if-changed={folder}");
        includes.push(format!("-I{folder}"));
    }
    includes.extend(include_flags(&clang)?);
    let mut objects = Vec::new();
    for entry in fs::read_dir(SOURCE)? {
        let source = entry?.path();
        let name = source.to_string_lossy();
        if name.ends_with(".bpf.c") {
            objects.push(compile(&clang, &BPF, &includes, &source, &out)?);
        } else if name.ends_with(".native.c") {
            let target = format!("--target={}", env::var("TARGET")?);
            let object = compile(&clang, &[&target, "-fPIC"], &includes, &source, &out)?;
            println!("cargo::rustc-link-arg-tests={}", object.display());
        }
    }
    objects.sort();
    fs::write(out.join("objects.rs"), list(&objects))?;
    Ok(())
}

/// The folder of headers that several crates' programs share, but for the crate that has it.
fn shared_headers() -> Result<Option<String>> {
    if let Ok(libbpf) = env::var("DEP_BPF_INCLUDE")
        && env::var("CARGO_MANIFEST_LINKS").is_ok_and(|name| name == "millrace_kernel")
    {
        let own = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join(SOURCE);
        println!("cargo::metadata=include={}", own.display());
        println!("cargo::metadata=libbpf={libbpf}");
        return Ok(None);
    }
    Ok(Some(env::var("DEP_MILLRACE_KERNEL_INCLUDE")?))
}

/// All objects, for the test that loads them: `[(path, image)]`.
fn list(objects: &[PathBuf]) -> String {
    let items =
        objects.iter().map(|object| format!("({object:?}, include_bytes!({object:?}).as_slice()),\n"));
    format!("[{}]\n", items.collect::<String>())
}

/// `$CLANG` if set, else `clang`, else the newest `clang-N`.
fn find_clang() -> Result<String> {
    let candidates = match env::var("CLANG") {
        Ok(named) => vec![named],
        Err(_) => std::iter::once("clang".to_owned())
            .chain((MIN_CLANG..=NEWEST_CLANG).rev().map(|n| format!("clang-{n}")))
            .collect(),
    };
    let mut seen = Vec::new();
    for candidate in candidates {
        match clang_version(&candidate) {
            Some(version) if version >= MIN_CLANG => return Ok(candidate),
            Some(version) => seen.push(format!("{candidate} is version {version}")),
            None => seen.push(format!("{candidate} does not run")),
        }
    }
    Err(format!(
        "clang {MIN_CLANG} or newer is needed to compile the BPF programs ({}).\n\
         Install one, for example `apt-get install clang-19`, or name it with CLANG=/path/to/clang.",
        seen.join(", ")
    )
    .into())
}

fn clang_version(clang: &str) -> Option<u32> {
    let output = Command::new(clang).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split("clang version ").nth(1)?.split('.').next()?.parse().ok()
}

/// libbpf's headers first; then the host's, which `-target bpf` leaves out although `<linux/types.h>`
/// needs `<asm/types.h>` from the host's architecture directory.
fn include_flags(clang: &str) -> Result<Vec<String>> {
    let libbpf = env::var("DEP_MILLRACE_KERNEL_LIBBPF").or_else(|_| env::var("DEP_BPF_INCLUDE"))?;
    let mut flags = vec![format!("-I{libbpf}")];
    let output =
        Command::new(clang).args(["-v", "-E", "-x", "c", "/dev/null", "-o", "/dev/null"]).output()?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let dirs: Vec<&str> = text
        .lines()
        .skip_while(|line| !line.contains("#include <...>"))
        .skip(1)
        .take_while(|line| line.starts_with(' '))
        .map(str::trim)
        .collect();
    require_header(&dirs, "linux/bpf.h")?;
    require_header(&dirs, "asm/types.h")?;
    for dir in dirs {
        flags.extend(["-idirafter".to_owned(), dir.to_owned()]);
    }
    Ok(flags)
}

fn require_header(dirs: &[&str], header: &str) -> Result<()> {
    if dirs.iter().any(|dir| Path::new(dir).join(header).exists()) {
        return Ok(());
    }
    Err(format!(
        "the kernel header <{header}> is missing (searched {}).\n\
         Install it, for example `apt-get install linux-libc-dev`.",
        dirs.join(", ")
    )
    .into())
}

/// The object's name is the source's, with `.o` for `.c`.
fn compile(clang: &str, machine: &[&str], includes: &[String], source: &Path, out: &Path) -> Result<PathBuf> {
    let name = source.file_stem().ok_or("a source without a name")?;
    let object = out.join(format!("{}.o", name.to_string_lossy()));
    let status = Command::new(clang)
        .args(machine)
        .args(["-g", "-O2", "-std=gnu11", "-Wall", "-Wextra", "-Werror"])
        .args(["-Wno-unused-parameter", "-Wno-sign-compare"])
        .args(includes)
        .arg("-c")
        .arg(source)
        .arg("-o")
        .arg(&object)
        .status()?;
    if !status.success() {
        return Err(format!("{clang} could not compile {}", source.display()).into());
    }
    Ok(object)
}
