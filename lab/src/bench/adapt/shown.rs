//! Computes what a viewer sees and hears from the objects that arrived.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::stats::{Percentiles, Spread};

/// Shortest time without a new frame on the screen that counts as a stall.
const STALL: Duration = Duration::from_millis(250);
/// Longest delay with which an audio object or a key frame still counts as on time.
const IN_TIME: Duration = Duration::from_millis(300);
/// Time after a change of the link's bandwidth in which stalls are not counted.
const GRACE: Duration = Duration::from_secs(2);
/// Time after the start that is not measured, since the subscriber is still joining.
pub const JOINING: Duration = Duration::from_secs(1);

/// When the publisher started, for how long it sends, and how many video frames and audio objects per second. The start
/// time is by the host's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct SentRates {
    pub start: Duration,
    pub seconds: u64,
    pub frames_per_second: u64,
    pub sounds_per_second: u64,
}

/// An object that arrived at the subscriber.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ArrivedObject {
    pub rendition: Option<u32>,
    /// Number of the frame or audio object, from 0.
    pub number: u64,
    pub sent: Duration,
    pub at: Duration,
}

/// Stalls, latency, and shares that arrived on time, as a viewer experienced them in one run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct AdaptFigures {
    /// Sum of the gaps over 250 ms between shown frames, without the two seconds after each change of the link's
    /// bandwidth.
    pub stall_ms_total: f64,
    pub longest_stall_ms: f64,
    /// Share of audio objects that arrived within 300 ms. Neither this share nor that of key frames includes the first
    /// second of the run.
    pub audio_on_time_pct: f64,
    pub key_frames_on_time_pct: f64,
    /// 95th percentile of the time from sending a frame to showing it, over the frames that were shown.
    pub latency_p95_ms: Option<f64>,
    /// Share of the sent frames that were shown.
    pub frames_shown_pct: f64,
    /// Number of groups that were shown in another rendition than the group before.
    pub switches: u64,
}

impl AdaptFigures {
    /// Computes stalls, latency, and the shares of audio and key frames that arrived on time, from the objects that
    /// arrived. `changes` are the times when the rate of the link changed.
    pub fn from_arrivals(sent: &SentRates, came: &[ArrivedObject], changes: &[Duration]) -> Self {
        let mut came = came.to_vec();
        came.sort_by_key(|object| object.at);
        let measured = measured(sent);
        let shown = shown(sent, &came);
        let inside = |at: Duration| measured.contains(&at);
        let frames: Vec<_> = shown.iter().filter(|frame| inside(frame.sent)).collect();
        let gaps: Vec<_> = gaps(&shown, &measured, changes).into_iter().map(|(_, gap)| gap).collect();
        let latencies = frames.iter().map(|frame| millis(frame.at.saturating_sub(frame.sent)));
        let mut sorted: Vec<f64> = latencies.collect();
        sorted.sort_by(f64::total_cmp);
        let p95 = (sorted.len() * 95).div_ceil(100).checked_sub(1).and_then(|rank| sorted.get(rank).copied());
        let owed = |per_second: u64| (sent.seconds.saturating_sub(JOINING.as_secs())) * per_second;
        let in_time = |is_owed: &dyn Fn(&ArrivedObject) -> bool| {
            let in_time = came.iter().filter(|object| {
                inside(object.sent) && object.at.saturating_sub(object.sent) <= IN_TIME && is_owed(object)
            });
            in_time.map(|object| object.number).collect::<BTreeSet<_>>().len() as u64
        };
        let is_key = |frame: &ArrivedObject| {
            frame.rendition.is_some() && frame.number.is_multiple_of(sent.frames_per_second)
        };
        Self {
            // An empty sum of floats is -0, so the fold begins with 0.
            stall_ms_total: gaps.iter().fold(0.0, |sum, gap| sum + millis(*gap)),
            longest_stall_ms: gaps.iter().max().map_or(0.0, |gap| millis(*gap)),
            audio_on_time_pct: percent(
                in_time(&|sound| sound.rendition.is_none()),
                owed(sent.sounds_per_second),
            ),
            key_frames_on_time_pct: percent(in_time(&is_key), owed(1)),
            latency_p95_ms: p95,
            frames_shown_pct: percent(frames.len() as u64, owed(sent.frames_per_second)),
            switches: switches(sent, &shown),
        }
    }

    /// Names of the measured values (stalls, on-time shares, latency) that [`Self::spread`] returns, in the same order.
    pub const NAMES: [&'static str; 6] = [
        "stall_ms_total",
        "longest_stall_ms",
        "audio_on_time_pct",
        "key_frames_on_time_pct",
        "frames_shown_pct",
        "latency_p95_ms",
    ];

    /// Returns the median, lowest and highest of each measured value over the rounds, in the order of [`Self::NAMES`].
    /// The latency is `None` if a round showed no frame. Returns `None` without rounds.
    pub fn spread(rounds: &[Self]) -> Option<[Option<Spread>; 6]> {
        let fields: [fn(&Self) -> f64; 6] = [
            |figures| figures.stall_ms_total,
            |figures| figures.longest_stall_ms,
            |figures| figures.audio_on_time_pct,
            |figures| figures.key_frames_on_time_pct,
            |figures| figures.frames_shown_pct,
            |figures| figures.latency_p95_ms.unwrap_or(f64::INFINITY),
        ];
        let spread =
            |field| Spread::from_values(&each(rounds, field)).filter(|spread| spread.max.is_finite());
        (!rounds.is_empty()).then(|| fields.map(spread))
    }

    /// Returns the median of each measured value over the rounds.
    pub fn median(rounds: &[Self]) -> Option<Self> {
        let middle = |field: fn(&Self) -> f64| crate::stats::median(&each(rounds, field));
        let latency = |figures: &Self| figures.latency_p95_ms.unwrap_or(f64::INFINITY);
        Some(Self {
            stall_ms_total: middle(|figures| figures.stall_ms_total)?,
            longest_stall_ms: middle(|figures| figures.longest_stall_ms)?,
            audio_on_time_pct: middle(|figures| figures.audio_on_time_pct)?,
            key_frames_on_time_pct: middle(|figures| figures.key_frames_on_time_pct)?,
            latency_p95_ms: middle(latency).filter(|ms| ms.is_finite()),
            frames_shown_pct: middle(|figures| figures.frames_shown_pct)?,
            switches: Percentiles::from_samples(each(rounds, |figures| figures.switches as f64))?.p50 as u64,
        })
    }
}

fn each(rounds: &[AdaptFigures], field: fn(&AdaptFigures) -> f64) -> Vec<f64> {
    rounds.iter().map(field).collect()
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

fn percent(part: u64, all: u64) -> f64 {
    100.0 * part as f64 / all.max(1) as f64
}

/// Returns one character per group of the video: the digit of the rendition that was shown, or `-` if no frame of the
/// group was shown.
pub fn renditions(sent: &SentRates, came: &[ArrivedObject]) -> String {
    let mut came = came.to_vec();
    came.sort_by_key(|object| object.at);
    let shown = shown(sent, &came);
    let of = |group: u64| shown.iter().find(|frame| frame.number / sent.frames_per_second == group);
    let digit =
        |group| of(group).and_then(|frame| frame.rendition).map_or("-".to_owned(), |it| it.to_string());
    (0..sent.seconds).map(digit).collect()
}

/// Returns the frames that are shown, with the time of showing as `at`. A frame is shown once all frames before it in
/// its group have arrived, unless a later frame was shown already. `came` must be sorted by time.
fn shown(sent: &SentRates, came: &[ArrivedObject]) -> Vec<ArrivedObject> {
    let mut groups: BTreeMap<u64, (u64, BTreeMap<u64, ArrivedObject>)> = BTreeMap::new();
    let mut shown = Vec::new();
    let mut last = None;
    for frame in came.iter().filter(|object| object.rendition.is_some()) {
        let group = frame.number / sent.frames_per_second;
        let place = frame.number % sent.frames_per_second;
        let (next, waiting) = groups.entry(group).or_default();
        waiting.insert(place, *frame);
        while let Some(ready) = waiting.remove(next) {
            *next += 1;
            if last < Some(ready.number) {
                last = Some(ready.number);
                shown.push(ArrivedObject { at: frame.at, ..ready });
            }
        }
    }
    shown
}

fn measured(sent: &SentRates) -> Range<Duration> {
    sent.start + JOINING..sent.start + Duration::from_secs(sent.seconds)
}

/// Returns the stalls of a run, with times relative to its start.
pub fn stalls(sent: &SentRates, came: &[ArrivedObject], changes: &[Duration]) -> Vec<Stall> {
    let mut came = came.to_vec();
    came.sort_by_key(|object| object.at);
    let stall = |(since, gap): (Duration, Duration)| Stall {
        since_s: since.saturating_sub(sent.start).as_secs_f64(),
        ms: millis(gap),
    };
    gaps(&shown(sent, &came), &measured(sent), changes).into_iter().map(stall).collect()
}

/// Returns for each stall the time of the last frame before it, and how long no frame was shown.
fn gaps(
    shown: &[ArrivedObject],
    measured: &Range<Duration>,
    changes: &[Duration],
) -> Vec<(Duration, Duration)> {
    let times = shown.iter().map(|frame| frame.at).filter(|at| measured.contains(at));
    let mut times: Vec<_> = [measured.start].into_iter().chain(times).collect();
    times.push(measured.end);
    let gaps = times.windows(2).map(|pair| {
        let from = pair[0];
        let to = pair[1];
        let graces = changes.iter().map(|change| to.min(*change + GRACE).saturating_sub(from.max(*change)));
        (from, (to - from).saturating_sub(graces.sum()))
    });
    gaps.filter(|(_, gap)| *gap > STALL).collect()
}

/// A time in which the viewer saw no new frame.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Stall {
    /// Time of the last frame before the stall, seconds since the start.
    pub since_s: f64,
    /// Length of the stall, without the two seconds after each change of the link's bandwidth.
    pub ms: f64,
}

fn switches(sent: &SentRates, shown: &[ArrivedObject]) -> u64 {
    let is_key = |frame: &&ArrivedObject| frame.number.is_multiple_of(sent.frames_per_second);
    let renditions: Vec<_> = shown.iter().filter(is_key).map(|frame| frame.rendition).collect();
    renditions.windows(2).filter(|pair| pair[0] != pair[1]).count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const FPS: u64 = 10;
    const SENT: SentRates = SentRates {
        start: Duration::from_secs(100),
        seconds: 4,
        frames_per_second: FPS,
        sounds_per_second: 2,
    };

    fn ms(ms: u64) -> Duration {
        SENT.start + Duration::from_millis(ms)
    }

    fn frame(number: u64, late: u64) -> ArrivedObject {
        let sent = number * 1000 / FPS;
        ArrivedObject { rendition: Some(1), number, sent: ms(sent), at: ms(sent + late) }
    }

    fn sound(number: u64, late: u64) -> ArrivedObject {
        ArrivedObject { rendition: None, number, sent: ms(number * 500), at: ms(number * 500 + late) }
    }

    fn all() -> Vec<ArrivedObject> {
        (0..40).map(|number| frame(number, 20)).chain((0..8).map(|number| sound(number, 20))).collect()
    }

    #[test]
    fn punctual_stream_has_no_stalls() {
        let figures = AdaptFigures::from_arrivals(&SENT, &all(), &[]);
        assert_eq!((figures.stall_ms_total, figures.longest_stall_ms, figures.switches), (0.0, 0.0, 0));
        assert_eq!((figures.audio_on_time_pct, figures.key_frames_on_time_pct), (100.0, 100.0));
        assert_eq!((figures.latency_p95_ms, figures.frames_shown_pct), (Some(20.0), 100.0));
    }

    #[test]
    fn spread_of_playback_figures_is_median_minimum_and_maximum() {
        let good = AdaptFigures::from_arrivals(&SENT, &all(), &[]);
        let bad = AdaptFigures { frames_shown_pct: 0.0, latency_p95_ms: None, ..good };
        let [stalls, .., shown, latency] = AdaptFigures::spread(&[good, bad, good]).unwrap();
        assert_eq!(stalls, Some(Spread { median: 0.0, min: 0.0, max: 0.0 }));
        assert_eq!(shown, Some(Spread { median: 100.0, min: 0.0, max: 100.0 }));
        assert_eq!(latency, None, "once nothing was shown");
        assert_eq!(AdaptFigures::spread(&[]), None);
    }

    #[test]
    fn frames_after_a_missing_one_are_not_shown() {
        let mut came = all();
        // Frame 23 of group 2 is missing, so nothing more is shown until the key frame of group 3.
        came.retain(|object| object.rendition.is_none() || object.number != 23);
        let figures = AdaptFigures::from_arrivals(&SENT, &came, &[]);
        assert_eq!(figures.longest_stall_ms, 800.0);
        assert_eq!(stalls(&SENT, &came, &[]), [Stall { since_s: 2.22, ms: 800.0 }]);
        let of_two = |frame: &ArrivedObject| frame.rendition.is_some() && frame.number / FPS == 2;
        let others: Vec<_> = came.iter().copied().filter(|object| !of_two(object)).collect();
        assert_eq!(renditions(&SENT, &others), "11-1");
        assert_eq!((figures.stall_ms_total, figures.key_frames_on_time_pct), (800.0, 100.0));
        assert!((figures.frames_shown_pct - 100.0 * 23.0 / 30.0).abs() < 1e-9);
        // The two seconds after a change of the link's bandwidth do not count towards a stall.
        assert_eq!(AdaptFigures::from_arrivals(&SENT, &came, &[ms(2000)]).stall_ms_total, 0.0);
        assert_eq!(AdaptFigures::from_arrivals(&SENT, &came, &[ms(500)]).stall_ms_total, 520.0);
    }

    #[test]
    fn late_audio_late_key_frames_and_rendition_changes_are_counted() {
        let mut came = all();
        for object in &mut came {
            match object.rendition {
                None if object.number == 3 => object.at += Duration::from_millis(400),
                Some(_) if object.number == 20 => object.at += Duration::from_millis(400),
                _ => {}
            }
            if object.rendition.is_some() && (10..20).contains(&object.number) {
                object.rendition = Some(0);
            }
        }
        let figures = AdaptFigures::from_arrivals(&SENT, &came, &[]);
        assert!((figures.audio_on_time_pct - 100.0 * 5.0 / 6.0).abs() < 1e-9);
        assert!((figures.key_frames_on_time_pct - 100.0 * 2.0 / 3.0).abs() < 1e-9);
        assert_eq!(figures.switches, 2);
        assert_eq!(renditions(&SENT, &came), "1011");
        // The gap lasts from frame 19 at 1.92 s to 2.42 s, when the late key frame arrives and the frames after it can
        // be shown.
        assert_eq!(figures.longest_stall_ms, 500.0);
    }
}
