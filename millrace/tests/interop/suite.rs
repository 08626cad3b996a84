//! The conformance cases of `moq-test-client`.

use super::{
    needs,
    process::{Need::Peer, Process},
    relay::Relay,
};

/// How many there are in version 0.2.0.
const CASES: usize = 18;

#[test]
fn every_case_of_moq_test_client_passes() {
    needs!(Peer("moq-test-client"));
    let relay = Relay::start();
    let client = Process::start_peer("moq-test-client", &["--relay", &relay.url(), "--tls-disable-verify"]);
    let tap = String::from_utf8(client.last_output()).unwrap();
    assert!(tap.contains(&format!("\n1..{CASES}\n")), "{tap}");
    // A case that is skipped is `ok` too.
    let passes = |line: &&str| line.starts_with("ok ") && !line.contains(" # ");
    assert_eq!(tap.lines().filter(passes).count(), CASES, "{tap}");
    assert!(!tap.lines().any(|line| line.starts_with("not ok")), "{tap}");
}
