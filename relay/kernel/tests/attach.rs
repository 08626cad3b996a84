//! Tests of programs that are attached and detached, and of processes that are killed.
#![allow(clippy::expect_used, reason = "a test may panic")]

use millrace_testkit::net;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use millrace_kernel::tc::{self, KernelHook, Mechanism};
use millrace_relay_kernel::program::{Config, RelayProgram};
use millrace_testkit::wait_until;
use net::{NamespaceNetwork, inside, ip, root, run};
use nix::sys::signal::{Signal, raise};

/// Environment variable with the network namespace in which the process that will be killed attaches the program.
const NAMESPACE: &str = "MILLRACE_TEST_NAMESPACE";

fn load(mechanism: Mechanism) -> RelayProgram {
    let config = Config { ports: vec![4443], mechanism: Some(mechanism), ..Config::default() };
    RelayProgram::load(&config).expect("the program loads")
}

/// Returns the mechanisms to attach a program that this kernel supports. TCX needs Linux 6.6.
fn mechanisms() -> Vec<Mechanism> {
    let has_tcx = tc::count(1, KernelHook::Ingress).is_ok();
    if has_tcx { vec![Mechanism::Tcx, Mechanism::Clsact] } else { vec![Mechanism::Clsact] }
}

/// Returns the number of programs that are attached with TCX.
fn links() -> usize {
    let has_tcx = mechanisms().contains(&Mechanism::Tcx);
    if has_tcx { tc::count(west(), KernelHook::Ingress).expect("a count") as usize } else { 0 }
}

fn west() -> i32 {
    nix::net::if_::if_nametoindex("west").expect("west") as i32
}

/// Returns the IDs of the relay's BPF programs that are attached as tc filters to the interface `west`.
fn filters(namespace: &str) -> Vec<String> {
    let show = ["-n", namespace, "filter", "show", "dev", "west", "ingress"];
    let output = Command::new("tc").args(show).output().expect("tc runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.split("relay_ingress:[")
        .skip(1)
        .filter_map(|rest| Some(rest.split_once(']')?.0.to_owned()))
        .collect()
}

#[test]
fn detached_program_is_noticed_and_attached_again() {
    if !root("detached_program_is_noticed_and_attached_again") {
        return;
    }
    for mechanism in mechanisms() {
        let network = NamespaceNetwork::new("attach");
        let relay = load(mechanism);
        inside(&network.relay, || {
            let west = west();
            assert!(!relay.is_attached(west));
            for _ in 0..2 {
                assert_eq!(relay.attach(west).expect("attached"), mechanism);
                assert!(relay.is_attached(west));
            }
            match mechanism {
                Mechanism::Tcx => assert_eq!(tc::detach_all(west, KernelHook::Ingress).expect("detached"), 1),
                Mechanism::Clsact => run("tc", "filter del dev west ingress"),
            }
            assert!(!relay.is_attached(west));
            relay.attach(west).expect("attached");
            assert!(relay.is_attached(west));
            relay.detach_from(west);
            assert!(!relay.is_attached(west));
            assert_eq!(links(), 0);

            relay.attach(west).expect("attached");
            run("ip", "link del west");
            assert!(!relay.is_attached(west));
            run("ip", "link add west type veth");
            relay.attach(self::west()).expect("attached");
            assert!(relay.is_attached(self::west()));
        });
        assert_eq!(filters(&network.relay).len(), usize::from(mechanism == Mechanism::Clsact));
        drop(relay);
        assert!(filters(&network.relay).is_empty());
    }
}

#[test]
fn programs_of_a_killed_process_are_removed_at_the_next_start() {
    if let Some(namespace) = std::env::var_os(NAMESPACE) {
        let relays: Vec<_> = mechanisms().into_iter().map(load).collect();
        inside(&namespace.to_string_lossy(), || {
            for relay in &relays {
                relay.attach(west()).expect("attached");
            }
        });
        raise(Signal::SIGKILL).expect("it dies");
    }
    if !root("programs_of_a_killed_process_are_removed_at_the_next_start") {
        return;
    }
    let network = NamespaceNetwork::new("killed");
    let living = load(Mechanism::Clsact);
    inside(&network.relay, || living.attach(west()).expect("attached"));
    let ours = filters(&network.relay);
    assert_eq!(ours.len(), 1);

    let myself = std::env::current_exe().expect("a path");
    let mut command = Command::new(myself);
    command.args(["--exact", "programs_of_a_killed_process_are_removed_at_the_next_start"]);
    let died = command.env(NAMESPACE, &network.relay).output().expect("it starts").status;
    assert_eq!(died.signal(), Some(Signal::SIGKILL as i32));
    assert_eq!(filters(&network.relay).len(), 2, "a filter outlives its process");
    // A TCX link ends with its process, though the kernel may remove it a moment later.
    inside(&network.relay, || wait_until("the end of the links", links, |links| *links == 0));

    let next = load(Mechanism::Clsact);
    inside(&network.relay, || next.attach(west()).expect("attached"));
    let there = filters(&network.relay);
    assert_eq!(there.len(), 2, "the one that was left is gone: {there:?}");
    assert!(there.contains(&ours[0]), "the one that is served stays: {there:?}");
    drop((living, next));
    assert!(filters(&network.relay).is_empty());
    ip(&format!("-n {} link show west", network.relay));
}
