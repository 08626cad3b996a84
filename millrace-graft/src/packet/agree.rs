//! How both ends of a session change to another list of functions, as values: no I/O, and time is an argument.
//!
//! ```text
//! one end                              the other
//!   takes both                           |
//!   Propose(list) ---------------------> takes both
//!   sends by the new one <-------- Ready(list)
//!   Switched(list) --------------------> sends by the new one
//!   agreed <----------------------- Done(list)
//! ```
//!
//! So it takes two round trips, and neither end ever sends what the other one does not take. A word that is lost is said again.
//! When nothing of the old list can be under way any more, it is taken no longer. Words of another attempt, such as old ones that
//! somebody sends again, do nothing.
//!
//! **Anew.** A change may leave behind what the session knew: numbers and functions' states begin anew. Then there is nothing to be
//! taken beside the new list. Each end begins anew where it would have sent by the new one, and sends nothing until it knows that the
//! other one has. What is under way then is lost; `losses` counts it.

use std::time::Duration;

/// A list, and the attempt to change to it, of 14 random bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Id {
    pub list: u16,
    pub attempt: u16,
    /// Without what the session knew.
    pub anew: bool,
}

/// What ends say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Word {
    Propose(Id),
    Ready(Id),
    Switched(Id),
    Done(Id),
    /// This end does not change to it, or has given it up.
    Refuse(Id),
    /// Since when this end is there.
    Hello(Since),
    /// Before it began anew, so many of the application's datagrams left this end, modulo 2^32.
    Sent(u32),
    /// Of those, so many have not come.
    Lost(u32),
}

/// When an end was started, in tenths of a second; of 31 bits, so that it wraps around after 6.8 years.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Since(u32);

impl Since {
    const BITS: u32 = 0x7fff_ffff;

    pub fn new(unix_time: Duration) -> Self {
        Self((unix_time.as_millis() / 100) as u32 & Self::BITS)
    }

    /// Old words that somebody sends again are not.
    pub fn is_later_than(self, other: Self) -> bool {
        let difference = self.0.wrapping_sub(other.0) & Self::BITS;
        difference != 0 && difference <= Self::BITS / 2
    }
}

/// What is to be done, in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// Take packets of this list, too, in place of another one that is not sent by.
    Accept(u16),
    /// Send by the list that was accepted last.
    Switch,
    /// Be ready to begin anew with this list.
    Expect(u16),
    /// Begin anew with this list, take nothing of before, and send nothing until it is agreed.
    Begin(u16),
    /// Take those of the one that is not sent by no longer.
    Retire,
    Say(Word),
    /// Both ends send by it.
    Agreed(u16),
    /// All stays as it was.
    Failed(u16, Why),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Why {
    /// The other end does not have the list.
    Refused,
    /// The other end does not answer.
    Silent,
    /// Another swap is under way.
    Busy,
    /// A function cannot go on with what the version before it knew.
    NoState,
}

/// Between the first two tries of a word, and between the later ones: each waits twice as long as the one before. A path that is longer
/// hears some words twice, which does nothing; one that loses a word costs little.
const AGAIN: Duration = Duration::from_millis(20);
const AGAIN_MOST: Duration = Duration::from_millis(250);
/// For the other end's answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long packets may be under way.
pub(super) const LINGER: Duration = Duration::from_secs(2);

/// When a word is said again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Again {
    next: Duration,
    pause: Duration,
}

impl Again {
    fn after(now: Duration) -> Self {
        Self { next: now + AGAIN, pause: AGAIN }
    }

    /// Once more, later.
    fn put_off(&mut self, now: Duration) {
        self.pause = (2 * self.pause).min(AGAIN_MOST);
        self.next = now + self.pause;
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Proposing {
        id: Id,
        again: Again,
        until: Duration,
    },
    Switching {
        id: Id,
        again: Again,
    },
    /// The other end has proposed it, and may send by it already.
    Following {
        id: Id,
        next: Duration,
    },
    /// Both ends send by it.
    Lingering {
        until: Duration,
    },
}

/// One end of a session.
#[derive(Debug)]
pub struct Agreement {
    state: State,
    /// By which this end sends.
    list: u16,
    /// How it came to that.
    latest: Option<Id>,
    /// Of two that propose at the same time, the one whose proposal counts.
    goes_first: bool,
}

impl Agreement {
    pub fn new(list: u16, goes_first: bool) -> Self {
        Self { state: State::Idle, list, latest: None, goes_first }
    }

    /// By which this end sends.
    pub fn list(&self) -> u16 {
        self.list
    }

    /// `now`: since any fixed moment. `attempt`: random.
    pub fn propose(&mut self, now: Duration, list: u16, attempt: u16, anew: bool) -> Vec<Act> {
        let id = Id { list, attempt: attempt & Id::ATTEMPT, anew };
        match self.state {
            State::Idle if list == self.list && !anew => vec![Act::Agreed(list)],
            State::Idle => {
                self.state = State::Proposing { id, again: Again::after(now), until: now + PATIENCE };
                vec![id.preparation(), Act::Say(Word::Propose(id))]
            }
            _ => vec![Act::Failed(list, Why::Busy)],
        }
    }

    /// `is_known`: whether this end has the list that it is about.
    pub fn hear(&mut self, now: Duration, word: Word, is_known: bool) -> Vec<Act> {
        // What is over by now is over, though nobody has looked yet.
        let mut acts = self.tick(now);
        acts.extend(self.answer(now, word, is_known));
        acts
    }

    fn answer(&mut self, now: Duration, word: Word, is_known: bool) -> Vec<Act> {
        match (word, self.state) {
            (Word::Propose(id), _) if !is_known => vec![Act::Say(Word::Refuse(id))],
            (Word::Propose(id), _) => self.hear_proposal(now, id),
            (Word::Ready(id), State::Proposing { id: own, .. }) if id == own => {
                self.changed(id);
                self.state = State::Switching { id, again: Again::after(now) };
                vec![id.change(), Act::Say(Word::Switched(id))]
            }
            // It waits for a word that was lost, or of an attempt that is over.
            (Word::Ready(id), _) if self.latest == Some(id) => vec![Act::Say(Word::Switched(id))],
            (Word::Ready(id), _) => vec![Act::Say(Word::Refuse(id))],
            (Word::Refuse(id), State::Proposing { id: own, .. }) if id == own => {
                self.give_up(id.list, Why::Refused)
            }
            (Word::Refuse(id), State::Following { id: own, .. }) if id == own => {
                self.state = State::Idle;
                vec![Act::Retire]
            }
            (Word::Switched(id), State::Following { id: own, .. }) if id == own => {
                self.changed(id);
                self.state = State::Lingering { until: now + LINGER };
                vec![id.change(), Act::Say(Word::Done(id)), Act::Agreed(id.list)]
            }
            // Our answer was lost.
            (Word::Switched(id), _) if self.latest == Some(id) => vec![Act::Say(Word::Done(id))],
            (Word::Done(id), State::Switching { id: own, .. }) if id == own => {
                self.state = State::Lingering { until: now + LINGER };
                vec![Act::Agreed(id.list)]
            }
            _ => Vec::new(),
        }
    }

    fn hear_proposal(&mut self, now: Duration, id: Id) -> Vec<Act> {
        match self.state {
            State::Following { id: own, .. } if id == own => vec![Act::Say(Word::Ready(id))],
            // What comes again of the latest change is no other one.
            State::Idle if id.list != self.list || (id.anew && self.latest != Some(id)) => {
                self.follow(now, id)
            }
            // Both have proposed at the same time: one gives way.
            State::Proposing { id: own, .. } if !self.goes_first => {
                let mut acts = match own.list == id.list {
                    true => Vec::new(),
                    false => self.give_up(own.list, Why::Busy),
                };
                acts.extend(self.follow(now, id));
                acts
            }
            // It is said again, and then there is time for it.
            _ => Vec::new(),
        }
    }

    fn follow(&mut self, now: Duration, id: Id) -> Vec<Act> {
        self.state = State::Following { id, next: now + 4 * AGAIN_MOST };
        vec![id.preparation(), Act::Say(Word::Ready(id))]
    }

    /// The list could not be accepted here, or expected: there is no way on.
    pub fn cannot(&mut self) -> Vec<Act> {
        match self.state {
            State::Proposing { id, .. } => self.give_up(id.list, Why::NoState),
            State::Following { id, .. } => {
                let mut acts = self.give_up(id.list, Why::NoState);
                acts.push(Act::Say(Word::Refuse(id)));
                acts
            }
            _ => Vec::new(),
        }
    }

    fn changed(&mut self, id: Id) {
        (self.list, self.latest) = (id.list, Some(id));
    }

    fn give_up(&mut self, list: u16, why: Why) -> Vec<Act> {
        self.state = State::Idle;
        vec![Act::Retire, Act::Failed(list, why)]
    }

    /// To be called when [`next`](Self::next) says.
    pub fn tick(&mut self, now: Duration) -> Vec<Act> {
        match &mut self.state {
            State::Proposing { id, until, .. } if now >= *until => {
                let list = id.list;
                self.give_up(list, Why::Silent)
            }
            State::Proposing { id, again, .. } if now >= again.next => {
                again.put_off(now);
                vec![Act::Say(Word::Propose(*id))]
            }
            // This end sends by it, and the other one takes it: there is no way back, and no harm.
            State::Switching { id, again } if now >= again.next => {
                again.put_off(now);
                vec![Act::Say(Word::Switched(*id))]
            }
            // The other end may send by it, so it is taken until that says otherwise.
            State::Following { id, next } if now >= *next => {
                *next = now + 4 * AGAIN_MOST;
                vec![Act::Say(Word::Ready(*id))]
            }
            State::Lingering { until } if now >= *until => {
                self.state = State::Idle;
                vec![Act::Retire]
            }
            _ => Vec::new(),
        }
    }

    /// `None`: nothing is under way.
    pub fn next(&self) -> Option<Duration> {
        match self.state {
            State::Idle => None,
            State::Proposing { again, until, .. } => Some(again.next.min(until)),
            State::Switching { again, .. } => Some(again.next),
            State::Following { next, .. } | State::Lingering { until: next } => Some(next),
        }
    }
}

impl Id {
    const ATTEMPT: u16 = 0x3fff;
    /// Beside the attempt.
    const ANEW: u32 = 1 << 30;

    fn preparation(self) -> Act {
        if self.anew { Act::Expect(self.list) } else { Act::Accept(self.list) }
    }

    fn change(self) -> Act {
        if self.anew { Act::Begin(self.list) } else { Act::Switch }
    }

    fn encode(self) -> u32 {
        let anew = if self.anew { Self::ANEW } else { 0 };
        anew | u32::from(self.attempt) << 16 | u32::from(self.list)
    }

    fn decode(number: u32) -> Self {
        Self {
            list: (number & 0xffff) as u16,
            attempt: (number >> 16) as u16 & Self::ATTEMPT,
            anew: number & Self::ANEW != 0,
        }
    }
}

impl Word {
    /// As the kernel's frames carry it: a kind of eight, and a number.
    pub fn encode(self) -> (u8, u32) {
        const REFUSE: u32 = 1 << 31;
        const HELLO: u32 = 1 << 31;
        match self {
            Self::Propose(id) => (0, id.encode()),
            Self::Ready(id) => (1, id.encode()),
            Self::Refuse(id) => (1, REFUSE | id.encode()),
            Self::Switched(id) => (2, id.encode()),
            Self::Done(id) => (3, id.encode()),
            Self::Hello(since) => (3, HELLO | since.0),
            Self::Sent(count) => (4, count),
            Self::Lost(count) => (5, count),
        }
    }

    pub fn decode(kind: u8, number: u32) -> Option<Self> {
        let id = Id::decode(number);
        match (kind, number >> 31) {
            (0, 0) => Some(Self::Propose(id)),
            (1, 0) => Some(Self::Ready(id)),
            (1, 1) => Some(Self::Refuse(id)),
            (2, 0) => Some(Self::Switched(id)),
            (3, 0) => Some(Self::Done(id)),
            (3, 1) => Some(Self::Hello(Since(number & Since::BITS))),
            (4, _) => Some(Self::Sent(number)),
            (5, _) => Some(Self::Lost(number)),
            _ => None,
        }
    }

    pub fn list(self) -> Option<u16> {
        match self {
            Self::Propose(id) | Self::Ready(id) | Self::Refuse(id) | Self::Switched(id) | Self::Done(id) => {
                Some(id.list)
            }
            Self::Hello(_) | Self::Sent(_) | Self::Lost(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// What an end takes and sends, as its acts say.
    #[derive(Debug)]
    struct End {
        agreement: Agreement,
        takes: Vec<u16>,
        sends: u16,
        agreed: Vec<u16>,
        agreed_at: Duration,
        failed: Vec<(u16, Why)>,
        begun: u32,
        expects: Option<u16>,
    }

    impl End {
        fn new(goes_first: bool) -> Self {
            let agreement = Agreement::new(1, goes_first);
            Self {
                agreement,
                takes: vec![1],
                sends: 1,
                agreed: Vec::new(),
                agreed_at: Duration::ZERO,
                failed: Vec::new(),
                begun: 0,
                expects: None,
            }
        }

        fn act(&mut self, acts: Vec<Act>) -> Vec<Word> {
            let mut said = Vec::new();
            for act in acts {
                match act {
                    Act::Accept(list) => {
                        self.takes.retain(|taken| *taken == self.sends);
                        self.takes.push(list);
                    }
                    Act::Switch => self.sends = *self.takes.last().expect("one that was accepted"),
                    Act::Expect(list) => self.expects = Some(list),
                    Act::Begin(list) => {
                        assert_eq!(self.expects, Some(list));
                        (self.sends, self.takes) = (list, vec![list]);
                        self.begun += 1;
                    }
                    Act::Retire => {
                        self.takes.retain(|list| *list == self.sends);
                        self.expects = None;
                    }
                    Act::Say(word) => said.push(word),
                    Act::Agreed(list) => self.agreed.push(list),
                    Act::Failed(list, why) => self.failed.push((list, why)),
                }
            }
            said
        }
    }

    fn run(
        ends: [End; 2],
        proposals: [Option<u16>; 2],
        knows: bool,
        loses: impl Fn(u64) -> bool,
    ) -> [End; 2] {
        run_each(ends, proposals.map(|list| Some((list?, false))), knows, loses)
    }

    /// Two ends and a path of 10 ms that loses what `loses` says, for a minute. Proposals: a list, and whether anew.
    fn run_each(
        mut ends: [End; 2],
        proposals: [Option<(u16, bool)>; 2],
        knows: bool,
        loses: impl Fn(u64) -> bool,
    ) -> [End; 2] {
        let is_anew = proposals.iter().flatten().any(|(_, anew)| *anew);
        let mut flying: Vec<(Duration, usize, Word)> = Vec::new();
        let mut said = 0;
        for at in 0..60_000 {
            let now = at * MS;
            for from in 0..2 {
                let mut words = Vec::new();
                if let (0, Some((list, anew))) = (at, proposals[from]) {
                    let acts = ends[from].agreement.propose(now, list, 7 + from as u16, anew);
                    words.extend(ends[from].act(acts));
                }
                let (arrived, rest) =
                    flying.into_iter().partition(|(when, to, _)| *when <= now && *to == from);
                flying = rest;
                for (_, _, word) in arrived {
                    let acts = ends[from].agreement.hear(now, word, knows);
                    words.extend(ends[from].act(acts));
                }
                let acts = ends[from].agreement.tick(now);
                words.extend(ends[from].act(acts));
                if ends[from].agreed_at.is_zero() && !ends[from].agreed.is_empty() {
                    ends[from].agreed_at = now;
                }
                for word in words {
                    assert_eq!(Word::decode(word.encode().0, word.encode().1), Some(word));
                    said += 1;
                    if !loses(said) {
                        flying.push((now + 10 * MS, 1 - from, word));
                    }
                }
            }
            // What one sends, the other takes, at any moment.
            let takes = |one: usize| ends[one].takes.contains(&ends[1 - one].sends);
            assert!(is_anew || takes(0) && takes(1), "{now:?} {ends:?}");
        }
        ends
    }

    #[test]
    fn both_ends_change() {
        let at_random = |count: u64| count.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 7 < 4;
        for loses in [|_| false, |count| count % 3 == 0, at_random, |count| count < 9] {
            let ends = run([End::new(true), End::new(false)], [Some(2), None], true, loses);
            for end in ends {
                assert_eq!((end.sends, &end.takes[..], &end.agreed[..]), (2, &[2][..], &[2][..]));
                assert_eq!(end.agreement.next(), None);
            }
        }
    }

    /// Once, however often they hear of it, and to the list that they have, too.
    #[test]
    fn both_ends_begin_anew() {
        for list in [1, 2] {
            for loses in [|_| false, |count| count % 3 == 0, |count| count < 9] {
                let ends =
                    run_each([End::new(true), End::new(false)], [Some((list, true)), None], true, loses);
                for end in ends {
                    assert_eq!(
                        (end.sends, &end.takes[..], &end.agreed[..]),
                        (list, &[list][..], &[list][..])
                    );
                    assert_eq!((end.begun, end.agreement.next()), (1, None));
                }
            }
        }
    }

    #[test]
    fn who_cannot_go_on_refuses() {
        let mut end = End::new(true);
        let proposed = Id { list: 2, attempt: 3, anew: false };
        let acts = end.agreement.hear(MS, Word::Propose(proposed), true);
        assert_eq!(acts, [Act::Accept(2), Act::Say(Word::Ready(proposed))]);
        let acts = end.agreement.cannot();
        let refuses = Act::Say(Word::Refuse(proposed));
        assert_eq!(acts, [Act::Retire, Act::Failed(2, Why::NoState), refuses]);
        assert_eq!((end.agreement.list(), end.agreement.next()), (1, None));
    }

    #[test]
    fn a_lost_word_costs_little() {
        for lost in 0..4 {
            let ends = run([End::new(true), End::new(false)], [Some(2), None], true, |count| count <= lost);
            let two_round_trips = 40 * MS;
            assert_eq!(ends[0].agreed_at, two_round_trips + AGAIN * ((1 << lost) - 1), "{lost} lost");
        }
    }

    #[test]
    fn of_two_proposals_one_counts() {
        for proposals in [[Some(2), Some(3)], [Some(2), Some(2)]] {
            let ends = run([End::new(true), End::new(false)], proposals, true, |_| false);
            assert!(ends.iter().all(|end| end.sends == 2 && end.takes == [2]), "{ends:?}");
        }
    }

    #[test]
    fn what_the_other_end_does_not_have_changes_nothing() {
        let ends = run([End::new(true), End::new(false)], [Some(2), None], false, |_| false);
        assert_eq!(ends[0].failed, [(2, Why::Refused)]);
        assert!(ends.iter().all(|end| end.sends == 1 && end.takes == [1]));
    }

    #[test]
    fn starts_are_ordered_across_the_end_of_the_count() {
        let at = |tenths: u64| Since::new(Duration::from_millis(tenths * 100));
        let end = u64::from(Since::BITS);
        for (early, late) in [(0, 1), (5, 1 << 30), (end, end + 1), (end - 7, end + 7)] {
            assert!(
                at(late).is_later_than(at(early)) && !at(early).is_later_than(at(late)),
                "{early} {late}"
            );
        }
        assert!(!at(3).is_later_than(at(3)));
        let hello = Word::Hello(at(1 << 20));
        assert_eq!(Word::decode(hello.encode().0, hello.encode().1), Some(hello));
    }

    #[test]
    fn silence_changes_nothing() {
        let ends = run([End::new(true), End::new(false)], [Some(2), None], true, |_| true);
        assert_eq!(ends[0].failed, [(2, Why::Silent)]);
        assert!(ends.iter().all(|end| end.sends == 1 && end.takes == [1]));
    }

    #[test]
    fn whatever_is_heard_does_no_harm() {
        let mut end = End::new(true);
        for at in 0..100_000u32 {
            let random = at.wrapping_mul(0x9e37_79b9);
            let word = Word::decode((random >> 30) as u8, random >> 8 & 0xc001_0003);
            if at % 97 == 0 {
                let acts = end.agreement.propose(at / 10 * MS, (random & 3) as u16, 1, random & 4 == 0);
                end.act(acts);
            }
            let now = at / 10 * MS;
            let acts = word.map(|word| end.agreement.hear(now, word, random & 1 == 0)).unwrap_or_default();
            end.act(acts);
            let acts = end.agreement.tick(now);
            end.act(acts);
            assert!(end.takes.len() <= 2 && end.takes.contains(&end.sends), "{end:?}");
        }
    }
}
