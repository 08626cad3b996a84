//! Runs each comparison of `millrace-lab bench` at its smallest size. Needs root, and the programs that each test
//! names.
//! Tier: test-all, since the measurements are no feature of the product.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod cost;
mod fanout;
mod gate;
mod graft;
mod relay;
mod thesis;

use std::process::Command;

use serde_json::Value;

/// Runs `millrace-lab bench` with these arguments. Returns the rows that it wrote with `--json`.
fn rows(arguments: &str) -> Value {
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("rows.json");
    let output = Command::new(env!("CARGO_BIN_EXE_millrace-lab"))
        .arg("bench")
        .args(arguments.split_whitespace())
        .arg("--json")
        .arg(&json)
        .output()
        .expect("millrace-lab runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&std::fs::read(json).expect("rows")).expect("JSON")
}
