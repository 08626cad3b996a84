//! Sends packets through each part of the network stack and checks that reports name the part. Needs root, `ip` and
//! `nft`.

use millrace_testkit::{StopOnDrop, net};
use std::collections::BTreeMap;
use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use millrace_cost::report::{Event, Report};
use millrace_cost::{Config, Observer};
use millrace_gate::kernel::{self as gate, LoadedGate};
use millrace_kernel::xdp::XdpMode;
use net::{NamespaceNetwork, address, ifindex, inside, ip, root};

const PERIOD: Duration = Duration::from_millis(300);
const BOUND: Duration = millrace_testkit::BOUND;

/// Number of samples by kind of kernel work (event) and part of the network stack, such as `TCP`.
type PartSamples = BTreeMap<(Event, String), u64>;

fn add(parts: &mut PartSamples, report: &Report) {
    for event in report.cpus.iter().flat_map(|cpu| &cpu.events) {
        for part in &event.parts {
            *parts.entry((event.event, part.name.clone())).or_default() += part.samples;
        }
    }
}

/// Floods one socket from another until every part of the network stack in `want` has enough samples. Further parts are
/// ignored, since the observer sees the whole machine.
fn observe(near: &UdpSocket, far: &UdpSocket, want: &[(Event, &str)]) {
    const OFTEN: u64 = 2;
    let to = far.local_addr().expect("an address");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let _stop = StopOnDrop(&stop);
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                // The send may fail: a router may still be resolving the next hop's link address.
                let _ = near.send_to(&[0; 1000], to);
            }
        });
        scope.spawn(|| {
            while !stop.load(Ordering::Relaxed) {
                let _ = far.recv(&mut [0; 1000]);
            }
        });
        let mut config = Config::new().expect("the taxonomy parses");
        config.frequency_hz = 10_000;
        let mut parts = PartSamples::new();
        let deadline = Instant::now() + BOUND;
        let mut observer = Observer::start(config).expect("it starts");
        let rare = |parts: &PartSamples| {
            let samples = |(event, part): &&(Event, &str)| {
                parts.get(&(*event, (*part).to_owned())).copied().unwrap_or(0)
            };
            want.iter().filter(|part| samples(part) < OFTEN).copied().collect::<Vec<_>>()
        };
        while !rare(&parts).is_empty() && Instant::now() < deadline {
            add(&mut parts, &observer.next(PERIOD).expect("a report"));
        }
        stop.store(true, Ordering::Relaxed);
        assert!(rare(&parts).is_empty(), "{:?} are rare in {parts:#?}", rare(&parts));
    })
}

/// Returns sockets in the publisher's and the subscriber's namespaces, with forwarding in between.
fn routed(network: &NamespaceNetwork, family: u8) -> (UdpSocket, UdpSocket) {
    let option = if family == 4 { "net.ipv4.ip_forward" } else { "net.ipv6.conf.all.forwarding" };
    net::run("ip", &format!("netns exec {} sysctl -qw {option}=1", network.relay));
    for (namespace, net) in [(&network.publisher, 1), (&network.subscriber, 2)] {
        ip(&format!("-n {namespace} -{family} route add default via {}", address(family, net, 1)));
    }
    let socket = |namespace, net| net::socket(namespace, SocketAddr::new(address(family, net, 2), 0));
    (socket(&network.publisher, 1), socket(&network.subscriber, 2))
}

/// Adds netfilter chains to a namespace. `chains` has the hook and priority of each. 60 rules make a chain slow enough
/// that some samples are taken in it.
fn filter(namespace: &str, family: &str, chains: &[&str]) {
    let rules = "udp dport 1 counter drop\n".repeat(60);
    let chain = |(at, hook): (usize, &&str)| format!("chain c{at} {{ type filter hook {hook};\n{rules}}}\n");
    let chains: String = chains.iter().enumerate().map(chain).collect();
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(&file, format!("table {family} t {{\n{chains}}}\n")).expect("written");
    let path = file.path().to_str().expect("a path");
    net::run("ip", &format!("netns exec {namespace} nft -f {path}"));
}

fn has(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok()
}

/// Runs one test at a time, since each uses two CPUs fully.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

#[test]
#[ignore = "test-all: takes minutes until each part was sampled"]
fn forwarded_packets_count_as_forwarding() {
    if !root("forwarded_packets_count_as_forwarding") {
        return;
    }
    let _alone = alone();
    for (family, name) in [(4, "f4"), (6, "f6")] {
        let network = NamespaceNetwork::new(name);
        let (near, far) = routed(&network, family);
        let [receive, forwarding] = ["IP receive", "forwarding"].map(|part| format!("{part} v{family}"));
        observe(
            &near,
            &far,
            &[
                (Event::NetRx, &receive),
                (Event::NetRx, &forwarding),
                (Event::NetRx, "driver transmit"),
                (Event::NetRx, "UDP"),
                (Event::Send, "UDP"),
                (Event::Receive, "UDP"),
            ],
        );
    }
}

#[test]
#[ignore = "test-all: takes minutes until each part was sampled"]
fn netfilter_time_is_split_by_hook() {
    if !root("netfilter_time_is_split_by_hook") {
        return;
    }
    if !has("nft") {
        return println!("SKIP netfilter_time_is_split_by_hook: no nft");
    }
    let _alone = alone();
    for (family, name) in [(4, "n4"), (6, "n6")] {
        let network = NamespaceNetwork::new(name);
        let (near, far) = routed(&network, family);
        let inet = |namespace: &str, hooks: &[&str]| {
            let chains: Vec<String> = hooks.iter().map(|hook| format!("{hook} priority 0")).collect();
            filter(namespace, "inet", &chains.iter().map(String::as_str).collect::<Vec<_>>());
        };
        inet(&network.publisher, &["output"]);
        inet(&network.relay, &["prerouting", "forward", "postrouting"]);
        inet(&network.subscriber, &["input"]);
        filter(&network.relay, "netdev", &["ingress device \"west\" priority 0"]);
        let of = |hook: &str| format!("netfilter {hook} v{family}");
        observe(
            &near,
            &far,
            &[
                (Event::NetRx, "netfilter ingress"),
                (Event::NetRx, &of("prerouting")),
                (Event::NetRx, &of("forward")),
                (Event::NetRx, &of("postrouting")),
                (Event::NetRx, &of("local-in")),
                (Event::Send, &of("output")),
            ],
        );
    }
}

#[test]
fn bridged_packets_count_as_bridging() {
    if !root("bridged_packets_count_as_bridging") {
        return;
    }
    let _alone = alone();
    let network = NamespaceNetwork::new("b");
    ip(&format!("-n {} link add br0 type bridge", network.relay));
    for port in ["west", "east"] {
        ip(&format!("-n {} addr flush dev {port}", network.relay));
        ip(&format!("-n {} link set {port} master br0", network.relay));
    }
    ip(&format!("-n {} link set br0 up", network.relay));
    let socket = |namespace: &str, host: u8| {
        ip(&format!("-n {namespace} addr add 10.97.0.{host}/24 dev eth"));
        net::socket(namespace, SocketAddr::from(([10, 97, 0, host], 0)))
    };
    let near = socket(&network.publisher, 1);
    let far = socket(&network.subscriber, 2);
    observe(&near, &far, &[(Event::NetRx, "bridging"), (Event::NetRx, "UDP")]);
}

#[test]
#[ignore = "test-all: takes minutes until each part was sampled"]
fn time_in_xdp_programs_is_reported_as_native_or_generic() {
    if !root("time_in_xdp_programs_is_reported_as_native_or_generic") {
        return;
    }
    let _alone = alone();
    for (mode, name, part) in [(XdpMode::Generic, "xg", "XDP generic"), (XdpMode::Native, "xn", "XDP native")]
    {
        let network = NamespaceNetwork::new(name);
        let (near, far) = routed(&network, 4);
        let gate = LoadedGate::load(&gate::Config::default()).expect("it loads");
        let west = ifindex(&network.relay, "west");
        inside(&network.relay, || gate.attach(west, mode)).expect("it attaches");
        observe(&near, &far, &[(Event::NetRx, part), (Event::NetRx, "bpf:gate_xdp")]);
    }
}
