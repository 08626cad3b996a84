//! What the program shares with userspace: packet numbers, and its sockets.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::net::{self, address, root};
use crate::quic::Chunk;
use crate::scene::{LEG, NUMBER_MASK, Scene, simple};

/// The program and two threads draw numbers for one connection; one of them updates keys. No number is drawn
/// twice or lost, generations never go back, and each of the program's packets has the keys of its generation.
#[test]
fn numbers_are_shared_with_userspace() {
    const PACKETS: usize = 3000;
    if !root("numbers_are_shared_with_userspace") {
        return;
    }
    let (_network, mut scene) = simple("num");
    scene.relay_with(LEG);
    let keys = scene.only().keys.kernel_keys(1);
    scene.only().downstream.set_keys(1, &keys).expect("keys");
    let packets: Vec<_> = (0..PACKETS)
        .map(|number| scene.publisher.seal((0, number as u64), 4, &scene.chunk_of(9).encode()))
        .collect();
    let frames = Chunk { stream: LEG.stream_id, ..scene.chunk_of(9) }.encode();
    let Scene { relay, subscribers, from, to, .. } = &scene;
    let word = subscribers[0].downstream.number();
    let (update, done) = (AtomicBool::new(false), AtomicBool::new(false));
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
            update.fetch_or(at == PACKETS / 2, Ordering::SeqCst);
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
fn what_is_no_hurry_goes_to_a_socket_of_its_own() {
    if !root("what_is_no_hurry_goes_to_a_socket_of_its_own") {
        return;
    }
    const PING: u8 = 1;
    let (network, mut scene) = simple("qui");
    let socket = net::socket(&network.relay, SocketAddr::new(address(4, 1, 1), 0));
    let quiet = scene.relay.quiet_socket(&socket).expect("a quiet socket");
    scene.upstream.set_quiet_socket(&quiet);
    scene.relay_with(LEG);
    let frames = scene.chunk_of(100).encode();
    let with_ping = [[PING].as_slice(), &frames].concat();
    let padded = [[0; 20].as_slice(), &frames].concat();
    let other_stream = Chunk { stream: 400, ..scene.chunk_of(10) }.encode();
    let both = [scene.chunk_of(10).encode(), other_stream].concat();
    let window = u64::MAX / 2;
    for (description, alone, window, frames, is_quiet) in [
        ("somebody else waits", false, window, &frames, false),
        ("nobody does", true, window, &frames, true),
        ("padding", true, window, &padded, true),
        ("another frame", true, window, &with_ping, false),
        ("another stream", true, window, &both, false),
        ("declined", true, 0, &frames, false),
        ("somebody else waits again", false, window, &frames, false),
    ] {
        scene.slots[0].set_alone(alone);
        scene.only().downstream.set_max_bytes(window);
        let before = (quiet.packets(), quiet.others());
        let number = scene.next_number();
        let packet = scene.publisher.seal((0, number), 4, frames);
        scene.from.send(&packet).expect("send");
        let mut buffer = [0; 2048];
        let came_by = if is_quiet { &socket } else { &scene.to };
        let len = came_by.recv(&mut buffer).expect(description);
        assert_eq!(buffer[..len], packet, "{description}");
        let (packets, others) = (quiet.packets() - before.0, quiet.others() - before.1);
        assert_eq!((packets, others), if is_quiet { (1, 0) } else { (0, 1) }, "{description}");
        quiet.sleep(quiet.others());
    }
    // A long run of them is heard of in between, and what follows goes the same way until userspace sleeps again.
    scene.slots[0].set_alone(true);
    let mut run = |description, loud: u64, packets: u64| {
        let before = (quiet.packets(), quiet.others());
        for _ in 0..packets {
            let number = scene.next_number();
            scene.from.send(&scene.publisher.seal((0, number), 4, &frames)).expect("send");
        }
        let mut buffer = [0; 2048];
        for (socket, packets) in [(&scene.to, loud), (&socket, packets - loud)] {
            for at in 0..packets {
                assert!(socket.recv(&mut buffer).is_ok(), "{description}: {at} of {packets}");
            }
        }
        assert_eq!(
            (quiet.packets() - before.0, quiet.others() - before.1),
            (packets - loud, loud),
            "{description}"
        );
    };
    // Two were quiet above.
    run("asleep", 40 - (31 - 2), 40);
    run("not asleep", 5, 5);
    let others = quiet.wake();
    run("awake", 5, 5);
    quiet.sleep(others);
    run("woken meanwhile", 5, 5);
    quiet.sleep(quiet.wake());
    run("asleep again", 0, 31);
    run("for too long", 2, 2);
    // Without the socket all of them go where they were sent.
    drop(socket);
    let number = scene.next_number();
    let packet = scene.publisher.seal((0, number), 4, &frames);
    assert_eq!(scene.send(&packet).len(), 1 + 88 + 6);
}
