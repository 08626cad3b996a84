//! How long the relay waits before it connects to its upstream relay again.

use std::time::Duration;

const SHORTEST: Duration = Duration::from_millis(250);
/// A session that lasts for longer than this resets the pauses.
const LONGEST: Duration = Duration::from_secs(15);
/// One that has lasted for so long and that the upstream relay has forgotten is followed by another at once.
const BRIEF: Duration = Duration::from_secs(1);

/// Doubles the pause with each attempt that fails and each session that ends soon.
#[derive(Debug)]
pub(crate) struct Pauses(Duration);

impl Pauses {
    pub fn new() -> Self {
        Self(SHORTEST)
    }

    /// Returns the pause after a session that `lasted` so long, zero if none began. `forgotten`: the upstream relay was restarted, and
    /// answers.
    pub fn after(&mut self, lasted: Duration, forgotten: bool) -> Duration {
        if forgotten && lasted > BRIEF {
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
        (0..times).map(|_| pauses.after(lasted, false).as_millis()).collect()
    }

    #[test]
    fn pause_after_failed_attempts_doubles_up_to_a_bound() {
        let pauses = milliseconds(&mut Pauses::new(), Duration::ZERO, 8);
        assert_eq!(pauses, [250, 500, 1000, 2000, 4000, 8000, 15_000, 15_000]);
    }

    /// An upstream relay that accepts sessions and ends them at once is not asked four times a second.
    #[test]
    fn pause_after_short_sessions_doubles_and_after_a_long_one_is_short() {
        let mut pauses = Pauses::new();
        assert_eq!(milliseconds(&mut pauses, Duration::from_secs(1), 3), [250, 500, 1000]);
        assert_eq!(pauses.after(LONGEST, false).as_millis(), 2000);
        assert_eq!(pauses.after(LONGEST + Duration::from_secs(1), false).as_millis(), 250);
        assert_eq!(pauses.after(Duration::ZERO, false).as_millis(), 500);
    }

    #[test]
    fn restarted_upstream_is_connected_to_at_once_but_not_again_and_again() {
        let mut pauses = Pauses::new();
        assert_eq!(milliseconds(&mut pauses, Duration::ZERO, 3), [250, 500, 1000]);
        assert_eq!(pauses.after(Duration::from_secs(5), true).as_millis(), 0);
        assert_eq!(pauses.after(Duration::from_millis(100), true).as_millis(), 250);
        assert_eq!(pauses.after(Duration::from_millis(100), true).as_millis(), 500);
    }
}
