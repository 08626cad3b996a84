//! Tests the probe on real interfaces: a veth pair between two namespaces. Needs root.

use millrace_testkit::net;
use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::time::Duration;

use millrace_kernel::tc::{KernelHook, Mechanism};
use millrace_lab_kernel::probe::{Config, PacketProbe, PacketSample, ProbeCounters};
use net::{inside, ip, root};

/// Two network namespaces with one end of a veth pair each.
struct ProbePair {
    near: String,
    far: String,
}

impl ProbePair {
    fn new(name: &str) -> Self {
        let id = std::process::id();
        let pair = Self { near: format!("mr-{id}-{name}-n"), far: format!("mr-{id}-{name}-f") };
        let near = &pair.near;
        let far = &pair.far;
        ip(&format!("netns add {near}"));
        ip(&format!("netns add {far}"));
        ip(&format!("-n {near} link add v0 type veth peer name v0 netns {far}"));
        for (namespace, host) in [(near, 1), (far, 2)] {
            ip(&format!("-n {namespace} addr add 10.99.0.{host}/24 dev v0"));
            ip(&format!("-n {namespace} addr add fd99::{host}/64 dev v0 nodad"));
            ip(&format!("-n {namespace} link set v0 up"));
        }
        pair
    }
}

impl Drop for ProbePair {
    fn drop(&mut self) {
        for namespace in [&self.near, &self.far] {
            let _ = Command::new("ip").args(["netns", "del", namespace]).status();
        }
    }
}

fn v0() -> i32 {
    nix::net::if_::if_nametoindex("v0").expect("v0") as i32
}

fn socket(namespace: &str, address: &str) -> UdpSocket {
    net::socket(namespace, address.parse().expect("an address"))
}

fn attach(namespace: &str, probe: &mut PacketProbe) -> Mechanism {
    inside(namespace, || probe.attach(v0()).expect("the probe attaches"))
}

/// Counts the BPF programs at TC ingress and egress of the interface, including programs that other processes attached.
fn attached_programs(namespace: &str, mechanism: Mechanism) -> usize {
    match mechanism {
        Mechanism::Tcx => tcx_programs(namespace),
        Mechanism::Clsact => ["ingress", "egress"].iter().map(|hook| clsact_filters(namespace, hook)).sum(),
    }
}

fn clsact_filters(namespace: &str, hook: &str) -> usize {
    let output = Command::new("tc").args(["-n", namespace, "filter", "show", "dev", "v0", hook]).output();
    String::from_utf8_lossy(&output.expect("tc runs").stdout).matches(" handle 0x1 ").count()
}

#[allow(unsafe_code)]
fn tcx_programs(namespace: &str) -> usize {
    let count = |hook| {
        let mut options = libbpf_sys::bpf_prog_query_opts {
            sz: size_of::<libbpf_sys::bpf_prog_query_opts>() as libbpf_sys::size_t,
            ..Default::default()
        };
        // SAFETY: `options` is initialised, carries its size, and asks for the count only.
        let result = unsafe { libbpf_sys::bpf_prog_query_opts(v0(), hook, &raw mut options) };
        assert_eq!(result, 0, "query of TCX");
        // SAFETY: a successful query sets the count.
        unsafe { options.__bindgen_anon_1.count as usize }
    };
    inside(namespace, || count(libbpf_sys::BPF_TCX_INGRESS) + count(libbpf_sys::BPF_TCX_EGRESS))
}

/// Over IPv4 and then IPv6, sends one large and one small packet to the probed interface, and one large packet from it.
fn exchange(pair: &ProbePair) -> [SocketAddr; 4] {
    let mut addresses = Vec::new();
    for (near, far) in [("10.99.0.1:0", "10.99.0.2:0"), ("[fd99::1]:0", "[fd99::2]:0")] {
        let near = socket(&pair.near, near);
        let far = socket(&pair.far, far);
        let near_at = near.local_addr().expect("address");
        let far_at = far.local_addr().expect("address");
        let mut buffer = [0; 2048];
        far.send_to(&[1; 1200], near_at).expect("send");
        assert_eq!(near.recv(&mut buffer).expect("receive"), 1200);
        far.send_to(&[1; 100], near_at).expect("send");
        assert_eq!(near.recv(&mut buffer).expect("receive"), 100);
        near.send_to(&[1; 1000], far_at).expect("send");
        assert_eq!(far.recv(&mut buffer).expect("receive"), 1000);
        addresses.extend([near_at, far_at]);
    }
    addresses.try_into().expect("four")
}

fn stamps_both_directions(name: &str, asked: Option<Mechanism>) {
    let pair = ProbePair::new(name);
    let config = Config { min_payload_bytes: 1000, mechanism: asked, ..Config::default() };
    let mut probe = PacketProbe::load(&config).expect("the probe loads");
    let mechanism = attach(&pair.near, &mut probe);
    assert_eq!(mechanism, asked.unwrap_or(if kernel_has_tcx() { Mechanism::Tcx } else { Mechanism::Clsact }));
    assert_eq!(attached_programs(&pair.near, mechanism), 2);

    let before = now_ns();
    let [near4, far4, near6, far6] = exchange(&pair);
    let after = now_ns();
    let samples = probe.read().expect("samples");
    let seen: Vec<_> =
        samples.iter().map(|s: &PacketSample| (s.hook, s.source, s.destination, s.payload_bytes)).collect();
    assert_eq!(
        seen,
        [
            (KernelHook::Ingress, far4, near4, 1200),
            (KernelHook::Egress, near4, far4, 1000),
            (KernelHook::Ingress, far6, near6, 1200),
            (KernelHook::Egress, near6, far6, 1000),
        ]
    );
    assert!(samples.iter().all(|s| (before..after).contains(&s.time_ns)));
    assert!(samples.is_sorted_by_key(|s| s.time_ns));
    // exact: the probe counts each packet before its receiver gets it, and all packets have arrived
    let counters = probe.counters().expect("counters");
    assert_eq!(
        ProbeCounters { not_udp: 0, ..counters },
        ProbeCounters { sampled: 4, small: 2, ..ProbeCounters::default() }
    );

    drop(probe);
    assert_eq!(attached_programs(&pair.near, mechanism), 0, "left attached");
    exchange(&pair);
}

fn now_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("clock");
    Duration::from(now).as_nanos() as u64
}

/// Reports whether the kernel has TCX, which came with Linux 6.6.
fn kernel_has_tcx() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("a kernel release");
    let mut numbers = release.split('.').map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(6))
}

#[test]
fn default_tc_hook_timestamps_packets_in_both_directions() {
    if root("default_tc_hook_timestamps_packets_in_both_directions") {
        stamps_both_directions("any", None);
    }
}

#[test]
fn tcx_hook_timestamps_packets_in_both_directions() {
    if !kernel_has_tcx() {
        println!("SKIP tcx_hook_timestamps_packets_in_both_directions: needs Linux 6.6");
    } else if root("tcx_hook_timestamps_packets_in_both_directions") {
        stamps_both_directions("tcx", Some(Mechanism::Tcx));
    }
}

#[test]
fn clsact_hook_timestamps_packets_in_both_directions() {
    if root("clsact_hook_timestamps_packets_in_both_directions") {
        stamps_both_directions("cls", Some(Mechanism::Clsact));
    }
}

#[test]
fn attach_error_names_the_missing_interface() {
    if !root("attach_error_names_the_missing_interface") {
        return;
    }
    let mut probe = PacketProbe::load(&Config::default()).expect("the probe loads");
    let error = probe.attach(999_999).expect_err("no such interface").to_string();
    assert!(error.contains("interface 999999") && error.contains("TC ingress"), "{error}");
}
