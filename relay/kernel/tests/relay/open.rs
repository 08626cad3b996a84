//! Tests of streams that the program opens to subscribers by itself.

use millrace_moq::data::{Status, encode_object_header};
use millrace_moq::{SubgroupHeader, SubgroupId, vi64};
use millrace_quic::{keys::KeySuite, webtransport::Binding};
use millrace_relay_kernel::program::{
    Config, EgressKey, EgressOutcome, OpeningOutcome, OpeningRecord, OpeningRecordSide, Outcome, SlotRecord,
    TrackRecord,
};

use crate::net::{self, NamespaceNetwork, root};
use crate::peers::{PORT, attach};
use crate::quic::StreamPart;
use crate::scene::{ID_LEN, RelayScene, simple};

/// The track alias that the publisher uses.
const ALIAS: u64 = 7;
/// The number (tag) of the subscription. The program repeats it in its report about each sent packet.
const TAG: u64 = 1 << 63 | 5;
/// The group and subgroup of the newest stream that began before these tests.
const LAST: (u64, u64) = (4, 9);
/// A subscriber's copy of streams that have not begun. The subscriber requested every group of the track.
const OPENED: OpeningRecord = OpeningRecord {
    alias: 9,
    first: (0, 0),
    last_group: u64::MAX,
    max_offset: 1 << 20,
    level: 0x80_40,
    tag: TAG,
    track: 3,
};

fn header(group: u64) -> SubgroupHeader {
    SubgroupHeader {
        alias: ALIAS,
        group,
        subgroup: SubgroupId::Zero,
        priority: None,
        properties: false,
        end_of_group: false,
        first_object: true,
    }
}

/// Returns the subgroup header, padded to `len` bytes if it is shorter, and one object with the ID `object`.
fn stream_of(header: &SubgroupHeader, len: usize, object: u64, payload: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    header.encode_padded(len, &mut bytes);
    encode_object_header(None, object, None, payload as u64, Status::Normal, &mut bytes);
    bytes.extend(vec![object as u8; payload]);
    bytes
}

/// WebTransport sessions of the publisher and the subscriber. `None` stands for MOQT without WebTransport.
const PAIRS: [(Option<u64>, Option<u64>); 7] = [
    (None, None),
    (None, Some(0)),
    (Some(0), None),
    (Some(0), Some(0)),
    (Some(0x40), Some(4)),
    (Some(4), Some(70_000)),
    (Some(1 << 40), Some(1 << 60)),
];

/// Returns the bytes before the first MOQT byte of each stream in a session.
fn preamble(session: Option<u64>) -> Vec<u8> {
    session.map_or(Binding::Bare, Binding::Session).uni().to_vec()
}

/// A track with openings (entries prepared for its next streams) that have one subscriber.
struct OpeningStage {
    _network: NamespaceNetwork,
    scene: RelayScene,
    track: TrackRecord,
    openings: Vec<(SlotRecord, EgressKey)>,
    next_stream: u64,
    number: u64,
}

impl OpeningStage {
    fn new(name: &str) -> Self {
        let (network, mut scene) = simple(name);
        scene.slots.clear();
        let track = scene.upstream.track(ALIAS, LAST).expect("a track");
        scene.only().downstream.set_stream_bits(3);
        assert_eq!(scene.only().downstream.set_streams(70, 1000), 70);
        Self { _network: network, scene, track, openings: Vec::new(), next_stream: 70, number: 0 }
    }

    fn bind(&mut self, publisher: Option<u64>, subscriber: Option<u64>) {
        self.scene.upstream.set_web(publisher);
        self.scene.only().downstream.set_web(subscriber);
    }

    /// Adds an opening: an entry that the program may use for the next stream that the publisher begins on the track.
    fn prepare(&mut self, opened: &OpeningRecord) {
        let mut slot = self.scene.upstream.opening().expect("an opening");
        let key = slot.add_opened(&self.scene.only().downstream, opened).expect("an egress");
        assert!(self.track.put(&slot));
        self.openings.push((slot, key));
    }

    /// Sends one frame of a publisher's stream. Returns the outcomes of the packet, of the new stream, and of the copy.
    fn send(&mut self, chunk: &StreamPart) -> (Outcome, Option<OpeningOutcome>, Option<EgressOutcome>) {
        let before = self.scene.counted();
        let packet = self.scene.publisher.seal(0, self.number, 4, &chunk.encode());
        self.number += 1;
        let forwarded = self.scene.send(&packet);
        let counted = self.scene.counted().since(&before);
        // Packets that this test has not sent, such as ARP, have the outcome `NotUdp`.
        let outcome = Outcome::ALL.into_iter().filter(|one| *one != Outcome::NotUdp);
        let outcome = { outcome }.find(|one| counted.packets(*one) == 1).expect("an outcome");
        let opening = OpeningOutcome::ALL.into_iter().find(|one| counted.openings(*one) == 1);
        let copy = EgressOutcome::ALL.into_iter().find(|one| counted.egresses(*one) == 1);
        assert_eq!(forwarded.len(), usize::from(copy == Some(EgressOutcome::Sent)));
        (outcome, opening, copy)
    }

    /// Checks that the subscriber gets a packet with this frame.
    fn expect(&mut self, want: &StreamPart) {
        let number = self.scene.only().downstream.next_number() - 1;
        let want = self.scene.only().keys.build((0, number), &want.encode());
        let mut buffer = [0; 2048];
        let len = self.scene.only().socket.recv(&mut buffer).expect("a packet");
        assert_eq!(buffer[..len], want);
    }

    /// Returns the ID of the next stream to the subscriber.
    fn take_id(&mut self) -> u64 {
        self.next_stream += 1;
        (self.next_stream - 1) << 2 | 3
    }
}

/// Returns a stream that is complete in one frame.
fn whole(stream: u64, data: &[u8]) -> StreamPart {
    StreamPart { stream, offset: 0, data: data.to_vec(), fin: true }
}

/// The outcomes of a frame whose stream was opened and whose copy was sent.
const SENT: (Outcome, Option<OpeningOutcome>, Option<EgressOutcome>) =
    (Outcome::Forwarded, Some(OpeningOutcome::Bound), Some(EgressOutcome::Sent));

#[test]
fn subscriber_streams_are_opened_with_the_subscribers_track_alias() {
    if !root("subscriber_streams_are_opened_with_the_subscribers_track_alias") {
        return;
    }
    PAIRS.into_iter().for_each(open_under_every_alias);
}

fn open_under_every_alias(pair: (Option<u64>, Option<u64>)) {
    let mut stage = OpeningStage::new("opn");
    stage.bind(pair.0, pair.1);
    let mut credit = 0;
    let explicit =
        SubgroupHeader { subgroup: SubgroupId::Explicit(70_000), priority: Some(3), ..header(1 << 20) };
    let by_object = SubgroupHeader { subgroup: SubgroupId::FirstObject, ..header(1 << 30) };
    for (at, (description, alias, header, len, object)) in [
        ("as long", 9, header(5), 0, 0),
        ("longer", 1 << 20, header(6), 0, 0),
        ("the longest", u64::MAX, header(7), 0, 1 << 40),
        ("the publisher's is longer", 9, header(8), 8, 3),
        ("more fields", 300, explicit, 0, 70_001),
        ("a subgroup named by its first object", 300, by_object, 0, 70_001),
    ]
    .into_iter()
    .enumerate()
    {
        stage.prepare(&OpeningRecord { alias, ..OPENED });
        let stream = at as u64 * 4 + 2;
        let data = stream_of(&header, len, object, 600);
        let header_len = data.len() - stream_of(&header, 0, object, 600).len() + {
            let mut bytes = Vec::new();
            header.encode(&mut bytes);
            bytes.len()
        };
        let data = [preamble(pair.0), data].concat();
        // The program opens the subscriber's stream for the first frame. It forwards the second frame on that stream.
        let first = StreamPart { stream, offset: 0, data: data[..200].to_vec(), fin: false };
        let second = StreamPart { stream, offset: 200, data: data[200..].to_vec(), fin: true };
        assert_eq!(stage.send(&first), SENT, "{description} {pair:?}");
        let id = stage.take_id();
        let want = stream_of(&SubgroupHeader { alias, ..header }, header_len, object, 600);
        let want = [preamble(pair.1), want].concat();
        let cut = 200 + want.len() - data.len();
        stage.expect(&StreamPart { stream: id, data: want[..cut].to_vec(), ..first });
        let sent = (Outcome::Forwarded, None, Some(EgressOutcome::Sent));
        assert_eq!(stage.send(&second), sent, "{description} {pair:?}");
        stage.expect(&StreamPart { stream: id, offset: cut as u64, data: want[cut..].to_vec(), fin: true });
        credit += want.len() as u64;
        assert_eq!(stage.scene.only().downstream.data(), credit, "the preamble counts");
        let (slot, key) = &stage.openings[at];
        assert_eq!((slot.bound(), slot.close(*key)), (Some(stream), OpeningRecordSide::Program(Some(id))));
        assert_eq!(slot.judged(), data.len() as u64);
    }
    assert_eq!(stage.scene.only().downstream.set_streams(0, 0), stage.next_stream, "no ID was left out");
}

/// The publisher's streams begin with bytes for which the program opens no subscribers' streams. The openings (entries
/// prepared for the track's next streams) stay free for other streams.
#[test]
fn stream_with_an_unsupported_header_is_left_to_userspace() {
    if !root("stream_with_an_unsupported_header_is_left_to_userspace") {
        return;
    }
    let mut stage = OpeningStage::new("oth");
    stage.prepare(&OPENED);
    let good = stream_of(&header(6), 0, 0, 100);
    // The group ID is encoded in more bytes than it needs.
    let long_group = [&good[..2], &[0x80, 6], &good[3..]].concat();
    let by_object = SubgroupHeader { subgroup: SubgroupId::FirstObject, ..header(6) };
    let unnamed = stream_of(&by_object, 0, 0, 100)[..3].to_vec();
    let before = stream_of(&header(4), 0, 0, 100);
    let other_alias = stream_of(&SubgroupHeader { alias: 8, ..header(6) }, 0, 0, 100);
    let mut fetch = vec![0x05];
    vi64::encode(3, &mut fetch);
    for (at, (description, stream, bytes, opening)) in [
        ("a FETCH stream", 2, fetch, Some(OpeningOutcome::Other)),
        ("half a header", 2, good[..2].to_vec(), Some(OpeningOutcome::Other)),
        ("named by an object that is not there", 2, unnamed, Some(OpeningOutcome::Other)),
        ("not in the shortest form", 2, long_group, Some(OpeningOutcome::Other)),
        ("another track", 2, other_alias, Some(OpeningOutcome::NoTrack)),
        ("a group that has begun", 2, before, Some(OpeningOutcome::Order)),
        ("not unidirectional", 4, good.clone(), None),
    ]
    .into_iter()
    .enumerate()
    {
        let stream = stream + 8 * at as u64;
        let chunk = StreamPart { stream, offset: 0, data: bytes, fin: false };
        assert_eq!(stage.send(&chunk), (Outcome::NoSlot, opening, None), "{description}");
    }
    let hole = StreamPart { stream: 102, offset: 10, data: good.clone(), fin: false };
    assert_eq!(stage.send(&hole), (Outcome::NoSlot, None, None), "behind a hole");
    assert_eq!(stage.track.waiting(), 1);
    assert_eq!(
        stage.send(&whole(102, &good)),
        (Outcome::NoSlot, Some(OpeningOutcome::Taken), None),
        "the hole"
    );
    assert_eq!(stage.send(&whole(110, &good)), SENT);
    assert_eq!((stage.track.waiting(), stage.track.missed()), (0, 0));
    let next = stream_of(&header(7), 0, 0, 100);
    assert_eq!(stage.send(&whole(106, &next)), (Outcome::NoSlot, Some(OpeningOutcome::Missed), None));
    assert_eq!(stage.track.missed(), 1);
}

/// The first packet of a stream in a session may have only the preamble. The stream is opened with the next packet.
#[test]
fn stream_header_may_arrive_after_the_webtransport_preamble() {
    if !root("stream_header_may_arrive_after_the_webtransport_preamble") {
        return;
    }
    let mut stage = OpeningStage::new("pre");
    stage.bind(Some(0), Some(0x40));
    (0..3).for_each(|_| stage.prepare(&OPENED));
    let noted = (Outcome::NoSlot, Some(OpeningOutcome::Preamble), None);
    let passed_by = (Outcome::NoSlot, None, None);
    let alone = |stream, bytes: &[u8]| StreamPart { stream, offset: 0, data: bytes.to_vec(), fin: false };
    let behind = |stream, offset: usize, group| StreamPart {
        stream,
        offset: offset as u64,
        data: stream_of(&header(group), 0, 0, 100),
        fin: true,
    };
    let expect = |stage: &mut OpeningStage, group| {
        let want = stream_of(&SubgroupHeader { alias: OPENED.alias, ..header(group) }, 0, 0, 100);
        let id = stage.take_id();
        stage.expect(&whole(id, &[preamble(Some(0x40)), want].concat()));
    };
    let own = preamble(Some(0));
    assert_eq!(stage.send(&alone(2, &own)), noted);
    assert_eq!(stage.send(&alone(2, &own)), noted, "twice");
    assert_eq!(stage.send(&behind(2, 3, 5)), SENT);
    expect(&mut stage, 5);
    assert_eq!(stage.send(&behind(2, 3, 5)), (Outcome::Declined, None, None), "once");
    assert_eq!(stage.send(&whole(2, &[&own[..], &behind(2, 3, 5).data].concat())).2, None, "nor as a whole");
    assert_eq!(stage.openings[0].0.judged(), 3 + behind(2, 3, 5).data.len() as u64);
    // The stream's header arrived before its preamble, so userspace got it and keeps the stream.
    assert_eq!(stage.send(&behind(6, 3, 6)), passed_by);
    assert_eq!(stage.send(&alone(6, &own)), noted);
    assert_eq!(stage.send(&behind(6, 3, 6)), (Outcome::NoSlot, Some(OpeningOutcome::Taken), None));
    // A preamble may be longer than necessary. The program opens such a stream only if the preamble and the header
    // arrive together.
    let long = [0x80, 0, 0, 0x54, 0x40, 0];
    assert_eq!(stage.send(&alone(10, &long)), noted);
    assert_eq!(stage.send(&behind(10, 6, 7)), passed_by);
    assert_eq!(stage.send(&whole(14, &[&long[..], &behind(0, 0, 7).data].concat())), SENT);
    expect(&mut stage, 7);
    // These preambles belong to other sessions or protocols, or are incomplete.
    stage.prepare(&OPENED);
    for (at, (description, front)) in [
        ("another session's", preamble(Some(4))),
        ("a bidirectional stream's", vec![0x40, 0x41, 0]),
        ("another stream's of HTTP/3", vec![0, 0x30, 7]),
        ("half a preamble", vec![0x40, 0x54]),
        ("none", vec![]),
    ]
    .into_iter()
    .enumerate()
    {
        let stream = 18 + 8 * at as u64;
        let rest = behind(stream, front.len(), 8);
        if !front.is_empty() {
            assert_eq!(stage.send(&alone(stream, &front)), passed_by, "{description}");
            assert_eq!(stage.send(&rest), passed_by, "{description}");
        }
        let both = [front, rest.data].concat();
        assert_eq!(stage.send(&whole(stream + 4, &both)), passed_by, "{description}");
    }
    let half = [&own[..], &[0x30]].concat();
    assert_eq!(
        stage.send(&alone(58, &half)),
        (Outcome::NoSlot, Some(OpeningOutcome::Other), None),
        "half a header"
    );
    // The program forgets a stream's preamble when it notes the preamble of the publisher's 256th stream after it.
    assert_eq!(stage.send(&alone(62, &own)), noted);
    assert_eq!(stage.send(&alone(62 + 4 * 256, &own)), noted);
    assert_eq!(stage.send(&behind(62, 3, 8)), passed_by);
    assert_eq!(stage.send(&behind(62 + 4 * 256, 3, 8)), SENT);
    expect(&mut stage, 8);
}

/// If a stream's first frame to arrive is not the one at offset 0, the program does not copy it, and userspace forwards
/// the whole stream.
#[test]
fn stream_not_first_received_at_offset_0_is_left_to_userspace() {
    if !root("stream_not_first_received_at_offset_0_is_left_to_userspace") {
        return;
    }
    let taken = (Outcome::NoSlot, Some(OpeningOutcome::Taken), None);
    let mut stage = OpeningStage::new("fst");
    let data = stream_of(&header(6), 0, 0, 100);
    let front = |stream| StreamPart { stream, offset: 0, data: data[..60].to_vec(), fin: false };
    assert_eq!(stage.send(&front(10)), (Outcome::NoSlot, Some(OpeningOutcome::Missed), None));
    stage.prepare(&OPENED);
    assert_eq!(stage.send(&whole(10, &data)), taken, "a beginning");
    let middle = StreamPart { offset: 50, data: vec![7; 10], ..front(14) };
    assert_eq!(stage.send(&middle), (Outcome::NoSlot, None, None));
    assert_eq!(stage.send(&whole(14, &data)), taken, "the middle");
    stage.scene.upstream.leave(18, &(0..60), false);
    assert_eq!(stage.send(&whole(18, &data)), taken, "in a packet that the program has not opened");
    assert_eq!(stage.send(&whole(22, &data)), SENT);
}

/// The size of a packet that is compared with the MTU includes the WebTransport preamble.
#[test]
fn copy_above_the_mtu_with_its_webtransport_preamble_is_too_large() {
    if !root("copy_above_the_mtu_with_its_webtransport_preamble_is_too_large") {
        return;
    }
    let mut stage = OpeningStage::new("ptl");
    (0..4).for_each(|_| stage.prepare(&OpeningRecord { alias: ALIAS, ..OPENED }));
    let mut send = |group, sessions: (Option<u64>, Option<u64>), mtu| {
        stage.bind(sessions.0, sessions.1);
        stage.scene.only().downstream.set_mtu(mtu);
        let bytes = [preamble(sessions.0), stream_of(&header(group), 0, 0, 600)].concat();
        let result = stage.send(&whole(4 * group + 2, &bytes)).2;
        (result, stage.scene.only().downstream.bytes())
    };
    let (sent, size) = send(5, (None, None), 1452);
    assert_eq!(sent, Some(EgressOutcome::Sent));
    let mtu = size as u32;
    assert_eq!(send(6, (None, Some(0)), mtu), (Some(EgressOutcome::TooLarge), size));
    assert_eq!(send(7, (Some(0), Some(0)), mtu + 3), (Some(EgressOutcome::Sent), 2 * size + 3));
    assert_eq!(send(8, (Some(0), None), mtu), (Some(EgressOutcome::Sent), 3 * size + 3));
}

/// The program and userspace may both claim a publisher's stream. Whichever claims it first opens the subscribers'
/// streams for it.
#[test]
fn publisher_stream_is_opened_only_once_by_program_or_userspace() {
    if !root("publisher_stream_is_opened_only_once_by_program_or_userspace") {
        return;
    }
    let mut stage = OpeningStage::new("onc");
    (0..3).for_each(|_| stage.prepare(&OPENED));
    assert!(stage.scene.upstream.take_stream(2));
    let taken = (Outcome::NoSlot, Some(OpeningOutcome::Taken), None);
    assert_eq!(stage.send(&whole(2, &stream_of(&header(5), 0, 0, 100))), taken);
    assert_eq!(stage.openings[0].0.bound(), None);
    let second = stream_of(&header(6), 0, 0, 100);
    assert_eq!(stage.send(&whole(6, &second)), SENT);
    assert!(!stage.scene.upstream.take_stream(6));
    // The publisher begins another stream with a stream ID that it has used before. The program opens no subscribers'
    // streams for it, even after userspace has stopped forwarding the earlier stream.
    let repeated = (Outcome::Declined, None, None);
    assert_eq!(stage.send(&whole(6, &second)), repeated);
    let (mut slot, _) = stage.openings.remove(0);
    slot.bind(6);
    drop(slot);
    assert_eq!(stage.send(&whole(6, &stream_of(&header(7), 0, 0, 100))), taken);
    // Userspace opened group 9 itself, so the program opens only later groups.
    assert!(stage.track.claim((9, 0)) && !stage.track.claim((9, 0)) && !stage.track.claim((8, 7)));
    let order = (Outcome::NoSlot, Some(OpeningOutcome::Order), None);
    assert_eq!(stage.send(&whole(10, &stream_of(&header(8), 0, 0, 100))), order);
    assert_eq!(stage.send(&whole(14, &stream_of(&header(10), 0, 0, 100))), SENT);
    // When the track is dropped, the program opens no subscribers' streams for its new streams.
    drop(std::mem::replace(&mut stage.track, stage.scene.upstream.track(1, LAST).expect("another track")));
    let gone = (Outcome::NoSlot, Some(OpeningOutcome::NoTrack), None);
    assert_eq!(stage.send(&whole(18, &stream_of(&header(11), 0, 0, 100))), gone);
}

/// If the first copy of a stream is declined, userspace sends the whole stream, and no stream ID is used.
#[test]
fn stream_whose_first_copy_is_declined_is_left_to_userspace() {
    if !root("stream_whose_first_copy_is_declined_is_left_to_userspace") {
        return;
    }
    type Change = fn(&mut RelayScene);
    let streams: Change = |scene| assert_eq!(scene.only().downstream.set_streams(0, 70), 70);
    let credit: Change = |scene| assert_eq!(scene.only().downstream.set_max_data(53), 0);
    let window: Change = |scene| assert_eq!(scene.only().downstream.set_max_bytes(50), 0);
    // The header has no priority, so the track's default 0x40 applies.
    let behind: Change = |scene| scene.only().downstream.set_waiting(Some(0x80_40));
    let mtu: Change = |scene| scene.only().downstream.set_mtu(85);
    let nothing: Change = |_| {};
    let by_object = SubgroupHeader { subgroup: SubgroupId::FirstObject, ..header(6) };
    for (description, opened, object, payload, change, outcome) in [
        (
            "before what is wanted",
            OpeningRecord { first: (6, 3), ..OPENED },
            2,
            50,
            nothing,
            EgressOutcome::Before,
        ),
        (
            "an earlier group",
            OpeningRecord { first: (99, 0), ..OPENED },
            9,
            50,
            nothing,
            EgressOutcome::Before,
        ),
        (
            "behind the last group",
            OpeningRecord { last_group: 5, ..OPENED },
            9,
            50,
            nothing,
            EgressOutcome::Before,
        ),
        (
            "stream credit",
            OpeningRecord { max_offset: 53, ..OPENED },
            0,
            50,
            nothing,
            EgressOutcome::StreamCredit,
        ),
        ("no more streams", OPENED, 0, 50, streams, EgressOutcome::StreamLimit),
        ("too large", OpeningRecord { alias: u64::MAX, ..OPENED }, 0, 50, mtu, EgressOutcome::TooLarge),
        ("connection credit", OPENED, 0, 50, credit, EgressOutcome::DataCredit),
        ("window", OPENED, 0, 50, window, EgressOutcome::Window),
        ("something as urgent waits", OPENED, 0, 50, behind, EgressOutcome::Behind),
    ] {
        let mut stage = OpeningStage::new("den");
        stage.prepare(&opened);
        change(&mut stage.scene);
        let data = stream_of(&by_object, 0, object, payload);
        let (front, rest) = data.split_at(data.len() - 1);
        let declined = (Outcome::Forwarded, Some(OpeningOutcome::Bound), Some(outcome));
        let first = StreamPart { fin: false, ..whole(2, front) };
        assert_eq!(stage.send(&first), declined, "{description}");
        let rest = StreamPart { offset: front.len() as u64, ..whole(2, rest) };
        let unopened = (Outcome::Forwarded, None, Some(EgressOutcome::Unopened));
        assert_eq!(stage.send(&rest), unopened, "{description}");
        assert_eq!(stage.scene.only().downstream.set_streams(0, 0), 70, "{description}: no ID is used");
        let (slot, key) = &stage.openings[0];
        assert_eq!(slot.close(*key), OpeningRecordSide::Userspace, "{description}");
    }
    let mut stage = OpeningStage::new("den");
    // Userspace has forbidden the program to open the subscriber's stream before the publisher's stream began.
    stage.prepare(&OPENED);
    let (slot, key) = &stage.openings[0];
    assert_eq!(slot.close(*key), OpeningRecordSide::Userspace);
    let closed = (Outcome::Forwarded, Some(OpeningOutcome::Bound), Some(EgressOutcome::Unopened));
    assert_eq!(stage.send(&whole(2, &stream_of(&header(5), 0, 0, 100))), closed);
    // The publisher's first packet has no object. It is forwarded only if the subscriber asked for all objects of its
    // group.
    for (group, first, outcome) in [
        (6, (6, 1), EgressOutcome::Before),
        (7, (7, 0), EgressOutcome::Sent),
        (8, (7, 1), EgressOutcome::Sent),
    ] {
        stage.prepare(&OpeningRecord { first, ..OPENED });
        let front = stream_of(&header(group), 0, 0, 100)[..3].to_vec();
        let front = StreamPart { fin: false, ..whole(4 * group + 2, &front) };
        assert_eq!(stage.send(&front).2, Some(outcome), "{first:?}");
    }
}

/// The test runs once with all copies in one run of the program, and once with one copy in each run.
#[test]
fn each_subscriber_gets_its_own_webtransport_preamble_and_track_alias() {
    if !root("each_subscriber_gets_its_own_webtransport_preamble_and_track_alias") {
        return;
    }
    for max_copies_per_run in [64, 1] {
        let network = NamespaceNetwork::new("mix");
        net::set_checksum_offload(&network.publisher, "eth", false);
        let config = Config { ports: vec![PORT], id_len: ID_LEN, max_copies_per_run, ..Config::default() };
        let scene = RelayScene::with_config(&config, &network, 4, &[4], KeySuite::ChaCha20Poly1305, 4, 1);
        attach(&network, &scene.relay, "west");
        open_for_all(scene);
    }
}

fn open_for_all(mut scene: RelayScene) {
    // The WebTransport sessions and track aliases of the subscribers.
    const KINDS: [(Option<u64>, u64); 4] =
        [(Some(0), 9), (None, 300), (Some(1 << 60), u64::MAX), (Some(0), ALIAS)];
    scene.slots.clear();
    scene.upstream.set_web(Some(0));
    let track = scene.upstream.track(ALIAS, LAST).expect("a track");
    for (subscriber, (session, _)) in scene.subscribers.iter().zip(KINDS) {
        subscriber.downstream.set_web(session);
        subscriber.downstream.set_stream_bits(3);
        subscriber.downstream.set_streams(0, 1000);
    }
    for group in 5..15 {
        let mut slot = scene.upstream.opening().expect("an opening");
        for (subscriber, (_, alias)) in scene.subscribers.iter().zip(KINDS) {
            slot.add_opened(&subscriber.downstream, &OpeningRecord { alias, ..OPENED }).expect("an egress");
        }
        assert!(track.put(&slot));
        let data = stream_of(&header(group), 0, 0, 80 * group as usize);
        let front = preamble(Some(0));
        // Every second stream has its preamble in a frame of its own.
        let cut = if group.is_multiple_of(2) { front.len() } else { 0 };
        let bytes = [front, data].concat();
        let (alone, rest) = bytes.split_at(cut);
        let stream = 4 * group + 2;
        let mut frames = Vec::new();
        if cut > 0 {
            frames.extend(StreamPart { stream, offset: 0, data: alone.to_vec(), fin: false }.encode());
        }
        frames.extend(StreamPart { stream, offset: cut as u64, data: rest.to_vec(), fin: true }.encode());
        let packet = scene.publisher.seal(0, group, 4, &frames);
        let forwarded = scene.send(&packet);
        assert_eq!(forwarded.len(), KINDS.len(), "group {group}");
        for ((sent, subscriber), (session, alias)) in forwarded.iter().zip(&scene.subscribers).zip(KINDS) {
            let want = stream_of(&SubgroupHeader { alias, ..header(group) }, 0, 0, 80 * group as usize);
            let want = StreamPart {
                stream: (group - 5) << 2 | 3,
                offset: 0,
                data: [preamble(session), want].concat(),
                fin: true,
            };
            assert_eq!((sent.id, sent.offset, usize::from(sent.len)), (want.stream, 0, want.data.len()));
            assert_eq!(sent.credit, want.data.len() as u64);
            let want = subscriber.keys.build((0, sent.number), &want.encode());
            let mut buffer = [0; 2048];
            let len = subscriber.socket.recv(&mut buffer).expect("a packet");
            assert_eq!(buffer[..len], want, "group {group}, {session:?}");
        }
    }
}
