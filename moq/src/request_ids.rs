//! Request IDs that were used.

use std::collections::BTreeSet;

/// Kept short: all below `next` were, and those in `ahead`. An index is an ID without its parity bit.
#[derive(Default)]
pub struct RequestIds {
    next: u64,
    ahead: BTreeSet<u64>,
}

impl RequestIds {
    /// Requests that may be missing between others: streams arrive in any order, but not in any number.
    const MAX_AHEAD: usize = 1 << 16;

    /// Takes an index; `false` for a repeated one.
    pub fn take(&mut self, index: u64) -> bool {
        if index < self.next || self.ahead.len() >= Self::MAX_AHEAD || !self.ahead.insert(index) {
            return false;
        }
        while self.ahead.remove(&self.next) {
            self.next += 1;
        }
        true
    }

    /// Whether an index was taken.
    pub fn contains(&self, index: u64) -> bool {
        index < self.next || self.ahead.contains(&index)
    }

    /// The index behind the largest that was taken.
    pub fn first_unseen(&self) -> u64 {
        self.ahead.last().map_or(self.next, |last| last + 1)
    }
}
