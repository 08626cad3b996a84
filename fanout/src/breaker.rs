//! A circuit breaker for the packets that one receiver is sent (RFC 8083, section 4). It is no congestion control: it
//! only ends traffic that does harm.
//!
//! The breaker decides from the receiver's reports, and from how many packets and bytes were sent to the receiver.

use std::time::Duration;

/// Settings of a receiver's circuit breaker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Longest time between two reports of a receiver. RFC 3550 recommends 5 seconds.
    pub interval: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { interval: Duration::from_secs(5) }
    }
}

/// The reason why the breaker cut a receiver off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Trip {
    /// The receiver sent no RTCP report for three report intervals in which packets were sent to it.
    Silent,
    /// The receiver's reports say that no packet arrives.
    Nothing,
    /// Several consecutive reports showed that the receiver was sent more than ten times as much as TCP would send at
    /// the reported loss.
    Congestion,
}

impl Trip {
    /// Every reason, in the order in which metrics list them.
    pub const ALL: [Self; 3] = [Self::Silent, Self::Nothing, Self::Congestion];

    /// Returns the reason's name for metrics: lower case, with underscores.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Silent => "silent",
            Self::Nothing => "nothing",
            Self::Congestion => "congestion",
        }
    }
}

/// Packets and bytes that were sent to the receiver so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReceiverSent {
    /// Number of datagrams of RTP or RTCP.
    pub packets: u64,
    /// Bytes of UDP payload.
    pub bytes: u64,
}

impl std::ops::Add for ReceiverSent {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self { packets: self.packets + other.packets, bytes: self.bytes + other.bytes }
    }
}

/// One RTCP report of the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiverReport {
    /// Extended highest sequence number that the receiver got.
    pub highest: u32,
    /// Loss since the receiver's previous report, in 256ths.
    pub fraction_lost: u8,
    /// Round trip to the receiver, if the report refers to a sender report.
    pub round_trip: Option<Duration>,
}

/// Round trip that is assumed if the report refers to no sender report.
const ROUND_TRIP: Duration = Duration::from_millis(200);
/// Assumed time between frames of media. It only matters if reports are more frequent than frames.
const FRAMES: Duration = Duration::from_millis(40);
/// Two reports count as one if they are closer together than a report interval divided by this number.
const SOONEST: u32 = 10;
/// Number of report intervals without a report after which a receiver is cut off.
const SILENT_INTERVALS: u32 = 3;
/// Multiple of TCP's rate above which a receiver with loss is cut off (RFC 8083, section 4.3).
const TIMES_TCP: f64 = 10.0;

/// The state of one receiver's breaker. Times are of one clock that does not go back.
///
/// [`Self::on_report`] and [`Self::heard_something`] end a silence, and [`Self::tick`] detects one. The breaker trips
/// at most once, since the caller then ends the receiver's lease.
#[derive(Clone, Debug)]
pub struct Breaker {
    settings: Settings,
    /// Time since which packets were sent and no report came; `None` if nothing was sent since the last report.
    silent_since: Option<Duration>,
    last: Option<BreakerReport>,
    /// Mean time between the receiver's reports.
    mean: Duration,
    /// Number of consecutive reports according to which no packet had arrived.
    nothing: u32,
    congested: u32,
}

/// The latest report that counted; a report that follows too soon does not count.
#[derive(Clone, Copy, Debug)]
struct BreakerReport {
    at: Duration,
    highest: Option<u32>,
    sent: ReceiverSent,
}

impl Breaker {
    /// Creates a breaker that has seen no packet and no report.
    pub fn new(settings: Settings) -> Self {
        let mean = settings.interval;
        Self { settings, silent_since: None, last: None, mean, nothing: 0, congested: 0 }
    }

    /// Returns how long this breaker is kept after its receiver has left. The time equals the longest silence of a
    /// receiver that is not cut off.
    pub fn memory(&self) -> Duration {
        SILENT_INTERVALS * self.settings.interval
    }

    /// Skips a time in which nothing was sent to the receiver, so that this time does not count as silence.
    pub fn skip(&mut self, away: Duration) {
        self.silent_since = self.silent_since.map(|since| since + away);
        if let Some(last) = &mut self.last {
            last.at += away;
        }
    }

    /// Reports whether the receiver has sent no report for too long. Call it a few times per report interval.
    pub fn tick(&mut self, now: Duration, sent: ReceiverSent) -> Option<Trip> {
        let last = *self.last.get_or_insert(BreakerReport { at: now, highest: None, sent });
        if sent.packets == last.sent.packets {
            self.silent_since = None;
            return None;
        }
        let since = *self.silent_since.get_or_insert(now);
        (now.saturating_sub(since) > SILENT_INTERVALS * self.settings.interval).then_some(Trip::Silent)
    }

    /// Records that a report arrived that cannot be read (SRTCP): the receiver is not silent.
    pub fn heard_something(&mut self, now: Duration, sent: ReceiverSent) {
        self.silent_since = None;
        self.last = Some(BreakerReport { at: now, highest: None, sent });
    }

    /// Handles a report. Returns the reason if the receiver must be cut off.
    pub fn on_report(&mut self, now: Duration, heard: ReceiverReport, sent: ReceiverSent) -> Option<Trip> {
        self.silent_since = None;
        let last = self.last.unwrap_or(BreakerReport { at: now, highest: None, sent });
        let past = now.saturating_sub(last.at);
        let Some(before) = last.highest else {
            self.last = Some(BreakerReport { at: now, highest: Some(heard.highest), sent });
            return None;
        };
        if past < self.settings.interval / SOONEST {
            return None;
        }
        // The mean report interval is an exponential moving average, with a weight of 1/8 for the latest interval.
        self.mean = (7 * self.mean + past) / 8;
        self.last = Some(BreakerReport { at: now, highest: Some(heard.highest), sent });
        let packets = sent.packets.saturating_sub(last.sent.packets);
        let bytes = sent.bytes.saturating_sub(last.sent.bytes);
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

    /// Returns CB_INTERVAL of RFC 8083, section 4.3: the number of reports in a row that trip the breaker.
    fn in_a_row(&self, round_trip: Duration) -> u32 {
        let least = (10 * FRAMES).max(10 * round_trip).max(3 * self.mean);
        let most = Duration::from_secs(15).max(3 * self.settings.interval);
        let reports = 3.0 * least.min(most).as_secs_f64() / (3.0 * self.mean.as_secs_f64().max(0.001));
        reports.ceil().max(1.0) as u32
    }
}

/// Reports whether one sequence number is ahead of another, by less than half of the number space.
fn is_ahead(highest: u32, before: u32) -> bool {
    highest != before && highest.wrapping_sub(before) < 1 << 31
}

/// Returns the bytes per second that TCP would send, by the equation of TFRC (RFC 5348, section 3.1) with one
/// acknowledgement per packet.
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

    /// A simulated receiver. It is sent the same number of packets of 1200 bytes between two reports, which are one
    /// second apart.
    struct BreakerScene {
        breaker: Breaker,
        now: Duration,
        sent: ReceiverSent,
        highest: u32,
    }

    impl BreakerScene {
        fn new() -> Self {
            Self { breaker: Breaker::new(SETTINGS), now: SECOND, sent: ReceiverSent::default(), highest: 0 }
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
            let heard = ReceiverReport { highest: self.highest, fraction_lost, round_trip };
            self.breaker.on_report(self.now, heard, self.sent)
        }
    }

    #[test]
    fn receiver_without_loss_is_never_cut_off() {
        let mut scene = BreakerScene::new();
        scene.highest = u32::MAX - 5000;
        for _ in 0..100 {
            assert_eq!(scene.report(1000, 1000, 0), None);
            assert_eq!(scene.breaker.tick(scene.now, scene.sent), None);
        }
    }

    #[test]
    fn receiver_without_reports_is_cut_off_after_three_report_intervals() {
        let mut scene = BreakerScene::new();
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
        // Nothing is sent to the receiver, so no report is due.
        for _ in 0..10 {
            scene.second(0);
            assert_eq!(scene.breaker.tick(scene.now, scene.sent), None);
        }
    }

    #[test]
    fn receiver_that_reports_no_arrivals_is_cut_off() {
        let mut scene = BreakerScene::new();
        assert_eq!(scene.report(10, 10, 0), None);
        let trips: Vec<_> = (0..4).map(|_| scene.report(10, 0, 0)).collect();
        assert_eq!(trips, [None, None, Some(Trip::Nothing), Some(Trip::Nothing)]);
        let mut scene = BreakerScene::new();
        for _ in 0..20 {
            assert_eq!(scene.report(0, 0, 0), None, "nothing is sent");
        }
    }

    #[test]
    fn lossy_receiver_is_cut_off_above_ten_times_the_tcp_rate() {
        // 1000 packets of 1200 bytes a second are 9.6 Mbit/s. With a round trip of 50 ms and some 5 % loss, TCP would
        // send a tenth of that.
        for (packets, fraction_lost, cut) in
            [(1000, 3, false), (1000, 64, true), (20, 64, false), (1000, 0, false), (10, 255, true)]
        {
            let mut scene = BreakerScene::new();
            let trips: Vec<_> = (0..5).map(|_| scene.report(packets, 1, fraction_lost)).collect();
            let want = if cut { Some(Trip::Congestion) } else { None };
            assert_eq!(trips[..3], [None, None, None], "{packets} {fraction_lost}");
            assert_eq!(trips[3], want, "{packets} {fraction_lost}");
        }
        let mut scene = BreakerScene::new();
        for _ in 0..20 {
            assert_eq!(scene.report(1000, 1, 64), None);
            assert_eq!(scene.report(1000, 1, 64), None);
            assert_eq!(scene.report(1000, 1, 0), None, "in between all is well");
        }
    }

    #[test]
    fn reports_in_quick_succession_count_as_one() {
        let mut scene = BreakerScene::new();
        assert_eq!(scene.report(1000, 1, 255), None);
        scene.second(1000);
        for highest in 2..100 {
            let heard = ReceiverReport { highest, fraction_lost: 255, round_trip: None };
            assert_eq!(scene.breaker.on_report(scene.now, heard, scene.sent), None);
        }
    }

    #[test]
    fn tcp_rate_follows_rfc_5348() {
        // RFC 5348 with s = 1000 bytes, R = 100 ms, p = 1 %: 1000 / (0.1 * 0.0816 + 0.4 * 0.1837 * 0.01 * 1.0032)
        let rate = tcp_rate(1000.0, Duration::from_millis(100), 0.01);
        assert!((rate - 112_300.0).abs() < 500.0, "{rate}");
        assert!(tcp_rate(1000.0, SECOND, 0.0).is_infinite());
    }
}
