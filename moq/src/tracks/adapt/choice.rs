//! Decides which rendition each group is taken from.

use std::collections::VecDeque;

/// Number of latest switches between renditions that are remembered. Older groups count as taken from the rendition of
/// the oldest remembered switch.
const SPANS: usize = 32;

/// If the newest group of a rendition is more than this number of groups behind that of other renditions, the rendition
/// is not used.
const BEHIND: u64 = 1;

/// The rendition number that means no rendition. Groups assigned to it are not sent.
pub const NOBODY: usize = usize::MAX;

/// Consecutive groups that are taken from one rendition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupSpan {
    /// The ID of the first of the consecutive groups.
    pub first: u64,
    /// The number of the rendition that the consecutive groups are taken from.
    pub member: usize,
}

#[derive(Clone, Copy, Default)]
struct RenditionMember {
    /// The first group that arrives from its beginning in this rendition, because the subscription to the rendition
    /// began before the group did.
    whole_from: Option<u64>,
    newest: Option<u64>,
    lost: bool,
}

/// The renditions of one subscription, and the rendition that each group is taken from.
///
/// Each group is decided once: after the group has begun in any rendition, its assignment does not change. Renditions
/// have fixed numbers, and a separate order by bit rate, the lowest first. Calls come in this order: [`add`](Self::add)
/// and [`join`](Self::join) for each rendition, [`saw`](Self::saw) for each arriving object, [`switch`](Self::switch)
/// at any time in between.
pub struct RenditionChoice {
    members: Vec<RenditionMember>,
    order: Vec<usize>,
    spans: VecDeque<GroupSpan>,
    newest: Option<u64>,
}

impl RenditionChoice {
    /// Makes the state for `members` renditions, numbered from 0 on in the order of bit rates. At first, all groups are
    /// taken from rendition `base`. The current group of `base` is taken even if its beginning is missing.
    pub fn new(members: usize, base: usize) -> Self {
        let order = (0..members).collect();
        let mut members = vec![RenditionMember::default(); members];
        if let Some(base) = members.get_mut(base) {
            base.whole_from = Some(0);
        }
        Self { members, order, spans: VecDeque::from([GroupSpan { first: 0, member: base }]), newest: None }
    }

    /// Adds a rendition at the index `place` of the order by bit rate. Returns the rendition's number.
    pub fn add(&mut self, place: usize) -> usize {
        // The number of a removed rendition can be reused once none of the groups in `spans` are taken from that
        // rendition.
        let is_free = |number: &usize| {
            !self.order.contains(number) && self.spans.iter().all(|span| span.member != *number)
        };
        let number = (0..).find(is_free).unwrap_or_default();
        if number >= self.members.len() {
            self.members.resize(number + 1, RenditionMember::default());
        }
        self.members[number] = RenditionMember::default();
        self.order.insert(place.min(self.order.len()), number);
        number
    }

    /// Moves a rendition to another index of the order by bit rate.
    pub fn reorder(&mut self, number: usize, place: usize) {
        self.order.retain(|other| *other != number);
        self.order.insert(place.min(self.order.len()), number);
    }

    /// Removes a rendition. Groups that were assigned to it are still taken from it.
    pub fn remove(&mut self, number: usize) {
        self.lose(number);
        self.order.retain(|other| *other != number);
    }

    /// Takes all groups from rendition `number`. The rendition's current group counts as complete, because the cache
    /// has the group when the subscription begins.
    pub fn start_with(&mut self, number: usize) {
        if let Some(member) = self.members.get_mut(number) {
            member.whole_from = Some(0);
            self.spans = VecDeque::from([GroupSpan { first: 0, member: number }]);
        }
    }

    /// Records that the subscription to a rendition has begun. `newest` is the rendition's newest group at this time.
    pub fn join(&mut self, member: usize, newest: Option<u64>) {
        self.newest = self.newest.max(newest);
        let Some(member) = self.members.get_mut(member) else { return };
        member.newest = member.newest.max(newest);
        member.whole_from = member.whole_from.or(newest.map(|newest| newest.saturating_add(1)));
    }

    /// Records that an object of a group has arrived in a rendition. Returns whether the group is taken from this
    /// rendition.
    pub fn saw(&mut self, member: usize, group: u64) -> bool {
        self.newest = self.newest.max(Some(group));
        if let Some(known) = self.members.get_mut(member) {
            known.newest = known.newest.max(Some(group));
            // The group may have begun before the subscription did, so the rendition counts as complete from the next
            // group on.
            known.whole_from.get_or_insert(group.saturating_add(1));
        }
        self.member_of_group(group) == member
    }

    /// Records that a rendition has ended.
    pub fn lose(&mut self, member: usize) {
        if let Some(member) = self.members.get_mut(member) {
            member.lost = true;
        }
    }

    /// Returns the number of the rendition that `group` is taken from.
    pub fn member_of_group(&self, group: u64) -> usize {
        let span = self.spans.iter().rev().find(|span| span.first <= group);
        span.or(self.spans.front()).map_or(0, |span| span.member)
    }

    /// Returns the newest groups that are taken from one rendition, and the number of that rendition.
    pub fn current(&self) -> GroupSpan {
        self.spans.back().copied().unwrap_or(GroupSpan { first: 0, member: 0 })
    }

    /// Returns the group from which a switch would take effect: the first one that has not begun in any rendition.
    fn next(&self) -> Option<u64> {
        self.newest.map_or(Some(0), |newest| newest.checked_add(1))
    }

    /// Reports whether a switch to the rendition is possible. The rendition's next group must arrive from its
    /// beginning, and the rendition must neither have ended nor lag more than `BEHIND` groups behind.
    pub fn is_ready(&self, member: usize) -> bool {
        let (Some(next), Some(known)) = (self.next(), self.members.get(member)) else { return false };
        let whole = known.whole_from.is_some_and(|from| from <= next);
        whole && !known.lost && !self.is_behind(member)
    }

    /// Reports whether another rendition's newest group is more than [`BEHIND`] groups ahead of this rendition's newest
    /// group.
    fn is_behind(&self, member: usize) -> bool {
        let newest = self.members.get(member).and_then(|member| member.newest);
        self.newest.is_some_and(|most| newest.is_none_or(|newest| newest.saturating_add(BEHIND) < most))
    }

    /// Reports whether the current rendition has ended, or is more than `BEHIND` groups behind another rendition.
    pub fn is_stuck(&self) -> bool {
        let current = self.current().member;
        self.members.get(current).is_none_or(|member| member.lost) || self.is_behind(current)
    }

    /// Returns the best available rendition with an index of at most `wanted` in the order by bit rate. A rendition
    /// with a higher bit rate is returned only if no lower one is available and the current rendition has ended or lags
    /// behind.
    pub fn best(&self, wanted: usize) -> usize {
        let current = self.current().member;
        let stuck = self.is_stuck();
        let wanted = wanted.min(self.order.len().saturating_sub(1));
        let (up_to, above) = self.order.split_at((wanted + 1).min(self.order.len()));
        let above = above.iter().filter(|_| stuck);
        let can = |member: &&usize| if **member == current { !stuck } else { self.is_ready(**member) };
        up_to.iter().rev().chain(above).find(can).copied().unwrap_or(current)
    }

    /// Assigns all groups that have not begun to the rendition with the number `member`, or to [`NOBODY`]. Returns the
    /// first of these groups, or `None` if a switch is not possible now.
    pub fn switch(&mut self, member: usize) -> Option<u64> {
        let first = self.next()?;
        if self.current().member == member || member != NOBODY && !self.is_ready(member) {
            return None;
        }
        // Entries of `spans` from group `first` on contain only groups that have not begun, so this switch replaces
        // them.
        while self.spans.len() > 1 && self.current().first >= first {
            self.spans.pop_back();
        }
        if self.current().member != member {
            self.spans.push_back(GroupSpan { first, member });
        }
        if self.spans.len() > SPANS {
            self.spans.pop_front();
        }
        Some(first)
    }
}
