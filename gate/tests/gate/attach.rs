//! Tests of attaching the gate to interfaces, and detaching it.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;

use millrace_gate::kernel::{Config, GateRules, LoadedGate, Pass, PolicyRules, TcPosition};
use millrace_kernel::xdp::XdpMode;

use crate::frame::{LongPacketType, long};
use crate::net::{NamespaceNetwork, ifindex, inside, ip};
use crate::state::tracked;
use crate::{PORT, apply, config, gate, root, scope};

fn shows_xdp(namespace: &str, interface: &str) -> bool {
    let shown = Command::new("ip").args(["-n", namespace, "link", "show", "dev", interface]).output();
    String::from_utf8_lossy(&shown.expect("ip").stdout).contains("xdp")
}

#[test]
fn gate_attaches_and_detaches() {
    if !root("gate_attaches_and_detaches") {
        return;
    }
    let network = NamespaceNetwork::new("gate");
    let veth = ifindex(&network.relay, "west");
    let lo = ifindex(&network.relay, "lo");
    let gate = gate(PolicyRules::default());
    let other = LoadedGate::load(&config()).expect("a gate");
    inside(&network.relay, || {
        assert_eq!(gate.attach(veth, XdpMode::Auto).expect("native"), XdpMode::Native);
        // The loopback interface's driver has no XDP.
        assert_eq!(gate.attach(lo, XdpMode::Auto).expect("generic"), XdpMode::Generic);
        assert!(gate.attach(lo, XdpMode::Native).is_err());
        for mode in [XdpMode::Auto, XdpMode::Native] {
            let error = other.attach(veth, mode).expect_err("taken").to_string();
            assert!(error.contains("another gate at XDP"), "{error}");
        }
        assert!(other.attach(1 << 20, XdpMode::Auto).is_err());
        gate.watch(veth).expect("watched");
        gate.watch(veth).expect("once is enough");
    });
    assert!(shows_xdp(&network.relay, "west") && shows_xdp(&network.relay, "lo"));
    gate.detach();
    assert!(!shows_xdp(&network.relay, "west") && !shows_xdp(&network.relay, "lo"));
    inside(&network.relay, || {
        assert_eq!(other.attach(veth, XdpMode::Generic).expect("generic"), XdpMode::Generic)
    });
    drop(other);
    assert!(!shows_xdp(&network.relay, "west"));
    // When the interface is deleted, the kernel also detaches the gate's program from it.
    inside(&network.relay, || gate.attach(veth, XdpMode::Native).expect("native"));
    ip(&format!("-n {} link del west", network.relay));
    gate.detach();
}

/// Sends packets over the loopback interface, whose driver has no XDP.
#[test]
fn gate_attached_in_generic_xdp_mode_refuses_packets() {
    if !root("gate_attached_in_generic_xdp_mode_refuses_packets") {
        return;
    }
    let network = NamespaceNetwork::new("gategen");
    let gate = gate(PolicyRules::default());
    apply(&gate, PolicyRules::default());
    let lo = ifindex(&network.relay, "lo");
    inside(&network.relay, || gate.attach(lo, XdpMode::Generic).expect("generic"));
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
    assert_eq!(web.rule(millrace_gate::kernel::Rule::Short).packets, 1);
    assert_eq!(web.pass(Pass::Unknown).packets, 1);
}

/// Uses a bridge, which gets packets that the interfaces below it may have merged.
#[test]
fn stacked_interfaces_are_refused_in_generic_mode() {
    if !root("stacked_interfaces_are_refused_in_generic_mode") {
        return;
    }
    let network = NamespaceNetwork::new("gatestack");
    ip(&format!("-n {} link add stacked type bridge", network.relay));
    let stacked = ifindex(&network.relay, "stacked");
    let gate = gate(PolicyRules::default());
    inside(&network.relay, || {
        for mode in [XdpMode::Auto, XdpMode::Generic] {
            let error = gate.attach(stacked, mode).expect_err("merged").to_string();
            assert!(
                error.contains("it is a bridge, and the interfaces below it may merge packets"),
                "{error}"
            );
        }
    });
    assert!(!shows_xdp(&network.relay, "stacked"));
}

/// Loads a BPF program that only returns this verdict, to stand for another application's program.
fn bare_program(kind: u32, verdict: u8) -> OwnedFd {
    // The two BPF instructions are `r0 = verdict` and `exit`.
    let code: [[u8; 8]; 2] = [[0xb7, 0, 0, 0, verdict, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];
    // SAFETY: the instructions outlive the call, and a null pointer means no options.
    let program = unsafe {
        libbpf_sys::bpf_prog_load(
            kind,
            c"bare".as_ptr(),
            c"GPL".as_ptr(),
            code.as_ptr().cast(),
            code.len() as libbpf_sys::size_t,
            std::ptr::null_mut(),
        )
    };
    assert!(program >= 0, "the program loads");
    // SAFETY: `bpf_prog_load` has made the descriptor `program`, which nobody else owns.
    unsafe { OwnedFd::from_raw_fd(program) }
}

/// Attaches the program by a link, and returns the link. Dropping the link detaches the program.
fn bare_link(program: &OwnedFd, ifindex: i32, to: u32) -> Result<OwnedFd, i32> {
    // SAFETY: `bpf_link_create` accepts a null pointer in place of options.
    let link = unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), ifindex, to, std::ptr::null()) };
    if link < 0 {
        return Err(-link);
    }
    // SAFETY: `bpf_link_create` has made the descriptor `link`, which nobody else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(link) })
}

#[test]
fn gate_does_not_attach_where_another_xdp_program_is_attached() {
    if !root("gate_does_not_attach_where_another_xdp_program_is_attached") {
        return;
    }
    let network = NamespaceNetwork::new("gateother");
    let west = ifindex(&network.relay, "west");
    let program = bare_program(libbpf_sys::BPF_PROG_TYPE_XDP, 2);
    let gate = gate(PolicyRules::default());
    inside(&network.relay, || {
        let link = bare_link(&program, west, libbpf_sys::BPF_XDP).expect("attached");
        for mode in [XdpMode::Auto, XdpMode::Native, XdpMode::Generic] {
            let error = gate.attach(west, mode).expect_err("taken").to_string();
            assert!(error.contains("another XDP program is attached"), "{error}");
        }
        drop(link);
        gate.attach(west, XdpMode::Auto).expect("attached");
        assert!(bare_link(&program, west, libbpf_sys::BPF_XDP).is_err(), "and the other way round");
    });
}

/// Attaches a program at TCX egress that ends the chain, so that no program after it sees the packets, until the link
/// is dropped. Returns `None` on kernels without TCX (before 6.6).
fn end_of_the_chain(ifindex: i32) -> Option<OwnedFd> {
    const TCX_PASS: u8 = 0;
    let program = bare_program(libbpf_sys::BPF_PROG_TYPE_SCHED_CLS, TCX_PASS);
    match bare_link(&program, ifindex, libbpf_sys::BPF_TCX_EGRESS) {
        Err(nix::libc::EINVAL) => None,
        link => Some(link.expect("the link is made")),
    }
}

/// Checks that the setting `watch` decides the position of the gate's egress program.
#[test]
fn setting_watch_places_the_gates_egress_program_first_or_last_in_tcx() {
    if !root("setting_watch_places_the_gates_egress_program_first_or_last_in_tcx") {
        return;
    }
    let network = NamespaceNetwork::new("gatepos");
    let west = ifindex(&network.relay, "west");
    let answer = long(LongPacketType::Initial, 1, &[2; 4], &[0x5e; 8], &[], 1200);
    for (watch, seen) in [(TcPosition::Last, 0), (TcPosition::First, 1)] {
        let gate = LoadedGate::load(&Config { watch, ..config() }).expect("a gate");
        let rules = GateRules { scopes: vec![scope("web", PORT, tracked(&[]))], ..GateRules::default() };
        gate.apply(&rules).expect("rules");
        let Some(_end) = inside(&network.relay, || end_of_the_chain(west)) else {
            println!(
                "SKIP setting_watch_places_the_gates_egress_program_first_or_last_in_tcx: this kernel has no TCX"
            );
            return;
        };
        inside(&network.relay, || gate.watch(west)).expect("watched");
        let server = crate::net::socket(&network.relay, "10.98.1.1:443".parse().expect("an address"));
        // The kernel may first have to resolve the client's link address. So the test waits until the server's packet
        // arrives at the client.
        let client = crate::net::socket(&network.publisher, "10.98.1.2:40000".parse().expect("an address"));
        server.send_to(&answer, client.local_addr().expect("an address")).expect("sent");
        assert_eq!(client.recv(&mut [0; 2048]).expect("the answer"), answer.len());
        gate.maintain().expect("maintenance");
        let handshakes = gate.tables().into_iter().find(|table| table.name == "handshakes").expect("a table");
        assert_eq!(handshakes.entries, seen, "{watch:?}");
    }
}
