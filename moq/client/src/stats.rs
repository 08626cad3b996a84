//! Figures about the objects that arrive: loss, order, damage, rate, latency.

use std::collections::VecDeque;
use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::owed::{self, Owed};
use crate::payload::{self, Bad, Stamp};

/// Sequence numbers that can still arrive late; older ones that are missing are lost.
const WINDOW_WORDS: usize = 1 << 14;
/// Numbers by which an object that was sent last is behind others, if its publisher was started again.
const BEHIND: u64 = 32;

/// Which sequence numbers have arrived, as runs of 64 bits from a base on.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// The first number of the window; a multiple of 64.
    base: u64,
    window: VecDeque<u64>,
    first: Option<u64>,
    /// One past the largest.
    end: u64,
    count: u64,
    gaps: Gaps,
}

/// Runs of missing numbers in what the window has left behind.
#[derive(Clone, Copy, Debug, Default)]
struct Gaps {
    count: u64,
    /// Whether the last number was missing.
    is_open: bool,
}

impl Gaps {
    fn pass(&mut self, is_there: bool) {
        self.count += u64::from(!is_there && !self.is_open);
        self.is_open = !is_there;
    }
}

impl Seen {
    /// Whether `sequence` is new.
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

    /// A number before the window: new if nothing has left the window yet and it reaches that far back.
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

    /// Leaves everything behind for a number far ahead.
    fn jump(&mut self, sequence: u64) {
        while !self.window.is_empty() {
            self.leave_word();
        }
        if self.base < sequence & !63 {
            self.gaps.pass(false);
        }
        self.base = sequence & !63;
    }

    /// Numbers missing up to `end`, and the runs that they form.
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

/// What one subscriber got.
#[derive(Clone, Debug)]
pub struct Figures {
    seen: Seen,
    /// Objects of publishers before this one, which was started again and counts from 0.
    before: u64,
    /// When the newest object was sent.
    newest: Duration,
    /// As the payloads say; 0 if they do not.
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
    /// Of each object, if that is wanted.
    series: Option<Vec<Arrival>>,
    /// [`payload::now`] of the request, the first object and the last one.
    started: Duration,
    first: Option<Duration>,
    last: Duration,
}

/// An object that came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arrival {
    pub sequence: u64,
    /// As of [`payload::now`].
    pub sent: Duration,
    pub latency: Duration,
}

/// Place of a stream's last object, to see that its objects come in order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Order(Option<u64>);

impl Figures {
    /// Begins when the track is asked for.
    pub fn new() -> Self {
        // Three digits from 1 ns up; growing on demand, it cannot refuse a value.
        let latency = Histogram::new(3).unwrap_or_else(|_| unreachable!("3 digits are legal"));
        Self {
            seen: Seen::default(),
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

    /// Remembers each object.
    pub fn with_series(self) -> Self {
        Self { series: Some(Vec::new()), ..self }
    }

    /// The objects in the order in which they came.
    pub fn series(&self) -> &[Arrival] {
        self.series.as_deref().unwrap_or_default()
    }

    /// Counts an object that has just arrived.
    pub fn object(&mut self, payload: &[u8], order: &mut Order) {
        let now = payload::now();
        self.first.get_or_insert(now);
        self.last = now;
        self.bytes += payload.len() as u64;
        let stamp = match payload::check(payload) {
            Ok(stamp) => self.follow(stamp),
            Err(Bad::Corrupted(_)) => {
                self.corrupted += 1;
                return;
            }
            Err(Bad::Unstamped) => {
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
                // The histogram grows on demand, so it takes any value.
                let latency = now.saturating_sub(stamp.sent);
                let _ = self.latency.record(latency.as_nanos() as u64);
                if let Some(series) = &mut self.series {
                    series.push(Arrival { sequence: stamp.sequence, sent: stamp.sent, latency });
                }
                self.owed.object(stamp, now);
            }
            false => self.duplicates += 1,
        }
    }

    /// Numbers the objects of a publisher that was started again behind those of before. One that was sent later than all that came
    /// and has a number far lower is of such a publisher: all of one publisher are numbered in the order of sending.
    fn follow(&mut self, stamp: Stamp) -> Stamp {
        let is_behind = stamp.sequence.saturating_add(self.before).saturating_add(BEHIND) < self.seen.end;
        if stamp.sent > self.newest && is_behind {
            self.before = self.seen.end;
        }
        self.newest = self.newest.max(stamp.sent);
        let total = if stamp.total == 0 { 0 } else { stamp.total.saturating_add(self.before) };
        Stamp { sequence: stamp.sequence.saturating_add(self.before), total, ..stamp }
    }

    pub fn stream(&mut self, was_reset: bool) {
        self.streams += 1;
        self.resets += u64::from(was_reset);
    }

    /// Objects so far, once each; those that are not stamped included.
    pub fn delivered(&self) -> u64 {
        self.seen.count + self.unstamped
    }

    /// Whether all of the track has been sent, however much of it has come.
    pub fn is_published(&self) -> bool {
        self.owed.is_published(payload::now())
    }

    /// The figures now. At the end of the track, what is missing behind the last object is lost too.
    pub fn report(&self, is_end: bool) -> Report {
        let end = if is_end { self.total } else { 0 };
        let (lost, gaps) = match self.seen.first {
            None => (0, 0),
            Some(_) => self.seen.missing(end),
        };
        let seconds = self.first.map_or(0.0, |first| self.last.saturating_sub(first).as_secs_f64());
        let per_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        Report {
            delivered: self.delivered(),
            lost,
            duplicates: self.duplicates,
            corrupted: self.corrupted,
            disordered: self.disordered,
            gaps,
            bytes: self.bytes,
            rate_hz: per_second(self.delivered().saturating_sub(1)),
            bits_per_second: per_second(self.bytes * 8),
            latency_us: Latency::of(&self.latency),
            first_object_ms: self.first.map(|first| first.saturating_sub(self.started).as_secs_f64() * 1e3),
            streams: self.streams,
            resets: self.resets,
            owed: if is_end { Owed::report([&self.owed]) } else { None },
        }
    }

    /// Totals over subscribers. Rates add up; the first object is the slowest one.
    pub fn total(all: &[Self], is_end: bool) -> Report {
        let mut latency = Figures::new().latency;
        let mut total = Report::default();
        for figures in all {
            let report = figures.report(is_end);
            // Both grow on demand, so one always fits into the other.
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
        total.latency_us = Latency::of(&latency);
        total.owed = if is_end { Owed::report(all.iter().map(|figures| &figures.owed)) } else { None };
        total
    }
}

impl Default for Figures {
    fn default() -> Self {
        Self::new()
    }
}

/// Figures as they are printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Report {
    /// Objects, once each.
    pub delivered: u64,
    /// Objects missing between the first that arrived and the last (or the end of the track).
    pub lost: u64,
    pub duplicates: u64,
    /// Objects whose bytes were changed on the way.
    pub corrupted: u64,
    /// Objects behind a later one of the same stream.
    pub disordered: u64,
    /// Runs of lost objects.
    pub gaps: u64,
    /// Of payload, duplicates included.
    pub bytes: u64,
    /// Objects per second between the first and the last.
    pub rate_hz: f64,
    pub bits_per_second: f64,
    pub latency_us: Latency,
    /// From the request to the first object.
    pub first_object_ms: Option<f64>,
    /// Data streams that have ended.
    pub streams: u64,
    /// Those of them that were reset.
    pub resets: u64,
    /// At the end of a track that says how long it is.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub owed: Option<owed::Report>,
}

/// One-way latency in microseconds, from the publisher's application to the subscriber's on one host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Latency {
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub max: f64,
}

impl Latency {
    fn of(histogram: &Histogram<u64>) -> Self {
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
    fn what_is_missing_doubled_or_damaged_is_counted() {
        let mut figures = Figures::new();
        let mut order = Order::default();
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
    fn publisher_that_is_started_again_is_counted_on() {
        let mut figures = Figures::new();
        for sequence in 0..100 {
            figures.object(&object(sequence), &mut Order::default());
        }
        for sequence in [0, 1, 3, 2, 5, 5] {
            figures.object(&object(sequence), &mut Order::default());
        }
        let report = figures.report(false);
        assert_eq!((report.delivered, report.lost, report.duplicates), (105, 1, 1));
    }

    #[test]
    fn a_subscriber_without_objects_has_lost_nothing() {
        assert_eq!(Figures::new().report(true), Report::default());
    }

    #[test]
    fn numbers_that_left_the_window_stay_counted() {
        let mut seen = Seen::default();
        let end = 64 * WINDOW_WORDS as u64 * 3;
        for sequence in (0..end).filter(|sequence| sequence % 1000 != 999) {
            assert!(seen.insert(sequence));
        }
        assert!(!seen.insert(999), "too late");
        assert!(seen.window.len() <= WINDOW_WORDS);
        assert_eq!(seen.missing(0), (end / 1000, end / 1000));
    }

    #[test]
    fn a_far_jump_is_one_gap() {
        let mut seen = Seen::default();
        assert!(seen.insert(10) && seen.insert(1 << 40) && seen.insert((1 << 40) + 1));
        assert_eq!(seen.missing(0), ((1 << 40) - 11, 1));
    }

    proptest! {
        #[test]
        fn seen_is_a_set(numbers in prop::collection::vec(0..400u64, 1..200)) {
            let mut seen = Seen::default();
            let mut model = BTreeSet::new();
            for number in &numbers {
                prop_assert_eq!(seen.insert(*number), model.insert(*number));
            }
            let (first, last) = (*model.first().unwrap(), *model.last().unwrap());
            let missing: Vec<_> = (first..=last).filter(|number| !model.contains(number)).collect();
            let runs = missing.iter().filter(|number| model.contains(&(**number - 1))).count();
            prop_assert_eq!(seen.missing(0), (missing.len() as u64, runs as u64));
        }
    }
}
