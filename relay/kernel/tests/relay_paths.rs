//! Tests of the network paths that copies take: gateways, the interface that the packet arrived by, small MTUs, both
//! address families, and frames with a known checksum. They need root.

#[path = "support/peers.rs"]
mod peers;
#[path = "support/quic.rs"]
#[allow(dead_code)]
mod quic;

use millrace_testkit::net;
use std::net::{IpAddr, UdpSocket};

use fastrand::Rng;
use millrace_gate::kernel::{self as gate, LoadedGate};
use millrace_kernel::crypto::QuicKeys;
use millrace_kernel::xdp::XdpMode;
use millrace_quic::keys::KeySuite;
use millrace_relay_kernel::program::{
    Compute, Config, EgressOutcome, EgressRecord, Forwarded, Outcome, Position, RelayCounters, RelayProgram,
    SlotRecord, UpstreamRecord,
};
use millrace_testkit::wait_until;
use net::{NamespaceNetwork, PacketCapture, RawSender, address, ip, root};
use peers::{KernelSubscriber, PORT, SubscriberPlace};
use quic::{DirectionKeys, StreamPart};

const STREAM: u64 = 2;
const EGRESS: EgressRecord = EgressRecord {
    stream_id: 3,
    shift: 0,
    from: 0,
    max_offset: 1 << 40,
    tag: 0,
    level: 0,
    track: 0,
    group: 0,
};

/// A relay with one publisher, which sends one stream that arrives on a network interface of the relay.
struct PathScene {
    relay: RelayProgram,
    _upstream: UpstreamRecord,
    slot: SlotRecord,
    publisher: DirectionKeys,
    subscribers: Vec<KernelSubscriber>,
    from: UdpSocket,
    to: UdpSocket,
    sent: u64,
    rng: Rng,
}

impl PathScene {
    /// Makes the relay. `ends` has the source and the destination address of the publisher's packets.
    fn new(network: &NamespaceNetwork, interface: &str, ends: (IpAddr, IpAddr)) -> Self {
        let mut rng = Rng::with_seed(5);
        let relay =
            RelayProgram::load(&Config { ports: vec![PORT], ..Config::default() }).expect("the relay loads");
        let publisher = DirectionKeys::new(KeySuite::ChaCha20Poly1305, 8, &mut rng);
        let upstream = peers::upstream(&relay, &publisher);
        let slot = upstream.slot(STREAM);
        let (from, to) = peers::sockets(network, ends.0, ends.1);
        peers::attach(network, &relay, interface);
        let subscribers = Vec::new();
        Self { relay, _upstream: upstream, slot, publisher, subscribers, from, to, sent: 0, rng }
    }

    /// Adds a subscriber with the address `remote` in `namespace`. Its copies are sent from `local`.
    fn subscribe(&mut self, network: &NamespaceNetwork, namespace: &str, local: IpAddr, remote: IpAddr) {
        let suite = quic::SUITES[self.subscribers.len() % 2];
        let at = SubscriberPlace { namespace, local, remote };
        let subscriber = KernelSubscriber::new(network, &self.relay, at, suite, 8, &mut self.rng);
        self.slot.add(&subscriber.downstream, &EGRESS).expect("an egress");
        self.subscribers.push(subscriber);
    }

    fn packet(&mut self, len: usize) -> (StreamPart, Vec<u8>) {
        let data = quic::bytes(len, &mut self.rng);
        self.slot.set_position(&Position::opaque(9));
        let chunk = StreamPart { stream: STREAM, offset: 9, data, fin: false };
        let packet = self.publisher.seal(0, self.sent, 3, &chunk.encode());
        self.sent += 1;
        (chunk, packet)
    }

    /// Checks that userspace gets the unchanged packet, and returns the copies that the program has made of it.
    fn drained(&mut self, packet: &[u8]) -> Vec<Forwarded> {
        peers::receive_original(&self.to, packet, &self.relay)
    }

    fn counted(&self) -> RelayCounters {
        // exact: the BPF program counts a packet before it passes the packet on, and all packets have arrived
        self.relay.counters().expect("counters")
    }

    fn send(&mut self, len: usize) -> (StreamPart, Vec<Forwarded>) {
        let (chunk, packet) = self.packet(len);
        self.from.send(&packet).expect("send");
        (chunk, self.drained(&packet))
    }

    /// Checks that every subscriber gets `len` bytes of the stream in the packet that the userspace builder makes.
    fn reaches_all(&mut self, len: usize) {
        let (chunk, forwarded) = self.send(len);
        assert_eq!(forwarded.len(), self.subscribers.len(), "{:?}", self.counted());
        for (subscriber, sent) in self.subscribers.iter().zip(&forwarded) {
            assert_eq!(sent.downstream, subscriber.downstream.id());
            let moved = StreamPart { stream: EGRESS.stream_id, ..chunk.clone() };
            let want = subscriber.keys.build((0, sent.number), &moved.encode());
            let mut buffer = [0; 2048];
            let len = subscriber.socket.recv(&mut buffer).expect("a packet");
            assert_eq!(buffer[..len], want);
        }
    }

    /// Checks that `len` bytes are declined as too large for every subscriber.
    fn is_too_large(&mut self, len: usize) {
        let before = self.counted();
        assert_eq!(self.send(len).1, []);
        let counted = self.counted().since(&before);
        assert_eq!(counted.egresses(EgressOutcome::TooLarge), self.subscribers.len() as u64, "{counted:?}");
    }
}

/// Returns the publisher's and the relay's address on the link of the interface `west`.
fn west(family: u8) -> (IpAddr, IpAddr) {
    (address(family, 1, 2), address(family, 1, 1))
}

/// Makes the kernel compute all checksums in the packets, instead of leaving them to an interface.
fn without_offload(network: &NamespaceNetwork) {
    net::set_checksum_offload(&network.publisher, "eth", false);
    net::set_checksum_offload(&network.relay, "east", false);
}

#[test]
fn copies_are_routed_through_a_gateway() {
    if !root("copies_are_routed_through_a_gateway") {
        return;
    }
    let network = NamespaceNetwork::new("gw");
    without_offload(&network);
    let NamespaceNetwork { relay, subscriber, .. } = &network;
    // The subscriber's host is the gateway to further addresses on its loopback interface.
    ip(&format!("-n {subscriber} link set lo up"));
    ip(&format!("-n {subscriber} addr add 10.99.0.1/32 dev lo"));
    ip(&format!("-n {subscriber} addr add fd99::1/128 dev lo"));
    ip(&format!("-n {relay} route add 10.99.0.0/24 via 10.98.2.2"));
    ip(&format!("-n {relay} -6 route add fd99::/64 via fd98:2::2"));
    let mut scene = PathScene::new(&network, "west", west(4));
    scene.subscribe(&network, subscriber, address(4, 2, 1), [10, 99, 0, 1].into());
    scene.subscribe(&network, subscriber, address(6, 2, 1), "fd99::1".parse().expect("an address"));
    let capture = PacketCapture::new(subscriber);
    for len in [1, 400, 1200] {
        scene.reaches_all(len);
    }
    assert_eq!(capture.check(), 6);
}

/// Sends packets of these lengths. One subscriber is on the interface that the packets arrive by, two are on another
/// one.
fn go_back_and_over_another(network: &NamespaceNetwork, lengths: [usize; 2]) {
    for family in [4, 6] {
        let mut scene = PathScene::new(network, "west", west(family));
        let back = (address(family, 1, 1), address(family, 1, 2));
        scene.subscribe(network, &network.publisher, back.0, back.1);
        for other in [6, 4] {
            let over = (address(other, 2, 1), address(other, 2, 2));
            scene.subscribe(network, &network.subscriber, over.0, over.1);
        }
        let captures =
            [&network.publisher, &network.subscriber].map(|namespace| PacketCapture::new(namespace));
        lengths.into_iter().for_each(|length| scene.reaches_all(length));
        // The capture on the publisher's side also has the 2 packets that the publisher sent.
        assert_eq!(captures.map(|capture| capture.check()), [2 + 2, 4]);
    }
}

#[test]
fn copies_are_sent_on_the_receiving_and_on_another_interface() {
    if !root("copies_are_sent_on_the_receiving_and_on_another_interface") {
        return;
    }
    let network = NamespaceNetwork::new("hp");
    without_offload(&network);
    net::set_checksum_offload(&network.relay, "west", false);
    go_back_and_over_another(&network, [700, 20]);
}

/// After generic XDP, TC gets a reallocated skb, in which the link header is at another position than usual.
#[test]
fn packets_that_pass_a_gate_in_generic_mode_are_forwarded() {
    if !root("packets_that_pass_a_gate_in_generic_mode_are_forwarded") {
        return;
    }
    let network = NamespaceNetwork::new("gen");
    without_offload(&network);
    net::set_checksum_offload(&network.relay, "west", false);
    let gate = LoadedGate::load(&gate::Config::default()).unwrap_or_else(|error| panic!("{error}"));
    let west_link = net::ifindex(&network.relay, "west");
    net::inside(&network.relay, || gate.attach(west_link, XdpMode::Generic).expect("generic"));
    go_back_and_over_another(&network, [1200, 20]);
}

#[test]
fn copies_too_large_for_the_subscribers_path_are_declined() {
    if !root("copies_too_large_for_the_subscribers_path_are_declined") {
        return;
    }
    let network = NamespaceNetwork::new("mtu");
    without_offload(&network);
    for (family, headers) in [(4, 28), (6, 48)] {
        let mut scene = PathScene::new(&network, "west", west(4));
        let over = (address(family, 2, 1), address(family, 2, 2));
        scene.subscribe(&network, &network.subscriber, over.0, over.1);
        scene.reaches_all(1250);
        // The packet has a first byte, connection ID, packet number, STREAM frame header, data, and authentication tag.
        let size = 1 + 8 + 4 + 5 + 1250 + 16;
        let relay = &network.relay;
        // First the interface's MTU is one byte too small, then the MTU of the route.
        ip(&format!("-n {relay} link set east mtu {}", size + headers - 1));
        scene.is_too_large(1250);
        scene.reaches_all(1249);
        ip(&format!("-n {relay} link set east mtu 1500"));
        let route = if family == 4 { "10.98.2.2/32" } else { "fd98:2::2/128" };
        ip(&format!("-n {relay} -{family} route add {route} dev east mtu lock {}", size + headers - 1));
        scene.is_too_large(1250);
        scene.reaches_all(1249);
        ip(&format!("-n {relay} -{family} route del {route}"));
    }
}

/// The kernel keeps the outer VLAN tag outside the frame, and the inner one in it.
#[test]
fn frame_with_stacked_vlan_tags_is_left_to_userspace() {
    if !root("frame_with_stacked_vlan_tags_is_left_to_userspace") {
        return;
    }
    let network = NamespaceNetwork::new("qq");
    without_offload(&network);
    let mut scene = PathScene::new(&network, "west", west(4));
    scene.subscribe(&network, &network.subscriber, address(4, 2, 1), address(4, 2, 2));
    let wire = RawSender::new(&network.publisher, "eth");
    let to = net::link_address(&network.relay, "west");
    let ends = (scene.from.local_addr().expect("address"), scene.to.local_addr().expect("address"));
    let (_, packet) = scene.packet(100);
    let frame = net::frame(to, Some(7), ends.0, ends.1, &packet);
    for outer in [0x88a8_u16, 0x8100] {
        let before = scene.counted();
        let tag = [outer, 9].map(u16::to_be_bytes);
        wire.send(&[&frame[..12], tag.as_flattened(), &frame[12..]].concat());
        // No socket receives from the inner VLAN, so the test checks only the program's counter of frames with
        // unsupported headers.
        wait_until(
            "the count",
            || scene.counted().since(&before),
            |counted| counted.packets(Outcome::OddHeaders) > 0,
        );
    }
    assert_eq!(scene.relay.drain(|packet| panic!("{packet:?}")), 0);
    // A packet with only one VLAN tag is forwarded.
    wire.send(&frame);
    let mut buffer = [0; 2048];
    assert!(scene.subscribers[0].socket.recv(&mut buffer).expect("a packet") > packet.len() - 8);
}

/// Tries to add a VXLAN interface. It is removed together with its network namespace.
fn has_vxlan(namespace: &str) -> bool {
    let add = ["-n", namespace, "link", "add", "probe", "type", "vxlan", "id", "1", "dstport", "4790"];
    std::process::Command::new("ip").args(add).output().expect("ip runs").status.success()
}

/// The kernel sums up all bytes of a frame from a tunnel when it has to check the outer checksum (CHECKSUM_COMPLETE).
/// The test cannot detect that the program leaves an outdated sum in the skb. Receivers then compute the sum again, and
/// the kernel warns only about sums that hardware has computed.
#[test]
fn frames_with_checksum_complete_are_forwarded() {
    if !root("frames_with_checksum_complete_are_forwarded") {
        return;
    }
    let network = NamespaceNetwork::new("sum");
    if !has_vxlan(&network.relay) {
        println!("SKIP frames_with_checksum_complete_are_forwarded: the kernel has no VXLAN devices");
        return;
    }
    without_offload(&network);
    for (namespace, underlay, host) in [(&network.publisher, "eth", 2), (&network.relay, "west", 1)] {
        let remote = address(4, 1, 3 - host);
        ip(&format!(
            "-n {namespace} link add vx type vxlan id 5 remote {remote} dstport 4789 dev {underlay} udpcsum"
        ));
        ip(&format!("-n {namespace} addr add 10.98.5.{host}/24 dev vx"));
        ip(&format!("-n {namespace} addr add fd98:5::{host}/64 dev vx nodad"));
        ip(&format!("-n {namespace} link set vx up"));
    }
    net::set_checksum_offload(&network.publisher, "vx", false);
    for family in [4, 6] {
        let ends = (address(family, 5, 2), address(family, 5, 1));
        let mut scene = PathScene::new(&network, "vx", ends);
        for other in [4, 6] {
            let over = (address(other, 2, 1), address(other, 2, 2));
            scene.subscribe(&network, &network.subscriber, over.0, over.1);
        }
        let capture = PacketCapture::new(&network.subscriber);
        for len in [1, 333, 1200] {
            scene.reaches_all(len);
        }
        assert_eq!(capture.check(), 6);
    }
}
