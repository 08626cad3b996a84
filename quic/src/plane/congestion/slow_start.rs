use std::time::{Duration, Instant};

use super::Acked;

/// Bounds of the threshold: slow start ends when the round-trip time grows by the threshold (RFC 9406, section 4.3).
const MIN_RTT_THRESHOLD: Duration = Duration::from_millis(4);
const MAX_RTT_THRESHOLD: Duration = Duration::from_millis(16);
/// Divisor of the threshold: slow start ends when the round-trip time grows by the previous round's shortest round-trip
/// time divided by this number. The threshold is limited by `MIN_RTT_THRESHOLD` and `MAX_RTT_THRESHOLD`.
const MIN_RTT_DIVISOR: u32 = 8;
/// Number of round-trip samples that a round needs before its shortest sample is compared with the previous round's
/// shortest sample.
const RTT_SAMPLES: u32 = 8;
/// Divisor of the window's growth in conservative slow start (CSS), and number of rounds that CSS lasts.
const CSS_GROWTH_DIVISOR: u64 = 4;
const CSS_ROUNDS: u32 = 5;

/// HyStart++ (RFC 9406), which leaves slow start when the round trip grows, before packets are lost.
///
/// A round ends with the first acknowledgement of a packet that was sent after the round began.
#[derive(Clone, Debug)]
pub struct SlowStart {
    round: SlowStartRound,
    /// Shortest round-trip time of the previous round.
    last_min: Option<Duration>,
    css: Option<Css>,
}

#[derive(Clone, Debug)]
struct SlowStartRound {
    start: Instant,
    min: Option<Duration>,
    samples: u32,
}

/// State of conservative slow start.
#[derive(Clone, Debug)]
struct Css {
    baseline: Duration,
    rounds: u32,
}

/// Effect of slow start on the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlowStartStep {
    /// The window grows by this number of bytes.
    Grow(u64),
    /// Slow start ends, and the present window becomes the slow start threshold.
    Exit,
}

impl SlowStart {
    /// Creates the state at the beginning of slow start.
    pub fn new(now: Instant) -> Self {
        Self { round: SlowStartRound { start: now, min: None, samples: 0 }, last_min: None, css: None }
    }

    /// Processes an acknowledgement, and returns its effect on the window.
    pub fn on_ack(&mut self, now: Instant, acked: &Acked) -> SlowStartStep {
        if acked.sent >= self.round.start && self.end_round(now) {
            return SlowStartStep::Exit;
        }
        self.sample(acked.rtt);
        SlowStartStep::Grow(if self.css.is_some() { acked.bytes / CSS_GROWTH_DIVISOR } else { acked.bytes })
    }

    /// Ends the round. Returns whether conservative slow start has lasted for `CSS_ROUNDS` rounds.
    fn end_round(&mut self, now: Instant) -> bool {
        self.last_min = self.round.min;
        self.round = SlowStartRound { start: now, min: None, samples: 0 };
        self.css.as_mut().is_some_and(|css| {
            css.rounds += 1;
            css.rounds >= CSS_ROUNDS
        })
    }

    fn sample(&mut self, rtt: Duration) {
        let min = self.round.min.map_or(rtt, |min| min.min(rtt));
        self.round.min = Some(min);
        self.round.samples += 1;
        // A round with few samples may only show noise, and the first round has no previous round to be compared with.
        let Some(last_min) = self.last_min.filter(|_| self.round.samples >= RTT_SAMPLES) else { return };
        match &self.css {
            None => {
                let threshold = (last_min / MIN_RTT_DIVISOR).clamp(MIN_RTT_THRESHOLD, MAX_RTT_THRESHOLD);
                if min >= last_min + threshold {
                    self.css = Some(Css { baseline: min, rounds: 0 });
                }
            }
            // The exit from slow start was spurious: the round trip is short again (RFC 9406, section 4.2).
            Some(css) if min < css.baseline => self.css = None,
            Some(_) => {}
        }
    }
}
