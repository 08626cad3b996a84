//! Tests that a relay that fails to start leaves the certificate file of a running one unchanged.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use std::{fs, path::Path, process::Output};

use process::{RunningRelay, millrace};

const OUT: &str = "--tls-self-signed-out={dir}/relay.pem";

/// Starts a second relay with the commands of the quick start while the first relay runs.
fn start_again(dir: &Path, listen: &str, http: &str) -> Output {
    let out = OUT.replace("{dir}", dir.to_str().unwrap());
    let token = format!("--http-token-file={}", dir.join("token").display());
    let flags = [format!("--listen={listen}"), format!("--http={http}"), out, token];
    millrace().arg("relay").args(flags).output().unwrap()
}

#[test]
fn failed_start_keeps_certificate_of_running_relay() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[OUT]);
    let certificate = || fs::read_to_string(relay.path("relay.pem")).unwrap();
    let before = certificate();
    let listen = relay.listen().to_string();
    let http = relay.http.to_string();
    // The cases: the listen address is in use; the HTTP address is in use; both are free, but the first relay uses the
    // certificate file.
    for (listen, http, said) in [
        (listen.as_str(), "off", listen.as_str()),
        ("127.0.0.1:0", http.as_str(), http.as_str()),
        ("127.0.0.1:0", "off", "relay.pem: it holds the certificate of another relay that runs"),
    ] {
        let output = start_again(relay.dir.path(), listen, http);
        let words = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words}");
        assert!(words.contains(said), "{said:?} is not in {words}");
        assert_eq!(certificate(), before, "{said}");
    }
    let files: Vec<_> =
        fs::read_dir(relay.dir.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert!(!files.iter().any(|name| name.to_string_lossy().ends_with(".new")), "{files:?}");
}
