//! Tests of the examples, which run as processes in network namespaces, of the C header, and of the installed files.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod support;

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use nix::sys::signal::Signal;
use support::{GateSite, hello, is_root, quota_of_two_holds, wait_for};

const TRACKED: &str = "\
[[scope]]
name = \"web\"
port = 4433
count = \"application\"
rules.quota = { connections = 2 }
";
const PUBLISHED: &str = "\
[[scope]]
name = \"web\"
port = 4433
live = \"published\"
id_bytes = 16
[scope.rules]
quota = { connections = 2 }
unknown_id = \"enforce\"
";

/// Returns `target/debug`, or the directory that these tests are in.
fn target() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().to_owned()
}

fn quinn() -> String {
    let program = target().join("examples/quinn");
    assert!(program.exists(), "no {}: `cargo test -p millrace-gate` builds it", program.display());
    program.to_string_lossy().into_owned()
}

/// Reports whether a tool exists and accepts these arguments. Prints a message if not.
fn has(tool: &str, args: &[&str]) -> bool {
    let found = Command::new(tool).args(args).output().is_ok_and(|output| output.status.success());
    if !found {
        println!("SKIP: `{tool} {}` fails here", args.join(" "));
    }
    found
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {said}");
}

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

#[tokio::test(flavor = "multi_thread")]
async fn quinn_server_enforces_its_quota_and_leaves_nothing_attached() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("quinn", TRACKED);
    let server = site.serve(&quinn());
    assert!(site.is_guarded());
    quota_of_two_holds(&site).await;
    assert_eq!(server.end(Signal::SIGTERM).0, Some(0));
    assert!(!site.is_guarded());
}

/// Checks that the server accepts the tokens of the gate's Retry packets. Otherwise no client would connect, because
/// clients check that the server knows two connection IDs: the client's original destination ID and the ID from the
/// Retry (RFC 9000, section 7.3).
#[tokio::test(flavor = "multi_thread")]
async fn quinn_server_accepts_the_gates_retry_tokens() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("quinn-retry", &format!("{TRACKED}rules.retry = \"enforce\"\n"));
    let _pass = site.take_answers();
    let server = site.serve(&quinn());
    quota_of_two_holds(&site).await;
    assert_eq!(server.end(Signal::SIGTERM).0, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_server_leaves_nothing_attached() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("kill", TRACKED);
    let server = site.serve(&quinn());
    hello(&site.connect(std::time::Duration::from_secs(10)).await.unwrap()).await;
    assert!(site.is_guarded());
    assert_eq!(server.end(Signal::SIGKILL).0, None);
    // The kernel frees a BPF link in a work queue, some time after the process has ended.
    wait_for("a clean interface", || !site.is_guarded());
}

#[test]
fn header_compiles_as_c99_and_cplusplus() {
    for (tool, standard, language) in [("cc", "-std=c99", "c"), ("c++", "-std=c++11", "c++")] {
        if !has(tool, &["--version"]) {
            continue;
        }
        let mut command = Command::new(tool);
        command.args([standard, "-Wall", "-Wextra", "-Werror", "-pedantic", "-x", language, "-fsyntax-only"]);
        run(command.arg(source("include/millrace_gate.h")));
    }
}

/// Compares the header with the library's symbols, since both are written by hand.
#[test]
fn library_exports_exactly_the_functions_of_the_header() {
    if !has("nm", &["--version"]) {
        return;
    }
    let library = target().join("deps/libmillrace_gate.so");
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let mut exported: Vec<_> = text.lines().filter_map(|line| line.split(' ').nth(2)).collect();
    exported.sort_unstable();
    let header = std::fs::read_to_string(source("include/millrace_gate.h")).unwrap();
    let mut declared: Vec<_> = header
        .lines()
        .filter(|line| !line.starts_with([' ', '\t', '/']))
        .filter_map(|line| line.split_once("millrace_gate_").filter(|(_, rest)| rest.contains('(')))
        .map(|(_, rest)| format!("millrace_gate_{}", rest.split('(').next().unwrap()))
        .collect();
    declared.sort_unstable();
    assert_eq!(exported, declared);
}

#[tokio::test(flavor = "multi_thread")]
async fn c_server_enforces_its_quota_of_connections() {
    let needs = ["--exists", "libngtcp2", "libngtcp2_crypto_gnutls", "gnutls"];
    if !is_root() || !has("cc", &["--version"]) || !has("pkg-config", &needs) {
        return;
    }
    let site = GateSite::new("c", PUBLISHED);
    let program = build_c(&site);
    let server = site.serve(&program);
    assert!(site.is_guarded());
    quota_of_two_holds(&site).await;
    let (code, said) = server.end(Signal::SIGTERM);
    assert_eq!((code, said.as_str()), (Some(0), "0 errors of the gate\n"));
    assert!(!site.is_guarded());
}

/// Checks that the server in C accepts the tokens of the gate's Retry packets.
#[tokio::test(flavor = "multi_thread")]
async fn c_server_accepts_the_gates_retry_tokens() {
    let needs = ["--exists", "libngtcp2", "libngtcp2_crypto_gnutls", "gnutls"];
    if !is_root() || !has("cc", &["--version"]) || !has("pkg-config", &needs) {
        return;
    }
    let site = GateSite::new("retry", &format!("{PUBLISHED}retry = \"enforce\"\n"));
    let _pass = site.take_answers();
    let server = site.serve(&build_c(&site));
    // A client that got a Retry checks that the server knows the client's original destination ID and the ID from the
    // Retry (RFC 9000, section 7.3).
    quota_of_two_holds(&site).await;
    assert_eq!(server.end(Signal::SIGTERM).0, Some(0));
}

/// Installs the library as a package would, and builds the C example with the command from the example's first lines.
fn build_c(site: &GateSite) -> String {
    let root = site.path("root");
    let program = site.path("server");
    let mut install = Command::new("make");
    install.arg("-C").arg(source("..")).args(["--no-print-directory", "install-gate", "PREFIX=/usr"]);
    install
        .arg(format!("DESTDIR={}", root.display()))
        .arg(format!("GATE_BUILD={}", target().join("deps").display()));
    run(&mut install);
    let pkg_config = |what: &str| {
        let mut command = Command::new("pkg-config");
        command.args([what, "millrace-gate", "libngtcp2", "libngtcp2_crypto_gnutls", "gnutls"]);
        command.env("PKG_CONFIG_PATH", root.join("usr/lib/pkgconfig")).env("PKG_CONFIG_SYSROOT_DIR", "");
        command.arg(format!("--define-variable=prefix={}", root.join("usr").display()));
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let mut compile = Command::new("cc");
    compile
        .args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror"])
        .args(pkg_config("--cflags").split_whitespace());
    compile.arg(source("examples/ngtcp2/server.c")).arg("-o").arg(&program);
    compile.args(pkg_config("--libs").split_whitespace());
    run(compile.arg(format!("-Wl,-rpath,{}", root.join("usr/lib").display())));
    program.to_string_lossy().into_owned()
}
