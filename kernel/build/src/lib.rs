//! A helper of build scripts. It compiles `src/bpf/*.bpf.c` of a crate with clang. It also compiles
//! `src/bpf/*.native.c` for the crate's integration tests, which run the same headers in their own process. It
//! generates Rust's types from the headers (`types`).
//!
//! Headers come from three places. Those that programs of several crates share are in `millrace-kernel`. Those of
//! libbpf are in the copy that `libbpf-sys` builds and links, so that headers and library match. The kernel's UAPI
//! headers are the system's.
#![deny(missing_docs)]

mod btf;
mod types;

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use types::{Defined, TypeNames};

/// Oldest version of clang that is used. Every supported distribution packages this version or a newer one.
const MIN_CLANG: u32 = 16;
/// Newest version of clang for which the build looks by the program's name, such as `clang-24`.
const NEWEST_CLANG: u32 = 24;

/// Flags of clang for BPF. Linux 6.1 supports instruction set v3, and not v4.
const BPF: [&str; 3] = ["-target", "bpf", "-mcpu=v3"];

const SOURCE: &str = "src/bpf";

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A build of one crate's BPF programs.
pub struct Build {
    folders: Vec<&'static str>,
    headers: Vec<&'static str>,
    files: Vec<(&'static str, &'static [&'static str])>,
    names: TypeNames,
}

impl Default for Build {
    fn default() -> Self {
        let plain = if is_kernel() { "crate::intf::Plain" } else { "millrace_kernel::intf::Plain" };
        Self {
            folders: Vec::new(),
            headers: Vec::new(),
            files: Vec::new(),
            names: TypeNames { plain, ..TypeNames::default() },
        }
    }
}

/// Compiles the programs in the calling crate's `src/bpf`: see [`Build::run`].
pub fn main() {
    Build::default().run();
}

impl Build {
    /// Adds a folder of headers, for programs that include headers of several crates.
    pub fn folder(mut self, folder: &'static str) -> Self {
        self.folders.push(folder);
        self
    }

    /// Adds a header whose structures and constants get Rust types, in addition to those of `*_intf.h`.
    pub fn shares(mut self, header: &'static str) -> Self {
        self.headers.push(header);
        self
    }

    /// Writes the Rust types of some headers to a separate file, for headers that cannot be included in one C file.
    /// Without calls of this function, all types are in one file, `intf.rs`.
    pub fn types(mut self, file: &'static str, headers: &'static [&'static str]) -> Self {
        self.files.push((file, headers));
        self
    }

    /// Sets the Rust path of a C structure that another crate defines.
    pub fn foreign(mut self, structure: &'static str, path: &'static str) -> Self {
        self.names.foreign.insert(structure, path);
        self
    }

    /// Makes a structure's Rust type implement `Ord`, in the order of its fields.
    pub fn ordered(mut self, structure: &'static str) -> Self {
        self.names.ordered.insert(structure);
        self
    }

    /// Compiles `src/bpf/*.bpf.c` to `OUT_DIR/NAME.bpf.o`, and `*.native.c` for tests. On an error, prints it and ends
    /// the build. `OUT_DIR/objects.rs` lists the objects, for the test that loads them. `OUT_DIR/intf.rs` has the types
    /// that C and Rust share.
    ///
    /// The build needs `DEP_MILLRACE_KERNEL_INCLUDE` and `DEP_MILLRACE_KERNEL_LIBBPF`, which cargo sets for crates that
    /// depend on `millrace-kernel`. `millrace-kernel` itself gets `DEP_BPF_INCLUDE`, and tells cargo the path of its
    /// headers.
    pub fn run(&self) {
        if let Err(error) = self.build() {
            eprintln!("{}: {error}", env::var("CARGO_PKG_NAME").unwrap_or_default());
            std::process::exit(1);
        }
    }

    fn build(&self) -> Result<()> {
        println!("cargo::rerun-if-env-changed=CLANG");
        println!("cargo::rerun-if-changed={SOURCE}");
        let out = PathBuf::from(env::var("OUT_DIR")?);
        let clang = find_clang()?;
        let mut includes: Vec<String> = Vec::new();
        for folder in self.folders.iter().map(|folder| (*folder).to_owned()).chain(shared_headers()?) {
            println!("cargo::rerun-if-changed={folder}");
            includes.push(format!("-I{folder}"));
        }
        includes.extend(include_flags(&clang)?);
        let mut objects = Vec::new();
        let mut headers = Vec::new();
        for entry in fs::read_dir(SOURCE)? {
            let source = entry?.path();
            let name = source.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if name.ends_with(".bpf.c") {
                objects.push(compile(&clang, &BPF, &includes, &source, &out)?);
            } else if name.ends_with(".native.c") {
                let target = format!("--target={}", env::var("TARGET")?);
                let object = compile(&clang, &[&target, "-fPIC"], &includes, &source, &out)?;
                println!("cargo::rustc-link-arg-tests={}", object.display());
            } else if name.ends_with("_intf.h") || name == "intf.h" {
                headers.push(name);
            }
        }
        objects.sort();
        headers.sort();
        headers.extend(self.headers.iter().map(|header| (*header).to_owned()));
        fs::write(out.join("objects.rs"), list(&objects))?;
        for (file, headers) in &self.files {
            let headers: Vec<_> = headers.iter().map(|header| (*header).to_owned()).collect();
            self.write_types(&clang, &includes, &headers, &out.join(file))?;
        }
        if self.files.is_empty() && !headers.is_empty() {
            self.write_types(&clang, &includes, &headers, &out.join("intf.rs"))?;
        }
        Ok(())
    }

    fn write_types(&self, clang: &str, includes: &[String], headers: &[String], file: &Path) -> Result<()> {
        let mut defined = Defined::default();
        let folders = includes.iter().filter_map(|flag| flag.strip_prefix("-I"));
        let folders: Vec<_> = std::iter::once(SOURCE).chain(folders).collect();
        for header in headers {
            let found =
                folders.iter().map(|folder| Path::new(folder).join(header)).find(|path| path.exists());
            defined.read(&found.ok_or_else(|| format!("there is no header {header}"))?)?;
        }
        let source = file.with_extension("c");
        let out = file.parent().unwrap_or(file);
        fs::write(&source, defined.source(headers))?;
        let own = format!("-I{}", fs::canonicalize(SOURCE)?.display());
        let object =
            compile(clang, &[&BPF[..], &[&own, "-Wno-unused-function"]].concat(), includes, &source, out)?;
        fs::write(file, defined.rust(&fs::read(object)?, &self.names)?)?;
        Ok(())
    }
}

/// Reports whether the calling crate is `millrace-kernel`, which has the shared headers.
fn is_kernel() -> bool {
    env::var("CARGO_MANIFEST_LINKS").is_ok_and(|name| name == "millrace_kernel")
}

/// Returns the folder of shared headers. If the calling crate is `millrace-kernel`, tells cargo the path of its headers
/// and returns `None`.
fn shared_headers() -> Result<Option<String>> {
    if let Ok(libbpf) = env::var("DEP_BPF_INCLUDE")
        && is_kernel()
    {
        let own = Path::new(&env::var("CARGO_MANIFEST_DIR")?).join(SOURCE);
        println!("cargo::metadata=include={}", own.display());
        println!("cargo::metadata=libbpf={libbpf}");
        return Ok(None);
    }
    Ok(Some(env::var("DEP_MILLRACE_KERNEL_INCLUDE")?))
}

/// Returns Rust code for an array of all objects as `(path, image)`, for the test that loads them.
fn list(objects: &[PathBuf]) -> String {
    let items =
        objects.iter().map(|object| format!("({object:?}, include_bytes!({object:?}).as_slice()),\n"));
    format!("[{}]\n", items.collect::<String>())
}

/// Finds clang: the one that `CLANG` names if it is set, else `clang`, else the newest `clang-N`.
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

/// Returns the flags for include paths: libbpf's headers first, then the directories in which clang finds the host's
/// headers. With `-target bpf`, clang does not search the directory of the host's architecture, but `<linux/types.h>`
/// needs `<asm/types.h>` from there.
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

/// Compiles a source to an object of the same name, with `.o` for `.c`.
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
