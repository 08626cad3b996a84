//! How long the relay waits before it connects to its upstream relay again.

use std::time::Duration;

const SHORTEST: Duration = Duration::from_millis(250);
/// A session that lasts for longer than this resets the pauses.
const LONGEST: Duration = Duration::from_secs(15);

/// Doubles the pause with each attempt that fails and each session that ends soon.
#[derive(Debug)]
pub(crate) struct Pauses(Duration);

impl Pauses {
    pub fn new() -> Self {
        Self(SHORTEST)
    }

    /// Returns the pause after a session that `lasted` so long, zero if none began.
    pub fn after(&mut self, lasted: Duration) -> Duration {
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
        (0..times).map(|_| pauses.after(lasted).as_millis()).collect()
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
        assert_eq!(pauses.after(LONGEST).as_millis(), 2000);
        assert_eq!(pauses.after(LONGEST + Duration::from_secs(1)).as_millis(), 250);
        assert_eq!(pauses.after(Duration::ZERO).as_millis(), 500);
    }
}
