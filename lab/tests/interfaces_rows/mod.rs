//! Runs `millrace-lab interfaces` and checks its rows.

use std::process::Command;

use serde_json::Value;

/// Runs the command with these arguments and checks each row. The kernel must have forwarded at least `least` percent of
/// the media's bytes, all of them intact. Otherwise the row must have the reason why the relay refused the interface, or
/// why this kernel lacks it. Returns `None` after printing that root is needed.
pub fn rows(test: &str, least: u32, arguments: &str) -> Option<Vec<Value>> {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP {test}: needs root");
        return None;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("rows.json");
    let mut command = Command::new(env!("CARGO_BIN_EXE_millrace-lab"));
    command.args(["interfaces", "--least", &least.to_string()]).args(arguments.split_whitespace());
    command.arg("--json").arg(&json);
    let output = command.output().expect("millrace-lab runs");
    let said = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    println!("{said}");
    let rows: Vec<Value> = serde_json::from_slice(&std::fs::read(json).expect("rows")).expect("JSON");
    for row in &rows {
        let reason = row["refused"].as_str().or(row["absent"].as_str()).unwrap_or_default();
        let is_forwarded =
            row["intact"] == true && row["kernel_percent"].as_f64().is_some_and(|n| n >= least.into());
        assert!(is_forwarded || !reason.is_empty(), "{row}");
        if !is_forwarded {
            println!("SKIP {}: {reason}", row["interface"]);
        }
    }
    Some(rows)
}
