//! Tests that every packet of the program equals the packet that the userspace builder makes.

use millrace_lab_kernel::probe::{self, PacketProbe};
use millrace_quic::keys::KeySuite;
use millrace_relay_kernel::program::{Config, EgressOutcome, Lookup, Outcome};

use crate::net::{self, NamespaceNetwork, PacketCapture, RawSender, inside, root};
use crate::peers::{PORT, attach};
use crate::quic::{self, StreamPart};
use crate::scene::{ID_LEN, RelayScene, STREAMS, simple};

/// Sends random packets of all sizes to `egresses` subscribers, and compares each copy with the builder's packet.
fn equals_the_builder(
    name: &str,
    family: u8,
    families: &[u8],
    suite: KeySuite,
    egresses: usize,
    cases: usize,
    offload: bool,
) {
    let network = NamespaceNetwork::new(name);
    net::set_checksum_offload(&network.publisher, "eth", offload);
    // With `offload`, packets arrive with a partial checksum (CHECKSUM_PARTIAL), and the kernel completes it in the
    // copies. Otherwise the program has to compute full checksums.
    net::set_checksum_offload(&network.relay, "east", !offload);
    let mut scene = RelayScene::new(&network, family, families, suite, egresses, 7);
    attach(&network, &scene.relay, "west");
    scene.capture.check();
    let mut packets = 0;
    for _ in 0..cases {
        let number = scene.next_number();
        // A copy may be longer than its packet: it may have a longer connection ID, packet number and STREAM frame
        // header.
        let room = scene.rng.usize(..=1452 - 57);
        let (frames, chunks) = scene.generate(room);
        let number_len = scene.rng.usize(1..=4);
        let padding = vec![0; 4usize.saturating_sub(frames.len())];
        let packet = scene.publisher.seal(0, number, number_len, &[padding, frames].concat());
        scene.compute_ahead();
        let forwarded = scene.send(&packet);
        scene.expect(&chunks, &forwarded);
        packets += chunks.len() * egresses;
        assert_eq!(scene.capture.check(), chunks.len() * egresses);
    }
    let counters = scene.counted();
    assert_eq!(counters.egresses(EgressOutcome::Sent), packets as u64);
    let others = [Outcome::Forwarded, Outcome::NoSlot].map(|outcome| counters.packets(outcome));
    assert_eq!(others.iter().sum::<u64>(), cases as u64, "{counters:?}");
    // Every outcome of looking up a precomputed keystream must have occurred, both for packets and for copies.
    let lookups = Lookup::ALL.map(|lookup| {
        let sealed: u64 = scene.subscribers.iter().map(|s| s.downstream.lookups(lookup)).sum();
        (scene.upstream.lookups(lookup), sealed)
    });
    assert_eq!(lookups.iter().map(|(opened, _)| opened).sum::<u64>(), cases as u64);
    assert_eq!(lookups.iter().map(|(_, sealed)| sealed).sum::<u64>(), packets as u64);
    assert!(lookups.iter().all(|(opened, sealed)| *opened > 0 && *sealed > 0), "{lookups:?}");
    println!("{name}: {cases} packets became {packets}, all equal");
}

#[test]
fn ipv4_copy_for_one_subscriber_equals_the_userspace_packet() {
    if root("ipv4_copy_for_one_subscriber_equals_the_userspace_packet") {
        for (suite, name) in quic::SUITES.into_iter().zip(["c41", "a41", "b41"]) {
            equals_the_builder(name, 4, &[4], suite, 1, 1500, true);
        }
    }
}

#[test]
fn ipv6_copy_for_one_subscriber_equals_the_userspace_packet() {
    if root("ipv6_copy_for_one_subscriber_equals_the_userspace_packet") {
        equals_the_builder("c61", 6, &[6], KeySuite::ChaCha20Poly1305, 1, 1000, true);
    }
}

#[test]
fn copies_of_ipv4_packets_to_ipv4_and_ipv6_equal_userspace_packets() {
    if root("copies_of_ipv4_packets_to_ipv4_and_ipv6_equal_userspace_packets") {
        equals_the_builder("c48", 4, &[4, 6], KeySuite::ChaCha20Poly1305, 8, 400, true);
    }
}

#[test]
fn copies_of_ipv6_packets_to_ipv4_and_ipv6_equal_userspace_packets() {
    if root("copies_of_ipv6_packets_to_ipv4_and_ipv6_equal_userspace_packets") {
        equals_the_builder("a68", 6, &[4, 6], KeySuite::Aes128Gcm, 8, 400, true);
    }
}

#[test]
fn copies_without_checksum_offload_equal_userspace_packets() {
    if root("copies_without_checksum_offload_equal_userspace_packets") {
        equals_the_builder("n48", 4, &[6, 4], KeySuite::Aes128Gcm, 8, 200, false);
        equals_the_builder("n68", 6, &[6, 4], KeySuite::ChaCha20Poly1305, 8, 200, false);
    }
}

/// The kernel stores a flow hash in each received skb. A copy with the same hash would be sent in the transmit queue of
/// the publisher's flow.
#[test]
fn copy_does_not_keep_the_skb_flow_hash_of_the_received_packet() {
    if !root("copy_does_not_keep_the_skb_flow_hash_of_the_received_packet") {
        return;
    }
    let network = NamespaceNetwork::new("hsh");
    net::set_checksum_offload(&network.publisher, "eth", false);
    let config = Config { ports: vec![PORT], id_len: ID_LEN, max_copies_per_run: 2, ..Config::default() };
    let mut scene = RelayScene::with_config(&config, &network, 4, &[4, 6], KeySuite::ChaCha20Poly1305, 4, 1);
    let [came, left] = [(&network.relay, "west"), (&network.relay, "east")].map(|(at, interface)| {
        let capture = PacketCapture::on(at, interface);
        capture.cut_hashed();
        capture
    });
    attach(&network, &scene.relay, "west");
    net::steer(&network.relay, "west", 3);
    [&came, &left].iter().for_each(|capture| drop(capture.frames()));
    for len in [1, 1000] {
        let chunk = scene.chunk(len);
        let number = scene.next_number();
        let forwarded = scene.send(&scene.publisher.seal(0, number, 3, &chunk.encode()));
        scene.expect(&[chunk], &forwarded);
        // The capture cuts frames with a flow hash to one byte, so this length shows that the received packet has a
        // hash.
        assert_eq!(came.frames()[0].len(), 1, "what spreads packets has noted it");
        let left = left.frames();
        // No copy has a flow hash, neither those of the first program run nor those of the further run.
        assert_eq!(left.iter().filter(|frame| frame.len() > 1).count(), 4, "{left:02x?}");
        assert_eq!(left.len(), 4);
    }
}

/// A probe that runs after the program checks that the received packet has its VLAN tag again. A packet capture sees
/// packets before the program.
#[test]
fn copies_of_vlan_tagged_frames_equal_userspace_packets() {
    if !root("copies_of_vlan_tagged_frames_equal_userspace_packets") {
        return;
    }
    let (network, mut scene) = simple("vln");
    scene.relay.detach();
    let mut probe = PacketProbe::load(&probe::Config::default()).expect("the probe loads");
    let west = net::ifindex(&network.relay, "west");
    inside(&network.relay, || probe.attach(west).expect("the probe attaches"));
    attach(&network, &scene.relay, "west");
    let wire = RawSender::new(&network.publisher, "eth");
    let to = net::link_address(&network.relay, "west");
    scene.capture.check();
    for len in [0, 1, 20, 100, 1200] {
        let chunk = StreamPart { fin: true, ..scene.chunk(len) };
        let number = scene.next_number();
        let packet = scene.publisher.seal(0, number, 3, &chunk.encode());
        let from = scene.from.local_addr().expect("address");
        let at = scene.to.local_addr().expect("address");
        wire.send(&net::frame(to, Some(7), from, at, &packet));
        let mut forwarded = Vec::new();
        let mut buffer = [0; 2048];
        let got = scene.only().socket.recv(&mut buffer).expect("a packet");
        scene.relay.drain(|packet| forwarded.push(packet));
        let [sent] = forwarded[..] else { panic!("{forwarded:?}") };
        let moved = StreamPart { stream: STREAMS[0].downstream, ..chunk };
        assert_eq!(buffer[..got], scene.only().keys.build((0, sent.number), &moved.encode()));
        assert_eq!(scene.capture.check(), 1);
        let samples: Vec<_> =
            probe.read().expect("samples").into_iter().filter(|s| s.vlan.is_some()).collect();
        let [sample] = samples[..] else { panic!("{samples:?}") };
        assert_eq!((sample.vlan, sample.source, sample.destination), (Some(7), from, at));
        assert_eq!(sample.payload_bytes as usize, packet.len());
    }
}
