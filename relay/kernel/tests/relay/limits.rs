//! Tests that a copy is sent if every limit allows it, and not sent otherwise.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use millrace_quic::keys::KeySuite;
use millrace_relay_kernel::program::{Config, EgressOutcome, EgressRecord, PacketPath};

use crate::net::{self, NamespaceNetwork, address, root};
use crate::peers::{PORT, attach};
use crate::scene::{EGRESS, FROM, ID_LEN, NUMBER_MASK, OFFSET, RelayScene, simple};

#[test]
fn flow_control_limits_hold_to_the_byte() {
    if !root("flow_control_limits_hold_to_the_byte") {
        return;
    }
    let (_network, mut scene) = simple("lim");
    let size = scene.size();
    let key = scene.relay_with(EGRESS);
    assert_eq!(scene.try_egress(0), EgressOutcome::Sent);

    // Tests the stream's flow control limit (MAX_STREAM_DATA).
    scene.slots[0].set_max_offset(key, 1999);
    assert_eq!(scene.try_egress(0), EgressOutcome::StreamCredit);
    scene.slots[0].set_max_offset(key, 2000);
    assert_eq!(scene.try_egress(0), EgressOutcome::Sent);

    // Tests the connection's flow control limit (MAX_DATA).
    scene.relay_with(EGRESS);
    let downstream = &scene.only().downstream;
    assert_eq!(downstream.set_max_data(1999), 1000);
    assert_eq!(scene.try_egress(0), EgressOutcome::DataCredit);
    scene.only().downstream.set_max_data(2000);
    assert_eq!(scene.try_egress(0), EgressOutcome::Sent);
    assert_eq!(scene.try_egress(0), EgressOutcome::Sent, "no new bytes");
    scene.relay_with(EGRESS);
    assert_eq!(scene.try_egress(0), EgressOutcome::DataCredit);
    scene.only().downstream.set_max_data(u64::MAX / 2);

    // Tests the limit of the congestion window.
    let downstream = &scene.only().downstream;
    downstream.set_max_bytes(downstream.bytes() + size - 1);
    assert_eq!(scene.try_egress(0), EgressOutcome::Window);
    let downstream = &scene.only().downstream;
    downstream.set_max_bytes(downstream.bytes() + size);
    assert_eq!(scene.try_egress(0), EgressOutcome::Sent);
    assert_eq!(scene.try_egress(0), EgressOutcome::Window);

    scene.only().downstream.set_max_bytes(u64::MAX / 2);

    // Objects that wait in userspace hold back copies of the same or lower urgency.
    scene.relay_with(EgressRecord { level: 7, ..EGRESS });
    for (waiting, want) in [
        (Some(0), EgressOutcome::Behind),
        (Some(7), EgressOutcome::Behind),
        (Some(8), EgressOutcome::Sent),
        (None, EgressOutcome::Sent),
    ] {
        scene.only().downstream.set_waiting(waiting);
        assert_eq!(scene.try_egress(0), want, "{waiting:?}");
    }

    // Stream bytes from before the subscription's start are not sent to the subscriber.
    scene.relay_with(EgressRecord { from: 1001, ..EGRESS });
    assert_eq!(scene.try_egress(0), EgressOutcome::Before);
    scene.relay_with(EgressRecord { from: 1000, ..EGRESS });
    assert_eq!(scene.try_egress(0), EgressOutcome::Sent);

    // Tests the largest packet size (MTU of the path).
    scene.only().downstream.set_mtu(size as u32 - 1);
    assert_eq!(scene.try_egress(0), EgressOutcome::TooLarge);
    scene.only().downstream.set_mtu(size as u32);
    assert_eq!(scene.try_egress(0), EgressOutcome::Sent);
}

/// The subscriber counts a connection's flow control credit (MAX_DATA) by the largest offset of each stream. Bytes that
/// were left to userspace therefore count as soon as later bytes of their stream are sent.
#[test]
fn bytes_left_to_userspace_count_against_max_data() {
    if !root("bytes_left_to_userspace_count_against_max_data") {
        return;
    }
    let (_network, mut scene) = simple("skp");
    scene.relay_with(EgressRecord { max_offset: 1 << 20, ..EGRESS });
    let downstream = &scene.only().downstream;
    downstream.set_max_data(2500);
    downstream.set_max_bytes(0);
    let chunks = scene.chunks(4, 1000);
    let mut send = |at: usize, window: u64| {
        let number = scene.sent;
        scene.sent += 1;
        scene.only().downstream.set_max_bytes(window);
        scene.send(&scene.publisher.seal(0, number, 2, &chunks[at].encode()));
        let downstream = &scene.only().downstream;
        (downstream.data(), EgressOutcome::ALL.map(|one| downstream.outcome(one)))
    };
    let sent_and_declined = |(data, all): (u64, [u64; EgressOutcome::ALL.len()])| {
        let of = |outcome: EgressOutcome| all[outcome as usize];
        (data, of(EgressOutcome::Sent), of(EgressOutcome::Window), of(EgressOutcome::DataCredit))
    };
    assert_eq!(sent_and_declined(send(0, 0)), (0, 0, 1, 0));
    assert_eq!(sent_and_declined(send(1, u64::MAX / 2)), (2000, 1, 1, 0), "both");
    assert_eq!(sent_and_declined(send(2, u64::MAX / 2)), (2000, 1, 1, 1), "beyond 2500");
    scene.only().downstream.set_max_data(4000);
    let chunks = &chunks[3..];
    let number = scene.sent;
    let forwarded = scene.send(&scene.publisher.seal(0, number, 2, &chunks[0].encode()));
    assert_eq!(forwarded.iter().map(|sent| (sent.offset, sent.credit)).collect::<Vec<_>>(), [(4000, 2000)]);
}

#[test]
fn program_forwards_across_publisher_and_subscriber_key_updates() {
    if !root("program_forwards_across_publisher_and_subscriber_key_updates") {
        return;
    }
    let (_network, mut scene) = simple("key");
    scene.relay_with(EGRESS);
    for generation in 0..3 {
        if generation > 0 {
            // The subscriber's keys change first. Userspace switches `DownstreamRecord::number` to the new key
            // generation before the program has the new keys.
            let next = scene.only().downstream.number().load(Ordering::SeqCst) & NUMBER_MASK;
            let moved = u64::from(generation) << 48 | next;
            scene.only().downstream.number().store(moved, Ordering::SeqCst);
            assert_eq!(scene.try_egress(generation - 1), EgressOutcome::NoKeys);
            let keys = scene.only().keys.kernel_keys(generation);
            scene.only().downstream.set_keys(generation, &keys).expect("keys");
            assert_eq!(scene.try_egress(generation - 1), EgressOutcome::Sent);
            let keys = scene.publisher.kernel_keys(generation);
            scene.upstream.set_keys(generation, &keys).expect("keys");
        }
        assert_eq!(scene.try_egress(generation), EgressOutcome::Sent);
    }
}

#[test]
fn copy_to_an_unreachable_subscriber_is_not_sent_by_the_kernel() {
    if !root("copy_to_an_unreachable_subscriber_is_not_sent_by_the_kernel") {
        return;
    }
    let (network, mut scene) = simple("rch");
    scene.relay_with(EGRESS);
    let size = scene.size() as u32;
    let local = SocketAddr::new(address(4, 2, 1), PORT);
    let good = scene.only().socket.local_addr().expect("address");
    let path = |scene: &mut RelayScene, remote: SocketAddr| PacketPath {
        local,
        remote,
        id: scene.only().keys.id.clone(),
        traffic_class: 0,
        flow_label: 0,
    };
    // The first remote address answers no ARP or NDP request, and the next two have no route over an interface.
    for (remote, want) in [
        (SocketAddr::new(address(4, 2, 77), 1), EgressOutcome::NoNeighbour),
        (SocketAddr::from(([192, 0, 2, 1], 1)), EgressOutcome::NoRoute),
        (SocketAddr::new(address(4, 2, 1), 1), EgressOutcome::NoRoute),
        (good, EgressOutcome::Sent),
    ] {
        let path = path(&mut scene, remote);
        scene.only().downstream.set_path(&path).expect("a path");
        assert_eq!(scene.try_egress(0), want, "{remote}");
    }
    // The IPv4 and UDP headers take 28 bytes.
    net::ip(&format!("-n {} link set east mtu {}", network.relay, size + 27));
    assert_eq!(scene.try_egress(0), EgressOutcome::TooLarge);
    net::ip(&format!("-n {} link set east mtu {}", network.relay, size + 28));
    assert_eq!(scene.try_egress(0), EgressOutcome::Sent);
    scene.only().keys.id = vec![9; 20];
    let path = path(&mut scene, good);
    scene.only().downstream.set_mtu(2000);
    scene.only().downstream.set_path(&path).expect("a path");
    net::ip(&format!("-n {} link set east mtu 1500", network.relay));
    assert_eq!(scene.try_egress(0), EgressOutcome::Sent, "another connection ID");
}

#[test]
fn copy_is_not_sent_if_the_report_ring_buffer_is_full() {
    if !root("copy_is_not_sent_if_the_report_ring_buffer_is_full") {
        return;
    }
    let network = NamespaceNetwork::new("rng");
    net::set_checksum_offload(&network.publisher, "eth", false);
    let mut scene = RelayScene::new(&network, 4, &[4], KeySuite::ChaCha20Poly1305, 1, 1);
    let config = Config { ports: vec![PORT], id_len: ID_LEN, max_waiting: 1, ..Config::default() };
    scene.rebuild(&network, &config);
    attach(&network, &scene.relay, "west");
    const PACKETS: u64 = 2000;
    for _ in 0..PACKETS {
        let number = scene.next_number();
        let frames = scene.chunk(9).encode();
        let packet = scene.publisher.seal(0, number, 2, &frames);
        scene.from.send(&packet).expect("send");
        assert_eq!(scene.to.recv(&mut [0; 2048]).expect("the original"), packet.len());
    }
    let counters = scene.counted();
    let sent = counters.egresses(EgressOutcome::Sent);
    let declined = counters.egresses(EgressOutcome::RingFull);
    assert!(sent > 900 && declined > 0, "{counters:?}");
    assert_eq!(sent + declined, PACKETS);
    let mut numbers = Vec::new();
    scene.relay.drain(|packet| numbers.push(packet.number));
    assert!(numbers.into_iter().eq(0..sent));
    assert_eq!(scene.only().downstream.number().load(Ordering::SeqCst), sent);
    assert_eq!(scene.only().downstream.outcome(EgressOutcome::RingFull), declined);
    assert_eq!(scene.only().downstream.data(), OFFSET + 9 - FROM);
    // The program forwards again once userspace has emptied the ring buffer of reports about sent packets.
    let number = scene.next_number();
    let frames = scene.chunk(9).encode();
    assert_eq!(scene.send(&scene.publisher.seal(0, number, 2, &frames)).len(), 1);
}
