//! Moves sessions to other addresses in waves. A wave moves a share of the sessions within some time.

use std::time::{Duration, Instant};

/// Settings of a wave, in which a share of the sessions moves to other addresses.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct WaveSettings {
    /// Share of the sessions that move, 0 to 1.
    pub share: f64,
    /// Time from the first session's move to the last session's.
    pub within: Duration,
}

/// A wave of moves in progress. Its sessions move at even intervals, in random order.
#[derive(Debug)]
pub struct MoveWave {
    began: Instant,
    within: Duration,
    sessions: Vec<usize>,
    moved: usize,
}

impl MoveWave {
    /// Starts a wave. The sessions that move are chosen among `sessions` at random.
    pub fn begin(wanted: WaveSettings, mut sessions: Vec<usize>, now: Instant) -> Self {
        fastrand::shuffle(&mut sessions);
        let count = (sessions.len() as f64 * wanted.share.clamp(0.0, 1.0)).round() as usize;
        sessions.truncate(count);
        Self { began: now, within: wanted.within, sessions, moved: 0 }
    }

    /// Returns the sessions whose move has become due since the last call.
    pub fn take_due(&mut self, now: Instant) -> Vec<usize> {
        let elapsed = now.saturating_duration_since(self.began);
        let part = match self.within.is_zero() || elapsed >= self.within {
            true => 1.0,
            false => elapsed.as_secs_f64() / self.within.as_secs_f64(),
        };
        let due = (self.sessions.len() as f64 * part).ceil() as usize;
        let due = due.min(self.sessions.len()).max(self.moved);
        let taken = self.sessions.get(self.moved..due).unwrap_or_default().to_vec();
        self.moved = due;
        taken
    }

    /// Returns the time when the next session must move; `None` if all have moved.
    pub fn next_due(&self) -> Option<Instant> {
        let step = self.within.as_secs_f64() / self.sessions.len() as f64;
        (self.moved < self.sessions.len())
            .then(|| self.began + Duration::from_secs_f64(step * self.moved as f64))
    }

    /// Returns the number of sessions that the wave moves.
    pub fn count(&self) -> usize {
        self.sessions.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WITHIN: Duration = Duration::from_secs(1);

    fn wave(share: f64, within: Duration) -> (MoveWave, Instant) {
        let now = Instant::now();
        (MoveWave::begin(WaveSettings { share, within }, (0..200).collect(), now), now)
    }

    #[test]
    fn each_receiver_changes_address_once_at_even_time_intervals() {
        let (mut wave, began) = wave(1.0, WITHIN);
        let mut moved = Vec::new();
        for tenth in 0..=10 {
            moved.extend(wave.take_due(began + WITHIN * tenth / 10));
            assert_eq!(moved.len(), 20 * tenth as usize);
            if tenth == 5 {
                assert_eq!(wave.next_due(), Some(began + WITHIN / 2));
            }
        }
        assert_eq!(wave.next_due(), None);
        assert!(wave.take_due(began + WITHIN * 2).is_empty());
        moved.sort_unstable();
        assert_eq!(moved, (0..200).collect::<Vec<_>>());
    }

    #[test]
    fn requested_fraction_of_receivers_changes_address_at_once_if_time_is_0() {
        let (mut wave, began) = wave(0.25, Duration::ZERO);
        assert_eq!((wave.count(), wave.take_due(began).len()), (50, 50));
        let (mut none, began) = self::wave(0.0, WITHIN);
        assert!(none.take_due(began).is_empty() && none.next_due().is_none());
    }

    #[test]
    fn late_timer_call_changes_address_of_all_receivers_that_were_due() {
        let (mut wave, began) = wave(1.0, WITHIN);
        assert_eq!(wave.take_due(began + WITHIN * 3).len(), 200);
    }
}
