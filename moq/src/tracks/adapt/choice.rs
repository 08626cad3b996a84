//! Which rendition each group is from.

use std::collections::VecDeque;

/// Switches that are remembered. Groups from before the oldest count as that one's.
const SPANS: usize = 32;

/// Groups by which a rendition may be behind the others and still be switched to, or stayed with.
const BEHIND: u64 = 1;

/// Stands for no rendition: where groups come from that are not sent.
pub const NOBODY: usize = usize::MAX;

/// Groups from one on that come from the same rendition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub first: u64,
    pub member: usize,
}

#[derive(Clone, Copy, Default)]
struct Member {
    /// The first group that all of can be had.
    whole_from: Option<u64>,
    newest: Option<u64>,
    lost: bool,
}

/// The renditions of one subscription, and which of them each group is from. A group is decided once: what has begun in any
/// rendition keeps its own. Renditions have numbers that stay theirs, and an order, the least demanding first.
pub struct Choice {
    members: Vec<Member>,
    order: Vec<usize>,
    spans: VecDeque<Span>,
    newest: Option<u64>,
}

impl Choice {
    /// Of renditions with the numbers from 0 on, in their order. All groups are from `base`, of which the group of now is not
    /// asked whether it is whole.
    pub fn new(members: usize, base: usize) -> Self {
        let order = (0..members).collect();
        let mut members = vec![Member::default(); members];
        if let Some(base) = members.get_mut(base) {
            base.whole_from = Some(0);
        }
        Self { members, order, spans: VecDeque::from([Span { first: 0, member: base }]), newest: None }
    }

    /// One more rendition, at this place of the order; returns its number.
    pub fn add(&mut self, place: usize) -> usize {
        let is_free = |number: &usize| {
            !self.order.contains(number) && self.spans.iter().all(|span| span.member != *number)
        };
        let number = (0..).find(is_free).unwrap_or_default();
        if number >= self.members.len() {
            self.members.resize(number + 1, Member::default());
        }
        self.members[number] = Member::default();
        self.order.insert(place.min(self.order.len()), number);
        number
    }

    /// The rendition's place is another one.
    pub fn reorder(&mut self, number: usize, place: usize) {
        self.order.retain(|other| *other != number);
        self.order.insert(place.min(self.order.len()), number);
    }

    /// There is no such rendition any more. Groups that come from it go on.
    pub fn remove(&mut self, number: usize) {
        self.lose(number);
        self.order.retain(|other| *other != number);
    }

    /// From which group on is not asked: a rendition that is there already when everything begins.
    pub fn start_with(&mut self, number: usize) {
        if let Some(member) = self.members.get_mut(number) {
            member.whole_from = Some(0);
            self.spans = VecDeque::from([Span { first: 0, member: number }]);
        }
    }

    /// A rendition is heard of from now on. `newest` is what of it is there already.
    pub fn join(&mut self, member: usize, newest: Option<u64>) {
        self.newest = self.newest.max(newest);
        let Some(member) = self.members.get_mut(member) else { return };
        member.newest = member.newest.max(newest);
        member.whole_from = member.whole_from.or(newest.map(|newest| newest.saturating_add(1)));
    }

    /// A group of a rendition has begun or goes on. Returns whether it is the one that the group is from.
    pub fn saw(&mut self, member: usize, group: u64) -> bool {
        self.newest = self.newest.max(Some(group));
        if let Some(known) = self.members.get_mut(member) {
            known.newest = known.newest.max(Some(group));
            // It may have begun before anybody listened.
            known.whole_from.get_or_insert(group.saturating_add(1));
        }
        self.of(group) == member
    }

    /// Nothing more comes of a rendition.
    pub fn lose(&mut self, member: usize) {
        if let Some(member) = self.members.get_mut(member) {
            member.lost = true;
        }
    }

    pub fn of(&self, group: u64) -> usize {
        let span = self.spans.iter().rev().find(|span| span.first <= group);
        span.or(self.spans.front()).map_or(0, |span| span.member)
    }

    /// Where the newest groups come from.
    pub fn current(&self) -> Span {
        self.spans.back().copied().unwrap_or(Span { first: 0, member: 0 })
    }

    /// The group that a switch would begin with: the first that has not begun anywhere.
    fn next(&self) -> Option<u64> {
        self.newest.map_or(Some(0), |newest| newest.checked_add(1))
    }

    /// Whether a switch to the rendition would find all of the group that it begins with.
    pub fn is_ready(&self, member: usize) -> bool {
        let (Some(next), Some(known)) = (self.next(), self.members.get(member)) else { return false };
        let whole = known.whole_from.is_some_and(|from| from <= next);
        whole && !known.lost && !self.is_behind(member)
    }

    /// Whether others are further by more than a moment.
    fn is_behind(&self, member: usize) -> bool {
        let newest = self.members.get(member).and_then(|member| member.newest);
        self.newest.is_some_and(|most| newest.is_none_or(|newest| newest.saturating_add(BEHIND) < most))
    }

    /// Whether the current rendition has ended, or does not go on while others do.
    pub fn is_stuck(&self) -> bool {
        let current = self.current().member;
        self.members.get(current).is_none_or(|member| member.lost) || self.is_behind(current)
    }

    /// The best rendition up to the place `wanted` that the subscription can have now; above that only where it would get nothing
    /// else.
    pub fn best(&self, wanted: usize) -> usize {
        let (current, stuck) = (self.current().member, self.is_stuck());
        let wanted = wanted.min(self.order.len().saturating_sub(1));
        let (up_to, above) = self.order.split_at((wanted + 1).min(self.order.len()));
        let above = above.iter().filter(|_| stuck);
        let can = |member: &&usize| if **member == current { !stuck } else { self.is_ready(**member) };
        up_to.iter().rev().chain(above).find(can).copied().unwrap_or(current)
    }

    /// Has all groups that have not begun come from `member`, or from [`NOBODY`]; returns the first of them. `None`: not now.
    pub fn switch(&mut self, member: usize) -> Option<u64> {
        let first = self.next()?;
        if self.current().member == member || member != NOBODY && !self.is_ready(member) {
            return None;
        }
        // Nothing has come of what was decided before this.
        while self.spans.len() > 1 && self.current().first >= first {
            self.spans.pop_back();
        }
        if self.current().member != member {
            self.spans.push_back(Span { first, member });
        }
        if self.spans.len() > SPANS {
            self.spans.pop_front();
        }
        Some(first)
    }
}
