//! How much of a session each of its paths carries, as values: no I/O, and time is an argument.
//!
//! Both ends say to each other, by every path, how many packets have come by each ([`Word::Came`](super::agree::Word)). A path by which
//! nothing comes any more carries nothing until something does: words go by it all the time. One that loses more than the best one
//! carries less, by as much; one that does not carries a little more, as long as there is no full share. So what is lost at random
//! changes little, and what a queue has no room for goes by the other path.

use std::time::Duration;

/// Between two looks, and between two words of a session that has traffic.
pub const LOOK: Duration = Duration::from_millis(100);
/// Between two words of one that has none.
pub const IDLE: Duration = Duration::from_secs(1);
/// A path by which nothing is known to have come for so long, and a round trip, carries nothing, if so many packets were sent by it.
const SILENT: Duration = Duration::from_millis(200);
const UNHEARD: u64 = 8;
/// No round trip makes anybody wait longer than this.
const ROUND_TRIP_MOST: Duration = Duration::from_secs(1);

/// What a path loses more than the best one, and is not by chance.
const WORSE: f64 = 0.04;
/// Of what was sent and has come, each word counts so much less than the one after it.
const DECAY: f64 = 0.75;
const SAMPLES_MIN: f64 = 16.0;
const GAIN: f64 = 0.05;
/// Of a path that carries anything.
const SHARE_LEAST: f64 = 1.0 / 16.0;

/// As the kernel has them: of a path with a full share.
pub const WEIGHT_MOST: u32 = 16;
/// Counts in words.
const COUNT_BITS: u32 = 30;
pub const COUNT: u32 = (1 << COUNT_BITS) - 1;

/// The paths of one session, as one end knows them.
#[derive(Debug, Clone)]
pub struct Balance(Vec<Path>);

#[derive(Debug, Clone, Default)]
struct Path {
    /// Something has come by it of late.
    is_up: bool,
    was_up: bool,
    /// From `SHARE_LEAST` to 1.
    share: f64,
    /// What the other end has said last, and what this one had sent by then.
    heard: Option<(u32, u64)>,
    /// What this end had sent when something was last known to have come.
    answered: u64,
    /// Since when too much is not answered.
    waits: Option<Duration>,
    sent: f64,
    came: f64,
}

impl Balance {
    pub fn new(paths: usize) -> Self {
        let path = Path { share: 1.0, ..Path::default() };
        Self(vec![path; paths])
    }

    /// The other end says how many packets have come there by a path; this one has sent so many by it.
    pub fn hear(&mut self, path: u8, count: u32, sent: u64) {
        let Some(path) = self.0.get_mut(usize::from(path)) else { return };
        let Some((before, sent_before)) = path.heard.replace((count, sent)) else { return };
        let came = count.wrapping_sub(before) & COUNT;
        // An old word, behind a newer one.
        if came > COUNT / 2 {
            path.heard = Some((before, sent_before));
            return;
        }
        path.sent = path.sent * DECAY + sent.saturating_sub(sent_before) as f64;
        path.came = path.came * DECAY + f64::from(came);
        if came > 0 {
            path.answered = sent;
            path.waits = None;
            // The first time it is as good as any.
            let share = if path.was_up { SHARE_LEAST } else { 1.0 };
            if !path.is_up {
                (path.is_up, path.was_up, path.share) = (true, true, share);
                (path.sent, path.came) = (0.0, 0.0);
            }
        }
    }

    /// To be called each [`LOOK`], with what was sent by each.
    pub fn look(&mut self, now: Duration, round_trip: Option<Duration>, sent: &[u64]) {
        let patience = SILENT + round_trip.unwrap_or_default().min(ROUND_TRIP_MOST);
        for (path, sent) in self.0.iter_mut().zip(sent) {
            if *sent <= path.answered + UNHEARD {
                continue;
            }
            let since = *path.waits.get_or_insert(now);
            path.is_up &= now < since + patience;
        }
        let best = self.0.iter().filter_map(Path::ratio).fold(0.0, f64::max);
        for path in &mut self.0 {
            path.share = match path.ratio() {
                Some(ratio) if ratio < best - WORSE => path.share * (ratio / best).max(0.5),
                _ => path.share + GAIN,
            };
            path.share = path.share.clamp(SHARE_LEAST, 1.0);
        }
    }

    /// Of all paths the same, where none is up: who knows.
    pub fn weights(&self) -> Vec<u32> {
        let is_any_up = self.0.iter().any(|path| path.is_up);
        let weight = |path: &Path| match path.is_up || !is_any_up {
            true => ((path.share * f64::from(WEIGHT_MOST)).round() as u32).max(1),
            false => 0,
        };
        self.0.iter().map(weight).collect()
    }

    pub fn is_up(&self, path: usize) -> bool {
        self.0.get(path).is_some_and(|path| path.is_up)
    }
}

impl Path {
    /// Of what was sent of late, what has come; `None`: that was too little to tell.
    fn ratio(&self) -> Option<f64> {
        (self.is_up && self.sent >= SAMPLES_MIN).then(|| (self.came / self.sent).min(1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Two paths, and what they do with packets.
    struct World {
        balance: Balance,
        now: Duration,
        sent: [u64; 2],
        came: [f64; 2],
    }

    impl World {
        fn new() -> Self {
            Self { balance: Balance::new(2), now: Duration::ZERO, sent: [0; 2], came: [0.0; 2] }
        }

        /// `packets` in a look by their weights; each path takes so many, and loses a part of these.
        fn looks(&mut self, looks: u32, packets: u32, room: [u32; 2], loss: [f64; 2]) {
            for _ in 0..looks {
                let weights = self.balance.weights();
                let all: u32 = weights.iter().sum();
                for path in 0..2 {
                    // And the words themselves.
                    let sent = packets * weights[path] / all.max(1) + 2;
                    self.sent[path] += u64::from(sent);
                    self.came[path] += f64::from(sent.min(room[path])) * (1.0 - loss[path]);
                }
                for path in 0..2 {
                    self.balance.hear(path as u8, self.came[path] as u32 & COUNT, self.sent[path]);
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
    fn paths_that_carry_all_carry_the_same() {
        let mut world = World::new();
        world.looks(50, 1000, [10_000; 2], [0.0, 0.0]);
        assert_eq!(world.weights(), [16, 16]);
        // Nor does it matter what is lost by chance.
        world.looks(100, 1000, [10_000; 2], [0.0, 0.02]);
        assert_eq!(world.weights(), [16, 16]);
    }

    #[test]
    fn a_narrow_path_carries_what_it_can() {
        let mut world = World::new();
        world.looks(100, 1200, [1000, 300], [0.0, 0.0]);
        let [wide, narrow] = world.weights();
        let share = f64::from(narrow) / f64::from(wide + narrow);
        assert!(wide == 16 && (0.15..0.4).contains(&share), "{wide} {narrow}");
        // And more, when it can.
        world.looks(100, 1200, [1000, 1000], [0.0, 0.0]);
        assert_eq!(world.weights(), [16, 16]);
    }

    #[test]
    fn a_path_that_is_cut_carries_nothing_until_it_is_back() {
        let mut world = World::new();
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
        // All of them: any may be the first that is back.
        world.looks(10, 1000, [0, 0], [0.0, 0.0]);
        assert!(world.weights().iter().all(|weight| *weight > 0));
    }

    #[test]
    fn silence_of_a_session_that_says_nothing_means_nothing() {
        let mut world = World::new();
        world.looks(10, 100, [1000; 2], [0.0, 0.0]);
        for _ in 0..100 {
            world.now += LOOK;
            world.balance.look(world.now, None, &world.sent);
        }
        assert!(world.balance.is_up(0) && world.balance.is_up(1));
        // Nor is it counted from there, when it goes on.
        world.sent = world.sent.map(|sent| sent + 100);
        world.balance.look(world.now, None, &world.sent);
        assert!(world.balance.is_up(0) && world.balance.is_up(1));
    }

    /// Words come by every path, so one may be behind a newer one, and counts wrap around.
    #[test]
    fn old_words_say_nothing() {
        let mut balance = Balance::new(1);
        balance.hear(0, COUNT - 9, 0);
        balance.hear(0, COUNT - 4, 10);
        balance.hear(0, 5, 20);
        balance.hear(0, COUNT - 4, 20);
        balance.hear(7, 1, 1);
        balance.hear(0, 15, 30);
        let both = 10.0 * DECAY + 10.0;
        assert_eq!((balance.0[0].came, balance.0[0].sent), (both, both));
    }
}
