//! Whether a session keeps to what was asked for, second by second.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use millrace_graft::{
    message::{Qos, Violation},
    packet::{
        Traffic,
        choose::{Offer, Path},
    },
};

/// Seconds that count.
const WINDOW: usize = 5;
/// Of fewer datagrams nothing is said.
const DATAGRAMS_MIN: u64 = 20;
/// What goes on is told again after so long.
const TELL_AGAIN: Duration = Duration::from_secs(10);

/// What is known of an open session.
#[derive(Default)]
pub struct Quality {
    /// The graft that is to come as soon as nothing else is under way.
    pub next: Option<String>,
    /// What had been counted before it was this application's.
    base: Counts,
    /// At the latest looks: the newest last.
    sent: VecDeque<u64>,
    refused: VecDeque<u64>,
    /// Of what was sent a second ago, what had come by then; at the latest words of the other end.
    losses: VecDeque<Loss>,
    told: BTreeMap<String, Instant>,
}

#[derive(Clone, Copy, Default)]
struct Counts {
    sent: u64,
    delivered: u64,
    refused: u64,
}

#[derive(Clone, Copy)]
struct Loss {
    sent: u64,
    lost: u64,
}

impl Quality {
    /// From now on.
    pub fn begin(&mut self, traffic: &Traffic) {
        *self = Self::default();
        self.base = Counts { sent: traffic.sent, delivered: traffic.delivered, refused: traffic.refused };
    }

    /// Something else is asked for now.
    pub fn forget(&mut self) {
        self.told.clear();
        self.losses.clear();
    }

    /// Datagrams that have come here.
    pub fn delivered(&self, traffic: &Traffic) -> u64 {
        traffic.delivered.saturating_sub(self.base.delivered)
    }

    pub fn look(&mut self, traffic: &Traffic) {
        keep(&mut self.sent, traffic.sent.saturating_sub(self.base.sent));
        keep(&mut self.refused, traffic.refused.saturating_sub(self.base.refused));
    }

    /// How many datagrams have come at the other end.
    pub fn hear(&mut self, delivered: u64) {
        // What left after the look before the latest may be under way.
        let Some(&sent) = self.sent.iter().rev().nth(1) else { return };
        keep(&mut self.losses, Loss { sent, lost: sent.saturating_sub(delivered) });
    }

    /// Part of what was sent of late.
    pub fn loss(&self) -> Option<f64> {
        let (first, last) = (self.losses.front()?, self.losses.back()?);
        let sent = last.sent.saturating_sub(first.sent);
        (sent >= DATAGRAMS_MIN).then(|| last.lost.saturating_sub(first.lost) as f64 / sent as f64)
    }

    /// Datagrams a second, where it was refused to send more.
    fn limited(&self) -> Option<u64> {
        let newest = |values: &VecDeque<u64>| {
            let mut newest = values.iter().rev();
            Some(newest.next()?.saturating_sub(*newest.next()?))
        };
        let sent = newest(&self.sent)?;
        (newest(&self.refused)? > 0).then_some(sent)
    }

    /// What is not kept to.
    pub fn violations(&self, qos: &Qos, offer: &Offer, path: &Path, datagram_bytes: usize) -> Vec<Violation> {
        let violation = |what: &str, asked, measured| Violation { what: what.to_owned(), asked, measured };
        let mut found = Vec::new();
        if let (Some(most), Some(delay)) = (qos.max_delay(), offer.delay(path))
            && delay > most
        {
            found.push(violation("max_delay", ms(most), ms(delay)));
        }
        if let (Some(most), Some(loss)) = (qos.max_loss_percent, self.loss())
            && loss * 100.0 > most
        {
            found.push(violation("max_loss", most, loss * 100.0));
        }
        if let (Some(least), Some(datagrams)) = (qos.min_throughput_mbit, self.limited()) {
            // As if all of them were full.
            let mbit = (datagrams * datagram_bytes as u64 * 8) as f64 / 1e6;
            if mbit < least {
                found.push(violation("min_throughput", least, mbit));
            }
        }
        found
    }

    /// Those that are new, or go on.
    pub fn due(&mut self, violations: &[Violation], now: Instant) -> Vec<Violation> {
        self.told.retain(|what, _| violations.iter().any(|violation| violation.what == *what));
        let is_due = |violation: &&Violation| {
            let told = self.told.get(&violation.what);
            told.is_none_or(|told| now.saturating_duration_since(*told) >= TELL_AGAIN)
        };
        let found: Vec<_> = violations.iter().filter(is_due).cloned().collect();
        self.told.extend(found.iter().map(|violation| (violation.what.clone(), now)));
        found
    }
}

fn keep<T>(values: &mut VecDeque<T>, value: T) {
    values.push_back(value);
    if values.len() > WINDOW {
        values.pop_front();
    }
}

fn ms(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e4).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(sent: u64, refused: u64) -> Traffic {
        Traffic { sent, refused, delivered: 0 }
    }

    const QOS: Qos =
        Qos { max_delay_ms: Some(100), min_throughput_mbit: Some(1.0), max_loss_percent: Some(5.0) };

    fn names(quality: &Quality, round_trip_ms: u64) -> Vec<String> {
        let path = Path { round_trip: Some(Duration::from_millis(round_trip_ms)), loss: None };
        let found = quality.violations(&QOS, &Offer::default(), &path, 1000);
        found.into_iter().map(|violation| violation.what).collect()
    }

    #[test]
    fn losses_are_of_what_had_time_to_come() {
        let mut quality = Quality::default();
        quality.begin(&seen(500, 0));
        // 100 a second, of which each arrives half a second later.
        for second in 1..=5 {
            quality.look(&seen(500 + 100 * second, 0));
            quality.hear(100 * second - 50);
        }
        assert_eq!(quality.loss(), Some(0.0));
        assert!(names(&quality, 50).is_empty());
        // A tenth is lost from now on.
        for second in 6..=12 {
            quality.look(&seen(500 + 100 * second, 0));
            quality.hear(100 * (second - 1) - 10 * (second - 5));
        }
        assert!((quality.loss().expect("enough") - 0.1).abs() < 1e-9);
        assert_eq!(names(&quality, 50), ["max_loss"]);
        quality.forget();
        assert_eq!(quality.loss(), None);
    }

    #[test]
    fn a_slow_session_is_one_that_would_send_more() {
        let mut quality = Quality::default();
        quality.begin(&seen(0, 7));
        quality.look(&seen(100, 7));
        quality.look(&seen(200, 7));
        assert!(names(&quality, 50).is_empty(), "it does not want to");
        quality.look(&seen(300, 8));
        assert_eq!(names(&quality, 50), ["min_throughput"]);
        quality.look(&seen(500, 9));
        assert!(names(&quality, 50).is_empty(), "200 a second of 1000 bytes");
    }

    #[test]
    fn what_goes_on_is_told_now_and_then() {
        let (mut quality, now) = (Quality::default(), Instant::now());
        let path = Path { round_trip: Some(Duration::from_millis(202)), loss: None };
        let found = quality.violations(&QOS, &Offer::default(), &path, 1000);
        assert_eq!(found, [Violation { what: "max_delay".into(), asked: 100.0, measured: 101.0 }]);
        let told = |quality: &mut Quality, found: &[Violation], s| {
            quality.due(found, now + Duration::from_secs(s)).len()
        };
        assert_eq!(told(&mut quality, &found, 0), 1);
        assert_eq!(told(&mut quality, &found, 9), 0);
        assert_eq!(told(&mut quality, &found, 10), 1);
        assert_eq!(told(&mut quality, &[], 11), 0);
        assert_eq!(told(&mut quality, &found, 12), 1, "it had been over");
    }
}
