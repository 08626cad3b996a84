//! Estimates a connection's path (bandwidth, delay, loss), and decides when a changed estimate is reported to the
//! application's listeners.

use std::time::{Duration, Instant};

/// Properties of the network path of one connection.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Estimate {
    /// Estimated bandwidth in bytes per second; `None` if the congestion controller does not estimate it.
    pub bandwidth: Option<u64>,
    /// Smoothed round-trip time.
    pub rtt: Duration,
    /// Queueing delay on the path: the smoothed round-trip time minus the shortest sample.
    pub path_queue: Duration,
    /// Time for which the oldest waiting data has waited to be sent, not counting old objects that the receiver
    /// requested.
    pub queue: Duration,
    /// Fraction of the data plane's packets that were lost lately, 0 to 1; `None` if there were too few packets to
    /// tell.
    pub loss: Option<f64>,
}

impl Estimate {
    /// Returns whether `new` differs enough from the reported `self`: a bandwidth by more than an eighth, a delay by
    /// more than 10 ms and a quarter, or the loss by more than 0.01.
    pub fn is_outdated(&self, new: &Self) -> bool {
        let bandwidth = match (self.bandwidth, new.bandwidth) {
            (Some(told), Some(new)) => told.abs_diff(new) > told / 8,
            (told, new) => told != new,
        };
        let loss = match (self.loss, new.loss) {
            (Some(told), Some(new)) => (told - new).abs() > 0.01,
            (told, new) => told.is_some() != new.is_some(),
        };
        let moved =
            |told: Duration, new: Duration| told.abs_diff(new) > Duration::from_millis(10).max(told / 4);
        bandwidth
            || loss
            || moved(self.rtt, new.rtt)
            || moved(self.path_queue, new.path_queue)
            || moved(self.queue, new.queue)
    }
}

/// The path estimate that was last reported to the application's listeners.
#[derive(Clone, Debug, Default)]
pub struct ReportedEstimate {
    last: Option<Estimate>,
    looked: Option<Instant>,
}

impl ReportedEstimate {
    /// Shortest time between two checks for a change of the path estimate.
    const INTERVAL: Duration = Duration::from_millis(50);

    /// Returns the new path estimate if it differs enough from the one reported last. Returns `None` if `listening`
    /// returns false (the application has no listener), or if the last check was less than `INTERVAL` ago.
    pub fn news(
        &mut self,
        now: Instant,
        listening: impl FnOnce() -> bool,
        estimate: impl FnOnce() -> Estimate,
    ) -> Option<Estimate> {
        if self.looked.is_some_and(|at| now < at + Self::INTERVAL) {
            return None;
        }
        self.looked = Some(now);
        if !listening() {
            return None;
        }
        let new = estimate();
        if self.last.is_some_and(|told| !told.is_outdated(&new)) {
            return None;
        }
        self.last = Some(new);
        self.last
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidth_estimate_is_reported_on_change_at_most_every_50_ms() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut told = ReportedEstimate::default();
        let mut news = |ms, bandwidth| {
            let estimate = || Estimate { bandwidth: Some(bandwidth), ..Estimate::default() };
            told.news(at(ms), || true, estimate).map(|estimate| estimate.bandwidth.unwrap())
        };
        let steps = [
            (0, 800, Some(800)),
            (49, 4000, None),
            (50, 900, None),
            (100, 901, Some(901)),
            (150, 800, None),
            (200, 788, Some(788)),
        ];
        for (ms, bandwidth, expected) in steps {
            assert_eq!(news(ms, bandwidth), expected, "{ms}");
        }
    }

    #[test]
    fn estimate_change_above_the_threshold_is_reported() {
        let ms = Duration::from_millis;
        let told = Estimate {
            bandwidth: Some(1000),
            rtt: ms(100),
            path_queue: ms(4),
            queue: ms(0),
            loss: Some(0.02),
        };
        assert!(!told.is_outdated(&told));
        for (new, expected) in [
            (Estimate { bandwidth: None, ..told }, true),
            (Estimate { bandwidth: Some(1125), ..told }, false),
            (Estimate { bandwidth: Some(874), ..told }, true),
            (Estimate { rtt: ms(125), ..told }, false),
            (Estimate { rtt: ms(74), ..told }, true),
            (Estimate { path_queue: ms(14), ..told }, false),
            (Estimate { path_queue: ms(15), ..told }, true),
            (Estimate { queue: ms(11), ..told }, true),
            (Estimate { loss: None, ..told }, true),
            (Estimate { loss: Some(0.025), ..told }, false),
            (Estimate { loss: Some(0.031), ..told }, true),
        ] {
            assert_eq!(told.is_outdated(&new), expected, "{new:?}");
        }
    }
}
