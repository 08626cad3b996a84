//! Checks once a second whether a session meets the requirements of its application.

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use millrace_graft::packet::{
    SessionTraffic,
    choose::{Offer, PeerPathFigures},
};
use millrace_messages::{Qos, QualityViolation};

/// Number of seconds, up to the present, that the measurements cover.
const WINDOW: usize = 5;
/// Minimum number of sent datagrams for computing a loss.
const DATAGRAMS_MIN: u64 = 20;
/// Interval at which the application is told again that a requirement is still violated.
const TELL_AGAIN: Duration = Duration::from_secs(10);

/// Measurements of loss and throughput of an open session.
#[derive(Default)]
pub struct Quality {
    /// Name of the graft that the session changes to as soon as no other change is in progress.
    pub next: Option<String>,
    /// Values of the pooled socket's datagram counters when the session's application got the socket.
    base: QualityCounts,
    /// Numbers of datagrams that were sent, and that the graft refused to send, up to each of the latest checks, the
    /// newest last.
    sent: VecDeque<u64>,
    refused: VecDeque<u64>,
    /// Numbers of sent and lost datagrams up to each of the latest reports of the other host. Datagrams that may have
    /// been in flight at the time of a report are not counted.
    losses: VecDeque<QualityLoss>,
    /// Time at which the violation of each requirement was last reported to the application, by the requirement's name.
    told: BTreeMap<String, Instant>,
}

#[derive(Clone, Copy, Default)]
struct QualityCounts {
    sent: u64,
    delivered: u64,
    refused: u64,
}

#[derive(Clone, Copy)]
struct QualityLoss {
    sent: u64,
    lost: u64,
}

impl Quality {
    /// Restarts all measurements. Datagrams that the pooled socket's counters already contain are not counted for this
    /// session.
    pub fn begin(&mut self, traffic: &SessionTraffic) {
        *self = Self::default();
        self.base =
            QualityCounts { sent: traffic.sent, delivered: traffic.delivered, refused: traffic.refused };
    }

    /// Forgets the measured losses and the reported violations after the application has changed its requirements.
    pub fn forget(&mut self) {
        self.told.clear();
        self.losses.clear();
    }

    /// Returns the number of datagrams that have arrived for the session's application.
    pub fn delivered(&self, traffic: &SessionTraffic) -> u64 {
        traffic.delivered.saturating_sub(self.base.delivered)
    }

    pub fn look(&mut self, traffic: &SessionTraffic) {
        keep(&mut self.sent, traffic.sent.saturating_sub(self.base.sent));
        keep(&mut self.refused, traffic.refused.saturating_sub(self.base.refused));
    }

    /// Records a report of the other host, which says how many of the session's datagrams have arrived there.
    pub fn on_delivered(&mut self, delivered: u64) {
        // Only datagrams sent before the second-last check are counted, since later ones may still be in flight.
        let Some(&sent) = self.sent.iter().rev().nth(1) else { return };
        keep(&mut self.losses, QualityLoss { sent, lost: sent.saturating_sub(delivered) });
    }

    /// Returns the recent loss as a fraction of the sent datagrams.
    pub fn loss(&self) -> Option<f64> {
        let first = self.losses.front()?;
        let last = self.losses.back()?;
        let sent = last.sent.saturating_sub(first.sent);
        (sent >= DATAGRAMS_MIN).then(|| last.lost.saturating_sub(first.lost) as f64 / sent as f64)
    }

    /// Returns how many datagrams were sent in the last second, if the graft's window was full and refused a send in
    /// that second. Otherwise returns `None`.
    fn limited(&self) -> Option<u64> {
        let newest = |values: &VecDeque<u64>| {
            let mut newest = values.iter().rev();
            Some(newest.next()?.saturating_sub(*newest.next()?))
        };
        let sent = newest(&self.sent)?;
        (newest(&self.refused)? > 0).then_some(sent)
    }

    /// Returns the requirements of the application that the session does not meet.
    pub fn violations(
        &self,
        qos: &Qos,
        offer: &Offer,
        path: &PeerPathFigures,
        datagram_bytes: usize,
    ) -> Vec<QualityViolation> {
        let violation =
            |what: &str, asked, measured| QualityViolation { what: what.to_owned(), asked, measured };
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
            // The datagrams' real sizes are unknown, so all are assumed to have the maximum size.
            let mbit = (datagrams * datagram_bytes as u64 * 8) as f64 / 1e6;
            if mbit < least {
                found.push(violation("min_throughput", least, mbit));
            }
        }
        found
    }

    /// Returns the violations that are new, or that have lasted for `TELL_AGAIN` since they were reported.
    pub fn due_violations(&mut self, violations: &[QualityViolation], now: Instant) -> Vec<QualityViolation> {
        self.told.retain(|what, _| violations.iter().any(|violation| violation.what == *what));
        let is_due = |violation: &&QualityViolation| {
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

    fn seen(sent: u64, refused: u64) -> SessionTraffic {
        SessionTraffic { sent, refused, delivered: 0 }
    }

    const QOS: Qos =
        Qos { max_delay_ms: Some(100), min_throughput_mbit: Some(1.0), max_loss_percent: Some(5.0) };

    fn names(quality: &Quality, round_trip_ms: u64) -> Vec<String> {
        let path = PeerPathFigures { round_trip: Some(Duration::from_millis(round_trip_ms)), loss: None };
        let found = quality.violations(&QOS, &Offer::default(), &path, 1000);
        found.into_iter().map(|violation| violation.what).collect()
    }

    #[test]
    fn datagrams_in_flight_do_not_count_as_lost() {
        let mut quality = Quality::default();
        quality.begin(&seen(500, 0));
        // The session sends 100 datagrams a second, and each datagram arrives half a second after it was sent.
        for second in 1..=5 {
            quality.look(&seen(500 + 100 * second, 0));
            quality.on_delivered(100 * second - 50);
        }
        assert_eq!(quality.loss(), Some(0.0));
        assert!(names(&quality, 50).is_empty());
        // From the sixth second on, a tenth of the datagrams is lost.
        for second in 6..=12 {
            quality.look(&seen(500 + 100 * second, 0));
            quality.on_delivered(100 * (second - 1) - 10 * (second - 5));
        }
        assert!((quality.loss().expect("enough") - 0.1).abs() < 1e-9);
        assert_eq!(names(&quality, 50), ["max_loss"]);
        quality.forget();
        assert_eq!(quality.loss(), None);
    }

    #[test]
    fn minimum_throughput_is_violated_only_if_sends_are_refused() {
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
    fn lasting_quality_violation_is_reported_every_ten_seconds() {
        let mut quality = Quality::default();
        let now = Instant::now();
        let path = PeerPathFigures { round_trip: Some(Duration::from_millis(202)), loss: None };
        let found = quality.violations(&QOS, &Offer::default(), &path, 1000);
        assert_eq!(found, [QualityViolation { what: "max_delay".into(), asked: 100.0, measured: 101.0 }]);
        let told = |quality: &mut Quality, found: &[QualityViolation], s| {
            quality.due_violations(found, now + Duration::from_secs(s)).len()
        };
        assert_eq!(told(&mut quality, &found, 0), 1);
        assert_eq!(told(&mut quality, &found, 9), 0);
        assert_eq!(told(&mut quality, &found, 10), 1);
        assert_eq!(told(&mut quality, &[], 11), 0);
        assert_eq!(told(&mut quality, &found, 12), 1, "it had been over");
    }
}
