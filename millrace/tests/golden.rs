//! What every command says of itself, and what it says to those who get it wrong, as one file that reviews show.
//!
//! `MILLRACE_GOLDEN=write cargo test -p millrace --test golden` writes it anew.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::{
    collections::VecDeque,
    fmt::Write as _,
    path::Path,
    process::{Command, Output},
};

const FILE: &str = "tests/golden/cli.txt";

/// What users get wrong.
const WRONG: [&[&str]; 20] = [
    &["relay", "--cache-bytes", "2gb", "--max-sessions", "-4", "--engine", "foo"],
    // The flags that are of no use, and what the relay has against the others.
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

/// Names of the commands below one, by its help.
fn commands(help: &str) -> Vec<String> {
    let list = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let list = list.take_while(|line| line.starts_with("  "));
    let names = list.filter_map(|line| {
        line.strip_prefix("  ")?.split_whitespace().next().filter(|_| !line.starts_with("   "))
    });
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

fn helps(out: &mut String) {
    let mut waiting = VecDeque::from([Vec::<String>::new()]);
    while let Some(path) = waiting.pop_front() {
        let args: Vec<&str> = path.iter().map(String::as_str).chain(["--help"]).collect();
        let output = millrace(&args);
        assert!(output.status.success(), "{args:?}");
        let help = String::from_utf8(output.stdout).unwrap();
        let _ = writeln!(out, "$ millrace {}\n{help}", args.join(" "));
        // In their order, each with what is below it.
        for name in commands(&help).into_iter().rev() {
            waiting.push_front([&path[..], &[name]].concat());
        }
    }
}

fn errors(out: &mut String) {
    for args in WRONG {
        let output = millrace(args);
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{args:?}");
        // Lines of the log have the time in them.
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
fn what_commands_say_is_as_it_was_reviewed() {
    let mut now = String::new();
    helps(&mut now);
    errors(&mut now);
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join(FILE);
    if std::env::var("MILLRACE_GOLDEN").is_ok_and(|value| value == "write") {
        std::fs::write(&file, &now).unwrap();
        return;
    }
    let before = std::fs::read_to_string(&file).unwrap_or_default();
    let differs = now.lines().zip(before.lines()).position(|(now, before)| now != before);
    let line = differs.unwrap_or_else(|| now.lines().count().min(before.lines().count()));
    assert!(
        now == before,
        "line {} of {FILE} is another: {:?} now, {:?} there. If that is meant: MILLRACE_GOLDEN=write cargo test -p millrace --test golden",
        line + 1,
        now.lines().nth(line),
        before.lines().nth(line),
    );
}
