//! The set of request IDs that a peer has used.

use std::collections::BTreeSet;

/// The request IDs that a peer has used. They are all IDs below `next` and those in `ahead`, so the set stays small. An
/// index is a request ID without its parity bit.
#[derive(Default)]
pub struct RequestIds {
    next: u64,
    ahead: BTreeSet<u64>,
}

impl RequestIds {
    /// Largest number of IDs kept after a missing one. Streams may arrive in any order, but the set must not grow
    /// without limit.
    const MAX_AHEAD: usize = 1 << 16;

    /// Records an index as used. Returns false if it was used before, or if too many wait for a missing one.
    pub fn take(&mut self, index: u64) -> bool {
        if index < self.next || self.ahead.len() >= Self::MAX_AHEAD || !self.ahead.insert(index) {
            return false;
        }
        while self.ahead.remove(&self.next) {
            self.next += 1;
        }
        true
    }

    /// Reports whether an index was used.
    pub fn contains(&self, index: u64) -> bool {
        index < self.next || self.ahead.contains(&index)
    }

    /// Returns the index after the largest that was used.
    pub fn first_unseen(&self) -> u64 {
        self.ahead.last().map_or(self.next, |last| last + 1)
    }
}
