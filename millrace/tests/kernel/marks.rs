//! Tests of DSCP and ECN marks on sent packets.

use millrace_lab::lab::LabNode;
use millrace_relay_daemon::{
    config::{EngineChoice, Settings},
    status::RelaySessionStatus,
};

use crate::{
    needs_root,
    net::{GroupStream, KernelNetwork, SHOW, cast, play, subscribers},
};

const DSCP: &str = "af41";

/// Adds firewall rules to a host of the emulated network that count the relay's packets with [`DSCP`], with another
/// DSCP, and with ECT(0). With `marks`, packets with ECT(0) are marked CE.
fn count(node: &LabNode, marks: bool) {
    let mark = if marks { "ip ecn set ce" } else { "" };
    let rules = format!(
        "table ip marks {{
            chain c {{
            type filter hook prerouting priority 0;
            udp sport 4443 ip dscp {DSCP} counter comment \"as wanted\"
            udp sport 4443 ip dscp != {DSCP} counter comment \"other\"
            udp sport 4443 ip ecn ect0 counter {mark} comment \"ect0\"
            }}
        }}"
    );
    let output = node.command("nft").arg(rules).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Returns the number of packets that a rule has counted.
fn counted(node: &LabNode, rule: &str) -> u64 {
    let output = node.command("nft").args(["list", "ruleset"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let line = text.lines().find(|line| line.contains(&format!("comment \"{rule}\""))).unwrap();
    let packets = line.split("packets ").nth(1).unwrap();
    packets.split(' ').next().unwrap().parse().unwrap()
}

/// Plays media with these settings. Returns the status of a subscriber's session, and how many of the packets to it had
/// ECT(0).
fn subscriber(engine: EngineChoice, ecn: bool, marks: bool) -> (RelaySessionStatus, u64) {
    let net = KernelNetwork::new(1, false, |config| {
        config.engine = engine;
        config.dscp = DSCP.parse().unwrap();
        config.ecn = ecn;
    });
    let node = net.lab.node("sub1").unwrap();
    count(node, marks);
    let cast = cast(&net, &["sub1"]);
    let status = play(&net, cast, &GroupStream { groups: 10, ..SHOW }, |_| {});
    assert_eq!(counted(node, "other"), 0, "{engine:?}");
    let session = subscribers(&status).next().unwrap().clone();
    assert!(counted(node, "as wanted") > session.data_plane.packets, "{engine:?}");
    (session, counted(node, "ect0"))
}

#[test]
fn packets_have_the_configured_dscp_and_ecn_ce_marks_are_counted() {
    needs_root!(packets_have_the_configured_dscp_and_ecn_ce_marks_are_counted);
    for engine in [EngineChoice::User, EngineChoice::Kernel] {
        let (session, ect0) = subscriber(engine, false, false);
        assert_eq!((session.ecn.as_str(), ect0), ("off", 0), "{engine:?}");

        let (session, ect0) = subscriber(engine, true, false);
        assert_eq!((session.ecn.as_str(), session.packets_marked), ("capable", 0), "{engine:?}");
        assert!(ect0 > 10, "{engine:?} {ect0}, after the ten that try it");

        let (session, ect0) = subscriber(engine, true, true);
        assert_eq!(session.ecn, "capable", "{engine:?} {session:#?}");
        assert!(session.packets_marked > 0 && session.packets_marked <= ect0, "{engine:?} {session:#?}");
    }
}

#[test]
fn default_settings_set_neither_dscp_nor_ecn() {
    let config = millrace_relay_daemon::config::Config::new(Settings::default(), None).unwrap();
    assert_eq!((config.dscp.to_string().as_str(), config.ecn), ("0", false));
}
