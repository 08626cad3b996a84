//! Publisher - relay - subscribers, with egresses for some streams, and packets through them.

use std::net::UdpSocket;
use std::sync::atomic::Ordering;

use fastrand::Rng;
use millrace_quic::keys::Suite;
use millrace_relay_kernel::program::{
    Config, Counters, EgressKey, EgressOutcome, EgressRecord, Forwarded, Outcome, PositionRecord, Relay,
    SlotRecord, UpstreamRecord, Want,
};

use crate::net::{self, Capture, Network, address};
use crate::peers::{self, PORT, Subscriber, attach};
use crate::quic::{self, Chunk, Direction};

pub const ID_LEN: usize = 8;
/// Of the packet number word.
pub const NUMBER_MASK: u64 = (1 << 48) - 1;

/// A stream that arrives, and what it is downstream.
#[derive(Clone, Copy)]
pub struct Stream {
    pub upstream: u64,
    pub downstream: u64,
    pub shift: i64,
}

pub const STREAMS: [Stream; 3] = [
    Stream { upstream: 2, downstream: 3, shift: 0 },
    Stream { upstream: 70_002, downstream: 0x4003, shift: -20 },
    Stream { upstream: 1 << 40 | 2, downstream: 1 << 35 | 3, shift: 1 << 20 },
];
/// Upstream offset from which on every stream has an egress; above the largest negative shift.
pub const FROM: u64 = 20;
/// Where the streams stand before each packet, unless something else is said.
pub const OFFSET: u64 = 1000;

/// Relay, one upstream, some subscribers with an egress for each of `STREAMS`.
pub struct Scene {
    pub relay: Relay,
    pub upstream: UpstreamRecord,
    pub slots: Vec<SlotRecord>,
    pub publisher: Direction,
    pub subscribers: Vec<Subscriber>,
    /// Where the publisher's packets come from, and where they are read.
    pub from: UdpSocket,
    pub to: UdpSocket,
    pub capture: Capture,
    pub sent: u64,
    /// Nothing was sent to the one egress yet.
    pub fresh: bool,
    pub rng: Rng,
}

impl Scene {
    /// `family`: of the upstream; the subscribers' alternate when there are two in `families`.
    pub fn new(
        network: &Network,
        family: u8,
        families: &[u8],
        suite: Suite,
        egresses: usize,
        seed: u64,
    ) -> Self {
        let config = Config { ports: vec![PORT], id_len: ID_LEN, ..Config::default() };
        Self::with_config(&config, network, family, families, suite, egresses, seed)
    }

    pub fn with_config(
        config: &Config,
        network: &Network,
        family: u8,
        families: &[u8],
        suite: Suite,
        egresses: usize,
        seed: u64,
    ) -> Self {
        let mut rng = Rng::with_seed(seed);
        let relay = Relay::load(config).expect("the relay loads");
        let publisher = Direction::new(suite, ID_LEN, &mut rng);
        let upstream = peers::upstream(&relay, &publisher);
        let subscribers: Vec<_> = (0..egresses)
            .map(|i| {
                subscriber(network, &relay, families[i % families.len()], quic::SUITES[i / 2 % 2], &mut rng)
            })
            .collect();
        let slots =
            STREAMS.iter().enumerate().map(|(tag, stream)| slot(&upstream, stream, tag, &subscribers));
        let slots = slots.collect();
        let (from, to) = peers::sockets(network, (address(family, 1, 2), address(family, 1, 1)));
        let capture = Capture::new(&network.subscriber);
        Self { relay, upstream, slots, publisher, subscribers, from, to, capture, sent: 0, fresh: true, rng }
    }

    /// Sends one packet and returns what was registered. The packet must reach userspace as it was.
    pub fn send(&mut self, packet: &[u8]) -> Vec<Forwarded> {
        self.from.send(packet).expect("send");
        peers::receive_original(&self.to, packet, &self.relay)
    }

    /// What became of all packets whose originals have come.
    pub fn counted(&self) -> Counters {
        self.relay.counters().expect("counters") // exact: the program counts a packet before it lets the original pass
    }

    /// Each chunk must have come to each subscriber, as the userspace builder would have sent it.
    pub fn expect(&mut self, chunks: &[Chunk], forwarded: &[Forwarded]) {
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

    /// A packet with up to `room` bytes of frames, and the chunks in it that have egresses.
    pub fn generate(&mut self, room: usize) -> (Vec<u8>, Vec<Chunk>) {
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
            let (which, bits) = (rng.usize(..3), rng.u32(1..58));
            let stream = STREAMS[which];
            let before = chunks.iter().rev().find(|chunk: &&Chunk| chunk.stream == stream.upstream);
            // Each stream goes on where it was in this packet.
            let offset = match before {
                Some(Chunk { fin: true, .. }) => continue,
                Some(before) => before.offset + before.data.len() as u64,
                None => FROM + rng.u64(..1 << bits),
            };
            if before.is_none() {
                self.slots[which].set_position(&PositionRecord::opaque(offset));
            }
            let fin = rng.bool();
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
    pub fn compute_ahead(&mut self) {
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

    /// Has all streams stand at an offset.
    pub fn stand_at(&mut self, offset: u64) {
        self.slots.iter_mut().for_each(|slot| slot.set_position(&PositionRecord::opaque(offset)));
    }

    /// Of a packet whose streams go on at `OFFSET`.
    pub fn next_number(&mut self) -> u64 {
        self.stand_at(OFFSET);
        self.sent += 1;
        self.sent - 1
    }
}

pub fn subscriber(network: &Network, relay: &Relay, family: u8, suite: Suite, rng: &mut Rng) -> Subscriber {
    let at = (network.subscriber.as_str(), address(family, 2, 1), address(family, 2, 2));
    Subscriber::new(network, relay, at, (suite, rng.usize(..=20)), rng)
}

pub fn slot(
    upstream: &UpstreamRecord,
    stream: &Stream,
    tag: usize,
    subscribers: &[Subscriber],
) -> SlotRecord {
    let mut slot = upstream.slot(stream.upstream);
    let egress = EgressRecord {
        stream_id: stream.downstream,
        shift: stream.shift,
        from: FROM,
        max_offset: 1 << 62,
        tag: tag as u64,
        ..EGRESS
    };
    slot.set_position(&PositionRecord::opaque(OFFSET));
    for subscriber in subscribers {
        slot.add(&subscriber.downstream, &egress).expect("an egress");
    }
    slot
}

impl Scene {
    pub fn only(&mut self) -> &mut Subscriber {
        &mut self.subscribers[0]
    }

    /// Some bytes of the first stream.
    pub fn chunk(&mut self, len: usize) -> Chunk {
        let data = quic::bytes(len, &mut self.rng);
        Chunk { stream: STREAMS[0].upstream, offset: OFFSET, data, fin: false }
    }

    /// `count` chunks, one behind the other.
    pub fn chunks(&mut self, count: usize, len: usize) -> Vec<Chunk> {
        let offset = |at: usize| OFFSET + (at * len) as u64;
        (0..count).map(|at| Chunk { offset: offset(at), ..self.chunk(len) }).collect()
    }

    /// The same bytes each time.
    pub fn chunk_of(&self, len: usize) -> Chunk {
        Chunk { stream: STREAMS[0].upstream, offset: OFFSET, data: vec![5; len], fin: false }
    }

    /// Sends a chunk of 1000 bytes and returns the outcome of its one egress. What is not sent has no trace but the
    /// count, on the connection too.
    pub fn try_egress(&mut self, generation: u16) -> EgressOutcome {
        let before = self.counted();
        let shared = |subscriber: &Subscriber| {
            let downstream = &subscriber.downstream;
            (downstream.number().load(Ordering::SeqCst), downstream.bytes(), downstream.data())
        };
        let state = shared(&self.subscribers[0]);
        let chunk = self.chunk(1000);
        let number = self.next_number();
        let forwarded = self.send(&self.publisher.seal((generation, number), 2, &chunk.encode()));
        let counted = self.counted().since(&before);
        assert_eq!(counted.packets(Outcome::Forwarded), 1, "{counted:?}");
        let mut outcomes = EgressOutcome::ALL.into_iter().filter(|outcome| counted.egresses(*outcome) > 0);
        let outcome = outcomes.next().expect("an outcome");
        assert_eq!((counted.egresses(outcome), outcomes.next()), (1, None), "{counted:?}");
        if outcome == EgressOutcome::Sent {
            self.expect(&[chunk], &forwarded);
            let size = u64::from(forwarded[0].size);
            // What came again is not counted again.
            let credit = if std::mem::take(&mut self.fresh) { 1000 } else { 0 };
            assert_eq!(shared(&self.subscribers[0]), (state.0 + 1, state.1 + size, state.2 + credit));
            assert_eq!(forwarded[0].credit, credit);
        } else {
            assert_eq!(shared(&self.subscribers[0]), state, "{outcome:?}");
            assert_eq!(forwarded, []);
        }
        assert_eq!(self.capture.check(), usize::from(outcome == EgressOutcome::Sent));
        outcome
    }

    /// The UDP payload that `try_egress` makes.
    pub fn size(&self) -> u64 {
        let chunk = Chunk { stream: STREAMS[0].downstream, offset: 1000, data: vec![0; 1000], fin: false };
        self.subscribers[0].keys.build((0, 0), &chunk.encode()).len() as u64
    }

    /// The same connections and streams on a relay of another configuration.
    pub fn rebuild(&mut self, network: &Network, config: &Config) {
        let count = self.subscribers.len();
        self.slots.clear();
        self.subscribers.clear();
        self.relay = Relay::load(config).expect("the relay loads");
        self.upstream = peers::upstream(&self.relay, &self.publisher);
        let suite = Suite::ChaCha20Poly1305;
        self.subscribers =
            (0..count).map(|_| subscriber(network, &self.relay, 4, suite, &mut self.rng)).collect();
        self.slots = vec![slot(&self.upstream, &STREAMS[0], 0, &self.subscribers)];
    }

    /// One slot for the first stream in place of those that are there.
    pub fn relay_with(&mut self, egress: EgressRecord) -> EgressKey {
        self.slots.clear();
        let mut slot = self.upstream.slot(STREAMS[0].upstream);
        slot.set_position(&PositionRecord::opaque(OFFSET));
        let key = slot.add(&self.subscribers[0].downstream, &egress).expect("an egress");
        self.slots.push(slot);
        self.fresh = true;
        key
    }
}

pub const EGRESS: EgressRecord = EgressRecord {
    stream_id: 3,
    shift: 0,
    from: OFFSET,
    max_offset: 2000,
    tag: 0,
    level: 0,
    track: 0,
    group: 0,
};

/// IPv4, one subscriber, ChaCha20-Poly1305.
pub fn simple(name: &str) -> (Network, Scene) {
    let network = Network::new(name);
    net::set_checksum_offload(&network.publisher, "eth", false);
    let scene = Scene::new(&network, 4, &[4], Suite::ChaCha20Poly1305, 1, 1);
    attach(&network, &scene.relay, "west");
    (network, scene)
}
