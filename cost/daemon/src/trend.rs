//! Tracks networking's share of each CPU in the last minute, and the time since it last changed much.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use millrace_cost::report::Report;

/// The time that one bar of a CPU's trend covers. It is longer if reports are farther apart.
const STEP: Duration = Duration::from_secs(3);
/// Number of bars in a CPU's trend, one character each.
const STEPS: usize = 20;
/// Time for which networking's share of a CPU must stay about the same to become the CPU's new level.
const SETTLED: Duration = Duration::from_secs(3);
/// Largest deviation at which networking's share of a CPU still counts as unchanged, as a fraction of one CPU. The
/// larger of this and [`RELATIVE_TOLERANCE`] applies.
const TOLERANCE: f64 = 0.05;
/// Largest deviation at which networking's share of a CPU still counts as unchanged, as a fraction of its level, the
/// share that the CPU stays close to.
const RELATIVE_TOLERANCE: f64 = 0.25;

#[derive(Debug, Default)]
pub struct Trend {
    cpus: BTreeMap<u32, TrendLine>,
    /// Sum of the periods of all reports so far.
    observed: Duration,
}

/// A chart of the share of one CPU's time that networking used recently, as the live view shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Picture {
    pub cpu: u32,
    /// Bars of the last minute: [`STEPS`] characters, the latest last.
    pub steps: String,
    /// Time for which the share has stayed about the same (its level).
    pub level: Duration,
    /// True if the share has stayed about the same since the first report.
    pub from_the_start: bool,
}

impl Trend {
    pub fn add(&mut self, report: &Report) {
        let period = Duration::from_nanos(report.period_ns);
        for cpu in &report.cpus {
            let line = self.cpus.entry(cpu.cpu).or_default();
            line.add(TrendLevel { began: self.observed, time: period, share: cpu.networking_share });
        }
        self.observed += period;
    }

    pub fn pictures(&self) -> Vec<Picture> {
        let picture = |(cpu, line): (&u32, &TrendLine)| Picture {
            cpu: *cpu,
            steps: line.picture(),
            level: self.observed - line.level.began,
            from_the_start: line.level.began.is_zero(),
        };
        self.cpus.iter().map(picture).collect()
    }
}

#[derive(Debug, Default)]
struct TrendLine {
    steps: VecDeque<TrendLevel>,
    level: TrendLevel,
    /// The CPU's networking share while it differs from `level`. This share becomes the new level if it lasts for
    /// [`SETTLED`].
    off: Option<TrendLevel>,
}

/// A span of time, and networking's mean share of the CPU in that time.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
struct TrendLevel {
    began: Duration,
    time: Duration,
    share: f64,
}

impl TrendLevel {
    fn add(&mut self, next: &Self) {
        let time = self.time + next.time;
        // The divisor is never zero, even if both spans have no length.
        let weight = next.time.as_secs_f64() / time.as_secs_f64().max(f64::MIN_POSITIVE);
        self.share += (next.share - self.share) * weight;
        self.time = time;
    }

    fn is_about(&self, share: f64) -> bool {
        (self.share - share).abs() <= TOLERANCE.max(RELATIVE_TOLERANCE * self.share)
    }
}

impl TrendLine {
    fn add(&mut self, now: TrendLevel) {
        match self.steps.back_mut() {
            Some(step) if step.time < STEP => step.add(&now),
            _ => self.steps.push_back(now),
        }
        if self.steps.len() > STEPS {
            self.steps.pop_front();
        }
        if self.level.time.is_zero() {
            self.level = now;
        } else if self.level.is_about(now.share) {
            self.level.add(&now);
            self.off = None;
        } else {
            self.leave(now);
        }
    }

    /// Handles a share that differs from the level. If the CPU stays at about this share for [`SETTLED`], the share
    /// becomes the new level.
    fn leave(&mut self, now: TrendLevel) {
        let off = match self.off.take() {
            Some(mut off) if off.is_about(now.share) => {
                off.add(&now);
                off
            }
            _ => now,
        };
        if off.time >= SETTLED {
            self.level = off;
        } else {
            self.off = Some(off);
        }
    }

    fn picture(&self) -> String {
        let empty = STEPS.saturating_sub(self.steps.len());
        let bars = self.steps.iter().map(|step| bar(step.share));
        std::iter::repeat_n(' ', empty).chain(bars).collect()
    }
}

/// Returns the bar of a share, in eighths of a CPU rounded up. A share below 0.5 % is blank.
fn bar(share: f64) -> char {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    if share < 0.005 {
        return ' ';
    }
    let eighths = (share * 8.0).ceil().clamp(1.0, 8.0) as usize;
    BARS.get(eighths - 1).copied().unwrap_or('█')
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tests::example;

    /// Returns CPU 0's trend after reports of one second each, in which networking had the given shares of the CPU.
    fn after(shares: impl IntoIterator<Item = f64>) -> Picture {
        let mut trend = Trend::default();
        for share in shares {
            let mut report = example();
            report.cpus.truncate(1);
            report.cpus[0].networking_share = share;
            trend.add(&report);
        }
        trend.pictures().remove(0)
    }

    fn steady(share: f64, seconds: usize) -> impl Iterator<Item = f64> {
        std::iter::repeat_n(share, seconds)
    }

    #[test]
    fn trend_shows_the_last_minute() {
        let picture = after(steady(0.0, 3).chain(steady(1.0, 3)).chain(steady(0.3, 1)));
        assert_eq!(picture.steps, format!("{}█▃", " ".repeat(STEPS - 2)));
        let picture = after(steady(1.0, 60).chain(steady(0.1, 57)));
        assert_eq!(picture.steps, format!("█{}", "▁".repeat(STEPS - 1)));
    }

    #[test]
    fn trend_bars_have_steps_of_an_eighth() {
        assert_eq!(
            [0.0, 0.004, 0.01, 0.125, 0.126, 0.99, 1.0, 1.2].map(bar),
            [' ', ' ', '▁', '▁', '▂', '█', '█', '█']
        );
    }

    #[test]
    fn steady_cpu_usage_is_not_ended_by_noise_or_a_2_second_peak() {
        let noise = (0..30).map(|at| 0.2 + 0.04 * f64::from(at % 3 - 1));
        let picture = after(noise.clone().chain([0.9, 0.9]).chain(noise));
        assert_eq!((picture.level.as_secs(), picture.from_the_start), (62, true));
        // A share that alternates between two values never becomes a new level.
        let picture = after(steady(0.2, 10).chain((0..10).map(|at| f64::from(at % 2))));
        assert_eq!(picture.level.as_secs(), 20);
    }

    #[test]
    fn cpu_usage_change_of_3_seconds_begins_a_new_steady_period() {
        let picture = after(steady(0.2, 100).chain(steady(0.6, 3)));
        assert_eq!((picture.level.as_secs(), picture.from_the_start), (3, false));
        assert_eq!(after(steady(0.2, 100).chain(steady(0.6, 2))).level.as_secs(), 102);
        assert_eq!(after(steady(0.2, 100).chain(steady(0.6, 50)).chain(steady(0.0, 7))).level.as_secs(), 7);
    }
}
