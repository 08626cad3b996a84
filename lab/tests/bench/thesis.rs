//! Runs `millrace-lab bench thesis` for a few seconds, without and with the kernel's fast path. Needs root.

use std::process::Command;

use serde_json::Value;

#[test]
fn kernel_and_userspace_engines_carry_the_same_objects() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP kernel_and_userspace_engines_carry_the_same_objects: needs root");
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let json = directory.path().join("rows.json");
    let plot = directory.path().join("plots");
    let output = Command::new(env!("CARGO_BIN_EXE_millrace-lab"))
        .args(["bench", "thesis", "--seconds", "3", "--rounds", "1"])
        .args(["--json".as_ref(), json.as_os_str(), "--plot".as_ref(), plot.as_os_str()])
        .output()
        .expect("millrace-lab runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let table = String::from_utf8_lossy(&output.stdout);
    assert!(table.contains("millrace (user)") && table.contains("millrace (kernel)"), "{table}");
    for picture in ["delay.svg", "cpu.svg", "calls.svg"] {
        let svg = std::fs::read_to_string(plot.join(picture)).expect("a picture");
        assert!(svg.contains("millrace (user)") && svg.contains("millrace (kernel)"), "{picture}");
    }

    let rows: Value = serde_json::from_slice(&std::fs::read(json).expect("rows")).expect("JSON");
    let rows = rows.as_array().expect("a list");
    assert_eq!(rows.iter().map(|row| &row["engine"]).collect::<Vec<_>>(), ["user", "kernel"]);
    for row in rows {
        check(row);
    }
}

fn check(row: &Value) {
    let list = |path: &str| row.pointer(path).and_then(Value::as_array).expect("a list");
    let number = |path: &str| row.pointer(path).and_then(Value::as_f64).expect("a number");
    let sequences = list("/series/sequence");
    let delays = list("/series/delay_us");
    // The publisher waits for the subscriber, so every object must arrive.
    let mut sequences: Vec<_> = sequences.iter().map(|number| number.as_u64().expect("a number")).collect();
    sequences.sort_unstable();
    assert_eq!(sequences, (0..90).collect::<Vec<_>>(), "each object once");
    // Both links delay each object by 5 ms.
    assert!(delays.iter().all(|delay| delay.as_f64().expect("a number") >= 10_000.0), "{delays:?}");
    assert!(number("/delay_us/mean") >= 10_000.0 && number("/delay_us/deviation") > 0.0);
    let names = ["futex", "epoll_wait", "clock_nanosleep", "sendmsg", "sendmmsg", "recvmsg"];
    let named: f64 = names.map(|name| number(&format!("/syscalls/{name}"))).iter().sum();
    assert!(number("/syscalls/total") >= named && number("/syscalls/recvmsg") > 0.0, "{}", row["syscalls"]);
    let lengths =
        ["at_s", "publisher", "relay", "subscriber"].map(|name| list(&format!("/cpu_percent/{name}")).len());
    assert!(lengths[0] > 4 && lengths.iter().all(|length| *length == lengths[0]), "{lengths:?}");
}
