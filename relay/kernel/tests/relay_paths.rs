//! Where the relay program's packets come from and go to: gateways, hairpins, narrow links, both families, frames whose
//! checksum is known. Needs root.

#[path = "support/peers.rs"]
mod peers;
#[path = "support/quic.rs"]
#[allow(dead_code)]
mod quic;

use millrace_testkit::net;
use std::net::{IpAddr, UdpSocket};

use fastrand::Rng;
use millrace_gate::kernel::{self as gate, Gate};
use millrace_kernel::crypto::QuicKeys;
use millrace_kernel::xdp::Mode;
use millrace_quic::keys::Suite;
use millrace_relay_kernel::program::{
    Compute, Config, Counters, EgressOutcome, EgressRecord, Forwarded, Outcome, PositionRecord, Relay,
    SlotRecord, UpstreamRecord,
};
use millrace_testkit::wait_until;
use net::{Capture, Network, RawSender, address, ip, root};
use peers::{PORT, Subscriber};
use quic::{Chunk, Direction};

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

/// One upstream with one stream, on `interface` of the relay.
struct Scene {
    relay: Relay,
    _upstream: UpstreamRecord,
    slot: SlotRecord,
    publisher: Direction,
    subscribers: Vec<Subscriber>,
    from: UdpSocket,
    to: UdpSocket,
    sent: u64,
    rng: Rng,
}

impl Scene {
    /// `ends`: where the publisher's packets come from, and go to.
    fn new(network: &Network, interface: &str, ends: (IpAddr, IpAddr)) -> Self {
        let mut rng = Rng::with_seed(5);
        let relay = Relay::load(&Config { ports: vec![PORT], ..Config::default() }).expect("the relay loads");
        let publisher = Direction::new(Suite::ChaCha20Poly1305, 8, &mut rng);
        let upstream = peers::upstream(&relay, &publisher);
        let slot = upstream.slot(STREAM);
        let (from, to) = peers::sockets(network, ends);
        peers::attach(network, &relay, interface);
        let subscribers = Vec::new();
        Self { relay, _upstream: upstream, slot, publisher, subscribers, from, to, sent: 0, rng }
    }

    /// A subscriber at `remote` in `namespace`, whose packets leave from `local`.
    fn subscribe(&mut self, network: &Network, namespace: &str, (local, remote): (IpAddr, IpAddr)) {
        let suite = quic::SUITES[self.subscribers.len() % 2];
        let at = (namespace, local, remote);
        let subscriber = Subscriber::new(network, &self.relay, at, (suite, 8), &mut self.rng);
        self.slot.add(&subscriber.downstream, &EGRESS).expect("an egress");
        self.subscribers.push(subscriber);
    }

    fn packet(&mut self, len: usize) -> (Chunk, Vec<u8>) {
        let data = quic::bytes(len, &mut self.rng);
        self.slot.set_position(&PositionRecord::opaque(9));
        let chunk = Chunk { stream: STREAM, offset: 9, data, fin: false };
        let packet = self.publisher.seal((0, self.sent), 3, &chunk.encode());
        self.sent += 1;
        (chunk, packet)
    }

    /// Userspace gets the packet as it was.
    fn drained(&mut self, packet: &[u8]) -> Vec<Forwarded> {
        peers::receive_original(&self.to, packet, &self.relay)
    }

    fn counted(&self) -> Counters {
        self.relay.counters().expect("counters") // exact: the program counts a packet before it lets the original pass
    }

    fn send(&mut self, len: usize) -> (Chunk, Vec<Forwarded>) {
        let (chunk, packet) = self.packet(len);
        self.from.send(&packet).expect("send");
        (chunk, self.drained(&packet))
    }

    /// Every subscriber gets `len` bytes, as the userspace builder would have sent them.
    fn reaches_all(&mut self, len: usize) {
        let (chunk, forwarded) = self.send(len);
        assert_eq!(forwarded.len(), self.subscribers.len(), "{:?}", self.counted());
        for (subscriber, sent) in self.subscribers.iter().zip(&forwarded) {
            assert_eq!(sent.downstream, subscriber.downstream.id());
            let moved = Chunk { stream: EGRESS.stream_id, ..chunk.clone() };
            let want = subscriber.keys.build((0, sent.number), &moved.encode());
            let mut buffer = [0; 2048];
            let len = subscriber.socket.recv(&mut buffer).expect("a packet");
            assert_eq!(buffer[..len], want);
        }
    }

    /// Nobody gets `len` bytes.
    fn is_too_large(&mut self, len: usize) {
        let before = self.counted();
        assert_eq!(self.send(len).1, []);
        let counted = self.counted().since(&before);
        assert_eq!(counted.egresses(EgressOutcome::TooLarge), self.subscribers.len() as u64, "{counted:?}");
    }
}

fn west(family: u8) -> (IpAddr, IpAddr) {
    (address(family, 1, 2), address(family, 1, 1))
}

/// Tells the link layers of all interfaces to compute checksums in place: nothing is left to be filled in.
fn without_offload(network: &Network) {
    net::set_checksum_offload(&network.publisher, "eth", false);
    net::set_checksum_offload(&network.relay, "east", false);
}

#[test]
fn the_next_hop_is_a_gateway() {
    if !root("the_next_hop_is_a_gateway") {
        return;
    }
    let network = Network::new("gw");
    without_offload(&network);
    let Network { relay, subscriber, .. } = &network;
    // The subscriber's host is the gateway to networks of its own.
    ip(&format!("-n {subscriber} link set lo up"));
    ip(&format!("-n {subscriber} addr add 10.99.0.1/32 dev lo"));
    ip(&format!("-n {subscriber} addr add fd99::1/128 dev lo"));
    ip(&format!("-n {relay} route add 10.99.0.0/24 via 10.98.2.2"));
    ip(&format!("-n {relay} -6 route add fd99::/64 via fd98:2::2"));
    let mut scene = Scene::new(&network, "west", west(4));
    scene.subscribe(&network, subscriber, (address(4, 2, 1), [10, 99, 0, 1].into()));
    scene.subscribe(&network, subscriber, (address(6, 2, 1), "fd99::1".parse().expect("an address")));
    let capture = Capture::new(subscriber);
    for len in [1, 400, 1200] {
        scene.reaches_all(len);
    }
    assert_eq!(capture.check(), 6);
}

/// Packets of so many bytes go to one subscriber over the interface that they came by, and to two over another.
fn go_back_and_over_another(network: &Network, lengths: [usize; 2]) {
    for family in [4, 6] {
        let mut scene = Scene::new(network, "west", west(family));
        let back = (address(family, 1, 1), address(family, 1, 2));
        scene.subscribe(network, &network.publisher, back);
        for other in [6, 4] {
            let over = (address(other, 2, 1), address(other, 2, 2));
            scene.subscribe(network, &network.subscriber, over);
        }
        let captures = [&network.publisher, &network.subscriber].map(|namespace| Capture::new(namespace));
        lengths.into_iter().for_each(|length| scene.reaches_all(length));
        // The publisher's own two are among those that are seen there.
        assert_eq!(captures.map(|capture| capture.check()), [2 + 2, 4]);
    }
}

#[test]
fn back_over_the_interface_it_came_by_and_over_another() {
    if !root("back_over_the_interface_it_came_by_and_over_another") {
        return;
    }
    let network = Network::new("hp");
    without_offload(&network);
    net::set_checksum_offload(&network.relay, "west", false);
    go_back_and_over_another(&network, [700, 20]);
}

/// There packets come to TC as copies whose link header is somewhere else.
#[test]
fn behind_a_gate_in_generic_mode() {
    if !root("behind_a_gate_in_generic_mode") {
        return;
    }
    let network = Network::new("gen");
    without_offload(&network);
    net::set_checksum_offload(&network.relay, "west", false);
    let gate = Gate::load(&gate::Config::default()).unwrap_or_else(|error| panic!("{error}"));
    let west_link = net::ifindex(&network.relay, "west");
    net::inside(&network.relay, || gate.attach(west_link, Mode::Generic).expect("generic"));
    go_back_and_over_another(&network, [1200, 20]);
}

#[test]
fn the_subscribers_link_or_route_is_narrower() {
    if !root("the_subscribers_link_or_route_is_narrower") {
        return;
    }
    let network = Network::new("mtu");
    without_offload(&network);
    for (family, headers) in [(4, 28), (6, 48)] {
        let mut scene = Scene::new(&network, "west", west(4));
        let over = (address(family, 2, 1), address(family, 2, 2));
        scene.subscribe(&network, &network.subscriber, over);
        scene.reaches_all(1250);
        // First byte, ID, number, STREAM header, tag.
        let size = 1 + 8 + 4 + 5 + 1250 + 16;
        let relay = &network.relay;
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

/// The outer tag travels beside the frame, the inner one in it.
#[test]
fn stacked_tags_are_left_to_userspace() {
    if !root("stacked_tags_are_left_to_userspace") {
        return;
    }
    let network = Network::new("qq");
    without_offload(&network);
    let mut scene = Scene::new(&network, "west", west(4));
    scene.subscribe(&network, &network.subscriber, (address(4, 2, 1), address(4, 2, 2)));
    let wire = RawSender::new(&network.publisher, "eth");
    let to = net::link_address(&network.relay, "west");
    let ends = (scene.from.local_addr().expect("address"), scene.to.local_addr().expect("address"));
    let (_, packet) = scene.packet(100);
    let frame = net::frame(to, Some(7), ends, &packet);
    for outer in [0x88a8_u16, 0x8100] {
        let before = scene.counted();
        let tag = [outer, 9].map(u16::to_be_bytes);
        wire.send(&[&frame[..12], tag.as_flattened(), &frame[12..]].concat());
        // Nobody in userspace listens on that VLAN: the count is all there is to see.
        wait_until(
            "the count",
            || scene.counted().since(&before),
            |counted| counted.packets(Outcome::OddHeaders) > 0,
        );
    }
    assert_eq!(scene.relay.drain(|packet| panic!("{packet:?}")), 0);
    // With one of the tags it is forwarded.
    wire.send(&frame);
    let mut buffer = [0; 2048];
    assert!(scene.subscribers[0].socket.recv(&mut buffer).expect("a packet") > packet.len() - 8);
}

/// Leaves one behind, which goes with the namespace.
fn has_vxlan(namespace: &str) -> bool {
    let add = ["-n", namespace, "link", "add", "probe", "type", "vxlan", "id", "1", "dstport", "4790"];
    std::process::Command::new("ip").args(add).output().expect("ip runs").status.success()
}

/// What comes out of a tunnel whose outer checksum had to be computed has a sum over all of it (CHECKSUM_COMPLETE). A
/// stale sum would not fail here: receivers compute it anew when it does not fit, and the kernel only complains about
/// those that hardware made.
#[test]
fn frames_with_a_sum_over_all_of_them() {
    if !root("frames_with_a_sum_over_all_of_them") {
        return;
    }
    let network = Network::new("sum");
    if !has_vxlan(&network.relay) {
        println!("SKIP frames_with_a_sum_over_all_of_them: the kernel has no VXLAN devices");
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
        let mut scene = Scene::new(&network, "vx", ends);
        for other in [4, 6] {
            let over = (address(other, 2, 1), address(other, 2, 2));
            scene.subscribe(&network, &network.subscriber, over);
        }
        let capture = Capture::new(&network.subscriber);
        for len in [1, 333, 1200] {
            scene.reaches_all(len);
        }
        assert_eq!(capture.check(), 6);
    }
}
