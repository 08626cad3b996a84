//! Checks that the kernel forwards on every kind of interface that this machine supports, with one row per kind. Needs
//! root.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod interfaces_rows;

use interfaces_rows::rows;

/// Offloads are on, as is the default of interfaces, so the publisher sends super-packets. The kernel's share depends on
/// the CPU time that the relay gets, so only the tests of `interfaces_all` check that it is 95 %.
#[test]
fn kernel_forwards_on_each_kind_of_interface() {
    let test = "kernel_forwards_on_each_kind_of_interface";
    let Some(rows) = rows(test, 50, "--quick --seconds 4") else { return };
    let forwarded = |row: &&serde_json::Value| row["kernel_percent"].is_number();
    for kind in ["veth", "veth, MTU 9000", "bridge", "tap", "tun"] {
        let row = rows.iter().find(|row| row["interface"] == kind).expect("a row");
        assert!(forwarded(&row), "{row}");
        assert!(row["super_packets"].as_u64().unwrap() > 0, "{row}");
    }
}
