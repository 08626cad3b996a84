use std::time::{Duration, Instant};

use super::Acked;

const MIN_RTT_THRESHOLD: Duration = Duration::from_millis(4);
const MAX_RTT_THRESHOLD: Duration = Duration::from_millis(16);
const MIN_RTT_DIVISOR: u32 = 8;
const RTT_SAMPLES: u32 = 8;
const CSS_GROWTH_DIVISOR: u64 = 4;
const CSS_ROUNDS: u32 = 5;

/// HyStart++ (RFC 9406): leaves slow start when the round trip grows, before packets are lost.
///
/// A round ends with the first acknowledgement of a packet that was sent after the round began.
#[derive(Clone, Debug)]
pub struct SlowStart {
    round: Round,
    /// The shortest round trip of the round before.
    last_min: Option<Duration>,
    css: Option<Css>,
}

#[derive(Clone, Debug)]
struct Round {
    start: Instant,
    min: Option<Duration>,
    samples: u32,
}

/// Conservative slow start.
#[derive(Clone, Debug)]
struct Css {
    baseline: Duration,
    rounds: u32,
}

/// What slow start does to the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Grow(u64),
    /// Slow start is over: the window at hand is the threshold.
    Exit,
}

impl SlowStart {
    pub fn new(now: Instant) -> Self {
        Self { round: Round { start: now, min: None, samples: 0 }, last_min: None, css: None }
    }

    pub fn on_ack(&mut self, now: Instant, acked: &Acked) -> Step {
        if acked.sent >= self.round.start && self.end_round(now) {
            return Step::Exit;
        }
        self.sample(acked.rtt);
        Step::Grow(if self.css.is_some() { acked.bytes / CSS_GROWTH_DIVISOR } else { acked.bytes })
    }

    /// Returns whether conservative slow start has run for long enough.
    fn end_round(&mut self, now: Instant) -> bool {
        self.last_min = self.round.min;
        self.round = Round { start: now, min: None, samples: 0 };
        self.css.as_mut().is_some_and(|css| {
            css.rounds += 1;
            css.rounds >= CSS_ROUNDS
        })
    }

    fn sample(&mut self, rtt: Duration) {
        let min = self.round.min.map_or(rtt, |min| min.min(rtt));
        self.round.min = Some(min);
        self.round.samples += 1;
        let Some(last_min) = self.last_min.filter(|_| self.round.samples >= RTT_SAMPLES) else { return };
        match &self.css {
            None => {
                let threshold = (last_min / MIN_RTT_DIVISOR).clamp(MIN_RTT_THRESHOLD, MAX_RTT_THRESHOLD);
                if min >= last_min + threshold {
                    self.css = Some(Css { baseline: min, rounds: 0 });
                }
            }
            // Spurious: the round trip is shorter again (RFC 9406, section 4.2).
            Some(css) if min < css.baseline => self.css = None,
            Some(_) => {}
        }
    }
}
