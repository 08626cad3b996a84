//! When the silence of a peer is worth a probe: media came, and nothing comes any more.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

/// How often [`Silence::look`] is called.
pub const LOOKS: Duration = Duration::from_millis(100);
/// A peer that was live is probed after so long without a packet of it.
const PATIENCE: Duration = Duration::from_millis(500);
/// How often it is probed from then on.
const PAUSE: Duration = Duration::from_millis(200);
/// A peer that is silent for so long is left to the idle time-out.
const ENOUGH: Duration = Duration::from_secs(60);
/// A connection is live with [`LIVE`] packets in so many looks: more than keep-alives and answers to probes are.
const WINDOW: usize = 20;
const LIVE: u64 = 12;

/// Watches how many packets a peer has sent. It has three states: *quiet* (few packets come, and a silence says nothing), *live*
/// (packets come often), and *silent* (none has come for [`PATIENCE`] since it was live). A packet ends the silence. Only
/// [`Silence::look`] changes the state; it keeps no clock.
#[derive(Debug)]
pub struct Silence {
    /// Packets so far.
    received: u64,
    last: Instant,
    /// Packets that came between looks, of the last [`WINDOW`] looks. It stands still while the peer is silent.
    recent: VecDeque<u64>,
    /// When the next probe is due, of a silent peer.
    next: Option<Instant>,
}

impl Silence {
    pub fn new(now: Instant) -> Self {
        Self { received: 0, last: now, recent: VecDeque::with_capacity(WINDOW), next: None }
    }

    /// Takes how many packets have come so far, and returns whether the peer is to be probed now.
    pub fn look(&mut self, now: Instant, received: u64) -> bool {
        let news = received.saturating_sub(self.received);
        if news > 0 {
            (self.received, self.last, self.next) = (received, now, None);
        }
        let silent = now.saturating_duration_since(self.last);
        if let Some(next) = self.next {
            if now < next || silent > ENOUGH {
                return false;
            }
            self.next = Some(now + PAUSE);
            return true;
        }
        if silent >= PATIENCE && self.recent.iter().sum::<u64>() >= LIVE {
            self.next = Some(now + PAUSE);
            return true;
        }
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back(news);
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A connection that is looked at every [`LOOKS`].
    struct Watched {
        silence: Silence,
        now: Instant,
        received: u64,
        /// The peer acknowledges probes.
        answers: bool,
    }

    impl Watched {
        fn new(answers: bool) -> Self {
            let now = Instant::now();
            Self { silence: Silence::new(now), now, received: 0, answers }
        }

        /// Lets `time` pass, in which packets come at this rate; returns how many probes were due, and when the first was.
        fn pass(&mut self, time: Duration, packets_per_look: f64) -> (u32, Option<Duration>) {
            let (began, mut due, mut probes, mut first) = (self.now, 0.0, 0, None);
            while self.now < began + time {
                self.now += LOOKS;
                due += packets_per_look;
                self.received += due as u64;
                due = due.fract();
                if self.silence.look(self.now, self.received) {
                    probes += 1;
                    self.received += u64::from(self.answers);
                    first.get_or_insert(self.now - began);
                }
            }
            (probes, first)
        }
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn live_peer_that_falls_silent_is_probed_until_it_answers() {
        let mut watched = Watched::new(false);
        assert_eq!(watched.pass(3 * SECOND, 2.5), (0, None));
        let (probes, first) = watched.pass(2 * SECOND, 0.0);
        assert_eq!(first, Some(PATIENCE));
        assert!((5..=8).contains(&probes), "{probes}");
        // It is back.
        assert_eq!(watched.pass(SECOND, 3.0), (0, None));
        let (_, again) = watched.pass(SECOND, 0.0);
        assert_eq!(again, Some(PATIENCE));
    }

    #[test]
    fn live_peer_that_answers_but_has_no_media_is_not_probed_for_ever() {
        let mut watched = Watched::new(true);
        watched.pass(3 * SECOND, 3.0);
        let (probes, _) = watched.pass(5 * SECOND, 0.0);
        assert!((1..=6).contains(&probes), "{probes}");
        assert_eq!(watched.pass(600 * SECOND, 0.0), (0, None));
    }

    #[test]
    fn keep_alives_are_no_media() {
        let mut watched = Watched::new(false);
        assert_eq!(watched.pass(60 * SECOND, 0.05), (0, None));
        assert_eq!(watched.pass(20 * SECOND, 0.0), (0, None));
    }

    #[test]
    fn a_peer_that_never_answers_is_left_to_the_idle_time_out() {
        let mut watched = Watched::new(false);
        watched.pass(3 * SECOND, 3.0);
        watched.pass(ENOUGH + SECOND, 0.0);
        assert_eq!(watched.pass(600 * SECOND, 0.0), (0, None));
    }
}
