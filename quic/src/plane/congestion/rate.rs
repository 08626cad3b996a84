//! Samples of the path's delivery rate (draft-ietf-ccwg-bbr, section 4.1). A sample is the number of bytes that arrived
//! between a packet's sending and its acknowledgement, divided by an interval. The interval is the time in which these
//! bytes were sent or in which they were acknowledged, whichever is longer.

use std::time::{Duration, Instant};

/// Time after which a rate sample no longer counts in [`Delivery::fastest`]. A sample counts for at least half of this
/// time.
pub const LATELY: Duration = Duration::from_secs(6);

/// State of the path when a packet is sent.
#[derive(Clone, Copy, Debug)]
pub struct RateSnapshot {
    delivered: u64,
    delivered_at: Instant,
    /// Start of the sending interval of this packet's rate sample: the time in which the bytes that the sample counts
    /// were sent.
    flight_began: Instant,
    /// Bytes in flight when the packet is sent, including the packet itself.
    pub in_flight: u64,
    /// Bytes lost before the packet was sent.
    pub lost: u64,
    /// True if the application had too little data to fill the path when the packet was sent.
    pub app_limited: bool,
}

/// A sample of the path's delivery rate and losses, taken from an ACK.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateSample {
    /// Delivery rate, bytes per second. `None` if the sample's interval is shorter than the path's shortest round trip.
    pub rate: Option<u64>,
    /// Bytes that arrived since the newest acknowledged packet was sent.
    pub delivered: u64,
    /// Bytes that had arrived when the newest acknowledged packet was sent.
    pub prior_delivered: u64,
    /// Bytes in flight when the newest acknowledged packet was sent, including that packet.
    pub in_flight: u64,
    /// Bytes lost since the newest acknowledged packet was sent.
    pub lost: u64,
    /// True if the sender had too little data to fill the window, so the rate may be too low.
    pub app_limited: bool,
}

/// Counters of the bytes that a connection has delivered and lost on one path, from which rate samples are computed.
#[derive(Clone, Debug)]
pub struct Delivery {
    delivered: u64,
    delivered_at: Instant,
    lost: u64,
    flight_began: Instant,
    /// Value of `delivered` up to which rate samples show the application's rate rather than the path's.
    app_limited_until: Option<u64>,
    /// The path's state when the newest packet that the current ACK acknowledges was sent, and the time when it was
    /// sent.
    newest: Option<(RateSnapshot, Instant)>,
    fastest: Fastest,
}

/// The highest delivery rate of the last seconds ([`LATELY`]): one maximum for each half of that time.
#[derive(Clone, Debug)]
struct Fastest {
    since: Instant,
    now: u64,
    before: u64,
}

impl Fastest {
    fn note(&mut self, now: Instant, rate: u64) {
        if now.saturating_duration_since(self.since) >= LATELY / 2 {
            self.since = now;
            self.before = std::mem::take(&mut self.now);
        }
        self.now = self.now.max(rate);
    }
}

impl Delivery {
    /// Creates the counters of delivered and lost bytes for a new path.
    pub fn new(now: Instant) -> Self {
        Self {
            delivered: 0,
            delivered_at: now,
            lost: 0,
            flight_began: now,
            app_limited_until: None,
            newest: None,
            fastest: Fastest { since: now, now: 0, before: 0 },
        }
    }

    /// Notes that a packet is sent. `in_flight` is in bytes, without this packet.
    pub fn on_sent(&mut self, sent: Instant, in_flight: u64, size: u64) -> RateSnapshot {
        // After an idle period, the intervals for sending and acknowledging begin again, so that the pause does not
        // count.
        if in_flight == 0 {
            self.flight_began = sent;
            self.delivered_at = self.delivered_at.max(sent);
        }
        RateSnapshot {
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            flight_began: self.flight_began,
            in_flight: in_flight + size,
            lost: self.lost,
            app_limited: self.app_limited_until.is_some(),
        }
    }

    /// Notes that a packet was acknowledged. It was sent at `sent`, when the path's state was `snapshot`.
    pub fn on_acked(&mut self, now: Instant, sent: Instant, size: u64, snapshot: RateSnapshot) {
        self.delivered += size;
        self.delivered_at = now;
        let is_newer =
            |(newest, at): &(RateSnapshot, Instant)| (snapshot.delivered, sent) > (newest.delivered, *at);
        if self.newest.as_ref().is_none_or(is_newer) {
            self.newest = Some((snapshot, sent));
        }
    }

    /// Notes that a packet was declared lost.
    pub fn on_lost(&mut self, size: u64) {
        self.lost += size;
    }

    /// Notes that a packet declared lost has arrived.
    pub fn on_late(&mut self, size: u64) {
        self.delivered += size;
        self.lost = self.lost.saturating_sub(size);
    }

    /// Notes that there is no more data to send, although the congestion window is not full.
    pub fn on_app_limited(&mut self, in_flight: u64) {
        self.app_limited_until = Some(self.delivered + in_flight);
    }

    /// Returns whether samples show the application's rate rather than the path's.
    pub fn is_app_limited(&self) -> bool {
        self.app_limited_until.is_some()
    }

    /// Returns the bytes delivered so far.
    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// Returns the highest delivery rate of the last seconds ([`LATELY`]), bytes per second.
    pub fn fastest(&self) -> u64 {
        self.fastest.now.max(self.fastest.before)
    }

    /// Returns the path's state when the newest packet that the current ACK acknowledges was sent.
    pub fn newest(&self) -> Option<RateSnapshot> {
        self.newest.as_ref().map(|(snapshot, _)| *snapshot)
    }

    /// Returns the bytes lost since `snapshot` was taken, when a packet was sent.
    pub fn lost_since(&self, snapshot: &RateSnapshot) -> u64 {
        self.lost.saturating_sub(snapshot.lost)
    }

    /// Returns the rate sample of the ACK whose packets were just passed to [`Self::on_acked`].
    pub fn sample(&mut self, min_rtt: Duration) -> Option<RateSample> {
        if self.app_limited_until.is_some_and(|until| self.delivered > until) {
            self.app_limited_until = None;
        }
        let (snapshot, sent) = self.newest.take()?;
        let sending = sent.saturating_duration_since(snapshot.flight_began);
        let acknowledging = self.delivered_at.saturating_duration_since(snapshot.delivered_at);
        self.flight_began = sent;
        // The longer of the sending time and the acknowledging time is used, because compressed ACKs or a burst of
        // packets would exaggerate the rate.
        let interval = sending.max(acknowledging);
        let delivered = self.delivered.saturating_sub(snapshot.delivered);
        // An interval shorter than the shortest round trip means that ACKs arrived in a burst, so it gives no rate.
        let is_valid = interval >= min_rtt && !interval.is_zero();
        let rate = || u128::from(delivered) * 1_000_000_000 / interval.as_nanos();
        let rate = is_valid.then(|| u64::try_from(rate()).unwrap_or(u64::MAX));
        if let Some(rate) = rate {
            self.fastest.note(self.delivered_at, rate);
        }
        Some(RateSample {
            rate,
            delivered,
            prior_delivered: snapshot.delivered,
            in_flight: snapshot.in_flight,
            lost: self.lost_since(&snapshot),
            app_limited: snapshot.app_limited,
        })
    }
}
