//! Every packet that the program sends is the one that the userspace builder makes.

use millrace_lab_kernel::probe::{self, Probe};
use millrace_quic::keys::Suite;
use millrace_relay_kernel::program::{Config, EgressOutcome, Lookup, Outcome};

use crate::net::{self, Capture, Network, RawSender, inside, root};
use crate::peers::{PORT, attach};
use crate::quic::{self, Chunk};
use crate::scene::{ID_LEN, STREAMS, Scene, simple};

/// Packets of all sizes and shapes to `egresses` subscribers.
fn equals_the_builder(
    name: &str,
    (family, families): (u8, &[u8]),
    suite: Suite,
    (egresses, cases): (usize, usize),
    offload: bool,
) {
    let network = Network::new(name);
    net::set_checksum_offload(&network.publisher, "eth", offload);
    // With offload the copies have their checksum still to be filled in; without it there is nobody to do so.
    net::set_checksum_offload(&network.relay, "east", !offload);
    let mut scene = Scene::new(&network, family, families, suite, egresses, 7);
    attach(&network, &scene.relay, "west");
    scene.capture.check();
    let mut packets = 0;
    for _ in 0..cases {
        let number = scene.next_number();
        // What a downstream adds: a longer connection ID and number, a longer STREAM header.
        let room = scene.rng.usize(..=1452 - 57);
        let (frames, chunks) = scene.generate(room);
        let number_len = scene.rng.usize(1..=4);
        let padding = vec![0; 4usize.saturating_sub(frames.len())];
        let packet = scene.publisher.seal((0, number), number_len, &[padding, frames].concat());
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
fn ipv4_to_one() {
    if root("ipv4_to_one") {
        for (suite, name) in quic::SUITES.into_iter().zip(["c41", "a41"]) {
            equals_the_builder(name, (4, &[4]), suite, (1, 1500), true);
        }
    }
}

#[test]
fn ipv6_to_one() {
    if root("ipv6_to_one") {
        equals_the_builder("c61", (6, &[6]), Suite::ChaCha20Poly1305, (1, 1000), true);
    }
}

#[test]
fn ipv4_to_eight_of_both_families() {
    if root("ipv4_to_eight_of_both_families") {
        equals_the_builder("c48", (4, &[4, 6]), Suite::ChaCha20Poly1305, (8, 400), true);
    }
}

#[test]
fn ipv6_to_eight_of_both_families() {
    if root("ipv6_to_eight_of_both_families") {
        equals_the_builder("a68", (6, &[4, 6]), Suite::Aes128Gcm, (8, 400), true);
    }
}

#[test]
fn without_checksum_offload() {
    if root("without_checksum_offload") {
        equals_the_builder("n48", (4, &[6, 4]), Suite::Aes128Gcm, (8, 200), false);
        equals_the_builder("n68", (6, &[6, 4]), Suite::ChaCha20Poly1305, (8, 200), false);
    }
}

/// The packet came with its flow's hash, which would put every copy into that flow's queue.
#[test]
fn a_copy_has_no_hash_of_the_packet_that_it_was_made_of() {
    if !root("a_copy_has_no_hash_of_the_packet_that_it_was_made_of") {
        return;
    }
    let network = Network::new("hsh");
    net::set_checksum_offload(&network.publisher, "eth", false);
    let config = Config { ports: vec![PORT], id_len: ID_LEN, max_copies_per_run: 2, ..Config::default() };
    let mut scene = Scene::with_config(&config, &network, 4, &[4, 6], Suite::ChaCha20Poly1305, 4, 1);
    let [came, left] = [(&network.relay, "west"), (&network.relay, "east")].map(|(at, interface)| {
        let capture = Capture::on(at, interface);
        capture.cut_hashed();
        capture
    });
    attach(&network, &scene.relay, "west");
    net::steer(&network.relay, "west", 3);
    [&came, &left].iter().for_each(|capture| drop(capture.frames()));
    for len in [1, 1000] {
        let chunk = scene.chunk(len);
        let number = scene.next_number();
        let forwarded = scene.send(&scene.publisher.seal((0, number), 3, &chunk.encode()));
        scene.expect(&[chunk], &forwarded);
        assert_eq!(came.frames()[0].len(), 1, "what spreads packets has noted it");
        let left = left.frames();
        // In the first run as in the further one.
        assert_eq!(left.iter().filter(|frame| frame.len() > 1).count(), 4, "{left:02x?}");
        assert_eq!(left.len(), 4);
    }
}

/// Whether the tag comes back is seen by a probe behind the program: taps see packets before it.
#[test]
fn tagged_frames() {
    if !root("tagged_frames") {
        return;
    }
    let (network, mut scene) = simple("vln");
    scene.relay.detach();
    let mut probe = Probe::load(&probe::Config::default()).expect("the probe loads");
    let west = net::ifindex(&network.relay, "west");
    inside(&network.relay, || probe.attach(west).expect("the probe attaches"));
    attach(&network, &scene.relay, "west");
    let wire = RawSender::new(&network.publisher, "eth");
    let to = net::link_address(&network.relay, "west");
    scene.capture.check();
    for len in [0, 1, 20, 100, 1200] {
        let chunk = Chunk { fin: true, ..scene.chunk(len) };
        let number = scene.next_number();
        let packet = scene.publisher.seal((0, number), 3, &chunk.encode());
        let (from, at) = (scene.from.local_addr().expect("address"), scene.to.local_addr().expect("address"));
        wire.send(&net::frame(to, Some(7), (from, at), &packet));
        let mut forwarded = Vec::new();
        let mut buffer = [0; 2048];
        let got = scene.only().socket.recv(&mut buffer).expect("a packet");
        scene.relay.drain(|packet| forwarded.push(packet));
        let [sent] = forwarded[..] else { panic!("{forwarded:?}") };
        let moved = Chunk { stream: STREAMS[0].downstream, ..chunk };
        assert_eq!(buffer[..got], scene.only().keys.build((0, sent.number), &moved.encode()));
        assert_eq!(scene.capture.check(), 1);
        let samples: Vec<_> =
            probe.read().expect("samples").into_iter().filter(|s| s.vlan.is_some()).collect();
        let [sample] = samples[..] else { panic!("{samples:?}") };
        assert_eq!((sample.vlan, sample.source, sample.destination), (Some(7), from, at));
        assert_eq!(sample.payload_bytes as usize, packet.len());
    }
}
