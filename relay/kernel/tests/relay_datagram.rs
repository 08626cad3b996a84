//! Tests of the relay program with objects that arrive as datagrams, on real network interfaces. Each copy is compared
//! with the packet that the userspace builder makes. They need root.

#[path = "support/peers.rs"]
mod peers;
#[path = "support/quic.rs"]
#[allow(dead_code)]
mod quic;

use millrace_testkit::net;
use std::net::UdpSocket;

use fastrand::Rng;
use millrace_kernel::crypto::QuicKeys;
use millrace_moq::{ObjectDatagram, Status};
use millrace_quic::{frame, keys::KeySuite, webtransport::Binding};
use millrace_relay_kernel::program::{
    Compute, Config, EgressOutcome, Forwarded, Outcome, Position, RelayCounters, RelayProgram, SlotRecord,
    UpstreamRecord,
};
use millrace_transport::offload::DatagramCopy;
use net::{NamespaceNetwork, PacketCapture, address, root};
use peers::{KernelSubscriber, PORT, SubscriberPlace};
use quic::DirectionKeys;

const ALIAS: u64 = 300;
/// The subscribers' track aliases. One encoding is shorter than that of the publisher's alias, one is as long, and one
/// has the maximum length.
const ALIASES: [u64; 3] = [7, 301, u64::MAX - 1];
/// The largest DATAGRAM frame that the subscribers accept.
const LIMIT: u32 = 1200;
/// The priority of the copies: the subscriber's priority in the high byte, and in the low byte the publisher's default
/// for datagrams without a priority.
const LEVEL: u16 = 0x8040;

/// A subscription of every group of the track.
const ALL: DatagramCopy =
    DatagramCopy { alias: 0, first: (0, 0), last_group: u64::MAX, tag: 0, level: LEVEL, track: 0 };

struct DatagramScene {
    relay: RelayProgram,
    upstream: UpstreamRecord,
    slot: SlotRecord,
    publisher: DirectionKeys,
    subscribers: Vec<KernelSubscriber>,
    /// The subscribers' track aliases, in the order of the subscribers.
    aliases: Vec<u64>,
    /// The bytes that WebTransport puts before the publisher's datagrams.
    front: Vec<u8>,
    /// The bytes that WebTransport puts before each subscriber's datagrams.
    fronts: Vec<Vec<u8>>,
    from: UdpSocket,
    to: UdpSocket,
    capture: PacketCapture,
    sent: u64,
    rng: Rng,
    _network: NamespaceNetwork,
}

impl DatagramScene {
    fn new(name: &str, suite: KeySuite, aliases: &[u64]) -> Self {
        let network = NamespaceNetwork::new(name);
        net::set_checksum_offload(&network.publisher, "eth", false);
        let mut rng = Rng::with_seed(11);
        let relay =
            RelayProgram::load(&Config { ports: vec![PORT], ..Config::default() }).expect("the relay loads");
        let publisher = DirectionKeys::new(suite, 8, &mut rng);
        let upstream = peers::upstream(&relay, &publisher);
        let at = SubscriberPlace {
            namespace: &network.subscriber,
            local: address(4, 2, 1),
            remote: address(4, 2, 2),
        };
        let subscribe = |_| {
            let suite = quic::SUITES[rng.usize(..2)];
            let subscriber = KernelSubscriber::new(&network, &relay, at, suite, 8, &mut rng);
            subscriber.downstream.set_max_datagram(LIMIT);
            subscriber
        };
        let subscribers: Vec<_> = aliases.iter().map(subscribe).collect();
        let mut slot = upstream.datagrams(ALIAS);
        for ((tag, subscriber), &alias) in (0..).zip(&subscribers).zip(aliases) {
            let egress = DatagramCopy { alias, tag, ..ALL };
            slot.add_datagrams(&subscriber.downstream, &egress).expect("an egress");
        }
        let (from, to) = peers::sockets(&network, address(4, 1, 2), address(4, 1, 1));
        peers::attach(&network, &relay, "west");
        let capture = PacketCapture::new(&network.subscriber);
        let sent = 0;
        Self {
            relay,
            upstream,
            slot,
            publisher,
            subscribers,
            aliases: aliases.to_vec(),
            front: Vec::new(),
            fronts: vec![Vec::new(); aliases.len()],
            from,
            to,
            capture,
            sent,
            rng,
            _network: network,
        }
    }

    /// Assigns these WebTransport session IDs to the connections. A connection with `None` carries MOQT without
    /// WebTransport.
    fn bind(&mut self, publisher: Option<u64>, subscribers: &[Option<u64>]) {
        let front =
            |session: Option<u64>| session.map_or(Binding::Bare, Binding::Session).datagram().to_vec();
        self.upstream.set_web(publisher);
        self.front = front(publisher);
        for (subscriber, session) in self.subscribers.iter().zip(subscribers) {
            subscriber.downstream.set_web(*session);
        }
        self.fronts = subscribers.iter().copied().map(front).collect();
    }

    /// Returns a datagram as the publisher sends it: after the prefix of WebTransport, if the publisher uses
    /// WebTransport.
    fn fronted(&self, datagram: &[u8]) -> Vec<u8> {
        [&self.front, datagram].concat()
    }

    fn counted(&self) -> RelayCounters {
        // exact: the BPF program counts a packet before it passes the packet on, and all packets have arrived
        self.relay.counters().expect("counters")
    }

    fn send_packet(&mut self, packet: &[u8]) -> Vec<Forwarded> {
        self.from.send(packet).expect("send");
        peers::receive_original(&self.to, packet, &self.relay)
    }

    /// Sends a packet with datagrams of the track. The program treats them as the track's first ones.
    fn send(&mut self, frames: &[u8]) -> Vec<Forwarded> {
        // Forgets the objects that have arrived, so that the program treats no object as a repeated one.
        self.slot.set_position(&Position::default());
        self.send_next(frames)
    }

    fn send_next(&mut self, frames: &[u8]) -> Vec<Forwarded> {
        // A packet needs 4 bytes of frames for header protection.
        let padding = vec![0; 4usize.saturating_sub(frames.len())];
        let packet = self.publisher.seal(0, self.sent, 3, &[padding, frames.to_vec()].concat());
        self.sent += 1;
        self.send_packet(&packet)
    }

    /// Checks that each subscriber received each datagram under its own alias, as the userspace builder makes it.
    /// Checks that `forwarded`, the program's reports of sent copies, lists exactly these copies.
    fn expect(&mut self, datagrams: &[(Vec<u8>, ObjectDatagram)], forwarded: &[Forwarded]) {
        let mut registered = forwarded.iter();
        for (start, datagram) in datagrams {
            let aliases = self.aliases.iter().zip(&self.fronts);
            for ((tag, subscriber), (&alias, front)) in (0..).zip(&self.subscribers).zip(aliases) {
                let sent = registered.next().expect("a registration");
                let rewritten = [front.clone(), under(alias, start, datagram)].concat();
                let mut frames = Vec::new();
                frame::write_datagram(&rewritten, &mut frames);
                let want = subscriber.keys.build((0, sent.number), &frames);
                let mut buffer = [0; 2048];
                let len = subscriber.socket.recv(&mut buffer).expect("a packet");
                assert_eq!(buffer[..len], want, "{datagram:?}");
                let want = Forwarded {
                    downstream: subscriber.downstream.id(),
                    tag,
                    offset: datagram.group,
                    object: Some(datagram.object),
                    len: rewritten.len() as u16,
                    fin: false,
                    size: want.len() as u16,
                    ..*sent
                };
                assert_eq!(*sent, want);
            }
        }
        assert_eq!(registered.next(), None);
        assert_eq!(self.capture.check(), datagrams.len() * self.subscribers.len());
    }

    fn outcome(&mut self, datagram: &ObjectDatagram) -> EgressOutcome {
        let before = self.counted();
        let state = |scene: &Self| {
            let downstream = &scene.subscribers[0].downstream;
            (downstream.bytes(), downstream.data())
        };
        let totals = state(self);
        let mut frames = Vec::new();
        frame::write_datagram(&self.fronted(&encode(datagram)), &mut frames);
        let forwarded = self.send(&frames);
        let counted = self.counted().since(&before);
        let mut outcomes = EgressOutcome::ALL.into_iter().filter(|outcome| counted.egresses(*outcome) > 0);
        let outcome = outcomes.next().expect("an outcome");
        assert_eq!((counted.egresses(outcome), outcomes.next()), (1, None));
        let sent = outcome == EgressOutcome::Sent;
        assert_eq!(forwarded.len(), usize::from(sent));
        let size = forwarded.first().map_or(0, |one| u64::from(one.size));
        assert_eq!(state(self), (totals.0 + size, totals.1), "datagrams take no stream credit");
        if sent {
            self.expect(&[(Vec::new(), datagram.clone())], &forwarded);
        }
        outcome
    }
}

/// Returns the relay's own encoding of the datagram.
fn encode(datagram: &ObjectDatagram) -> Vec<u8> {
    let mut out = Vec::new();
    datagram.encode(&mut out);
    out
}

/// Returns the datagram that a subscriber gets: the relay's own encoding if `original` is empty. Otherwise all bytes
/// after the alias stay as the publisher sent them.
fn under(alias: u64, original: &[u8], datagram: &ObjectDatagram) -> Vec<u8> {
    let renamed = encode(&ObjectDatagram { alias, ..datagram.clone() });
    if original.is_empty() {
        return renamed;
    }
    let head = encode(&ObjectDatagram { alias, payload: [].as_slice().into(), ..datagram.clone() });
    let own = encode(&ObjectDatagram { alias: 0, payload: [].as_slice().into(), ..datagram.clone() });
    // The datagram's type and alias have the relay's encoding, and its other fields the publisher's.
    [&head[..head.len() - (own.len() - 2)], original].concat()
}

/// Returns a random datagram, and the encoded bytes after its alias. These are empty if the datagram has the relay's
/// own encoding.
fn generate(rng: &mut Rng, most: usize) -> (Vec<u8>, ObjectDatagram) {
    let bits = [rng.u32(..62), rng.u32(1..62)];
    let status = if rng.u32(..6) == 0 { Some(pick(rng)) } else { None };
    let normal = matches!(status, None | Some(Status::Normal));
    let properties = if normal && rng.bool() { rng.usize(1..most / 4) } else { 0 };
    let payload = if status.is_some() { 0 } else { rng.usize(..most / 2) };
    let datagram = ObjectDatagram {
        alias: ALIAS,
        group: rng.u64(..1 << bits[0]),
        object: rng.u64(..1 << bits[1]),
        priority: if rng.bool() { Some(rng.u8(..)) } else { None },
        end_of_group: status.is_none() && rng.bool(),
        properties: quic::bytes(properties, rng).into(),
        status,
        payload: quic::bytes(payload, rng).into(),
    };
    let wide = rng.u32(..4) == 0 && datagram.object != 0 && status.is_none() && properties == 0;
    if !wide {
        return (Vec::new(), datagram);
    }
    let mut rest = Vec::new();
    // Group ID and object ID take 9 bytes each, which is the longest encoding.
    for value in [datagram.group, datagram.object] {
        rest.push(0xff);
        rest.extend(value.to_be_bytes());
    }
    rest.extend(datagram.priority);
    rest.extend_from_slice(&datagram.payload);
    (rest, datagram)
}

fn pick(rng: &mut Rng) -> Status {
    [Status::Normal, Status::EndOfGroup, Status::EndOfTrack][rng.usize(..3)]
}

#[test]
fn datagram_copies_equal_userspace_under_every_alias() {
    const CASES: usize = 500;
    if !root("datagram_copies_equal_userspace_under_every_alias") {
        return;
    }
    let sessions: [(_, &[_]); 3] = [
        (None, &[None, None, None]),
        (None, &[Some(0), None, Some(0x400)]),
        (Some(0x400), &[None, Some(0), Some(1 << 60)]),
    ];
    let suites = [("dgc", KeySuite::ChaCha20Poly1305), ("dga", KeySuite::Aes128Gcm)];
    for ((name, suite), (publisher, theirs)) in
        suites.into_iter().flat_map(|suite| sessions.map(|sessions| (suite, sessions)))
    {
        let mut scene = DatagramScene::new(name, suite, &ALIASES);
        scene.bind(publisher, theirs);
        let mut total = 0;
        for _ in 0..CASES {
            let count = scene.rng.usize(1..=3);
            let room = LIMIT as usize - 60;
            let mut frames = Vec::new();
            let mut datagrams = Vec::new();
            let mut objects: Vec<_> = (0..count).map(|_| generate(&mut scene.rng, room / count)).collect();
            // Sorts the objects and removes repeated ones, because only the first datagram of an object is forwarded.
            objects.sort_by_key(|(_, datagram)| (datagram.group, datagram.object));
            objects.dedup_by_key(|(_, datagram)| (datagram.group, datagram.object));
            let count = objects.len();
            for (at, (rest, datagram)) in objects.into_iter().enumerate() {
                if scene.rng.bool() {
                    frames.extend(quic::any_other(&mut scene.rng));
                }
                let bytes = match rest.as_slice() {
                    [] => encode(&datagram),
                    _ => under(ALIAS, &rest, &datagram),
                };
                let bytes = scene.fronted(&bytes);
                // A DATAGRAM frame without a length (0x30) must be the last one.
                if at + 1 == count && scene.rng.bool() {
                    frames.push(0x30);
                    frames.extend(bytes);
                } else {
                    frames.push(0x31);
                    frames.extend(quic::any_varint(bytes.len() as u64, &mut scene.rng));
                    frames.extend(bytes);
                }
                datagrams.push((rest, datagram));
            }
            let forwarded = scene.send(&frames);
            scene.expect(&datagrams, &forwarded);
            total += forwarded.len();
        }
        let counters = scene.counted();
        assert_eq!(counters.egresses(EgressOutcome::Sent), total as u64);
        assert_eq!(counters.packets(Outcome::Forwarded), CASES as u64);
        println!("{name}: {CASES} packets became {total}, all equal");
    }
}

/// The session is closed for a malformed datagram, so the relay must not forward one. The program must agree with the
/// userspace decoder about every damaged datagram.
#[test]
fn datagram_that_userspace_rejects_is_not_forwarded() {
    const CASES: usize = 2000;
    if !root("datagram_that_userspace_rejects_is_not_forwarded") {
        return;
    }
    for session in [None, Some(0), Some(0x400)] {
        let seen = forward_what_is_good(CASES, session);
        assert!(seen.iter().all(|count| *count > CASES / 10), "{seen:?}");
    }
}

/// Returns how many damaged datagrams were not forwarded, and how many were.
fn forward_what_is_good(cases: usize, session: Option<u64>) -> [usize; 2] {
    let binding = session.map_or(Binding::Bare, Binding::Session);
    let mut scene = DatagramScene::new("dgm", KeySuite::ChaCha20Poly1305, &ALIASES[..1]);
    scene.bind(session, &[None]);
    let mut seen = [0; 2];
    for _ in 0..cases {
        let (_, datagram) = generate(&mut scene.rng, 200);
        let mut bytes = scene.fronted(&encode(&datagram));
        match scene.rng.u32(..3) {
            // Cuts the datagram, flips a bit near its beginning, or replaces its first byte.
            0 => bytes.truncate(scene.rng.usize(..=bytes.len())),
            1 => {
                let at = scene.rng.usize(..bytes.len().min(12));
                bytes[at] ^= 1 << scene.rng.u32(..8);
            }
            _ => bytes = [quic::bytes(1, &mut scene.rng), bytes[1..].to_vec()].concat(),
        }
        let mut frames = Vec::new();
        frame::write_datagram(&bytes, &mut frames);
        let object = binding.strip(&bytes).map(|from| bytes[from..].to_vec());
        let decoded = object.map_or(Ok(None), |object| ObjectDatagram::decode(object.into()));
        let want = matches!(&decoded, Ok(Some(datagram)) if datagram.alias == ALIAS);
        let forwarded = scene.send(&frames);
        assert_eq!(forwarded.len(), usize::from(want), "{bytes:02x?}: {decoded:?}");
        if let (true, Ok(Some(datagram))) = (want, decoded) {
            assert_eq!((forwarded[0].offset, forwarded[0].object), (datagram.group, Some(datagram.object)));
        }
        seen[usize::from(want)] += 1;
    }
    seen
}

/// Returns an object with a payload, without a priority, properties or a status.
fn plain_datagram(group: u64, object: u64, payload: Vec<u8>) -> ObjectDatagram {
    ObjectDatagram {
        alias: ALIAS,
        group,
        object,
        priority: None,
        end_of_group: false,
        properties: [].as_slice().into(),
        status: None,
        payload: payload.into(),
    }
}

#[test]
fn datagram_is_sent_only_within_size_cwnd_priority_and_location_limits() {
    if !root("datagram_is_sent_only_within_size_cwnd_priority_and_location_limits") {
        return;
    }
    let mut scene = DatagramScene::new("dgl", KeySuite::Aes128Gcm, &ALIASES[..1]);
    let sample = |group, object, payload: usize| plain_datagram(group, object, vec![3; payload]);
    let plain = sample(5, 1, 100);
    assert_eq!(scene.outcome(&plain), EgressOutcome::Sent);
    // max_datagram_frame_size counts the whole frame (RFC 9221, section 3): here 3 bytes before the datagram and 4
    // before its payload.
    assert_eq!(scene.outcome(&sample(5, 1, LIMIT as usize - 7)), EgressOutcome::Sent);
    assert_eq!(scene.outcome(&sample(5, 1, LIMIT as usize - 6)), EgressOutcome::TooLarge);
    // In a WebTransport session, the quarter stream ID takes 1 or 2 more bytes.
    for (session, more) in [(0, 1), (0x400, 2)] {
        scene.bind(Some(0), &[Some(session)]);
        assert_eq!(scene.outcome(&sample(5, 1, LIMIT as usize - 7 - more)), EgressOutcome::Sent);
        assert_eq!(scene.outcome(&sample(5, 1, LIMIT as usize - 6 - more)), EgressOutcome::TooLarge);
    }
    scene.bind(None, &[None]);
    scene.subscribers[0].downstream.set_max_datagram(0);
    assert_eq!(scene.outcome(&plain), EgressOutcome::TooLarge);
    scene.subscribers[0].downstream.set_max_datagram(u32::MAX);
    let frame_of_1300 = sample(5, 1, 1300 - 7);
    let size = scene.subscribers[0].keys.build((0, 0), &[0; 1300]).len() as u32;
    scene.subscribers[0].downstream.set_mtu(size - 1);
    assert_eq!(scene.outcome(&frame_of_1300), EgressOutcome::TooLarge);
    scene.subscribers[0].downstream.set_mtu(size);
    assert_eq!(scene.outcome(&frame_of_1300), EgressOutcome::Sent);

    let downstream = &scene.subscribers[0].downstream;
    downstream.set_max_bytes(downstream.bytes() + u64::from(size) - 1);
    assert_eq!(scene.outcome(&frame_of_1300), EgressOutcome::Window);
    let downstream = &scene.subscribers[0].downstream;
    downstream.set_max_bytes(downstream.bytes() + u64::from(size));
    assert_eq!(scene.outcome(&frame_of_1300), EgressOutcome::Sent);
    scene.subscribers[0].downstream.set_max_bytes(u64::MAX / 2);

    // An object of priority 0x41 waits in userspace. The program leaves datagrams that are as urgent or less urgent to
    // userspace.
    scene.subscribers[0].downstream.set_waiting(Some(0x8041));
    assert_eq!(scene.outcome(&plain), EgressOutcome::Sent);
    for (priority, want) in [
        (0x40, EgressOutcome::Sent),
        (0x41, EgressOutcome::Behind),
        (0xff, EgressOutcome::Behind),
        (0, EgressOutcome::Sent),
    ] {
        let datagram = ObjectDatagram { priority: Some(priority), ..plain.clone() };
        assert_eq!(scene.outcome(&datagram), want, "{priority}");
    }
    scene.subscribers[0].downstream.set_waiting(None);

    scene.slot = scene.upstream.datagrams(ALIAS);
    let egress = DatagramCopy { alias: ALIASES[0], first: (5, 3), last_group: 7, ..ALL };
    scene.slot.add_datagrams(&scene.subscribers[0].downstream, &egress).expect("an egress");
    for (group, object, want) in [
        (4, 9, EgressOutcome::Before),
        (5, 2, EgressOutcome::Before),
        (5, 3, EgressOutcome::Sent),
        (6, 0, EgressOutcome::Sent),
        (7, 1 << 40, EgressOutcome::Sent),
        (8, 0, EgressOutcome::Before),
    ] {
        assert_eq!(scene.outcome(&sample(group, object, 10)), want, "{group} {object}");
    }
}

/// Userspace keeps the first of two datagrams with the same object, even if their payloads differ.
#[test]
fn object_that_arrives_twice_is_forwarded_once() {
    if !root("object_that_arrives_twice_is_forwarded_once") {
        return;
    }
    let mut scene = DatagramScene::new("dgt", KeySuite::ChaCha20Poly1305, &ALIASES[..1]);
    let frames = |group, object, payload: &'static [u8]| {
        let mut frames = Vec::new();
        frame::write_datagram(&encode(&plain_datagram(group, object, payload.to_vec())), &mut frames);
        frames
    };
    // Each tuple has a group ID, an object ID and the number of copies that the program sends. For the newest object
    // and the 64 object IDs before it, the program knows whether they have arrived. So object 15 is not forwarded after
    // object 80. No object of group 1 is forwarded after one of group 2.
    for (group, object, sent) in [
        (1, 0, 1),
        (1, 0, 0),
        (1, 2, 1),
        (1, 1, 1),
        (1, 1, 0),
        (1, 80, 1),
        (1, 17, 1),
        (1, 15, 0),
        (2, 80, 1),
        (1, 81, 0),
    ] {
        let forwarded = scene.send_next(&frames(group, object, b"one"));
        assert_eq!(forwarded.len(), sent, "{group} {object}");
        assert_eq!(scene.send_next(&frames(group, object, b"another")), [], "{group} {object}");
    }
    let twice = [frames(2, 90, b"one"), frames(2, 90, b"another")].concat();
    assert_eq!(scene.send_next(&twice).len(), 1);
}

#[test]
fn replayed_forged_or_other_track_datagram_packet_is_not_forwarded() {
    if !root("replayed_forged_or_other_track_datagram_packet_is_not_forwarded") {
        return;
    }
    let mut scene = DatagramScene::new("dgr", KeySuite::ChaCha20Poly1305, &ALIASES[..1]);
    let (_, datagram) = generate(&mut scene.rng, 200);
    let frames = |alias| {
        let mut frames = Vec::new();
        frame::write_datagram(&encode(&ObjectDatagram { alias, ..datagram.clone() }), &mut frames);
        frames
    };
    let packet = scene.publisher.seal(0, 0, 2, &frames(ALIAS));
    assert_eq!(scene.send_packet(&packet).len(), 1);
    assert_eq!(scene.send_packet(&packet), []);
    scene.sent = 1;
    assert_eq!(scene.send(&frames(ALIAS + 1)), []);
    // The program also forwards a stream whose ID equals the track alias. It must not use the map entry of that stream
    // for the datagram.
    let mut streams = scene.upstream.slot(ALIAS + 1);
    let egress = millrace_relay_kernel::program::EgressRecord {
        stream_id: 3,
        shift: 0,
        from: 0,
        max_offset: 1 << 40,
        tag: 0,
        level: 0,
        track: 0,
        group: 0,
    };
    streams.add(&scene.subscribers[0].downstream, &egress).expect("an egress");
    assert_eq!(scene.send(&frames(ALIAS + 1)), []);
    assert_eq!(scene.send(&frames(ALIAS)).len(), 1);
    let mut forged = scene.publisher.seal(0, scene.sent, 2, &frames(ALIAS));
    *forged.last_mut().expect("a tag") ^= 1;
    assert_eq!(scene.send_packet(&forged), []);
    scene.upstream.observe(scene.sent);
}
