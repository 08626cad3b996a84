//! Replays a trace on a link: the link's rate and delay change over time.

use std::time::{Duration, Instant};

use crate::lab::{Directions, LabLink, Settings};

/// Time for which a link has the rate and delay in one line of a trace.
const STEP: Duration = Duration::from_millis(500);
/// Size of the link's queue, ms: the time that media for one subscriber, sent at their normal rate, take to fill it.
const QUEUE_MS: u64 = 300;

/// Rate, delay and queue of a link for one step (half a second) of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkStep {
    bits_per_second: u64,
    delay_ms: u64,
    queue_bytes: u64,
}

impl LinkStep {
    pub fn settings(&self) -> String {
        let Self { bits_per_second, delay_ms, queue_bytes } = self;
        format!("delay={delay_ms}ms rate={bits_per_second}bit queue-bytes={queue_bytes}")
    }
}

/// Returns the half-second steps of a moving receiver's radio link, in an endless loop. `offered` is the rate of media
/// to one subscriber, bits per second.
pub fn mobile(offered: u64) -> impl Iterator<Item = LinkStep> {
    let queue_bytes = offered / 8 * QUEUE_MS / 1000;
    let lines = include_str!("mobile.csv").lines().filter(|line| !line.starts_with('#')).cycle();
    lines.filter_map(move |line| {
        let (percent, delay_ms) = line.split_once(',')?;
        let bits_per_second = offered * percent.parse::<u64>().ok()? / 100;
        Some(LinkStep { bits_per_second, delay_ms: delay_ms.parse().ok()?, queue_bytes })
    })
}

/// Applies rate and delay of each half-second step to `link`, one step after the other, until `is_over` returns true.
pub fn replay(
    link: &LabLink,
    steps: impl Iterator<Item = LinkStep>,
    is_over: impl Fn() -> bool,
) -> Result<(), crate::lab::Error> {
    let start = Instant::now();
    for (number, step) in (0..).zip(steps) {
        let due = STEP * number;
        std::thread::sleep(due.saturating_sub(start.elapsed()));
        if is_over() {
            break;
        }
        link.change(Directions::Both, &Settings::parse(&step.settings())?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_mobile_trace_becomes_valid_link_settings() {
        let lines = include_str!("mobile.csv").lines().filter(|line| !line.starts_with('#')).count();
        assert_eq!(lines, 120);
        let steps: Vec<_> = mobile(1_000_000).take(lines + 1).collect();
        assert_eq!(steps.first(), steps.last(), "over and over, no line left out");
        assert!(steps.iter().all(|step| Settings::parse(&step.settings()).is_ok()));
        let narrow = steps.iter().filter(|step| step.bits_per_second < 1_000_000).count();
        assert!((10..60).contains(&narrow), "{narrow} steps have too little room");
    }
}
