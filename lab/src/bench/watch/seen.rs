//! Computes stalls, latency and other values from the frames that a viewer in the browser has seen.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::clip;
use crate::stats::{Spread, median};

/// Shortest time without a new frame that counts as a stall, ms.
const STALL: f64 = 250.0;
/// Time after the first picture during which nothing is measured, ms.
const SETTLING: f64 = 1000.0;

/// The report of the script inside the page. Times are ms of the host's real-time clock since its epoch.
#[derive(Debug, Clone, Deserialize)]
pub struct PageReport {
    /// Time when the page told the player to play.
    pub played: Option<f64>,
    /// Numbers of the frames, and the time when each was first on the canvas.
    pub seen: Vec<(u64, f64)>,
    /// Long pauses between animation frames: time of the end, and length in ms.
    pub gaps: Vec<(f64, f64)>,
    /// Length of the player's buffer at the end of the run, ms.
    pub buffer: Option<f64>,
}

/// Frames, stalls and latency that a viewer saw in one run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct WatchFigures {
    pub frames_owed: u64,
    /// Share of the frames due in the measured period that were shown, percent.
    pub frames_shown_pct: f64,
    /// Sum of the times over 250 ms without a new frame.
    pub stall_ms_total: f64,
    pub longest_stall_ms: f64,
    /// Time from when a shown frame was due at the camera to the end of the animation frame that drew it. `None` if no
    /// frame was shown.
    pub glass_to_glass_p50_ms: Option<f64>,
    pub glass_to_glass_p95_ms: Option<f64>,
    /// Longest time between two animation frames. The browser drew nothing meanwhile.
    pub longest_pause_ms: f64,
    /// Time from the player's start to the first picture.
    pub first_picture_ms: f64,
    /// Length of the player's buffer at the end of the run.
    pub buffer_ms: f64,
}

type Field = fn(&WatchFigures) -> f64;

/// Measured values by name, each with a function that returns it. A latency without any shown frame is infinite.
const FIELDS: [(&str, Field); 9] = [
    ("frames_owed", |it| it.frames_owed as f64),
    ("frames_shown_pct", |it| it.frames_shown_pct),
    ("stall_ms_total", |it| it.stall_ms_total),
    ("longest_stall_ms", |it| it.longest_stall_ms),
    ("glass_to_glass_p50_ms", |it| it.glass_to_glass_p50_ms.unwrap_or(f64::INFINITY)),
    ("glass_to_glass_p95_ms", |it| it.glass_to_glass_p95_ms.unwrap_or(f64::INFINITY)),
    ("longest_pause_ms", |it| it.longest_pause_ms),
    ("first_picture_ms", |it| it.first_picture_ms),
    ("buffer_ms", |it| it.buffer_ms),
];

impl WatchFigures {
    /// Computes frames, stalls and latency from the page's report. `start` is the time when frame 0 was due, `filmed`
    /// the number of filmed frames. The measurement starts one second after the first picture and lasts `seconds`.
    pub fn from_report(start: Duration, filmed: u64, it: &PageReport, seconds: u64) -> anyhow::Result<Self> {
        let due = |frame: u64| (start + clip::due(frame)).as_secs_f64() * 1e3;
        let played = it.played.context("the page was never told to play")?;
        let (_, first) = *it.seen.first().context("there was no picture")?;
        let from = first + SETTLING;
        let to = first + SETTLING + seconds as f64 * 1e3;
        let owed: Vec<u64> =
            (0..filmed).skip_while(|frame| due(*frame) < from).take_while(|frame| due(*frame) < to).collect();
        ensure!(due(filmed) >= to, "the video was over before the viewer saw {seconds} s of it");
        let mut shown = BTreeMap::new();
        for (number, at) in &it.seen {
            shown.entry(*number).or_insert(*at);
        }
        let mut late: Vec<f64> =
            owed.iter().filter_map(|frame| Some(shown.get(frame)? - due(*frame))).collect();
        late.sort_by(f64::total_cmp);
        let stalls = stalls(shown.values().copied(), from, to);
        let rank =
            |percent: usize| (late.len() * percent).div_ceil(100).checked_sub(1).map(|rank| late[rank]);
        let pauses = it.gaps.iter().filter(|(at, _)| (from..to).contains(at));
        Ok(Self {
            frames_owed: owed.len() as u64,
            frames_shown_pct: 100.0 * late.len() as f64 / owed.len().max(1) as f64,
            // An empty sum of floats is -0, so the fold begins with 0.
            stall_ms_total: stalls.iter().fold(0.0, |sum, gap| sum + gap),
            longest_stall_ms: stalls.iter().copied().fold(0.0, f64::max),
            glass_to_glass_p50_ms: rank(50),
            glass_to_glass_p95_ms: rank(95),
            longest_pause_ms: pauses.map(|(_, gap)| *gap).fold(0.0, f64::max),
            first_picture_ms: first - played,
            buffer_ms: it.buffer.context("the player has not said how long its buffer is")?,
        })
    }

    /// Returns the median of each measured value over the rounds, by name. A latency is `null` if too few rounds showed
    /// frames. Without rounds all values are `null`.
    pub fn median(rounds: &[Self]) -> Map<String, Value> {
        reduce_by_name(rounds, |values| median(values).filter(|it| it.is_finite()).into())
    }

    /// Returns the median, lowest and highest of each measured value over the rounds. A latency is `null` if a round
    /// showed no frame.
    pub fn spread(rounds: &[Self]) -> Map<String, Value> {
        reduce_by_name(rounds, |values| {
            json!(Spread::from_values(values).filter(|spread| spread.max.is_finite()))
        })
    }
}

fn reduce_by_name(rounds: &[WatchFigures], reduce: fn(&[f64]) -> Value) -> Map<String, Value> {
    let values = |field: Field| rounds.iter().map(field).collect::<Vec<_>>();
    FIELDS.iter().map(|(name, field)| ((*name).to_owned(), reduce(&values(*field)))).collect()
}

/// Returns the lengths of all stalls between `from` and `to`, ms.
fn stalls(shown: impl Iterator<Item = f64>, from: f64, to: f64) -> Vec<f64> {
    let mut times: Vec<f64> = shown.filter(|at| (from..to).contains(at)).chain([from, to]).collect();
    times.sort_by(f64::total_cmp);
    times.windows(2).map(|pair| pair[1] - pair[0]).filter(|gap| *gap > STALL).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::from_secs(1_000);

    /// Builds a report in which every frame is `late` ms late.
    fn seen(frames: std::ops::Range<u64>, late: f64) -> PageReport {
        let due = |frame: u64| (START + clip::due(frame)).as_secs_f64() * 1e3;
        let seen: Vec<_> = frames.map(|frame| (frame, due(frame) + late)).collect();
        let second = seen[0].1 + 2000.0;
        // The first pause of the animation is before the measurement, and the second one is within the measured time.
        let gaps = vec![(second - 1500.0, 300.0), (second, 60.0)];
        PageReport { played: Some(seen[0].1 - 200.0), seen, gaps, buffer: Some(100.0) }
    }

    #[test]
    fn punctual_frames_have_no_stalls() {
        let it = WatchFigures::from_report(START, 300, &seen(30..300, 120.0), 4).unwrap();
        assert_eq!((it.frames_owed, it.frames_shown_pct), (120, 100.0));
        assert_eq!((it.stall_ms_total, it.longest_stall_ms), (0.0, 0.0));
        assert!((it.glass_to_glass_p50_ms.unwrap() - 120.0).abs() < 1e-6, "{it:?}");
        assert!((it.glass_to_glass_p95_ms.unwrap() - 120.0).abs() < 1e-6, "{it:?}");
        assert_eq!(it.longest_pause_ms, 60.0);
        assert!((it.first_picture_ms - 200.0).abs() < 1e-6 && (it.buffer_ms - 100.0).abs() < 1e-6);
    }

    #[test]
    fn missing_frames_count_as_a_stall() {
        let mut it = seen(30..300, 120.0);
        it.seen.retain(|(frame, _)| !(100..112).contains(frame));
        // A frame that is drawn twice counts with its first time.
        let (number, at) = it.seen[40];
        it.seen.insert(41, (number, at + 8.0));
        let figures = WatchFigures::from_report(START, 300, &it, 4).unwrap();
        assert!((figures.frames_shown_pct - 90.0).abs() < 1e-6, "{figures:?}");
        assert!((figures.stall_ms_total - 13.0 * 1e3 / 29.95).abs() < 1e-3, "{figures:?}");
        assert_eq!(figures.stall_ms_total, figures.longest_stall_ms);
        // Without the frames after the 40th, no new frame is shown until the end.
        it.seen.truncate(40);
        let figures = WatchFigures::from_report(START, 300, &it, 4).unwrap();
        assert!(figures.longest_stall_ms > 3000.0, "{figures:?}");
        it.seen.truncate(1);
        let never = WatchFigures::from_report(START, 300, &it, 4).unwrap();
        assert_eq!((never.frames_shown_pct, never.glass_to_glass_p95_ms), (0.0, None));
        assert!((never.stall_ms_total - 4000.0).abs() < 1e-6, "{never:?}");
        let spread = WatchFigures::spread(&[figures, never]);
        assert_eq!(
            (&spread["glass_to_glass_p95_ms"], spread["frames_owed"]["max"].as_f64()),
            (&Value::Null, Some(120.0))
        );
        assert_eq!(WatchFigures::median(&[never])["glass_to_glass_p50_ms"], Value::Null);
        assert_eq!(WatchFigures::median(&[])["frames_shown_pct"], Value::Null);
    }

    #[test]
    fn incomplete_report_is_an_error() {
        let it = seen(30..300, 120.0);
        let error = |filmed, it: &PageReport| {
            WatchFigures::from_report(START, filmed, it, 4).unwrap_err().to_string()
        };
        assert!(error(150, &it).contains("over before"));
        assert!(error(300, &PageReport { played: None, ..it.clone() }).contains("never told"));
        assert!(error(300, &PageReport { seen: Vec::new(), ..it.clone() }).contains("no picture"));
        assert!(error(300, &PageReport { buffer: None, ..it }).contains("buffer"));
    }
}
