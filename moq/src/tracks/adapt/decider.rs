//! Selects the rung of a ladder that a path has room for.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use millrace_quic::plane::{congestion::LATELY, downstream::ConnectionRoom};

/// Age of the oldest unsent media, or delay of the queue on the path, that counts as a backlog. A key frame alone can
/// cause a backlog.
const BACKLOG: Duration = Duration::from_millis(100);

/// Time that a backlog lasts before the throughput counts as the path's capacity.
const PATIENCE: Duration = Duration::from_millis(200);

/// Time after which a backlog in the send queue lowers the rung, whatever the estimate says.
const LONG: Duration = Duration::from_millis(1500);

/// Time after which a queue on the path lowers the rung. It is long, since a longer route looks like a queue.
const LONG_ON_PATH: Duration = Duration::from_secs(5);

/// Time over which the throughput is measured.
const WINDOW: Duration = Duration::from_millis(500);

/// Time without backlog before the next rung is tried, at first and at most. It doubles each time the next rung was too
/// much for the path.
const HOLD: Duration = Duration::from_secs(5);
const MOST_HOLD: Duration = Duration::from_secs(80);

/// A rung that is left within this time after a climb counts as too much for the path.
const TRIAL: Duration = Duration::from_secs(15);

/// Length of a period in which the smallest round trip is kept. The smallest of this period and the previous one counts
/// as the path's delay without a queue.
const SHORTEST: Duration = Duration::from_secs(15);

/// Time for which the capacity that a backlog showed takes precedence over the estimate. The estimate may be older,
/// since a sender below the path's capacity learns nothing about it.
const MEMORY: Duration = Duration::from_secs(60);

/// Multiple of the shown capacity at which a recent throughput overrides it. Key frames are sent that fast where there
/// is room.
const FASTER: f64 = 1.2;

/// While throughput grows by this factor from the first half of a backlog to the second, the sender is still finding
/// its rate.
const GROWTH: f64 = 1.5;

/// Delay of a new queue on the path that ends a climb, and how long it has to last.
const TRIAL_QUEUE: Duration = Duration::from_millis(50);
const TRIAL_PATIENCE: Duration = Duration::from_millis(600);

/// Fraction of the capacity that a rung may use: the media have headers, and their rate varies.
const ROOM: f64 = 0.9;

/// Capacity that the next rung requires, as a multiple of its rate.
const CARE: f64 = 1.25;

/// Time over which the rate of the connection's other media is smoothed.
const SMOOTHING: Duration = Duration::from_secs(3);

/// The state of a connection at some moment.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionSample {
    /// The time of the sample.
    pub now: Instant,
    /// Number of bytes that were acknowledged since the connection began.
    pub delivered: u64,
    /// The congestion controller's estimate of the path's capacity, bytes per second.
    pub bandwidth: u64,
    /// The highest throughput that was seen within [`LATELY`], bytes per second. It is a lower bound of the path's
    /// capacity.
    pub fastest: u64,
    /// Age of the oldest media in the send queue.
    pub waiting: Duration,
    /// Smoothed round trip.
    pub round_trip: Duration,
}

impl ConnectionSample {
    /// Makes a sample of the data plane's figures.
    pub fn from_room(room: &ConnectionRoom, now: Instant) -> Self {
        let ConnectionRoom { delivered, bandwidth, fastest, waiting, round_trip } = *room;
        Self { now, delivered, bandwidth, fastest, waiting, round_trip }
    }
}

/// A decider that watches one subscriber's path and selects the rung that fits.
///
/// It steps down as soon as a backlog shows the path's capacity, and up by one rung after a time without backlog. A
/// climb is on trial at first: if it causes a backlog, the rung below is restored and the next climb waits twice as
/// long. Call [`look`](Self::look) about every ten milliseconds; nothing happens between calls.
pub struct Decider {
    /// Rate of each rung, in bytes per second.
    rates: Vec<f64>,
    rung: usize,
    /// Numbers of bytes delivered so far, each with the time of its sample.
    history: VecDeque<(Instant, u64)>,
    /// Rate of the connection's other data, in bytes per second.
    others: f64,
    backlog_since: Option<Instant>,
    calm_since: Option<Instant>,
    changed: Option<Instant>,
    climbed: Option<Instant>,
    /// Time without backlog before each rung is tried.
    holds: Vec<Duration>,
    /// The capacity that the last backlog showed, in bytes per second.
    shown: Option<(Instant, f64)>,
    shortest: Shortest,
}

/// The smallest round trip of the current and the previous period.
#[derive(Default)]
struct Shortest {
    since: Option<Instant>,
    now: Duration,
    before: Duration,
}

impl Shortest {
    /// Returns the time by which `round_trip` exceeds the smallest recent one.
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
    /// Makes a decider. `bitrates` has the rate of each rung in bits per second, ascending. `rung` is the one that is
    /// sent now.
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

    /// Returns the rung that fits the connection now. Call it every ten milliseconds or so.
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
        // One entry stays that is as old as the window, or older, so that the window is covered.
        while self.history.get(1).is_some_and(|(at, _)| is_old(*at)) {
            self.history.pop_front();
        }
    }

    /// Reports whether the rung was climbed recently.
    fn is_on_trial(&self, now: Instant) -> bool {
        self.climbed.is_some_and(|at| now.saturating_duration_since(at) < TRIAL)
    }

    /// Reports whether throughput has kept growing since `from`.
    fn is_growing(&self, from: Instant) -> bool {
        let Some((last, _)) = self.history.back() else { return false };
        let middle = from + last.saturating_duration_since(from) / 2;
        let halves = self.delivered_since(from).zip(self.delivered_since(middle));
        // Both halves have the same length, so the first half's rate is twice the whole rate less the second's.
        halves.is_some_and(|(both, second)| second > GROWTH * (2.0 * both - second))
    }

    /// Returns the bytes per second delivered since `from`, within the window; `None` if that time has just begun.
    fn delivered_since(&self, from: Instant) -> Option<f64> {
        let (first, before) = *self.history.iter().find(|(at, _)| *at >= from)?;
        let (last, after) = *self.history.back()?;
        let seconds = last.saturating_duration_since(first).as_secs_f64();
        (seconds > 0.0).then(|| after.saturating_sub(before) as f64 / seconds)
    }

    fn need(&self, rung: usize) -> Option<f64> {
        Some(self.rates.get(rung)? + self.others)
    }

    /// Reacts to a backlog since `began`: in the send queue if `waits`, else on the path.
    fn yield_to(&mut self, now: Instant, began: Instant, waits: bool) {
        let from = now.checked_sub(WINDOW).map_or(began, |window| window.max(began));
        let Some(carried) = self.delivered_since(from) else { return };
        if self.is_growing(from) {
            return;
        }
        let mut rung = self.rung;
        let on_trial = self.is_on_trial(now);
        if waits || on_trial {
            // The path is full, so the throughput is its capacity.
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

    /// Sets the hold time of the current rung.
    fn set_hold(&mut self, to: Duration) {
        self.holds.iter_mut().skip(self.rung).take(1).for_each(|hold| *hold = to);
    }

    /// Reports whether there is a next rung, and it would fit.
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
        // Data that was sent before the last change is still being delivered.
        let is_old = self.changed.is_some_and(|at| now.saturating_duration_since(at) < SMOOTHING);
        let Some(((first, _), own)) = self.history.front().zip(self.rates.get(self.rung)) else { return };
        let (Some(rate), false) = (self.delivered_since(*first), is_old) else { return };
        let step = now.saturating_duration_since(self.history.iter().rev().nth(1).map_or(now, |(at, _)| *at));
        let part = (step.as_secs_f64() / SMOOTHING.as_secs_f64()).min(1.0);
        self.others += part * (rate - own - self.others);
        self.others = self.others.max(0.0);
    }
}
