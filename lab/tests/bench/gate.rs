//! Runs `millrace-lab bench gate` at a small size. Needs root.

use std::process::Command;

use serde_json::Value;

const ATTACKERS: u64 = 4;
const REQUESTS: u64 = 25;

fn is_installed(program: &str) -> bool {
    Command::new(program).arg("help").output().is_ok()
}

#[test]
fn defences_refuse_excess_connections_and_a_flood() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP defences_refuse_excess_connections_and_a_flood: needs root");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("rows.json");
    let plot = directory.path().join("plot.svg");
    let output = Command::new(env!("CARGO_BIN_EXE_millrace-lab"))
        .args(["bench", "gate", "--defences", "user,gate,xdp-filter", "--requests", &REQUESTS.to_string()])
        .args(["--attack-rate-hz", "50", "--body-bytes", "20000", "--calm-seconds", "0.6"])
        .args(["--flood-seconds", "0.5", "--rounds", "1"])
        .args(["--json".as_ref(), json.as_os_str(), "--plot".as_ref(), plot.as_os_str()])
        .output()
        .expect("millrace-lab runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains("gate / user"), "{table}");
    assert!(std::fs::read_to_string(plot).expect("a plot").contains("gate"));

    let rows: Value = serde_json::from_slice(&std::fs::read(json).expect("rows")).expect("JSON");
    let row = |experiment: &str, defence: &str| {
        let found = rows.as_array().expect("a list").iter().find(|row| {
            (row["experiment"].as_str(), row["defence"].as_str()) == (Some(experiment), Some(defence))
        });
        found.unwrap_or_else(|| panic!("{experiment} {defence} in {rows}"))
    };
    for defence in ["user", "gate"] {
        let row = row("quota", defence);
        assert_eq!(row.get("error"), None, "{row}");
        assert_eq!(row["attempts"], ATTACKERS * REQUESTS, "{row}");
        assert_eq!(row["served_attempts"], 0, "{row}");
        assert!(row["requests_per_second"].as_f64() > Some(0.0), "{row}");
        assert!(row["cpu_ns_per_refused_packet"].as_f64() > Some(0.0), "{row}");
    }
    // Every attempt sends at least one packet, which reaches either the server or the gate.
    assert!(row("quota", "gate")["refused_packets"].as_u64() >= Some(ATTACKERS * REQUESTS));
    for defence in ["user", "gate"] {
        assert!(row("quota", defence)["syscalls"].as_u64() > Some(0), "{defence}");
    }
    assert!(row("quota", "xdp-filter")["error"].is_string());
    let filtered = row("flood", "xdp-filter");
    if is_installed("xdp-filter") {
        assert_eq!(filtered.get("error"), None, "{filtered}");
    } else {
        println!("SKIP defences_refuse_excess_connections_and_a_flood, by xdp-filter: it is not installed");
    }
    let flood = row("flood", "gate");
    assert_eq!(flood.get("error"), None, "{flood}");
    let rate = |name: &str| flood[name].as_f64().unwrap_or_else(|| panic!("{name} in {flood}"));
    assert!(rate("dropped_packets_per_second") > 0.0);
    assert!(rate("dropped_packets_per_second") <= rate("flood_packets_per_second"));
    assert!(rate("honest_goodput_ratio") > 0.0);
}
