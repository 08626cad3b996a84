//! One XDP program per interface: gate and grafts come, go and are killed without the other noticing.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};

use millrace_gate::kernel::rules::Scope;
use millrace_gate::kernel::{Config, Gate, Place, Policy, Rule, Rules};
use millrace_graft_kernel::joint::{Ends, Joints, Reason};
use millrace_kernel::xdp::Mode;
use millrace_testkit::wait_for;

use crate::net::{self, Network, ifindex, inside, root};
use crate::{count, ends, joints, open};

const GATED: &str = "10.98.1.1:443";
const GRAFTED: &str = "10.98.1.1:7000";
const CLIENT: &str = "10.98.1.2:6000";

/// Of what another process is to attach, and where.
const NOUNS: &str = "MILLRACE_TEST_NOUNS";
const NAMESPACE: &str = "MILLRACE_TEST_NAMESPACE";

fn gate() -> Gate {
    let small = Config {
        max_ids: 64,
        max_clients: 64,
        max_handshakes: 64,
        max_rates: 64,
        max_prefixes: 64,
        ..Config::default()
    };
    let gate = Gate::load(&small).unwrap_or_else(|error| panic!("{error}"));
    let web = Scope {
        name: "web".into(),
        places: vec![Place::port(443)],
        policy: Policy::default(),
        prefixes: Vec::new(),
    };
    gate.apply(&Rules { scopes: vec![web], ..Rules::default() }).expect("rules");
    gate
}

fn grafts() -> Joints {
    let mut joints = joints();
    open(&mut joints, session(), &["number"]);
    joints
}

fn session() -> Ends {
    ends(GRAFTED, CLIENT)
}

/// What is not framed is refused by the joints, what is too short by the gate.
struct Site {
    network: Network,
    client: UdpSocket,
    west: i32,
}

impl Site {
    fn new(name: &str) -> Self {
        let network = Network::new(name);
        let client = net::socket(&network.publisher, CLIENT.parse().expect("an address"));
        let west = ifindex(&network.relay, "west");
        Self { network, client, west }
    }

    fn send(&self, to: &str) {
        self.client.send_to(&[0x40; 20], to).expect("sent");
    }

    fn attach_gate(&self, gate: &Gate) -> Mode {
        inside(&self.network.relay, || gate.attach(self.west, Mode::Auto))
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn attach_grafts(&self, joints: &mut Joints) -> Mode {
        inside(&self.network.relay, move || joints.attach(self.west, Mode::Auto))
            .unwrap_or_else(|error| panic!("{error}"))
    }

    fn assert_gate_judges(&self, gate: &Gate) {
        let before = refused(gate);
        self.send(GATED);
        wait_for("a refusal by the gate", || refused(gate) == before + 1);
    }

    fn assert_grafts_judge(&self, joints: &mut Joints) {
        let before = count(joints, &session(), Reason::Malformed);
        self.send(GRAFTED);
        wait_for("a refusal by the joints", || count(joints, &session(), Reason::Malformed) == before + 1);
    }

    fn has_xdp(&self) -> bool {
        let show =
            Command::new("ip").args(["-n", &self.network.relay, "link", "show", "dev", "west"]).output();
        String::from_utf8_lossy(&show.expect("ip").stdout).contains("xdp")
    }

    /// In another process, until that is killed.
    fn child(&self, test: &str, nouns: &str) -> Holder {
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
        Holder(child)
    }
}

struct Holder(Child);

impl Holder {
    fn kill(mut self) {
        self.0.kill().expect("killed");
        self.0.wait().expect("its end");
    }
}

fn refused(gate: &Gate) -> u64 {
    gate.statistics().expect("statistics").scope("web").expect("web").rule(Rule::Short).packets
}

/// The other process: attaches, says so, and waits to be killed.
fn hold_if_asked() {
    let (Ok(nouns), Ok(namespace)) = (std::env::var(NOUNS), std::env::var(NAMESPACE)) else { return };
    let west = ifindex(&namespace, "west");
    let (gate, mut joints) = (gate(), grafts());
    inside(&namespace, || {
        if nouns.contains("gate") {
            gate.attach(west, Mode::Auto).expect("the gate attaches");
        }
        if nouns.contains("grafts") {
            joints.attach(west, Mode::Auto).expect("the joints attach");
        }
    });
    println!("attached");
    std::io::stdout().flush().expect("said");
    let _ = std::io::stdin().lines().count();
    unreachable!("it is killed before");
}

#[test]
fn either_comes_and_goes() {
    if !root("either_comes_and_goes") {
        return;
    }
    let site = Site::new("root");
    let (gate, mut grafts) = (gate(), grafts());
    for gate_is_first in [true, false] {
        if gate_is_first {
            assert_eq!(site.attach_gate(&gate), Mode::Native);
        }
        assert_eq!(site.attach_grafts(&mut grafts), Mode::Native);
        if !gate_is_first {
            assert_eq!(site.attach_gate(&gate), Mode::Native);
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
fn a_second_one_of_a_kind_is_refused() {
    if !root("a_second_one_of_a_kind_is_refused") {
        return;
    }
    let site = Site::new("second");
    let (first, second) = (gate(), gate());
    let (mut one, mut other) = (grafts(), grafts());
    site.attach_gate(&first);
    site.attach_grafts(&mut one);
    inside(&site.network.relay, || {
        let error = second.attach(site.west, Mode::Auto).expect_err("taken").to_string();
        assert!(error.contains("another gate at XDP"), "{error}");
        let error = other.attach(site.west, Mode::Auto).expect_err("taken").to_string();
        assert!(error.contains("another daemon of grafts at XDP"), "{error}");
        let error = second.attach(site.west, Mode::Generic).expect_err("another mode").to_string();
        assert!(error.contains("in the other mode"), "{error}");
    });
    site.assert_gate_judges(&first);
    site.assert_grafts_judge(&mut one);
}

/// Whoever it is, and whoever made the root.
#[test]
fn who_is_killed_takes_nothing_from_the_other() {
    const TEST: &str = "who_is_killed_takes_nothing_from_the_other";
    hold_if_asked();
    if !root(TEST) {
        return;
    }
    let site = Site::new("kill");
    let (gate, mut grafts) = (gate(), grafts());
    for child_is_first in [true, false] {
        let mut child = child_is_first.then(|| site.child(TEST, "gate"));
        site.attach_grafts(&mut grafts);
        let child = child.take().unwrap_or_else(|| site.child(TEST, "gate"));
        site.assert_grafts_judge(&mut grafts);
        child.kill();
        site.assert_grafts_judge(&mut grafts);
        // The place is free for the next one, as soon as the kernel has let go of it.
        wait_for("the gate's place", || inside(&site.network.relay, || gate.attach(site.west, Mode::Auto)));
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
            inside(&site.network.relay, || grafts.attach(site.west, Mode::Auto))
        });
        site.assert_grafts_judge(&mut grafts);
        grafts.detach_from(site.west);
        gate.detach();
        assert!(!site.has_xdp());
    }
}

#[test]
fn nothing_is_left_when_all_are_killed() {
    const TEST: &str = "nothing_is_left_when_all_are_killed";
    hold_if_asked();
    if !root(TEST) {
        return;
    }
    let site = Site::new("killall");
    for nouns in [&["gate", "grafts"][..], &["grafts", "gate"], &["gate grafts"]] {
        let children: Vec<_> = nouns.iter().map(|noun| site.child(TEST, noun)).collect();
        assert!(site.has_xdp());
        children.into_iter().for_each(Holder::kill);
        wait_for("the end of the root", || !site.has_xdp());
    }
    // And the next ones find nothing in their way.
    let (gate, mut grafts) = (gate(), grafts());
    site.attach_grafts(&mut grafts);
    site.attach_gate(&gate);
    site.assert_gate_judges(&gate);
    site.assert_grafts_judge(&mut grafts);
}

/// Each packet is judged once, whatever the other one does meanwhile.
#[test]
fn no_packet_is_lost_while_the_other_comes_and_goes() {
    const ROUNDS: u64 = 20;
    const PACKETS: u64 = 50;
    if !root("no_packet_is_lost_while_the_other_comes_and_goes") {
        return;
    }
    let site = Site::new("lossless");
    let (gate, mut grafts) = (gate(), grafts());
    site.attach_grafts(&mut grafts);
    std::thread::scope(|scope| {
        let (site, gate) = (&site, &gate);
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
            // The interface has room for some 250.
            wait_for("all of them", || count(&mut grafts, &session(), Reason::Malformed) == sent);
        }
        changing.join().expect("changes");
    });
}
