//! A circuit breaker for what one receiver is sent (RFC 8083, section 4): no congestion control, but the end of what harms.
//!
//! It is judged by the receiver's reports, and by how many packets and bytes were sent there.

use std::time::Duration;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// How often receivers report, at least: RFC 3550 has 5 seconds.
    pub interval: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { interval: Duration::from_secs(5) }
    }
}

/// Why a receiver is cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Trip {
    /// It reports nothing, for three intervals in which it was sent something.
    Silent,
    /// It reports that nothing arrives.
    Nothing,
    /// For some reports in a row more than ten times as much was sent as TCP would with such a loss.
    Congestion,
}

impl Trip {
    pub const ALL: [Self; 3] = [Self::Silent, Self::Nothing, Self::Congestion];

    /// For metrics: lower case, with underscores.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::Nothing => "nothing",
            Self::Congestion => "congestion",
        }
    }
}

/// What was sent to the receiver so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    pub packets: u64,
    /// UDP payload.
    pub bytes: u64,
}

impl std::ops::Add for Sent {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { packets: self.packets + other.packets, bytes: self.bytes + other.bytes }
    }
}

/// What it reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heard {
    /// Extended sequence number.
    pub highest: u32,
    /// In 256ths.
    pub fraction_lost: u8,
    /// To it and back, where it can be told.
    pub round_trip: Option<Duration>,
}

/// Taken where no sender report tells the round trip.
const ROUND_TRIP: Duration = Duration::from_millis(200);
/// Between frames of media; it only matters where reports are more frequent than frames are.
const FRAMES: Duration = Duration::from_millis(40);
/// Reports that follow each other faster than this part of an interval are one.
const SOONEST: u32 = 10;
const SILENT_INTERVALS: u32 = 3;
const TIMES_TCP: f64 = 10.0;

/// Times are of one clock that does not go back.
#[derive(Clone, Debug)]
pub struct Breaker {
    settings: Settings,
    /// Since when it is sent something that was not reported on.
    silent_since: Option<Duration>,
    last: Option<Report>,
    /// Mean time between reports.
    mean: Duration,
    /// Reports in a row in which nothing had arrived.
    nothing: u32,
    congested: u32,
}

/// The latest one that counted.
#[derive(Clone, Copy, Debug)]
struct Report {
    at: Duration,
    highest: Option<u32>,
    sent: Sent,
}

impl Breaker {
    pub fn new(settings: Settings) -> Self {
        let mean = settings.interval;
        Self { settings, silent_since: None, last: None, mean, nothing: 0, congested: 0 }
    }

    /// For how long it is to be remembered of a receiver that is sent nothing: as long as silence may last.
    pub fn memory(&self) -> Duration {
        SILENT_INTERVALS * self.settings.interval
    }

    /// The receiver was sent nothing for so long, which counts for nothing.
    pub fn skip(&mut self, away: Duration) {
        self.silent_since = self.silent_since.map(|since| since + away);
        if let Some(last) = &mut self.last {
            last.at += away;
        }
    }

    /// To be asked a few times an interval.
    pub fn tick(&mut self, now: Duration, sent: Sent) -> Option<Trip> {
        let last = *self.last.get_or_insert(Report { at: now, highest: None, sent });
        if sent.packets == last.sent.packets {
            self.silent_since = None;
            return None;
        }
        let since = *self.silent_since.get_or_insert(now);
        (now.saturating_sub(since) > SILENT_INTERVALS * self.settings.interval).then_some(Trip::Silent)
    }

    /// It reports, but what cannot be read (SRTCP).
    pub fn heard_something(&mut self, now: Duration, sent: Sent) {
        self.silent_since = None;
        self.last = Some(Report { at: now, highest: None, sent });
    }

    pub fn heard(&mut self, now: Duration, heard: Heard, sent: Sent) -> Option<Trip> {
        self.silent_since = None;
        let last = self.last.unwrap_or(Report { at: now, highest: None, sent });
        let past = now.saturating_sub(last.at);
        let Some(before) = last.highest else {
            self.last = Some(Report { at: now, highest: Some(heard.highest), sent });
            return None;
        };
        if past < self.settings.interval / SOONEST {
            return None;
        }
        self.mean = (7 * self.mean + past) / 8;
        self.last = Some(Report { at: now, highest: Some(heard.highest), sent });
        let (packets, bytes) =
            (sent.packets.saturating_sub(last.sent.packets), sent.bytes.saturating_sub(last.sent.bytes));
        if packets == 0 {
            (self.nothing, self.congested) = (0, 0);
            return None;
        }
        let arrived = is_ahead(heard.highest, before);
        self.nothing = if arrived { 0 } else { self.nothing + 1 };
        let round_trip = heard.round_trip.unwrap_or(ROUND_TRIP);
        let rate = bytes as f64 / past.as_secs_f64();
        let loss = f64::from(heard.fraction_lost) / 256.0;
        let tcp = tcp_rate(bytes as f64 / packets as f64, round_trip, loss);
        self.congested = if arrived && rate > TIMES_TCP * tcp { self.congested + 1 } else { 0 };
        let most = self.in_a_row(round_trip);
        (self.nothing >= most)
            .then_some(Trip::Nothing)
            .or_else(|| (self.congested >= most).then_some(Trip::Congestion))
    }

    /// CB_INTERVAL of RFC 8083, section 4.3.
    fn in_a_row(&self, round_trip: Duration) -> u32 {
        let least = (10 * FRAMES).max(10 * round_trip).max(3 * self.mean);
        let most = Duration::from_secs(15).max(3 * self.settings.interval);
        let reports = 3.0 * least.min(most).as_secs_f64() / (3.0 * self.mean.as_secs_f64().max(0.001));
        reports.ceil().max(1.0) as u32
    }
}

/// Whether one sequence number is behind another, by less than half of all.
fn is_ahead(highest: u32, before: u32) -> bool {
    highest != before && highest.wrapping_sub(before) < 1 << 31
}

/// Bytes per second that TCP would send, by the equation of TFRC (RFC 5348, section 3.1), with an acknowledgement for each packet.
fn tcp_rate(packet_bytes: f64, round_trip: Duration, loss: f64) -> f64 {
    if loss <= 0.0 {
        return f64::INFINITY;
    }
    let trip = round_trip.as_secs_f64().max(0.001);
    let timeout = 4.0 * trip;
    let seldom = trip * (2.0 * loss / 3.0).sqrt();
    let often = timeout * 3.0 * (3.0 * loss / 8.0).sqrt() * loss * (1.0 + 32.0 * loss * loss);
    packet_bytes / (seldom + often)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const SETTINGS: Settings = Settings { interval: SECOND };

    /// One receiver that is sent so many packets of 1200 bytes between reports, a second apart.
    struct Scene {
        breaker: Breaker,
        now: Duration,
        sent: Sent,
        highest: u32,
    }

    impl Scene {
        fn new() -> Self {
            Self { breaker: Breaker::new(SETTINGS), now: SECOND, sent: Sent::default(), highest: 0 }
        }

        fn second(&mut self, packets: u64) {
            self.now += SECOND;
            self.sent.packets += packets;
            self.sent.bytes += 1200 * packets;
        }

        fn report(&mut self, packets: u64, arrived: u32, fraction_lost: u8) -> Option<Trip> {
            self.second(packets);
            self.highest = self.highest.wrapping_add(arrived);
            let round_trip = Some(Duration::from_millis(50));
            let heard = Heard { highest: self.highest, fraction_lost, round_trip };
            self.breaker.heard(self.now, heard, self.sent)
        }
    }

    #[test]
    fn who_reports_that_all_is_well_is_never_cut_off() {
        let mut scene = Scene::new();
        scene.highest = u32::MAX - 5000;
        for _ in 0..100 {
            assert_eq!(scene.report(1000, 1000, 0), None);
            assert_eq!(scene.breaker.tick(scene.now, scene.sent), None);
        }
    }

    #[test]
    fn who_reports_nothing_is_cut_off_after_three_intervals() {
        let mut scene = Scene::new();
        assert_eq!(scene.report(10, 10, 0), None);
        let trips: Vec<_> = (0..5)
            .map(|_| {
                scene.second(10);
                scene.breaker.tick(scene.now, scene.sent)
            })
            .collect();
        assert_eq!(trips, [None, None, None, None, Some(Trip::Silent)]);
        scene.breaker.heard_something(scene.now, scene.sent);
        assert_eq!(scene.breaker.tick(scene.now, scene.sent), None);
        // Nothing is sent, so there is nothing to report.
        for _ in 0..10 {
            scene.second(0);
            assert_eq!(scene.breaker.tick(scene.now, scene.sent), None);
        }
    }

    #[test]
    fn who_gets_nothing_is_cut_off() {
        let mut scene = Scene::new();
        assert_eq!(scene.report(10, 10, 0), None);
        let trips: Vec<_> = (0..4).map(|_| scene.report(10, 0, 0)).collect();
        assert_eq!(trips, [None, None, Some(Trip::Nothing), Some(Trip::Nothing)]);
        let mut scene = Scene::new();
        for _ in 0..20 {
            assert_eq!(scene.report(0, 0, 0), None, "nothing is sent");
        }
    }

    #[test]
    fn who_loses_much_of_a_high_rate_is_cut_off() {
        // 1000 packets of 1200 bytes a second are 9.6 Mbit/s. At 50 ms TCP would get a tenth of that with some 5 %.
        for (packets, fraction_lost, cut) in
            [(1000, 3, false), (1000, 64, true), (20, 64, false), (1000, 0, false), (10, 255, true)]
        {
            let mut scene = Scene::new();
            let trips: Vec<_> = (0..5).map(|_| scene.report(packets, 1, fraction_lost)).collect();
            let want = if cut { Some(Trip::Congestion) } else { None };
            assert_eq!(trips[..3], [None, None, None], "{packets} {fraction_lost}");
            assert_eq!(trips[3], want, "{packets} {fraction_lost}");
        }
        let mut scene = Scene::new();
        for _ in 0..20 {
            assert_eq!(scene.report(1000, 1, 64), None);
            assert_eq!(scene.report(1000, 1, 64), None);
            assert_eq!(scene.report(1000, 1, 0), None, "in between all is well");
        }
    }

    #[test]
    fn many_reports_at_once_are_one() {
        let mut scene = Scene::new();
        assert_eq!(scene.report(1000, 1, 255), None);
        scene.second(1000);
        for highest in 2..100 {
            let heard = Heard { highest, fraction_lost: 255, round_trip: None };
            assert_eq!(scene.breaker.heard(scene.now, heard, scene.sent), None);
        }
    }

    #[test]
    fn the_equation_is_that_of_tfrc() {
        // RFC 5348 with s = 1000 bytes, R = 100 ms, p = 1 %: 1000 / (0.1 * 0.0816 + 0.4 * 0.1837 * 0.01 * 1.0032)
        let rate = tcp_rate(1000.0, Duration::from_millis(100), 0.01);
        assert!((rate - 112_300.0).abs() < 500.0, "{rate}");
        assert!(tcp_rate(1000.0, SECOND, 0.0).is_infinite());
    }
}
