//! Tests of packets with many copies: how many copies one run of the program makes, and how further runs continue.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::num::NonZero;

use millrace_quic::keys::KeySuite;
use millrace_relay_kernel::program::{
    Config, DownstreamId, DownstreamRecord, EgressOutcome, FurtherRun, Outcome,
};
use millrace_transport::trace::{OffloadTraceKind, PacketFilter};
use nix::sys::socket::{setsockopt, sockopt::RcvBufForce};

use crate::net::{self, NamespaceNetwork, address, root};
use crate::peers::{self, PORT, attach};
use crate::quic::{DirectionKeys, StreamPart};
use crate::scene::{EGRESS, ID_LEN, RelayScene, STREAMS, simple};

#[test]
fn copy_budget_of_a_program_run_is_spent_in_frame_order() {
    if !root("copy_budget_of_a_program_run_is_spent_in_frame_order") {
        return;
    }
    let network = NamespaceNetwork::new("bud");
    let mut scene = RelayScene::new(&network, 4, &[4], KeySuite::ChaCha20Poly1305, 3, 1);
    let config =
        Config { ports: vec![PORT], id_len: ID_LEN, max_copies_per_run: 4, max_runs: 1, ..Config::default() };
    scene.rebuild(&network, &config);
    attach(&network, &scene.relay, "west");
    for (chunks, sent, outcome) in [(1, 3, Outcome::Forwarded), (2, 4, Outcome::OverBudget)] {
        let frames: Vec<u8> = scene.chunks(chunks, 50).iter().flat_map(StreamPart::encode).collect();
        let before = scene.counted();
        let number = scene.next_number();
        assert_eq!(scene.send(&scene.publisher.seal(0, number, 1, &frames)).len(), sent);
        let counted = scene.counted().since(&before);
        assert_eq!((counted.packets(outcome), counted.egresses(EgressOutcome::Sent)), (1, sent as u64));
    }
}

/// When userspace receives the packet, it must be able to read the program's reports about all of the packet's copies.
#[test]
fn fan_out_beyond_the_copy_budget_continues_in_further_runs() {
    if !root("fan_out_beyond_the_copy_budget_continues_in_further_runs") {
        return;
    }
    for (name, family, offload) in [("f4", 4, true), ("f6", 6, false)] {
        let network = NamespaceNetwork::new(name);
        net::set_checksum_offload(&network.publisher, "eth", offload);
        net::set_checksum_offload(&network.relay, "east", !offload);
        let config = Config { ports: vec![PORT], id_len: ID_LEN, max_copies_per_run: 4, ..Config::default() };
        let mut scene =
            RelayScene::with_config(&config, &network, family, &[4, 6], KeySuite::ChaCha20Poly1305, 7, 1);
        attach(&network, &scene.relay, "west");
        scene.capture.check();
        // With at most 4 copies per program run, 7 copies take 2 runs, 14 copies take 4, and 56 copies take 14.
        for (chunks, further) in [(1, 1), (2, 3), (8, 13)] {
            let chunks = scene.chunks(chunks, 100);
            let frames: Vec<u8> = chunks.iter().flat_map(StreamPart::encode).collect();
            let before = scene.counted();
            let number = scene.next_number();
            let forwarded = scene.send(&scene.publisher.seal(0, number, 1, &frames));
            scene.expect(&chunks, &forwarded);
            assert_eq!(scene.capture.check(), 7 * chunks.len());
            let counted = scene.counted().since(&before);
            assert_eq!(counted.packets(Outcome::Continued), 1);
            // `runs` has the numbers of three kinds of further runs: those that made the last copies of the packet,
            // those that left copies for another run, and those that left copies to userspace.
            let runs = FurtherRun::ALL.map(|outcome| counted.further_runs(outcome));
            assert_eq!(runs, [1, further - 1, 0]);
        }
    }
}

#[test]
fn a_thousand_subscribers_get_every_byte_of_a_stream() {
    const SUBSCRIBERS: usize = 1100;
    const RUNS: u64 = SUBSCRIBERS.div_ceil(64) as u64;
    if !root("a_thousand_subscribers_get_every_byte_of_a_stream") {
        return;
    }
    let (_network, mut scene) = simple("tho");
    // All subscribers have the same address, so the test needs only one socket and namespace.
    let at = (SocketAddr::new(address(4, 2, 1), PORT), scene.only().socket.local_addr().expect("address"));
    setsockopt(&scene.only().socket, RcvBufForce, &(16 << 20)).expect("room for packets");
    scene.slots.clear();
    let mut slot = scene.upstream.slot(STREAMS[0].upstream);
    let subscribers: HashMap<DownstreamId, (DirectionKeys, DownstreamRecord)> = (0..SUBSCRIBERS)
        .map(|_| {
            let keys = DirectionKeys::new(KeySuite::ChaCha20Poly1305, ID_LEN, &mut scene.rng);
            let downstream = peers::downstream(&scene.relay, at.0, at.1, &keys, 0);
            slot.add(&downstream, &EGRESS).expect("an egress");
            (downstream.id(), (keys, downstream))
        })
        .collect();
    scene.slots = vec![slot];
    for _ in 0..4 {
        let chunk = scene.chunk(100);
        let number = scene.next_number();
        let before = scene.counted();
        let forwarded = scene.send(&scene.publisher.seal(0, number, 1, &chunk.encode()));
        let moved = StreamPart { stream: EGRESS.stream_id, ..chunk };
        // Copies may arrive in any order.
        let mut due: HashSet<Vec<u8>> = forwarded
            .iter()
            .map(|sent| subscribers[&sent.downstream].0.build((0, sent.number), &moved.encode()))
            .collect();
        assert_eq!((forwarded.len(), due.len()), (SUBSCRIBERS, SUBSCRIBERS));
        let mut buffer = [0; 2048];
        while !due.is_empty() {
            let len = scene.only().socket.recv(&mut buffer).expect("a copy");
            assert!(due.remove(&buffer[..len]), "twice, or not as it was registered");
        }
        let counted = scene.counted().since(&before);
        let runs = FurtherRun::ALL.map(|outcome| counted.further_runs(outcome));
        assert_eq!((counted.packets(Outcome::Continued), runs), (1, [1, RUNS - 2, 0]));
        assert_eq!(counted.egresses(EgressOutcome::Sent), SUBSCRIBERS as u64);
    }
}

#[test]
fn copies_after_the_last_program_run_are_left_to_userspace() {
    if !root("copies_after_the_last_program_run_are_left_to_userspace") {
        return;
    }
    let network = NamespaceNetwork::new("lft");
    let config =
        Config { ports: vec![PORT], id_len: ID_LEN, max_copies_per_run: 2, max_runs: 3, ..Config::default() };
    let mut scene = RelayScene::with_config(&config, &network, 4, &[4], KeySuite::Aes128Gcm, 7, 1);
    attach(&network, &scene.relay, "west");
    let chunk = scene.chunk(100);
    let number = scene.next_number();
    let forwarded = scene.send(&scene.publisher.seal(0, number, 1, &chunk.encode()));
    // Three runs of the program, with 2 copies each, make 6 of the packet's 7 copies.
    scene.subscribers.truncate(6);
    scene.expect(&[chunk], &forwarded);
    let counters = scene.counted();
    assert_eq!(FurtherRun::ALL.map(|outcome| counters.further_runs(outcome)), [0, 1, 1]);
}

#[test]
fn packet_is_traced_in_all_its_program_runs_or_in_none() {
    if !root("packet_is_traced_in_all_its_program_runs_or_in_none") {
        return;
    }
    let network = NamespaceNetwork::new("trc");
    let config =
        Config { ports: vec![PORT], id_len: ID_LEN, max_copies_per_run: 2, max_runs: 3, ..Config::default() };
    let mut scene = RelayScene::with_config(&config, &network, 4, &[4], KeySuite::ChaCha20Poly1305, 7, 1);
    attach(&network, &scene.relay, "west");
    let every = NonZero::new(2).expect("not 0");
    scene.relay.set_tracing(Some(PacketFilter { every, track: None, session: None }));
    for _ in 0..4 {
        let number = scene.next_number();
        let frames = scene.chunk(100).encode();
        let forwarded = scene.send(&scene.publisher.seal(0, number, 1, &frames));
        let mut events = Vec::new();
        assert_eq!(scene.relay.drain_events(|event| events.push(event)), 0);
        // The program reports trace events for every second packet.
        if number % 2 == 1 {
            assert_eq!(events, []);
            continue;
        }
        let last = events.pop().expect("the last run").what;
        let over_budget = Outcome::OverBudget.name();
        assert!(
            matches!(last, OffloadTraceKind::Packet { outcome, .. } if outcome == over_budget),
            "{last:?}"
        );
        assert!(
            events.iter().all(|event| event.received == number && event.arrived_ns == events[0].arrived_ns)
        );
        let sent = events.iter().map(|event| match event.what {
            OffloadTraceKind::Copy { outcome: "sent", sent: Some(sent), .. } => sent,
            other => panic!("{other:?}"),
        });
        assert!(sent.eq(forwarded.iter().map(|packet| (packet.number, packet.size))));
        assert_eq!(forwarded.len(), 6);
    }
}

#[test]
fn packet_with_more_than_8_streams_is_forwarded_for_the_first_8() {
    if !root("packet_with_more_than_8_streams_is_forwarded_for_the_first_8") {
        return;
    }
    let (_network, mut scene) = simple("str");
    for (streams, sent, outcome) in [(8, 8, Outcome::Forwarded), (9, 8, Outcome::OverBudget)] {
        let chunks = scene.chunks(streams, 7);
        let frames: Vec<u8> = chunks.iter().flat_map(StreamPart::encode).collect();
        let before = scene.counted();
        let number = scene.next_number();
        let forwarded = scene.send(&scene.publisher.seal(0, number, 1, &frames));
        scene.expect(&chunks[..sent], &forwarded);
        assert_eq!(scene.counted().since(&before).packets(outcome), 1);
    }
}
