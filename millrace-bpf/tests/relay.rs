//! The relay program on real interfaces: publisher - relay - subscriber. Every packet that it sends is compared
//! with the one that the userspace builder makes. Needs root.

#[path = "support/net.rs"]
mod net;
#[path = "support/quic.rs"]
mod quic;

use std::net::{SocketAddr, UdpSocket};
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;
use millrace_bpf::crypto::QuicKeys;
use millrace_bpf::probe::{self, Probe};
use millrace_bpf::relay::{
    Compute, Config, Downstream, Forwarded, FurtherRun, Leg, LegKey, LegOutcome, Outcome, Path, Relay, Slot,
    Supply, Tracing, Upstream, Want, What,
};
use millrace_proto::quic::keys::Suite;
use net::{Capture, Network, RawSender, address, inside};
use quic::{Chunk, Direction};

const PORT: u16 = 4443;
const ID_LEN: usize = 8;
const NUMBER_MASK: u64 = (1 << 48) - 1;

fn root(test: &str) -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        println!("SKIP {test}: needs root");
    }
    root
}

/// A stream that arrives, and what it is downstream.
#[derive(Clone, Copy)]
struct Stream {
    upstream: u64,
    downstream: u64,
    shift: i64,
}

const STREAMS: [Stream; 3] = [
    Stream { upstream: 2, downstream: 3, shift: 0 },
    Stream { upstream: 70_002, downstream: 0x4003, shift: -20 },
    Stream { upstream: 1 << 40 | 2, downstream: 1 << 35 | 3, shift: 1 << 20 },
];
/// Upstream offset from which on every stream has a leg; above the largest negative shift.
const FROM: u64 = 20;

struct Subscriber {
    keys: Direction,
    downstream: Downstream,
    socket: UdpSocket,
}

/// Relay, one upstream, some subscribers with a leg for each of `STREAMS`.
struct Scene {
    relay: Relay,
    upstream: Upstream,
    slots: Vec<Slot>,
    publisher: Direction,
    subscribers: Vec<Subscriber>,
    /// Where the publisher's packets come from, and where they are read.
    from: UdpSocket,
    to: UdpSocket,
    capture: Capture,
    sent: u64,
    rng: Rng,
}

impl Scene {
    /// `family`: of the upstream; the subscribers' alternate when there are two in `families`.
    fn new(network: &Network, family: u8, families: &[u8], suite: Suite, legs: usize, seed: u64) -> Self {
        let config = Config { ports: vec![PORT], id_len: ID_LEN, ..Config::default() };
        Self::with_config(&config, network, family, families, suite, legs, seed)
    }

    fn with_config(
        config: &Config,
        network: &Network,
        family: u8,
        families: &[u8],
        suite: Suite,
        legs: usize,
        seed: u64,
    ) -> Self {
        let mut rng = Rng::with_seed(seed);
        let relay = Relay::load(config).expect("the relay loads");
        let publisher = Direction::new(suite, ID_LEN, &mut rng);
        let upstream = relay.upstream(0).expect("an upstream");
        upstream.add_id(&publisher.id).expect("an ID");
        upstream.set_keys(0, &publisher.kernel_keys(0)).expect("keys");
        let subscribers: Vec<_> = (0..legs)
            .map(|i| {
                subscriber(network, &relay, families[i % families.len()], quic::SUITES[i / 2 % 2], &mut rng)
            })
            .collect();
        let slots =
            STREAMS.iter().enumerate().map(|(tag, stream)| slot(&upstream, stream, tag, &subscribers));
        let slots = slots.collect();
        let to = net::socket(&network.relay, SocketAddr::new(address(family, 1, 1), PORT));
        let from = net::socket(&network.publisher, SocketAddr::new(address(family, 1, 2), 0));
        from.connect(to.local_addr().expect("address")).expect("connect");
        let capture = Capture::new(&network.subscriber);
        Self { relay, upstream, slots, publisher, subscribers, from, to, capture, sent: 0, rng }
    }

    /// Sends one packet and returns what was registered. The packet must reach userspace as it was.
    fn send(&mut self, packet: &[u8]) -> Vec<Forwarded> {
        self.from.send(packet).expect("send");
        let mut buffer = [0; 2048];
        let len = self.to.recv(&mut buffer).expect("the original");
        assert_eq!(buffer[..len], *packet, "the original");
        let mut forwarded = Vec::new();
        self.relay.drain(|packet| forwarded.push(packet));
        forwarded
    }

    /// Each chunk must have come to each subscriber, as the userspace builder would have sent it.
    fn expect(&mut self, chunks: &[Chunk], forwarded: &[Forwarded]) {
        let mut registered = forwarded.iter();
        for chunk in chunks {
            let (tag, stream) = (0..)
                .zip(STREAMS)
                .find(|(_, stream)| stream.upstream == chunk.stream)
                .expect("a stream with a slot");
            for subscriber in &self.subscribers {
                let sent = registered.next().expect("a registration");
                let offset = chunk.offset.wrapping_add_signed(stream.shift);
                let moved = Chunk { stream: stream.downstream, offset, ..chunk.clone() };
                let want = subscriber.keys.build((sent.generation, sent.number), &moved.encode());
                let mut buffer = [0; 2048];
                let len = subscriber.socket.recv(&mut buffer).expect("a packet");
                assert_eq!(buffer[..len], want, "{moved:?}");
                assert_eq!(
                    *sent,
                    Forwarded {
                        downstream: subscriber.downstream.id(),
                        tag,
                        offset,
                        len: chunk.data.len() as u16,
                        fin: chunk.fin,
                        size: want.len() as u16,
                        ..*sent
                    }
                );
            }
        }
        assert_eq!(registered.next(), None);
    }

    /// A packet with up to `room` bytes of frames, and the chunks in it that have legs.
    fn generate(&mut self, room: usize) -> (Vec<u8>, Vec<Chunk>) {
        let rng = &mut self.rng;
        let mut frames = Vec::new();
        let mut chunks = Vec::new();
        let wanted = rng.usize(1..=3);
        while chunks.len() < wanted {
            while rng.u32(..3) == 0 {
                let other = quic::any_other(rng);
                if frames.len() + other.len() + 40 < room {
                    frames.extend(other);
                }
            }
            let left = room.saturating_sub(frames.len() + 33);
            let len = if rng.bool() { left } else { rng.usize(..=left) };
            let (fin, stream) = (rng.bool(), STREAMS[rng.usize(..3)]);
            let bits = rng.u32(1..58);
            let offset = FROM + rng.u64(..1 << bits);
            let chunk = Chunk { stream: stream.upstream, offset, data: quic::bytes(len, rng), fin };
            let last = chunks.len() + 1 == wanted || left < 40;
            frames.extend(quic::any_stream(&chunk, last, rng));
            if len > 0 || fin {
                chunks.push(chunk);
            }
            if last {
                break;
            }
        }
        (frames, chunks)
    }

    /// Now and then, by rings of changing lengths, and sometimes for short packets only.
    fn compute_ahead(&mut self) {
        let rng = &mut self.rng;
        let mut pick = || {
            let want = Want { len: [0, 1, 8, 16, 32, 32][rng.usize(..6)], text_bytes: rng.usize(..1500) };
            (rng.u32(..8) == 0).then_some(want)
        };
        if let Some(want) = pick() {
            assert_eq!(self.upstream.refill(0, want, self.publisher.keystreams()).len, want.len);
        }
        for subscriber in &mut self.subscribers {
            if let Some(want) = pick() {
                assert_eq!(subscriber.downstream.refill(want, subscriber.keys.keystreams()).len, want.len);
            }
        }
        if self.sent.is_multiple_of(100) {
            self.relay.settle().expect("settled");
        }
    }

    fn next_number(&mut self) -> u64 {
        self.sent += 1;
        self.sent - 1
    }
}

fn subscriber(network: &Network, relay: &Relay, family: u8, suite: Suite, rng: &mut Rng) -> Subscriber {
    let socket = net::socket(&network.subscriber, SocketAddr::new(address(family, 2, 2), 0));
    let remote = socket.local_addr().expect("address");
    let local = SocketAddr::new(address(family, 2, 1), PORT);
    meet(network, local, &socket);
    let keys = Direction::new(suite, rng.usize(..=20), rng);
    let path = Path { local, remote, id: keys.id.clone(), traffic_class: 2, flow_label: rng.u32(..1 << 20) };
    let downstream = relay.downstream(&path, 1452, 0).expect("a downstream");
    downstream.set_keys(0, &keys.kernel_keys(0)).expect("keys");
    downstream.set_max_bytes(u64::MAX / 2);
    downstream.set_max_data(u64::MAX / 2);
    Subscriber { keys, downstream, socket }
}

/// Makes the relay's host know the subscriber's link address.
fn meet(network: &Network, local: SocketAddr, subscriber: &UdpSocket) {
    let socket = net::socket(&network.relay, SocketAddr::new(local.ip(), 0));
    socket.send_to(&[0], subscriber.local_addr().expect("address")).expect("send");
    assert_eq!(subscriber.recv(&mut [0; 1]).expect("receive"), 1);
}

fn slot(upstream: &Upstream, stream: &Stream, tag: usize, subscribers: &[Subscriber]) -> Slot {
    let mut slot = upstream.slot(stream.upstream);
    let leg = Leg {
        stream_id: stream.downstream,
        shift: stream.shift,
        from: FROM,
        max_offset: 1 << 62,
        tag: tag as u64,
        ..LEG
    };
    for subscriber in subscribers {
        slot.add(&subscriber.downstream, &leg).expect("a leg");
    }
    slot
}

fn attach(network: &Network, relay: &Relay, interface: &str) {
    let ifindex = net::ifindex(&network.relay, interface);
    inside(&network.relay, || relay.attach(ifindex).expect("the relay attaches"));
}

/// Packets of all sizes and shapes to `legs` subscribers.
fn equals_the_builder(
    name: &str,
    (family, families): (u8, &[u8]),
    suite: Suite,
    (legs, cases): (usize, usize),
    offload: bool,
) {
    let network = Network::new(name);
    net::set_checksum_offload(&network.publisher, "eth", offload);
    // With offload the copies have their checksum still to be filled in; without it there is nobody to do so.
    net::set_checksum_offload(&network.relay, "east", !offload);
    let mut scene = Scene::new(&network, family, families, suite, legs, 7);
    attach(&network, &scene.relay, "west");
    scene.capture.check();
    let mut packets = 0;
    for _ in 0..cases {
        let number = scene.next_number();
        // What a downstream adds: a longer connection ID and number, a longer STREAM header.
        let room = scene.rng.usize(..=1452 - 57);
        let (frames, chunks) = scene.generate(room);
        let number_len = scene.rng.usize(1..=4);
        let padding = vec![0; 4usize.saturating_sub(frames.len())];
        let packet = scene.publisher.seal((0, number), number_len, &[padding, frames].concat());
        scene.compute_ahead();
        let forwarded = scene.send(&packet);
        scene.expect(&chunks, &forwarded);
        packets += chunks.len() * legs;
        assert_eq!(scene.capture.check(), chunks.len() * legs);
    }
    let counters = scene.relay.counters().expect("counters");
    assert_eq!(counters.legs(LegOutcome::Sent), packets as u64);
    let others = [Outcome::Forwarded, Outcome::NoSlot].map(|outcome| counters.packets(outcome));
    assert_eq!(others.iter().sum::<u64>(), cases as u64, "{counters:?}");
    let supplies = Supply::ALL.map(|supply| {
        let sealed: u64 = scene.subscribers.iter().map(|s| s.downstream.supply(supply)).sum();
        (scene.upstream.supply(supply), sealed)
    });
    assert_eq!(supplies.iter().map(|(opened, _)| opened).sum::<u64>(), cases as u64);
    assert_eq!(supplies.iter().map(|(_, sealed)| sealed).sum::<u64>(), packets as u64);
    assert!(supplies.iter().all(|(opened, sealed)| *opened > 0 && *sealed > 0), "{supplies:?}");
    println!("{name}: {cases} packets became {packets}, all equal");
}

#[test]
fn ipv4_to_one() {
    if root("ipv4_to_one") {
        for (suite, name) in quic::SUITES.into_iter().zip(["c41", "a41"]) {
            equals_the_builder(name, (4, &[4]), suite, (1, 1500), true);
        }
    }
}

#[test]
fn ipv6_to_one() {
    if root("ipv6_to_one") {
        equals_the_builder("c61", (6, &[6]), Suite::ChaCha20Poly1305, (1, 1000), true);
    }
}

#[test]
fn ipv4_to_eight_of_both_families() {
    if root("ipv4_to_eight_of_both_families") {
        equals_the_builder("c48", (4, &[4, 6]), Suite::ChaCha20Poly1305, (8, 400), true);
    }
}

#[test]
fn ipv6_to_eight_of_both_families() {
    if root("ipv6_to_eight_of_both_families") {
        equals_the_builder("a68", (6, &[4, 6]), Suite::Aes128Gcm, (8, 400), true);
    }
}

#[test]
fn without_checksum_offload() {
    if root("without_checksum_offload") {
        equals_the_builder("n48", (4, &[6, 4]), Suite::Aes128Gcm, (8, 200), false);
        equals_the_builder("n68", (6, &[6, 4]), Suite::ChaCha20Poly1305, (8, 200), false);
    }
}

/// IPv4, one subscriber, ChaCha20-Poly1305.
fn simple(name: &str) -> (Network, Scene) {
    let network = Network::new(name);
    net::set_checksum_offload(&network.publisher, "eth", false);
    let scene = Scene::new(&network, 4, &[4], Suite::ChaCha20Poly1305, 1, 1);
    attach(&network, &scene.relay, "west");
    (network, scene)
}

impl Scene {
    fn only(&mut self) -> &mut Subscriber {
        &mut self.subscribers[0]
    }

    /// Some bytes of the first stream.
    fn chunk(&mut self, len: usize) -> Chunk {
        let data = quic::bytes(len, &mut self.rng);
        Chunk { stream: STREAMS[0].upstream, offset: 1000, data, fin: false }
    }

    /// The same bytes each time.
    fn chunk_of(&self, len: usize) -> Chunk {
        Chunk { stream: STREAMS[0].upstream, offset: 1000, data: vec![5; len], fin: false }
    }

    /// Sends a chunk of 1000 bytes and returns the outcome of its one leg. What is not sent has no trace but the
    /// count, on the connection too.
    fn try_leg(&mut self, generation: u16) -> LegOutcome {
        let before = self.relay.counters().expect("counters");
        let shared = |subscriber: &Subscriber| {
            let downstream = &subscriber.downstream;
            (downstream.number().load(Ordering::SeqCst), downstream.bytes(), downstream.data())
        };
        let state = shared(&self.subscribers[0]);
        let chunk = self.chunk(1000);
        let number = self.next_number();
        let forwarded = self.send(&self.publisher.seal((generation, number), 2, &chunk.encode()));
        let counted = self.relay.counters().expect("counters").since(&before);
        assert_eq!(counted.packets(Outcome::Forwarded), 1, "{counted:?}");
        let mut outcomes = LegOutcome::ALL.into_iter().filter(|outcome| counted.legs(*outcome) > 0);
        let outcome = outcomes.next().expect("an outcome");
        assert_eq!((counted.legs(outcome), outcomes.next()), (1, None), "{counted:?}");
        if outcome == LegOutcome::Sent {
            self.expect(&[chunk], &forwarded);
            let size = u64::from(forwarded[0].size);
            assert_eq!(shared(&self.subscribers[0]), (state.0 + 1, state.1 + size, state.2 + 1000));
        } else {
            assert_eq!(shared(&self.subscribers[0]), state, "{outcome:?}");
            assert_eq!(forwarded, []);
        }
        assert_eq!(self.capture.check(), usize::from(outcome == LegOutcome::Sent));
        outcome
    }

    /// The UDP payload that `try_leg` makes.
    fn size(&self) -> u64 {
        let chunk = Chunk { stream: STREAMS[0].downstream, offset: 1000, data: vec![0; 1000], fin: false };
        self.subscribers[0].keys.build((0, 0), &chunk.encode()).len() as u64
    }

    /// The same connections and streams on a relay of another configuration.
    fn rebuild(&mut self, network: &Network, config: &Config) {
        let count = self.subscribers.len();
        self.slots.clear();
        self.subscribers.clear();
        self.relay = Relay::load(config).expect("the relay loads");
        self.upstream = self.relay.upstream(0).expect("an upstream");
        self.upstream.add_id(&self.publisher.id).expect("an ID");
        self.upstream.set_keys(0, &self.publisher.kernel_keys(0)).expect("keys");
        let suite = Suite::ChaCha20Poly1305;
        self.subscribers =
            (0..count).map(|_| subscriber(network, &self.relay, 4, suite, &mut self.rng)).collect();
        self.slots = vec![slot(&self.upstream, &STREAMS[0], 0, &self.subscribers)];
    }

    /// One slot for the first stream in place of those that are there.
    fn relay_with(&mut self, leg: Leg) -> LegKey {
        self.slots.clear();
        let mut slot = self.upstream.slot(STREAMS[0].upstream);
        let key = slot.add(&self.subscribers[0].downstream, &leg).expect("a leg");
        self.slots.push(slot);
        key
    }
}

const LEG: Leg =
    Leg { stream_id: 3, shift: 0, from: 0, max_offset: 2000, tag: 0, level: 0, track: 0, group: 0 };

#[test]
fn limits_hold_to_the_byte() {
    if !root("limits_hold_to_the_byte") {
        return;
    }
    let (_network, mut scene) = simple("lim");
    let size = scene.size();
    let key = scene.relay_with(LEG);
    assert_eq!(scene.try_leg(0), LegOutcome::Sent);

    scene.slots[0].set_max_offset(key, 1999);
    assert_eq!(scene.try_leg(0), LegOutcome::StreamCredit);
    scene.slots[0].set_max_offset(key, 2000);
    assert_eq!(scene.try_leg(0), LegOutcome::Sent);

    let downstream = &scene.only().downstream;
    assert_eq!(downstream.set_max_data(2999), 2000);
    assert_eq!(scene.try_leg(0), LegOutcome::DataCredit);
    scene.only().downstream.set_max_data(3000);
    assert_eq!(scene.try_leg(0), LegOutcome::Sent);
    assert_eq!(scene.try_leg(0), LegOutcome::DataCredit);
    scene.only().downstream.set_max_data(u64::MAX / 2);

    let downstream = &scene.only().downstream;
    downstream.set_max_bytes(downstream.bytes() + size - 1);
    assert_eq!(scene.try_leg(0), LegOutcome::Window);
    let downstream = &scene.only().downstream;
    downstream.set_max_bytes(downstream.bytes() + size);
    assert_eq!(scene.try_leg(0), LegOutcome::Sent);
    assert_eq!(scene.try_leg(0), LegOutcome::Window);

    scene.only().downstream.set_max_bytes(u64::MAX / 2);

    scene.relay_with(Leg { level: 7, ..LEG });
    for (waiting, want) in [
        (Some(0), LegOutcome::Behind),
        (Some(7), LegOutcome::Behind),
        (Some(8), LegOutcome::Sent),
        (None, LegOutcome::Sent),
    ] {
        scene.only().downstream.set_waiting(waiting);
        assert_eq!(scene.try_leg(0), want, "{waiting:?}");
    }

    scene.relay_with(Leg { from: 1001, ..LEG });
    assert_eq!(scene.try_leg(0), LegOutcome::Before);
    scene.relay_with(Leg { from: 1000, ..LEG });
    assert_eq!(scene.try_leg(0), LegOutcome::Sent);

    scene.only().downstream.set_mtu(size as u32 - 1);
    assert_eq!(scene.try_leg(0), LegOutcome::TooLarge);
    scene.only().downstream.set_mtu(size as u32);
    assert_eq!(scene.try_leg(0), LegOutcome::Sent);
}

#[test]
fn key_updates_on_both_sides() {
    if !root("key_updates_on_both_sides") {
        return;
    }
    let (_network, mut scene) = simple("key");
    scene.relay_with(LEG);
    for generation in 0..3 {
        if generation > 0 {
            // The subscriber's side first, in two steps: the word moves before the keys are there.
            let next = scene.only().downstream.number().load(Ordering::SeqCst) & NUMBER_MASK;
            let moved = u64::from(generation) << 48 | next;
            scene.only().downstream.number().store(moved, Ordering::SeqCst);
            assert_eq!(scene.try_leg(generation - 1), LegOutcome::NoKeys);
            let keys = scene.only().keys.kernel_keys(generation);
            scene.only().downstream.set_keys(generation, &keys).expect("keys");
            assert_eq!(scene.try_leg(generation - 1), LegOutcome::Sent);
            let keys = scene.publisher.kernel_keys(generation);
            scene.upstream.set_keys(generation, &keys).expect("keys");
        }
        assert_eq!(scene.try_leg(generation), LegOutcome::Sent);
    }
}

#[test]
fn what_cannot_be_reached_is_declined() {
    if !root("what_cannot_be_reached_is_declined") {
        return;
    }
    let (network, mut scene) = simple("rch");
    scene.relay_with(LEG);
    let size = scene.size() as u32;
    let local = SocketAddr::new(address(4, 2, 1), PORT);
    let good = scene.only().socket.local_addr().expect("address");
    let path = |scene: &mut Scene, remote: SocketAddr| Path {
        local,
        remote,
        id: scene.only().keys.id.clone(),
        traffic_class: 0,
        flow_label: 0,
    };
    for (remote, want) in [
        (SocketAddr::new(address(4, 2, 77), 1), LegOutcome::NoNeighbour),
        (SocketAddr::from(([192, 0, 2, 1], 1)), LegOutcome::NoRoute),
        (SocketAddr::new(address(4, 2, 1), 1), LegOutcome::NoRoute),
        (good, LegOutcome::Sent),
    ] {
        let path = path(&mut scene, remote);
        scene.only().downstream.set_path(&path).expect("a path");
        assert_eq!(scene.try_leg(0), want, "{remote}");
    }
    net::ip(&format!("-n {} link set east mtu {}", network.relay, size + 27));
    assert_eq!(scene.try_leg(0), LegOutcome::TooLarge);
    net::ip(&format!("-n {} link set east mtu {}", network.relay, size + 28));
    assert_eq!(scene.try_leg(0), LegOutcome::Sent);
    scene.only().keys.id = vec![9; 20];
    let path = path(&mut scene, good);
    scene.only().downstream.set_mtu(2000);
    scene.only().downstream.set_path(&path).expect("a path");
    net::ip(&format!("-n {} link set east mtu 1500", network.relay));
    assert_eq!(scene.try_leg(0), LegOutcome::Sent, "another connection ID");
}

#[test]
fn removed_means_gone() {
    if !root("removed_means_gone") {
        return;
    }
    let network = Network::new("rem");
    let mut scene = Scene::new(&network, 4, &[4, 6], Suite::ChaCha20Poly1305, 3, 1);
    attach(&network, &scene.relay, "west");
    scene.slots.clear();
    let mut slot = scene.upstream.slot(STREAMS[0].upstream);
    let keys: Vec<_> = scene
        .subscribers
        .iter()
        .map(|subscriber| slot.add(&subscriber.downstream, &LEG).expect("a leg"))
        .collect();
    let mut keys: Vec<_> = keys.into_iter().enumerate().collect();
    // Middle, last, only.
    for remove in [None, Some(1), Some(2), Some(0)] {
        if let Some(remove) = remove {
            let at = keys.iter().position(|(subscriber, _)| *subscriber == remove).expect("a leg");
            slot.remove(keys.remove(at).1).expect("removed");
        }
        let chunk = scene.chunk(100);
        let number = scene.next_number();
        let packet = scene.publisher.seal((0, number), 1, &chunk.encode());
        let got: Vec<_> = scene.send(&packet).iter().map(|packet| packet.downstream).collect();
        let want: Vec<_> = keys.iter().map(|(i, _)| scene.subscribers[*i].downstream.id()).collect();
        assert_eq!(got, want);
    }
    // First of two; then a downstream that its leg outlives.
    let first = slot.add(&scene.subscribers[0].downstream, &LEG).expect("a leg");
    slot.add(&scene.subscribers[1].downstream, &LEG).expect("a leg");
    slot.remove(first).expect("removed");
    let number = scene.next_number();
    let frames = scene.chunk(100).encode();
    let got = scene.send(&scene.publisher.seal((0, number), 1, &frames));
    assert_eq!(got.len(), 1);
    assert_eq!(got[0].downstream, scene.subscribers[1].downstream.id());
    scene.subscribers.clear();
    let number = scene.next_number();
    assert_eq!(scene.send(&scene.publisher.seal((0, number), 1, &frames)), []);
    assert_eq!(scene.relay.counters().expect("counters").legs(LegOutcome::Gone), 1);
    // The slot, the connection ID.
    drop(slot);
    let number = scene.next_number();
    assert_eq!(scene.send(&scene.publisher.seal((0, number), 1, &frames)), []);
    assert_eq!(scene.relay.counters().expect("counters").packets(Outcome::NoSlot), 2);
    scene.upstream.remove_id(&scene.publisher.id).expect("removed");
    let number = scene.next_number();
    assert_eq!(scene.send(&scene.publisher.seal((0, number), 1, &frames)), []);
    assert_eq!(scene.relay.counters().expect("counters").packets(Outcome::UnknownId), 1);
}

#[test]
fn budget_is_shared_in_order() {
    if !root("budget_is_shared_in_order") {
        return;
    }
    let network = Network::new("bud");
    let mut scene = Scene::new(&network, 4, &[4], Suite::ChaCha20Poly1305, 3, 1);
    let config =
        Config { ports: vec![PORT], id_len: ID_LEN, max_legs_per_run: 4, max_runs: 1, ..Config::default() };
    scene.rebuild(&network, &config);
    attach(&network, &scene.relay, "west");
    for (chunks, sent, outcome) in [(1, 3, Outcome::Forwarded), (2, 4, Outcome::OverBudget)] {
        let frames: Vec<u8> = (0..chunks).flat_map(|_| scene.chunk(50).encode()).collect();
        let before = scene.relay.counters().expect("counters");
        let number = scene.next_number();
        assert_eq!(scene.send(&scene.publisher.seal((0, number), 1, &frames)).len(), sent);
        let counted = scene.relay.counters().expect("counters").since(&before);
        assert_eq!((counted.packets(outcome), counted.legs(LegOutcome::Sent)), (1, sent as u64));
    }
}

/// Whoever sees the packet in userspace also finds all of its registrations.
#[test]
fn a_fan_out_beyond_the_budget_goes_on_in_further_runs() {
    if !root("a_fan_out_beyond_the_budget_goes_on_in_further_runs") {
        return;
    }
    for (name, family, offload) in [("f4", 4, true), ("f6", 6, false)] {
        let network = Network::new(name);
        net::set_checksum_offload(&network.publisher, "eth", offload);
        net::set_checksum_offload(&network.relay, "east", !offload);
        let config = Config { ports: vec![PORT], id_len: ID_LEN, max_legs_per_run: 4, ..Config::default() };
        let mut scene = Scene::with_config(&config, &network, family, &[4, 6], Suite::ChaCha20Poly1305, 7, 1);
        attach(&network, &scene.relay, "west");
        scene.capture.check();
        for (chunks, further) in [(1, 1), (2, 3), (8, 13)] {
            let chunks: Vec<_> = (0..chunks).map(|_| scene.chunk(100)).collect();
            let frames: Vec<u8> = chunks.iter().flat_map(Chunk::encode).collect();
            let before = scene.relay.counters().expect("counters");
            let number = scene.next_number();
            let forwarded = scene.send(&scene.publisher.seal((0, number), 1, &frames));
            scene.expect(&chunks, &forwarded);
            assert_eq!(scene.capture.check(), 7 * chunks.len());
            let counted = scene.relay.counters().expect("counters").since(&before);
            assert_eq!(counted.packets(Outcome::Continued), 1);
            let runs = FurtherRun::ALL.map(|outcome| counted.further_runs(outcome));
            assert_eq!(runs, [1, further - 1, 0]);
        }
    }
}

#[test]
fn what_is_left_after_the_last_run_is_for_userspace() {
    if !root("what_is_left_after_the_last_run_is_for_userspace") {
        return;
    }
    let network = Network::new("lft");
    let config =
        Config { ports: vec![PORT], id_len: ID_LEN, max_legs_per_run: 2, max_runs: 3, ..Config::default() };
    let mut scene = Scene::with_config(&config, &network, 4, &[4], Suite::Aes128Gcm, 7, 1);
    attach(&network, &scene.relay, "west");
    let chunk = scene.chunk(100);
    let number = scene.next_number();
    let forwarded = scene.send(&scene.publisher.seal((0, number), 1, &chunk.encode()));
    scene.subscribers.truncate(6);
    scene.expect(&[chunk], &forwarded);
    let counters = scene.relay.counters().expect("counters");
    assert_eq!(FurtherRun::ALL.map(|outcome| counters.further_runs(outcome)), [0, 1, 1]);
}

#[test]
fn all_runs_of_a_packet_are_traced_or_none() {
    if !root("all_runs_of_a_packet_are_traced_or_none") {
        return;
    }
    let network = Network::new("trc");
    let config =
        Config { ports: vec![PORT], id_len: ID_LEN, max_legs_per_run: 2, max_runs: 3, ..Config::default() };
    let mut scene = Scene::with_config(&config, &network, 4, &[4], Suite::ChaCha20Poly1305, 7, 1);
    attach(&network, &scene.relay, "west");
    let every = NonZero::new(2).expect("not 0");
    scene.relay.set_tracing(Some(Tracing { every, track: None, session: None }));
    for number in 0..4 {
        let frames = scene.chunk(100).encode();
        let forwarded = scene.send(&scene.publisher.seal((0, number), 1, &frames));
        let mut events = Vec::new();
        assert_eq!(scene.relay.drain_events(|event| events.push(event)), 0);
        if number % 2 == 1 {
            assert_eq!(events, []);
            continue;
        }
        let What::Packet { outcome: Outcome::OverBudget, .. } = events.pop().expect("the last run").what
        else {
            panic!("{events:?}");
        };
        assert!(
            events.iter().all(|event| event.received == number && event.arrived_ns == events[0].arrived_ns)
        );
        let sent = events.iter().map(|event| match event.what {
            What::Copy { outcome: LegOutcome::Sent, sent: Some(sent), .. } => sent,
            other => panic!("{other:?}"),
        });
        assert!(sent.eq(forwarded.iter().map(|packet| (packet.number, packet.size))));
        assert_eq!(forwarded.len(), 6);
    }
}

#[test]
fn many_streams_in_a_packet() {
    if !root("many_streams_in_a_packet") {
        return;
    }
    let (_network, mut scene) = simple("str");
    for (streams, sent, outcome) in [(8, 8, Outcome::Forwarded), (9, 8, Outcome::OverBudget)] {
        let chunks: Vec<_> = (0..streams).map(|len| scene.chunk(len + 1)).collect();
        let frames: Vec<u8> = chunks.iter().flat_map(Chunk::encode).collect();
        let before = scene.relay.counters().expect("counters");
        let number = scene.next_number();
        let forwarded = scene.send(&scene.publisher.seal((0, number), 1, &frames));
        scene.expect(&chunks[..sent], &forwarded);
        assert_eq!(scene.relay.counters().expect("counters").since(&before).packets(outcome), 1);
    }
}

#[test]
fn nothing_is_sent_that_cannot_be_registered() {
    if !root("nothing_is_sent_that_cannot_be_registered") {
        return;
    }
    let network = Network::new("rng");
    net::set_checksum_offload(&network.publisher, "eth", false);
    let mut scene = Scene::new(&network, 4, &[4], Suite::ChaCha20Poly1305, 1, 1);
    let config = Config { ports: vec![PORT], id_len: ID_LEN, max_waiting: 1, ..Config::default() };
    scene.rebuild(&network, &config);
    attach(&network, &scene.relay, "west");
    const PACKETS: u64 = 2000;
    for _ in 0..PACKETS {
        let number = scene.next_number();
        let frames = scene.chunk(9).encode();
        let packet = scene.publisher.seal((0, number), 2, &frames);
        scene.from.send(&packet).expect("send");
        assert_eq!(scene.to.recv(&mut [0; 2048]).expect("the original"), packet.len());
    }
    let counters = scene.relay.counters().expect("counters");
    let (sent, declined) = (counters.legs(LegOutcome::Sent), counters.legs(LegOutcome::RingFull));
    assert!(sent > 1000 && declined > 0, "{counters:?}");
    assert_eq!(sent + declined, PACKETS);
    let mut numbers = Vec::new();
    scene.relay.drain(|packet| numbers.push(packet.number));
    assert!(numbers.into_iter().eq(0..sent));
    assert_eq!(scene.only().downstream.number().load(Ordering::SeqCst), sent);
    assert_eq!(scene.only().downstream.outcome(LegOutcome::RingFull), declined);
    assert_eq!(scene.only().downstream.data(), sent * 9);
    // Once it is drained, it goes on.
    let number = scene.next_number();
    let frames = scene.chunk(9).encode();
    assert_eq!(scene.send(&scene.publisher.seal((0, number), 2, &frames)).len(), 1);
}

#[test]
fn detached_and_attached_again() {
    if !root("detached_and_attached_again") {
        return;
    }
    let (network, mut scene) = simple("det");
    scene.relay_with(LEG);
    let send = |scene: &mut Scene| {
        let number = scene.next_number();
        let frames = scene.chunk(9).encode();
        let packet = scene.publisher.seal((0, number), 1, &frames);
        (scene.send(&packet).len(), packet)
    };
    assert_eq!(send(&mut scene).0, 1);
    scene.relay.detach();
    let mut missed = Vec::new();
    for number in 1..300 {
        let (sent, packet) = send(&mut scene);
        assert_eq!(sent, 0);
        scene.upstream.observe(number);
        missed.push(packet);
    }
    attach(&network, &scene.relay, "west");
    // What went by then is not forwarded later; what is new is.
    for packet in &missed[250..] {
        assert_eq!(scene.send(packet), []);
    }
    assert_eq!(scene.relay.counters().expect("counters").packets(Outcome::Replayed), 49);
    assert_eq!(send(&mut scene).0, 1);
    // Handles outlive the relay; nothing stays attached.
    let Scene { relay, subscribers, .. } = &mut scene;
    let config = Config { ports: vec![PORT], id_len: ID_LEN, ..Config::default() };
    drop(std::mem::replace(relay, Relay::load(&config).expect("another relay")));
    let downstream = &subscribers[0].downstream;
    let next = downstream.number().fetch_add(1, Ordering::SeqCst);
    assert_eq!(next, 2);
    assert_eq!(send(&mut scene).0, 0);
    assert_eq!(scene.only().downstream.number().load(Ordering::SeqCst), 3);
}

#[test]
fn entries_are_reused_in_turn() {
    if !root("entries_are_reused_in_turn") {
        return;
    }
    let network = Network::new("reu");
    let mut scene = Scene::new(&network, 4, &[4], Suite::ChaCha20Poly1305, 1, 1);
    let config = Config {
        ports: vec![PORT],
        id_len: ID_LEN,
        max_upstreams: 2,
        max_downstreams: 2,
        max_slots: 1,
        max_legs: 2,
        ..Config::default()
    };
    scene.rebuild(&network, &config);
    attach(&network, &scene.relay, "west");
    let path = Path {
        local: SocketAddr::new(address(4, 2, 1), PORT),
        remote: SocketAddr::new(address(4, 2, 2), 1),
        id: vec![],
        traffic_class: 0,
        flow_label: 0,
    };
    let mut ids = std::collections::HashSet::new();
    for _ in 0..50 {
        scene.slots.clear();
        scene.relay.settle().expect("settled");
        let other = scene.relay.downstream(&path, 1452, 0).expect("the second");
        assert!(scene.relay.downstream(&path, 1452, 0).is_err(), "a third");
        assert!(ids.insert(other.id()), "an ID twice");
        let upstream = scene.relay.upstream(0).expect("the second");
        assert!(scene.relay.upstream(0).is_err(), "a third");
        drop(upstream);
        let key = scene.relay_with(LEG);
        let mut slot = scene.slots.remove(0);
        slot.add(&other, &LEG).expect("the second");
        assert!(slot.add(&other, &LEG).is_err(), "a third");
        slot.remove(key).expect("removed");
        assert!(scene.upstream.slot(99).add(&other, &LEG).is_err(), "a second slot");
        // The first leg is another downstream's now; that has no keys.
        let number = scene.next_number();
        let frames = scene.chunk(9).encode();
        assert_eq!(scene.send(&scene.publisher.seal((0, number), 1, &frames)), []);
        assert_eq!(other.outcome(LegOutcome::NoKeys) + other.outcome(LegOutcome::Window), 1);
    }
}

/// Whether the tag comes back is seen by a probe behind the program: taps see packets before it.
#[test]
fn tagged_frames() {
    if !root("tagged_frames") {
        return;
    }
    let (network, mut scene) = simple("vln");
    scene.relay.detach();
    let mut probe = Probe::load(&probe::Config::default()).expect("the probe loads");
    let west = net::ifindex(&network.relay, "west");
    inside(&network.relay, || probe.attach(west).expect("the probe attaches"));
    attach(&network, &scene.relay, "west");
    let wire = RawSender::new(&network.publisher, "eth");
    let to = net::link_address(&network.relay, "west");
    scene.capture.check();
    for len in [0, 1, 20, 100, 1200] {
        let chunk = Chunk { fin: true, ..scene.chunk(len) };
        let number = scene.next_number();
        let packet = scene.publisher.seal((0, number), 3, &chunk.encode());
        let (from, at) = (scene.from.local_addr().expect("address"), scene.to.local_addr().expect("address"));
        wire.send(&net::frame(to, Some(7), (from, at), &packet));
        let mut forwarded = Vec::new();
        let mut buffer = [0; 2048];
        let got = scene.only().socket.recv(&mut buffer).expect("a packet");
        scene.relay.drain(|packet| forwarded.push(packet));
        let [sent] = forwarded[..] else { panic!("{forwarded:?}") };
        let moved = Chunk { stream: STREAMS[0].downstream, ..chunk };
        assert_eq!(buffer[..got], scene.only().keys.build((0, sent.number), &moved.encode()));
        assert_eq!(scene.capture.check(), 1);
        let samples: Vec<_> =
            probe.read().expect("samples").into_iter().filter(|s| s.vlan.is_some()).collect();
        let [sample] = samples[..] else { panic!("{samples:?}") };
        assert_eq!((sample.vlan, sample.source, sample.destination), (Some(7), from, at));
        assert_eq!(sample.payload_bytes as usize, packet.len());
    }
}

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

/// Run time and runs of the program, by the kernel's own statistics.
fn run_time() -> (u64, u64) {
    let programs = libbpf_rs::query::ProgInfoIter::default();
    let relay = programs.filter(|program| program.name == "relay_ingress").max_by_key(|program| program.id);
    let relay = relay.expect("the program");
    (relay.run_time_ns, relay.run_cnt)
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
    }
    // A long run of them is heard of in between.
    scene.slots[0].set_alone(true);
    let before = (quiet.packets(), quiet.others());
    for _ in 0..64 {
        let number = scene.next_number();
        scene.from.send(&scene.publisher.seal((0, number), 4, &frames)).expect("send");
    }
    let mut buffer = [0; 2048];
    for (socket, packets) in [(&scene.to, 2), (&socket, 62)] {
        for at in 0..packets {
            assert!(socket.recv(&mut buffer).is_ok(), "{at} of {packets}");
        }
    }
    assert_eq!((quiet.packets() - before.0, quiet.others() - before.1), (62, 2));
    // Without the socket all of them go where they were sent.
    drop(socket);
    let number = scene.next_number();
    let packet = scene.publisher.seal((0, number), 4, &frames);
    assert_eq!(scene.send(&packet).len(), 1 + 64 + 6);
}

/// `cargo test -p millrace-bpf --test relay -- --ignored --nocapture run_time`, on a machine that does nothing
/// else and with `sysctl kernel.bpf_stats_enabled=1`.
#[test]
#[ignore = "measures, which takes a quiet machine"]
fn run_time_per_packet() {
    if !root("run_time_per_packet") {
        return;
    }
    for suite in quic::SUITES {
        for legs in [0, 1, 8, 32] {
            for ahead in [false, true] {
                let time = measure(suite, legs, ahead);
                println!("{suite:?}, {legs} legs, keystreams ahead {ahead}: {time} ns");
            }
        }
    }
}

/// Mean run time for packets with 1200 bytes of one stream, nanoseconds.
fn measure(suite: Suite, legs: usize, ahead: bool) -> u64 {
    const PACKETS: u64 = 4000;
    let network = Network::new("rt");
    let mut scene = Scene::new(&network, 4, &[4], suite, 0, 1);
    let subscriber = |_| subscriber(&network, &scene.relay, 4, suite, &mut scene.rng);
    scene.subscribers = (0..legs).map(subscriber).collect();
    scene.slots = vec![slot(&scene.upstream, &STREAMS[0], 0, &scene.subscribers)];
    attach(&network, &scene.relay, "west");
    let chunk = scene.chunk(1200);
    let before = run_time();
    for number in 0..PACKETS {
        if ahead && number % 16 == 0 {
            let want = Want { len: 32, text_bytes: 1300 };
            scene.upstream.refill(0, want, scene.publisher.keystreams());
            for subscriber in &mut scene.subscribers {
                subscriber.downstream.refill(want, subscriber.keys.keystreams());
            }
        }
        let packet = scene.publisher.seal((0, number), 2, &chunk.encode());
        assert_eq!(scene.send(&packet).len(), legs);
    }
    let after = run_time();
    (after.0 - before.0) / (after.1 - before.1).max(1)
}
