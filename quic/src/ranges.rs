//! Sets of byte offsets. Loss and reordering leave few ranges, so a sorted vector is enough.

use std::ops::Range;

/// A set of offsets as disjoint, non-adjacent, ascending ranges. The set is usually empty, and then allocates nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranges(Vec<Range<u64>>);

impl Ranges {
    /// Returns whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the first range.
    pub fn first(&self) -> Option<Range<u64>> {
        self.0.first().cloned()
    }

    /// Returns the number of ranges.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the last range.
    pub fn last(&self) -> Option<Range<u64>> {
        self.0.last().cloned()
    }

    /// Returns whether an offset is in the set.
    pub fn contains(&self, offset: u64) -> bool {
        let at = self.0.partition_point(|range| range.end <= offset);
        self.0.get(at).is_some_and(|range| range.start <= offset)
    }

    /// Returns the ranges, ascending.
    pub fn iter(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        self.0.iter().cloned()
    }

    /// Returns the number of offsets in the set.
    pub fn total(&self) -> u64 {
        self.0.iter().map(|range| range.end - range.start).sum()
    }

    /// Adds a range.
    pub fn insert(&mut self, mut range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|old| old.end < range.start);
        let last = self.0.partition_point(|old| old.start <= range.end);
        if let Some(touched) = self.0.get(first..last)
            && let (Some(low), Some(high)) = (touched.first(), touched.last())
        {
            range = range.start.min(low.start)..range.end.max(high.end);
        }
        self.0.splice(first..last, [range]);
    }

    /// Removes a range.
    pub fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let first = self.0.partition_point(|old| old.end <= range.start);
        let last = self.0.partition_point(|old| old.start < range.end);
        let Some(touched) = self.0.get(first..last) else { return };
        let (Some(low), Some(high)) = (touched.first(), touched.last()) else { return };
        let rest = [low.start..range.start, range.end..high.end];
        self.0.splice(first..last, rest.into_iter().filter(|rest| !rest.is_empty()));
    }

    /// Returns the parts of `range` that are not in the set, ascending.
    pub fn gaps(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> + '_ {
        let first = self.0.partition_point(|old| old.end <= range.start);
        let mut inside = self.0.get(first..).unwrap_or_default().iter();
        let mut at = range.start;
        std::iter::from_fn(move || {
            while at < range.end {
                let next = inside.next().cloned().unwrap_or(range.end..range.end);
                let gap = at..next.start.min(range.end);
                at = next.end;
                if !gap.is_empty() {
                    return Some(gap);
                }
            }
            None
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn check(ranges: &Ranges, model: &BTreeSet<u64>) {
        assert!(ranges.0.iter().all(|range| range.start < range.end));
        assert!(ranges.0.windows(2).all(|pair| pair[0].end < pair[1].start), "{ranges:?}");
        assert!(ranges.iter().flatten().eq(model.iter().copied()));
        assert_eq!(ranges.total(), model.len() as u64);
    }

    proptest! {
        #[test]
        fn range_set_contains_the_same_offsets_as_a_btree_set(steps in prop::collection::vec((any::<bool>(), 0u64..60, 0u64..20), 0..60)) {
            let mut ranges = Ranges::default();
            let mut model = BTreeSet::new();
            for (insert, start, len) in steps {
                let range = start..start + len;
                let gaps: Vec<u64> = ranges.gaps(range.clone()).flatten().collect();
                assert!(gaps.into_iter().eq(range.clone().filter(|offset| !model.contains(offset))));
                if insert {
                    ranges.insert(range.clone());
                    model.extend(range);
                } else {
                    ranges.remove(range.clone());
                    model.retain(|offset| !range.contains(offset));
                }
                check(&ranges, &model);
                assert_eq!(ranges.last().map(|last| last.end - 1), model.last().copied());
                assert!((0..90).all(|offset| ranges.contains(offset) == model.contains(&offset)));
            }
        }
    }
}
