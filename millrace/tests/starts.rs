//! What a relay that does not start leaves alone: the certificate of one that runs. Real processes.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use std::{fs, path::Path, process::Output};

use process::{Relay, millrace};

const OUT: &str = "--tls-self-signed-out={dir}/relay.pem";

/// The quick start, typed again while it runs.
fn start_again(dir: &Path, listen: &str, http: &str) -> Output {
    let out = OUT.replace("{dir}", dir.to_str().unwrap());
    let token = format!("--http-token-file={}", dir.join("token").display());
    let flags = [format!("--listen={listen}"), format!("--http={http}"), out, token];
    millrace().arg("relay").args(flags).output().unwrap()
}

#[test]
fn a_relay_that_does_not_start_leaves_the_certificate_of_another_alone() {
    let relay = Relay::start(tempfile::tempdir().unwrap(), &[OUT]);
    let certificate = || fs::read_to_string(relay.path("relay.pem")).unwrap();
    let before = certificate();
    let (listen, http) = (relay.listen().to_string(), relay.http.to_string());
    // Its address is taken; that of its HTTP is; nothing is, but the file is in use.
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
