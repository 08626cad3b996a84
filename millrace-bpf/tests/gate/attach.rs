//! On and off interfaces.

use std::process::Command;

use millrace_bpf::gate::{Gate, Pass, Policy};
use millrace_bpf::xdp::Mode;

use crate::net::{Network, ifindex, inside, ip};
use crate::{apply, config, gate, root};

fn shows_xdp(namespace: &str, interface: &str) -> bool {
    let shown = Command::new("ip").args(["-n", namespace, "link", "show", "dev", interface]).output();
    String::from_utf8_lossy(&shown.expect("ip").stdout).contains("xdp")
}

#[test]
fn attaches_and_leaves() {
    if !root("attaches_and_leaves") {
        return;
    }
    let network = Network::new("gate");
    let (veth, lo) = (ifindex(&network.relay, "west"), ifindex(&network.relay, "lo"));
    let gate = gate(Policy::default());
    let other = Gate::load(&config()).expect("a gate");
    inside(&network.relay, || {
        assert_eq!(gate.attach(veth, Mode::Auto).expect("native"), Mode::Native);
        // The loopback interface's driver has no XDP.
        assert_eq!(gate.attach(lo, Mode::Auto).expect("generic"), Mode::Generic);
        assert!(gate.attach(lo, Mode::Native).is_err());
        for mode in [Mode::Auto, Mode::Native] {
            let error = other.attach(veth, mode).expect_err("taken").to_string();
            assert!(error.contains("another XDP program is there"), "{error}");
        }
        assert!(other.attach(1 << 20, Mode::Auto).is_err());
        gate.watch(veth).expect("watched");
        gate.watch(veth).expect("once is enough");
    });
    assert!(shows_xdp(&network.relay, "west") && shows_xdp(&network.relay, "lo"));
    gate.detach();
    assert!(!shows_xdp(&network.relay, "west") && !shows_xdp(&network.relay, "lo"));
    inside(&network.relay, || assert_eq!(other.attach(veth, Mode::Generic).expect("generic"), Mode::Generic));
    drop(other);
    assert!(!shows_xdp(&network.relay, "west"));
    // An interface that goes takes the program along.
    inside(&network.relay, || gate.attach(veth, Mode::Native).expect("native"));
    ip(&format!("-n {} link del west", network.relay));
    gate.detach();
}

/// Packets of this host to itself, in generic mode: long before a process sees them.
#[test]
fn generic_mode_decides() {
    if !root("generic_mode_decides") {
        return;
    }
    let network = Network::new("gategen");
    let gate = gate(Policy::default());
    apply(&gate, Policy::default());
    let lo = ifindex(&network.relay, "lo");
    inside(&network.relay, || gate.attach(lo, Mode::Generic).expect("generic"));
    ip(&format!("-n {} link set lo up", network.relay));
    let server = crate::net::socket(&network.relay, "127.0.0.1:443".parse().expect("an address"));
    let client = crate::net::socket(&network.relay, "127.0.0.1:0".parse().expect("an address"));
    client.connect(server.local_addr().expect("an address")).expect("connect");
    for payload in [&crate::frame::short(&[], 20), &crate::frame::short(&[], 40)] {
        client.send(payload).expect("send");
    }
    let mut buffer = [0; 100];
    assert_eq!(server.recv(&mut buffer).expect("the one that passes"), 40);
    let statistics = gate.statistics().expect("statistics");
    let web = statistics.scope("web").expect("web");
    assert_eq!(web.rule(millrace_bpf::gate::Rule::Short).packets, 1);
    assert_eq!(web.pass(Pass::Unknown).packets, 1);
}
