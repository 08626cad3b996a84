//! Runs the whole table of `millrace-lab interfaces`: each kind of network interface, with and without offloads, and
//! with and without the packet gate. Needs root.
//!
//! Tier: test-all, since its quick rows are in the test `interfaces`.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod interfaces_rows;

#[test]
fn kernel_forwards_on_each_interface_kind_by_offload_and_gate_setting() {
    let test = "kernel_forwards_on_each_interface_kind_by_offload_and_gate_setting";
    let Some(rows) = interfaces_rows::rows(test, 95, "") else { return };
    assert_eq!(rows.len() % 4, 0);
    let veth: Vec<_> = rows.iter().filter(|row| row["interface"] == "veth").collect();
    assert!(veth.len() == 4 && veth.iter().all(|row| row["kernel_percent"].is_number()), "{veth:?}");
}
