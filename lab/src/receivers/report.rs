//! Counts and latencies of all sessions of one run of `millrace-lab lab receivers`.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};

use super::{sequence::SequenceCounts, session::ReceiverEvent};
use crate::stats::Percentiles;

/// Largest number of reasons for ended sessions that are counted separately. Any further reasons are counted together.
const REASONS: usize = 16;
const OTHER: &str = "other reasons";
/// Longest latency of an object that is in time.
const ON_TIME: Duration = Duration::from_secs(1);

/// A wave, in which a share of the sessions moved to other addresses. Times are of `CLOCK_MONOTONIC`, ns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moved {
    pub began_ns: u64,
    pub ended_ns: u64,
    pub sessions: u64,
}

/// How much of the media the relay's kernel programs (BPF) sent while the subscribers ran.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct KernelShare {
    /// Share of the relay's media packets that the kernel sent while the subscribers ran, percent.
    pub sent_percent: f64,
    /// Number of the relay's sessions to which its kernel programs (BPF) could send at the end.
    pub ready: u64,
}

/// The result of `millrace-lab lab receivers`: counts and latencies of all subscriber sessions.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ReceiversReport {
    pub sessions: u64,
    pub connected: u64,
    pub subscribed: u64,
    /// Number of sessions that received an object.
    pub served: u64,
    /// Sessions that the relay or the network ended before the end of their track, by reason.
    pub ended_early: BTreeMap<String, u64>,
    pub objects: u64,
    pub duplicates: u64,
    /// Objects that never arrived, although later objects did or the track's end shows that they existed.
    pub missing: u64,
    /// Objects that were not counted because their group is too old: only the newest groups of each subscription are
    /// tracked.
    pub late: u64,
    /// Streams that were reset, or that ended inside an object.
    pub streams_cut: u64,
    pub packets: u64,
    pub bytes: u64,
    /// Time from a session's first packet to its first object.
    pub first_object_ms: Option<Percentiles>,
    /// Objects that arrived per second, summed over all sessions, from the time when each session had received an object.
    pub rate_hz: f64,
    /// Objects with a time stamp that arrived since then, and those of them that arrived within a second after they were
    /// sent.
    pub measured: u64,
    pub on_time: u64,
    /// Time from the publisher to the subscriber, for these objects.
    pub latency_ms: Option<Percentiles>,
    /// The same, with missing objects as infinitely late: 50th, 90th and 99th percentile; `None` stands for infinity.
    pub owed_ms: [Option<f64>; 3],
    pub moves: Vec<Moved>,
    /// Time from a session's move to another address to the next object that arrives there.
    pub resumed_ms: Option<Percentiles>,
    /// Number of a session's moves to another address after which no object arrived.
    pub not_resumed: u64,
    /// Number of packets that arrived at an address after their session had moved away from it. They are dropped.
    pub packets_too_late: u64,
    /// Memory of this process per session, measured when all sessions were connected, bytes.
    pub bytes_per_session: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<KernelShare>,
}

/// Counters of the subscriber sessions, which the report is made from.
pub struct ReceiverCounters {
    pub connected: u64,
    pub subscribed: u64,
    pub served: u64,
    pub resumed: u64,
    pub streams_cut: u64,
    pub packets: u64,
    pub bytes: u64,
    pub packets_too_late: u64,
    pub not_resumed: u64,
    pub moves: Vec<Moved>,
    pub bytes_per_session: u64,
    /// Objects with a time stamp that have arrived, and those of them that arrived within a second, since all sessions
    /// were served.
    stamped: u64,
    on_time: u64,
    /// Times and numbers of objects, when all sessions were served, and when the last objects were seen to arrive.
    rate_marks: Option<[(Instant, u64); 2]>,
    counts: SequenceCounts,
    ended_early: BTreeMap<String, u64>,
    first_object_us: Histogram<u64>,
    latency_us: Histogram<u64>,
    resumed_us: Histogram<u64>,
}

impl ReceiverCounters {
    /// Creates counters that are zero.
    ///
    /// # Errors
    ///
    /// It never fails: three digits are a valid precision for histograms.
    pub fn new() -> anyhow::Result<Self> {
        Ok(Self {
            connected: 0,
            subscribed: 0,
            served: 0,
            resumed: 0,
            streams_cut: 0,
            packets: 0,
            bytes: 0,
            packets_too_late: 0,
            not_resumed: 0,
            moves: Vec::new(),
            bytes_per_session: 0,
            stamped: 0,
            on_time: 0,
            rate_marks: None,
            counts: SequenceCounts::default(),
            ended_early: BTreeMap::new(),
            first_object_us: Histogram::new(3)?,
            latency_us: Histogram::new(3)?,
            resumed_us: Histogram::new(3)?,
        })
    }

    /// Counts an event of a session.
    pub fn take(&mut self, news: ReceiverEvent) {
        // An error is ignored: histograms grow on demand, so they accept any value.
        let record = |times: &mut Histogram<u64>, time: Duration| {
            let _ = times.record(u64::try_from(time.as_micros()).unwrap_or(u64::MAX));
        };
        match news {
            ReceiverEvent::Connected => self.connected += 1,
            ReceiverEvent::Subscribed => self.subscribed += 1,
            ReceiverEvent::FirstObject(time) => {
                self.served += 1;
                record(&mut self.first_object_us, time);
            }
            ReceiverEvent::Resumed(time) => {
                self.resumed += 1;
                record(&mut self.resumed_us, time);
            }
            ReceiverEvent::Latency(time) => {
                self.stamped += 1;
                self.on_time += u64::from(time <= ON_TIME);
                record(&mut self.latency_us, time);
            }
            ReceiverEvent::Cut => self.streams_cut += 1,
        }
    }

    /// Notes how many objects have arrived until now, for the rate. This is called often. Once all sessions are served,
    /// the latencies from before are dropped, since they were measured while handshakes took the CPU.
    pub fn look(&mut self, now: Instant, sessions: u64) {
        if self.rate_marks.is_none() && self.served + self.ended_early() >= sessions {
            self.measure_anew(now);
        }
        if let Some([_, last]) = self.rate_marks.as_mut().filter(|[_, last]| last.1 < self.stamped) {
            *last = (now, self.stamped);
        }
    }

    /// Drops the latencies measured so far, and begins to measure the rate.
    pub fn measure_anew(&mut self, now: Instant) {
        (self.stamped, self.on_time) = (0, 0);
        self.latency_us.reset();
        self.rate_marks = Some([(now, 0); 2]);
    }

    fn rate_hz(&self) -> f64 {
        let Some([(since, _), (until, objects)]) = self.rate_marks else { return 0.0 };
        objects as f64 / (until - since).as_secs_f64().max(f64::EPSILON)
    }

    /// Returns a percentile of the latency, in ms, with missing objects as infinitely late.
    fn owed_ms(&self, quantile: f64) -> Option<f64> {
        let arrived = self.latency_us.len();
        let of_arrived = quantile * (arrived + self.counts.missing) as f64 / arrived.max(1) as f64;
        (of_arrived <= 1.0).then(|| self.latency_us.value_at_quantile(of_arrived) as f64 / 1e3)
    }

    /// Counts a session that ended before its track.
    pub fn end_early(&mut self, reason: String) {
        let is_known = self.ended_early.len() < REASONS || self.ended_early.contains_key(&reason);
        let reason = if is_known { reason } else { OTHER.to_owned() };
        *self.ended_early.entry(reason).or_default() += 1;
    }

    /// Returns the number of sessions that ended before their track.
    pub fn ended_early(&self) -> u64 {
        self.ended_early.values().sum()
    }

    /// Adds the object counts of a session that has ended.
    pub fn add(&mut self, counts: SequenceCounts) {
        self.counts.add(counts);
    }

    /// Returns the report for this number of subscriber sessions.
    pub fn report(&self, sessions: u64) -> ReceiversReport {
        let SequenceCounts { objects, duplicates, missing, late } = self.counts;
        ReceiversReport {
            sessions,
            connected: self.connected,
            subscribed: self.subscribed,
            served: self.served,
            ended_early: self.ended_early.clone(),
            objects,
            duplicates,
            missing,
            late,
            streams_cut: self.streams_cut,
            packets: self.packets,
            bytes: self.bytes,
            first_object_ms: Percentiles::from_histogram_us(&self.first_object_us),
            rate_hz: self.rate_hz(),
            measured: self.stamped,
            on_time: self.on_time,
            latency_ms: Percentiles::from_histogram_us(&self.latency_us),
            owed_ms: [0.5, 0.9, 0.99].map(|quantile| self.owed_ms(quantile)),
            moves: self.moves.clone(),
            resumed_ms: Percentiles::from_histogram_us(&self.resumed_us),
            not_resumed: self.not_resumed,
            packets_too_late: self.packets_too_late,
            bytes_per_session: self.bytes_per_session,
            kernel: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_events_are_summed_into_the_receiver_report() {
        let mut figures = ReceiverCounters::new().unwrap();
        for ms in 1..=100 {
            figures.take(ReceiverEvent::FirstObject(Duration::from_millis(ms)));
        }
        figures.take(ReceiverEvent::Cut);
        figures.add(SequenceCounts { objects: 7, missing: 1, ..SequenceCounts::default() });
        let report = figures.report(200);
        let first = report.first_object_ms.unwrap();
        assert_eq!((first.p50.round(), first.p99.round(), first.max.round()), (50.0, 99.0, 100.0));
        assert_eq!((report.sessions, report.served, report.objects, report.missing), (200, 100, 7, 1));
        assert_eq!((report.streams_cut, report.latency_ms, report.resumed_ms), (1, None, None));
    }

    #[test]
    fn missing_objects_count_as_infinitely_late_and_not_in_the_rate() {
        let mut figures = ReceiverCounters::new().unwrap();
        let now = Instant::now();
        figures.take(ReceiverEvent::FirstObject(Duration::ZERO));
        figures.look(now, 1);
        for ms in 1..=90 {
            figures.take(ReceiverEvent::Latency(Duration::from_millis(20 * ms)));
        }
        figures.look(now + Duration::from_secs(3), 1);
        figures.look(now + Duration::from_secs(9), 1);
        figures.add(SequenceCounts { objects: 90, missing: 10, ..SequenceCounts::default() });
        let report = figures.report(1);
        assert_eq!((report.rate_hz, report.on_time), (30.0, 50));
        let [p50, p90, p99] = report.owed_ms;
        assert_eq!((p50.map(f64::round), p90.map(f64::round), p99), (Some(1000.0), Some(1800.0), None));
    }

    #[test]
    fn number_of_distinct_session_end_reasons_in_a_report_is_bounded() {
        let mut figures = ReceiverCounters::new().unwrap();
        for number in 0..100 {
            figures.end_early(format!("reason {}", number % 50));
        }
        let reasons = figures.report(100).ended_early;
        assert_eq!(reasons.len(), REASONS + 1);
        assert_eq!((reasons["reason 0"], reasons.values().sum::<u64>()), (2, 100));
    }
}
