//! Runs the conformance cases of `moq-test-client` against a relay.

use super::{
    needs,
    process::{InteropProcess, TestNeed::Peer},
    relay::InteropRelay,
};

/// Number of conformance cases in version 0.2.0 of `moq-test-client`.
const CASES: usize = 18;

/// Conformance cases that fail if a datagram is lost. On a busy machine the publisher, the relay or the subscriber may
/// drop one.
const DATAGRAM_CASES: &str = "moq-test-datagram";
const ATTEMPTS: usize = 4;

#[test]
fn every_case_of_moq_test_client_passes() {
    needs!(Peer("moq-test-client"));
    let relay = InteropRelay::start();
    assert_passes(&relay.url());
}

#[test]
fn every_case_of_moq_test_client_passes_over_webtransport() {
    needs!(Peer("moq-test-client"));
    let relay = InteropRelay::start();
    assert_passes(&relay.web_url());
}

fn assert_passes(url: &str) {
    let tap = run(url, &[]);
    assert!(tap.contains(&format!("\n1..{CASES}\n")), "{tap}");
    // `moq-test-client` also reports a skipped conformance case as `ok`.
    let passes = |line: &&str| line.starts_with("ok ") && !line.contains(" # ");
    let failed: Vec<_> = tap.lines().filter(|line| line.starts_with("not ok")).filter_map(case).collect();
    assert_eq!(tap.lines().filter(passes).count() + failed.len(), CASES, "{tap}");
    for name in failed {
        assert!(name.starts_with(DATAGRAM_CASES), "{tap}");
        let passed = (1..ATTEMPTS).any(|_| run(url, &["--test", name]).contains("\nok 1 "));
        assert!(passed, "{name} fails every time: {tap}");
    }
}

/// Returns the name in a line `not ok N - NAME`.
fn case(line: &str) -> Option<&str> {
    line.split_once(" - ").map(|(_, name)| name.trim())
}

/// Returns the test client's output about a relay.
fn run(url: &str, which: &[&str]) -> String {
    let arguments = [&["--relay", url, "--tls-disable-verify"], which].concat();
    String::from_utf8(InteropProcess::start_peer("moq-test-client", &arguments).last_output()).unwrap()
}
