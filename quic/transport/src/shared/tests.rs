#![allow(clippy::unwrap_used)]

use std::net::UdpSocket;

use millrace_quic::{
    frame::{self, Frame},
    keys::{KeySuite, TrafficSecret},
    params::PeerParams,
    plane::downstream::{Label, NewDatagram, Priority},
    varint,
};

use super::{receiving::UNSENT, *};

mod late;

/// Returns a connection before its handshake.
pub fn fresh() -> SharedConnection {
    fresh_with(None)
}

fn fresh_with(offloads: Option<std::net::SocketAddr>) -> SharedConnection {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let config = Config::default();
    SharedConnection::new(
        PeerAddress::new(socket.local_addr().unwrap()),
        ConnectionWindow::open(&config.windows, config.receive_window, Instant::now()).unwrap(),
        &config,
        Arc::new(HandshakeSecrets::new(None)),
        Arc::new(Alarm::new()),
        Arc::new(BatchSender::new(&socket, false).unwrap()),
        offloads,
    )
}

/// Returns a connection after its handshake, with credit of 100,000 bytes.
fn shared() -> SharedConnection {
    let shared = fresh();
    let mut params = vec![0x04, 4];
    varint::encode(100_000, &mut params);
    params.extend([0x09, 1, 10, 0x0a, 1, 3]);
    let capped = shared.on_peer_params(&params, true).unwrap();
    assert_eq!(PeerParams::parse(&capped).unwrap().initial_max_data, 25_000);
    shared
}

/// Returns a connection that may send, with `datagrams` datagrams queued.
fn owing(datagrams: usize) -> SharedConnection {
    let shared = fresh();
    shared.on_peer_params(&[0x20, 2, 0x40 | 0x10, 0], true).unwrap();
    shared.state.lock().plane.set_secret(TrafficSecret::new(KeySuite::ChaCha20Poly1305, &[7; 32]));
    shared.open();
    for _ in 0..datagrams {
        let payload = vec![0; 1000].into();
        let datagram = NewDatagram {
            payload,
            priority: Priority::default(),
            expires: None,
            late: None,
            label: Label::default(),
        };
        shared.downstream().send_datagram(datagram).unwrap();
    }
    shared
}

fn counted(shared: &SharedConnection) -> crate::Stats {
    shared.counters.snapshot() // exact: no other thread changes the connection's packet counters
}

/// Sends a PING in place of quinn. Returns its number on the wire.
fn quinns(shared: &SharedConnection, now: Instant, number: u64) -> u64 {
    shared.on_quinn_packet(now, 0, number, b"12345678", &[0x01], 100)
}

/// Sends a packet in place of a sender other than quinn. Returns its number.
fn others(shared: &SharedConnection, now: Instant) -> u64 {
    let mut state = shared.state.lock();
    let (_, number) = state.numbers.draw();
    state.plane.downstream.on_stack_sent(now, number, 1200, true);
    number
}

/// Receives the next packet, and returns the frames that quinn gets.
fn seen(shared: &SharedConnection, now: Instant, payload: &[u8]) -> Vec<u8> {
    let next = shared.state.lock().received.next();
    seen_in(shared, now, next, payload)
}

/// Receives a packet, and returns the frames that quinn gets.
fn seen_in(shared: &SharedConnection, now: Instant, number: u64, payload: &[u8]) -> Vec<u8> {
    let mut payload = BytesMut::from(payload);
    let arrival = OpenedArrival { now, size: payload.len() + 30, end: [0; 8] };
    shared.on_received(arrival, 0, number, &[], &mut payload);
    payload.to_vec()
}

#[test]
fn ack_frame_passed_to_quinn_lists_only_packets_that_quinn_sent() {
    let shared = shared();
    let now = Instant::now();
    let wire = [others(&shared, now), quinns(&shared, now, 0), others(&shared, now), quinns(&shared, now, 1)];
    assert_eq!(wire, [0, 1, 2, 3]);
    assert_eq!(seen(&shared, now, &[0x02, 3, 0, 0, 3, 0x01]), [0x02, 1, 0, 0, 1, 0x01]);
    assert_eq!(seen(&shared, now, &[0x03, 3, 0, 0, 0, 5, 6, 7]), [0x03, 1, 0, 0, 0, 5, 6, 7]);
}

#[test]
fn ack_of_data_plane_packets_only_repeats_quinns_last_ack() {
    let shared = shared();
    let now = Instant::now();
    for number in 0..3 {
        quinns(&shared, now, number);
        others(&shared, now);
    }
    // The peer has not acknowledged any packet of quinn yet, so there is no ACK to repeat.
    assert_eq!(seen(&shared, now, &[0x02, 1, 0, 0, 0]), [0; 5]);
    assert_eq!(seen(&shared, now, &[0x02, 2, 0, 0, 0]), [0x02, 1, 0, 0, 0]);
    // Once quinn got an ACK, that ACK is repeated in place of ACKs for other senders. PADDING alone would make the
    // packet a probing packet.
    assert_eq!(seen(&shared, now, &[0x02, 3, 0, 0, 0]), [0x02, 1, 0, 0, 0]);
    assert_eq!(seen(&shared, now, &[0x02, 5, 0, 0, 0, 0x01]), [0x02, 1, 0, 0, 0, 0x01]);
    let stats = counted(&shared);
    assert_eq!((stats.acks_for_quinn, stats.acks_for_data_plane, stats.acks_refused), (1, 3, 0));
}

#[test]
fn packet_numbers_that_quinn_skips_are_skipped_on_the_wire() {
    let shared = shared();
    let now = Instant::now();
    assert_eq!([quinns(&shared, now, 0), quinns(&shared, now, 2)], [0, 2]);
    assert_eq!(
        seen(&shared, now, &[0x02, 2, 0, 0, 2]),
        [0x02, 2, 0, 0, 2],
        "quinn detects the skipped number"
    );
}

/// An offload draws packet numbers without a call to this process, so a number can be skipped only when this process
/// handles an acknowledgement.
#[test]
fn acknowledgement_of_a_skipped_number_is_refused() {
    let shared = shared();
    let now = Instant::now();
    let mut numbers: Vec<_> = (0..1000)
        .map(|_| {
            let number = others(&shared, now);
            let mut ack = vec![0x02];
            [number, 0, 0, 0].into_iter().for_each(|field| varint::encode(field, &mut ack));
            assert_ne!(seen(&shared, now, &ack), UNSENT);
            number
        })
        .collect();
    let left_out = counted(&shared).skipped_numbers;
    assert!((3..=6).contains(&left_out), "{left_out}");
    assert_eq!(counted(&shared).acks_refused, 0);

    let gap = numbers.windows(2).find(|pair| pair[1] > pair[0] + 1).unwrap()[0] + 1;
    numbers.retain(|number| *number == gap);
    assert!(numbers.is_empty(), "no sender has used the number");
    let mut ack = vec![0x02];
    [999, 0, 0, 999 - gap].into_iter().for_each(|field| varint::encode(field, &mut ack));
    assert_eq!(seen(&shared, now, &[&[0x01][..], &ack, &[0x01]].concat()), UNSENT);
}

#[test]
fn acknowledgement_of_an_unsent_number_is_left_to_quinn() {
    let shared = shared();
    let now = Instant::now();
    quinns(&shared, now, 0);
    let ack = [0x02, 1, 0, 0, 1];
    assert_eq!(seen(&shared, now, &ack), ack);
    assert_eq!(counted(&shared).acks_refused, 1);
}

#[test]
fn quinns_round_trip_excludes_time_until_the_data_planes_later_packet() {
    let shared = shared();
    let start = Instant::now();
    let ms = |ms| start + Duration::from_millis(ms);
    quinns(&shared, ms(0), 0);
    others(&shared, ms(8));
    // The peer acknowledges both packets 2 ms after the second, with an ACK Delay of 1 ms (125 times 8 us) in two
    // bytes. quinn sent only the first packet, 8 ms earlier, and has to subtract these 8 ms, too. So quinn gets an ACK
    // Delay of 9 ms (1125 times 8 us).
    let frame = seen(&shared, ms(10), &[0x02, 1, 0x40, 125, 0, 1]);
    assert_eq!(frame, [0x02, 0, 0x44, 0x65, 0, 0]);
    assert_eq!(0x465, 1125);
}

#[test]
fn round_trip_excludes_the_time_before_an_ack_is_read() {
    let shared = shared();
    let start = Instant::now();
    let ms = |ms| start + Duration::from_millis(ms);
    let read = |wire: u8, arrived, now| {
        let mut payload = [0x02, wire, 0x40, 0, 0, 0];
        shared.walk(&mut shared.state.lock(), AckTimes { now, arrived }, &mut payload);
        payload
    };
    others(&shared, ms(0));
    read(0, ms(5), ms(14));
    assert_eq!(shared.downstream().latest_rtt(), Duration::from_millis(5));
    // The frame was read 8 ms after it arrived. quinn has to subtract these 8 ms: 1000 times 8 us.
    quinns(&shared, ms(20), 0);
    assert_eq!(read(1, ms(25), ms(33)), [0x02, 0, 0x43, 0xe8, 0, 0]);
    assert_eq!(shared.downstream().latest_rtt(), Duration::from_millis(5));
}

#[test]
fn quinn_gets_an_eighth_of_the_peers_max_data_credit() {
    let shared = shared();
    let now = Instant::now();
    let mut frame = vec![0x10];
    varint::encode(200_000, &mut frame);
    let seen = seen(&shared, now, &frame);
    assert_eq!(frame::next(&seen, 0), Ok(Some((0..5, Frame::MaxData(25_000)))));
    assert_eq!(shared.state.lock().stack.other_credit(), 175_000);
}

#[test]
fn max_data_for_quinn_comes_first_and_not_in_a_duplicate_packet() {
    let shared = shared();
    let now = Instant::now();
    shared.open();
    let mut sent = Vec::new();
    frame::write_stream(1, 0, &[7; 20_000], false, &mut sent);
    shared.on_quinn_packet(now, 0, 0, b"12345678", &sent, 20_050);
    shared.state.lock().received.insert(7);
    let rest = [0x09, 3, 1, 2, 3];
    assert_eq!(seen_in(&shared, now, 7, &rest), rest, "quinn drops a duplicate");
    let payload = seen_in(&shared, now, 6, &rest);
    assert_eq!(frame::next(&payload, 0), Ok(Some((0..5, Frame::MaxData(45_000)))));
    assert_eq!(payload[5..], rest);
    assert_eq!(seen(&shared, now, &rest), rest, "the credit is granted once");
}

/// An attacker that has recorded a packet may send it repeatedly. Each repeated copy costs this endpoint only the
/// decryption.
#[test]
fn replayed_packet_has_no_effect() {
    let shared = shared();
    let now = Instant::now();
    let mut frame = vec![0x10];
    varint::encode(200_000, &mut frame);
    assert_ne!(seen_in(&shared, now, 500, &frame), frame);
    for number in [500, 371] {
        assert_eq!(seen_in(&shared, now, number, &frame), frame, "{number} is ignored");
    }
    assert_ne!(seen_in(&shared, now, 372, &frame), frame);
    assert_eq!(counted(&shared).replayed_packets, 2);
}

/// An offload forwards the first of two frames at the same offset, but quinn would deliver the longer one.
#[test]
fn quinn_gets_each_byte_of_a_stream_once() {
    let shared = shared();
    let now = Instant::now();
    let frame = |offset, data: &[u8]| {
        let mut out = Vec::new();
        frame::write_stream(2, offset, data, false, &mut out);
        out
    };
    let both = [frame(0, &[b'x'; 53]), frame(0, &[b'y'; 54])].concat();
    assert_eq!(seen(&shared, now, &both), both, "there is no offload");
    shared.state.lock().streams = Some(ReceivedStreams::new(10));
    assert_eq!(seen(&shared, now, &both), [frame(0, &[b'x'; 53]), frame(53, b"y")].concat());
    assert_eq!(seen(&shared, now, &frame(0, b"z")), frame(1, b""));
    assert_eq!(counted(&shared).stream_frames_cut, 2);
    let many: Vec<u8> = (1..11).flat_map(|index| [0x08 | 0x02, index * 4 + 2, 1, 0]).collect();
    assert_eq!(seen(&shared, now, &many), UNSENT, "more streams than quinn allows");
}

/// A peer that has closed the connection must not be sent anything (RFC 9000, section 10.2.2).
#[test]
fn closed_peer_is_sent_nothing() {
    let shared = owing(3);
    let now = Instant::now();
    shared.transmit_now(now);
    assert_eq!(
        counted(&shared).data_plane_packets,
        3,
        "queued datagrams are sent while the connection is open"
    );
    for close in [&[0x1c, 0, 0, 0][..], &[0x1d, 0, 0]] {
        let shared = owing(3);
        seen(&shared, now, close);
        shared.transmit_now(now);
        assert_eq!(counted(&shared).data_plane_packets, 0, "{close:?}");
    }
}

/// quinn may send three times the bytes that arrived from an address that is not validated, and would not count bytes
/// of the data plane.
#[test]
fn only_quinn_sends_to_an_unvalidated_address() {
    let shared = owing(3);
    let now = Instant::now();
    let sent = || counted(&shared).data_plane_packets;
    let challenge = [&[0x1a][..], &[1; 8]].concat();
    shared.on_quinn_packet(now, 0, 0, b"12345678", &challenge, 1200);
    let moved = UdpSocket::bind("127.0.0.1:0").unwrap();
    assert!(shared.on_remote(now, moved.local_addr().unwrap()), "quinn waits for the answer");
    for _ in 0..100 {
        seen(&shared, now, &[0x01; 1100]);
        shared.transmit_now(now);
    }
    assert_eq!(sent(), 0);
    seen(&shared, now, &[&[0x1b][..], &[1; 8]].concat());
    assert_eq!(sent(), 3);
}
