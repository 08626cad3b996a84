//! The set of request IDs that a peer has used.

use std::collections::BTreeSet;

/// The request IDs that a peer has used: all IDs below `next`, and those in `ahead`. The set stays small, because peers
/// use IDs in order. The set stores indexes: an index is a request ID without the bit that distinguishes client and
/// server.
#[derive(Default)]
pub struct RequestIds {
    next: u64,
    ahead: BTreeSet<u64>,
}

impl RequestIds {
    /// Largest number of IDs in `ahead`: IDs that arrived before a smaller ID did. Request streams may arrive in any
    /// order, but the memory for the set must be bounded.
    const MAX_AHEAD: usize = 1 << 16;

    /// Records the request ID with this index (the ID without the bit that distinguishes client and server) as used.
    /// Returns false if it was used before, or if `ahead` is full.
    pub fn take(&mut self, index: u64) -> bool {
        if index < self.next || self.ahead.len() >= Self::MAX_AHEAD || !self.ahead.insert(index) {
            return false;
        }
        while self.ahead.remove(&self.next) {
            self.next += 1;
        }
        true
    }

    /// Reports whether the request ID with this index was used.
    pub fn contains(&self, index: u64) -> bool {
        index < self.next || self.ahead.contains(&index)
    }

    /// Returns the largest index of a used request ID, plus 1.
    pub fn first_unseen(&self) -> u64 {
        self.ahead.last().map_or(self.next, |last| last + 1)
    }
}
