//! Streams that the program opens.

use millrace_bpf::relay::{EgressKey, EgressOutcome, Opened, Opener, Opening, Outcome, Slot, Track};
use millrace_proto::moq::data::{Status, encode_object_header};
use millrace_proto::moq::{SubgroupHeader, SubgroupId, vi64};

use crate::net::{Network, root};
use crate::quic::Chunk;
use crate::scene::{Scene, simple};

const ALIAS: u64 = 7;
const TAG: u64 = 1 << 63 | 5;
/// Of the streams before the first one that is opened here.
const LAST: (u64, u64) = (4, 9);
const OPENED: Opened = Opened {
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

/// The front of a stream, in `len` bytes if that is longer than it takes, and one object with this ID.
fn stream_of(header: &SubgroupHeader, len: usize, object: u64, payload: usize) -> Vec<u8> {
    let mut bytes = Vec::new();
    header.encode_padded(len, &mut bytes);
    encode_object_header(None, object, None, payload as u64, Status::Normal, &mut bytes);
    bytes.extend(vec![object as u8; payload]);
    bytes
}

/// A track with openings for the scene's one subscriber.
struct Stage {
    _network: Network,
    scene: Scene,
    track: Track,
    openings: Vec<(Slot, EgressKey)>,
    next_stream: u64,
    number: u64,
}

impl Stage {
    fn new(name: &str) -> Self {
        let (network, mut scene) = simple(name);
        scene.slots.clear();
        let track = scene.upstream.track(ALIAS, LAST).expect("a track");
        scene.only().downstream.set_stream_bits(3);
        assert_eq!(scene.only().downstream.set_streams(70, 1000), 70);
        Self { _network: network, scene, track, openings: Vec::new(), next_stream: 70, number: 0 }
    }

    fn prepare(&mut self, opened: &Opened) {
        let mut slot = self.scene.upstream.opening().expect("an opening");
        let key = slot.add_opened(&self.scene.only().downstream, opened).expect("an egress");
        assert!(self.track.put(&slot));
        self.openings.push((slot, key));
    }

    /// Sends one frame of a publisher's stream; what became of that, and of its copy.
    fn send(&mut self, chunk: &Chunk) -> (Outcome, Option<Opening>, Option<EgressOutcome>) {
        let before = self.scene.relay.counters().expect("counters");
        let packet = self.scene.publisher.seal((0, self.number), 4, &chunk.encode());
        self.number += 1;
        let forwarded = self.scene.send(&packet);
        let counted = self.scene.relay.counters().expect("counters").since(&before);
        let outcome = Outcome::ALL.into_iter().filter(|one| *one != Outcome::NotUdp);
        let outcome = { outcome }.find(|one| counted.packets(*one) == 1).expect("an outcome");
        let opening = Opening::ALL.into_iter().find(|one| counted.openings(*one) == 1);
        let copy = EgressOutcome::ALL.into_iter().find(|one| counted.egresses(*one) == 1);
        assert_eq!(forwarded.len(), usize::from(copy == Some(EgressOutcome::Sent)));
        (outcome, opening, copy)
    }

    /// What the subscriber gets: a packet with this frame.
    fn expect(&mut self, want: &Chunk) {
        let number = self.scene.only().downstream.next_number() - 1;
        let want = self.scene.only().keys.build((0, number), &want.encode());
        let mut buffer = [0; 2048];
        let len = self.scene.only().socket.recv(&mut buffer).expect("a packet");
        assert_eq!(buffer[..len], want);
    }

    /// The ID that the next stream downstream gets.
    fn take_id(&mut self) -> u64 {
        self.next_stream += 1;
        (self.next_stream - 1) << 2 | 3
    }
}

fn whole(stream: u64, data: &[u8]) -> Chunk {
    Chunk { stream, offset: 0, data: data.to_vec(), fin: true }
}

const SENT: (Outcome, Option<Opening>, Option<EgressOutcome>) =
    (Outcome::Forwarded, Some(Opening::Bound), Some(EgressOutcome::Sent));

#[test]
fn streams_are_opened_under_the_subscribers_alias() {
    if !root("streams_are_opened_under_the_subscribers_alias") {
        return;
    }
    let mut stage = Stage::new("opn");
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
        stage.prepare(&Opened { alias, ..OPENED });
        let stream = at as u64 * 4 + 2;
        let data = stream_of(&header, len, object, 600);
        let header_len = data.len() - stream_of(&header, 0, object, 600).len() + {
            let mut bytes = Vec::new();
            header.encode(&mut bytes);
            bytes.len()
        };
        // Two frames: the second one goes the way of any delegated stream.
        let first = Chunk { stream, offset: 0, data: data[..200].to_vec(), fin: false };
        let second = Chunk { stream, offset: 200, data: data[200..].to_vec(), fin: true };
        assert_eq!(stage.send(&first), SENT, "{description}");
        let id = stage.take_id();
        let want = stream_of(&SubgroupHeader { alias, ..header }, header_len, object, 600);
        let shift = want.len() - data.len();
        let got = Chunk { stream: id, data: want[..200 + shift].to_vec(), ..first };
        stage.expect(&got);
        let sent = (Outcome::Forwarded, None, Some(EgressOutcome::Sent));
        assert_eq!(stage.send(&second), sent, "{description}");
        let offset = 200 + shift as u64;
        stage.expect(&Chunk { stream: id, offset, data: want[200 + shift..].to_vec(), fin: true });
        let (slot, key) = &stage.openings[at];
        assert_eq!((slot.bound(), slot.close(*key)), (Some(stream), Opener::Program(Some(id))));
        assert_eq!(slot.judged(), data.len() as u64);
    }
    assert_eq!(stage.scene.only().downstream.set_streams(0, 0), stage.next_stream, "no ID was left out");
}

/// `description, first bytes, what becomes of it`: nothing is opened, and the openings wait on.
#[test]
fn what_is_not_understood_is_left_to_userspace() {
    if !root("what_is_not_understood_is_left_to_userspace") {
        return;
    }
    let mut stage = Stage::new("oth");
    stage.prepare(&OPENED);
    let good = stream_of(&header(6), 0, 0, 100);
    // The group in two bytes.
    let long_group = [&good[..2], &[0x80, 6], &good[3..]].concat();
    let by_object = SubgroupHeader { subgroup: SubgroupId::FirstObject, ..header(6) };
    let unnamed = stream_of(&by_object, 0, 0, 100)[..3].to_vec();
    let before = stream_of(&header(4), 0, 0, 100);
    let other_alias = stream_of(&SubgroupHeader { alias: 8, ..header(6) }, 0, 0, 100);
    let mut fetch = vec![0x05];
    vi64::encode(3, &mut fetch);
    for (at, (description, stream, bytes, opening)) in [
        ("a FETCH stream", 2, fetch, Some(Opening::Other)),
        ("half a header", 2, good[..2].to_vec(), Some(Opening::Other)),
        ("named by an object that is not there", 2, unnamed, Some(Opening::Other)),
        ("not in the shortest form", 2, long_group, Some(Opening::Other)),
        ("another track", 2, other_alias, Some(Opening::NoTrack)),
        ("a group that has begun", 2, before, Some(Opening::Order)),
        ("not unidirectional", 4, good.clone(), None),
    ]
    .into_iter()
    .enumerate()
    {
        let stream = stream + 8 * at as u64;
        let chunk = Chunk { stream, offset: 0, data: bytes, fin: false };
        assert_eq!(stage.send(&chunk), (Outcome::NoSlot, opening, None), "{description}");
    }
    let hole = Chunk { stream: 102, offset: 10, data: good.clone(), fin: false };
    assert_eq!(stage.send(&hole), (Outcome::NoSlot, None, None), "behind a hole");
    assert_eq!(stage.track.waiting(), 1);
    assert_eq!(stage.send(&whole(102, &good)), SENT, "the hole");
    assert_eq!((stage.track.waiting(), stage.track.missed()), (0, 0));
    let next = stream_of(&header(7), 0, 0, 100);
    assert_eq!(stage.send(&whole(106, &next)), (Outcome::NoSlot, Some(Opening::Missed), None));
    assert_eq!(stage.track.missed(), 1);
}

/// Who takes a publisher's stream first has it for good.
#[test]
fn a_stream_is_opened_once() {
    if !root("a_stream_is_opened_once") {
        return;
    }
    let mut stage = Stage::new("onc");
    (0..3).for_each(|_| stage.prepare(&OPENED));
    assert!(stage.scene.upstream.take_stream(2));
    let taken = (Outcome::NoSlot, Some(Opening::Taken), None);
    assert_eq!(stage.send(&whole(2, &stream_of(&header(5), 0, 0, 100))), taken);
    assert_eq!(stage.openings[0].0.bound(), None);
    let second = stream_of(&header(6), 0, 0, 100);
    assert_eq!(stage.send(&whole(6, &second)), SENT);
    assert!(!stage.scene.upstream.take_stream(6));
    // It comes again, also when its slot is gone and another group is to begin.
    let repeated = (Outcome::Declined, None, None);
    assert_eq!(stage.send(&whole(6, &second)), repeated);
    let (mut slot, _) = stage.openings.remove(0);
    slot.bind(6);
    drop(slot);
    assert_eq!(stage.send(&whole(6, &stream_of(&header(7), 0, 0, 100))), taken);
    // Userspace has begun a group itself: only those behind it are opened.
    stage.track.began((9, 0));
    let order = (Outcome::NoSlot, Some(Opening::Order), None);
    assert_eq!(stage.send(&whole(10, &stream_of(&header(8), 0, 0, 100))), order);
    assert_eq!(stage.send(&whole(14, &stream_of(&header(10), 0, 0, 100))), SENT);
    // With the track its openings are gone.
    drop(std::mem::replace(&mut stage.track, stage.scene.upstream.track(1, LAST).expect("another track")));
    let gone = (Outcome::NoSlot, Some(Opening::NoTrack), None);
    assert_eq!(stage.send(&whole(18, &stream_of(&header(11), 0, 0, 100))), gone);
}

/// A copy that is declined leaves its stream, with all that follows, to userspace, and costs no stream ID.
#[test]
fn a_stream_that_could_not_be_opened_is_userspaces() {
    if !root("a_stream_that_could_not_be_opened_is_userspaces") {
        return;
    }
    type Change = fn(&mut Scene);
    let streams: Change = |scene| assert_eq!(scene.only().downstream.set_streams(0, 70), 70);
    let credit: Change = |scene| assert_eq!(scene.only().downstream.set_max_data(53), 0);
    let window: Change = |scene| assert_eq!(scene.only().downstream.set_max_bytes(50), 0);
    // The track's default priority, which the header leaves it at, is 0x40.
    let behind: Change = |scene| scene.only().downstream.set_waiting(Some(0x80_40));
    let mtu: Change = |scene| scene.only().downstream.set_mtu(85);
    let nothing: Change = |_| {};
    let by_object = SubgroupHeader { subgroup: SubgroupId::FirstObject, ..header(6) };
    for (description, opened, object, payload, change, outcome) in [
        ("before what is wanted", Opened { first: (6, 3), ..OPENED }, 2, 50, nothing, EgressOutcome::Before),
        ("an earlier group", Opened { first: (99, 0), ..OPENED }, 9, 50, nothing, EgressOutcome::Before),
        ("behind the last group", Opened { last_group: 5, ..OPENED }, 9, 50, nothing, EgressOutcome::Before),
        ("stream credit", Opened { max_offset: 53, ..OPENED }, 0, 50, nothing, EgressOutcome::StreamCredit),
        ("no more streams", OPENED, 0, 50, streams, EgressOutcome::StreamLimit),
        ("too large", Opened { alias: u64::MAX, ..OPENED }, 0, 50, mtu, EgressOutcome::TooLarge),
        ("connection credit", OPENED, 0, 50, credit, EgressOutcome::DataCredit),
        ("window", OPENED, 0, 50, window, EgressOutcome::Window),
        ("something as urgent waits", OPENED, 0, 50, behind, EgressOutcome::Behind),
    ] {
        let mut stage = Stage::new("den");
        stage.prepare(&opened);
        change(&mut stage.scene);
        let data = stream_of(&by_object, 0, object, payload);
        let (front, rest) = data.split_at(data.len() - 1);
        let declined = (Outcome::Forwarded, Some(Opening::Bound), Some(outcome));
        let first = Chunk { fin: false, ..whole(2, front) };
        assert_eq!(stage.send(&first), declined, "{description}");
        let rest = Chunk { offset: front.len() as u64, ..whole(2, rest) };
        let unopened = (Outcome::Forwarded, None, Some(EgressOutcome::Unopened));
        assert_eq!(stage.send(&rest), unopened, "{description}");
        assert_eq!(stage.scene.only().downstream.set_streams(0, 0), 70, "{description}: no ID is used");
        let (slot, key) = &stage.openings[0];
        assert_eq!(slot.close(*key), Opener::Userspace, "{description}");
    }
    let mut stage = Stage::new("den");
    // Closed before it began.
    stage.prepare(&OPENED);
    let (slot, key) = &stage.openings[0];
    assert_eq!(slot.close(*key), Opener::Userspace);
    let closed = (Outcome::Forwarded, Some(Opening::Bound), Some(EgressOutcome::Unopened));
    assert_eq!(stage.send(&whole(2, &stream_of(&header(5), 0, 0, 100))), closed);
    // Without an object it is not known to be one that is wanted, but of a group that is.
    for (group, first, outcome) in [
        (6, (6, 1), EgressOutcome::Before),
        (7, (7, 0), EgressOutcome::Sent),
        (8, (7, 1), EgressOutcome::Sent),
    ] {
        stage.prepare(&Opened { first, ..OPENED });
        let front = stream_of(&header(group), 0, 0, 100)[..3].to_vec();
        let front = Chunk { fin: false, ..whole(4 * group + 2, &front) };
        assert_eq!(stage.send(&front).2, Some(outcome), "{first:?}");
    }
}
