//! Runs `millrace-lab bench fanout` at a small size. Needs root.

use std::process::Command;

use serde_json::Value;

const RECEIVERS: f64 = 3.0;
const RATE_HZ: f64 = 100.0;

#[test]
fn fanout_by_kernel_by_process_and_over_moq_is_measured() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP fanout_by_kernel_by_process_and_over_moq_is_measured: needs root");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("rows.json");
    let output = Command::new(env!("CARGO_BIN_EXE_millrace-lab"))
        .args(["bench", "fanout", "--receivers", "3", "--rate-hz", "100", "--seconds", "1", "--rounds", "1"])
        .args(["--json".as_ref(), json.as_os_str()])
        .output()
        .expect("millrace-lab runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let rows: Value = serde_json::from_slice(&std::fs::read(json).expect("rows")).expect("JSON");
    let rows = rows.as_array().expect("a list");
    let names: Vec<_> = rows.iter().map(|row| row["relay"].as_str().expect("a name")).collect();
    assert_eq!(names, ["millrace-fanout", "udp-batched", "millrace"]);
    for row in rows {
        assert_eq!(row.get("error"), None, "{row}");
        let number = |path: &str| {
            row.pointer(path).and_then(Value::as_f64).unwrap_or_else(|| panic!("{path} in {row}"))
        };
        assert!(number("/delivered") >= RATE_HZ * RECEIVERS, "{row}");
        assert_eq!(number("/wire/subscribers"), RECEIVERS);
        assert!(number("/wire/copies") > 0.0 && number("/wire_latency_us/p50") > 0.0, "{row}");
    }
    // In the kernel's fan-out no process wakes up for a packet. The process that batches its system calls has to
    // receive and send each packet.
    let [fanout, batched, _] = rows.as_slice() else { panic!("three rows") };
    let calls = |row: &Value| row["syscalls_per_object"].as_f64().expect("calls");
    assert!(calls(fanout) < calls(batched), "{} {}", calls(fanout), calls(batched));
}
