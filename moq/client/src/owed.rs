//! Latency statistics over all objects that a subscriber should have received.

use std::time::Duration;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::payload::Stamp;

/// The statistics cover only objects that were sent at least this long after the first object arrived. A subscription
/// begins with objects of the current group, which may have been sent long before the subscription.
const SETTLING: Duration = Duration::from_secs(1);

/// Latency up to which an object is counted as on time, as live media need it.
const ON_TIME: Duration = Duration::from_secs(1);

/// Statistics of the objects that one subscriber, or several together, should have received, and of those received.
#[derive(Clone, Debug)]
pub struct Owed {
    /// Only objects that were sent at this time or later count in the statistics.
    since: Option<Duration>,
    /// Largest sequence number of an object that arrived and was sent before the time in the field `since`. Objects
    /// with larger numbers count in the statistics, even if they never arrive.
    before: Option<u64>,
    /// The lowest sequence number of an object that arrived and was sent at the time in the field `since` or later.
    first: Option<u64>,
    /// Number of objects that the track will have, or 0 if unknown.
    total: u64,
    /// The lowest and the highest sequence number that arrived, each with its sending time.
    ends: Option<[(u64, Duration); 2]>,
    /// Latency in nanoseconds of the objects that arrived and were sent at the time in the field `since` or later.
    latency: Histogram<u64>,
}

impl Owed {
    /// Makes statistics without objects. `latency` is an empty histogram.
    pub fn new(latency: Histogram<u64>) -> Self {
        Self { since: None, before: None, first: None, total: 0, ends: None, latency }
    }

    /// Records an object that has arrived for the first time.
    pub fn object(&mut self, stamp: Stamp, now: Duration) {
        let since = *self.since.get_or_insert(now + SETTLING);
        self.total = stamp.total;
        let this = (stamp.sequence, stamp.sent);
        self.ends = Some(self.ends.map_or([this; 2], |[low, high]| [low.min(this), high.max(this)]));
        if stamp.sent < since {
            self.before = self.before.max(Some(stamp.sequence));
            return;
        }
        self.first = Some(self.first.map_or(stamp.sequence, |first| first.min(stamp.sequence)));
        // The histogram grows on demand, so it can record any value.
        let _ = self.latency.record(now.saturating_sub(stamp.sent).as_nanos() as u64);
    }

    /// Reports whether the last object of the track should have been sent by `now`, at the rate of the objects that
    /// arrived.
    pub fn is_published(&self, now: Duration) -> bool {
        let Some([(low, since), (high, until)]) = self.ends else { return false };
        let came = (high - low) as u32;
        let missing = self.total.saturating_sub(high + 1);
        let interval = until.saturating_sub(since).checked_div(came).unwrap_or_default();
        came > 0 && self.total > 0 && until + interval.saturating_mul(missing as u32) <= now
    }

    /// Returns the number of objects that were sent from the time in the field `since` to the end of the track, whether
    /// they arrived or not. Returns `None` if the track's length is unknown, or nothing arrived.
    fn objects(&self) -> Option<u64> {
        let first = self.before.map(|before| before + 1).or(self.first)?;
        self.total.checked_sub(first)
    }

    /// Returns common statistics of several subscribers. Returns `None` if the number of objects is unknown for one of
    /// them.
    pub fn report<'a>(all: impl IntoIterator<Item = &'a Self>) -> Option<OwedReport> {
        let mut objects = 0;
        let mut latency: Option<Histogram<u64>> = None;
        for one in all {
            objects += one.objects()?;
            match &mut latency {
                // These histograms extend their range of values on demand, so adding one to another cannot fail.
                Some(latency) => drop(latency.add(&one.latency)),
                None => latency = Some(one.latency.clone()),
            }
        }
        let latency = latency?;
        let at = |quantile| at_quantile(&latency, objects, quantile);
        let latency_us = OwedLatency { p50: at(0.5), p90: at(0.9), p99: at(0.99) };
        let on_time = latency.count_between(0, ON_TIME.as_nanos() as u64);
        Some(OwedReport { objects, delivered: latency.len(), on_time, latency_us })
    }
}

/// Returns a latency quantile in microseconds, by nearest rank among all `objects` that should have arrived. Returns
/// `None` if the object of that rank never arrived.
fn at_quantile(latency: &Histogram<u64>, objects: u64, quantile: f64) -> Option<f64> {
    let rank = (quantile * objects as f64).ceil().max(1.0);
    let share = rank / latency.len() as f64;
    (share <= 1.0).then(|| latency.value_at_quantile(share) as f64 / 1e3)
}

/// Statistics of one or more subscribers, in the form that is printed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OwedReport {
    /// Number of objects that were sent from one second after the first arrival to the end of the track.
    pub objects: u64,
    /// Number of the objects in `objects` that arrived.
    pub delivered: u64,
    /// Number of the objects in `objects` that arrived within a second of being sent.
    pub on_time: u64,
    /// Latency quantiles over the objects in `objects`, arrived or not.
    pub latency_us: OwedLatency,
}

/// Quantiles of the one-way latency, in microseconds. A quantile is `None` if the object at its rank never arrived.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct OwedLatency {
    /// The median.
    pub p50: Option<f64>,
    /// The 90th percentile.
    pub p90: Option<f64>,
    /// The 99th percentile.
    pub p99: Option<f64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOTAL: u64 = 400;
    const INTERVAL: Duration = Duration::from_millis(10);

    /// Simulates a subscriber. `comes` returns the delay of each object in milliseconds, or `None` if the object never
    /// arrives.
    fn subscriber(comes: impl Fn(u64) -> Option<u64>) -> Owed {
        let mut owed = Owed::new(Histogram::new(3).unwrap());
        for sequence in 0..TOTAL {
            let sent = Duration::from_secs(5) + INTERVAL * sequence as u32;
            if let Some(late) = comes(sequence) {
                let stamp = Stamp { sequence, sent, total: TOTAL };
                owed.object(stamp, sent + Duration::from_millis(late));
            }
        }
        owed
    }

    fn ms(latency: Option<f64>) -> Option<u64> {
        latency.map(|us| (us / 1e3).round() as u64)
    }

    #[test]
    fn latency_percentiles_count_a_missing_object_as_infinitely_late() {
        // The objects of the first second are left out of the statistics. Of the other 300 objects, every tenth never
        // arrives.
        let owed = subscriber(|n| (n % 10 != 5).then_some(if n < 100 { 0 } else { 20 }));
        let report = Owed::report([&owed]).unwrap();
        assert_eq!((report.objects, report.delivered), (300, 270));
        let latency = report.latency_us;
        assert_eq!((ms(latency.p50), ms(latency.p90), ms(latency.p99)), (Some(20), Some(20), None));
    }

    #[test]
    fn missing_objects_at_the_end_of_the_track_count_as_lost() {
        let gap = subscriber(|n| (!(95..105).contains(&n)).then_some(0));
        assert_eq!(
            Owed::report([&gap]).map(|report| report.objects),
            Some(305),
            "some of the gap may be from before"
        );
        let owed = subscriber(|n| (n < 250).then_some(0));
        let report = Owed::report([&owed]).unwrap();
        assert_eq!((report.objects, report.delivered), (300, 150));
        assert_eq!((ms(report.latency_us.p50), report.latency_us.p90), (Some(0), None));
    }

    #[test]
    fn latency_percentiles_cover_the_objects_of_all_subscribers() {
        let fast = subscriber(|_| Some(10));
        let slow = subscriber(|_| Some(30));
        let report = Owed::report([&fast, &slow]).unwrap();
        // The statistics cover the objects that were sent at least a second after the first arrival. The first object
        // arrives 10 ms after it was sent at the fast subscriber, and 30 ms at the slow one.
        assert_eq!((report.objects, report.delivered), (299 + 297, 299 + 297));
        assert_eq!((ms(report.latency_us.p50), ms(report.latency_us.p99)), (Some(10), Some(30)));
    }

    #[test]
    fn object_later_than_a_second_is_not_on_time() {
        let report = Owed::report([&subscriber(|n| Some(if n < 200 { 10 } else { 1500 }))]).unwrap();
        assert_eq!((report.objects, report.delivered, report.on_time), (299, 299, 99));
    }

    #[test]
    fn whole_track_counts_as_published_when_its_last_object_is_due() {
        let start = Duration::from_secs(5);
        let end = start + INTERVAL * (TOTAL as u32 - 1);
        // Only 50 objects arrive, ten seconds after they were sent. The rate of the track is computed from their
        // sending times alone.
        let owed = subscriber(|n| (n < 50).then_some(10_000));
        assert!(!owed.is_published(end - INTERVAL / 2) && owed.is_published(end));
        assert!(!subscriber(|n| (n == 3).then_some(0)).is_published(end * 2), "how fast it is, is not known");
        assert!(!subscriber(|_| None).is_published(end * 2));
    }

    #[test]
    fn one_received_object_of_a_track_counts_all_later_ones_as_missing() {
        let report = Owed::report([&subscriber(|n| (n == 3).then_some(0))]).unwrap();
        assert_eq!((report.objects, report.delivered, report.latency_us.p50), (396, 0, None));
        assert_eq!(Owed::report([&subscriber(|_| None)]), None);
        assert_eq!(Owed::report([]), None);
    }
}
