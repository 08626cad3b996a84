//! A publisher, a relay and subscribers for the tests, with packets of streams that are forwarded.

use std::net::UdpSocket;
use std::sync::atomic::Ordering;

use fastrand::Rng;
use millrace_quic::keys::KeySuite;
use millrace_relay_kernel::program::{
    Config, EgressKey, EgressOutcome, EgressRecord, Forwarded, Outcome, Position, RelayCounters,
    RelayProgram, SlotRecord, UpstreamRecord, WantedRing,
};

use crate::net::{self, NamespaceNetwork, PacketCapture, address};
use crate::peers::{self, KernelSubscriber, PORT, SubscriberPlace, attach};
use crate::quic::{self, DirectionKeys, StreamPart};

pub const ID_LEN: usize = 8;
/// Mask of the packet number in `DownstreamRecord::number`. The other bits are the key generation.
pub const NUMBER_MASK: u64 = (1 << 48) - 1;

/// A stream of the publisher, and the stream that subscribers get for it.
#[derive(Clone, Copy)]
pub struct SceneStream {
    pub upstream: u64,
    pub downstream: u64,
    pub shift: i64,
}

pub const STREAMS: [SceneStream; 3] = [
    SceneStream { upstream: 2, downstream: 3, shift: 0 },
    SceneStream { upstream: 70_002, downstream: 0x4003, shift: -20 },
    SceneStream { upstream: 1 << 40 | 2, downstream: 1 << 35 | 3, shift: 1 << 20 },
];
/// The upstream offset from which subscribers get each stream. It is large enough that no stream's shift (downstream
/// minus upstream offset) makes a downstream offset negative.
pub const FROM: u64 = 20;
/// The stream offset that the program expects next in each stream, unless a test sets another one.
pub const OFFSET: u64 = 1000;

/// A relay with one upstream connection. Each subscriber gets a copy of each stream in `STREAMS`.
pub struct RelayScene {
    pub relay: RelayProgram,
    pub upstream: UpstreamRecord,
    pub slots: Vec<SlotRecord>,
    pub publisher: DirectionKeys,
    pub subscribers: Vec<KernelSubscriber>,
    /// The publisher's socket.
    pub from: UdpSocket,
    /// The relay's main socket.
    pub to: UdpSocket,
    pub capture: PacketCapture,
    pub sent: u64,
    /// True until the only subscriber has received its first stream bytes.
    pub fresh: bool,
    pub rng: Rng,
}

impl RelayScene {
    /// `family` (4 or 6) is the address family of the publisher's connection. The subscribers get their address
    /// families from `families`, in rotation.
    pub fn new(
        network: &NamespaceNetwork,
        family: u8,
        families: &[u8],
        suite: KeySuite,
        egresses: usize,
        seed: u64,
    ) -> Self {
        let config = Config { ports: vec![PORT], id_len: ID_LEN, ..Config::default() };
        Self::with_config(&config, network, family, families, suite, egresses, seed)
    }

    pub fn with_config(
        config: &Config,
        network: &NamespaceNetwork,
        family: u8,
        families: &[u8],
        suite: KeySuite,
        egresses: usize,
        seed: u64,
    ) -> Self {
        let mut rng = Rng::with_seed(seed);
        let relay = RelayProgram::load(config).expect("the relay loads");
        let publisher = DirectionKeys::new(suite, ID_LEN, &mut rng);
        let upstream = peers::upstream(&relay, &publisher);
        let subscribers: Vec<_> = (0..egresses)
            .map(|i| {
                subscriber(network, &relay, families[i % families.len()], quic::SUITES[i / 2 % 2], &mut rng)
            })
            .collect();
        let slots =
            STREAMS.iter().enumerate().map(|(tag, stream)| slot(&upstream, stream, tag, &subscribers));
        let slots = slots.collect();
        let (from, to) = peers::sockets(network, address(family, 1, 2), address(family, 1, 1));
        let capture = PacketCapture::new(&network.subscriber);
        Self { relay, upstream, slots, publisher, subscribers, from, to, capture, sent: 0, fresh: true, rng }
    }

    /// Sends one packet, and returns the copies that the program reports as sent. Userspace must get the packet
    /// unchanged.
    pub fn send(&mut self, packet: &[u8]) -> Vec<Forwarded> {
        self.from.send(packet).expect("send");
        peers::receive_original(&self.to, packet, &self.relay)
    }

    /// Returns the counted outcomes of all packets whose originals have arrived.
    pub fn counted(&self) -> RelayCounters {
        // exact: the BPF program counts a packet before it passes the packet on, and all packets have arrived
        self.relay.counters().expect("counters")
    }

    /// Checks that each subscriber got each part of a stream in `chunks`, in a packet that equals the one that the
    /// userspace builder makes.
    pub fn expect(&mut self, chunks: &[StreamPart], forwarded: &[Forwarded]) {
        let mut registered = forwarded.iter();
        for chunk in chunks {
            let (tag, stream) = (0..)
                .zip(STREAMS)
                .find(|(_, stream)| stream.upstream == chunk.stream)
                .expect("a stream with a slot");
            for subscriber in &self.subscribers {
                let sent = registered.next().expect("a registration");
                let offset = chunk.offset.wrapping_add_signed(stream.shift);
                let moved = StreamPart { stream: stream.downstream, offset, ..chunk.clone() };
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

    /// Returns random frames of up to `room` bytes in total for a packet, and the parts of streams in these frames that
    /// are forwarded.
    pub fn generate(&mut self, room: usize) -> (Vec<u8>, Vec<StreamPart>) {
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
            let which = rng.usize(..3);
            let bits = rng.u32(1..58);
            let stream = STREAMS[which];
            let before = chunks.iter().rev().find(|chunk: &&StreamPart| chunk.stream == stream.upstream);
            // If the packet already has a frame of this stream, the next frame continues at that frame's end.
            let offset = match before {
                Some(StreamPart { fin: true, .. }) => continue,
                Some(before) => before.offset + before.data.len() as u64,
                None => FROM + rng.u64(..1 << bits),
            };
            if before.is_none() {
                self.slots[which].set_position(&Position::opaque(offset));
            }
            let fin = rng.bool();
            let chunk = StreamPart { stream: stream.upstream, offset, data: quic::bytes(len, rng), fin };
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

    /// Sometimes computes keystreams before their packets arrive. The number of keystreams is random, and some
    /// keystreams are too short for long packets.
    pub fn compute_ahead(&mut self) {
        let rng = &mut self.rng;
        let mut pick = || {
            let want =
                WantedRing { len: [0, 1, 8, 16, 32, 32][rng.usize(..6)], text_bytes: rng.usize(..1500) };
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

    /// Sets the stream offset that the program expects next in all streams.
    pub fn stand_at(&mut self, offset: u64) {
        self.slots.iter_mut().for_each(|slot| slot.set_position(&Position::opaque(offset)));
    }

    /// Returns the next packet number. Resets all streams, so that the program expects `OFFSET` next.
    pub fn next_number(&mut self) -> u64 {
        self.stand_at(OFFSET);
        self.sent += 1;
        self.sent - 1
    }
}

pub fn subscriber(
    network: &NamespaceNetwork,
    relay: &RelayProgram,
    family: u8,
    suite: KeySuite,
    rng: &mut Rng,
) -> KernelSubscriber {
    let at = SubscriberPlace {
        namespace: &network.subscriber,
        local: address(family, 2, 1),
        remote: address(family, 2, 2),
    };
    KernelSubscriber::new(network, relay, at, suite, rng.usize(..=20), rng)
}

pub fn slot(
    upstream: &UpstreamRecord,
    stream: &SceneStream,
    tag: usize,
    subscribers: &[KernelSubscriber],
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
    slot.set_position(&Position::opaque(OFFSET));
    for subscriber in subscribers {
        slot.add(&subscriber.downstream, &egress).expect("an egress");
    }
    slot
}

impl RelayScene {
    pub fn only(&mut self) -> &mut KernelSubscriber {
        &mut self.subscribers[0]
    }

    /// Returns random bytes of the first stream.
    pub fn chunk(&mut self, len: usize) -> StreamPart {
        let data = quic::bytes(len, &mut self.rng);
        StreamPart { stream: STREAMS[0].upstream, offset: OFFSET, data, fin: false }
    }

    /// Returns `count` consecutive parts of a stream, with `len` bytes each.
    pub fn chunks(&mut self, count: usize, len: usize) -> Vec<StreamPart> {
        let offset = |at: usize| OFFSET + (at * len) as u64;
        (0..count).map(|at| StreamPart { offset: offset(at), ..self.chunk(len) }).collect()
    }

    /// Returns a stream chunk whose bytes are the same at each call.
    pub fn chunk_of(&self, len: usize) -> StreamPart {
        StreamPart { stream: STREAMS[0].upstream, offset: OFFSET, data: vec![5; len], fin: false }
    }

    /// Sends a chunk of 1000 bytes to the only subscriber and returns the outcome of the copy. A copy that is not sent
    /// must change no state but the count of its outcome.
    pub fn try_egress(&mut self, generation: u16) -> EgressOutcome {
        let before = self.counted();
        let shared = |subscriber: &KernelSubscriber| {
            let downstream = &subscriber.downstream;
            (downstream.number().load(Ordering::SeqCst), downstream.bytes(), downstream.data())
        };
        let state = shared(&self.subscribers[0]);
        let chunk = self.chunk(1000);
        let number = self.next_number();
        let forwarded = self.send(&self.publisher.seal(generation, number, 2, &chunk.encode()));
        let counted = self.counted().since(&before);
        assert_eq!(counted.packets(Outcome::Forwarded), 1, "{counted:?}");
        let mut outcomes = EgressOutcome::ALL.into_iter().filter(|outcome| counted.egresses(*outcome) > 0);
        let outcome = outcomes.next().expect("an outcome");
        assert_eq!((counted.egresses(outcome), outcomes.next()), (1, None), "{counted:?}");
        if outcome == EgressOutcome::Sent {
            self.expect(&[chunk], &forwarded);
            let size = u64::from(forwarded[0].size);
            // Stream bytes that were sent before use no further flow control credit.
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

    /// Returns the UDP payload size of the copy that `try_egress` makes.
    pub fn size(&self) -> u64 {
        let chunk =
            StreamPart { stream: STREAMS[0].downstream, offset: 1000, data: vec![0; 1000], fin: false };
        self.subscribers[0].keys.build((0, 0), &chunk.encode()).len() as u64
    }

    /// Makes the same connections and streams with a relay of another configuration.
    pub fn rebuild(&mut self, network: &NamespaceNetwork, config: &Config) {
        let count = self.subscribers.len();
        self.slots.clear();
        self.subscribers.clear();
        self.relay = RelayProgram::load(config).expect("the relay loads");
        self.upstream = peers::upstream(&self.relay, &self.publisher);
        let suite = KeySuite::ChaCha20Poly1305;
        self.subscribers =
            (0..count).map(|_| subscriber(network, &self.relay, 4, suite, &mut self.rng)).collect();
        self.slots = vec![slot(&self.upstream, &STREAMS[0], 0, &self.subscribers)];
    }

    /// Ends the forwarding of all streams. Then forwards the first stream again, to the first subscriber only.
    pub fn relay_with(&mut self, egress: EgressRecord) -> EgressKey {
        self.slots.clear();
        let mut slot = self.upstream.slot(STREAMS[0].upstream);
        slot.set_position(&Position::opaque(OFFSET));
        let key = slot.add(&self.subscribers[0].downstream, &egress).expect("an egress");
        self.slots.push(slot);
        self.fresh = true;
        key
    }
}

/// The settings of a subscriber's copy of the first stream.
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

/// Makes a test setup with a publisher, a relay and one subscriber, over IPv4 and with ChaCha20-Poly1305.
pub fn simple(name: &str) -> (NamespaceNetwork, RelayScene) {
    let network = NamespaceNetwork::new(name);
    net::set_checksum_offload(&network.publisher, "eth", false);
    let scene = RelayScene::new(&network, 4, &[4], KeySuite::ChaCha20Poly1305, 1, 1);
    attach(&network, &scene.relay, "west");
    (network, scene)
}
