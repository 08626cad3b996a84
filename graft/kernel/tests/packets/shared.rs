//! Tests the XDP hook that packet grafts and Millrace's packet filter (`millrace gate`) share. The process of one may
//! attach, detach or be killed without an effect on the other.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};

use millrace_gate::kernel::rules::ScopeRules;
use millrace_gate::kernel::{Config, GateRules, LoadedGate, PolicyRules, Rule, RulePlace};
use millrace_graft_kernel::packet::{PacketHooks, PacketReason, SessionEnds};
use millrace_kernel::xdp::XdpMode;
use millrace_testkit::wait_for;

use crate::net::{self, NamespaceNetwork, ifindex, inside, root};
use crate::{count, ends, hooks, open};

const GATED: &str = "10.98.1.1:443";
const GRAFTED: &str = "10.98.1.1:7000";
const CLIENT: &str = "10.98.1.2:6000";

/// Environment variables that tell a child process which programs to attach, and in which namespace.
const NOUNS: &str = "MILLRACE_TEST_NOUNS";
const NAMESPACE: &str = "MILLRACE_TEST_NAMESPACE";

fn gate() -> LoadedGate {
    let small = Config {
        max_ids: 64,
        max_clients: 64,
        max_handshakes: 64,
        max_rates: 64,
        max_prefixes: 64,
        ..Config::default()
    };
    let gate = LoadedGate::load(&small).unwrap_or_else(|error| panic!("{error}"));
    let web = ScopeRules {
        name: "web".into(),
        places: vec![RulePlace::port(443)],
        policy: PolicyRules::default(),
        prefixes: Vec::new(),
    };
    gate.apply(&GateRules { scopes: vec![web], ..GateRules::default() }).expect("rules");
    gate
}

fn grafts() -> PacketHooks {
    let mut hooks = hooks();
    open(&mut hooks, session(), &["number"]);
    hooks
}

fn session() -> SessionEnds {
    ends(GRAFTED, CLIENT)
}

/// A network on which tests attach two programs to one XDP hook: packet grafts and Millrace's packet filter (the gate).
/// Packet grafts drop packets that lack the trailer of their session, and the gate drops packets that are too short, so
/// the test sees which program runs.
struct SharedSite {
    network: NamespaceNetwork,
    client: UdpSocket,
    west: i32,
}

impl SharedSite {
    fn new(name: &str) -> Self {
        let network = NamespaceNetwork::new(name);
        let client = net::socket(&network.publisher, CLIENT.parse().expect("an address"));
        let west = ifindex(&network.relay, "west");
        Self { network, client, west }
    }

    fn send(&self, to: &str) {
        self.client.send_to(&[0x40; 20], to).expect("sent");
    }

    fn attach_gate(&self, gate: &LoadedGate) -> XdpMode {
        inside(&self.network.relay, || gate.attach(self.west, XdpMode::Auto))
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn attach_grafts(&self, hooks: &mut PacketHooks) -> XdpMode {
        inside(&self.network.relay, move || hooks.attach(self.west, XdpMode::Auto))
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn assert_gate_judges(&self, gate: &LoadedGate) {
        let before = refused(gate);
        self.send(GATED);
        wait_for("a refusal by the gate", || refused(gate) == before + 1);
    }

    fn assert_grafts_judge(&self, hooks: &mut PacketHooks) {
        let before = count(hooks, &session(), PacketReason::Malformed);
        self.send(GRAFTED);
        wait_for("a refusal by the hooks", || {
            count(hooks, &session(), PacketReason::Malformed) == before + 1
        });
    }

    fn has_xdp(&self) -> bool {
        let show =
            Command::new("ip").args(["-n", &self.network.relay, "link", "show", "dev", "west"]).output();
        String::from_utf8_lossy(&show.expect("ip").stdout).contains("xdp")
    }

    /// Runs a test in a child process that the test kills later.
    fn child(&self, test: &str, nouns: &str) -> RootHolder {
        let myself = std::env::current_exe().expect("a path");
        let mut child = Command::new(myself)
            .args(["--exact", &format!("shared::{test}"), "--nocapture"])
            .env(NOUNS, nouns)
            .env(NAMESPACE, &self.network.relay)
            .stdout(Stdio::piped())
            .stdin(Stdio::piped())
            .spawn()
            .expect("it starts");
        let said = BufReader::new(child.stdout.take().expect("its words"));
        let is_ready = said.lines().any(|line| line.is_ok_and(|line| line.contains("attached")));
        assert!(is_ready, "it did not attach");
        RootHolder(child)
    }
}

struct RootHolder(Child);

impl RootHolder {
    fn kill(mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("its end");
    }
}

fn refused(gate: &LoadedGate) -> u64 {
    gate.statistics().expect("statistics").scope("web").expect("web").rule(Rule::Short).packets
}

/// Runs in the child process: attaches programs, reports that, and waits to be killed.
fn hold_if_asked() {
    let (Ok(nouns), Ok(namespace)) = (std::env::var(NOUNS), std::env::var(NAMESPACE)) else { return };
    let west = ifindex(&namespace, "west");
    let gate = gate();
    let mut hooks = grafts();
    inside(&namespace, || {
        if nouns.contains("gate") {
            gate.attach(west, XdpMode::Auto).expect("the gate attaches");
        }
        if nouns.contains("grafts") {
            hooks.attach(west, XdpMode::Auto).expect("the hooks attach");
        }
    });
    println!("attached");
    std::io::stdout().flush().expect("said");
    let _ = std::io::stdin().lines().count();
    unreachable!("it is killed before");
}

#[test]
fn gate_and_packet_grafts_attach_and_detach_in_any_order() {
    if !root("gate_and_packet_grafts_attach_and_detach_in_any_order") {
        return;
    }
    let site = SharedSite::new("root");
    let gate = gate();
    let mut grafts = grafts();
    for gate_is_first in [true, false] {
        if gate_is_first {
            assert_eq!(site.attach_gate(&gate), XdpMode::Native);
        }
        assert_eq!(site.attach_grafts(&mut grafts), XdpMode::Native);
        if !gate_is_first {
            assert_eq!(site.attach_gate(&gate), XdpMode::Native);
        }
        for _ in 0..3 {
            site.assert_gate_judges(&gate);
            site.assert_grafts_judge(&mut grafts);
            gate.detach();
            assert!(!gate.is_attached(site.west) && grafts.is_attached(site.west));
            site.assert_grafts_judge(&mut grafts);
            site.attach_gate(&gate);
            grafts.detach_from(site.west);
            assert!(gate.is_attached(site.west) && !grafts.is_attached(site.west));
            site.assert_gate_judges(&gate);
            site.attach_grafts(&mut grafts);
        }
        grafts.detach_from(site.west);
        assert!(site.has_xdp());
        gate.detach();
        assert!(!site.has_xdp());
    }
}

#[test]
fn second_gate_or_packet_graft_on_an_interface_is_refused() {
    if !root("second_gate_or_packet_graft_on_an_interface_is_refused") {
        return;
    }
    let site = SharedSite::new("second");
    let first = gate();
    let second = gate();
    let mut one = grafts();
    let mut other = grafts();
    site.attach_gate(&first);
    site.attach_grafts(&mut one);
    inside(&site.network.relay, || {
        let error = second.attach(site.west, XdpMode::Auto).expect_err("taken").to_string();
        assert!(error.contains("another gate at XDP"), "{error}");
        let error = other.attach(site.west, XdpMode::Auto).expect_err("taken").to_string();
        assert!(error.contains("another daemon of grafts at XDP"), "{error}");
        let error = second.attach(site.west, XdpMode::Generic).expect_err("another mode").to_string();
        assert!(error.contains("in the other mode"), "{error}");
    });
    site.assert_gate_judges(&first);
    site.assert_grafts_judge(&mut one);
}

/// The process that is killed may or may not be the one that loaded the shared XDP program.
#[test]
fn killed_process_leaves_the_other_program_attached() {
    const TEST: &str = "killed_process_leaves_the_other_program_attached";
    hold_if_asked();
    if !root(TEST) {
        return;
    }
    let site = SharedSite::new("kill");
    let gate = gate();
    let mut grafts = grafts();
    for child_is_first in [true, false] {
        let mut child = child_is_first.then(|| site.child(TEST, "gate"));
        site.attach_grafts(&mut grafts);
        let child = child.take().unwrap_or_else(|| site.child(TEST, "gate"));
        site.assert_grafts_judge(&mut grafts);
        child.kill();
        site.assert_grafts_judge(&mut grafts);
        // The kernel detaches a killed process's program with a delay. After that, another program can attach.
        wait_for("the gate's place", || {
            inside(&site.network.relay, || gate.attach(site.west, XdpMode::Auto))
        });
        site.assert_gate_judges(&gate);
        site.assert_grafts_judge(&mut grafts);
        gate.detach();
        grafts.detach_from(site.west);
        assert!(!site.has_xdp());

        let mut child = child_is_first.then(|| site.child(TEST, "grafts"));
        site.attach_gate(&gate);
        let child = child.take().unwrap_or_else(|| site.child(TEST, "grafts"));
        site.assert_gate_judges(&gate);
        child.kill();
        site.assert_gate_judges(&gate);
        wait_for("the grafts' place", || {
            inside(&site.network.relay, || grafts.attach(site.west, XdpMode::Auto))
        });
        site.assert_grafts_judge(&mut grafts);
        grafts.detach_from(site.west);
        gate.detach();
        assert!(!site.has_xdp());
    }
}

#[test]
fn killed_gate_and_graft_processes_leave_no_xdp_program_attached() {
    const TEST: &str = "killed_gate_and_graft_processes_leave_no_xdp_program_attached";
    hold_if_asked();
    if !root(TEST) {
        return;
    }
    let site = SharedSite::new("killall");
    for nouns in [&["gate", "grafts"][..], &["grafts", "gate"], &["gate grafts"]] {
        let children: Vec<_> = nouns.iter().map(|noun| site.child(TEST, noun)).collect();
        assert!(site.has_xdp());
        children.into_iter().for_each(RootHolder::kill);
        wait_for("the end of the root", || !site.has_xdp());
    }
    // Programs of a new process can attach afterwards.
    let gate = gate();
    let mut grafts = grafts();
    site.attach_grafts(&mut grafts);
    site.attach_gate(&gate);
    site.assert_gate_judges(&gate);
    site.assert_grafts_judge(&mut grafts);
}

/// Each packet gets exactly one verdict from one of the two programs, while the other one attaches and detaches.
#[test]
fn packet_grafts_miss_no_packet_while_a_gate_attaches_and_detaches() {
    const ROUNDS: u64 = 20;
    const PACKETS: u64 = 50;
    if !root("packet_grafts_miss_no_packet_while_a_gate_attaches_and_detaches") {
        return;
    }
    let site = SharedSite::new("lossless");
    let gate = gate();
    let mut grafts = grafts();
    site.attach_grafts(&mut grafts);
    std::thread::scope(|scope| {
        let site = &site;
        let gate = &gate;
        let changing = scope.spawn(move || {
            for _ in 0..ROUNDS {
                site.attach_gate(gate);
                gate.detach();
            }
        });
        let mut sent = 0;
        while !changing.is_finished() || sent == 0 {
            for _ in 0..PACKETS {
                site.send(GRAFTED);
            }
            sent += PACKETS;
            // The interface queues only some 250 packets, so the test waits for the packets that it has sent.
            wait_for("all of them", || count(&mut grafts, &session(), PacketReason::Malformed) == sent);
        }
        changing.join().expect("changes");
    });
}
