//! Tests of the state that the program and userspace share: packet numbers and sockets.

use std::net::{SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};

use millrace_kernel::clock::monotonic_ns;
use millrace_relay_kernel::program::{DeferredSocket, EgressOutcome, Outcome, Position};

use crate::net::{self, address, root};
use crate::quic::{self, StreamPart};
use crate::scene::{EGRESS, ID_LEN, NUMBER_MASK, OFFSET, RelayScene, simple};

/// The program and two threads take packet numbers of one connection, and one thread updates its keys. No number is
/// taken twice or left out, key generations never decrease, and each packet of the program uses the keys of its
/// generation.
#[test]
fn kernel_and_userspace_never_use_a_quic_packet_number_twice() {
    const PACKETS: usize = 3000;
    if !root("kernel_and_userspace_never_use_a_quic_packet_number_twice") {
        return;
    }
    let (_network, mut scene) = simple("num");
    scene.relay_with(EGRESS);
    let keys = scene.only().keys.kernel_keys(1);
    scene.only().downstream.set_keys(1, &keys).expect("keys");
    let packets: Vec<_> = (0..PACKETS)
        .map(|number| scene.publisher.seal(0, number as u64, 4, &scene.chunk_of(9).encode()))
        .collect();
    let frames = StreamPart { stream: EGRESS.stream_id, ..scene.chunk_of(9) }.encode();
    let RelayScene { relay, subscribers, slots, from, to, .. } = &mut scene;
    let word = subscribers[0].downstream.number();
    let update = AtomicBool::new(false);
    let done = AtomicBool::new(false);
    let draw = || {
        let mut drawn = Vec::new();
        while !done.load(Ordering::Relaxed) {
            let old = word.fetch_add(1, Ordering::SeqCst);
            drawn.push((old & NUMBER_MASK, (old >> 48) as u16));
            if update.swap(false, Ordering::SeqCst) {
                word.fetch_add(1 << 48, Ordering::SeqCst);
            }
            std::thread::yield_now();
        }
        drawn
    };
    let (mut drawn, registered) = std::thread::scope(|scope| {
        let threads = [(); 2].map(|()| scope.spawn(draw));
        let mut registered = Vec::new();
        for (at, packet) in packets.iter().enumerate() {
            // One of the threads updates the keys in the middle of the test.
            update.fetch_or(at == PACKETS / 2, Ordering::SeqCst);
            slots[0].set_position(&Position::opaque(OFFSET));
            from.send(packet).expect("send");
            assert_eq!(to.recv(&mut [0; 2048]).expect("the original"), packet.len());
            relay.drain(|packet| {
                let want = subscribers[0].keys.build((packet.generation, packet.number), &frames);
                let mut buffer = [0; 2048];
                let len = subscribers[0].socket.recv(&mut buffer).expect("a packet");
                assert_eq!(buffer[..len], want);
                registered.push(packet);
            });
        }
        assert_eq!(word.load(Ordering::SeqCst) >> 48, 1);
        done.store(true, Ordering::Relaxed);
        let drawn: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect();
        (drawn, registered)
    });
    assert_eq!(registered.len(), PACKETS);
    drawn.extend(registered.iter().map(|packet| (packet.number, packet.generation)));
    drawn.sort_unstable();
    assert!(drawn.iter().map(|(number, _)| *number).eq(0..drawn.len() as u64), "a number twice, or lost");
    assert!(drawn.is_sorted_by_key(|(_, generation)| *generation), "a generation went back");
    let updated = registered.iter().filter(|packet| packet.generation == 1).count();
    assert!((1..PACKETS).contains(&updated), "{updated} packets after the update");
}

#[test]
fn fully_forwarded_packet_reaches_userspace_without_waking_it_up() {
    if !root("fully_forwarded_packet_reaches_userspace_without_waking_it_up") {
        return;
    }
    const PING: u8 = 1;
    let (network, mut scene) = simple("qui");
    let socket = net::socket(&network.relay, SocketAddr::new(address(4, 1, 1), 0));
    let deferred = scene.relay.deferred_socket(&socket, 1000).expect("a deferred socket");
    scene.upstream.set_deferred_socket(&deferred);
    scene.relay_with(EGRESS);
    let frames = scene.chunk_of(100).encode();
    let with_ping = [[PING].as_slice(), &frames].concat();
    let padded = [[0; 20].as_slice(), &frames].concat();
    let other_stream = StreamPart { stream: 400, ..scene.chunk_of(10) }.encode();
    let both = [scene.chunk_of(10).encode(), other_stream].concat();
    let window = u64::MAX / 2;
    // A packet is deferred (does not wake userspace) only if the program has sent every subscriber's copy of it and it
    // has nothing else for userspace.
    for (description, exclusive, window, frames, is_deferred) in [
        ("somebody else waits", false, window, &frames, false),
        ("nobody does", true, window, &frames, true),
        ("padding", true, window, &padded, true),
        ("another frame", true, window, &with_ping, false),
        ("another stream", true, window, &both, false),
        ("declined", true, 0, &frames, false),
        ("somebody else waits again", false, window, &frames, false),
    ] {
        scene.slots[0].set_exclusive(exclusive);
        scene.only().downstream.set_max_bytes(window);
        let before = (deferred.packets(), deferred.wakes());
        let number = scene.next_number();
        let packet = scene.publisher.seal(0, number, 4, frames);
        scene.from.send(&packet).expect("send");
        let mut buffer = [0; 2048];
        let came_by = if is_deferred { &socket } else { &scene.to };
        let len = came_by.recv(&mut buffer).expect(description);
        assert_eq!(buffer[..len], packet, "{description}");
        let packets = deferred.packets() - before.0;
        let others = deferred.wakes() - before.1;
        assert_eq!((packets, others), if is_deferred { (1, 0) } else { (0, 1) }, "{description}");
        deferred.sleep(deferred.wakes());
    }
    // Userspace is woken after 31 deferred packets (packets that do not wake it). Further packets go to the main socket
    // until userspace sleeps again.
    scene.slots[0].set_exclusive(true);
    let mut run = |description, wakes: u64, packets: u64| {
        let before = (deferred.packets(), deferred.wakes());
        for _ in 0..packets {
            let number = scene.next_number();
            scene.from.send(&scene.publisher.seal(0, number, 4, &frames)).expect("send");
        }
        let mut buffer = [0; 2048];
        for (socket, packets) in [(&scene.to, wakes), (&socket, packets - wakes)] {
            for at in 0..packets {
                assert!(socket.recv(&mut buffer).is_ok(), "{description}: {at} of {packets}");
            }
        }
        assert_eq!(
            (deferred.packets() - before.0, deferred.wakes() - before.1),
            (packets - wakes, wakes),
            "{description}"
        );
    };
    // The loop at the beginning of this test has deferred two packets, so 29 more are deferred before one wakes
    // userspace.
    run("asleep", 40 - (31 - 2), 40);
    run("not asleep", 5, 5);
    let others = deferred.wake();
    run("awake", 5, 5);
    deferred.sleep(others);
    run("woken meanwhile", 5, 5);
    deferred.sleep(deferred.wake());
    run("asleep again", 0, 31);
    run("for too long", 2, 2);
    // All packets go to the main socket once the socket for deferred packets is closed.
    drop(socket);
    let number = scene.next_number();
    let packet = scene.publisher.seal(0, number, 4, &frames);
    assert_eq!(scene.send(&packet).len(), 1 + 88 + 6);
}

/// The relay's socket for deferred packets (which do not wake userspace), its main socket, and a peer's socket that
/// sends to the main one.
struct UserspaceSockets<'a> {
    handle: &'a DeferredSocket,
    deferred: &'a UdpSocket,
    to: &'a UdpSocket,
    from: &'a UdpSocket,
}

impl UserspaceSockets<'_> {
    /// Checks that the packet arrives at the expected socket and is counted there.
    fn send(&self, packet: &[u8], is_deferred: bool, description: &str) {
        let before = (self.handle.packets(), self.handle.wakes());
        self.handle.sleep(before.1);
        self.from.send(packet).expect("send");
        let mut buffer = [0; 2048];
        let came_by = if is_deferred { self.deferred } else { self.to };
        let len = came_by.recv(&mut buffer).expect(description);
        assert_eq!(&buffer[..len], packet, "{description}");
        let counted = (self.handle.packets() - before.0, self.handle.wakes() - before.1);
        assert_eq!(counted, if is_deferred { (1, 0) } else { (0, 1) }, "{description}");
    }
}

/// Returns a packet with a short header and random bytes that no key decrypts.
fn sealed(id: &[u8], len: usize, scene: &mut RelayScene) -> Vec<u8> {
    let rest = quic::bytes(len - 1 - id.len(), &mut scene.rng);
    [&[0x40], id, &rest].concat()
}

#[test]
fn small_subscriber_packets_reach_userspace_without_waking_it_up() {
    if !root("small_subscriber_packets_reach_userspace_without_waking_it_up") {
        return;
    }
    const ROOM: u64 = 20;
    let (network, mut scene) = simple("ack");
    let socket = net::socket(&network.relay, SocketAddr::new(address(4, 1, 1), 0));
    let handle = scene.relay.deferred_socket(&socket, ROOM).expect("a deferred socket");
    scene.only().downstream.set_deferred_socket(&handle);
    let id = [7; ID_LEN];
    scene.only().downstream.add_id(&id).expect("an ID");
    let counters = scene.counted();
    scene.relay_with(EGRESS);
    assert_eq!(scene.try_egress(0), EgressOutcome::Sent);
    let sent = scene.only().downstream.bytes();
    for (description, len, (limit, total), is_deferred) in [
        ("nothing is deferred at first", 36, (0, 0), false),
        ("as short", 36, (36, sent), true),
        ("shorter", 30, (36, sent), true),
        ("longer", 37, (36, sent), false),
        ("more was sent by now", 36, (36, sent - 1), false),
        ("not any more", 36, (0, sent), false),
    ] {
        scene.only().downstream.set_deferral(limit, total);
        let packet = sealed(&id, len, &mut scene);
        // The program remembers the arrival time of deferred packets by their last bytes.
        let end = *packet.last_chunk().expect("eight bytes");
        assert_eq!(scene.relay.arrival(end), None);
        let ends = UserspaceSockets { handle: &handle, deferred: &socket, to: &scene.to, from: &scene.from };
        let before = micros();
        ends.send(&packet, is_deferred, description);
        let arrival = scene.relay.arrival(end);
        assert_eq!(arrival.is_some(), is_deferred, "{description}");
        let passed = micros().wrapping_sub(before);
        assert!(arrival.is_none_or(|at| at.wrapping_sub(before) <= passed), "{description}");
    }
    let counted = scene.counted().since(&counters);
    assert_eq!(counted.packets(Outcome::FromSubscriber), 6, "{counted:?}");

    // The program steers only as many packets to the socket for deferred packets as there is room for. Reading packets
    // makes room.
    scene.only().downstream.set_deferral(36, u64::MAX);
    let waiting = handle.packets();
    for number in waiting..waiting + ROOM {
        let packet = sealed(&id, 36, &mut scene);
        let ends = UserspaceSockets { handle: &handle, deferred: &socket, to: &scene.to, from: &scene.from };
        ends.send(&packet, number < ROOM, "to the last");
        if number + 1 == waiting + ROOM {
            handle.take(1);
            ends.send(&packet, true, "room again");
        }
    }
    assert_eq!(scene.only().downstream.deferred_packets(), handle.packets());

    // The program decrypts the packets of a connection as soon as the connection publishes something.
    scene.only().downstream.remove_ids();
    scene.upstream.add_id(&id).expect("an ID");
    let counters = scene.counted();
    let packet = sealed(&id, 36, &mut scene);
    scene.send(&packet);
    let counted = scene.counted().since(&counters);
    assert_eq!(counted.packets(Outcome::NotAuthentic), 1, "{counted:?}");
}

/// Returns `CLOCK_MONOTONIC` in microseconds, modulo 2^32.
fn micros() -> u32 {
    (monotonic_ns() / 1000) as u32
}
