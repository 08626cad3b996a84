//! How long the relay waits before it connects again to its upstream relay, or to a relay of the cluster.

use std::time::Duration;

const SHORTEST: Duration = Duration::from_millis(250);
/// The longest pause between connection attempts. A session that lasted longer than this resets the pause to the
/// shortest.
const LONGEST: Duration = Duration::from_secs(15);
/// The shortest duration of a session after which this relay connects again at once, if the other relay was restarted
/// or sent GOAWAY.
pub const BRIEF: Duration = Duration::from_secs(1);

/// The pause before the next attempt to connect to the other relay. It doubles after each failed attempt and each
/// short session.
#[derive(Debug)]
pub struct Pauses(Duration);

impl Default for Pauses {
    fn default() -> Self {
        Self(SHORTEST)
    }
}

impl Pauses {
    /// Returns the pause after a session with the duration `lasted`, which is zero if the attempt to connect failed.
    /// `invites` is true if the other relay expects this one to connect again at once: it answered with a stateless
    /// reset, because it was restarted, or it sent GOAWAY.
    pub fn next_pause(&mut self, lasted: Duration, invites: bool) -> Duration {
        // A shortest duration of the session is required, so that a peer that resets each connection at once cannot
        // cause a busy loop.
        if invites && lasted > BRIEF {
            self.0 = SHORTEST;
            return Duration::ZERO;
        }
        if lasted > LONGEST {
            self.0 = SHORTEST;
        }
        let pause = self.0;
        self.0 = (pause * 2).min(LONGEST);
        pause
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn milliseconds(pauses: &mut Pauses, lasted: Duration, times: usize) -> Vec<u128> {
        (0..times).map(|_| pauses.next_pause(lasted, false).as_millis()).collect()
    }

    #[test]
    fn reconnect_pause_after_failures_doubles_up_to_15_seconds() {
        let pauses = milliseconds(&mut Pauses::default(), Duration::ZERO, 8);
        assert_eq!(pauses, [250, 500, 1000, 2000, 4000, 8000, 15_000, 15_000]);
    }

    /// If an upstream relay accepts sessions and ends them at once, the pause between connection attempts still grows.
    #[test]
    fn reconnect_pause_doubles_after_short_sessions_only() {
        let mut pauses = Pauses::default();
        assert_eq!(milliseconds(&mut pauses, Duration::from_secs(1), 3), [250, 500, 1000]);
        assert_eq!(pauses.next_pause(LONGEST, false).as_millis(), 2000);
        assert_eq!(pauses.next_pause(LONGEST + Duration::from_secs(1), false).as_millis(), 250);
        assert_eq!(pauses.next_pause(Duration::ZERO, false).as_millis(), 500);
    }

    #[test]
    fn restarted_upstream_is_reconnected_at_once_but_not_repeatedly() {
        let mut pauses = Pauses::default();
        assert_eq!(milliseconds(&mut pauses, Duration::ZERO, 3), [250, 500, 1000]);
        assert_eq!(pauses.next_pause(Duration::from_secs(5), true).as_millis(), 0);
        assert_eq!(pauses.next_pause(Duration::from_millis(100), true).as_millis(), 250);
        assert_eq!(pauses.next_pause(Duration::from_millis(100), true).as_millis(), 500);
    }
}
