//! A buddy allocator for runs (ranges) of keystream entries, whose lengths are powers of two. Freed runs are merged.

use std::collections::BTreeSet;

/// A run of 2^`order` consecutive keystream entries. `start` is a multiple of that length.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BuddyRun {
    pub start: u32,
    order: u32,
}

impl BuddyRun {
    pub fn len(self) -> u32 {
        1 << self.order
    }
}

/// Allocates runs of consecutive entries of the map `keystreams`.
pub(super) struct Runs {
    /// The start indexes of free runs of entries, by order (log2 of the length).
    free: [BTreeSet<u32>; u32::BITS as usize],
    /// Runs of keystream entries that no ring uses any more. They are freed once all BPF program runs that may still
    /// use them have ended.
    pub retired: Vec<BuddyRun>,
}

impl Runs {
    pub fn new(entries: u32) -> Self {
        let mut runs = Self { free: Default::default(), retired: Vec::new() };
        let mut start = 0;
        for order in (0..u32::BITS).rev().filter(|order| entries >> order & 1 != 0) {
            runs.give(BuddyRun { start, order });
            start += 1 << order;
        }
        runs
    }

    pub fn take(&mut self, order: u32) -> Option<BuddyRun> {
        let from = (order..u32::BITS).find(|order| !self.free[*order as usize].is_empty())?;
        let start = self.free[from as usize].pop_first()?;
        // A larger run of entries is split in halves until its first part has the wanted length. The other parts become
        // free runs.
        for half in order..from {
            self.free[half as usize].insert(start + (1 << half));
        }
        Some(BuddyRun { start, order })
    }

    /// Frees a run of keystream entries. If its buddy (the neighbouring run of the same length) is free, merges the
    /// two, and repeats this with the merged run.
    pub fn give(&mut self, mut run: BuddyRun) {
        // The start of the buddy differs from the run's start only in the bit that equals the length.
        while self.free[run.order as usize].remove(&(run.start ^ run.len())) {
            run = BuddyRun { start: run.start & !run.len(), order: run.order + 1 };
        }
        self.free[run.order as usize].insert(run.start);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_keystream_memory_is_split_and_merged_by_the_buddy_allocator() {
        let mut runs = Runs::new(13);
        assert_eq!(runs.take(4), None);
        let taken = [3, 2, 0].map(|order| runs.take(order).expect("room"));
        assert_eq!(taken.map(|run| (run.start, run.len())), [(0, 8), (8, 4), (12, 1)]);
        assert_eq!(runs.take(0), None);
        runs.give(taken[0]);
        let singles: Vec<_> = (0..8).map_while(|_| runs.take(0)).collect();
        assert_eq!(singles.iter().map(|run| run.start).collect::<BTreeSet<_>>(), (0..8).collect());
        assert_eq!(runs.take(1), None);
        // The order of the eight indexes: no two neighbouring entries are freed one after the other.
        for at in [5, 0, 7, 2, 4, 1, 3, 6] {
            runs.give(singles[at]);
        }
        assert_eq!(runs.take(3), Some(taken[0]));
        assert_eq!(Runs::new(0).take(0), None);
    }

    #[test]
    fn allocated_keystream_memory_blocks_never_overlap() {
        let mut rng = fastrand::Rng::with_seed(1);
        let mut runs = Runs::new(1000);
        let mut taken = Vec::<BuddyRun>::new();
        for _ in 0..2000 {
            if rng.bool()
                && let Some(run) = runs.take(rng.u32(..8))
            {
                let end = run.start + run.len();
                assert!(end <= 1000 && run.start.is_multiple_of(run.len()));
                assert!(
                    taken.iter().all(|other| end <= other.start || other.start + other.len() <= run.start)
                );
                taken.push(run);
            } else if !taken.is_empty() {
                runs.give(taken.swap_remove(rng.usize(..taken.len())));
            }
        }
        taken.into_iter().for_each(|run| runs.give(run));
        assert_eq!(runs.take(9).map(|run| run.start), Some(0));
    }
}
