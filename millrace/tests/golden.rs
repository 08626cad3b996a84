//! Compares the help of every command, and the messages about wrong arguments, with a file of the expected texts, whose
//! changes a code review shows. `MILLRACE_GOLDEN=write cargo test -p millrace --test golden` writes the file again.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    fmt::Write as _,
    path::Path,
    process::{Command, Output},
};

use millrace_testkit::cli;

const FILE: &str = "tests/golden/cli.txt";

/// Command lines with wrong arguments.
const WRONG: [&[&str]; 20] = [
    &["relay", "--cache-bytes", "2gb", "--max-sessions", "-4", "--engine", "foo"],
    // Values that cannot be parsed are reported together with faults that the relay finds in the other flags.
    &[
        "relay",
        "--check",
        "--listen",
        "4443",
        "--upstream",
        "foo",
        "--idle-timeout",
        "0",
        "--upstream-tls-root",
        "r.pem",
    ],
    &["relay", "--http", "localhost:80"],
    &["relay", "--listen", ":4443"],
    &["relay", "--check", "--listen", "0.0.0.0:4443"],
    &["relay", "--check", "--idle-timeout=0", "--tls-cert=cert.pem", "--queue-bytes=0"],
    &["relay", "--check", "--config", "tests/golden/wrong.toml"],
    &["relay", "--check", "--config", "/nowhere/relay.toml"],
    &["publish", "--name", "live", "moqt://127.0.0.1:1", "/nowhere/clip.mp4"],
    &[
        "publish",
        "--name",
        "live",
        "--generate",
        "--rate-hz",
        "abc",
        "--duration",
        "5x",
        "moqt://127.0.0.1:1",
    ],
    &["publish", "--name", "live", "--generate", "--rate-hz", "0", "moqt://127.0.0.1:1"],
    &["subscribe", "--name", "live", "http://127.0.0.1:1"],
    &["subscribe", "--name", "live", "relay.example"],
    &["subscribe", "--name", "live", "--tls-fingerprint", "abc", "moqt://127.0.0.1:1"],
    &["subscribe", "--name", "live", "--tls-root", "/nowhere/root.pem", "moqt://127.0.0.1:1"],
    &["status", "--http", "127.0.0.1:1", "--http-token-file", "off"],
    &["status", "--http", "localhost"],
    &["trace", "--http", "127.0.0.1:1", "--http-token-file", "off", "--track", "video"],
    &["gate", "block", "10.0.0.0/33", "--socket", "/nowhere/gate.sock"],
    &["gate", "trace", "--client", "10.0.0.0/33", "--rule", "quoat", "--rate", "0", "--duration", "5x"],
];

fn millrace(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_millrace")).args(args).env_remove("RUST_LOG").output().unwrap()
}

fn errors(out: &mut String) {
    for args in WRONG {
        let output = millrace(args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{args:?}");
        // Log lines are left out, since they begin with the time.
        let said: String =
            said.lines().filter(|line| !line.starts_with("20")).map(|line| format!("{line}\n")).collect();
        let _ = writeln!(
            out,
            "$ millrace {}\n{said}exit code {}\n",
            args.join(" "),
            output.status.code().unwrap()
        );
    }
}

#[test]
fn help_and_errors_equal_the_golden_file() {
    let program = Path::new(env!("CARGO_BIN_EXE_millrace"));
    let mut now = cli::helps(program);
    errors(&mut now);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE);
    cli::assert_as_reviewed(&file, &now, "cargo test -p millrace --test golden");
}
