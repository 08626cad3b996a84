//! What the allocator keeps of memory that is free again goes back to the system once much of what it was for has gone.

use std::time::{Duration, Instant};

/// Going through all free memory takes milliseconds: no more often than this.
const INTERVAL: Duration = Duration::from_secs(5);
/// Peers, and bytes of the cache, that are worth it.
const WORTH: [usize; 2] = [16, 4 << 20];

/// The most that was held since memory was last given back, of each kind.
#[derive(Debug, Default)]
pub struct Memory {
    peaks: [usize; 2],
    last: Option<Instant>,
    /// Once more a while after the last time: peers' tasks and what they held go behind their sessions.
    again: bool,
}

impl Memory {
    /// Whether half of what was held of a kind has gone, and enough to give memory back.
    pub fn has_fallen(&mut self, holds: [usize; 2], now: Instant) -> bool {
        for (peak, held) in self.peaks.iter_mut().zip(holds) {
            *peak = held.max(*peak);
        }
        let kinds = self.peaks.iter().zip(holds).zip(WORTH);
        let fallen = kinds.into_iter().any(|((peak, held), worth)| *peak >= worth && held <= peak / 2);
        let soon = self.last.is_some_and(|last| now.saturating_duration_since(last) < INTERVAL);
        if !(fallen || self.again) || soon {
            return false;
        }
        (self.peaks, self.last, self.again) = (holds, Some(now), fallen);
        true
    }
}

/// Each thread's arena keeps its peak otherwise.
#[cfg_attr(target_env = "gnu", expect(unsafe_code, reason = "a function of the C library"))]
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes the allocator's own locks, and moves nothing that is in use.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_goes_back_once_half_has_gone() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut memory = Memory::default();
        assert!(!memory.has_fallen([10, 0], at(0)));
        assert!(!memory.has_fallen([0, 0], at(1)), "too few to be worth it");
        assert!(!memory.has_fallen([100, 0], at(2)));
        assert!(!memory.has_fallen([51, 0], at(3)));
        assert!(memory.has_fallen([50, 0], at(4)));
        assert!(!memory.has_fallen([20, 0], at(5)), "too soon");
        assert!(memory.has_fallen([20, 0], at(9)));
        assert!(!memory.has_fallen([20, 0], at(13)));
        assert!(memory.has_fallen([20, 0], at(14)), "what went behind it");
        assert!(!memory.has_fallen([20, 0], at(30)));
        assert!(!memory.has_fallen([20, 8 << 20], at(31)));
        assert!(memory.has_fallen([20, 1 << 20], at(32)));
    }
}
