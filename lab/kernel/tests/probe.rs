//! The probe on real interfaces: a veth pair between two namespaces. Needs root.

use millrace_testkit::net;
use std::net::{SocketAddr, UdpSocket};
use std::process::Command;
use std::time::Duration;

use millrace_kernel::tc::{Hook, Mechanism};
use millrace_lab_kernel::probe::{Config, Counters, Probe, Sample};
use net::{inside, ip, root};

/// A namespace with one end of a veth pair whose other end is in the namespace `peer`.
struct Pair {
    near: String,
    far: String,
}

impl Pair {
    fn new(name: &str) -> Self {
        let id = std::process::id();
        let pair = Self { near: format!("mr-{id}-{name}-n"), far: format!("mr-{id}-{name}-f") };
        let (near, far) = (&pair.near, &pair.far);
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

impl Drop for Pair {
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

fn attach(namespace: &str, probe: &mut Probe) -> Mechanism {
    inside(namespace, || probe.attach(v0()).expect("the probe attaches"))
}

/// Programs on both hooks of the interface, ours or not.
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

/// One large packet each way and one small, in both families.
fn exchange(pair: &Pair) -> [SocketAddr; 4] {
    let mut addresses = Vec::new();
    for (near, far) in [("10.99.0.1:0", "10.99.0.2:0"), ("[fd99::1]:0", "[fd99::2]:0")] {
        let (near, far) = (socket(&pair.near, near), socket(&pair.far, far));
        let (near_at, far_at) = (near.local_addr().expect("address"), far.local_addr().expect("address"));
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
    let pair = Pair::new(name);
    let config = Config { min_payload_bytes: 1000, mechanism: asked, ..Config::default() };
    let mut probe = Probe::load(&config).expect("the probe loads");
    let mechanism = attach(&pair.near, &mut probe);
    assert_eq!(mechanism, asked.unwrap_or(if kernel_has_tcx() { Mechanism::Tcx } else { Mechanism::Clsact }));
    assert_eq!(attached_programs(&pair.near, mechanism), 2);

    let before = now_ns();
    let [near4, far4, near6, far6] = exchange(&pair);
    let after = now_ns();
    let samples = probe.read().expect("samples");
    let seen: Vec<_> =
        samples.iter().map(|s: &Sample| (s.hook, s.source, s.destination, s.payload_bytes)).collect();
    assert_eq!(
        seen,
        [
            (Hook::Ingress, far4, near4, 1200),
            (Hook::Egress, near4, far4, 1000),
            (Hook::Ingress, far6, near6, 1200),
            (Hook::Egress, near6, far6, 1000),
        ]
    );
    assert!(samples.iter().all(|s| (before..after).contains(&s.time_ns)));
    assert!(samples.is_sorted_by_key(|s| s.time_ns));
    let counters = probe.counters().expect("counters"); // exact: each packet came after it was counted
    assert_eq!(Counters { not_udp: 0, ..counters }, Counters { sampled: 4, small: 2, ..Counters::default() });

    drop(probe);
    assert_eq!(attached_programs(&pair.near, mechanism), 0, "left attached");
    exchange(&pair);
}

fn now_ns() -> u64 {
    let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).expect("clock");
    Duration::from(now).as_nanos() as u64
}

/// TCX came with Linux 6.6.
fn kernel_has_tcx() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("a kernel release");
    let mut numbers = release.split('.').map_while(|number| number.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(6))
}

#[test]
fn by_what_the_kernel_has() {
    if root("by_what_the_kernel_has") {
        stamps_both_directions("any", None);
    }
}

#[test]
fn by_tcx() {
    if !kernel_has_tcx() {
        println!("SKIP by_tcx: needs Linux 6.6");
    } else if root("by_tcx") {
        stamps_both_directions("tcx", Some(Mechanism::Tcx));
    }
}

#[test]
fn by_clsact() {
    if root("by_clsact") {
        stamps_both_directions("cls", Some(Mechanism::Clsact));
    }
}

#[test]
fn missing_interface_is_named() {
    if !root("missing_interface_is_named") {
        return;
    }
    let mut probe = Probe::load(&Config::default()).expect("the probe loads");
    let error = probe.attach(999_999).expect_err("no such interface").to_string();
    assert!(error.contains("interface 999999") && error.contains("TC ingress"), "{error}");
}
