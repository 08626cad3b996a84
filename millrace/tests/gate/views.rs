//! Tests of `millrace gate status`, `top` and `policy` on a terminal.

use std::{net::UdpSocket, process::Command};

use crate::{
    process::GateProcess,
    support::{GateSite, PORT, inside, is_root, wait_for},
    terminal::{self, CLEAR, PseudoTerminal, assert_fits},
};

const SCOPE: &str = "a-scope-of-sixty-characters-that-somebody-has-really-given-x";
const CLIENT: &str = "fd97:1234:5678:9abc:def0:1234:5678:9abc";
const CTRL_C: &str = "\x03";

fn policy() -> String {
    format!(
        "[[scope]]\nname = \"{SCOPE}\"\nport = {PORT}\n\n[scope.rules]\noptions = \"enforce\"\nversion = \"enforce\"\n\
         unknown_id = \"off\"\nquota = {{ connections = 2 }}\nclient_initials = {{ per_second = 1000 }}\n\
         client_packets = {{ per_second = 1000 }}\nclient_bytes = {{ per_second = 1000000 }}\n\
         unknown_initials = {{ per_second = 1000 }}\nunknown_packets = {{ per_second = 1000 }}\n"
    )
}

fn ip(args: &[&str]) {
    assert!(Command::new("ip").args(args).status().unwrap().success(), "{args:?}");
}

fn shown(site: &GateSite, verb: &str, columns: u16, rows: u16) -> PseudoTerminal {
    let mut command = terminal::command(env!("CARGO_BIN_EXE_millrace"));
    command.args(["gate", verb, "--socket"]).arg(site.path("gate.sock"));
    PseudoTerminal::start(command, columns, rows)
}

#[test]
fn gate_views_fit_the_terminal() {
    if !is_root() {
        return;
    }
    let site = GateSite::new("views", &policy());
    ip(&["-n", &site.clients, "addr", "add", &format!("{CLIENT}/16"), "dev", "eth", "nodad"]);
    ip(&["-n", &site.server, "route", "add", "fd97::/16", "dev", "eth"]);
    let gate = GateProcess::start(&site, &["--policy=gate.toml", "--http=off"]);
    let client = inside(&site.clients, || UdpSocket::bind((CLIENT, 0)).unwrap());
    client.connect(("fd97::1", PORT)).unwrap();
    wait_for("a sample", || {
        client.send(&[0x40; 5]).unwrap();
        !gate.status().recent.is_empty()
    });
    gate.succeed(&["block", "2001:db8:1234:5678:9abc:def0:1234:5678", "--scope", SCOPE, "--for=2h"]);

    let text = shown(&site, "status", 80, 24).rest();
    let lines: Vec<String> = text.lines().map(str::to_owned).collect();
    assert_fits(&lines, 80, 1000);
    for part in ["a-scope-", "…", "short", "2001:db8:1234:5678:9abc:def0:1234:5678"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    assert!(!text.contains('\x1b'), "{text}");
    let piped = gate.succeed(&["status"]);
    assert!(piped.contains(SCOPE) && !piped.contains('\x1b'), "{piped}");
    assert_eq!(shown(&site, "policy", 80, 24).rest().replace("\r\n", "\n"), policy());

    let mut trace = shown(&site, "trace", 80, 24);
    trace.wait_for("that the gate refuses");
    client.send(&[0x40; 5]).unwrap();
    let text = trace.wait_for("refused, short, 5 B");
    assert!(text.contains(CLIENT) && text.contains(SCOPE), "{text}");
    trace.types(CTRL_C);
    let lines: Vec<String> = (text + &trace.rest()).lines().map(str::to_owned).collect();
    assert_fits(&lines, 80, 24);
    // The terminal echoes Ctrl-C as `^C` in front of the last line.
    assert!(lines.last().unwrap().ends_with("# packets: 1 shown, 0 left out, 0 lost"), "{lines:#?}");

    for end in ["q", CTRL_C] {
        let mut top = shown(&site, "top", 80, 24);
        let picture = top.picture_with(CLEAR, CLIENT);
        assert_fits(&picture, 80, 24);
        assert!(picture.iter().any(|line| line.contains("PACKETS/s")), "{picture:#?}");
        assert!(picture.last().unwrap().starts_with("q quits"), "{picture:#?}");
        assert!(!top.echoes());
        top.resize(160, 60);
        let picture = top.picture_with(CLEAR, SCOPE);
        assert_fits(&picture, 160, 60);
        assert!(picture.iter().any(|line| line.contains("unknown_packets")), "all rules: {picture:#?}");
        assert_eq!(picture.last().unwrap(), "q quits");
        top.types(end);
        assert!(top.ends().success(), "{end:?}");
        assert!(top.echoes(), "the terminal is as it was");
    }
}
