//! Tests of GSO packets: several packets that a sender on the same machine passes to a veth interface as one. Some
//! tests are about ordinary packets that only look like GSO packets. They need root.

#[path = "support/peers.rs"]
mod peers;
#[path = "support/quic.rs"]
#[allow(dead_code)]
mod quic;

use std::io::IoSlice;
use std::net::UdpSocket;
use std::os::fd::AsRawFd as _;

use fastrand::Rng;
use millrace_kernel::crypto::QuicKeys;
use millrace_kernel::tc::{self, KernelHook, Mechanism};
use millrace_quic::keys::KeySuite;
use millrace_relay_kernel::program::{
    Compute, Config, DeferredSocket, EgressOutcome, EgressRecord, Forwarded, FurtherRun, Outcome, Position,
    RelayCounters, RelayProgram, SlotRecord, UpstreamRecord,
};
use millrace_testkit::{net, wait_until};
use net::{NamespaceNetwork, PacketCapture, address, inside, root};
use nix::sys::socket::{
    ControlMessage, MsgFlags, SockaddrStorage, sendmsg, setsockopt, sockopt::RcvBufForce,
};
use peers::{KernelSubscriber, PORT, SubscriberPlace};
use quic::{DirectionKeys, StreamPart};

const STREAM: u64 = 2;
/// The stream offset of the first packet. Later offsets have the same encoded length, so all packets have the same
/// length.
const OFFSET: u64 = 1 << 20;
const LOOPBACK: i32 = 1;
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

struct SuperPacketScene {
    relay: RelayProgram,
    upstream: UpstreamRecord,
    slot: SlotRecord,
    publisher: DirectionKeys,
    subscribers: Vec<KernelSubscriber>,
    from: UdpSocket,
    to: UdpSocket,
    sent: u64,
    offset: u64,
    rng: Rng,
}

impl SuperPacketScene {
    /// Makes one subscriber for each address family (4 or 6) in `families`. The publisher's packets have the first
    /// address family of the list.
    fn new(network: &NamespaceNetwork, config: Config, families: &[u8]) -> Self {
        net::stay_on_this_cpu();
        let mut rng = Rng::with_seed(5);
        let relay = RelayProgram::load(&Config { ports: vec![PORT], ..config }).expect("the relay loads");
        let publisher = DirectionKeys::new(KeySuite::ChaCha20Poly1305, 8, &mut rng);
        let upstream = peers::upstream(&relay, &publisher);
        let mut slot = upstream.slot(STREAM);
        slot.set_position(&Position::opaque(OFFSET));
        let (from, to) = peers::sockets(network, address(families[0], 1, 2), address(families[0], 1, 1));
        peers::attach(network, &relay, "west");
        let subscriber = |(index, family): (usize, &u8)| {
            let at = SubscriberPlace {
                namespace: &network.subscriber,
                local: address(*family, 2, 1),
                remote: address(*family, 2, 2),
            };
            KernelSubscriber::new(network, &relay, at, quic::SUITES[index % 2], 8, &mut rng)
        };
        let subscribers: Vec<_> = families.iter().enumerate().map(subscriber).collect();
        let sockets = subscribers.iter().map(|subscriber| &subscriber.socket).chain([&to]);
        // The kernel counts the memory of the whole GSO packet against the socket's receive buffer for each segment, so
        // the sockets need large buffers.
        sockets.for_each(|socket| setsockopt(socket, RcvBufForce, &(64 << 20)).expect("room for packets"));
        for subscriber in &subscribers {
            slot.add(&subscriber.downstream, &EGRESS).expect("an egress");
        }
        Self { relay, upstream, slot, publisher, subscribers, from, to, sent: 0, offset: OFFSET, rng }
    }

    /// Returns packets that carry these numbers of stream bytes.
    fn packets(&mut self, lengths: &[usize]) -> Vec<(StreamPart, Vec<u8>)> {
        let packet = |len: &usize| {
            let data = quic::bytes(*len, &mut self.rng);
            let chunk = StreamPart { stream: STREAM, offset: self.offset, data, fin: false };
            let packet = self.publisher.seal(0, self.sent, 3, &chunk.encode());
            self.sent += 1;
            self.offset += *len as u64;
            (chunk, packet)
        };
        lengths.iter().map(packet).collect()
    }

    /// Sends all packets as one GSO packet.
    fn send(&self, packets: &[(StreamPart, Vec<u8>)]) {
        let bytes: Vec<u8> = packets.iter().flat_map(|(_, packet)| packet.clone()).collect();
        let size = packets[0].1.len() as u16;
        let control = [ControlMessage::UdpGsoSegments(&size)];
        let sent = sendmsg::<SockaddrStorage>(
            self.from.as_raw_fd(),
            &[IoSlice::new(&bytes)],
            &control,
            MsgFlags::empty(),
            None,
        );
        assert_eq!(sent.expect("sent"), bytes.len());
    }

    /// Checks that userspace gets every packet unchanged. Returns the copies that were sent. The program must have
    /// reported all of them when the first packet reaches userspace.
    fn receive(&self, packets: &[(StreamPart, Vec<u8>)]) -> Vec<Forwarded> {
        let mut forwarded = Vec::new();
        for (_, packet) in packets {
            forwarded.push(peers::receive_original(&self.to, packet, &self.relay));
        }
        let later: usize = forwarded[1..].iter().map(Vec::len).sum();
        assert_eq!(later, 0);
        forwarded.swap_remove(0)
    }

    /// Checks that each subscriber gets the packets that the userspace builder makes.
    fn check_copies(&self, packets: &[(StreamPart, Vec<u8>)], forwarded: &[Forwarded]) {
        assert_eq!(forwarded.len(), packets.len() * self.subscribers.len(), "{:?}", self.counted());
        for subscriber in &self.subscribers {
            let sent = forwarded.iter().filter(|sent| sent.downstream == subscriber.downstream.id());
            for (sent, (chunk, _)) in sent.zip(packets) {
                let moved = StreamPart { stream: EGRESS.stream_id, ..chunk.clone() };
                let want = subscriber.keys.build((0, sent.number), &moved.encode());
                let mut buffer = [0; 2048];
                let len = subscriber.socket.recv(&mut buffer).expect("a copy");
                assert_eq!(buffer[..len], want);
            }
        }
    }

    fn reaches_all(&mut self, lengths: &[usize]) {
        let packets = self.packets(lengths);
        self.send(&packets);
        let forwarded = self.receive(&packets);
        self.check_copies(&packets, &forwarded);
    }

    fn counted(&self) -> RelayCounters {
        // exact: the BPF program counts a packet before it passes the packet on, and all packets have arrived
        self.relay.counters().expect("counters")
    }
}

#[test]
fn each_segment_of_a_gso_packet_is_forwarded() {
    if !root("each_segment_of_a_gso_packet_is_forwarded") {
        return;
    }
    for (name, families, mechanism) in
        [("s4", [4, 4, 6], None), ("s6", [6, 4, 6], None), ("sc", [4, 4, 6], Some(Mechanism::Clsact))]
    {
        let network = NamespaceNetwork::new(name);
        // With checksum offload turned off, the kernel completes the checksums of the copies before they leave the
        // relay, so the capture can check them.
        net::set_checksum_offload(&network.relay, "east", false);
        let mut scene = SuperPacketScene::new(&network, Config { mechanism, ..Config::default() }, &families);
        let capture = PacketCapture::new(&network.subscriber);
        for lengths in [&[1200; 10][..], &[700, 700, 20], &[1300; 40]] {
            let before = scene.counted();
            scene.reaches_all(lengths);
            let counted = scene.counted().since(&before);
            let packets = [Outcome::Segmented, Outcome::Forwarded, Outcome::SuperPacket];
            assert_eq!(packets.map(|outcome| counted.packets(outcome)), [1, lengths.len() as u64, 0]);
        }
        assert_eq!(capture.check(), 53 * 3);
        // The program clones a GSO packet to forward it. Afterwards it forwards a single packet as usual, because it
        // keeps no state of the clone.
        scene.reaches_all(&[100]);
    }
}

/// One program run makes fewer copies than the GSO packet needs, so a further run makes the missing copies of a
/// segment. That run may also begin the next segments.
#[test]
fn gso_copies_beyond_the_run_budget_are_sent_in_further_program_runs() {
    if !root("gso_copies_beyond_the_run_budget_are_sent_in_further_program_runs") {
        return;
    }
    // If a program run makes at most 3 copies, it cannot copy a segment to all 5 subscribers.
    for (max_copies_per_run, continued) in [(3, 8), (7, 0), (14, 0)] {
        let network = NamespaceNetwork::new("sr");
        let config = Config { max_copies_per_run, max_runs: 3, ..Config::default() };
        let mut scene = SuperPacketScene::new(&network, config, &[4, 6, 4, 6, 4]);
        let before = scene.counted();
        scene.reaches_all(&[900; 8]);
        let counted = scene.counted().since(&before);
        let packets = [Outcome::Segmented, Outcome::Forwarded, Outcome::Continued, Outcome::OverBudget];
        let counts = packets.map(|outcome| counted.packets(outcome));
        assert_eq!(counts[0], 1, "{counted:?}");
        assert_eq!(counts[1] + counts[2], 8, "{counted:?}");
        assert!(counts[2] >= continued && counts[3] == 0, "{counted:?}");
        assert_eq!(counted.further_runs(FurtherRun::Last), counts[2], "{counted:?}");
    }
}

#[test]
fn gso_segments_after_the_last_program_run_are_left_to_userspace() {
    if !root("gso_segments_after_the_last_program_run_are_left_to_userspace") {
        return;
    }
    let network = NamespaceNetwork::new("sl");
    let config = Config { max_copies_per_run: 3, max_runs: 1, ..Config::default() };
    let mut scene = SuperPacketScene::new(&network, config, &[4, 4, 6]);
    let before = scene.counted();
    let packets = scene.packets(&[900; 8]);
    scene.send(&packets);
    let forwarded = scene.receive(&packets);
    scene.check_copies(&packets[..1], &forwarded);
    let counted = scene.counted().since(&before);
    let outcomes = [Outcome::Segmented, Outcome::Forwarded, Outcome::OverBudget];
    assert_eq!(outcomes.map(|outcome| counted.packets(outcome)), [1, 1, 7], "{counted:?}");
}

/// Segments of unknown connections and segments that are not authentic are declined one by one. The other segments are
/// forwarded.
#[test]
fn only_forged_segments_of_a_gso_packet_are_not_forwarded() {
    if !root("only_forged_segments_of_a_gso_packet_are_not_forwarded") {
        return;
    }
    let network = NamespaceNetwork::new("sf");
    let mut scene = SuperPacketScene::new(&network, Config::default(), &[4]);
    let mut packets = scene.packets(&[800; 5]);
    let last = packets[1].1.len() - 1;
    // Changes the authentication tag of one packet and the connection ID of another, and gives the last one a long
    // header.
    packets[1].1[last] ^= 1;
    packets[2].1[3] ^= 1;
    packets[4].1[0] |= 0x80;
    let before = scene.counted();
    scene.send(&packets);
    let forwarded = scene.receive(&packets);
    // The fourth packet is authentic too, but its bytes follow a gap in the stream, so no copy of it is made.
    scene.check_copies(&packets[..1], &forwarded);
    let counted = scene.counted().since(&before);
    let outcomes = [Outcome::Forwarded, Outcome::NotAuthentic, Outcome::UnknownId, Outcome::LongHeader];
    assert_eq!(outcomes.map(|outcome| counted.packets(outcome)), [1, 1, 1, 1], "{counted:?}");
    // The program declines each packet as a replay when it is sent again, alone or in a GSO packet.
    let before = scene.counted();
    scene.send(&packets[..1]);
    assert_eq!(scene.receive(&packets[..1]), []);
    scene.send(&[packets[0].clone(), packets[0].clone(), packets[0].clone()]);
    assert_eq!(scene.receive(&vec![packets[0].clone(); 3]), []);
    let counted = scene.counted().since(&before);
    assert_eq!((counted.packets(Outcome::Replayed), counted.packets(Outcome::Segmented)), (4, 1));
}

/// A GSO packet is forwarded by way of a clone on the loopback interface. If the program was detached from loopback,
/// userspace gets the GSO packet and no copies are made. The program counts such GSO packets, and reports itself as
/// detached until it is attached again.
#[test]
fn gso_packet_is_left_to_userspace_if_loopback_has_no_program() {
    if !root("gso_packet_is_left_to_userspace_if_loopback_has_no_program") {
        return;
    }
    let network = NamespaceNetwork::new("sd");
    let mut scene = SuperPacketScene::new(&network, Config::default(), &[4, 6]);
    let west = net::ifindex(&network.relay, "west");
    inside(&network.relay, || assert_eq!(tc::detach_all(LOOPBACK, KernelHook::Egress).expect("TCX"), 1));
    assert!(!inside(&network.relay, || scene.relay.is_attached(west)));
    let packets = scene.packets(&[900; 4]);
    scene.send(&packets);
    assert_eq!(scene.receive(&packets), []);
    assert_eq!(scene.counted().packets(Outcome::SuperPacket), 1);
    peers::attach(&network, &scene.relay, "west");
    assert!(inside(&network.relay, || scene.relay.is_attached(west)));
    scene.slot.set_position(&Position::opaque(scene.offset));
    scene.reaches_all(&[900; 4]);
    // When the program is detached from its last interface besides loopback, it is detached from loopback, too.
    scene.relay.detach_from(west);
    assert!(inside(&network.relay, || tc::count(LOOPBACK, KernelHook::Egress).expect("TCX")) == 0);
}

/// The deferred socket (the socket for packets that need not wake userspace) gets the GSO packet and counts each of
/// its segments.
#[test]
fn gso_packet_reaches_userspace_unsegmented_without_waking_it_up() {
    if !root("gso_packet_reaches_userspace_unsegmented_without_waking_it_up") {
        return;
    }
    let network = NamespaceNetwork::new("sw");
    let mut scene = SuperPacketScene::new(&network, Config::default(), &[4]);
    scene.slot.set_exclusive(true);
    net::ip(&format!("-n {} link set lo up", network.relay));
    let socket = net::socket(&network.relay, "127.0.0.1:0".parse().expect("an address"));
    let deferred: DeferredSocket = scene.relay.deferred_socket(&socket, 64).expect("a deferred socket");
    scene.upstream.set_deferred_socket(&deferred);
    deferred.sleep(deferred.wake());
    let packets = scene.packets(&[900; 6]);
    scene.send(&packets);
    for (_, packet) in &packets {
        let mut buffer = [0; 2048];
        let len = socket.recv(&mut buffer).expect("a deferred packet");
        assert_eq!(buffer[..len], *packet);
    }
    assert_eq!((deferred.packets(), deferred.media(), deferred.wakes()), (6, 6, 0));
    let mut forwarded = Vec::new();
    scene.relay.drain(|packet| forwarded.push(packet));
    scene.check_copies(&packets, &forwarded);
    // A GSO packet goes to the main socket as a whole if one of its segments has to wake userspace.
    let mut packets = scene.packets(&[900; 3]);
    packets[2].1[20] ^= 1;
    scene.send(&packets);
    scene.receive(&packets);
    assert_eq!((deferred.packets(), deferred.wakes()), (6, 1));
}

/// Several processors forward GSO packets at the same time, each in runs of its own.
#[test]
fn gso_packets_on_all_cpus_are_each_forwarded_once() {
    if !root("gso_packets_on_all_cpus_are_each_forwarded_once") {
        return;
    }
    let network = NamespaceNetwork::new("sp");
    let mut scene =
        SuperPacketScene::new(&network, Config { max_copies_per_run: 4, ..Config::default() }, &[4, 4, 6]);
    net::steer(&network.relay, "west", 3);
    let rounds: Vec<_> = (0..50).map(|_| scene.packets(&[600; 12])).collect();
    rounds.iter().for_each(|packets| scene.send(packets));
    let sent = || EgressOutcome::ALL.map(|outcome| scene.counted().egresses(outcome)).iter().sum::<u64>();
    wait_until("all segments", sent, |sent| *sent >= 1);
    // Each of the publisher's packets reaches userspace once and unchanged, in any order.
    let mut due: Vec<&Vec<u8>> = rounds.iter().flatten().map(|(_, packet)| packet).collect();
    let mut buffer = [0; 2048];
    while !due.is_empty() {
        let len = scene.to.recv(&mut buffer).expect("an original");
        let at = due.iter().position(|packet| **packet == buffer[..len]).expect("as it was, and once");
        due.swap_remove(at);
    }
    let mut numbers = std::collections::HashSet::new();
    scene.relay.drain(|sent| assert!(numbers.insert((sent.downstream, sent.number)), "{sent:?}"));
    assert_eq!(numbers.len() as u64, scene.counted().egresses(EgressOutcome::Sent));
    assert_eq!(scene.counted().egresses(EgressOutcome::Lost), 0);
}

/// Run this test with `cargo test -p millrace-relay-kernel --test relay_super -- --ignored --nocapture` on an idle
/// machine. The sender's call on a veth interface returns after the relay's program has finished, so the test measures
/// the time of that call.
#[test]
#[ignore = "soak: measures, on a quiet machine"]
fn time_per_packet_is_measured_with_and_without_gso() {
    const ROUNDS: usize = 300;
    if !root("time_per_packet_is_measured_with_and_without_gso") {
        return;
    }
    println!(
        "us of the sender's call per packet of 1200 bytes, 10 packets at a time, least / median / most of 5 times {ROUNDS}"
    );
    for subscribers in [&[4][..], &[4; 8]] {
        for (how, gso, segmentation) in [
            ("a call for each", false, true),
            ("GSO, segmented in front of the interface", true, false),
            ("GSO, segmented in the program", true, true),
        ] {
            let network = NamespaceNetwork::new("st");
            let state = if segmentation { "on" } else { "off" };
            let features = format!("tx-udp-segmentation {state} gso {state}");
            net::run("ip", &format!("netns exec {} ethtool -K eth {features}", network.publisher));
            let mut scene = SuperPacketScene::new(&network, Config::default(), subscribers);
            let mut times: Vec<f64> = (0..5).map(|_| scene.time(ROUNDS, gso)).collect();
            times.sort_by(f64::total_cmp);
            let count = subscribers.len();
            println!("{count} subscribers, {how}: {:.2} / {:.2} / {:.2}", times[0], times[2], times[4]);
            assert_eq!(scene.counted().egresses(EgressOutcome::Sent), (5 * ROUNDS * 10 * count) as u64);
        }
    }
}

impl SuperPacketScene {
    fn time(&mut self, rounds: usize, gso: bool) -> f64 {
        let mut spent = std::time::Duration::ZERO;
        for _ in 0..rounds {
            let packets = self.packets(&[1200; 10]);
            let begin = std::time::Instant::now();
            if gso {
                self.send(&packets);
            } else {
                packets.iter().for_each(|(_, packet)| assert!(self.from.send(packet).is_ok()));
            }
            spent += begin.elapsed();
            let mut buffer = [0; 2048];
            packets.iter().for_each(|_| assert!(self.to.recv(&mut buffer).is_ok()));
            self.relay.drain(|_| ());
            for subscriber in &self.subscribers {
                packets.iter().for_each(|_| assert!(subscriber.socket.recv(&mut buffer).is_ok()));
            }
        }
        spent.as_secs_f64() * 1e6 / (rounds * 10) as f64
    }
}
