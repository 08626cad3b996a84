//! Runs `millrace-lab bench cost` at a small size. Needs root, iperf3 and perf.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

const PAIRS: usize = 2;

fn rows(path: &Path) -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(path).expect("rows")).expect("JSON")
}

fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Checks that each scenario of `millrace-lab bench cost --scenarios` is compared with perf and with the clock, and
/// that the command fails if and only if a scenario's measured values are out of range or an expected kernel context is
/// missing. The test accepts either outcome, since short measurements depend on the machine's other load. Names of
/// kernel contexts are checked by the test program `contexts`.
#[test]
fn each_scenario_is_compared_with_perf_and_clock() {
    if !nix::unistd::geteuid().is_root() {
        return println!("SKIP each_scenario_is_compared_with_perf_and_clock: needs root");
    }
    if ["iperf3", "perf", "nft"].iter().any(|program| !has(program)) {
        return println!("SKIP each_scenario_is_compared_with_perf_and_clock: needs iperf3, perf and nft");
    }
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("rows.json");
    let output = Command::new(env!("CARGO_BIN_EXE_millrace-lab"))
        .args(["bench", "cost", "--scenarios", "--accuracy-seconds", "2"])
        .args(["--json".as_ref(), json.as_os_str()])
        .output()
        .expect("millrace-lab runs");
    let said = String::from_utf8_lossy(&output.stderr);
    let rows = rows(&json);
    assert_eq!(rows.len(), 12);
    let mut all_right = true;
    for row in &rows {
        if let Some(error) = row.get("error") {
            // On a machine where BPF programs come and go, perf sometimes cannot read its own recording.
            let is_of_perf = error.as_str().is_some_and(|error| error.starts_with("perf script"));
            assert!(is_of_perf, "{row:#}");
            println!("SKIP each_scenario_is_compared_with_perf_and_clock, {}: {error}", row["scenario"]);
            continue;
        }
        let figures = &row["figures"];
        assert!(figures["profile_pct"].as_f64() > Some(0.0), "{row:#}");
        let sums = figures["kernel_sums"].as_array().expect("a list");
        assert!(!sums.is_empty(), "{row:#}");
        let mut is_right = figures["within"] == true && figures["absent"] == Value::Array(Vec::new());
        for sum in sums {
            let figure = |name: &str| sum[name].as_f64().unwrap_or_else(|| panic!("{row:#}"));
            let kernel = figure("timed_pct") + figure("sampled_pct");
            let clock = figure("clock_busy_pct") - figure("user_pct");
            assert!((kernel - clock - figure("difference_points")).abs() < 1e-6, "{row:#}");
            is_right &= figure("difference_points").abs() <= (3.0 * figure("standard_error_points")).max(1.0);
        }
        let scenario = row["scenario"].as_str().expect("a name");
        assert_eq!(said.contains(&format!("{scenario} (")), !is_right, "{said}{row:#}");
        all_right &= is_right;
    }
    assert_eq!(output.status.success(), all_right, "{said}");
}

#[test]
fn accuracy_and_overhead_of_one_scenario_are_reported() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP accuracy_and_overhead_of_one_scenario_are_reported: needs root");
        return;
    }
    if !has("iperf3") || !has("perf") {
        println!("SKIP accuracy_and_overhead_of_one_scenario_are_reported: needs iperf3 and perf");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("rows.json");
    let mut bench = Command::new(env!("CARGO_BIN_EXE_millrace-lab"))
        .args([
            "bench",
            "cost",
            "--only",
            "veth udp gro=off",
            "--accuracy-seconds",
            "0.7",
            "--accuracy-rounds",
            "2",
        ])
        .args(["--hz", "1000", "--pairs", &PAIRS.to_string(), "--pair-seconds", "0.3"])
        .args(["--observers", "clock,array,auto,http"])
        .args(["--json".as_ref(), json.as_os_str()])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("millrace-lab runs");
    // When a result is printed, its row is already in the JSON file, even if a later measurement fails.
    let mut said = BufReader::new(bench.stderr.take().expect("a pipe"));
    let mut line = String::new();
    while !line.starts_with("veth udp") {
        line.clear();
        assert!(said.read_line(&mut line).expect("text") > 0, "it ended without a row");
    }
    assert_eq!(rows(&json)[1]["scenario"], "veth udp gro=off");
    let mut rest = String::new();
    let mut table = String::new();
    said.read_to_string(&mut rest).expect("text");
    bench.stdout.take().expect("a pipe").read_to_string(&mut table).expect("text");
    assert!(bench.wait().expect("it ends").success(), "{line}{rest}");
    assert_eq!(table.lines().count(), 6, "{table}");

    let rows = rows(&json);
    let [calibration, accuracy, clock, array, auto, http] = &rows[..] else { panic!("{rows:#?}") };
    assert_eq!(calibration.get("error"), None, "{calibration}");
    for cpu in calibration["calibration"].as_array().expect("a list") {
        let figure = |name: &str| cpu[name].as_f64().unwrap_or_else(|| panic!("{calibration}"));
        // On a busy machine the threads that make load may get no CPU time at all.
        assert!(figure("bursts_pct") >= 0.0 && figure("thread_pct") >= 0.0, "{calibration}");
        assert!(figure("ticks_pct") > 0.0 && figure("profile_busy_pct") > 0.0, "{calibration}");
    }
    for row in [accuracy, clock, array, auto, http] {
        assert_eq!(row.get("error"), None, "{row}");
        assert_eq!((&row["scenario"], &row["sample_hz"]), (&"veth udp gro=off".into(), &1000.into()));
    }
    // Accurate measurements would need longer runs on a quiet machine. This test only checks that the observer's errors
    // are reported.
    let error = |name: &str| accuracy[name].as_f64().unwrap_or_else(|| panic!("{accuracy}"));
    assert!(error("procstat_error_pct").is_finite() && error("clock_error_pct").is_finite(), "{accuracy}");
    assert!(error("worst_subevent_error_points") >= 0.0, "{accuracy}");
    assert_eq!(accuracy["accuracy"]["rounds"], 2, "{accuracy}");
    for event in ["send", "receive", "net_rx"] {
        let parts = accuracy["accuracy"]["parts"].as_array().expect("a list");
        let sum = |figure: &str| -> f64 {
            parts.iter().filter(|part| part["event"] == event).filter_map(|part| part[figure].as_f64()).sum()
        };
        assert!(sum("observer_pct") > 0.0 && sum("profile_pct") > 0.0, "{event}: {accuracy}");
    }
    let observers = [clock, array, auto, http].map(|row| &row["observer"]);
    assert_eq!(observers, ["clock", "array", "auto", "http"]);
    assert_eq!(
        [clock, array, http].map(|row| &row["mode"]),
        [&Value::Null, &"events".into(), &"events".into()]
    );
    // Whether the observer only samples the CPUs or also times each run of the networking code depends on this
    // machine's packet rate. The mode that it reports must agree with the share of time that it reports for sampling.
    let sampled = auto["overhead"]["sampled_pct"].as_f64().unwrap_or_else(|| panic!("{auto}"));
    assert_eq!(auto["mode"], if sampled > 50.0 { "sampling" } else { "events" }, "{auto}");
    assert!(auto["overhead"]["timing_pct"].as_f64() > Some(0.0), "{auto}");
    assert!(array["overhead"]["method"].is_string() && array["overhead"]["timing_pct"].is_null(), "{array}");
    for row in [clock, array, auto, http] {
        assert_eq!(row["overhead"]["pairs_pct"].as_array().map(Vec::len), Some(PAIRS), "{row}");
        assert!(row["overhead"]["delivered_per_second"].as_f64() > Some(0.0), "{row}");
        assert_eq!(row["overhead"]["observer_cpu_pct"].as_f64() > Some(0.0), row != clock, "{row}");
        let figure = |name: &str| row["overhead_pct"][name].as_f64().unwrap_or_else(|| panic!("{row}"));
        assert!(figure("min") <= figure("median") && figure("median") <= figure("max"));
    }
}
