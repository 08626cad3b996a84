//! Tests of entries in the program's maps that are removed, detached or reused.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use millrace_quic::keys::KeySuite;
use millrace_relay_kernel::program::{Config, EgressOutcome, Outcome, PacketPath, Position, RelayProgram};

use crate::net::{NamespaceNetwork, address, root};
use crate::peers::{PORT, attach};
use crate::scene::{EGRESS, ID_LEN, OFFSET, RelayScene, STREAMS, simple};

#[test]
fn packets_of_removed_connections_or_streams_are_not_forwarded() {
    if !root("packets_of_removed_connections_or_streams_are_not_forwarded") {
        return;
    }
    let network = NamespaceNetwork::new("rem");
    let mut scene = RelayScene::new(&network, 4, &[4, 6], KeySuite::ChaCha20Poly1305, 3, 1);
    attach(&network, &scene.relay, "west");
    scene.slots.clear();
    let mut slot = scene.upstream.slot(STREAMS[0].upstream);
    let keys: Vec<_> = scene
        .subscribers
        .iter()
        .map(|subscriber| slot.add(&subscriber.downstream, &EGRESS).expect("an egress"))
        .collect();
    let mut keys: Vec<_> = keys.into_iter().enumerate().collect();
    // Removes the subscriber's copy (egress) in the middle of three, then the last one, then the only one left.
    for remove in [None, Some(1), Some(2), Some(0)] {
        if let Some(remove) = remove {
            let at = keys.iter().position(|(subscriber, _)| *subscriber == remove).expect("an egress");
            slot.remove(keys.remove(at).1);
        }
        let chunk = scene.chunk(100);
        let number = scene.next_number();
        slot.set_position(&Position::opaque(OFFSET));
        let packet = scene.publisher.seal(0, number, 1, &chunk.encode());
        let got: Vec<_> = scene.send(&packet).iter().map(|packet| packet.downstream).collect();
        let want: Vec<_> = keys.iter().map(|(i, _)| scene.subscribers[*i].downstream.id()).collect();
        assert_eq!(got, want);
    }
    // Removes the first of two subscribers' copies (egresses), then a subscriber's connection while its copy still
    // exists.
    let first = slot.add(&scene.subscribers[0].downstream, &EGRESS).expect("an egress");
    slot.add(&scene.subscribers[1].downstream, &EGRESS).expect("an egress");
    slot.remove(first);
    slot.set_position(&Position::opaque(OFFSET));
    let number = scene.next_number();
    let frames = scene.chunk(100).encode();
    let got = scene.send(&scene.publisher.seal(0, number, 1, &frames));
    assert_eq!(got.len(), 1);
    assert_eq!(got[0].downstream, scene.subscribers[1].downstream.id());
    scene.subscribers.clear();
    slot.set_position(&Position::opaque(OFFSET));
    let number = scene.next_number();
    assert_eq!(scene.send(&scene.publisher.seal(0, number, 1, &frames)), []);
    assert_eq!(scene.counted().egresses(EgressOutcome::Gone), 1);
    // Stops the forwarding of the stream, and then removes the publisher's connection ID.
    drop(slot);
    let number = scene.next_number();
    assert_eq!(scene.send(&scene.publisher.seal(0, number, 1, &frames)), []);
    assert_eq!(scene.counted().packets(Outcome::NoSlot), 2);
    scene.upstream.remove_id(&scene.publisher.id).expect("removed");
    let number = scene.next_number();
    assert_eq!(scene.send(&scene.publisher.seal(0, number, 1, &frames)), []);
    assert_eq!(scene.counted().packets(Outcome::UnknownId), 1);
}

#[test]
fn program_forwards_after_detach_and_attach() {
    if !root("program_forwards_after_detach_and_attach") {
        return;
    }
    let (network, mut scene) = simple("det");
    scene.relay_with(EGRESS);
    let send = |scene: &mut RelayScene| {
        let number = scene.next_number();
        let frames = scene.chunk(9).encode();
        let packet = scene.publisher.seal(0, number, 1, &frames);
        (scene.send(&packet).len(), packet)
    };
    assert_eq!(send(&mut scene).0, 1);
    scene.relay.detach();
    let mut missed = Vec::new();
    for number in 1..300 {
        let (sent, packet) = send(&mut scene);
        assert_eq!(sent, 0);
        scene.upstream.observe(number);
        missed.push(packet);
    }
    attach(&network, &scene.relay, "west");
    // Packets that arrived while the program was detached are not forwarded later, but new ones are.
    for packet in &missed[250..] {
        assert_eq!(scene.send(packet), []);
    }
    assert_eq!(scene.counted().packets(Outcome::Replayed), 49);
    assert_eq!(send(&mut scene).0, 1);
    // Handles stay usable after the program is dropped, but nothing is forwarded.
    let RelayScene { relay, subscribers, .. } = &mut scene;
    let config = Config { ports: vec![PORT], id_len: ID_LEN, ..Config::default() };
    drop(std::mem::replace(relay, RelayProgram::load(&config).expect("another relay")));
    let downstream = &subscribers[0].downstream;
    let next = downstream.number().fetch_add(1, Ordering::SeqCst);
    assert_eq!(next, 2);
    assert_eq!(send(&mut scene).0, 0);
    assert_eq!(scene.only().downstream.number().load(Ordering::SeqCst), 3);
}

#[test]
fn removed_bpf_map_records_are_reused_after_running_programs_end() {
    if !root("removed_bpf_map_records_are_reused_after_running_programs_end") {
        return;
    }
    let network = NamespaceNetwork::new("reu");
    let mut scene = RelayScene::new(&network, 4, &[4], KeySuite::ChaCha20Poly1305, 1, 1);
    let config = Config {
        ports: vec![PORT],
        id_len: ID_LEN,
        max_upstreams: 2,
        max_downstreams: 2,
        max_slots: 1,
        max_egresses: 2,
        ..Config::default()
    };
    scene.rebuild(&network, &config);
    attach(&network, &scene.relay, "west");
    let path = PacketPath {
        local: SocketAddr::new(address(4, 2, 1), PORT),
        remote: SocketAddr::new(address(4, 2, 2), 1),
        id: vec![],
        traffic_class: 0,
        flow_label: 0,
    };
    let mut ids = std::collections::HashSet::new();
    for _ in 0..50 {
        scene.slots.clear();
        scene.relay.settle().expect("settled");
        let other = scene.relay.downstream(&path, 1452, 0).expect("the second");
        assert!(scene.relay.downstream(&path, 1452, 0).is_err(), "a third");
        assert!(ids.insert(other.id()), "an ID twice");
        let upstream = scene.relay.upstream(0).expect("the second");
        assert!(scene.relay.upstream(0).is_err(), "a third");
        drop(upstream);
        let key = scene.relay_with(EGRESS);
        let mut slot = scene.slots.remove(0);
        slot.add(&other, &EGRESS).expect("the second");
        assert!(slot.add(&other, &EGRESS).is_err(), "a third");
        slot.remove(key);
        assert!(scene.upstream.slot(99).add(&other, &EGRESS).is_err(), "a second slot");
        // The first entry for a subscriber's copy now belongs to another subscriber's connection, which has no keys.
        let number = scene.next_number();
        slot.set_position(&Position::opaque(OFFSET));
        let frames = scene.chunk(9).encode();
        assert_eq!(scene.send(&scene.publisher.seal(0, number, 1, &frames)), []);
        assert_eq!(other.outcome(EgressOutcome::NoKeys) + other.outcome(EgressOutcome::Window), 1);
    }
}
