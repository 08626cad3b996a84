//! Switching sets (draft-wilaw-moq-moqt-ssts): selects one track of each switching set for a given throughput, by the
//! draft's algorithm 0.

/// A switching set for which a track is to be selected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchingSet {
    /// Rank of the switching set. Switching sets with a lower rank get as much throughput as they can use, before those
    /// with a higher rank get any.
    pub rank: u8,
    /// Weight of the switching set. Switching sets of the same rank share throughput in proportion to their weights.
    pub weight: u64,
    /// Throughput that each track requires, in kbit/s, in ascending order.
    pub thresholds: Vec<u64>,
}

/// The largest throughput for which [`rungs`] computes an allocation, in kbit/s.
const MOST: u64 = 1 << 40;

/// The selected track of each switching set, as an index into [`SwitchingSet::thresholds`]. `None` if the throughput of
/// the switching set is too low for all of its tracks.
pub type Allocation = Vec<Option<usize>>;

/// Selects the best track of each switching set, so that the selected tracks together require at most `kbps` kbit/s.
pub fn allocate(sets: &[SwitchingSet], kbps: u64) -> Allocation {
    let mut allocation = vec![None; sets.len()];
    let mut ranks: Vec<_> = sets.iter().map(|set| set.rank).collect();
    ranks.sort_unstable();
    ranks.dedup();
    let mut left = kbps;
    for rank in ranks {
        let tier: Vec<_> = (0..sets.len()).filter(|at| sets[*at].rank == rank).collect();
        share(sets, tier.clone(), left, &mut allocation);
        let taken = tier.iter().filter_map(|at| needed(&sets[*at], allocation[*at]));
        left = taken.fold(left, u64::saturating_sub);
    }
    allocation
}

/// Divides the throughput `pool` among switching sets of the same rank in proportion to their weights. If a switching
/// set's best track needs less than the set's share, the other switching sets get the rest.
fn share(sets: &[SwitchingSet], mut open: Vec<usize>, mut pool: u64, allocation: &mut Allocation) {
    loop {
        let weights: u128 = open.iter().map(|at| u128::from(sets[*at].weight)).sum();
        for at in &open {
            let part = u128::from(pool) * u128::from(sets[*at].weight) / weights.max(1);
            allocation[*at] = sets[*at].thresholds.iter().rposition(|need| u128::from(*need) <= part);
        }
        let (full, rest): (Vec<_>, Vec<_>) = open
            .iter()
            .partition(|at| allocation[**at].is_some_and(|best| best + 1 == sets[**at].thresholds.len()));
        if full.is_empty() || rest.is_empty() {
            return;
        }
        let taken = full.into_iter().filter_map(|at: usize| needed(&sets[at], allocation[at]));
        pool = taken.fold(pool, u64::saturating_sub);
        open = rest;
    }
}

fn needed(set: &SwitchingSet, track: Option<usize>) -> Option<u64> {
    set.thresholds.get(track?).copied()
}

/// Returns the allocations (the selected track of each switching set) for all throughputs from 0 on. Each allocation is
/// returned with the smallest throughput in kbit/s at which it applies. An allocation may be missing if it applies to a
/// range of throughput that is narrower than an eighth of that throughput.
pub fn rungs(sets: &[SwitchingSet]) -> Vec<(u64, Allocation)> {
    let mut rungs = vec![(0, allocate(sets, 0))];
    // At this throughput the best track of every switching set is selected.
    let weights = sets.iter().fold(0u64, |sum, set| sum.saturating_add(set.weight.max(1)));
    let best = sets.iter().filter_map(|set| set.thresholds.last());
    let most = best.fold(0u64, |sum, need| sum.saturating_add(need.saturating_mul(weights))).min(MOST);
    let mut at = 0;
    while at < most {
        // The search raises the throughput by an eighth in each iteration. If the allocation has changed, a binary
        // search finds the throughput at which it changes. The binary search assumes a single change per iteration.
        let next = at.saturating_add(1 + at / 8).min(most);
        let known = rungs.last().map(|(_, allocation)| allocation.clone());
        if Some(allocate(sets, next)) != known {
            let mut same = at;
            let mut other = next;
            while other - same > 1 {
                let middle = same.midpoint(other);
                match Some(allocate(sets, middle)) == known {
                    true => same = middle,
                    false => other = middle,
                }
            }
            rungs.push((other, allocate(sets, other)));
            at = other;
        } else {
            at = next;
        }
    }
    rungs
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(rank: u8, weight: u64, thresholds: &[u64]) -> SwitchingSet {
        SwitchingSet { rank, weight, thresholds: thresholds.to_vec() }
    }

    #[test]
    fn switching_sets_share_throughput_by_rank_weight_and_threshold() {
        let ladder = [500, 1000, 2000];
        let table: [(&str, Vec<SwitchingSet>, u64, Allocation); 9] = [
            ("the best that fits", vec![set(0, 5, &ladder)], 1500, vec![Some(1)]),
            ("exactly", vec![set(0, 5, &ladder)], 2000, vec![Some(2)]),
            ("nothing fits", vec![set(0, 5, &ladder)], 499, vec![None]),
            ("a track that needs nothing always fits", vec![set(0, 1, &[0, 9])], 0, vec![Some(0)]),
            // By weight, the two switching sets get 1800 and 1200 kbit/s. The best track of the first one needs only
            // 1600 kbit/s, so the second one gets 200 kbit/s more.
            ("by weight", vec![set(0, 6, &[800, 1600]), set(0, 4, &ladder)], 3000, vec![Some(1), Some(1)]),
            (
                "the rest of one set goes to the other",
                vec![set(0, 1, &[500]), set(0, 1, &ladder)],
                2500,
                vec![Some(0), Some(2)],
            ),
            (
                "rank goes before weight",
                vec![set(1, 10, &ladder), set(0, 1, &[2000])],
                3000,
                vec![Some(1), Some(0)],
            ),
            ("nothing is left", vec![set(1, 10, &ladder), set(0, 1, &[2000])], 2400, vec![None, Some(0)]),
            ("no sets", vec![], 1000, vec![]),
        ];
        for (what, sets, kbps, expected) in table {
            assert_eq!(allocate(&sets, kbps), expected, "{what}");
        }
    }

    #[test]
    fn switching_set_selects_each_track_from_its_bitrate_threshold_on() {
        let found = rungs(&[set(0, 3, &[500, 1000, 1001, 2000])]);
        let expected = [(0, None), (500, Some(0)), (1000, Some(1)), (1001, Some(2)), (2000, Some(3))];
        assert_eq!(found, expected.map(|(at, track)| (at, vec![track])));
        assert_eq!(rungs(&[]), [(0, vec![])]);
    }

    proptest! {
        #[test]
        fn allocation_never_exceeds_throughput(
            sets in prop::collection::vec((0u8..3, 0u64..11, prop::collection::vec(0u64..10_000, 0..4)), 0..4),
            kbps in 0u64..20_000,
        ) {
            let sets: Vec<_> = sets.into_iter().map(|(rank, weight, mut thresholds)| {
                thresholds.sort_unstable();
                SwitchingSet { rank, weight, thresholds }
            }).collect();
            let allocation = allocate(&sets, kbps);
            let total: u64 = sets.iter().zip(&allocation).filter_map(|(set, track)| needed(set, *track)).sum();
            prop_assert!(total <= kbps);
            let rungs = rungs(&sets);
            prop_assert!(rungs.is_sorted_by(|one, other| one.0 < other.0));
            for (at, allocation) in &rungs {
                prop_assert_eq!(&allocate(&sets, *at), allocation);
            }
            let best: Allocation = sets.iter().map(|set| set.thresholds.len().checked_sub(1)).collect();
            if sets.iter().all(|set| set.weight > 0) {
                prop_assert_eq!(&rungs.last().unwrap().1, &best);
            }
        }

        #[test]
        fn arbitrary_switching_sets_never_panic(sets in prop::collection::vec((any::<u8>(), any::<u64>(), prop::collection::vec(any::<u64>(), 0..4)), 0..4), kbps: u64) {
            let sets: Vec<_> = sets.into_iter().map(|(rank, weight, mut thresholds)| {
                thresholds.sort_unstable();
                SwitchingSet { rank, weight, thresholds }
            }).collect();
            allocate(&sets, kbps);
            prop_assert!(rungs(&sets).is_sorted_by(|one, other| one.0 < other.0));
        }
    }
}
