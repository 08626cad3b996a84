//! A deterministic link with a reference receiver at its end, for tests.

mod offload;
mod receiver;

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

pub use self::receiver::ReceiverCredit;
use self::{
    offload::SimulatedOffload,
    receiver::{Feedback, ReceivedBytes, ReferenceReceiver},
};
use super::*;
use crate::plane::source::mem::Mem;

pub const MTU: usize = 1200;
/// Arbitrary error codes: the application defines their meaning.
pub const CODES: ResetCodes = ResetCodes { late: 0x22, behind: 0x55, gone: 0x66 };
/// Length of a short header (8-byte connection ID, 4-byte packet number) plus the authentication tag, bytes.
const OVERHEAD: usize = 1 + 8 + 4 + 16;

#[derive(Clone, Copy, Debug)]
pub struct SimLink {
    pub loss: f64,
    pub duplicate: f64,
    pub delay: Duration,
    /// Largest random delay in addition to `delay`, which reorders packets.
    pub jitter: Duration,
    /// Rate towards the receiver in bytes per second. Packets that arrive faster are queued.
    pub rate: Option<u64>,
    /// Size of the queue in front of the rate limit, bytes.
    pub queue: u64,
    /// Length of the queue in bytes above which ECT packets are marked CE.
    pub mark_above: Option<u64>,
    /// True if the link clears ECN marks.
    pub bleaches: bool,
    /// The link drops packets larger than this, bytes.
    pub largest: usize,
}

impl Default for SimLink {
    fn default() -> Self {
        Self {
            loss: 0.0,
            duplicate: 0.0,
            delay: Duration::from_millis(10),
            jitter: Duration::ZERO,
            rate: None,
            queue: 1 << 20,
            mark_above: None,
            bleaches: false,
            largest: usize::MAX,
        }
    }
}

/// A codepoint of ECN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codepoint {
    NotEct,
    Ect0,
    Ce,
}

enum SimArrival {
    /// A packet on the link. `marks` is the ECN codepoint with which it arrives.
    Packet {
        number: u64,
        frames: Option<Vec<u8>>,
        marks: Codepoint,
    },
    AckTimer,
    Feedback(Feedback),
}

pub struct Sim {
    pub now: Instant,
    pub down: Downstream,
    pub link: SimLink,
    pub peer: ReferenceReceiver,
    pub events: Vec<DownstreamEvent>,
    /// Frames of each packet that the data plane sent, in order.
    pub sent: Vec<Vec<u8>>,
    pub next_number: u64,
    /// Mean number of the data plane's packets for each packet of the QUIC stack.
    pub stack_every: u64,
    found_mtu: usize,
    rng: u64,
    arrivals: BinaryHeap<Reverse<(Instant, u64)>>,
    content: HashMap<u64, SimArrival>,
    serial: u64,
    /// Time when the rate-limited link will have sent all packets in its queue.
    busy_until: Instant,
    /// Bytes that the rate-limited link has carried.
    pub carried: u64,
    /// Packets that were dropped because the link's queue was full.
    pub overflowed: u64,
    max_ack_delay: Duration,
    pub offload: SimulatedOffload,
}

/// Returns a new stream over the source, without timeouts.
pub fn stream_of(source: &Arc<Mem>) -> NewStream {
    NewStream {
        source: source.clone(),
        priority: Priority::default(),
        owner: 1,
        object_timeout: None,
        subgroup_timeout: None,
        max_delay: None,
        asked: AskedRange::Nothing,
        label: Label::default(),
    }
}

impl Sim {
    pub fn new(seed: u64, link: SimLink, credit: ReceiverCredit, config: Config) -> Self {
        let start = Instant::now();
        let max_ack_delay = Duration::from_millis(25);
        let limits = PeerLimits {
            max_data: credit.data,
            max_stream_data_uni: credit.stream_data,
            max_streams_uni: credit.streams,
            first_stream_uni: 1,
            max_datagram_frame_size: 1200,
            max_ack_delay,
            is_server: true,
        };
        Self {
            now: start,
            down: Downstream::new(config, limits, start),
            link,
            peer: ReferenceReceiver::new(credit),
            events: Vec::new(),
            sent: Vec::new(),
            next_number: 0,
            stack_every: u64::MAX,
            found_mtu: MTU,
            rng: seed.wrapping_mul(2).wrapping_add(1),
            arrivals: BinaryHeap::new(),
            content: HashMap::new(),
            serial: 0,
            busy_until: start,
            carried: 0,
            overflowed: 0,
            max_ack_delay,
            offload: SimulatedOffload::default(),
        }
    }

    pub fn open(&mut self, source: &Arc<Mem>, subscriber: u8) -> StreamKey {
        self.open_with(source, |stream| stream.priority.subscriber = subscriber)
    }

    pub fn open_with(&mut self, source: &Arc<Mem>, change: impl FnOnce(&mut NewStream)) -> StreamKey {
        let mut stream = stream_of(source);
        change(&mut stream);
        self.down.open(stream)
    }

    /// Opens a stream over a complete source of `len` bytes.
    pub fn open_whole(&mut self, tag: u64, len: u64, subscriber: u8) -> StreamKey {
        let source = Mem::new(tag);
        source.push(len, self.now);
        source.finish(SourceEnd::Fin { at: self.now });
        self.open(&source, subscriber)
    }

    pub fn chance(&mut self, probability: f64) -> bool {
        self.random(1 << 30) < (probability * f64::from(1 << 30)) as u64
    }

    pub fn random(&mut self, below: u64) -> u64 {
        // The pseudorandom number generator is SplitMix64.
        self.rng = self.rng.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.rng;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ z >> 31) % below.max(1)
    }

    /// Sends every packet that may be sent now.
    pub fn transmit(&mut self) {
        self.reclaim_budget();
        loop {
            let mut frames = Vec::new();
            let probing = self.down.recovery.probes() > 0;
            let before = self.down.recovery.in_flight();
            let marks = if self.down.marks() { Codepoint::Ect0 } else { Codepoint::NotEct };
            let Some(content) = self.down.poll_frames(self.now, self.down.mtu() - OVERHEAD, &mut frames)
            else {
                break;
            };
            let size = frames.len() + OVERHEAD;
            assert!(!frames.is_empty() && size <= self.found_mtu, "{size} bytes");
            assert!(probing || before + size as u64 <= self.down.recovery.window(), "window exceeded");
            let number = self.number();
            self.down.on_sent(self.now, number, size, content);
            self.sent.push(frames.clone());
            self.carry(size, SimArrival::Packet { number, frames: Some(frames), marks });
            if self.random(self.stack_every) == 0 {
                self.send_as_stack();
            }
        }
        self.collect();
        self.grant_budget();
    }

    fn collect(&mut self) {
        self.events.extend(std::iter::from_fn(|| self.down.poll_event()));
    }

    fn send_as_stack(&mut self) {
        if self.chance(0.1) {
            self.number();
        }
        let number = self.number();
        self.down.on_stack_sent(self.now, number, 60, true);
        self.carry(60, SimArrival::Packet { number, frames: None, marks: Codepoint::NotEct });
    }

    pub fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number - 1
    }

    /// Runs until `done` returns true, and panics if that takes longer than `limit`. Returns the simulated time that
    /// passed.
    pub fn run_until(&mut self, limit: Duration, mut done: impl FnMut(&mut Self) -> bool) -> Duration {
        let start = self.now;
        let end = self.now + limit;
        while !done(self) {
            assert!(self.step(end), "not done after {limit:?}: {:?}", self.down.stats());
        }
        self.now - start
    }

    pub fn run_for(&mut self, time: Duration) {
        let end = self.now + time;
        while self.step(end) {}
        self.now = end;
    }

    /// Runs the next event, and returns whether there was one before `end`.
    fn step(&mut self, end: Instant) -> bool {
        self.transmit();
        let arrival = self.arrivals.peek().map(|Reverse((at, _))| *at);
        let timeout = self.down.timeout();
        let Some(next) = [arrival, timeout].into_iter().flatten().min() else { return false };
        if next > end {
            return false;
        }
        self.now = self.now.max(next);
        if arrival != Some(next) {
            self.down.on_timeout(self.now);
            self.collect();
            let again = self.down.timeout();
            assert!(self.down.has_work() || again.is_none_or(|at| at > self.now), "the timer spins");
            return true;
        }
        if let Some(Reverse((_, serial))) = self.arrivals.pop()
            && let Some(arrival) = self.content.remove(&serial)
        {
            self.arrive(arrival);
            self.collect();
        }
        true
    }

    pub fn all_done(&self, streams: usize) -> bool {
        let done = self.peer.streams.values().filter(|stream| stream.is_complete()).count();
        done == streams && self.down.stats().streams_finished as usize == streams
    }

    /// Checks that every stream that ended with FIN has exactly the bytes of its source.
    pub fn verify(&self, sources: &[(u64, u64)]) {
        let received: BTreeMap<u64, &ReceivedBytes> =
            self.peer.streams.values().filter(|s| s.is_complete()).map(|s| (s.tag(), s)).collect();
        for (tag, len) in sources {
            let stream = received[tag];
            assert_eq!(stream.data.len() as u64, *len);
            assert_eq!(stream.fin, Some(*len));
            let wrong = (0..*len).find(|offset| stream.data[*offset as usize] != Mem::byte(*tag, *offset));
            assert_eq!(wrong, None, "stream {tag}");
        }
    }

    /// Reports `size` as the path MTU (UDP payload in bytes), as the QUIC stack does after path MTU discovery.
    pub fn find_mtu(&mut self, size: usize) {
        self.found_mtu = size;
        self.down.on_mtu(size);
    }

    fn carry(&mut self, size: usize, mut arrival: SimArrival) {
        if let Some(rate) = self.link.rate {
            let start = self.busy_until.max(self.now);
            let queued = (start - self.now).as_secs_f64() * rate as f64;
            if queued as u64 + size as u64 > self.link.queue {
                self.overflowed += 1;
                return;
            }
            self.carried += size as u64;
            if let SimArrival::Packet { marks: marks @ Codepoint::Ect0, .. } = &mut arrival
                && self.link.mark_above.is_some_and(|bytes| queued as u64 > bytes)
            {
                *marks = Codepoint::Ce;
            }
            self.busy_until = start + Duration::from_secs_f64(size as f64 / rate as f64);
        }
        let departure = if self.link.rate.is_some() { self.busy_until } else { self.now };
        if self.chance(self.link.loss) || size > self.link.largest {
            return;
        }
        if self.chance(self.link.duplicate)
            && let SimArrival::Packet { number, frames, marks } = &arrival
        {
            let copy = SimArrival::Packet { number: *number, frames: frames.clone(), marks: *marks };
            self.deliver(departure, copy);
        }
        self.deliver(departure, arrival);
    }

    fn deliver(&mut self, departure: Instant, arrival: SimArrival) {
        let jitter = self.random(self.link.jitter.as_nanos() as u64);
        self.schedule(departure + self.link.delay + Duration::from_nanos(jitter), arrival);
    }

    fn schedule(&mut self, at: Instant, arrival: SimArrival) {
        self.arrivals.push(Reverse((at, self.serial)));
        self.content.insert(self.serial, arrival);
        self.serial += 1;
    }

    fn arrive(&mut self, arrival: SimArrival) {
        match arrival {
            SimArrival::Packet { number, frames, marks } => {
                let in_order = self.peer.seen.last().is_none_or(|last| *last + 1 == number);
                if self.peer.seen.insert(number) {
                    self.peer.count(if self.link.bleaches { Codepoint::NotEct } else { marks });
                    frames.iter().for_each(|frames| self.peer.receive(self.now, frames));
                }
                self.peer.unacked += 1;
                if self.peer.unacked >= 2 || !in_order {
                    self.acknowledge();
                } else if self.peer.ack_at.is_none() {
                    self.peer.ack_at = Some(self.now);
                    self.schedule(self.now + self.max_ack_delay, SimArrival::AckTimer);
                }
            }
            SimArrival::AckTimer => {
                if self.peer.ack_at.is_some_and(|at| at + self.max_ack_delay <= self.now) {
                    self.acknowledge();
                }
            }
            SimArrival::Feedback(feedback) => self.feedback(&feedback),
        }
    }

    fn acknowledge(&mut self) {
        let held = self.peer.ack_at.take().map_or(Duration::ZERO, |at| self.now - at);
        self.peer.unacked = 0;
        let feedback = self.peer.feedback(held);
        if self.chance(self.link.loss) {
            return;
        }
        self.deliver(self.now, SimArrival::Feedback(feedback));
    }

    fn feedback(&mut self, feedback: &Feedback) {
        self.reclaim_budget();
        self.down.on_ack(self.now, &feedback.ack).expect("the receiver does not lie");
        self.down.on_max_data(feedback.max_data);
        self.down.on_max_streams_uni(feedback.max_streams);
        for (id, max) in &feedback.max_stream_data {
            self.down.on_max_stream_data(*id, *max).expect("opened");
            self.offload.on_max_stream_data(*id, *max);
        }
        for (id, code) in &feedback.stop {
            self.down.on_stop_sending(*id, *code).expect("opened");
        }
    }
}
