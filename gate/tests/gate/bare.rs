//! Tests of interfaces without an Ethernet header (tun, WireGuard), and of interfaces that are refused because the gate
//! would not see their packets.

#![allow(unsafe_code)]

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Write as _};
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::process::Command;

use millrace_fanout::kernel::{self as fanout, Fanout};
use millrace_gate::kernel::{FrameAction, LoadedGate, Pass, PolicyRules, Rule};
use millrace_kernel::xdp::XdpMode;
use nix::libc;

use crate::frame::{LongPacketType, TestFrame, initial, long, short, sum};
use crate::net::{NamespaceNetwork, ifindex, inside, ip, socket};
use crate::state::tracked;
use crate::{apply, enforce, gate, judge, root, to_server, wireguard};

/// Index of the loopback interface, on which BPF_PROG_TEST_RUN runs programs.
const LOOPBACK: i32 = 1;
const ETHERNET: usize = 14;
const V4: &str = "192.0.2.7:40000";
const V6: &str = "[2001:db8::7]:40000";

/// Returns the frame without its Ethernet header.
fn bare(frame: &TestFrame) -> Vec<u8> {
    frame.bytes()[ETHERNET..].to_vec()
}

/// Compares verdicts and answers for the same packets with and without an Ethernet header.
#[test]
fn packet_gets_the_same_verdict_with_and_without_an_ethernet_header() {
    if !root("packet_gets_the_same_verdict_with_and_without_an_ethernet_header") {
        return;
    }
    let policy = || PolicyRules { modes: enforce(&[Rule::Retry]), ..PolicyRules::default() };
    let with = gate(policy());
    let without = gate(policy());
    without.set_bare(LOOPBACK, true).expect("set");
    let mut answers = 0;
    for from in [V4, V6] {
        let plain = |payload| to_server(from, payload);
        let frames = [
            plain(short(&[], 20)),
            plain(short(&[1; 8], 40)),
            plain(initial(1, &[1; 8], &[2; 20], &[])),
            plain(long(LongPacketType::Initial, 1, &[1; 8], &[2; 4], &[], 600)),
            plain(long(LongPacketType::Handshake, 1, &[1; 8], &[2; 4], &[], 100)),
            plain(vec![]),
            TestFrame { options: 10, ..plain(short(&[1; 8], 40)) },
            TestFrame { extensions: vec![(60, 2), (0, 0)], ..plain(short(&[1; 8], 40)) },
            TestFrame { fragment: Some((0, true)), ..plain(short(&[1; 8], 40)) },
            TestFrame { fragment: Some((9, false)), ..plain(short(&[1; 8], 40)) },
            TestFrame { wrong_udp_len: 9, ..plain(short(&[1; 8], 40)) },
            TestFrame { protocol: 6, ..plain(short(&[1; 8], 40)) },
        ];
        for frame in &frames {
            let (want, action) = judge(&with, &frame.bytes());
            let (verdict, bare_action) = judge(&without, &bare(frame));
            assert_eq!(verdict, want, "{frame:?}");
            match (action, bare_action) {
                (FrameAction::Answer(with), FrameAction::Answer(without)) => {
                    answers += 1;
                    check_answer(frame, &with[ETHERNET..], &without);
                }
                (action, bare_action) => assert_eq!(bare_action, action, "{frame:?}"),
            }
        }
    }
    assert_eq!(answers, 2, "a Retry of each family");
}

/// Checks that the Retry for a frame without an Ethernet header equals that for the same frame with one, except random
/// fields.
fn check_answer(question: &TestFrame, with: &[u8], without: &[u8]) {
    let framed =
        [&question.bytes()[6..12], &question.bytes()[..6], &question.bytes()[12..14], without].concat();
    let packet = crate::frame::payload_of_answer(question, &framed);
    assert_eq!(with.len(), without.len());
    assert_eq!(packet[0] & 0xf0, 0xf0, "a Retry");
}

/// Tries packets with every IP version except 4 and 6.
#[test]
fn non_ip_packet_passes_without_an_ethernet_header() {
    if !root("non_ip_packet_passes_without_an_ethernet_header") {
        return;
    }
    let gate = gate(PolicyRules::default());
    gate.set_bare(LOOPBACK, true).expect("set");
    for first in (0..=15).filter(|version| ![4, 6].contains(version)) {
        let mut packet = bare(&to_server(V4, short(&[], 20)));
        packet[0] = first << 4 | 5;
        assert_eq!(gate.run(&packet).expect("a run"), FrameAction::Pass, "version {first}");
    }
    // On this interface the gate expects frames to begin with an IP header. It passes an Ethernet frame unchecked,
    // because the frame does not begin with an IP header.
    assert_eq!(gate.run(&to_server(V4, short(&[], 20)).bytes()).expect("a run"), FrameAction::Pass);
    gate.set_bare(LOOPBACK, false).expect("set");
    assert_eq!(gate.run(&to_server(V4, short(&[], 20)).bytes()).expect("a run"), FrameAction::Drop);
}

/// A tun device in a namespace, whose packets the test reads and writes.
struct Tun(File);

impl Tun {
    fn new(namespace: &str) -> Self {
        // These constants are from linux/if_tun.h.
        const TUNSETIFF: libc::Ioctl = 0x4004_54ca;
        const IFF_TUN: i16 = 1;
        const IFF_NO_PI: i16 = 0x1000;
        let file = inside(namespace, || {
            let open = OpenOptions::new().read(true).write(true).open("/dev/net/tun").expect("/dev/net/tun");
            // SAFETY: an `ifreq` of zeroes is a valid, empty request.
            let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
            for (to, from) in request.ifr_name.iter_mut().zip(b"tun7") {
                *to = *from as libc::c_char;
            }
            request.ifr_ifru.ifru_flags = IFF_TUN | IFF_NO_PI;
            // SAFETY: the request outlives the call.
            let made = unsafe { libc::ioctl(open.as_raw_fd(), TUNSETIFF, &raw mut request) };
            assert_eq!(made, 0, "a tun device");
            open
        });
        ip(&format!("-n {namespace} addr add 10.99.0.1/24 dev tun7"));
        ip(&format!("-n {namespace} addr add fd99::1/64 dev tun7 nodad"));
        ip(&format!("-n {namespace} link set tun7 up"));
        Self(file)
    }

    /// Sends a datagram into the device.
    fn send(&mut self, from: SocketAddr, to: SocketAddr, payload: Vec<u8>) {
        let mut packet = bare(&TestFrame::new(from, to, payload));
        if to.is_ipv6() {
            // The kernel drops IPv6 datagrams without a UDP checksum.
            let pseudo = sum(&packet[8..40], 17 + (packet.len() - 40) as u32);
            let checksum = !sum(&packet[40..], pseudo.into());
            packet[46..48].copy_from_slice(&checksum.to_be_bytes());
        }
        assert_eq!(self.0.write(&packet).expect("written"), packet.len());
    }

    /// Returns the payload of the next datagram that leaves by the tun device, skipping other packets.
    fn receive(&mut self) -> Vec<u8> {
        let mut packet = [0; 2048];
        loop {
            let len = self.0.read(&mut packet).expect("a packet");
            let (next, header) = if packet[0] >> 4 == 4 { (packet[9], 20) } else { (packet[6], 40) };
            if next == 17 {
                return packet[header + 8..len].to_vec();
            }
        }
    }
}

/// Checks that refused packets do not reach the server, that valid ones do, and that the gate tracks connections.
#[test]
fn tun_devices_are_guarded() {
    if !root("tun_devices_are_guarded") {
        return;
    }
    let network = NamespaceNetwork::new("gatetun");
    let mut tun = Tun::new(&network.relay);
    let index = ifindex(&network.relay, "tun7");
    for (server, client) in [("10.99.0.1:443", "10.99.0.2:40000"), ("[fd99::1]:443", "[fd99::2]:40000")] {
        let server: SocketAddr = server.parse().expect("an address");
        let client: SocketAddr = client.parse().expect("an address");
        let gate = gate(tracked(&[]));
        let attached = inside(&network.relay, || {
            gate.watch(index).expect("watched");
            gate.attach(index, XdpMode::Auto)
        });
        assert_eq!(attached.expect("attached"), XdpMode::Generic);
        let socket = socket(&network.relay, server);
        // Packets that the gate must refuse are sent first. If it passed them, they would arrive before the valid
        // packet.
        for _ in 0..20 {
            tun.send(client, server, short(&[], 20));
        }
        tun.send(client, server, initial(1, &[7; 8], &[2; 4], &[]));
        let mut buffer = [0; 2048];
        assert_eq!(socket.recv(&mut buffer).expect("the one that passes"), 1200);
        assert_eq!(counted(&gate, Rule::Short), 20);
        // The gate reads the server's answer, and then accepts the client's next packets as those of a live connection.
        let answer = long(LongPacketType::Initial, 1, &[2; 4], &[0x5e; 8], &[], 1200);
        socket.send_to(&answer, client).expect("sent");
        assert_eq!(tun.receive(), answer);
        tun.send(client, server, long(LongPacketType::Handshake, 1, &[0x5e; 8], &[2; 4], &[], 100));
        tun.send(client, server, short(&[0x5e; 8], 50));
        assert_eq!(socket.recv(&mut buffer).expect("a Handshake packet"), 100);
        assert_eq!(socket.recv(&mut buffer).expect("a short header"), 50);
        let statistics = gate.statistics().expect("statistics");
        assert_eq!(statistics.scope("web").expect("web").pass(Pass::Live).packets, 1);
        // With rule `retry`, the gate answers the Initial itself, with a Retry.
        apply(&gate, PolicyRules { modes: enforce(&[Rule::Retry]), ..PolicyRules::default() });
        tun.send(client, server, initial(1, &[8; 8], &[2; 4], &[]));
        assert_eq!(tun.receive()[0] & 0xf0, 0xf0, "a Retry");
    }
}

fn counted(gate: &LoadedGate, rule: Rule) -> u64 {
    gate.statistics().expect("statistics").scope("web").expect("web").rule(rule).packets
}

/// Adds an interface of the given kind. Reports whether the kernel supports that kind.
fn add(namespace: &str, kind: &str, test: &str) -> bool {
    let name = kind.split(' ').next().expect("a word");
    let arguments = format!("-n {namespace} link add {name}7 type {kind}");
    let added = Command::new("ip").args(arguments.split(' ')).output().expect("ip").status.success();
    if !added {
        println!("SKIP {test}, {name}: this kernel has none");
    }
    added
}

/// Checks that the gate refuses to guard tunnel devices such as VXLAN: the interface that receives the tunnel's packets
/// may have merged them (GRO).
#[test]
fn gate_refuses_to_attach_to_gre_ipip_and_vxlan_tunnel_devices() {
    if !root("gate_refuses_to_attach_to_gre_ipip_and_vxlan_tunnel_devices") {
        return;
    }
    let network = NamespaceNetwork::new("gatetunnels");
    let relay = &network.relay;
    let ends = "local 10.98.1.1 remote 10.98.1.2";
    for kind in [
        format!("gre {ends}"),
        format!("gretap {ends}"),
        format!("ipip {ends}"),
        format!("sit {ends}"),
        "ip6gre local fd98:1::1 remote fd98:1::2".to_owned(),
        "ip6tnl local fd98:1::1 remote fd98:1::2".to_owned(),
        format!("vxlan id 7 dstport 4789 {ends}"),
    ] {
        if !add(relay, &kind, "gate_refuses_to_attach_to_gre_ipip_and_vxlan_tunnel_devices") {
            continue;
        }
        let name = kind.split(' ').next().expect("a word");
        let index = ifindex(relay, &format!("{name}7"));
        let gate = gate(PolicyRules::default());
        for mode in [XdpMode::Auto, XdpMode::Generic] {
            let error = inside(relay, || gate.attach(index, mode)).expect_err("refused").to_string();
            assert!(error.contains(&format!("the end of a tunnel ({name})")), "{error}");
        }
    }
}

/// Checks that the gate guards WireGuard devices. The interface that receives the tunnel's packets cannot merge the
/// inner ones (GRO), because they are encrypted.
#[test]
fn wireguard_devices_are_guarded() {
    let test = "wireguard_devices_are_guarded";
    if !root(test) {
        return;
    }
    let network = NamespaceNetwork::new("gatewg");
    if !add(&network.relay, "wireguard", test) || !add(&network.publisher, "wireguard", test) {
        return;
    }
    for (namespace, own, host) in [(&network.relay, 0, 1), (&network.publisher, 1, 2)] {
        ip(&format!("-n {namespace} addr add 10.97.0.{host}/24 dev wireguard7"));
        wireguard::set_up(namespace, "wireguard7", own, [10, 98, 1, 3 - host]);
        ip(&format!("-n {namespace} link set wireguard7 up"));
    }
    let index = ifindex(&network.relay, "wireguard7");
    let gate = gate(tracked(&[]));
    let attached = inside(&network.relay, || {
        gate.watch(index).expect("watched");
        gate.attach(index, XdpMode::Auto)
    });
    assert_eq!(attached.expect("attached"), XdpMode::Generic);
    let server = socket(&network.relay, "10.97.0.1:443".parse().expect("an address"));
    let client = socket(&network.publisher, "10.97.0.2:0".parse().expect("an address"));
    client.connect(server.local_addr().expect("an address")).expect("connected");
    // WireGuard keeps packets until its handshake is complete, and then sends them in the order of these calls.
    for _ in 0..20 {
        client.send(&short(&[], 20)).expect("sent");
    }
    client.send(&initial(1, &[7; 8], &[2; 4], &[])).expect("sent");
    let mut buffer = [0; 2048];
    let (len, from) = server.recv_from(&mut buffer).expect("the one that passes");
    assert_eq!((len, counted(&gate, Rule::Short)), (1200, 20));
    let answer = long(LongPacketType::Initial, 1, &[2; 4], &[0x5e; 8], &[], 1200);
    server.send_to(&answer, from).expect("sent");
    assert_eq!(client.recv(&mut buffer).expect("the answer"), answer.len());
    client.send(&long(LongPacketType::Handshake, 1, &[0x5e; 8], &[2; 4], &[], 100)).expect("sent");
    assert_eq!(server.recv(&mut buffer).expect("a Handshake packet"), 100);
    let statistics = gate.statistics().expect("statistics");
    assert_eq!(statistics.scope("web").expect("web").pass(Pass::Handshake).packets, 1);
    apply(&gate, PolicyRules { modes: enforce(&[Rule::Retry]), ..PolicyRules::default() });
    client.send(&initial(1, &[8; 8], &[2; 4], &[])).expect("sent");
    assert_eq!(client.recv(&mut buffer).map(|_| buffer[0] & 0xf0).expect("a Retry"), 0xf0);
}

/// Checks that the RTP fan-out refuses a tun device. Its program reads Ethernet frames only, so it would find no
/// packets on this device.
#[test]
fn fan_out_refuses_a_tun_device() {
    if !root("fan_out_refuses_a_tun_device") {
        return;
    }
    let network = NamespaceNetwork::new("fantun");
    let _tun = Tun::new(&network.relay);
    let fanout = Fanout::load(&fanout::Config::default()).expect("loaded");
    let index = ifindex(&network.relay, "tun7");
    let error = inside(&network.relay, || fanout.attach(index)).expect_err("refused").to_string();
    assert!(error.contains("have no Ethernet header"), "{error}");
}
