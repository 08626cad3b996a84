//! Statistics of arriving objects: loss, order, damage, rate, latency.

use std::collections::VecDeque;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::owed::{self, Owed};
use crate::payload::{self, PayloadFault, Stamp};
use crate::received::ReceivedTrack;

/// Size of the window of sequence numbers that may still arrive, in words of 64 bits. Missing numbers below the window
/// count as lost.
const WINDOW_WORDS: usize = 1 << 14;
/// An object that was sent later than all others and has a sequence number lower by at least this much comes from a
/// restarted publisher.
const BEHIND: u64 = 32;

/// A set of the sequence numbers that have arrived. Bits for numbers in the window are kept in words of 64 bits.
#[derive(Clone, Debug, Default)]
struct SequenceSet {
    /// The first sequence number of the window, a multiple of 64.
    base: u64,
    window: VecDeque<u64>,
    first: Option<u64>,
    /// The largest sequence number that arrived, plus 1.
    end: u64,
    count: u64,
    gaps: Gaps,
}

/// Number of gaps (runs of missing sequence numbers) below the window, where missing numbers count as lost.
#[derive(Clone, Copy, Debug, Default)]
struct Gaps {
    count: u64,
    /// Whether the last number that left the window was missing. If the next number is missing, too, it belongs to the
    /// same gap.
    is_open: bool,
}

impl Gaps {
    fn pass(&mut self, is_there: bool) {
        self.count += u64::from(!is_there && !self.is_open);
        self.is_open = !is_there;
    }
}

impl SequenceSet {
    /// Records that a sequence number has arrived. Returns false if it arrived before.
    fn insert(&mut self, sequence: u64) -> bool {
        if self.first.is_none() {
            self.base = sequence & !63;
        }
        let Some(offset) = (sequence & !63).checked_sub(self.base) else {
            return self.insert_before(sequence);
        };
        let word = (offset / 64) as usize;
        if word >= self.window.len() + WINDOW_WORDS {
            self.jump(sequence);
            return self.insert(sequence);
        }
        while self.window.len() <= word {
            self.window.push_back(0);
        }
        let bit = 1 << (sequence % 64);
        let Some(bits) = self.window.get_mut(word) else { return false };
        if *bits & bit != 0 {
            return false;
        }
        *bits |= bit;
        self.first = Some(self.first.map_or(sequence, |first| first.min(sequence)));
        self.end = self.end.max(sequence + 1);
        self.count += 1;
        while self.window.len() > WINDOW_WORDS {
            self.leave_word();
        }
        true
    }

    /// Records a sequence number below the window. The number counts as new only if the window still has all numbers
    /// that arrived, and can be extended down to this number.
    fn insert_before(&mut self, sequence: u64) -> bool {
        let words = (self.base - (sequence & !63)) / 64;
        let has_left = self.first.is_some_and(|first| first < self.base);
        if has_left || self.window.len() as u64 + words > WINDOW_WORDS as u64 {
            return false;
        }
        (0..words).for_each(|_| self.window.push_front(0));
        self.base = sequence & !63;
        self.insert(sequence)
    }

    fn leave_word(&mut self) {
        let Some(bits) = self.window.pop_front() else { return };
        let first = self.first.unwrap_or(0);
        for index in 0..64 {
            if self.base + index >= first {
                self.gaps.pass(bits >> index & 1 == 1);
            }
        }
        self.base += 64;
    }

    /// Moves the window to a sequence number that is more than the window's size above the window.
    fn jump(&mut self, sequence: u64) {
        while !self.window.is_empty() {
            self.leave_word();
        }
        // The numbers between the old and the new window are one gap.
        if self.base < sequence & !63 {
            self.gaps.pass(false);
        }
        self.base = sequence & !63;
    }

    /// Returns how many sequence numbers below `end` are missing, and how many gaps (runs) the missing numbers form.
    fn missing(&self, end: u64) -> (u64, u64) {
        let Some(first) = self.first else { return (end, u64::from(end > 0)) };
        let mut gaps = self.gaps;
        for sequence in self.base.max(first)..self.end {
            let offset = sequence - self.base;
            let bits = self.window.get((offset / 64) as usize).copied().unwrap_or(0);
            gaps.pass(bits >> (offset % 64) & 1 == 1);
        }
        let end = end.max(self.end);
        if end > self.end {
            gaps.pass(false);
        }
        (end - first - self.count, gaps.count)
    }
}

/// Statistics of the objects of one subscriber.
#[derive(Clone, Debug)]
pub struct ObjectFigures {
    /// The locations of the objects that have arrived.
    pub(crate) received: ReceivedTrack,
    seen: SequenceSet,
    /// Offset that is added to the publisher's sequence numbers, because a restarted publisher numbers its objects from
    /// 0 again.
    before: u64,
    /// Sending time of the newest object.
    newest: Duration,
    /// Number of objects of the track according to the payloads; 0 if unknown.
    total: u64,
    corrupted: u64,
    unstamped: u64,
    duplicates: u64,
    disordered: u64,
    bytes: u64,
    streams: u64,
    resets: u64,
    latency: Histogram<u64>,
    owed: Owed,
    /// A record of the arrival of each object, if the caller asked to keep such records.
    series: Option<Vec<ObjectArrival>>,
    /// Times of the request, the first object and the last object, on the clock of [`payload::now`].
    started: Duration,
    first: Option<Duration>,
    last: Duration,
}

/// The arrival of one object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectArrival {
    /// The object's sequence number.
    pub sequence: u64,
    /// Sending time, on the clock of [`payload::now`].
    pub sent: Duration,
    /// Time from sending to arrival.
    pub latency: Duration,
}

/// The last object of a stream, to check that its objects arrive in order.
#[derive(Clone, Copy, Debug, Default)]
pub struct StreamOrder(Option<u64>);

impl ObjectFigures {
    /// Makes empty statistics. Call it when the track is requested, because times are measured from this call on.
    pub fn new() -> Self {
        // The histogram has a precision of three digits from 1 ns up. It grows on demand, so it can record any value.
        let latency = Histogram::new(3).unwrap_or_else(|_| unreachable!("3 digits are legal"));
        Self {
            received: ReceivedTrack::default(),
            seen: SequenceSet::default(),
            before: 0,
            newest: Duration::ZERO,
            total: 0,
            corrupted: 0,
            unstamped: 0,
            duplicates: 0,
            disordered: 0,
            bytes: 0,
            streams: 0,
            resets: 0,
            owed: Owed::new(latency.clone()),
            latency,
            series: None,
            started: payload::now(),
            first: None,
            last: Duration::ZERO,
        }
    }

    /// Makes the statistics keep a record ([`ObjectArrival`]) of each arrived object.
    pub fn with_series(self) -> Self {
        Self { series: Some(Vec::new()), ..self }
    }

    /// Returns the records of arrived objects, in order of arrival. There are none without [`Self::with_series`].
    pub fn series(&self) -> &[ObjectArrival] {
        self.series.as_deref().unwrap_or_default()
    }

    /// Records an object that has just arrived.
    pub fn object(&mut self, payload: &[u8], order: &mut StreamOrder) {
        let now = payload::now();
        self.first.get_or_insert(now);
        self.last = now;
        self.bytes += payload.len() as u64;
        let stamp = match payload::check(payload) {
            Ok(stamp) => self.follow(stamp),
            Err(PayloadFault::Corrupted(_)) => {
                self.corrupted += 1;
                return;
            }
            Err(PayloadFault::Unstamped) => {
                self.unstamped += 1;
                return;
            }
        };
        self.total = stamp.total;
        if order.0.is_some_and(|previous| previous >= stamp.sequence) {
            self.disordered += 1;
        }
        order.0 = Some(stamp.sequence);
        match self.seen.insert(stamp.sequence) {
            true => {
                // The histogram grows on demand, so it can record any value.
                let latency = now.saturating_sub(stamp.sent);
                let _ = self.latency.record(latency.as_nanos() as u64);
                if let Some(series) = &mut self.series {
                    series.push(ObjectArrival { sequence: stamp.sequence, sent: stamp.sent, latency });
                }
                self.owed.object(stamp, now);
            }
            false => self.duplicates += 1,
        }
    }

    /// Adds an offset to the sequence numbers of a restarted publisher, so that they continue the numbers from before
    /// the restart. A publisher numbers objects in the order of sending. An object that was sent later than all others
    /// but has a far lower number therefore comes from a restarted publisher.
    fn follow(&mut self, stamp: Stamp) -> Stamp {
        let is_behind = stamp.sequence.saturating_add(self.before).saturating_add(BEHIND) < self.seen.end;
        if stamp.sent > self.newest && is_behind {
            self.before = self.seen.end;
        }
        self.newest = self.newest.max(stamp.sent);
        let total = if stamp.total == 0 { 0 } else { stamp.total.saturating_add(self.before) };
        Stamp { sequence: stamp.sequence.saturating_add(self.before), total, ..stamp }
    }

    /// Records that a data stream has ended.
    pub fn stream(&mut self, was_reset: bool) {
        self.streams += 1;
        self.resets += u64::from(was_reset);
    }

    /// Returns the number of distinct objects so far, including objects whose payload has no sequence number and
    /// sending time.
    pub fn delivered(&self) -> u64 {
        self.seen.count + self.unstamped
    }

    /// Reports whether the publisher has sent the whole track, even if not all of it has arrived.
    pub fn is_published(&self) -> bool {
        self.owed.is_published(payload::now())
    }

    /// Returns the statistics so far. With `is_end`, objects that are missing at the end of the track count as lost.
    pub fn report(&self, is_end: bool) -> StatsReport {
        let end = if is_end { self.total } else { 0 };
        let (lost, gaps) = match self.seen.first {
            None => (0, 0),
            Some(_) => self.seen.missing(end),
        };
        let seconds = self.first.map_or(0.0, |first| self.last.saturating_sub(first).as_secs_f64());
        let per_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        StatsReport {
            delivered: self.delivered(),
            lost,
            duplicates: self.duplicates,
            corrupted: self.corrupted,
            disordered: self.disordered,
            gaps,
            bytes: self.bytes,
            rate_hz: per_second(self.delivered().saturating_sub(1)),
            bits_per_second: per_second(self.bytes * 8),
            latency_us: LatencyFigures::from_histogram(&self.latency),
            first_object_ms: self.first.map(|first| first.saturating_sub(self.started).as_secs_f64() * 1e3),
            streams: self.streams,
            resets: self.resets,
            owed: if is_end { Owed::report([&self.owed]) } else { None },
        }
    }

    /// Returns the statistics of several subscribers together. Rates are summed, and the time to the first object is
    /// that of the slowest subscriber.
    pub fn total(all: &[Self], is_end: bool) -> StatsReport {
        let mut latency = ObjectFigures::new().latency;
        let mut total = StatsReport::default();
        for figures in all {
            let report = figures.report(is_end);
            // These histograms extend their range of values on demand, so adding one to another cannot fail.
            let _ = latency.add(&figures.latency);
            total.delivered += report.delivered;
            total.lost += report.lost;
            total.duplicates += report.duplicates;
            total.corrupted += report.corrupted;
            total.disordered += report.disordered;
            total.gaps += report.gaps;
            total.bytes += report.bytes;
            total.rate_hz += report.rate_hz;
            total.bits_per_second += report.bits_per_second;
            total.streams += report.streams;
            total.resets += report.resets;
            total.first_object_ms = match (total.first_object_ms, report.first_object_ms) {
                (Some(one), Some(other)) => Some(f64::max(one, other)),
                (one, other) => one.or(other),
            };
        }
        total.latency_us = LatencyFigures::from_histogram(&latency);
        total.owed = if is_end { Owed::report(all.iter().map(|figures| &figures.owed)) } else { None };
        total
    }
}

impl Default for ObjectFigures {
    fn default() -> Self {
        Self::new()
    }
}

/// Statistics of one or more subscribers, in the form that is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct StatsReport {
    /// Number of distinct objects.
    pub delivered: u64,
    /// Number of objects that are missing between the first one that arrived and the last one, or the end of the track.
    pub lost: u64,
    /// Number of objects that arrived more than once. Each repetition counts.
    pub duplicates: u64,
    /// Number of objects whose payload does not have the expected pattern, because bytes were changed on the way.
    pub corrupted: u64,
    /// Number of objects whose sequence number is not above that of the previous object on the same stream.
    pub disordered: u64,
    /// Number of gaps: runs of lost objects.
    pub gaps: u64,
    /// Number of payload bytes, including duplicates.
    pub bytes: u64,
    /// Objects per second between the first and the last arrival.
    pub rate_hz: f64,
    /// Payload bits per second between the first and the last object.
    pub bits_per_second: f64,
    /// Latency quantiles of the objects that arrived.
    pub latency_us: LatencyFigures,
    /// Milliseconds from the request to the first object.
    pub first_object_ms: Option<f64>,
    /// Number of data streams that have ended.
    pub streams: u64,
    /// Number of data streams that were reset.
    pub resets: u64,
    /// Statistics over all objects that should have arrived. Present only if the track's length is known and the track
    /// has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owed: Option<owed::OwedReport>,
}

/// One-way latency in microseconds, from the publishing to the subscribing application. Both have to run on one host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct LatencyFigures {
    /// The median.
    pub p50: f64,
    /// The 90th percentile.
    pub p90: f64,
    /// The 99th percentile.
    pub p99: f64,
    /// The largest latency.
    pub max: f64,
}

impl LatencyFigures {
    fn from_histogram(histogram: &Histogram<u64>) -> Self {
        let at = |quantile| histogram.value_at_quantile(quantile) as f64 / 1e3;
        Self { p50: at(0.5), p90: at(0.9), p99: at(0.99), max: histogram.max() as f64 / 1e3 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::payload::build;
    use proptest::prelude::*;
    use std::collections::BTreeSet;

    fn object(sequence: u64) -> bytes::Bytes {
        build(Stamp { sequence, sent: payload::now(), total: 20 }, 64)
    }

    #[test]
    fn missing_duplicate_and_damaged_objects_are_counted() {
        let mut figures = ObjectFigures::new();
        let mut order = StreamOrder::default();
        for sequence in [3, 4, 7, 7, 8, 6, 12] {
            figures.object(&object(sequence), &mut order);
        }
        let mut damaged = object(9).to_vec();
        damaged[50] ^= 1;
        figures.object(&damaged, &mut order);
        figures.stream(true);
        let report = figures.report(false);
        assert!(report.latency_us.max >= report.latency_us.p50 && report.latency_us.max > 0.1);
        assert_eq!((report.delivered, report.lost, report.gaps), (6, 4, 2));
        assert_eq!((report.duplicates, report.corrupted, report.disordered), (1, 1, 2));
        assert_eq!((report.streams, report.resets, report.bytes), (1, 1, 8 * 64));
        let at_end = figures.report(true);
        assert_eq!((at_end.lost, at_end.gaps), (11, 3));
    }

    #[test]
    fn loss_count_continues_when_sequence_numbers_restart_at_0() {
        let mut figures = ObjectFigures::new();
        for sequence in 0..100 {
            figures.object(&object(sequence), &mut StreamOrder::default());
        }
        for sequence in [0, 1, 3, 2, 5, 5] {
            figures.object(&object(sequence), &mut StreamOrder::default());
        }
        let report = figures.report(false);
        assert_eq!((report.delivered, report.lost, report.duplicates), (105, 1, 1));
    }

    #[test]
    fn subscriber_without_objects_has_lost_nothing() {
        assert_eq!(ObjectFigures::new().report(true), StatsReport::default());
    }

    #[test]
    fn missing_sequence_numbers_stay_counted_after_the_bitmap_moves_on() {
        let mut seen = SequenceSet::default();
        let end = 64 * WINDOW_WORDS as u64 * 3;
        for sequence in (0..end).filter(|sequence| sequence % 1000 != 999) {
            assert!(seen.insert(sequence));
        }
        assert!(!seen.insert(999), "too late");
        assert!(seen.window.len() <= WINDOW_WORDS);
        assert_eq!(seen.missing(0), (end / 1000, end / 1000));
    }

    #[test]
    fn large_jump_of_the_sequence_number_is_one_gap() {
        let mut seen = SequenceSet::default();
        assert!(seen.insert(10) && seen.insert(1 << 40) && seen.insert((1 << 40) + 1));
        assert_eq!(seen.missing(0), ((1 << 40) - 11, 1));
    }

    proptest! {
        #[test]
        fn sequence_set_counts_like_a_reference_set(numbers in prop::collection::vec(0..400u64, 1..200)) {
            let mut seen = SequenceSet::default();
            let mut model = BTreeSet::new();
            for number in &numbers {
                prop_assert_eq!(seen.insert(*number), model.insert(*number));
            }
            let first = *model.first().unwrap();
            let last = *model.last().unwrap();
            let missing: Vec<_> = (first..=last).filter(|number| !model.contains(number)).collect();
            let runs = missing.iter().filter(|number| model.contains(&(**number - 1))).count();
            prop_assert_eq!(seen.missing(0), (missing.len() as u64, runs as u64));
        }
    }
}
