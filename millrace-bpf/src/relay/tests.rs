//! The program over BPF_PROG_TEST_RUN: what it makes of each kind of packet, without an interface.

#[path = "../../tests/support/quic.rs"]
#[allow(dead_code)]
mod quic;

use fastrand::Rng;
use libbpf_rs::ProgramInput;
use millrace_proto::quic::frame::{self, Frame, Walker};
use millrace_proto::quic::keys::Suite;

use super::*;
use crate::crypto::QuicKeys;
use quic::{Chunk, Direction};

const PORT: u16 = 4443;
const ID_LEN: usize = 8;
const STREAM: u64 = 6;
/// Always declined as [`EgressOutcome::Before`].
const EGRESS: Egress = Egress {
    stream_id: 3,
    shift: 2,
    from: u64::MAX,
    max_offset: 0,
    tag: 0,
    level: 0,
    track: 5,
    group: 1 << 40,
};
const PUBLISHER: u32 = 11;
const SUBSCRIBER: u32 = 12;

const PASS_ON: u32 = -1i32 as u32;
const DROP: u32 = 2;

struct Bench {
    relay: Relay,
    upstream: Upstream,
    publisher: Direction,
    slot: Slot,
    downstream: Downstream,
    rng: Rng,
}

impl Bench {
    /// One upstream whose stream `STREAM` has an egress that is always declined as [`EgressOutcome::Before`].
    fn new() -> Self {
        Self::with_config(Config::default())
    }

    fn with_config(config: Config) -> Self {
        let mut rng = Rng::with_seed(3);
        let config = Config { ports: vec![1, PORT], id_len: ID_LEN, ..config };
        let relay = Relay::load(&config).expect("the relay loads");
        let publisher = Direction::new(Suite::ChaCha20Poly1305, ID_LEN, &mut rng);
        let upstream = relay.upstream(0).expect("an upstream");
        upstream.add_id(&publisher.id).expect("an ID");
        upstream.set_keys(0, &publisher.kernel_keys(0)).expect("keys");
        let path = Path {
            local: ([10, 0, 0, 1], PORT).into(),
            remote: ([10, 0, 0, 2], PORT).into(),
            id: vec![1],
            traffic_class: 0,
            flow_label: 0,
        };
        let downstream = relay.downstream(&path, 1452, 0).expect("a downstream");
        upstream.set_session(PUBLISHER);
        downstream.set_session(SUBSCRIBER);
        let mut slot = upstream.slot(STREAM);
        slot.add(&downstream, &EGRESS).expect("an egress");
        Self { relay, upstream, publisher, slot, downstream, rng }
    }

    /// Runs one frame. It must pass on, whatever the outcome.
    fn run(&self, frame: &[u8], gso_size: u32) -> Outcome {
        let before = self.relay.counters().expect("counters");
        assert_eq!(self.test_run(frame, &mut context(gso_size)), PASS_ON);
        let counted = self.relay.counters().expect("counters").since(&before);
        assert_eq!(counted.packets.iter().sum::<u64>(), 1, "{counted:?}");
        Outcome::ALL.into_iter().find(|outcome| counted.packets(*outcome) == 1).expect("an outcome")
    }

    /// Returns the program's verdict; the context is as the program left it.
    fn test_run(&self, frame: &[u8], context: &mut [u8]) -> u32 {
        let mut after = vec![0; context.len()];
        let input = ProgramInput {
            data_in: Some(frame),
            context_in: Some(context),
            context_out: Some(&mut after),
            ..ProgramInput::default()
        };
        let verdict = {
            let object = lock(&self.relay.object);
            let program = object.program("relay_ingress").expect("the program");
            program.test_run(input).expect("test run").return_value
        };
        context.copy_from_slice(&after);
        verdict
    }

    /// Runs a QUIC packet over IPv4.
    fn run_packet(&self, packet: &[u8]) -> Outcome {
        self.run(&ethernet(0x0800, &ipv4(0, &udp(PORT, packet))), 0)
    }

    fn egresses_tried(&self) -> u64 {
        self.relay.counters().expect("counters").egresses(EgressOutcome::Before)
    }
}

impl Bench {
    /// Runs packet `number` and returns the events about it, by time.
    fn trace(&self, number: u64) -> Vec<Event> {
        self.run_packet(&self.publisher.seal((0, number), 4, &stream(1000)));
        let mut events = Vec::new();
        assert_eq!(self.relay.drain_events(|event| events.push(event)), 0, "lost");
        events.sort_by_key(|event| event.time_ns);
        events
    }
}

const ALL: Tracing = Tracing { every: NonZero::<u32>::MIN, track: None, session: None };

fn ethernet(protocol: u16, rest: &[u8]) -> Vec<u8> {
    [&[2; 12], protocol.to_be_bytes().as_slice(), rest].concat()
}

fn ipv4(options: usize, rest: &[u8]) -> Vec<u8> {
    let [high, low] = ((20 + options * 4 + rest.len()) as u16).to_be_bytes();
    let header = [0x45 + options as u8, 0, high, low, 0, 1, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
    [&header, vec![1; options * 4].as_slice(), rest].concat()
}

fn ipv6(next: u8, rest: &[u8]) -> Vec<u8> {
    let [high, low] = (rest.len() as u16).to_be_bytes();
    [[0x60, 0, 0, 0, high, low, next, 64].as_slice(), &[0xfd; 32], rest].concat()
}

fn udp(port: u16, payload: &[u8]) -> Vec<u8> {
    let words = [1111, port, payload.len() as u16 + 8, 0].map(u16::to_be_bytes);
    [words.as_flattened(), payload].concat()
}

/// `struct __sk_buff` with the two fields that BPF_PROG_TEST_RUN takes for super-packets.
fn context(gso_size: u32) -> [u8; 192] {
    const GSO_SEGS: usize = 164;
    const GSO_SIZE: usize = 176;
    let mut context = [0; 192];
    context[GSO_SEGS..GSO_SEGS + 4].copy_from_slice(&u32::from(gso_size > 0).to_ne_bytes());
    context[GSO_SIZE..GSO_SIZE + 4].copy_from_slice(&gso_size.to_ne_bytes());
    context
}

fn stream(len: usize) -> Vec<u8> {
    Chunk { stream: STREAM, offset: 7, data: vec![9; len], fin: false }.encode()
}

fn root(test: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("SKIP {test}: needs root");
    }
    root
}

#[test]
fn passes_what_it_does_not_understand() {
    if !root("passes_what_it_does_not_understand") {
        return;
    }
    let bench = Bench::new();
    let mut number = 0;
    let mut good = |bench: &Bench| {
        number += 1;
        bench.publisher.seal((0, number - 1), 4, &stream(1000))
    };
    let v4 = |packet: &[u8]| ethernet(0x0800, &ipv4(0, &udp(PORT, packet)));
    let extended = [&[17, 0, 0, 0, 0, 0, 0, 0], udp(PORT, &good(&bench)).as_slice()].concat();
    let tag = [&[0, 7, 0x08, 0], ipv4(0, &udp(PORT, &good(&bench))).as_slice()].concat();
    let mut fragment = ipv4(0, &udp(PORT, &good(&bench)));
    fragment[6] = 0x20;
    let mut long_udp = v4(&good(&bench));
    long_udp[14 + 20 + 4] ^= 0x10;
    let padded = [v4(&good(&bench)), vec![0xee; 9]].concat();
    let cases = [
        ("IPv4", v4(&good(&bench)), 0, Outcome::Forwarded),
        ("IPv6", ethernet(0x86dd, &ipv6(17, &udp(PORT, &good(&bench)))), 0, Outcome::Forwarded),
        ("bytes behind the datagram", padded, 0, Outcome::Forwarded),
        ("super-packet", v4(&good(&bench)), 600, Outcome::SuperPacket),
        ("other port", ethernet(0x0800, &ipv4(0, &udp(4444, &good(&bench)))), 0, Outcome::OtherPort),
        ("port 0", ethernet(0x0800, &ipv4(0, &udp(0, &good(&bench)))), 0, Outcome::OtherPort),
        ("IPv4 options", ethernet(0x0800, &ipv4(1, &udp(PORT, &good(&bench)))), 0, Outcome::OddHeaders),
        ("IPv6 extension", ethernet(0x86dd, &ipv6(60, &extended)), 0, Outcome::OddHeaders),
        ("a tag in the frame", ethernet(0x8100, &tag), 0, Outcome::OddHeaders),
        ("ARP", ethernet(0x0806, &[0; 46]), 0, Outcome::NotUdp),
        ("fragment", ethernet(0x0800, &fragment), 0, Outcome::Fragment),
        ("cut in the UDP header", ethernet(0x0800, &ipv4(0, &[0; 7])), 0, Outcome::Malformed),
        ("UDP length past the end", long_udp, 0, Outcome::Malformed),
        ("empty datagram", v4(&[]), 0, Outcome::BadSize),
        ("long header", v4(&[&[0xc0], good(&bench)[1..].as_ref()].concat()), 0, Outcome::LongHeader),
        (
            "another fixed bit than was sealed",
            v4(&[&[0], good(&bench)[1..].as_ref()].concat()),
            0,
            Outcome::NotAuthentic,
        ),
        ("unknown connection ID", v4(&[0x40; 100]), 0, Outcome::UnknownId),
        ("only a header", v4(&good(&bench)[..9]), 0, Outcome::BadSize),
        ("one byte short of a sample", v4(&good(&bench)[..1 + ID_LEN + 19]), 0, Outcome::BadSize),
        ("just a sample", v4(&good(&bench)[..1 + ID_LEN + 20]), 0, Outcome::NotAuthentic),
        ("too long", v4(&bench.publisher.seal((0, 90), 4, &stream(1600))), 0, Outcome::BadSize),
        ("other key phase", v4(&bench.publisher.seal((1, 91), 4, &stream(9))), 0, Outcome::NoKeys),
        (
            "reserved bit",
            v4(&bench.publisher.seal_with_bits(8, (0, 92), 4, &stream(9))),
            0,
            Outcome::BadFrames,
        ),
        ("no frames", v4(&bench.publisher.seal((0, 93), 4, &[])), 0, Outcome::NoSlot),
        ("no stream", v4(&bench.publisher.seal((0, 94), 4, &[1; 20])), 0, Outcome::NoSlot),
        ("unknown frame", v4(&bench.publisher.seal((0, 95), 4, &[0x21; 20])), 0, Outcome::BadFrames),
        ("nothing of a stream", v4(&bench.publisher.seal((0, 96), 4, &stream(0))), 0, Outcome::NoSlot),
    ];
    for (description, frame, gso_size, want) in cases {
        let before = bench.egresses_tried();
        assert_eq!(bench.run(&frame, gso_size), want, "{description}");
        assert_eq!(bench.egresses_tried() - before, u64::from(want == Outcome::Forwarded), "{description}");
    }
    bench.upstream.set_keys(1, &bench.publisher.kernel_keys(1)).expect("keys");
    let updated = bench.publisher.seal((1, 97), 4, &stream(9));
    assert_eq!(bench.run_packet(&updated), Outcome::Forwarded, "other key phase, with keys");
}

#[test]
fn forwards_authentic_bytes_only() {
    if !root("forwards_authentic_bytes_only") {
        return;
    }
    let mut bench = Bench::new();
    let packet = bench.publisher.seal((0, 5), 2, &stream(40));
    for at in 0..packet.len() * 8 {
        let mut forged = packet.clone();
        forged[at / 8] ^= 1 << (at % 8);
        let outcome = bench.run_packet(&forged);
        let id = 1..=ID_LEN;
        let want: &[_] = match at / 8 {
            // Key phase, and what is not QUIC any more. The other bits of the first byte are authenticated.
            0 => &[Outcome::NotAuthentic, Outcome::NoKeys, Outcome::LongHeader],
            byte if id.contains(&byte) => &[Outcome::UnknownId],
            // A sample that makes another mask makes another key phase.
            _ => &[Outcome::NotAuthentic, Outcome::NoKeys],
        };
        assert!(want.contains(&outcome), "bit {at}: {outcome:?}");
    }
    for len in 0..packet.len() {
        let outcome = bench.run_packet(&packet[..len]);
        assert_ne!(outcome, Outcome::Forwarded, "{len} bytes");
    }
    for _ in 0..1000 {
        let len = bench.rng.usize(40..1400);
        let mut garbage = quic::bytes(len, &mut bench.rng);
        garbage[0] = garbage[0] & 0x3f | 0x40;
        garbage[1..=ID_LEN].copy_from_slice(&bench.publisher.id);
        let outcome = bench.run_packet(&garbage);
        assert!([Outcome::NotAuthentic, Outcome::NoKeys].contains(&outcome), "{outcome:?}");
    }
    assert_eq!(bench.egresses_tried(), 0);
    assert_eq!(bench.run_packet(&packet), Outcome::Forwarded);
}

#[test]
fn forwards_no_number_twice() {
    if !root("forwards_no_number_twice") {
        return;
    }
    let mut bench = Bench::new();
    let run =
        |bench: &Bench, number, len| bench.run_packet(&bench.publisher.seal((0, number), len, &stream(10)));
    assert_eq!(run(&bench, 0, 1), Outcome::Forwarded);
    assert_eq!(run(&bench, 0, 1), Outcome::Replayed);
    // Reordered inside the window, in any order, each once.
    let mut numbers: Vec<u64> = (1..200).collect();
    bench.rng.shuffle(&mut numbers);
    for number in &numbers {
        assert_eq!(run(&bench, *number, 2), Outcome::Forwarded, "{number}");
    }
    for number in 0..200 {
        assert_eq!(run(&bench, number, 2), Outcome::Replayed, "{number}");
    }
    // A jump; what is out of the window then counts as seen.
    assert_eq!(run(&bench, 10_000, 4), Outcome::Forwarded);
    assert_eq!(run(&bench, 10_000 - 224, 4), Outcome::Forwarded);
    assert_eq!(run(&bench, 10_000 - 224, 4), Outcome::Replayed);
    assert_eq!(run(&bench, 10_000 - 256, 4), Outcome::Replayed);
    // Far enough that a number in one byte is another one.
    assert_eq!(run(&bench, 20_000, 1), Outcome::NotAuthentic);
    // What userspace opened is not forwarded later, and tells how short numbers are meant.
    bench.upstream.observe(20_000);
    assert_eq!(run(&bench, 20_000, 2), Outcome::Replayed);
    assert_eq!(run(&bench, 20_001, 1), Outcome::Forwarded);

    // A connection that is taken over late.
    for expected in [1, 31, 32, 33, 300, 1 << 40] {
        bench.upstream = bench.relay.upstream(expected).expect("an upstream");
        bench.upstream.add_id(&bench.publisher.id).expect("an ID");
        bench.upstream.set_keys(0, &bench.publisher.kernel_keys(0)).expect("keys");
        for number in expected.saturating_sub(300)..expected {
            assert_eq!(run(&bench, number, 4), Outcome::Replayed, "{number} of {expected}");
        }
        assert_ne!(run(&bench, expected, 4), Outcome::Replayed, "{expected}");
    }
}

/// Random payloads, most of them almost right: the program finds the streams that userspace's walker finds.
#[test]
fn walks_frames_as_userspace_does() {
    const CASES: u64 = 20_000;
    if !root("walks_frames_as_userspace_does") {
        return;
    }
    let mut bench = Bench::new();
    let mut seen = [0; 3];
    for number in 0..CASES {
        let frames = random_frames(&mut bench.rng);
        let Some(want) = expected(&frames) else { continue };
        let before = bench.egresses_tried();
        let outcome = bench.run_packet(&bench.publisher.seal((0, number), 4, &frames));
        let egresses = bench.egresses_tried() - before;
        assert_eq!((outcome, egresses), want, "{frames:02x?}");
        seen[(outcome != Outcome::BadFrames) as usize + (egresses > 0) as usize] += 1;
    }
    assert!(seen.iter().all(|count| *count > CASES / 20), "bad, without, with streams: {seen:?}");
}

fn random_frames(rng: &mut Rng) -> Vec<u8> {
    let mut frames = Vec::new();
    for _ in 0..rng.usize(1..6) {
        if rng.u32(..3) > 0 {
            frames.extend(quic::any_other(rng));
            continue;
        }
        let stream = STREAM + rng.u64(..2);
        let bits = rng.u32(..61);
        let (len, offset) = (rng.usize(..60), rng.u64(..1 << bits));
        let chunk = Chunk { stream, offset, data: quic::bytes(len, rng), fin: rng.bool() };
        let last = rng.u32(..4) == 0;
        frames.extend(quic::any_stream(&chunk, last, rng));
    }
    match rng.u32(..4) {
        0 => frames.truncate(rng.usize(..=frames.len())),
        1 => {
            let at = rng.usize(..frames.len());
            frames[at] ^= 1 << rng.u32(..8);
        }
        _ => {}
    }
    frames
}

/// The outcome and the number of egresses, by userspace's walker. None where that looks at what fields mean: an ACK
/// of numbers below 0 is no concern of the program.
fn expected(frames: &[u8]) -> Option<(Outcome, u64)> {
    let frames: Result<Vec<_>, _> = Walker::new(frames).map(|item| item.map(|(_, frame)| frame)).collect();
    let frames = match frames {
        Ok(frames) => frames,
        Err(frame::Error::Malformed(0x02 | 0x03)) => return None,
        Err(_) => return Some((Outcome::BadFrames, 0)),
    };
    let forwarded = |frame: &&Frame<'_>| matches!(frame, Frame::Stream(stream) if stream.id == STREAM && (stream.fin || !stream.data.is_empty()));
    Some(match frames.iter().filter(forwarded).count() as u64 {
        0 => (Outcome::NoSlot, 0),
        streams => (Outcome::Forwarded, streams),
    })
}

#[test]
fn tells_what_became_of_the_packets_that_are_traced() {
    if !root("tells_what_became_of_the_packets_that_are_traced") {
        return;
    }
    let bench = Bench::new();
    assert_eq!(bench.trace(0), [], "nobody asked");

    bench.relay.set_tracing(Some(ALL));
    let events = bench.trace(1);
    let [copy] = events[..] else { panic!("{events:?}") };
    assert!(copy.arrived_ns < copy.time_ns);
    assert_eq!((copy.publisher, copy.received), (PUBLISHER, 1));
    let want = What::Copy {
        outcome: EgressOutcome::Before,
        subscriber: SUBSCRIBER,
        sent: None,
        track: EGRESS.track,
        group: EGRESS.group,
        stream_id: EGRESS.stream_id,
        offset: 7 + EGRESS.shift as u64,
        len: 1000,
        fin: false,
    };
    assert_eq!(copy.what, want);
    let replayed = bench.trace(1);
    let [replayed] = replayed[..] else { panic!("{replayed:?}") };
    assert_eq!((replayed.publisher, replayed.received), (PUBLISHER, 1));
    let size = bench.publisher.seal((0, 1), 4, &stream(1000)).len() as u16;
    assert_eq!(replayed.what, What::Packet { outcome: Outcome::Replayed, size });
    // Of what is no upstream's nothing is said, whatever came before.
    bench.run(&ethernet(0x0806, &[0; 46]), 0);
    bench.run_packet(&[0x40; 100]);
    assert_eq!(bench.relay.drain_events(|event| panic!("{event:?}")), 0);

    bench.relay.set_tracing(None);
    assert_eq!(bench.trace(2), [], "off again");
}

#[test]
fn traces_a_sample_of_one_track_or_session() {
    if !root("traces_a_sample_of_one_track_or_session") {
        return;
    }
    let bench = Bench::new();
    let mut number = 0;
    let mut count = |tracing| {
        bench.relay.set_tracing(Some(tracing));
        number += 1;
        bench.trace(number).len()
    };
    let name = NonZero::new;
    for (description, track, session, want) in [
        ("everything", None, None, 1),
        ("the track", name(EGRESS.track), None, 1),
        ("another track", name(EGRESS.track + 1), None, 0),
        ("the publisher", None, name(PUBLISHER), 1),
        ("the subscriber", None, name(SUBSCRIBER), 1),
        ("another session", None, name(SUBSCRIBER + 1), 0),
        ("the track for another session", name(EGRESS.track), name(SUBSCRIBER + 1), 0),
    ] {
        assert_eq!(count(Tracing { track, session, ..ALL }), want, "{description}");
    }
    // Nothing of the track in it, and the publisher's own is told of all its packets.
    let other = |number, tracing| {
        bench.relay.set_tracing(Some(tracing));
        bench.run_packet(&bench.publisher.seal((0, number), 4, &[1; 20]));
        let mut events = 0;
        bench.relay.drain_events(|_| events += 1);
        events
    };
    assert_eq!(other(100, Tracing { track: name(EGRESS.track), ..ALL }), 0);
    assert_eq!(other(101, Tracing { session: name(SUBSCRIBER), ..ALL }), 0);
    assert_eq!(other(102, Tracing { session: name(PUBLISHER), ..ALL }), 1);

    let every = NonZero::new(4).expect("not 0");
    bench.relay.set_tracing(Some(Tracing { every, ..ALL }));
    let traced = (200..300).filter(|number| bench.trace(*number).len() == 1);
    assert!(traced.eq((200..300).step_by(4)));
}

#[test]
fn counts_the_events_that_nobody_takes() {
    if !root("counts_the_events_that_nobody_takes") {
        return;
    }
    const PACKETS: u64 = 8000;
    let bench = Bench::new();
    bench.relay.set_tracing(Some(ALL));
    for number in 0..PACKETS {
        assert_eq!(bench.run_packet(&bench.publisher.seal((0, number), 4, &stream(1))), Outcome::Forwarded);
    }
    let mut read = 0;
    let lost = bench.relay.drain_events(|_| read += 1);
    assert!(lost > 0 && read > 0, "{read} and {lost}");
    assert_eq!(read + lost, PACKETS);
    assert_eq!(bench.trace(PACKETS).len(), 1, "goes on");
}

/// `cargo test -p millrace-bpf -- --ignored --nocapture cost_of_tracing`, on a quiet machine. A packet that is opened
/// and then found to be a repetition.
#[test]
#[ignore = "measures, which takes a quiet machine"]
fn cost_of_tracing() {
    if !root("cost_of_tracing") {
        return;
    }
    let bench = Bench::new();
    let packet = bench.publisher.seal((0, 1), 4, &stream(100));
    let frame = ethernet(0x0800, &ipv4(0, &udp(PORT, &packet)));
    let elsewhere = ethernet(0x0800, &ipv4(0, &udp(PORT + 1, &packet)));
    let run = |frame: &[u8]| {
        let mut rounds: Vec<_> = (0..21).map(|_| bench.repeat(frame)).collect();
        rounds.sort_unstable();
        (rounds[0], rounds[10], rounds[20])
    };
    let not_even = NonZero::new(2).expect("not 0");
    for (what, tracing) in [
        ("off", None),
        ("on, in the sample", Some(ALL)),
        ("on, not in the sample", Some(Tracing { every: not_even, ..ALL })),
        ("on, of another session", Some(Tracing { session: NonZero::new(1), ..ALL })),
    ] {
        bench.relay.set_tracing(tracing);
        println!("{what}: {:?} ns; for another port: {:?} ns", run(&frame), run(&elsewhere));
    }
}

impl Bench {
    /// Mean run time, nanoseconds.
    fn repeat(&self, frame: &[u8]) -> u128 {
        let input = ProgramInput { data_in: Some(frame), repeat: 1000, ..ProgramInput::default() };
        let object = lock(&self.relay.object);
        let output = object.program("relay_ingress").expect("the program").test_run(input).expect("test run");
        drop(object);
        self.relay.drain_events(|_| {});
        output.duration.as_nanos()
    }
}

/// Packets of the publisher, one after the other, and where their keystreams came from.
fn open_next(bench: &mut Bench, word: &mut (u16, u64), count: u64) -> [u64; 3] {
    let before = Lookup::ALL.map(|lookup| bench.upstream.lookups(lookup));
    for _ in 0..count {
        let packet = bench.publisher.seal(*word, 2, &stream(1000));
        assert_eq!(bench.run_packet(&packet), Outcome::Forwarded);
        word.1 += 1;
    }
    let after = Lookup::ALL.map(|lookup| bench.upstream.lookups(lookup));
    std::array::from_fn(|lookup| after[lookup] - before[lookup])
}

#[test]
fn each_packet_ahead_is_opened_with_its_keystream() {
    if !root("each_packet_ahead_is_opened_with_its_keystream") {
        return;
    }
    let mut bench = Bench::new();
    let mut keystreams = bench.publisher.keystreams();
    let want = Want { len: 8, text_bytes: 1100 };
    let mut word = (0, 0);
    assert_eq!(open_next(&mut bench, &mut word, 2), [0, 0, 2], "no ring");
    assert_eq!(bench.upstream.refill(0, want, &mut keystreams), Refill { computed: 8, len: 8 });
    assert_eq!(open_next(&mut bench, &mut word, 10), [8, 2, 0]);
    word.1 += 20;
    assert_eq!(open_next(&mut bench, &mut word, 1), [0, 1, 0]);
    assert_eq!(bench.upstream.refill(0, want, &mut keystreams).computed, 8);
    assert_eq!(open_next(&mut bench, &mut word, 3), [3, 0, 0]);
    assert_eq!(bench.upstream.refill(0, want, &mut keystreams).computed, 3, "only what was used");
    // Longer at once, and what is there for shorter packets only is of no use.
    let short = Want { len: 32, text_bytes: 900 };
    assert_eq!(bench.upstream.refill(0, short, &mut keystreams), Refill { computed: 32, len: 32 });
    assert_eq!(open_next(&mut bench, &mut word, 1), [0, 1, 0]);
    assert_eq!(bench.upstream.refill(0, Want { len: 32, ..want }, &mut keystreams).computed, 32);
    assert_eq!(open_next(&mut bench, &mut word, 32), [32, 0, 0]);
    // The keys change: what is ahead is stale until it has been computed anew.
    assert_eq!(bench.upstream.refill(0, want, &mut keystreams).computed, 8);
    bench.upstream.set_keys(1, &bench.publisher.kernel_keys(1)).expect("keys");
    word.0 = 1;
    assert_eq!(open_next(&mut bench, &mut word, 1), [0, 1, 0]);
    assert_eq!(bench.upstream.refill(1, want, &mut keystreams).computed, 8);
    assert_eq!(open_next(&mut bench, &mut word, 8), [8, 0, 0]);
    // Who has no such key computes nothing.
    let nothing = bench.upstream.refill(2, want, |_, _, _: &mut [u8; 64], _: &mut [u8]| false);
    assert_eq!(nothing, Refill { computed: 0, len: 8 });
    assert_eq!(open_next(&mut bench, &mut word, 8), [0, 8, 0]);
    assert_eq!(bench.upstream.refill(1, Want { len: 0, ..want }, &mut keystreams), Refill::default());
    assert_eq!(open_next(&mut bench, &mut word, 1), [0, 0, 1]);
}

#[test]
fn rings_share_the_room_there_is() {
    if !root("rings_share_the_room_there_is") {
        return;
    }
    let entry = size_of::<intf::Keystream>() as u64;
    let load = |entries: u64| {
        let config = Config { keystream_bytes: entries * entry, ..Config::default() };
        let relay = Relay::load(&config).expect("the relay loads");
        let upstreams = [0, 1].map(|_| relay.upstream(0).expect("an upstream"));
        (relay, upstreams)
    };
    let refill = |upstream: &Upstream, len| {
        let want = Want { len, text_bytes: 10 };
        upstream.refill(0, want, |_, _, _: &mut [u8; 64], _: &mut [u8]| true).len
    };
    let (relay, [one, other]) = load(24);
    assert_eq!([refill(&one, 16), refill(&other, 16)], [16, 8]);
    assert_eq!(refill(&one, 32), 16, "no room for more");
    assert_eq!([refill(&one, 0), refill(&other, 16)], [0, 8], "it may still be in use");
    relay.settle().expect("settled");
    assert_eq!(refill(&other, 16), 16);
    let (_relay, [one, _]) = load(0);
    assert_eq!(refill(&one, 1), 0);
}

#[test]
fn what_was_unlinked_comes_back_after_settling() {
    if !root("what_was_unlinked_comes_back_after_settling") {
        return;
    }
    let relay = Relay::load(&Config { max_upstreams: 2, ..Config::default() }).expect("the relay loads");
    let upstreams = [0, 1].map(|_| relay.upstream(0).expect("an upstream"));
    assert!(matches!(relay.upstream(0), Err(Error::Full { .. })));
    assert!(!relay.needs_settling());
    drop(upstreams);
    assert!(matches!(relay.upstream(0), Err(Error::Unsettled { .. })));
    assert!(relay.needs_settling());
    relay.settle().expect("settled");
    assert!(!relay.needs_settling() && relay.upstream(0).is_ok());
}

/// The mark leads to where a packet's next run goes on, is used up by it, and comes back.
#[test]
fn a_further_run_goes_on_where_the_last_ended() {
    const MARK: usize = 8;
    if !root("a_further_run_goes_on_where_the_last_ended") {
        return;
    }
    let mut bench = Bench::with_config(Config { max_copies_per_run: 2, ..Config::default() });
    for _ in 1..5 {
        bench.slot.add(&bench.downstream, &EGRESS).expect("an egress");
    }
    let frame = |bench: &Bench, number| {
        let packet = bench.publisher.seal((0, number), 2, &stream(100));
        ethernet(0x0800, &ipv4(0, &udp(PORT, &packet)))
    };
    let run = |bench: &Bench, frame: &[u8], mark: u32| {
        let mut context = context(0);
        context[MARK..MARK + 4].copy_from_slice(&mark.to_ne_bytes());
        let before = bench.egresses_tried();
        let verdict = bench.test_run(frame, &mut context);
        let after = u32::from_ne_bytes(*context[MARK..].first_chunk().expect("a mark"));
        (verdict, after, bench.egresses_tried() - before)
    };
    let (one, other) = (frame(&bench, 0), frame(&bench, 300));
    let (verdict, first, egresses) = run(&bench, &one, 77);
    assert_eq!((verdict, egresses), (DROP, 2));
    // Meanwhile others come, among them far later numbers and this one again.
    let (verdict, second, egresses) = run(&bench, &other, 0);
    assert_eq!((verdict, egresses), (DROP, 2));
    assert_eq!(run(&bench, &one, 77), (PASS_ON, 77, 0), "replayed");
    let (verdict, third, egresses) = run(&bench, &one, first);
    assert_eq!((verdict, egresses), (DROP, 2));
    assert_eq!(run(&bench, &one, third), (PASS_ON, 77, 1), "the fifth egress");
    // What is used up is a mark like any other.
    assert_eq!(run(&bench, &one, third), (PASS_ON, third, 0));
    // A cursor is of no use to another packet.
    assert_eq!(run(&bench, &one, second), (PASS_ON, 0, 0));
    let counters = bench.relay.counters().expect("counters");
    assert_eq!(FurtherRun::ALL.map(|outcome| counters.further_runs(outcome)), [1, 1, 1]);
    assert_eq!(counters.packets(Outcome::Replayed), 2);
    // Removed meanwhile.
    let (_, mark, _) = run(&bench, &frame(&bench, 301), 0);
    bench.slot = bench.upstream.slot(STREAM);
    assert_eq!(run(&bench, &frame(&bench, 301), mark), (PASS_ON, 0, 0));
}
