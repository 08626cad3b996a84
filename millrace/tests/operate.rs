//! Tests of an operator's actions on a relay as a process: settings, signals, certificates, a full disk.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod process;
mod terminal;

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr},
    os::unix::net::UnixDatagram,
    path::Path,
    process::{Child, Command, Output, Stdio},
    sync::Arc,
    time::Duration,
};

use millrace_relay_daemon::status::{Status, UpstreamStatus};
use millrace_testkit::{show_log_on_panic, wait_until};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use process::{RunningRelay, millrace, wait_for};
use rcgen::PublicKeyData as _;
use rustls::{
    DigitallySignedStruct, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};
use tempfile::TempDir;
use terminal::{CLEAR, PseudoTerminal};

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn upstream_of(relay: &RunningRelay) -> UpstreamStatus {
    // exact: callers reread the state of the upstream connection until it is as expected, or have waited for it
    relay.status().upstream.clone().unwrap()
}

fn write_pair(dir: &Path) -> CertificateDer<'static> {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    for (name, text) in [("key.pem", made.signing_key.serialize_pem()), ("cert.pem", made.cert.pem())] {
        fs::write(dir.join("new"), text).unwrap();
        fs::rename(dir.join("new"), dir.join(name)).unwrap();
    }
    CertificateDer::from_pem_slice(made.cert.pem().as_bytes()).unwrap()
}

/// Returns whether the relay at `addr` presents a certificate that `trusted` has signed.
async fn shows(addr: SocketAddr, trusted: &CertificateDer<'static>) -> bool {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(trusted.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    tls.alpn_protocols = vec![b"moqt-18".to_vec()];
    let tls = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
    let mut endpoint = quinn::Endpoint::client((Ipv4Addr::UNSPECIFIED, 0).into()).unwrap();
    endpoint.set_default_client_config(quinn::ClientConfig::new(Arc::new(tls)));
    endpoint.connect(addr, "localhost").unwrap().await.is_ok()
}

#[test]
fn relay_check_reports_every_problem_and_starts_no_relay() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("relay.toml");
    fs::write(&file, "max-sesions = 5\nengine = \"warp\"\n").unwrap();
    let check = |args: &[&str]| {
        millrace().args(["relay", "--check", "--config", file.to_str().unwrap()]).args(args).output().unwrap()
    };
    let output = check(&["--idle-timeout=0"]);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr_of(&output);
    for part in
        ["relay.toml:1: max-sesions: ", "`max-sessions`", "relay.toml:2: engine: ", "--idle-timeout: "]
    {
        assert!(said.contains(part), "{part} is not in\n{said}");
    }

    fs::write(&file, "max-sessions = 5\n").unwrap();
    let output = check(&[]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr_of(&output));

    let output = check(&["--tls-cert=/nowhere/c.pem", "--tls-key=/nowhere/k.pem"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr_of(&output).contains("/nowhere/c.pem"), "{}", stderr_of(&output));
}

#[test]
fn relay_reports_its_version_and_ends_on_sigterm() {
    let mut relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let status = relay.status(); // exact: kernel forwarding and the listen addresses are fixed at the start
    assert_eq!((status.engine.name.as_str(), status.draining), ("user", false));
    assert!(status.engine.reason.contains("interface"), "auto says why: {}", status.engine.reason);
    assert_eq!(status.listen.len(), 1);
    assert_ne!(status.listen[0].port(), 0);

    let shown = millrace()
        .args(["status", "--http", &relay.http.to_string(), "--http-token-file"])
        .arg(relay.path("token"))
        .output()
        .unwrap();
    let shown = String::from_utf8(shown.stdout).unwrap();
    assert!(shown.contains("serving on 127.0.0.1:") && shown.contains("engine user"), "{shown}");
    let metrics = relay.get("/metrics"); // exact: the number of sessions stays 0, since no client connects
    assert!(metrics.contains("\nmillrace_relay_sessions 0\n"), "{metrics}");
    wait_for("fingerprint in the log", || relay.logged(&["self-signed", "sha256"]).then_some(()));

    relay.signal(Signal::SIGTERM);
    assert_eq!(relay.exit_code(), Some(0));
}

/// The drain timeout is far longer than the test's bound, so a drain that waited for absent peers would fail.
#[test]
fn drain_without_clients_or_with_a_hanging_upstream_ends_at_once() {
    let mut relay = RunningRelay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=600"]);
    relay.signal(Signal::SIGTERM);
    assert_eq!(relay.exit_code(), Some(0));

    let upstream = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let flags = [format!("--upstream={}", upstream.url()), "--upstream-tls-disable-verify".into()];
    let [url, verify] = flags.each_ref().map(String::as_str);
    let mut edge = RunningRelay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=600", url, verify]);
    wait_for("upstream session", || upstream_of(&edge).session);
    // The upstream relay is stopped with SIGSTOP, so it exists but does not answer.
    upstream.signal(Signal::SIGSTOP);
    edge.signal(Signal::SIGTERM);
    assert_eq!(edge.exit_code(), Some(0));
}

#[test]
fn a_second_signal_ends_a_drain() {
    let mut relay = RunningRelay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=600"]);
    let url = relay.url();
    let args = ["publish", "--name=live", "--generate", "--tls-disable-verify", &url];
    let _publisher = GuardedClient::start(millrace().args(args));
    let args = ["subscribe", "--name=live", "--stats", "--reconnect", "--tls-disable-verify", &url];
    let _subscriber = GuardedClient::start(millrace().args(args));
    wait_for("media", || (relay.status().totals.data_plane.packets > 0).then_some(()));
    relay.signal(Signal::SIGTERM);
    wait_for("the message about ending it", || {
        relay.logged(&["draining", "SIGTERM or Ctrl-C ends them at once"]).then_some(())
    });
    // Signals that arrive together count as one, so the signal is repeated.
    let end = wait_for("the end", || {
        relay.signal(Signal::SIGTERM);
        relay.ended()
    });
    assert_eq!(end.code(), Some(1));
}

/// `timeout`, `tini -g` and service managers signal a process and its group within milliseconds, which counts as one
/// signal.
#[test]
fn simultaneous_signals_do_not_skip_the_drain() {
    let mut relay = RunningRelay::start(tempfile::tempdir().unwrap(), &["--drain-timeout=1"]);
    let url = relay.url();
    let args = ["publish", "--name=live", "--generate", "--tls-disable-verify", &url];
    let _publisher = GuardedClient::start(millrace().args(args));
    wait_for("a session", || (relay.status().sessions.len() == 1).then_some(()));
    // The relay is stopped while both signals are sent, so that it gets them at the same time even on a busy machine.
    for signal in [Signal::SIGSTOP, Signal::SIGTERM, Signal::SIGINT, Signal::SIGCONT] {
        relay.signal(signal);
    }
    assert_eq!(relay.exit_code(), Some(0));
    assert!(relay.logged(&["the drain is over"])); // exact: the relay has ended, so its log is complete
}

#[test]
fn unreachable_upstream_is_reported_in_status_metrics_log_and_client() {
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    // The port is taken by a socket that accepts packets only from its own peer.
    taken.connect("127.0.0.1:9").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let upstream = format!("--upstream=moqt://{addr}");
    let edge = RunningRelay::start(
        tempfile::tempdir().unwrap(),
        &[&upstream, "--upstream-tls-disable-verify", "--idle-timeout=2"],
    );
    let shown = || {
        let token = edge.path("token");
        let args = ["status", "--http", &edge.http.to_string(), "--http-token-file"].map(str::to_owned);
        String::from_utf8(millrace().args(args).arg(token).output().unwrap().stdout).unwrap()
    };
    // exact: `upstream_up` is computed from the upstream's status, which the test has waited for
    let up = |up: u8| edge.get("/metrics").contains(&format!("\nmillrace_relay_upstream_up {up}\n"));
    wait_for("reason", || Some(upstream_of(&edge)).filter(|upstream| !upstream.reason.is_empty()));
    assert!(upstream_of(&edge).session.is_none() && up(0));
    assert!(shown().contains(&format!("upstream {addr} is away: ")), "{}", shown());
    wait_for("the log line", || edge.logged(&["WARN", "upstream", &addr]).then_some(()));
    let url = edge.url();
    let asked = ["subscribe", "--name=live", "--track=video", "--tls-disable-verify", &url];
    let said = stderr_of(&millrace().args(asked).output().unwrap());
    assert!(said.contains("upstream"), "{said}");

    drop(taken);
    let _there = RunningRelay::start_on(&addr, tempfile::tempdir().unwrap(), &[]);
    wait_for("upstream session", || upstream_of(&edge).session);
    assert!(up(1) && shown().contains(&format!("upstream {addr}: session ")), "{}", shown());
    let said = stderr_of(&millrace().args(asked).output().unwrap());
    assert!(said.contains("nobody publishes") && !said.contains("upstream"), "{said}");
}

#[test]
fn upstream_with_another_certificate_has_no_session() {
    let origin =
        RunningRelay::start(tempfile::tempdir().unwrap(), &["--tls-self-signed-out={dir}/relay.pem"]);
    let upstream = format!("--upstream=moqt://localhost:{}", origin.listen().port());
    let dir = tempfile::tempdir().unwrap();
    let other = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    fs::write(dir.path().join("root.pem"), other.cert.pem()).unwrap();
    let edge = RunningRelay::start(dir, &[&upstream, "--upstream-tls-root={dir}/root.pem"]);
    let reason = wait_for("reason", || {
        Some(upstream_of(&edge).reason).filter(|reason| reason.contains("certificate"))
    });
    assert!(upstream_of(&edge).session.is_none(), "{reason}");
    let root = format!("--upstream-tls-root={}", origin.path("relay.pem").display());
    let trusting = RunningRelay::start(tempfile::tempdir().unwrap(), &[&upstream, &root]);
    wait_for("upstream session", || upstream_of(&trusting).session);
    assert!(upstream_of(&edge).session.is_none());
}

#[test]
fn listen_port_without_an_address_listens_on_every_address() {
    let relay = RunningRelay::start_on(":0", tempfile::tempdir().unwrap(), &["--public"]);
    let listen = relay.status().listen.clone(); // exact: the listen addresses are fixed when the relay starts
    assert!(listen[0].is_ipv4() && listen.iter().all(|addr| addr.ip().is_unspecified()), "{listen:?}");
    let here = format!(":{}", relay.http.port());
    let token = relay.path("token");
    let asked =
        millrace().args(["status", "--http", &here, "--http-token-file"]).arg(token).output().unwrap();
    assert!(asked.status.success(), "{}", stderr_of(&asked));
    let closed = millrace().args(["relay", "--check", "--listen=:4443"]).output().unwrap();
    assert_eq!(closed.status.code(), Some(1));
    assert!(stderr_of(&closed).contains("or set --public to allow anyone"), "{}", stderr_of(&closed));
}

#[test]
fn gate_that_cannot_run_is_reported_if_auto_and_an_error_if_on() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &["--gate-sessions=5"]);
    let gate = relay.status().gate; // exact: the state of the gate is fixed when the relay starts
    assert!(!gate.on && gate.reason.starts_with("auto: no interface is named"), "{gate:?}");
    let words = ["without the gate", "auto: no interface is named"];
    wait_for("the log line", || relay.logged(&words).then_some(()));
    let refuses = |args: &[&str], why: &str| {
        let output =
            millrace().args(["relay", "--http=off", "--listen=127.0.0.1:0"]).args(args).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(stderr_of(&output).contains(why), "{}", stderr_of(&output));
    };
    refuses(&["--gate=on"], "the gate cannot run: ");
}

#[test]
fn taken_port_is_a_start_up_error_that_names_it() {
    let taken = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let addr = taken.local_addr().unwrap().to_string();
    let output =
        millrace().args(["relay", "--http=off", "--listen", &addr]).stdout(Stdio::null()).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr_of(&output).contains(&addr), "{}", stderr_of(&output));
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_certificate_file_is_reloaded_unless_it_is_malformed() {
    let dir = tempfile::tempdir().unwrap();
    let first = write_pair(dir.path());
    let relay = RunningRelay::start(dir, &["--tls-cert={dir}/cert.pem", "--tls-key={dir}/key.pem"]);
    let addr = relay.listen();
    assert!(shows(addr, &first).await);

    fs::write(relay.path("cert.pem"), "not a certificate").unwrap();
    wait_for("complaint", || relay.logged(&["ERROR", "cert.pem"]).then_some(()));
    assert!(shows(addr, &first).await, "the relay uses the broken certificate");

    let second = write_pair(relay.dir.path());
    relay.signal(Signal::SIGHUP);
    wait_for("new certificate", || relay.logged(&["INFO", "new certificate"]).then_some(()));
    assert!(shows(addr, &second).await);
    assert!(!shows(addr, &first).await);
}

/// Checks that the documentation names every reason for which the relay drops media or refuses a client.
#[test]
fn every_reason_to_drop_has_a_line_in_the_documentation() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let document = include_str!("../../docs/guide/operations.md");
    let table = document.split("| drops | what").nth(1).expect("a table").split("\n\n").next().unwrap();
    // exact: the set of drop counters is fixed; only their values change
    let drops = relay.status().drops.clone();
    assert!(drops.len() > 20, "the status lacks reasons: {drops:?}");
    for reason in drops.keys() {
        let is_named =
            table.lines().any(|line| line.starts_with("| `") && line.contains(&format!("`{reason}`")));
        assert!(is_named, "{reason} has no line");
    }
}

/// Starts a handshake with the relay, and closes the connection with this reason before the handshake is complete.
#[derive(Debug)]
struct Rude(&'static str);

impl ServerCertVerifier for Rude {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Err(rustls::Error::General(self.0.to_owned()))
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        rustls::crypto::ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}

/// A client without a certificate, a token or a session chooses text that the relay logs. The log line must be one line
/// without control characters.
#[tokio::test]
async fn failed_handshake_is_one_log_line_without_control_characters() {
    const FORGED: &str = "x\r\n2026-11-27T00:00:00Z  INFO millrace: session established \x1b[2J\u{9b}2J\x07";
    for (format, addr) in [("text", " addr="), ("json", r#""addr":""#)] {
        let dir = tempfile::tempdir().unwrap();
        let mut relay = millrace();
        relay.args([
            "relay",
            "--listen=127.0.0.1:0",
            "--http=127.0.0.1:0",
            &format!("--log-format={format}"),
        ]);
        relay.arg(format!("--http-token-file={}", dir.path().join("token").display()));
        let relay = GuardedClient::start(&mut relay);
        let log = relay.dir.path().join("stderr");
        let logged = |what: &str| {
            let lines = fs::read_to_string(&log).unwrap();
            lines
                .split_inclusive('\n')
                .find(|line| line.contains(what) && line.ends_with('\n'))
                .map(str::to_owned)
        };
        let serving = wait_for("the relay", || logged("serving"));
        let addr = serving.split_once(addr).unwrap().1.split([' ', '"']).next().unwrap();

        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let tls = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap();
        let verifier = Arc::new(Rude(FORGED));
        let mut tls = tls.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth();
        tls.alpn_protocols = vec![b"moqt-18".to_vec()];
        let tls = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
        let mut endpoint = quinn::Endpoint::client((Ipv4Addr::UNSPECIFIED, 0).into()).unwrap();
        endpoint.set_default_client_config(quinn::ClientConfig::new(Arc::new(tls)));
        endpoint.connect(addr.parse().unwrap(), "localhost").unwrap().await.unwrap_err();
        endpoint.wait_idle().await;

        let line = wait_for("the line", || logged("handshake failed"));
        assert!(line.contains("session established"), "the log line has no reason: {line:?}");
        // exact: the test has waited for the log line that it checks
        let all = fs::read_to_string(&log).unwrap();
        assert!(all.chars().all(|one| one == '\n' || !one.is_control()), "{format}: {line:?}");
        let forged = all.lines().filter(|line| line.contains("session established")).count();
        assert_eq!(forged, 1, "{format}: {all}");
        if format == "json" {
            all.lines().for_each(|line| drop(serde_json::from_str::<serde_json::Value>(line).unwrap()));
        }
    }
}

#[test]
fn full_log_disk_loses_only_log_lines() {
    let mut relay = RunningRelay::start(tempfile::tempdir().unwrap(), &["--log-file=/dev/full"]);
    wait_for("dropped log line", || (relay.status().totals.log_lines_dropped > 0).then_some(()));
    // exact: lost log lines do not change the relay's health, and the test has waited for a lost line
    assert_eq!(relay.health(), Some(200));
    let output = status(&relay).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.lines().any(|line| line.ends_with(" log lines lost")), "{text}");
    relay.signal(Signal::SIGINT);
    assert_eq!(relay.exit_code(), Some(0));
}

/// Makes a command that runs `millrace status` for this relay.
fn status(relay: &RunningRelay) -> Command {
    let mut command = millrace();
    command.arg("status").args(asked(relay));
    command
}

fn asked(relay: &RunningRelay) -> [String; 2] {
    [format!("--http={}", relay.http), format!("--http-token-file={}", relay.path("token").display())]
}

/// The broadcast's name has 60 characters, and the relay's address is IPv6. `millrace status --watch` must fit into a
/// window of 80x24 that then grows, and keys must end it.
#[test]
fn status_watch_fits_an_80x24_terminal_and_restores_it_on_exit() {
    const NAME: &str = "a-name-of-sixty-characters/that-somebody-has-really-given-it";
    const CTRL_C: &str = "\x03";
    let relay = RunningRelay::start_on("[::1]:0", tempfile::tempdir().unwrap(), &[]);
    let mut publish = millrace();
    publish.args(["publish", "--name", NAME, "--generate", "--rate-hz=50", "--tls-disable-verify"]);
    let _publisher = GuardedClient::start(publish.arg(relay.url()));
    wait_for("the publisher", || (!relay.status().sessions.is_empty()).then_some(()));
    let mut subscribe = millrace();
    subscribe.args(["subscribe", "--name", NAME, "--track=objects", "--reconnect", "--tls-disable-verify"]);
    let _subscriber = GuardedClient::start(subscribe.arg(relay.url()).stdout(Stdio::null()));
    wait_for("the track", || relay.status().tracks.iter().any(|track| track.largest.is_some()).then_some(()));
    wait_for("the log line", || relay.logged(&["published a namespace", NAME]).then_some(()));
    let none = format!("{NAME}/none");
    let trace = ["trace", "--duration=100ms", "--track", &none];
    let traced = millrace().args(trace).args(asked(&relay)).output().unwrap();
    let text = String::from_utf8(traced.stdout).unwrap();
    assert!(text.contains(&format!("# there is no track {none} yet\n")), "{text}");
    for end in ["q", CTRL_C] {
        let mut command = terminal::command(env!("CARGO_BIN_EXE_millrace"));
        command.args(["status", "--watch"]).args(asked(&relay));
        let mut live = PseudoTerminal::start(command, 80, 24);
        let picture = live.picture_with(CLEAR, "[::1]:");
        terminal::assert_fits(&picture, 80, 24);
        assert!(picture.last().unwrap().starts_with("q quits"), "{picture:#?}");
        assert!(!live.echoes());
        live.resize(160, 60);
        let picture = live.picture_with(CLEAR, NAME);
        terminal::assert_fits(&picture, 160, 60);
        assert!(picture.last().unwrap() == "q quits", "the picture is incomplete: {picture:#?}");
        live.types(end);
        assert!(live.ends().success());
        assert!(live.echoes(), "the terminal is as it was");
    }

    // Without `--watch`, the status is printed once, to the terminal or into a pipe. In a pipe, names are not cut and
    // there are no control sequences.
    let mut command = terminal::command(env!("CARGO_BIN_EXE_millrace"));
    command.arg("status").args(asked(&relay));
    let text = PseudoTerminal::start(command, 80, 24).rest();
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    terminal::assert_fits(&lines, 80, 1000);
    assert!(text.contains("a-name-of") && text.contains('…') && !text.contains('\x1b'), "{text}");
    let piped = String::from_utf8(status(&relay).output().unwrap().stdout).unwrap();
    assert!(piped.contains(NAME) && !piped.contains('\x1b'), "{piped}");
}

/// A client process that is killed when dropped. A failed test shows its output.
struct GuardedClient {
    child: Child,
    dir: TempDir,
}

impl GuardedClient {
    fn start(command: &mut Command) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let said = fs::File::create(dir.path().join("stderr")).unwrap();
        Self { child: command.stderr(said).spawn().unwrap(), dir }
    }
}

impl Drop for GuardedClient {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        show_log_on_panic("a client", &self.dir.path().join("stderr"));
    }
}

#[test]
fn garbage_flood_creates_no_session() {
    let relay = RunningRelay::start(tempfile::tempdir().unwrap(), &[]);
    let addr = relay.listen();
    let url = relay.url();
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let mut random = fastrand::Rng::with_seed(7);
    for round in 0..20_000 {
        let mut datagram = [0; 1400];
        random.fill(&mut datagram);
        if round % 2 == 0 {
            // The first byte and the version are those of a long header of QUIC version 1, so that the relay parses as
            // much as possible.
            datagram[0] |= 0xc0;
            datagram[1..5].copy_from_slice(&1_u32.to_be_bytes());
        }
        let len = random.usize(1..datagram.len());
        socket.send_to(&datagram[..len], addr).unwrap();
    }
    // When one good session is served afterwards, the relay has read the whole flood.
    let asked = ["subscribe", "--name=live", "--track=video", "--tls-disable-verify", &url];
    let said = stderr_of(&millrace().args(asked).output().unwrap());
    assert!(said.contains("nobody publishes"), "{said}");
    // exact: the relay's health is final, since the relay has read all datagrams of the flood
    assert_eq!(relay.health(), Some(200));
    let own = |status: &Status| status.totals.sessions > 0 && status.sessions.is_empty();
    let status = wait_until("the end of that session", || relay.status(), own);
    assert_eq!(status.totals.sessions, 1, "another session was created");
}

const SECRET: &str = "0123456789abcdef0123456789abcdef";

#[test]
fn check_lists_token_keys_and_refuses_invalid_secrets() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let pair = rcgen::KeyPair::generate().unwrap();
    let jwks = r#"[{"kty": "EC", "crv": "P-256", "x": "AAAA", "y": "AAAA"}]"#;
    for (name, bytes) in [
        ("secret", SECRET.as_bytes()),
        ("public.pem", pair.public_key_pem().as_bytes()),
        ("public.der", &pair.subject_public_key_info()),
        ("latin1.pem", &[b"# f\xfcr alle\n", pair.public_key_pem().as_bytes()].concat()),
        ("array.json", jwks.as_bytes()),
        ("marked.json", format!("\u{feff}{{\"keys\": {jwks}}}").as_bytes()),
    ] {
        fs::write(path(name), bytes).unwrap();
    }
    let check = |keys: &[&str], secrets: &[&str]| {
        let keys = keys.iter().map(|name| format!("--token-keys={}", path(name)));
        let secrets = secrets.iter().map(|name| format!("--token-secrets={}", path(name)));
        millrace().args(["relay", "--check"]).args(keys.chain(secrets)).output().unwrap()
    };
    let good = check(&["public.pem", "latin1.pem"], &["secret"]);
    let said = String::from_utf8(good.stdout).unwrap();
    assert!(said.contains("token keys: 1 HMAC secret, 2 P-256\n"), "{said}");
    assert!(said.contains("warning: ") && said.contains("[[issuer]]"), "{said}");
    for name in ["public.der", "array.json", "marked.json", "secret"] {
        let output = check(&[name], &[]);
        let said = stderr_of(&output);
        assert!(!output.status.success() && said.contains(&path(name)), "{name}: {said}");
    }
    for name in ["public.pem", "public.der", "latin1.pem", "array.json", "marked.json"] {
        let output = check(&[], &[name]);
        let said = stderr_of(&output);
        let names = said.contains(&path(name)) && said.contains("no secret") && said.contains("token-keys");
        assert!(!output.status.success() && names, "{name}: {said}");
    }
}

#[test]
fn reload_that_would_open_a_non_loopback_relay_to_anyone_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let settings = dir.path().join("relay.toml");
    let secret = dir.path().join("secret");
    fs::write(&secret, SECRET).unwrap();
    let keys = format!("token-secrets = ['{}']\n", secret.display());
    fs::write(&settings, format!("listen = ['0.0.0.0:0']\n{keys}")).unwrap();
    let relay = RunningRelay::start_by_file(dir, &[]);
    wait_for("the number of keys in the log", || {
        relay.logged(&["access rules", "1 HMAC secret"]).then_some(())
    });
    // The new settings would open the relay to anyone, which is allowed on loopback only. The relay still listens on
    // all addresses, so it refuses the new settings.
    fs::write(&settings, "listen = ['127.0.0.1:0']\n").unwrap();
    relay.signal(Signal::SIGHUP);
    // exact: `wait_until` rereads the access rules in the status until they are as expected
    let access = || relay.status().access.clone();
    let access = wait_until("the settings are refused", access, |access| access.unread.len() == 1);
    assert!(!access.open && access.keys == 1 && access.unread[0].what == "settings", "{access:?}");
    assert!(access.unread[0].reason.contains("0.0.0.0:"), "{access:?}");
    // exact: the relay sets the error of a reload before the access status, which the test has waited for
    let reload = relay.status().reload.clone().unwrap();
    assert!(reload.error.as_ref().is_some_and(|error| error.contains("0.0.0.0:")), "{reload:?}");
    wait_for("the log line", || relay.logged(&["new settings are not usable", "0.0.0.0:"]).then_some(()));
    // With `public = true` in the settings, the reload may open the relay to anyone.
    fs::write(&settings, "listen = ['127.0.0.1:0']\npublic = true\n").unwrap();
    relay.signal(Signal::SIGHUP);
    // exact: `wait_until` rereads the access rules in the status until they are as expected
    let access = || relay.status().access.clone();
    wait_until("the open relay", access, |access| access.open && access.unread.is_empty());
    wait_for("a warning", || relay.logged(&["anyone who reaches this relay"]).then_some(()));
    // exact: the relay stores the result of a reload before it changes the access rules
    assert_eq!(relay.status().reload.clone().unwrap().error, None);
}

#[test]
fn the_service_manager_is_notified_of_start_reload_and_end() {
    let dir = tempfile::tempdir().unwrap();
    let manager = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let told = || {
        let mut text = [0; 128];
        let bytes = manager.recv(&mut text).unwrap();
        String::from_utf8_lossy(&text[..bytes]).into_owned()
    };
    let mut relay = millrace()
        .args(["relay", "--listen=127.0.0.1:0", "--http=off"])
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let signal = |signal| kill(Pid::from_raw(relay.id().try_into().unwrap()), signal).unwrap();
    assert_eq!(told(), "READY=1");
    signal(Signal::SIGHUP);
    assert!(told().starts_with("RELOADING=1\nMONOTONIC_USEC="));
    assert_eq!(told(), "READY=1");
    signal(Signal::SIGTERM);
    assert_eq!(told(), "STOPPING=1");
    assert!(relay.wait().unwrap().success());
}

#[test]
fn unreadable_access_files_grant_no_access_and_are_named() {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in [("one", SECRET), ("two", &"2".repeat(32)), ("revoked", "a\n")] {
        fs::write(dir.path().join(name), text).unwrap();
    }
    let flags = ["--token-secrets={dir}/one", "--token-secrets={dir}/two", "--token-revoked={dir}/revoked"];
    let relay = RunningRelay::start(dir, &flags);
    // exact: `wait_until` rereads the access rules in the status until they are as expected
    let access = || relay.status().access.clone();
    // exact: callers have waited until the relay has noticed the change of its access files
    let healthz = || relay.get("/healthz");
    assert_eq!(healthz(), "ok\n"); // exact: the relay's health has not changed since the start
    fs::remove_file(relay.path("one")).unwrap();
    wait_until("the unreadable key to be removed", access, |access| access.keys == 1 && !access.open);
    // exact: the health report includes the unreadable key file, which the relay has already noticed
    let said = healthz();
    assert!(said.starts_with("ok\nunread: 1 "), "{said}");
    // exact: the metric counts the unreadable key file, which the relay has already noticed
    let metrics = relay.get("/metrics");
    assert!(metrics.contains("\nmillrace_relay_access_unread 1\n"), "{metrics}");
    // Token IDs stay revoked when the file that lists them becomes unreadable. Removing the last key that signs tokens
    // gives nobody the right to publish or subscribe.
    fs::write(relay.path("revoked"), "a\nb\n").unwrap();
    wait_until("another ID is revoked", access, |access| access.revoked == 2);
    fs::write(relay.path("two"), "").unwrap();
    wait_until("no key to be left", access, |access| access.keys == 0 && !access.open);
    fs::remove_file(relay.path("revoked")).unwrap();
    wait_until("three files to be named", access, |access| access.unread.len() == 3 && access.revoked == 2);
    wait_for("the files' names in the log", || {
        relay.logged(&["not usable", "/revoked", "stay revoked"]).then_some(())
    });
}

/// The relays log at the most verbose level. Valid, revoked and forged tokens arrive over QUIC and WebTransport, and
/// are sent upstream. None may appear in a log or a status.
#[test]
fn tokens_and_secrets_are_in_no_log_and_no_status() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("secret"), SECRET).unwrap();
    fs::write(dir.path().join("other"), "2".repeat(32)).unwrap();
    let make = |id: &str, secret: &str| {
        let flags = ["token", "make", "--get=live", "--subject=alice", &format!("--id={id}")];
        let made = millrace().args(flags).arg("--secret").arg(dir.path().join(secret)).output().unwrap();
        String::from_utf8(made.stdout).unwrap().trim_end().to_owned()
    };
    let [good, revoked, upstream] = ["good", "revoked", "upstream"].map(|id| make(id, "secret"));
    let forged = make("forged", "other");
    fs::write(dir.path().join("revoked"), "revoked\n").unwrap();
    let flags = ["--token-secrets={dir}/secret", "--token-revoked={dir}/revoked", "--log-level=trace"];
    let relay = RunningRelay::start(dir, &flags);
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("upstream"), &upstream).unwrap();
    let to_it = format!("--upstream={}", relay.url());
    let flags = ["--upstream-token={dir}/upstream", "--upstream-tls-disable-verify", "--log-level=trace"];
    let edge = RunningRelay::start(dir, &[&flags[..], &[&to_it]].concat());

    let watch = |scheme: &str, token: &str| {
        let url = format!("{scheme}://{}/?jwt={token}", relay.listen());
        let mut command = millrace();
        command.args(["subscribe", "--name=live", "--tls-disable-verify", &url]).stdin(Stdio::null());
        WaitingClient(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    };
    let watchers =
        ["moqt", "https"].map(|scheme| [&good, &revoked, &forged].map(|token| watch(scheme, token)));
    let log = |relay: &RunningRelay| fs::read_to_string(relay.path("stderr")).unwrap();
    let let_in = || {
        log(&relay)
            .lines()
            .filter(|line| line.contains("session established") && line.contains("alice"))
            .count()
    };
    wait_until("two watchers, and the other relay", let_in, |let_in| *let_in >= 3);
    for reason in ["the token was revoked", "no key fits the token's signature"] {
        let is_it = |line: &&str| line.contains("closing the session") && line.contains(reason);
        wait_until(reason, || log(&relay).lines().filter(is_it).count(), |refused| *refused >= 2);
    }
    drop(watchers);
    for relay in [&relay, &edge] {
        // exact: the relay has already logged and counted everything about these tokens
        let said = log(relay) + &relay.get("/status") + &relay.get("/metrics");
        assert!(said.len() > 10_000, "the log is too short to be a test: {}", said.len());
        for token in [&good, &revoked, &upstream, &forged] {
            let signature = token.rsplit('.').next().unwrap();
            assert!(
                !said.contains(token.as_str()) && !said.contains(signature),
                "{token} is in the log or the status"
            );
        }
        assert!(!said.contains(SECRET), "the secret is in the log or the status");
    }
}

/// A client process that runs until it is dropped, which kills it.
struct WaitingClient(Child);

impl Drop for WaitingClient {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
