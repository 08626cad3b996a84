//! At what rate the path delivers (draft-ietf-ccwg-bbr, section 4.1): what arrived between a packet's sending and its
//! acknowledgement, over the time that sending or acknowledging it took, whichever is longer.

use std::time::{Duration, Instant};

/// For so long samples are remembered, and half as long at least.
pub const LATELY: Duration = Duration::from_secs(6);

/// What is remembered of the path when a packet is sent.
#[derive(Clone, Copy, Debug)]
pub struct Snapshot {
    delivered: u64,
    delivered_at: Instant,
    /// When the first packet of the flight was sent that this one belongs to.
    flight_began: Instant,
    /// Bytes in flight with it.
    pub in_flight: u64,
    /// Bytes lost until then.
    pub lost: u64,
    /// The application did not fill the path then.
    pub app_limited: bool,
}

/// What an ACK says of the path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateSample {
    /// Bytes per second. `None`: the interval is too short to tell.
    pub rate: Option<u64>,
    /// Bytes that arrived since the newest acknowledged packet was sent, and that had arrived when it was.
    pub delivered: u64,
    pub prior_delivered: u64,
    /// Bytes in flight when it was sent, and lost since then.
    pub in_flight: u64,
    pub lost: u64,
    pub app_limited: bool,
}

/// Counts of a connection's life on one path.
#[derive(Clone, Debug)]
pub struct Delivery {
    delivered: u64,
    delivered_at: Instant,
    lost: u64,
    flight_began: Instant,
    /// Until so much is delivered, samples show the application's rate rather than the path's.
    app_limited_until: Option<u64>,
    /// Of the newest packet of this ACK, and when it was sent.
    newest: Option<(Snapshot, Instant)>,
    fastest: Fastest,
}

/// The highest rate of the last [`LATELY`], in two halves.
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

    /// `in_flight`: bytes, without this packet.
    pub fn on_sent(&mut self, sent: Instant, in_flight: u64, size: u64) -> Snapshot {
        if in_flight == 0 {
            self.flight_began = sent;
            self.delivered_at = self.delivered_at.max(sent);
        }
        Snapshot {
            delivered: self.delivered,
            delivered_at: self.delivered_at,
            flight_began: self.flight_began,
            in_flight: in_flight + size,
            lost: self.lost,
            app_limited: self.app_limited_until.is_some(),
        }
    }

    pub fn on_acked(&mut self, now: Instant, sent: Instant, size: u64, snapshot: Snapshot) {
        self.delivered += size;
        self.delivered_at = now;
        let is_newer =
            |(newest, at): &(Snapshot, Instant)| (snapshot.delivered, sent) > (newest.delivered, *at);
        if self.newest.as_ref().is_none_or(is_newer) {
            self.newest = Some((snapshot, sent));
        }
    }

    pub fn on_lost(&mut self, size: u64) {
        self.lost += size;
    }

    /// It was not lost after all.
    pub fn on_late(&mut self, size: u64) {
        self.delivered += size;
        self.lost = self.lost.saturating_sub(size);
    }

    /// There is no more to send, though the window has room.
    pub fn on_app_limited(&mut self, in_flight: u64) {
        self.app_limited_until = Some(self.delivered + in_flight);
    }

    pub fn is_app_limited(&self) -> bool {
        self.app_limited_until.is_some()
    }

    pub fn delivered(&self) -> u64 {
        self.delivered
    }

    /// The highest rate of [`LATELY`], bytes per second.
    pub fn fastest(&self) -> u64 {
        self.fastest.now.max(self.fastest.before)
    }

    /// Of the newest packet of this ACK.
    pub fn newest(&self) -> Option<Snapshot> {
        self.newest.as_ref().map(|(snapshot, _)| *snapshot)
    }

    /// What was lost since a packet was sent.
    pub fn lost_since(&self, snapshot: &Snapshot) -> u64 {
        self.lost.saturating_sub(snapshot.lost)
    }

    /// The sample of the ACK whose packets were just passed to [`Self::on_acked`].
    pub fn sample(&mut self, min_rtt: Duration) -> Option<RateSample> {
        if self.app_limited_until.is_some_and(|until| self.delivered > until) {
            self.app_limited_until = None;
        }
        let (snapshot, sent) = self.newest.take()?;
        let sending = sent.saturating_duration_since(snapshot.flight_began);
        let acknowledging = self.delivered_at.saturating_duration_since(snapshot.delivered_at);
        self.flight_began = sent;
        let interval = sending.max(acknowledging);
        let delivered = self.delivered.saturating_sub(snapshot.delivered);
        // Shorter than any round trip: ACKs came in a burst.
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
