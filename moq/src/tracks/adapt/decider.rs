//! Selects the best rendition of a ladder for which a path has enough capacity. In this module, a higher rendition is
//! one with a higher bit rate.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use millrace_quic::plane::{congestion::LATELY, downstream::ConnectionRoom};

/// Age of the oldest unsent media, or queueing delay on the path, from which on the path counts as having a backlog. A
/// single key frame can cause such a backlog.
const BACKLOG: Duration = Duration::from_millis(100);

/// Time that a backlog has to last until the throughput counts as the path's capacity.
const PATIENCE: Duration = Duration::from_millis(200);

/// Duration of a backlog in the send queue after which a lower rendition is selected, whatever the bandwidth estimate
/// says.
const LONG: Duration = Duration::from_millis(1500);

/// Duration of queueing on the path after which a lower rendition is selected. It is long, because a change to a longer
/// route looks like a queue.
const LONG_ON_PATH: Duration = Duration::from_secs(5);

/// Time over which the throughput is measured.
const WINDOW: Duration = Duration::from_millis(500);

/// Time without backlog after which the next higher rendition is tried: initial value and largest value. The time
/// doubles whenever that rendition turns out to exceed the path's capacity.
const HOLD: Duration = Duration::from_secs(5);
const MOST_HOLD: Duration = Duration::from_secs(80);

/// If a backlog makes the decider revert a change to a higher rendition within this time, that rendition exceeds the
/// path's capacity.
const TRIAL: Duration = Duration::from_secs(15);

/// Length of a period for which the smallest round-trip time is recorded. The minimum over this period and the previous
/// one counts as the path's delay without queueing.
const SHORTEST: Duration = Duration::from_secs(15);

/// Time for which the capacity measured in a backlog takes precedence over the bandwidth estimate. The estimate may be
/// outdated, because a sender that sends less than the path's capacity cannot measure the capacity anew.
const MEMORY: Duration = Duration::from_secs(60);

/// The capacity measured in a backlog is discarded when a later throughput exceeds it by this factor. Key frames reach
/// such a throughput if the path has more capacity.
const FASTER: f64 = 1.2;

/// While throughput grows by this factor from the first half of a backlog to the second, the congestion controller is
/// still raising its rate.
const GROWTH: f64 = 1.5;

/// Queueing delay on the path after which a recent change to a higher rendition is reverted, and the time for which the
/// delay has to last.
const TRIAL_QUEUE: Duration = Duration::from_millis(50);
const TRIAL_PATIENCE: Duration = Duration::from_millis(600);

/// Fraction of the path's capacity that a rendition may use. Packet headers need some of the rest, and the media rate
/// varies.
const ROOM: f64 = 0.9;

/// Capacity that a change to the next higher rendition requires, as a multiple of that rendition's rate.
const CARE: f64 = 1.25;

/// Time over which the rate of the connection's data other than the ladder's media is smoothed.
const SMOOTHING: Duration = Duration::from_secs(3);

/// A sample of the state of a subscriber's connection.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionSample {
    /// The time of the sample.
    pub now: Instant,
    /// Number of bytes that were acknowledged since the connection began.
    pub delivered: u64,
    /// The congestion controller's estimate of the path's capacity, in bytes per second.
    pub bandwidth: u64,
    /// The highest throughput of the last seconds ([`LATELY`]), in bytes per second. The path's capacity is at least
    /// this throughput.
    pub fastest: u64,
    /// Age of the oldest media in the send queue.
    pub waiting: Duration,
    /// Smoothed round-trip time.
    pub round_trip: Duration,
}

impl ConnectionSample {
    /// Makes a sample of the data plane's statistics.
    pub fn from_room(room: &ConnectionRoom, now: Instant) -> Self {
        let ConnectionRoom { delivered, bandwidth, fastest, waiting, round_trip } = *room;
        Self { now, delivered, bandwidth, fastest, waiting, round_trip }
    }
}

/// A decider that observes one subscriber's path and selects the best rendition for which the path has enough capacity.
///
/// It selects a lower rendition as soon as a backlog reveals the path's capacity, and the next higher one after a time
/// without backlog. If a change to a higher rendition causes a backlog, the change is reverted. The decider then waits
/// twice as long before it tries that rendition again. Call [`look`](Self::look) about every ten milliseconds; the
/// decider changes nothing between calls.
pub struct Decider {
    /// Media rate of each rendition in the ladder, in bytes per second.
    rates: Vec<f64>,
    rung: usize,
    /// Totals of delivered bytes, each with the time of its sample.
    history: VecDeque<(Instant, u64)>,
    /// Rate of the connection's data other than the ladder's media, in bytes per second.
    others: f64,
    backlog_since: Option<Instant>,
    calm_since: Option<Instant>,
    changed: Option<Instant>,
    climbed: Option<Instant>,
    /// Time without backlog after which a rendition is tried, for each rendition in the ladder.
    holds: Vec<Duration>,
    /// The capacity measured in the last backlog in bytes per second, and the time of the measurement.
    shown: Option<(Instant, f64)>,
    shortest: Shortest,
}

/// The smallest round-trip time in the current and in the previous period of length [`SHORTEST`].
#[derive(Default)]
struct Shortest {
    since: Option<Instant>,
    now: Duration,
    before: Duration,
}

impl Shortest {
    /// Returns by how much `round_trip` exceeds the smallest round-trip time of the last two periods.
    fn excess(&mut self, now: Instant, round_trip: Duration) -> Duration {
        let since = *self.since.get_or_insert(now);
        if now == since {
            (self.now, self.before) = (round_trip, round_trip);
        } else if now.saturating_duration_since(since) >= SHORTEST {
            self.since = Some(now);
            self.before = std::mem::replace(&mut self.now, round_trip);
        }
        self.now = self.now.min(round_trip);
        round_trip.saturating_sub(self.now.min(self.before))
    }
}

impl Decider {
    /// Makes a decider. `bitrates` has the rate of each rendition in bits per second, ascending. `rung` is the index of
    /// the rendition that is being sent.
    pub fn new(bitrates: impl IntoIterator<Item = u64>, rung: usize) -> Self {
        let rates: Vec<_> = bitrates.into_iter().map(|bits| bits as f64 / 8.0).collect();
        Self {
            holds: vec![HOLD; rates.len()],
            rates,
            rung,
            history: VecDeque::new(),
            others: 0.0,
            backlog_since: None,
            calm_since: None,
            changed: None,
            climbed: None,
            shown: None,
            shortest: Shortest::default(),
        }
    }

    /// Updates the decision with a sample, and returns the index of the selected rendition. Call it about every ten
    /// milliseconds.
    pub fn look(&mut self, sample: &ConnectionSample) -> usize {
        let now = sample.now;
        self.note(sample);
        let since = |at: Instant| now.saturating_duration_since(at);
        let path_queue = self.shortest.excess(now, sample.round_trip);
        let most_on_path = if self.is_on_trial(now) { TRIAL_QUEUE } else { BACKLOG };
        if sample.waiting >= BACKLOG || path_queue >= most_on_path {
            let began = *self.backlog_since.get_or_insert(now);
            self.calm_since = None;
            if since(began) >= PATIENCE {
                self.yield_to(now, began, sample.waiting >= BACKLOG);
            }
            return self.rung;
        }
        self.backlog_since = None;
        let calm = since(*self.calm_since.get_or_insert(now));
        self.smooth_others(now);
        if self.climbed.is_some_and(|at| since(at) >= MOST_HOLD) {
            self.set_hold(HOLD);
        }
        let hold = self.holds.get(self.rung + 1);
        if hold.is_some_and(|hold| calm >= *hold) && self.has_room_above(sample) {
            self.rung += 1;
            self.calm_since = Some(now);
            self.climbed = Some(now);
            self.changed = Some(now);
        }
        self.rung
    }

    fn note(&mut self, sample: &ConnectionSample) {
        self.history.push_back((sample.now, sample.delivered));
        let is_old = |at: Instant| sample.now.saturating_duration_since(at) > WINDOW;
        // One sample that is at least [`WINDOW`] old is kept, so that the samples cover the whole window.
        while self.history.get(1).is_some_and(|(at, _)| is_old(*at)) {
            self.history.pop_front();
        }
    }

    /// Reports whether the last change to a higher rendition is so recent that a backlog reverts it.
    fn is_on_trial(&self, now: Instant) -> bool {
        self.climbed.is_some_and(|at| now.saturating_duration_since(at) < TRIAL)
    }

    /// Divides the time since `from` into two halves. Reports whether the throughput in the second half is higher than
    /// in the first by the factor [`GROWTH`].
    fn is_growing(&self, from: Instant) -> bool {
        let Some((last, _)) = self.history.back() else { return false };
        let middle = from + last.saturating_duration_since(from) / 2;
        let halves = self.delivered_since(from).zip(self.delivered_since(middle));
        // Both halves have the same length, so the first half's rate is twice the total rate minus the second half's
        // rate.
        halves.is_some_and(|(both, second)| second > GROWTH * (2.0 * both - second))
    }

    /// Returns the throughput since `from` in bytes per second, from the samples that are kept. Returns `None` if no
    /// time has passed since `from`.
    fn delivered_since(&self, from: Instant) -> Option<f64> {
        let (first, before) = *self.history.iter().find(|(at, _)| *at >= from)?;
        let (last, after) = *self.history.back()?;
        let seconds = last.saturating_duration_since(first).as_secs_f64();
        (seconds > 0.0).then(|| after.saturating_sub(before) as f64 / seconds)
    }

    fn need(&self, rung: usize) -> Option<f64> {
        Some(self.rates.get(rung)? + self.others)
    }

    /// Selects a lower rendition if a backlog that began at `began` requires it. The backlog is in the send queue if
    /// `waits` is true, or else on the path.
    fn yield_to(&mut self, now: Instant, began: Instant, waits: bool) {
        let from = now.checked_sub(WINDOW).map_or(began, |window| window.max(began));
        let Some(carried) = self.delivered_since(from) else { return };
        if self.is_growing(from) {
            return;
        }
        let mut rung = self.rung;
        let on_trial = self.is_on_trial(now);
        if waits || on_trial {
            // The path is fully used, so the throughput is its capacity.
            self.shown = Some((now, carried));
        }
        if waits {
            let fits = |rung: &usize| self.need(*rung).is_some_and(|need| need <= ROOM * carried);
            rung = (0..=self.rung).rev().find(fits).unwrap_or(0);
        }
        let lasted = now.saturating_duration_since(began.max(self.changed.unwrap_or(began)));
        let patience = match (waits, on_trial) {
            (true, _) => LONG,
            (false, true) => TRIAL_PATIENCE,
            (false, false) => LONG_ON_PATH,
        };
        if rung == self.rung && lasted >= patience {
            rung = rung.saturating_sub(1);
        }
        if rung == self.rung {
            return;
        }
        self.climbed = None;
        if on_trial {
            let held = self.holds.get(self.rung).copied().unwrap_or(HOLD);
            self.set_hold((2 * held).min(MOST_HOLD));
        }
        self.rung = rung;
        self.changed = Some(now);
    }

    /// Sets, for the current rendition, how long there must be no backlog before the decider may select it again after
    /// a lower one.
    fn set_hold(&mut self, to: Duration) {
        self.holds.iter_mut().skip(self.rung).take(1).for_each(|hold| *hold = to);
    }

    /// Reports whether a higher rendition than the current one exists, and the path has enough capacity for the next
    /// higher one.
    fn has_room_above(&self, sample: &ConnectionSample) -> bool {
        let Some(need) = self.need(self.rung + 1) else { return false };
        let estimate = sample.bandwidth as f64;
        let since = |at: Instant| sample.now.saturating_duration_since(at);
        let is_refuted = |at: Instant, shown: f64| {
            since(at) >= MEMORY || since(at) >= LATELY && sample.fastest as f64 >= FASTER * shown
        };
        let carried = match self.shown {
            Some((at, shown)) if !is_refuted(at, shown) => estimate.min(shown),
            _ => estimate,
        };
        carried >= CARE * need
    }

    fn smooth_others(&mut self, now: Instant) {
        // After a change of rendition, data of the previous rendition is still being delivered, so the rate of data
        // other than the ladder's media cannot be computed.
        let is_old = self.changed.is_some_and(|at| now.saturating_duration_since(at) < SMOOTHING);
        let Some(((first, _), own)) = self.history.front().zip(self.rates.get(self.rung)) else { return };
        let (Some(rate), false) = (self.delivered_since(*first), is_old) else { return };
        let step = now.saturating_duration_since(self.history.iter().rev().nth(1).map_or(now, |(at, _)| *at));
        let part = (step.as_secs_f64() / SMOOTHING.as_secs_f64()).min(1.0);
        self.others += part * (rate - own - self.others);
        self.others = self.others.max(0.0);
    }
}
