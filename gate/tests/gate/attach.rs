//! On and off interfaces.

#![allow(unsafe_code)]

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process::Command;

use millrace_gate::kernel::{Config, Gate, Pass, Policy, Position, Rules};
use millrace_kernel::xdp::Mode;

use crate::frame::{Type, long};
use crate::net::{Network, ifindex, inside, ip};
use crate::state::tracked;
use crate::{PORT, apply, config, gate, root, scope};

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
            assert!(error.contains("another gate at XDP"), "{error}");
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
    assert_eq!(web.rule(millrace_gate::kernel::Rule::Short).packets, 1);
    assert_eq!(web.pass(Pass::Unknown).packets, 1);
}

/// What a bridge gets was merged by the interfaces below it, and has no driver of its own.
#[test]
fn stacked_interfaces_are_refused_in_generic_mode() {
    if !root("stacked_interfaces_are_refused_in_generic_mode") {
        return;
    }
    let network = Network::new("gatestack");
    ip(&format!("-n {} link add stacked type bridge", network.relay));
    let stacked = ifindex(&network.relay, "stacked");
    let gate = gate(Policy::default());
    inside(&network.relay, || {
        for mode in [Mode::Auto, Mode::Generic] {
            let error = gate.attach(stacked, mode).expect_err("merged").to_string();
            assert!(
                error.contains("it is a bridge, and the interfaces below it may merge packets"),
                "{error}"
            );
        }
    });
    assert!(!shows_xdp(&network.relay, "stacked"));
}

/// A program of somebody else that only returns a verdict.
fn bare_program(kind: u32, verdict: u8) -> OwnedFd {
    // r0 = verdict; exit
    let code: [[u8; 8]; 2] = [[0xb7, 0, 0, 0, verdict, 0, 0, 0], [0x95, 0, 0, 0, 0, 0, 0, 0]];
    // SAFETY: the instructions outlive the call; no options.
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
    // SAFETY: the call has made the descriptor.
    unsafe { OwnedFd::from_raw_fd(program) }
}

/// Attached until the link is dropped; or the error.
fn bare_link(program: &OwnedFd, ifindex: i32, to: u32) -> Result<OwnedFd, i32> {
    // SAFETY: no options.
    let link = unsafe { libbpf_sys::bpf_link_create(program.as_raw_fd(), ifindex, to, std::ptr::null()) };
    if link < 0 {
        return Err(-link);
    }
    // SAFETY: the call has made the descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(link) })
}

#[test]
fn a_program_of_somebody_else_is_respected() {
    if !root("a_program_of_somebody_else_is_respected") {
        return;
    }
    let network = Network::new("gateother");
    let west = ifindex(&network.relay, "west");
    let program = bare_program(libbpf_sys::BPF_PROG_TYPE_XDP, 2);
    let gate = gate(Policy::default());
    inside(&network.relay, || {
        let link = bare_link(&program, west, libbpf_sys::BPF_XDP).expect("attached");
        for mode in [Mode::Auto, Mode::Native, Mode::Generic] {
            let error = gate.attach(west, mode).expect_err("taken").to_string();
            assert!(error.contains("another XDP program is there"), "{error}");
        }
        drop(link);
        gate.attach(west, Mode::Auto).expect("attached");
        assert!(bare_link(&program, west, libbpf_sys::BPF_XDP).is_err(), "and the other way round");
    });
}

/// A program at TCX egress that lets everything out, and nobody behind it see it; attached until the link is dropped. `None`:
/// this kernel has no TCX (before 6.6), and no such chain.
fn end_of_the_chain(ifindex: i32) -> Option<OwnedFd> {
    const TCX_PASS: u8 = 0;
    let program = bare_program(libbpf_sys::BPF_PROG_TYPE_SCHED_CLS, TCX_PASS);
    match bare_link(&program, ifindex, libbpf_sys::BPF_TCX_EGRESS) {
        Err(nix::libc::EINVAL) => None,
        link => Some(link.expect("the link is made")),
    }
}

/// Answers are seen where the operator wants it.
#[test]
fn watches_in_front_of_who_ends_the_chain() {
    if !root("watches_in_front_of_who_ends_the_chain") {
        return;
    }
    let network = Network::new("gatepos");
    let west = ifindex(&network.relay, "west");
    let answer = long(Type::Initial, 1, &[2; 4], &[0x5e; 8], &[], 1200);
    for (watch, seen) in [(Position::Last, 0), (Position::First, 1)] {
        let gate = Gate::load(&Config { watch, ..config() }).expect("a gate");
        let rules = Rules { scopes: vec![scope("web", PORT, tracked(&[]))], ..Rules::default() };
        gate.apply(&rules).expect("rules");
        let Some(_end) = inside(&network.relay, || end_of_the_chain(west)) else {
            println!("SKIP watches_in_front_of_who_ends_the_chain: this kernel has no TCX");
            return;
        };
        inside(&network.relay, || gate.watch(west)).expect("watched");
        let server = crate::net::socket(&network.relay, "10.98.1.1:443".parse().expect("an address"));
        // It may wait for the client's link address: it has left when it comes.
        let client = crate::net::socket(&network.publisher, "10.98.1.2:40000".parse().expect("an address"));
        server.send_to(&answer, client.local_addr().expect("an address")).expect("sent");
        assert_eq!(client.recv(&mut [0; 2048]).expect("the answer"), answer.len());
        gate.maintain().expect("maintenance");
        let handshakes = gate.tables().into_iter().find(|table| table.name == "handshakes").expect("a table");
        assert_eq!(handshakes.entries, seen, "{watch:?}");
    }
}
