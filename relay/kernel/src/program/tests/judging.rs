//! Tests which bytes of a stream the program forwards.

use millrace_moq::data::{Status, encode_object_header};

use super::*;

/// Returns a subgroup stream without properties: its header, and objects of these payload lengths.
fn subgroup(lengths: &[usize]) -> Vec<u8> {
    let mut bytes = vec![0x30, 2, 0];
    for (id, len) in (0..).zip(lengths) {
        let previous = u64::checked_sub(id, 1);
        encode_object_header(previous, id, None, *len as u64, Status::Normal, &mut bytes);
        bytes.extend(vec![id as u8; *len]);
    }
    bytes
}

/// A STREAM frame with a part of the tested stream.
struct JudgedPart<'a> {
    at: usize,
    bytes: &'a [u8],
    fin: bool,
}

fn part(stream: &[u8], range: std::ops::Range<usize>) -> JudgedPart<'_> {
    JudgedPart { at: range.start, bytes: &stream[range], fin: false }
}

fn last(stream: &[u8], at: usize) -> JudgedPart<'_> {
    JudgedPart { at, bytes: &stream[at..], fin: true }
}

struct Judge {
    bench: ProgramBench,
    sent: u64,
}

impl Judge {
    /// Makes a test bench for a stream that has no bytes yet.
    fn new() -> Self {
        let mut judge = Self { bench: ProgramBench::new(), sent: 0 };
        judge.begin();
        judge
    }

    /// Replaces the tested stream by a new stream, which has no bytes yet.
    fn begin(&mut self) {
        drop(self.bench.slot.replace(self.bench.upstream.slot(STREAM)));
        self.bench.slot.borrow_mut().add(&self.bench.downstream, &EGRESS).expect("an egress");
    }

    /// Sends one packet with these frames. Returns its outcome, and the number of frames that the program tried to
    /// copy.
    fn send(&mut self, parts: &[JudgedPart<'_>]) -> (Outcome, u64) {
        let frames: Vec<u8> = parts
            .iter()
            .flat_map(|part| {
                let offset = part.at as u64;
                let data = part.bytes.to_vec();
                StreamPart { stream: STREAM, offset, data, fin: part.fin }.encode()
            })
            .collect();
        let packet = self.bench.publisher.seal(0, self.sent, 4, &frames);
        self.sent += 1;
        let before = (self.bench.counted(), self.bench.egresses_tried());
        let frame = ethernet(0x0800, &ipv4(0, &udp(PORT, &packet)));
        assert_eq!(self.bench.test_run(&frame, &mut context(0)), PASS_ON);
        let counted = self.bench.counted().since(&before.0);
        let outcome = Outcome::ALL.into_iter().find(|one| counted.packets(*one) == 1).expect("an outcome");
        (outcome, self.bench.egresses_tried() - before.1)
    }

    fn frames(&self, outcome: FrameOutcome) -> u64 {
        self.bench.counted().frames(outcome)
    }

    fn judged(&self) -> usize {
        self.bench.slot.borrow().judged() as usize
    }
}

const GOOD: (Outcome, u64) = (Outcome::Forwarded, 1);
const DECLINED: (Outcome, u64) = (Outcome::Declined, 0);
const BAD: (Outcome, u64) = (Outcome::BadStream, 0);

#[test]
fn well_formed_bytes_in_order_are_forwarded_once() {
    if !root("well_formed_bytes_in_order_are_forwarded_once") {
        return;
    }
    let stream = subgroup(&[100, 0, 1000, 5]);
    let end = stream.len();
    let mut judge = Judge::new();
    // Frames may end anywhere, even after each byte, and a packet may have several.
    assert_eq!(judge.send(&[part(&stream, 0..2)]), GOOD);
    assert_eq!(judge.send(&[part(&stream, 2..5)]), GOOD);
    for at in 5..9 {
        assert_eq!(judge.send(&[part(&stream, at..at + 1)]), GOOD, "{at}");
    }
    assert_eq!(judge.send(&[part(&stream, 9..500), part(&stream, 500..600)]), (Outcome::Forwarded, 2));
    assert_eq!(judge.judged(), 600);
    // Frames with bytes that have arrived before are declined. Another frame of the same packet is still forwarded.
    assert_eq!(judge.send(&[part(&stream, 300..600)]), DECLINED);
    assert_eq!(judge.send(&[part(&stream, 300..700)]), DECLINED);
    assert_eq!(judge.judged(), 700);
    assert_eq!(judge.send(&[part(&stream, 650..700), part(&stream, 700..710)]), GOOD);
    assert_eq!(judge.send(&[last(&stream, 710)]), GOOD);
    // The end of the stream is forwarded only once.
    assert_eq!(judge.send(&[last(&stream, 710)]), DECLINED);
    assert_eq!(judge.send(&[last(&stream, end)]), DECLINED);
    assert_eq!(judge.frames(FrameOutcome::Repeated), 5);
}

#[test]
fn packet_with_bytes_beyond_the_final_size_is_not_forwarded() {
    if !root("packet_with_bytes_beyond_the_final_size_is_not_forwarded") {
        return;
    }
    let stream = subgroup(&[100, 100, 100]);
    let size = 3 + 2 * 103 - 2;
    let cut = &stream[..size];
    // If one frame is beyond the final size, no frame of the packet is forwarded, because userspace closes the
    // connection.
    let mut judge = Judge::new();
    assert_eq!(judge.send(&[part(&stream, 0..50)]), GOOD);
    assert_eq!(judge.send(&[last(cut, 50), part(&stream, size..stream.len())]), BAD);
    assert_eq!(judge.send(&[part(&stream, 50..100)]), BAD, "nor later");
    for (description, first, then) in [
        ("behind the end", last(cut, 50), part(&stream, size..size + 1)),
        ("another end, larger", last(cut, 50), last(&stream, size)),
        ("another end, smaller", last(cut, 50), last(&stream[..size - 10], 60)),
        ("an end in what came before", part(&stream, 50..150), last(&stream[..105], 60)),
    ] {
        judge.begin();
        assert_eq!(judge.send(&[part(&stream, 0..50)]), GOOD);
        assert_eq!(judge.send(&[first]), GOOD, "{description}");
        assert_eq!(judge.send(&[then]), BAD, "{description}");
    }
    // The frame with FIN arrives first.
    judge.begin();
    assert_eq!(judge.send(&[last(cut, size)]), DECLINED);
    assert_eq!(judge.send(&[part(&stream, 0..150)]), GOOD);
    assert_eq!(judge.send(&[part(&stream, 150..size + 1)]), BAD);
    // The final size is smaller than the end of bytes that arrived after a hole in the stream.
    judge.begin();
    assert_eq!(judge.send(&[part(&stream, 150..size)]), DECLINED);
    assert_eq!(judge.send(&[last(&stream[..size - 10], size - 10)]), BAD);
}

#[test]
fn malformed_subgroup_stream_bytes_are_not_forwarded() {
    if !root("malformed_subgroup_stream_bytes_are_not_forwarded") {
        return;
    }
    let behind = |rest: &[u8]| [&[0x30, 2, 0], rest].concat();
    let cases = [
        ("no subgroup", vec![0x05, 1]),
        ("reserved mode", vec![0x36, 2, 0]),
        ("status", behind(&[0, 0, 1])),
        ("an object behind the end of the group", behind(&[0, 0, 3, 0])),
        ("an ID above all", behind(&[[0xff; 9].as_slice(), &[1, 9, 0]].concat())),
        ("longer than any stream", behind(&[0, 0xff, 0x40, 0, 0, 0, 0, 0, 0, 0])),
        ("65537 bytes of properties", vec![0x31, 2, 0, 9, 0xc1, 0, 1]),
    ];
    let mut judge = Judge::new();
    for (description, stream) in cases {
        judge.begin();
        let good = &stream[..stream.len() - 1];
        let bad = stream.len() - 1;
        if description != "no subgroup" && description != "reserved mode" {
            assert_eq!(judge.send(&[part(good, 0..good.len())]), GOOD, "{description}");
            assert_eq!(judge.send(&[part(&stream, bad..stream.len())]), BAD, "{description}, in two");
        }
        judge.begin();
        assert_eq!(judge.send(&[part(&stream, 0..stream.len())]), BAD, "{description}");
        assert_eq!(judge.send(&[part(&stream, 0..1)]), BAD, "{description}, once is enough");
    }
    // The stream ends in the middle of an object.
    let stream = subgroup(&[100]);
    for end in [4, 5, 50, 104] {
        judge.begin();
        assert_eq!(judge.send(&[last(&stream[..end], 0)]), BAD, "{end}");
    }
    judge.begin();
    assert_eq!(judge.send(&[last(&stream, 0)]), GOOD);
    // A frame with too many fields is left to userspace.
    judge.begin();
    let many = subgroup(&[0; 300]);
    assert_eq!(judge.send(&[part(&many, 0..many.len())]), DECLINED);
    assert_eq!(judge.frames(FrameOutcome::Long), 1);
    assert_eq!(judge.send(&[part(&many, 0..203)]), DECLINED, "userspace has these bytes");
    judge.begin();
    assert_eq!(judge.send(&[part(&many, 0..203)]), GOOD, "not so many");
}

/// Userspace keeps the first version of each byte. A frame is not forwarded if any of its bytes has arrived before,
/// whether at its beginning, middle or end.
#[test]
fn frame_that_overlaps_received_bytes_is_not_forwarded() {
    if !root("frame_that_overlaps_received_bytes_is_not_forwarded") {
        return;
    }
    let x = subgroup(&[100, 1000, 100]);
    let y = subgroup(&[100, 51, 51, 51]);
    let object = 105;
    let advance = |judge: &Judge, to: usize| judge.bench.slot.borrow_mut().advance(&position(&x, to));

    // Two versions of the bytes at one offset arrive, in one packet and in two packets.
    for two in [false, true] {
        let mut judge = Judge::new();
        assert_eq!(judge.send(&[part(&x, 0..object)]), GOOD);
        let first = part(&x, object..object + 53);
        let second = part(&y, object..object + 54);
        if two {
            assert_eq!(judge.send(&[first]), GOOD);
            assert_eq!(judge.send(&[second]), DECLINED);
        } else {
            assert_eq!(judge.send(&[first, second]), GOOD);
        }
        assert_eq!(judge.judged(), object + 54, "behind the longer one, in the object of the first");
        assert_eq!(judge.send(&[part(&x, object + 54..500)]), GOOD);
    }

    // A frame overlaps with bytes that arrived after a hole in the stream, so the frame is parsed only up to these
    // bytes.
    let mut judge = Judge::new();
    assert_eq!(judge.send(&[part(&x, 0..200)]), GOOD);
    assert_eq!(judge.send(&[part(&y, 250..260)]), DECLINED);
    assert_eq!(judge.send(&[part(&x, 200..300)]), DECLINED);
    assert_eq!(judge.judged(), 260, "the hole, and what was kept");
    assert_eq!(judge.send(&[part(&x, 260..310)]), DECLINED, "some of it came with the other one");
    advance(&judge, 310);
    assert_eq!(judge.send(&[part(&x, 310..320)]), GOOD);

    // Bytes arrive after two holes in the stream. The stored bytes after the first hole are discarded.
    judge.begin();
    assert_eq!(judge.send(&[part(&x, 0..200)]), GOOD);
    assert_eq!(judge.send(&[part(&y, 210..220)]), DECLINED);
    assert_eq!(judge.send(&[part(&x, 230..240)]), DECLINED);
    assert_eq!(judge.send(&[part(&x, 200..210)]), GOOD, "up to there nothing has come");
    assert_eq!(judge.send(&[part(&x, 210..300)]), DECLINED);
    assert_eq!(judge.judged(), 210);
    advance(&judge, 300);
    assert_eq!(judge.send(&[part(&x, 300..310)]), GOOD);

    // A frame overlaps with the ninth frame of a packet, which the program did not check, because it handles eight.
    judge.begin();
    assert_eq!(judge.send(&[part(&x, 0..200)]), GOOD);
    let mut nine: Vec<_> = (0..8).map(|_| part(&x, 0..10)).collect();
    nine.push(part(&y, 200..210));
    judge.send(&nine);
    assert_eq!(judge.send(&[part(&x, 200..220)]), DECLINED);
    advance(&judge, 220);
    assert_eq!(judge.send(&[part(&x, 220..230)]), GOOD);
}

/// Bytes may reach only userspace, in packets from an interface without the program, or in packets that the program
/// does not parse. The program forwards no later packet that has other bytes at the same stream offsets.
#[test]
fn packet_contradicting_bytes_seen_only_by_userspace_is_not_forwarded() {
    if !root("packet_contradicting_bytes_seen_only_by_userspace_is_not_forwarded") {
        return;
    }
    let stream = subgroup(&[1000, 100]);
    let mut judge = Judge::new();
    let leave = |judge: &Judge, bytes, fin| judge.bench.upstream.leave(STREAM, &bytes, fin);
    let advance = |judge: &Judge, to: usize| judge.bench.slot.borrow_mut().advance(&position(&stream, to));
    assert_eq!(judge.send(&[part(&stream, 0..200)]), GOOD);
    assert!(judge.bench.upstream.observe(judge.sent - 1), "the program has opened it");
    assert!(!judge.bench.upstream.observe(judge.sent), "and not that one");
    judge.sent += 1;
    leave(&judge, 200..250, false);
    assert_eq!(judge.send(&[part(&stream, 200..300)]), DECLINED);
    advance(&judge, 300);
    assert_eq!(judge.send(&[part(&stream, 300..400)]), GOOD);
    leave(&judge, 500..600, false);
    assert_eq!(judge.send(&[part(&stream, 400..500)]), GOOD);
    assert_eq!(judge.send(&[part(&stream, 500..700)]), DECLINED);
    advance(&judge, 700);
    // The bytes that userspace has received include the end of the stream.
    leave(&judge, 800..1005, true);
    assert_eq!(judge.send(&[part(&stream, 700..800)]), GOOD);
    assert!(!judge.bench.slot.borrow().is_contradicted());
    assert_eq!(judge.send(&[part(&stream, 800..1006)]), BAD);
    // The program has forwarded other bytes at the offsets that userspace reports.
    judge.begin();
    assert_eq!(judge.send(&[part(&stream, 0..200)]), GOOD);
    leave(&judge, 199..210, false);
    assert!(judge.bench.slot.borrow().is_contradicted());
    assert_eq!(judge.send(&[part(&stream, 200..210)]), BAD, "nothing more of it");
    // Userspace may also report bytes of a stream that the program does not forward.
    judge.bench.upstream.leave(STREAM + 400, &(0..10), true);
}

/// A forwarded packet may be lost on its way to userspace, which then receives a packet with other bytes at the same
/// stream offset.
#[test]
fn kernel_and_userspace_parser_states_differing_at_an_offset_are_detected() {
    if !root("kernel_and_userspace_parser_states_differing_at_an_offset_are_detected") {
        return;
    }
    let x = subgroup(&[1000, 100]);
    let y = subgroup(&[100, 897, 100]);
    let mut judge = Judge::new();
    assert_eq!(judge.send(&[part(&x, 0..400)]), GOOD);
    for (stream, to, contradicted) in [(&x, 200, false), (&y, 300, false), (&x, 400, false), (&y, 400, true)]
    {
        judge.bench.slot.borrow_mut().advance(&position(stream, to));
        assert_eq!(judge.bench.slot.borrow().is_contradicted(), contradicted, "{to}");
    }
    assert_eq!(judge.send(&[part(&x, 400..500)]), BAD, "nothing more of it");
}

/// Returns the position that `moq::data` reports after the first `len` bytes of a stream.
fn position(stream: &[u8], len: usize) -> Position {
    use millrace_moq::{ObjectParser, StreamHeader};
    let mut rest = &stream[..len];
    let Ok(Some(StreamHeader::Subgroup(header))) = StreamHeader::decode(&mut rest) else {
        panic!("a header")
    };
    let mut parser = ObjectParser::new(&header, (len - rest.len()) as u64);
    while parser.next(&mut rest).expect("objects").is_some() {}
    parser.position()
}

#[test]
fn stream_is_forwarded_again_after_its_missing_bytes_arrive() {
    if !root("stream_is_forwarded_again_after_its_missing_bytes_arrive") {
        return;
    }
    let stream = subgroup(&[100, 1000, 100, 100, 100]);
    // Stream offsets at which the objects of the tested stream begin.
    let [one, two, three, four, five] = [3, 105, 1108, 1210, 1312];
    let advance = |judge: &Judge, to: usize| judge.bench.slot.borrow_mut().advance(&position(&stream, to));

    // The hole in the stream is in an object's payload. The frame that fills the hole shows where the next object
    // begins.
    let mut judge = Judge::new();
    assert_eq!(judge.send(&[part(&stream, 0..200)]), GOOD);
    assert_eq!(judge.send(&[part(&stream, 300..400)]), DECLINED);
    assert_eq!(judge.send(&[part(&stream, 400..500)]), DECLINED);
    assert_eq!(judge.judged(), 200);
    assert_eq!(judge.send(&[part(&stream, 200..300)]), GOOD);
    assert_eq!(judge.judged(), 500);
    assert_eq!(judge.send(&[part(&stream, 500..three + 5)]), GOOD);

    // The hole in the stream ends exactly where an object begins.
    judge.begin();
    assert_eq!(judge.send(&[part(&stream, 0..two)]), GOOD);
    assert_eq!(judge.send(&[part(&stream, three..four)]), DECLINED);
    assert_eq!(judge.send(&[part(&stream, four..five)]), DECLINED);
    advance(&judge, 500);
    assert_eq!(judge.judged(), 500);
    assert_eq!(judge.send(&[part(&stream, five..five + 10)]), DECLINED);
    advance(&judge, three);
    assert_eq!(judge.judged(), three);
    assert_eq!(judge.send(&[part(&stream, five + 10..five + 20)]), GOOD, "the program has kept what follows");
    assert_eq!(judge.judged(), five + 20);
    assert_eq!(judge.send(&[last(&stream, five + 20)]), GOOD);

    // The hole in the stream is in the middle of an object, and later packets arrive faster than userspace reads.
    judge.begin();
    assert_eq!(judge.send(&[part(&stream, 0..one + 50)]), GOOD);
    assert_eq!(judge.send(&[part(&stream, three + 50..four + 1)]), DECLINED);
    assert_eq!(judge.send(&[part(&stream, four + 1..four + 50)]), DECLINED);
    advance(&judge, two);
    assert_eq!(judge.send(&[part(&stream, four + 50..five + 1)]), DECLINED);
    advance(&judge, three + 70);
    assert_eq!(judge.send(&[part(&stream, five + 1..five + 20)]), GOOD);
    // The program never moves its position in the stream back.
    advance(&judge, four);
    assert_eq!(judge.judged(), five + 20);

    // The hole in the stream begins and ends in the middle of an object.
    judge.begin();
    assert_eq!(judge.send(&[part(&stream, 0..two)]), GOOD);
    assert_eq!(judge.send(&[part(&stream, three + 5..four)]), DECLINED);
    advance(&judge, three);
    assert_eq!(judge.send(&[part(&stream, three..three + 5)]), GOOD);
    assert_eq!(judge.judged(), four);

    // The stream has two holes (ranges of missing bytes). Only bytes after the second hole stay stored.
    judge.begin();
    assert_eq!(judge.send(&[part(&stream, 0..two)]), GOOD);
    assert_eq!(judge.send(&[part(&stream, three..three + 10)]), DECLINED);
    assert_eq!(judge.send(&[part(&stream, three + 20..four)]), DECLINED);
    advance(&judge, three + 5);
    assert_eq!(judge.send(&[part(&stream, four..five)]), DECLINED);
    advance(&judge, three + 20);
    assert_eq!(judge.send(&[part(&stream, five..five + 9)]), GOOD);
}

/// More bytes arrive after a hole than the program stores, so it discards the first ones. If userspace parses the
/// stream up to bytes that were discarded, the program stops there, too. If userspace parses up to the bytes that were
/// stored last, the program continues with these bytes.
#[test]
fn out_of_order_bytes_beyond_the_reassembly_buffer_discard_the_oldest() {
    if !root("out_of_order_bytes_beyond_the_reassembly_buffer_discard_the_oldest") {
        return;
    }
    let stream = subgroup(&[300; 300]);
    let frames: Vec<_> = (0..stream.len() / 1000).map(|at| at * 1000..(at + 1) * 1000).collect();
    let advance = |judge: &Judge, to: usize| judge.bench.slot.borrow_mut().advance(&position(&stream, to));
    let mut judge = Judge::new();
    assert_eq!(judge.send(&[part(&stream, frames[0].clone())]), GOOD);
    // The bytes from offset 2000 to 67,000 are stored. The buffer has no room for later bytes, so they replace the
    // stored ones.
    for frame in &frames[2..70] {
        assert_eq!(judge.send(&[part(&stream, frame.clone())]), DECLINED);
    }
    advance(&judge, 5000);
    assert_eq!(judge.send(&[part(&stream, frames[70].clone())]), DECLINED);
    assert_eq!(judge.judged(), 5000, "that was given up");
    advance(&judge, 68_500);
    assert_eq!(judge.send(&[part(&stream, frames[71].clone())]), GOOD);
    assert_eq!(judge.judged(), 72_000);
    // Many bytes are stored after a hole in the stream. The program parses only some of them with each frame that
    // arrives.
    judge.begin();
    assert_eq!(judge.send(&[part(&stream, frames[0].clone())]), GOOD);
    for frame in &frames[2..50] {
        assert_eq!(judge.send(&[part(&stream, frame.clone())]), DECLINED);
    }
    advance(&judge, 2000);
    for (frame, want) in frames[50..53].iter().zip([18_384, 34_768, 51_152]) {
        assert_eq!(judge.send(&[part(&stream, frame.clone())]), DECLINED);
        assert_eq!(judge.judged(), want);
    }
    assert_eq!(judge.send(&[part(&stream, frames[53].clone())]), GOOD);
    // Malformed bytes that are stored after a hole in the stream are detected when the parser's position reaches them.
    let mut broken = subgroup(&[10, 10]);
    broken.extend([0, 0, 1]);
    judge.begin();
    assert_eq!(judge.send(&[part(&broken, 20..broken.len())]), DECLINED);
    assert_eq!(judge.send(&[part(&broken, 0..20)]), GOOD);
    assert_eq!(judge.send(&[part(&broken, 0..20)]), BAD);
}

/// Two streams share one buffer for bytes that arrive after a hole. While the buffer has bytes of one of these streams,
/// the other stream's bytes are not stored.
#[test]
fn out_of_order_bytes_of_only_one_stream_per_shared_buffer_are_stored() {
    const STREAMS: u64 = 65;
    if !root("out_of_order_bytes_of_only_one_stream_per_shared_buffer_are_stored") {
        return;
    }
    let stream = subgroup(&[100, 100, 100, 100]);
    let Judge { bench, .. } = Judge::new();
    let mut slots: Vec<_> = (0..STREAMS)
        .map(|at| {
            let mut slot = bench.upstream.slot(1000 + 4 * at);
            slot.add(&bench.downstream, &EGRESS).expect("an egress");
            slot
        })
        .collect();
    let mut number = 0;
    let mut send = |at: u64, range: std::ops::Range<usize>| {
        let chunk = StreamPart {
            stream: 1000 + 4 * at,
            offset: range.start as u64,
            data: stream[range].to_vec(),
            fin: false,
        };
        number += 1;
        bench.run_packet(&bench.publisher.seal(0, number, 4, &chunk.encode()))
    };
    // The first and the last stream share a buffer for bytes after a hole.
    for at in [0, STREAMS - 1] {
        assert_eq!(send(at, 0..10), Outcome::Forwarded);
        assert_eq!(send(at, 110..210), Outcome::Declined);
        slots[at as usize].advance(&position(&stream, 120));
    }
    assert_eq!(send(STREAMS - 1, 210..220), Outcome::Declined, "not kept");
    assert_eq!(send(0, 210..220), Outcome::Forwarded);
    // The first stream was parsed beyond its bytes in the shared buffer, so the buffer is free.
    assert_eq!(send(STREAMS - 1, 230..330), Outcome::Declined);
    slots[STREAMS as usize - 1].advance(&position(&stream, 240));
    assert_eq!(send(STREAMS - 1, 330..340), Outcome::Forwarded);
}

/// Object IDs after a hole are deltas to the object IDs before the hole.
#[test]
fn object_id_deltas_after_missing_bytes_resolve_up_to_2_64_minus_1() {
    if !root("object_id_deltas_after_missing_bytes_resolve_up_to_2_64_minus_1") {
        return;
    }
    // The stream has the object IDs 2^64 - 3 to 2^64 - 1; a further object would exceed the largest ID.
    let mut stream = vec![0x30, 2, 0];
    let object = |delta: u64, stream: &mut Vec<u8>| {
        millrace_moq::vi64::encode(delta, stream);
        stream.extend([1, 7]);
        stream.len()
    };
    let one = object(u64::MAX - 2, &mut stream);
    let two = object(0, &mut stream);
    let three = object(0, &mut stream);
    let four = object(0, &mut stream);
    let mut judge = Judge::new();
    assert_eq!(judge.send(&[part(&stream, 0..one)]), GOOD);
    assert_eq!(judge.send(&[part(&stream, two..three)]), DECLINED);
    assert_eq!(judge.send(&[part(&stream, one..two)]), GOOD);
    assert_eq!(judge.judged(), three);
    assert_eq!(judge.send(&[part(&stream, three..four)]), BAD);
    // The last two objects of the stream arrive after the hole in the stream.
    judge.begin();
    assert_eq!(judge.send(&[part(&stream, 0..one)]), GOOD);
    assert_eq!(judge.send(&[part(&stream, two..four)]), DECLINED);
    assert_eq!(judge.send(&[part(&stream, one..two)]), GOOD);
    assert_eq!(judge.judged(), two);
    assert_eq!(judge.send(&[part(&stream, two..four)]), BAD);
}
