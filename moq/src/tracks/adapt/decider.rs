//! Which rung of a ladder a path has room for.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use millrace_quic::plane::{congestion::LATELY, downstream::Room};

/// From this age of what waits, or this much of queue on the path, something is wrong, or a key frame is on its way.
const BACKLOG: Duration = Duration::from_millis(100);

/// A backlog that lasts for this long shows what the path carries.
const PATIENCE: Duration = Duration::from_millis(200);

/// What waits for this long is too much for the path, whatever that seems to carry.
const LONG: Duration = Duration::from_millis(1500);

/// The same for a queue on the path, which may also be a longer way.
const LONG_ON_PATH: Duration = Duration::from_secs(5);

/// What the path carries is what was delivered in this time.
const WINDOW: Duration = Duration::from_millis(500);

/// How long all has to be well before the next rung is tried, at first and at most: twice as long after each time that it was
/// too much.
const HOLD: Duration = Duration::from_secs(5);
const MOST_HOLD: Duration = Duration::from_secs(80);

/// A rung that is left within this time after it was climbed to was too much.
const TRIAL: Duration = Duration::from_secs(15);

/// The shortest round trip of this long, or twice as long, is what the path takes without a queue.
const SHORTEST: Duration = Duration::from_secs(15);

/// For this long what a backlog has shown is believed rather than an estimate that may be older: who sends less than the path
/// takes learns nothing of that.
const MEMORY: Duration = Duration::from_secs(60);

/// Unless media have arrived so much faster than that since, as key frames do where there is room.
const FASTER: f64 = 1.2;

/// While more arrives by so much from one half of a backlog to the other, the sender is still about to find out how much it may
/// send.
const GROWTH: f64 = 1.5;

/// A queue on the path that was not there before a climb, and for how long.
const TRIAL_QUEUE: Duration = Duration::from_millis(50);
const TRIAL_PATIENCE: Duration = Duration::from_millis(600);

/// Part of what the path carries that a rung may take: what is sent is media with headers, and varies.
const ROOM: f64 = 0.9;

/// How much more than the next rung takes has to be there.
const CARE: f64 = 1.25;

/// Over this time the rate of the connection's other media is smoothed.
const SMOOTHING: Duration = Duration::from_secs(3);

/// A connection at some moment.
#[derive(Clone, Copy, Debug)]
pub struct Sample {
    pub now: Instant,
    /// Bytes that were acknowledged since the connection began.
    pub delivered: u64,
    /// What the congestion controller thinks that the path carries, bytes per second.
    pub bandwidth: u64,
    /// The most that the path was seen to deliver within [`LATELY`], bytes per second: what it carries, or less.
    pub fastest: u64,
    /// Age of the oldest media that waits to be sent.
    pub waiting: Duration,
    /// Smoothed.
    pub round_trip: Duration,
}

impl Sample {
    pub fn of(room: &Room, now: Instant) -> Self {
        let Room { delivered, bandwidth, fastest, waiting, round_trip } = *room;
        Self { now, delivered, bandwidth, fastest, waiting, round_trip }
    }
}

/// Looks at one subscriber's path and says which rung fits: down as soon as a backlog shows what the path carries, up
/// one rung at a time and with care.
pub struct Decider {
    /// Bytes per second of each rung.
    rates: Vec<f64>,
    rung: usize,
    /// When how much was delivered.
    history: VecDeque<(Instant, u64)>,
    /// Bytes per second of what else the connection carries.
    others: f64,
    backlog_since: Option<Instant>,
    calm_since: Option<Instant>,
    changed: Option<Instant>,
    climbed: Option<Instant>,
    /// How long all has to be well before each rung is climbed to.
    holds: Vec<Duration>,
    /// What the last backlog has shown, bytes per second.
    shown: Option<(Instant, f64)>,
    shortest: Shortest,
}

/// The shortest round trip of not long ago.
#[derive(Default)]
struct Shortest {
    since: Option<Instant>,
    now: Duration,
    before: Duration,
}

impl Shortest {
    /// By how much this round trip is longer.
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
    /// `bitrates`: of each rung, bits per second, ascending. `rung`: the one that is sent now.
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

    /// Takes a look at the connection, at intervals of some ten milliseconds; returns the rung that fits.
    pub fn look(&mut self, sample: &Sample) -> usize {
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

    fn note(&mut self, sample: &Sample) {
        self.history.push_back((sample.now, sample.delivered));
        let is_old = |at: Instant| sample.now.saturating_duration_since(at) > WINDOW;
        // The first one is as old as the window, or older.
        while self.history.get(1).is_some_and(|(at, _)| is_old(*at)) {
            self.history.pop_front();
        }
    }

    /// It has climbed not long ago.
    fn is_on_trial(&self, now: Instant) -> bool {
        self.climbed.is_some_and(|at| now.saturating_duration_since(at) < TRIAL)
    }

    /// Ever more has been delivered since `from`.
    fn is_growing(&self, from: Instant) -> bool {
        let Some((last, _)) = self.history.back() else { return false };
        let middle = from + last.saturating_duration_since(from) / 2;
        let halves = self.delivered_since(from).zip(self.delivered_since(middle));
        // The second half is as long as the first.
        halves.is_some_and(|(both, second)| second > GROWTH * (2.0 * both - second))
    }

    /// Bytes per second delivered from `from` on, within the window; `None`: it has just begun.
    fn delivered_since(&self, from: Instant) -> Option<f64> {
        let (first, before) = *self.history.iter().find(|(at, _)| *at >= from)?;
        let (last, after) = *self.history.back()?;
        let seconds = last.saturating_duration_since(first).as_secs_f64();
        (seconds > 0.0).then(|| after.saturating_sub(before) as f64 / seconds)
    }

    fn need(&self, rung: usize) -> Option<f64> {
        Some(self.rates.get(rung)? + self.others)
    }

    /// There has been a backlog since `began`, in front of the path if `waits`, else on it.
    fn yield_to(&mut self, now: Instant, began: Instant, waits: bool) {
        let from = now.checked_sub(WINDOW).map_or(began, |window| window.max(began));
        let Some(carried) = self.delivered_since(from) else { return };
        if self.is_growing(from) {
            return;
        }
        let mut rung = self.rung;
        let on_trial = self.is_on_trial(now);
        if waits || on_trial {
            // The path has as much as it takes.
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

    /// Of climbing to where it is.
    fn set_hold(&mut self, to: Duration) {
        self.holds.iter_mut().skip(self.rung).take(1).for_each(|hold| *hold = to);
    }

    /// Whether the next rung is there and would fit.
    fn has_room_above(&self, sample: &Sample) -> bool {
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
        // What was sent before the last change is still among what is delivered.
        let is_old = self.changed.is_some_and(|at| now.saturating_duration_since(at) < SMOOTHING);
        let Some(((first, _), own)) = self.history.front().zip(self.rates.get(self.rung)) else { return };
        let (Some(rate), false) = (self.delivered_since(*first), is_old) else { return };
        let step = now.saturating_duration_since(self.history.iter().rev().nth(1).map_or(now, |(at, _)| *at));
        let part = (step.as_secs_f64() / SMOOTHING.as_secs_f64()).min(1.0);
        self.others += part * (rate - own - self.others);
        self.others = self.others.max(0.0);
    }
}
