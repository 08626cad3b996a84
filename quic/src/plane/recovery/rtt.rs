use std::time::Duration;

/// The round-trip estimate (RFC 9002, section 5).
#[derive(Clone, Copy, Debug)]
pub struct Rtt {
    latest: Duration,
    min: Option<Duration>,
    smoothed: Duration,
    variation: Duration,
}

impl Rtt {
    /// Creates an estimate with an assumed round-trip time until the first sample.
    pub fn new(initial: Duration) -> Self {
        Self { latest: initial, min: None, smoothed: initial, variation: initial / 2 }
    }

    /// Adds a sample. `delay` is the time by which the peer delayed the acknowledgement, capped by its max_ack_delay.
    pub fn sample(&mut self, latest: Duration, delay: Duration) {
        self.latest = latest;
        let Some(min) = self.min else {
            (self.min, self.smoothed, self.variation) = (Some(latest), latest, latest / 2);
            return;
        };
        let min = min.min(latest);
        self.min = Some(min);
        let adjusted = if latest >= min + delay { latest - delay } else { latest };
        self.variation = (self.variation * 3 + self.smoothed.abs_diff(adjusted)) / 4;
        self.smoothed = (self.smoothed * 7 + adjusted) / 8;
    }

    /// Forgets the shortest sample: after persistent congestion the path may be another one (RFC 9002, section 5.2).
    pub fn forget_min(&mut self) {
        self.min = self.min.map(|_| self.latest);
    }

    /// Returns the newest round-trip sample.
    pub fn latest(&self) -> Duration {
        self.latest
    }

    /// Returns the smoothed round-trip time.
    pub fn smoothed(&self) -> Duration {
        self.smoothed
    }

    /// Returns the shortest round-trip sample, or the initial estimate before the first sample.
    pub fn min(&self) -> Duration {
        self.min.unwrap_or(self.smoothed)
    }

    /// Returns the time threshold: how long after its sending a packet is declared lost if a packet sent later was
    /// acknowledged (RFC 9002, section 6.1.2).
    pub fn loss_delay(&self, granularity: Duration) -> Duration {
        (self.smoothed.max(self.latest) * 9 / 8).max(granularity)
    }

    /// Returns the probe timeout without backoff (RFC 9002, section 6.2.1).
    pub fn probe_timeout(&self, granularity: Duration, max_ack_delay: Duration) -> Duration {
        self.smoothed + (self.variation * 4).max(granularity) + max_ack_delay
    }
}
