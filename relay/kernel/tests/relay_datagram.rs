//! The relay program and objects that come as datagrams, on real interfaces; what it sends is compared with what the
//! userspace builder makes. Needs root.

#[path = "support/peers.rs"]
mod peers;
#[path = "support/quic.rs"]
#[allow(dead_code)]
mod quic;

use millrace_testkit::net;
use std::net::UdpSocket;

use fastrand::Rng;
use millrace_kernel::crypto::QuicKeys;
use millrace_moq::{Datagram, Status};
use millrace_quic::{frame, keys::Suite, webtransport::Binding};
use millrace_relay_kernel::program::{
    Compute, Config, Counters, DatagramRecord, EgressOutcome, Forwarded, Outcome, PositionRecord, Relay,
    SlotRecord, UpstreamRecord,
};
use net::{Capture, Network, address, root};
use peers::{PORT, Subscriber};
use quic::Direction;

const ALIAS: u64 = 300;
/// Downstream: shorter, as long, and the longest there is.
const ALIASES: [u64; 3] = [7, 301, u64::MAX - 1];
const LIMIT: u32 = 1200;
/// Of the subscriber and, where a datagram has none, of the publisher.
const LEVEL: u16 = 0x8040;

const ALL: DatagramRecord =
    DatagramRecord { alias: 0, first: (0, 0), last_group: u64::MAX, tag: 0, level: LEVEL, track: 0 };

struct Scene {
    relay: Relay,
    upstream: UpstreamRecord,
    slot: SlotRecord,
    publisher: Direction,
    subscribers: Vec<Subscriber>,
    /// Theirs, in the same order.
    aliases: Vec<u64>,
    /// What the publisher's datagrams begin with, and theirs.
    front: Vec<u8>,
    fronts: Vec<Vec<u8>>,
    from: UdpSocket,
    to: UdpSocket,
    capture: Capture,
    sent: u64,
    rng: Rng,
    _network: Network,
}

impl Scene {
    fn new(name: &str, suite: Suite, aliases: &[u64]) -> Self {
        let network = Network::new(name);
        net::set_checksum_offload(&network.publisher, "eth", false);
        let mut rng = Rng::with_seed(11);
        let relay = Relay::load(&Config { ports: vec![PORT], ..Config::default() }).expect("the relay loads");
        let publisher = Direction::new(suite, 8, &mut rng);
        let upstream = peers::upstream(&relay, &publisher);
        let at = (network.subscriber.as_str(), address(4, 2, 1), address(4, 2, 2));
        let subscribe = |_| {
            let suite = quic::SUITES[rng.usize(..2)];
            let subscriber = Subscriber::new(&network, &relay, at, (suite, 8), &mut rng);
            subscriber.downstream.set_max_datagram(LIMIT);
            subscriber
        };
        let subscribers: Vec<_> = aliases.iter().map(subscribe).collect();
        let mut slot = upstream.datagrams(ALIAS);
        for ((tag, subscriber), &alias) in (0..).zip(&subscribers).zip(aliases) {
            let egress = DatagramRecord { alias, tag, ..ALL };
            slot.add_datagrams(&subscriber.downstream, &egress).expect("an egress");
        }
        let (from, to) = peers::sockets(&network, (address(4, 1, 2), address(4, 1, 1)));
        peers::attach(&network, &relay, "west");
        let capture = Capture::new(&network.subscriber);
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

    /// Puts publisher and subscribers into these sessions; `None`: on the bare connection.
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

    /// As the publisher sends it.
    fn fronted(&self, datagram: &[u8]) -> Vec<u8> {
        [&self.front, datagram].concat()
    }

    fn counted(&self) -> Counters {
        self.relay.counters().expect("counters") // exact: the program counts a packet before it lets the original pass
    }

    fn send_packet(&mut self, packet: &[u8]) -> Vec<Forwarded> {
        self.from.send(packet).expect("send");
        peers::receive_original(&self.to, packet, &self.relay)
    }

    /// Sends a packet of a track of which nothing has come before.
    fn send(&mut self, frames: &[u8]) -> Vec<Forwarded> {
        self.slot.set_position(&PositionRecord::default());
        self.send_next(frames)
    }

    fn send_next(&mut self, frames: &[u8]) -> Vec<Forwarded> {
        let padding = vec![0; 4usize.saturating_sub(frames.len())];
        let packet = self.publisher.seal((0, self.sent), 3, &[padding, frames.to_vec()].concat());
        self.sent += 1;
        self.send_packet(&packet)
    }

    /// Each must have come to each subscriber under its alias, as the userspace builder would have sent it.
    fn expect(&mut self, datagrams: &[(Vec<u8>, Datagram)], forwarded: &[Forwarded]) {
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

    fn outcome(&mut self, datagram: &Datagram) -> EgressOutcome {
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

fn encode(datagram: &Datagram) -> Vec<u8> {
    let mut out = Vec::new();
    datagram.encode(&mut out);
    out
}

/// What a subscriber gets: the relay's own encoding, or, where the publisher's had other widths (`start` is its
/// beginning, up to the alias), all that follows the alias as it came.
fn under(alias: u64, original: &[u8], datagram: &Datagram) -> Vec<u8> {
    let renamed = encode(&Datagram { alias, ..datagram.clone() });
    if original.is_empty() {
        return renamed;
    }
    let head = encode(&Datagram { alias, payload: [].as_slice().into(), ..datagram.clone() });
    let own = encode(&Datagram { alias: 0, payload: [].as_slice().into(), ..datagram.clone() });
    // Type and alias, then the publisher's.
    [&head[..head.len() - (own.len() - 2)], original].concat()
}

/// Any object, and what follows the alias when it is encoded in other widths than the relay's; else nothing.
fn generate(rng: &mut Rng, most: usize) -> (Vec<u8>, Datagram) {
    let bits = [rng.u32(..62), rng.u32(1..62)];
    let status = if rng.u32(..6) == 0 { Some(pick(rng)) } else { None };
    let normal = matches!(status, None | Some(Status::Normal));
    let properties = if normal && rng.bool() { rng.usize(1..most / 4) } else { 0 };
    let payload = if status.is_some() { 0 } else { rng.usize(..most / 2) };
    let datagram = Datagram {
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
fn equal_the_builders_under_every_alias() {
    const CASES: usize = 500;
    if !root("equal_the_builders_under_every_alias") {
        return;
    }
    let sessions: [(_, &[_]); 3] = [
        (None, &[None, None, None]),
        (None, &[Some(0), None, Some(0x400)]),
        (Some(0x400), &[None, Some(0), Some(1 << 60)]),
    ];
    let suites = [("dgc", Suite::ChaCha20Poly1305), ("dga", Suite::Aes128Gcm)];
    for ((name, suite), (publisher, theirs)) in
        suites.into_iter().flat_map(|suite| sessions.map(|sessions| (suite, sessions)))
    {
        let mut scene = Scene::new(name, suite, &ALIASES);
        scene.bind(publisher, theirs);
        let mut total = 0;
        for _ in 0..CASES {
            let count = scene.rng.usize(1..=3);
            let room = LIMIT as usize - 60;
            let mut frames = Vec::new();
            let mut datagrams = Vec::new();
            let mut objects: Vec<_> = (0..count).map(|_| generate(&mut scene.rng, room / count)).collect();
            // Each once, and in order.
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

/// Whoever forwards what is malformed makes others close their sessions.
#[test]
fn only_what_userspace_would_take_is_forwarded() {
    const CASES: usize = 2000;
    if !root("only_what_userspace_would_take_is_forwarded") {
        return;
    }
    for session in [None, Some(0), Some(0x400)] {
        let seen = forward_what_is_good(CASES, session);
        assert!(seen.iter().all(|count| *count > CASES / 10), "{seen:?}");
    }
}

/// How many datagrams were not forwarded, and how many were.
fn forward_what_is_good(cases: usize, session: Option<u64>) -> [usize; 2] {
    let binding = session.map_or(Binding::Bare, Binding::Session);
    let mut scene = Scene::new("dgm", Suite::ChaCha20Poly1305, &ALIASES[..1]);
    scene.bind(session, &[None]);
    let mut seen = [0; 2];
    for _ in 0..cases {
        let (_, datagram) = generate(&mut scene.rng, 200);
        let mut bytes = scene.fronted(&encode(&datagram));
        match scene.rng.u32(..3) {
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
        let decoded = object.map_or(Ok(None), |object| Datagram::decode(object.into()));
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

/// An object with nothing but its payload.
fn plain_datagram(group: u64, object: u64, payload: Vec<u8>) -> Datagram {
    Datagram {
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
fn a_datagram_is_sent_within_every_limit_or_not_at_all() {
    if !root("a_datagram_is_sent_within_every_limit_or_not_at_all") {
        return;
    }
    let mut scene = Scene::new("dgl", Suite::Aes128Gcm, &ALIASES[..1]);
    let sample = |group, object, payload: usize| plain_datagram(group, object, vec![3; payload]);
    let plain = sample(5, 1, 100);
    assert_eq!(scene.outcome(&plain), EgressOutcome::Sent);
    // max_datagram_frame_size counts the whole frame (RFC 9221, section 3): 3 bytes before the object, 4 of its own.
    assert_eq!(scene.outcome(&sample(5, 1, LIMIT as usize - 7)), EgressOutcome::Sent);
    assert_eq!(scene.outcome(&sample(5, 1, LIMIT as usize - 6)), EgressOutcome::TooLarge);
    // A quarter of a session's ID is a byte or two more.
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

    // Something waits in userspace that is as urgent as priority 0x41.
    scene.subscribers[0].downstream.set_waiting(Some(0x8041));
    assert_eq!(scene.outcome(&plain), EgressOutcome::Sent);
    for (priority, want) in [
        (0x40, EgressOutcome::Sent),
        (0x41, EgressOutcome::Behind),
        (0xff, EgressOutcome::Behind),
        (0, EgressOutcome::Sent),
    ] {
        let datagram = Datagram { priority: Some(priority), ..plain.clone() };
        assert_eq!(scene.outcome(&datagram), want, "{priority}");
    }
    scene.subscribers[0].downstream.set_waiting(None);

    scene.slot = scene.upstream.datagrams(ALIAS);
    let egress = DatagramRecord { alias: ALIASES[0], first: (5, 3), last_group: 7, ..ALL };
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

/// Userspace keeps the first of two datagrams with one object, whatever is in the other.
#[test]
fn object_that_comes_twice_is_forwarded_once() {
    if !root("object_that_comes_twice_is_forwarded_once") {
        return;
    }
    let mut scene = Scene::new("dgt", Suite::ChaCha20Poly1305, &ALIASES[..1]);
    let frames = |group, object, payload: &'static [u8]| {
        let mut frames = Vec::new();
        frame::write_datagram(&encode(&plain_datagram(group, object, payload.to_vec())), &mut frames);
        frames
    };
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
fn no_packet_is_forwarded_twice_or_for_another_track() {
    if !root("no_packet_is_forwarded_twice_or_for_another_track") {
        return;
    }
    let mut scene = Scene::new("dgr", Suite::ChaCha20Poly1305, &ALIASES[..1]);
    let (_, datagram) = generate(&mut scene.rng, 200);
    let frames = |alias| {
        let mut frames = Vec::new();
        frame::write_datagram(&encode(&Datagram { alias, ..datagram.clone() }), &mut frames);
        frames
    };
    let packet = scene.publisher.seal((0, 0), 2, &frames(ALIAS));
    assert_eq!(scene.send_packet(&packet).len(), 1);
    assert_eq!(scene.send_packet(&packet), []);
    scene.sent = 1;
    assert_eq!(scene.send(&frames(ALIAS + 1)), []);
    // A stream of that number is no track of that alias.
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
    let mut forged = scene.publisher.seal((0, scene.sent), 2, &frames(ALIAS));
    *forged.last_mut().expect("a tag") ^= 1;
    assert_eq!(scene.send_packet(&forged), []);
    scene.upstream.observe(scene.sent);
}
