//! One direction of an emulated link as pure logic. Frames go in with their time of arrival, and come out when they are
//! due. It has no clock and no sockets: the same seed and the same arrivals give the same departures.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::impair::{DEFAULT_QUEUE_PACKETS, Impairment, JitterShape};

/// Largest number of bytes that one direction holds, in queue and on the wire. Further frames count as `overrun`, since
/// the emulator, not the emulated link, is full.
const MAX_HELD_BYTES: usize = 256 << 20;

const ETHERNET_HEADER: usize = 14;

/// Cut-off of the normal distribution, in standard deviations.
const NORMAL_CUT: f64 = 4.0;

/// Numbers of frames in one direction of a link, by what happened to them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct FrameCounters {
    pub received: u64,
    pub received_bytes: u64,
    pub delivered: u64,
    pub delivered_bytes: u64,
    /// Frames lost by `loss` or in a burst.
    pub lost: u64,
    /// Frames dropped at the tail of the queue.
    pub queue_dropped: u64,
    /// Frames dropped because they were longer than `mtu`.
    pub oversize: u64,
    /// Copies that were sent in addition to the original frames.
    pub duplicated: u64,
    /// Frames that were held back so that later ones overtake them.
    pub reordered: u64,
    /// Frames that were lost because the emulator was too slow or the receiving device was down. Any such frame
    /// invalidates a measurement.
    pub overrun: u64,
    /// Frames that are in the queue now, since the link's `rate` has not let them pass yet.
    pub queued: u64,
    /// Frames that are on the wire now.
    pub in_flight: u64,
}

struct InFlight {
    due: Instant,
    /// Sequence number, by which frames that are due at the same time keep their order.
    order: u64,
    frame: Vec<u8>,
}

impl InFlight {
    fn rank(&self) -> (Instant, u64) {
        (self.due, self.order)
    }
}

impl PartialEq for InFlight {
    fn eq(&self, other: &Self) -> bool {
        self.rank() == other.rank()
    }
}

impl Eq for InFlight {}

impl PartialOrd for InFlight {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for InFlight {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.rank().cmp(&other.rank())
    }
}

/// The queue in front of the bottleneck. Its first frame is being sent at the link's rate.
#[derive(Default)]
struct BottleneckQueue {
    frames: VecDeque<Vec<u8>>,
    bytes: usize,
    /// Time when the last bit of the queue's first frame leaves. If the queue is empty, it is the time when the last
    /// frame left.
    head_leaves: Option<Instant>,
}

pub struct Shaper {
    settings: Impairment,
    rng: fastrand::Rng,
    in_burst: bool,
    queue: BottleneckQueue,
    flight: BinaryHeap<Reverse<InFlight>>,
    flight_bytes: usize,
    next_order: u64,
    last_due: Option<Instant>,
    counters: FrameCounters,
}

impl Shaper {
    pub fn new(settings: Impairment, seed: u64) -> Self {
        Self {
            settings,
            rng: fastrand::Rng::with_seed(seed),
            in_burst: false,
            queue: BottleneckQueue::default(),
            flight: BinaryHeap::new(),
            flight_bytes: 0,
            next_order: 0,
            last_due: None,
            counters: FrameCounters::default(),
        }
    }

    pub fn settings(&self) -> &Impairment {
        &self.settings
    }

    pub fn counters(&self) -> FrameCounters {
        FrameCounters {
            queued: self.queue.frames.len() as u64,
            in_flight: self.flight.len() as u64,
            ..self.counters
        }
    }

    pub fn count_overrun(&mut self, frames: u64) {
        self.counters.overrun += frames;
    }

    /// Changes the settings. Frames on the wire keep their arrival time. Frames in the queue get the new rate, and so
    /// does the unsent part of the frame being sent.
    pub fn set(&mut self, now: Instant, settings: Impairment) {
        self.advance(now);
        let old = self.settings.rate;
        self.settings = settings;
        if old == self.settings.rate {
            return;
        }
        let Some((head, leaves)) = self.queue.frames.front().zip(self.queue.head_leaves) else { return };
        match (old, self.settings.rate) {
            // The unsent part of the frame being sent continues at the new rate.
            (Some(old), Some(new)) => {
                let left =
                    leaves.duration_since(now).as_secs_f64() / send_time(head.len(), old).as_secs_f64();
                self.queue.head_leaves = Some(now + send_time(head.len(), new).mul_f64(left.min(1.0)));
            }
            _ => {
                // Without a rate limit there is no queue, so all queued frames leave now.
                self.queue.bytes = 0;
                self.queue.head_leaves = None;
                for frame in std::mem::take(&mut self.queue.frames) {
                    self.launch(now, frame);
                }
            }
        }
    }

    pub fn push(&mut self, arrived: Instant, frame: Vec<u8>) {
        self.advance(arrived);
        self.counters.received += 1;
        self.counters.received_bytes += frame.len() as u64;
        if self.settings.mtu.is_some_and(|mtu| frame.len() > mtu + ETHERNET_HEADER) {
            self.counters.oversize += 1;
        } else if self.queue.bytes + self.flight_bytes + frame.len() > MAX_HELD_BYTES {
            self.counters.overrun += 1;
        } else if let Some(rate) = self.settings.rate {
            self.enqueue(arrived, frame, rate);
        } else {
            self.launch(arrived, frame);
        }
    }

    /// Returns the next frame that is due at `now`, if any.
    pub fn pop(&mut self, now: Instant) -> Option<Vec<u8>> {
        self.advance(now);
        if self.flight.peek()?.0.due > now {
            return None;
        }
        let frame = self.flight.pop()?.0.frame;
        self.flight_bytes -= frame.len();
        self.counters.delivered += 1;
        self.counters.delivered_bytes += frame.len() as u64;
        Some(frame)
    }

    /// Returns the time when [`Shaper::pop`] should be called next. No frame is due earlier.
    pub fn deadline(&self) -> Option<Instant> {
        let flight = self.flight.peek().map(|next| next.0.due);
        let queue = self.queue.frames.front().and(self.queue.head_leaves).map(|at| at + self.least_delay());
        [flight, queue].into_iter().flatten().min()
    }

    fn enqueue(&mut self, arrived: Instant, frame: Vec<u8>, rate: u64) {
        let max_bytes = self.settings.queue_bytes.unwrap_or(usize::MAX);
        let max_packets = match (self.settings.queue_packets, self.settings.queue_bytes) {
            (Some(packets), _) => packets,
            (None, Some(_)) => usize::MAX,
            (None, None) => DEFAULT_QUEUE_PACKETS,
        };
        if self.queue.frames.len() >= max_packets || self.queue.bytes + frame.len() > max_bytes {
            self.counters.queue_dropped += 1;
            return;
        }
        if self.queue.frames.is_empty() {
            // The link is free once the last frame has left.
            let free = self.queue.head_leaves.map_or(arrived, |left| left.max(arrived));
            self.queue.head_leaves = Some(free + send_time(frame.len(), rate));
        }
        self.queue.bytes += frame.len();
        self.queue.frames.push_back(frame);
    }

    /// Moves the frames that have left the queue by `now` to the wire.
    fn advance(&mut self, now: Instant) {
        while let Some((rate, leaves)) = self.settings.rate.zip(self.queue.head_leaves)
            && leaves <= now
            && let Some(frame) = self.queue.frames.pop_front()
        {
            self.queue.bytes -= frame.len();
            if let Some(next) = self.queue.frames.front() {
                self.queue.head_leaves = Some(leaves + send_time(next.len(), rate));
            }
            self.launch(leaves, frame);
        }
    }

    fn launch(&mut self, at: Instant, frame: Vec<u8>) {
        if self.loses() {
            self.counters.lost += 1;
            return;
        }
        if self.happens(self.settings.duplicate) {
            self.counters.duplicated += 1;
            self.fly(at, frame.clone());
        }
        self.fly(at, frame);
    }

    fn fly(&mut self, at: Instant, frame: Vec<u8>) {
        let mut due = at + self.delay();
        if self.happens(self.settings.reorder) {
            self.counters.reordered += 1;
            due += self.settings.reorder_by;
        } else {
            // Jitter alone does not reorder frames.
            due = self.last_due.map_or(due, |last| last.max(due));
            self.last_due = Some(due);
        }
        self.flight_bytes += frame.len();
        self.flight.push(Reverse(InFlight { due, order: self.next_order, frame }));
        self.next_order += 1;
    }

    /// Decides whether a frame is lost, by the Gilbert-Elliott model. As in netem, the current state (inside or outside
    /// of a burst) decides first, and then the state changes.
    fn loses(&mut self) -> bool {
        let Impairment { loss, burst_start, burst_end, burst_loss, .. } = self.settings;
        let (loss, flips) = if self.in_burst { (burst_loss, burst_end) } else { (loss, burst_start) };
        let lost = self.happens(loss);
        self.in_burst ^= self.happens(flips);
        lost
    }

    fn happens(&mut self, probability: f64) -> bool {
        // An event with probability 0 draws no random number. So adding one impairment leaves the random decisions of
        // the other impairments unchanged.
        probability > 0.0 && self.rng.f64() < probability
    }

    fn delay(&mut self) -> Duration {
        let Impairment { delay, jitter, jitter_shape, .. } = self.settings;
        if jitter.is_zero() {
            return delay;
        }
        let swing = match jitter_shape {
            JitterShape::Uniform => self.rng.f64() * 2.0 - 1.0,
            JitterShape::Normal => self.normal().clamp(-NORMAL_CUT, NORMAL_CUT),
        };
        Duration::from_secs_f64((delay.as_secs_f64() + jitter.as_secs_f64() * swing).max(0.0))
    }

    /// Returns a normally distributed random number (Box-Muller transform).
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.rng.f64()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.rng.f64()).cos()
    }

    /// Returns the shortest delay that a frame can have on the wire.
    fn least_delay(&self) -> Duration {
        let swing = match self.settings.jitter_shape {
            JitterShape::Uniform => self.settings.jitter,
            JitterShape::Normal => self.settings.jitter.mul_f64(NORMAL_CUT),
        };
        self.settings.delay.saturating_sub(swing)
    }
}

fn send_time(bytes: usize, rate: u64) -> Duration {
    Duration::from_nanos((bytes as u128 * 8 * 1_000_000_000 / u128::from(rate.max(1))) as u64)
}

#[cfg(test)]
#[path = "shape_tests.rs"]
mod tests;
