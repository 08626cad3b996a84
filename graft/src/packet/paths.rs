//! Divides the packets of a session among its paths. The code does no I/O, and gets the time as an argument.
//!
//! Both ends report to each other, on every path, how many packets have arrived on each
//! ([`ListMessage::Came`](super::agree::ListMessage)). A path on which nothing arrives gets no packets of applications
//! until something arrives again. Reports are always sent on every path. A path that loses more than the best one gets
//! a smaller share, in proportion. Other paths get a slightly larger share at each check, up to a full one. Random
//! losses thus change little, and packets that would overflow a queue use the other path.

use std::time::Duration;

/// Interval at which all paths are checked, and at which a session with traffic sends reports about its paths.
pub const LOOK: Duration = Duration::from_millis(100);
/// Interval of reports on a session without traffic.
pub const IDLE: Duration = Duration::from_secs(1);
/// A path counts as down after this time plus one round trip. The time starts when more than `UNHEARD` packets were
/// sent since the last one that is known to have arrived.
const SILENT: Duration = Duration::from_millis(200);
const UNHEARD: u64 = 8;
/// Longest round-trip time that is added to `SILENT`, the time without arrivals after which a path counts as down.
const ROUND_TRIP_MOST: Duration = Duration::from_secs(1);

/// Difference to the best path's delivery ratio from which a path counts as worse.
const WORSE: f64 = 0.04;
/// Factor that reduces the weight of earlier reports with each new one.
const DECAY: f64 = 0.75;
/// Minimum number of recent packets for computing a delivery ratio.
const SAMPLES_MIN: f64 = 16.0;
/// Amount by which a path's share of the packets grows at each check.
const GAIN: f64 = 0.05;
/// Smallest share of the packets for a path on which packets arrive.
const SHARE_LEAST: f64 = 1.0 / 16.0;

/// Weight in the kernel of a path whose share of the packets is not reduced.
pub const WEIGHT_MOST: u32 = 16;
/// Number of bits of a packet count in reports.
const COUNT_BITS: u32 = 30;
pub const COUNT: u32 = (1 << COUNT_BITS) - 1;

/// The paths of one session, as one end measures them.
#[derive(Debug, Clone)]
pub struct Balance(Vec<BalancedPath>);

#[derive(Debug, Clone, Default)]
struct BalancedPath {
    /// True if packets have arrived on the path recently.
    is_up: bool,
    /// True if packets have ever arrived on the path. Such a path starts with the smallest share of packets after an
    /// outage.
    was_up: bool,
    /// Share of packets for the path, from `SHARE_LEAST` to 1.
    share: f64,
    /// The latest count of arrived packets that the other end has reported, and the number of packets that this end had
    /// sent by then.
    heard: Option<(u32, u64)>,
    /// Number of packets that this end had sent when the arrival of one was last reported.
    answered: u64,
    /// Time since which more than `UNHEARD` packets are sent without a reported arrival.
    waits: Option<Duration>,
    /// Number of recently sent packets, in which older ones have less weight.
    sent: f64,
    /// Number of recently arrived packets, in which older ones have less weight.
    came: f64,
}

impl Balance {
    pub fn new(paths: usize) -> Self {
        let path = BalancedPath { share: 1.0, ..BalancedPath::default() };
        Self(vec![path; paths])
    }

    /// Handles a report of the other end: `count` packets have arrived on a path on which this end has sent `sent`.
    pub fn on_count(&mut self, path: u8, count: u32, sent: u64) {
        let Some(path) = self.0.get_mut(usize::from(path)) else { return };
        let Some((before, sent_before)) = path.heard.replace((count, sent)) else { return };
        let came = count.wrapping_sub(before) & COUNT;
        // This report was overtaken by a later one, so it is ignored.
        if came > COUNT / 2 {
            path.heard = Some((before, sent_before));
            return;
        }
        path.sent = path.sent * DECAY + sent.saturating_sub(sent_before) as f64;
        path.came = path.came * DECAY + f64::from(came);
        if came > 0 {
            path.answered = sent;
            path.waits = None;
            // A path begins with a full share, and starts again with the smallest share after an outage.
            let share = if path.was_up { SHARE_LEAST } else { 1.0 };
            if !path.is_up {
                (path.is_up, path.was_up, path.share) = (true, true, share);
                (path.sent, path.came) = (0.0, 0.0);
            }
        }
    }

    /// Updates which paths are up, and how packets are shared among them. It must be called once in the interval
    /// [`LOOK`]. `sent` is the number of packets sent so far on each path.
    pub fn look(&mut self, now: Duration, round_trip: Option<Duration>, sent: &[u64]) {
        let patience = SILENT + round_trip.unwrap_or_default().min(ROUND_TRIP_MOST);
        for (path, sent) in self.0.iter_mut().zip(sent) {
            if *sent <= path.answered + UNHEARD {
                continue;
            }
            let since = *path.waits.get_or_insert(now);
            path.is_up &= now < since + patience;
        }
        // The share of a path that delivers less than the best one is reduced in proportion, at most to half of it at
        // once.
        let best = self.0.iter().filter_map(BalancedPath::ratio).fold(0.0, f64::max);
        for path in &mut self.0 {
            path.share = match path.ratio() {
                Some(ratio) if ratio < best - WORSE => path.share * (ratio / best).max(0.5),
                _ => path.share + GAIN,
            };
            path.share = path.share.clamp(SHARE_LEAST, 1.0);
        }
    }

    /// Returns the weights of all paths. If no path is up, each keeps its weight, since any may be the first to work
    /// again.
    pub fn weights(&self) -> Vec<u32> {
        let is_any_up = self.0.iter().any(|path| path.is_up);
        let weight = |path: &BalancedPath| match path.is_up || !is_any_up {
            true => ((path.share * f64::from(WEIGHT_MOST)).round() as u32).max(1),
            false => 0,
        };
        self.0.iter().map(weight).collect()
    }

    pub fn is_up(&self, path: usize) -> bool {
        self.0.get(path).is_some_and(|path| path.is_up)
    }
}

impl BalancedPath {
    /// Returns the share of recent packets that have arrived, or `None` if too few were sent.
    fn ratio(&self) -> Option<f64> {
        (self.is_up && self.sent >= SAMPLES_MIN).then(|| (self.came / self.sent).min(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Two simulated paths, and how a test treats their packets.
    struct PathWorld {
        balance: Balance,
        now: Duration,
        sent: [u64; 2],
        came: [f64; 2],
    }

    impl PathWorld {
        fn new() -> Self {
            Self { balance: Balance::new(2), now: Duration::ZERO, sent: [0; 2], came: [0.0; 2] }
        }

        /// Sends `packets` between two checks, divided by the weights of the paths. Each path carries at most `room`
        /// packets, and loses a part of them.
        fn looks(&mut self, looks: u32, packets: u32, room: [u32; 2], loss: [f64; 2]) {
            for _ in 0..looks {
                let weights = self.balance.weights();
                let all: u32 = weights.iter().sum();
                for path in 0..2 {
                    // The two reports that are sent on each path count as packets of the path, too.
                    let sent = packets * weights[path] / all.max(1) + 2;
                    self.sent[path] += u64::from(sent);
                    self.came[path] += f64::from(sent.min(room[path])) * (1.0 - loss[path]);
                }
                for path in 0..2 {
                    self.balance.on_count(path as u8, self.came[path] as u32 & COUNT, self.sent[path]);
                }
                self.now += LOOK;
                self.balance.look(self.now, Some(20 * MS), &self.sent);
            }
        }

        fn weights(&self) -> [u32; 2] {
            self.balance.weights().try_into().expect("two")
        }
    }

    #[test]
    fn equally_good_paths_get_equal_weights() {
        let mut world = PathWorld::new();
        world.looks(50, 1000, [10_000; 2], [0.0, 0.0]);
        assert_eq!(world.weights(), [16, 16]);
        // If one of two paths loses 2 % of its packets, the weights of both paths do not change.
        world.looks(100, 1000, [10_000; 2], [0.0, 0.02]);
        assert_eq!(world.weights(), [16, 16]);
    }

    #[test]
    fn path_weight_follows_its_capacity() {
        let mut world = PathWorld::new();
        world.looks(100, 1200, [1000, 300], [0.0, 0.0]);
        let [wide, narrow] = world.weights();
        let share = f64::from(narrow) / f64::from(wide + narrow);
        assert!(wide == 16 && (0.15..0.4).contains(&share), "{wide} {narrow}");
        // The path's share of the packets grows again when the path can carry more.
        world.looks(100, 1200, [1000, 1000], [0.0, 0.0]);
        assert_eq!(world.weights(), [16, 16]);
    }

    #[test]
    fn cut_path_has_no_weight_until_it_returns() {
        let mut world = PathWorld::new();
        world.looks(20, 1000, [10_000; 2], [0.0, 0.0]);
        world.looks(2, 1000, [10_000, 0], [0.0, 0.0]);
        assert!(world.weights()[1] > 0, "it may only be late");
        world.looks(2, 1000, [10_000, 0], [0.0, 0.0]);
        assert_eq!(world.weights(), [16, 0]);
        assert!(world.balance.is_up(0) && !world.balance.is_up(1));
        world.looks(50, 1000, [10_000, 0], [0.0, 0.0]);
        assert_eq!(world.weights(), [16, 0]);
        world.looks(1, 1000, [10_000; 2], [0.0, 0.0]);
        assert!((1..4).contains(&world.weights()[1]), "carefully");
        world.looks(40, 1000, [10_000; 2], [0.0, 0.0]);
        assert_eq!(world.weights(), [16, 16]);
        // Packets pass on no path, and either may be the first to work again.
        world.looks(10, 1000, [0, 0], [0.0, 0.0]);
        assert!(world.weights().iter().all(|weight| *weight > 0));
    }

    #[test]
    fn path_of_a_session_without_traffic_is_not_marked_as_down() {
        let mut world = PathWorld::new();
        world.looks(10, 100, [1000; 2], [0.0, 0.0]);
        for _ in 0..100 {
            world.now += LOOK;
            world.balance.look(world.now, None, &world.sent);
        }
        assert!(world.balance.is_up(0) && world.balance.is_up(1));
        // The time after which a path counts as down starts when these packets are sent, and not with the silence
        // before them.
        world.sent = world.sent.map(|sent| sent + 100);
        world.balance.look(world.now, None, &world.sent);
        assert!(world.balance.is_up(0) && world.balance.is_up(1));
    }

    /// Reports are sent on every path, so an old one may arrive after a newer one. Counts also wrap around.
    #[test]
    fn overtaken_path_reports_are_ignored() {
        let mut balance = Balance::new(1);
        balance.on_count(0, COUNT - 9, 0);
        balance.on_count(0, COUNT - 4, 10);
        balance.on_count(0, 5, 20);
        balance.on_count(0, COUNT - 4, 20);
        balance.on_count(7, 1, 1);
        balance.on_count(0, 15, 30);
        let both = 10.0 * DECAY + 10.0;
        assert_eq!((balance.0[0].came, balance.0[0].sent), (both, both));
    }
}
