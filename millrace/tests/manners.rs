//! Tests that every command ends without a panic when its output has no reader, and names the reason when rights are
//! missing.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, process::Stdio};

use millrace_testkit::cli;
use process::{RunningRelay, millrace, wait_for};

fn head(args: &[&str], goes_on: bool) -> Option<i32> {
    cli::exit_code_after_one_line(Path::new(env!("CARGO_BIN_EXE_millrace")), args, goes_on)
}

#[test]
fn closed_output_ends_a_command_without_error() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let url = relay.url();
    let http = format!("--http={}", relay.http);
    let token = format!("--http-token-file={}", relay.path("token").display());
    let publisher = ["publish", "--name=live", "--generate", "--tls-disable-verify", &url];
    let mut publisher = millrace().args(publisher).stderr(Stdio::null()).spawn().unwrap();
    let subscribe = ["subscribe", "--name=live", "--track=objects", "--tls-disable-verify", &url];
    wait_for("publisher", || (relay.status().sessions.len() == 1).then_some(()));
    let secret = relay.path("secret");
    fs::write(&secret, [7; 32]).unwrap();
    let key = format!("--key={}", secret.display());
    let table: [&[&str]; 13] = [
        &["--help"],
        &["relay", "--help"],
        &["relay", "--max-sessions=x", "--cache-bytes=y"],
        &["completions", "bash"],
        &["version"],
        &["status", &http, &token],
        &["status", "--json", &http, &token],
        &["status", "--watch", &http, &token],
        &["status", "--watch", "--json", &http, &token],
        &["token", "make", &key, "--root=a", "--put="],
        &[&subscribe[..], &["--stats"]].concat(),
        &[&subscribe[..], &["--json", "--count=50"]].concat(),
        // `subscribe` refuses to write media to a terminal, and must report that without a panic.
        &subscribe,
    ];
    for args in table {
        let code = head(args, false);
        assert!(matches!(code, Some(0..=2)), "{args:?}: {code:?}");
    }
    for args in [
        &["relay", "--listen=127.0.0.1:0", "--http=off"][..],
        &["publish", "--name=other", "--generate", "--tls-disable-verify", &url],
        &["trace", &http, &token],
    ] {
        let code = head(args, true);
        assert!(matches!(code, Some(0) | None), "{args:?}: {code:?}");
    }
    if nix::unistd::geteuid().is_root() {
        for args in [&["cost", "--plain", "--period=200ms"][..], &["cost", "--json", "--period=200ms"]] {
            let code = head(args, false);
            assert!(code != Some(101), "{args:?}: {code:?}");
        }
    } else {
        println!("SKIP closed_output_pipe_ends_a_command_cleanly: cost needs root");
    }
    publisher.kill().unwrap();
    publisher.wait().unwrap();
}

#[test]
fn error_of_an_unprivileged_command_names_the_missing_privilege() {
    if !nix::unistd::geteuid().is_root() {
        println!("SKIP who_has_no_rights_is_told_which: needs root, to be somebody else");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let program = dir.path().join("millrace");
    fs::copy(env!("CARGO_BIN_EXE_millrace"), &program).unwrap();
    let settings = dir.path().join("graft.toml");
    fs::write(&settings, "[[load]]\ngraft = \"longhaul\"\n").unwrap();
    // The control socket belongs to root.
    let socket = dir.path().join("gate.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    fs::set_permissions(&socket, fs::Permissions::from_mode(0o600)).unwrap();
    let socket = format!("--socket={}", socket.display());
    let settings = format!("--config={}", settings.display());
    let table: [(&[&str], &str); 9] = [
        (
            &["relay", "--engine=kernel", "--interface=nothing0", "--http=off", "--listen=127.0.0.1:4"],
            "CAP_BPF",
        ),
        (&["relay", "--http=off", "--listen=127.0.0.1:4"], "CAP_NET_BIND_SERVICE"),
        (&["relay", "--listen=127.0.0.1:0"], "--http-token-file"),
        (&["gate", "--interface=lo", "--port=443", "--http=off"], "CAP_NET_ADMIN"),
        (&["gate", "status", &socket], "root"),
        (&["gate", "block", "192.0.2.1", &socket], "root"),
        (&["graft", "run", &settings, "--http=off"], "CAP_NET_ADMIN"),
        (&["graft", "status", &socket], "root"),
        (&["cost", "--duration=100ms"], "root"),
    ];
    for (args, needed) in table {
        let (code, said) = cli::run_as_nobody(&program, args);
        assert_eq!(code, Some(1), "{args:?}: {said}");
        assert!(said.contains(needed), "{needed} is not in {said:?} of {args:?}");
        assert!(!said.contains("libbpf"), "{args:?}: {said}");
    }
    drop(listener);
}
