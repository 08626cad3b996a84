//! How both ends of a session change to another list of functions, as values: no I/O, and time is an argument.
//!
//! ```text
//! one end                              the other
//!   takes both                           |
//!   Propose(list) ---------------------> takes both
//!   sends by the new one <-------- Challenge, Ready(list)
//!   Answer ----------------------------> sends by the new one
//!   agreed <----------------------- Done(list)
//! ```
//!
//! So it takes two round trips, and neither end ever sends what the other one does not take. A word that is lost is said again.
//! When nothing of the old list can be under way any more, it is taken no longer. Words of another attempt, such as old ones that
//! somebody sends again, do nothing: attempts are counted, and the other end changes only for the answer to a challenge that it has never
//! put before, which is given by who has switched to that very list. (Sealed words cannot be sent again at all; these may be in clear.)
//!
//! **Anew.** A change may leave behind what the session knew: numbers and functions' states begin anew. Then there is nothing to be
//! taken beside the new list. Each end begins anew where it would have sent by the new one, and sends nothing until it knows that the
//! other one has. What is under way then is lost; `losses` counts it.

use std::time::Duration;

use super::paths::COUNT;

/// A list, and the attempt to change to it, counted in 14 bits.
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
    /// By who has not heard the challenge.
    Switched(Id),
    /// To who has proposed, from who is ready: 31 bits, and never the same twice.
    Challenge(u32),
    /// To that, from who has switched to the list that it was about.
    Answer(u32),
    Done(Id),
    /// This end does not change to it, or has given it up.
    Refuse(Id),
    /// Since when this end is there.
    Hello(Since),
    /// Before it began anew, so many of the application's datagrams left this end, modulo 2^32.
    Sent(u32),
    /// Of those, so many have not come.
    Lost(u32),
    /// By a path of the session so many packets have come, modulo 2^30.
    Came {
        path: u8,
        count: u32,
    },
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
        challenge: u32,
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
    /// Of the latest proposal, and of the other end's latest one.
    attempt: u16,
    challenge: u32,
    /// By the other end, of what this one has proposed.
    heard: Option<u32>,
    /// This end has proposed the list, and follows the other one, which has proposed it, too.
    gave_way: bool,
}

impl Agreement {
    /// `random`: where counts begin, so that they are others than before this end was started.
    pub fn new(list: u16, goes_first: bool, random: [u8; 6]) -> Self {
        let [a, b, c, d, e, f] = random;
        Self {
            state: State::Idle,
            list,
            latest: None,
            goes_first,
            attempt: u16::from_ne_bytes([a, b]),
            challenge: u32::from_ne_bytes([c, d, e, f]),
            heard: None,
            gave_way: false,
        }
    }

    /// With this list, and nothing under way.
    pub fn begin(&mut self, list: u16) {
        (self.state, self.list, self.latest, self.heard) = (State::Idle, list, None, None);
    }

    /// By which this end sends.
    pub fn list(&self) -> u16 {
        self.list
    }

    /// `now`: since any fixed moment.
    pub fn propose(&mut self, now: Duration, list: u16, anew: bool) -> Vec<Act> {
        match self.state {
            State::Idle if list == self.list && !anew => vec![Act::Agreed(list)],
            State::Idle => {
                self.attempt = self.attempt.wrapping_add(1);
                let id = Id { list, attempt: self.attempt & Id::ATTEMPT, anew };
                self.heard = None;
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
                let mut acts = vec![id.change()];
                acts.extend(self.say_switched(id));
                acts
            }
            // It waits for a word that was lost, or of an attempt that is over.
            (Word::Ready(id), _) if self.latest == Some(id) => self.say_switched(id),
            (Word::Ready(id), _) => vec![Act::Say(Word::Refuse(id))],
            (Word::Refuse(id), State::Proposing { id: own, .. }) if id == own => {
                self.give_up(id.list, Why::Refused)
            }
            (Word::Refuse(id), State::Following { id: own, .. }) if id == own => {
                self.state = State::Idle;
                let failed = self.gave_way.then_some(Act::Failed(id.list, Why::Busy));
                [Act::Retire].into_iter().chain(failed).collect()
            }
            // They come in any order.
            (Word::Challenge(heard), State::Proposing { .. }) => {
                self.heard = Some(heard);
                Vec::new()
            }
            (Word::Challenge(heard), State::Switching { id, .. }) => {
                self.heard = Some(heard);
                vec![Act::Say(Word::Answer(id.answer(heard)))]
            }
            // The answer was lost, or it is an old word.
            (Word::Switched(id), State::Following { id: own, challenge, .. }) if id == own => {
                vec![Act::Say(Word::Challenge(challenge))]
            }
            (Word::Answer(answer), State::Following { id, challenge, .. })
                if answer == id.answer(challenge) =>
            {
                self.changed(id);
                self.state = State::Lingering { until: now + LINGER };
                vec![id.change(), Act::Say(Word::Done(id)), Act::Agreed(id.list)]
            }
            // Our answer was lost.
            (Word::Switched(id), _) if self.latest == Some(id) => vec![Act::Say(Word::Done(id))],
            (Word::Answer(answer), _) => {
                let latest = self.latest.filter(|id| answer == id.answer(self.challenge & Id::CHALLENGE));
                latest.map(|id| Act::Say(Word::Done(id))).into_iter().collect()
            }
            (Word::Done(id), State::Switching { id: own, .. }) if id == own => {
                self.state = State::Lingering { until: now + LINGER };
                vec![Act::Agreed(id.list)]
            }
            _ => Vec::new(),
        }
    }

    fn hear_proposal(&mut self, now: Duration, id: Id) -> Vec<Act> {
        match self.state {
            State::Following { id: own, challenge, .. } if id == own => say_ready(id, challenge),
            // What comes again of the latest change is no other one.
            State::Idle if id.list != self.list || (id.anew && self.latest != Some(id)) => {
                self.follow(now, id)
            }
            // Both have proposed at the same time: one gives way.
            State::Proposing { id: own, .. } if !self.goes_first => {
                let is_same = own.list == id.list;
                let mut acts = if is_same { Vec::new() } else { self.give_up(own.list, Why::Busy) };
                acts.extend(self.follow(now, id));
                self.gave_way = is_same;
                acts
            }
            // It is said again, and then there is time for it.
            _ => Vec::new(),
        }
    }

    fn follow(&mut self, now: Duration, id: Id) -> Vec<Act> {
        self.gave_way = false;
        self.challenge = self.challenge.wrapping_add(1);
        let challenge = self.challenge & Id::CHALLENGE;
        self.state = State::Following { id, challenge, next: now + 4 * AGAIN_MOST };
        let mut acts = vec![id.preparation()];
        acts.extend(say_ready(id, challenge));
        acts
    }

    /// By the answer, if the challenge was heard; else it comes again.
    fn say_switched(&self, id: Id) -> Vec<Act> {
        let is_own = matches!(self.state, State::Switching { id: own, .. } if own == id);
        let heard = self.heard.filter(|_| is_own);
        vec![Act::Say(heard.map_or(Word::Switched(id), |heard| Word::Answer(id.answer(heard))))]
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
                let id = *id;
                self.say_switched(id)
            }
            // The other end may send by it, so it is taken until that says otherwise.
            State::Following { id, challenge, next } if now >= *next => {
                *next = now + 4 * AGAIN_MOST;
                say_ready(*id, *challenge)
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

fn say_ready(id: Id, challenge: u32) -> Vec<Act> {
    vec![Act::Say(Word::Challenge(challenge)), Act::Say(Word::Ready(id))]
}

impl Id {
    const CHALLENGE: u32 = 0x7fff_ffff;
    const ATTEMPT: u16 = 0x3fff;
    /// Beside the attempt.
    const ANEW: u32 = 1 << 30;

    fn preparation(self) -> Act {
        if self.anew { Act::Expect(self.list) } else { Act::Accept(self.list) }
    }

    fn change(self) -> Act {
        if self.anew { Act::Begin(self.list) } else { Act::Switch }
    }

    /// Of who has switched to this one, and no other.
    fn answer(self, challenge: u32) -> u32 {
        (challenge ^ self.encode()) & Self::CHALLENGE
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
        const ANSWER: u32 = 1 << 31;
        match self {
            Self::Propose(id) => (0, id.encode()),
            Self::Ready(id) => (1, id.encode()),
            Self::Refuse(id) => (1, REFUSE | id.encode()),
            Self::Switched(id) => (2, id.encode()),
            Self::Done(id) => (3, id.encode()),
            Self::Hello(since) => (3, HELLO | since.0),
            Self::Sent(count) => (4, count),
            Self::Lost(count) => (5, count),
            Self::Came { path, count } => (6, u32::from(path & 3) << 30 | count & COUNT),
            Self::Challenge(challenge) => (7, challenge & Id::CHALLENGE),
            Self::Answer(answer) => (7, ANSWER | answer & Id::CHALLENGE),
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
            (6, _) => Some(Self::Came { path: (number >> 30) as u8, count: number & COUNT }),
            (7, 0) => Some(Self::Challenge(number)),
            (7, 1) => Some(Self::Answer(number & Id::CHALLENGE)),
            _ => None,
        }
    }

    pub fn list(self) -> Option<u16> {
        match self {
            Self::Propose(id) | Self::Ready(id) | Self::Refuse(id) | Self::Switched(id) | Self::Done(id) => {
                Some(id.list)
            }
            Self::Hello(_)
            | Self::Sent(_)
            | Self::Lost(_)
            | Self::Came { .. }
            | Self::Challenge(_)
            | Self::Answer(_) => None,
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
            let agreement = Agreement::new(1, goes_first, [u8::from(goes_first); 6]);
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
                    let acts = ends[from].agreement.propose(now, list, anew);
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
        assert!(matches!(acts[..], [Act::Accept(2), Act::Say(Word::Challenge(_)), _]), "{acts:?}");
        assert_eq!(acts[2], Act::Say(Word::Ready(proposed)));
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

    /// Whoever has recorded all words of both ends sends them again, to either, in any order, also while both change once more.
    #[test]
    fn old_words_change_nothing() {
        let mut ends = [End::new(true), End::new(false)];
        let (mut recorded, mut now, mut random) = (Vec::new(), Duration::ZERO, 1_u32);
        let mut flying: Vec<(usize, Word)> = Vec::new();
        let (mut current, mut changed) = (1, 0);
        for round in 0..400_u32 {
            // To and fro, by either end, with and without what the session knew.
            let (from, list, anew) = ((round / 2 % 2) as usize, 3 - current, round % 5 == 0);
            let (begun, failed) = (ends[0].begun, ends[from].failed.len());
            let acts = ends[from].agreement.propose(now, list, anew);
            flying.extend(ends[from].act(acts).into_iter().map(|word| (1 - from, word)));
            for step in 0..5500_u32 {
                now += MS;
                for (to, word) in std::mem::take(&mut flying) {
                    recorded.push((to, word));
                    let acts = ends[to].agreement.hear(now, word, true);
                    flying.extend(ends[to].act(acts).into_iter().map(|word| (1 - to, word)));
                }
                for (to, end) in ends.iter_mut().enumerate() {
                    let acts = end.agreement.tick(now);
                    flying.extend(end.act(acts).into_iter().map(|word| (1 - to, word)));
                }
                random = random.wrapping_mul(0x9e37_79b9).wrapping_add(step);
                if !recorded.is_empty() && random >> 20 & 3 == 0 && step < 2500 {
                    let (to, word) = recorded[(random >> 8) as usize % recorded.len()];
                    let acts = ends[to].agreement.hear(now, word, true);
                    flying.extend(ends[to].act(acts).into_iter().map(|word| (1 - to, word)));
                }
                let takes = |one: usize| ends[one].takes.contains(&ends[1 - one].sends);
                assert!(ends[0].begun != ends[1].begun || takes(0) && takes(1), "{round} {ends:?}");
            }
            // An old proposal may come in the way of a new one: that is said, and all stays as it was.
            let is_changed = ends[from].failed.len() == failed;
            changed += u32::from(is_changed);
            current = if is_changed { list } else { current };
            let begun = begun + u32::from(anew && is_changed);
            for end in &ends {
                assert_eq!(
                    (end.sends, &end.takes[..], end.begun),
                    (current, &[current][..], begun),
                    "{round}"
                );
            }
        }
        assert!(changed > 100, "{changed}");
    }

    /// One end hears old words, and the other one none of what comes of it.
    #[test]
    fn who_hears_old_words_alone_does_not_change() {
        let recorded = [Id { list: 2, attempt: 5, anew: false }, Id { list: 2, attempt: 6, anew: true }];
        for id in recorded {
            let mut end = End::new(false);
            let mut said = Vec::new();
            for old in [5, 77] {
                for word in
                    [Word::Propose(id), Word::Switched(id), Word::Answer(id.answer(old)), Word::Done(id)]
                {
                    let acts = end.agreement.hear(MS, word, true);
                    said.extend(end.act(acts));
                }
            }
            assert_eq!((end.sends, end.begun, end.agreement.list()), (1, 0, 1), "{said:?}");
            let challenge = said.iter().find_map(|word| match word {
                Word::Challenge(challenge) => Some(*challenge),
                _ => None,
            });
            let answer = Word::Answer(id.answer(challenge.expect("a challenge")));
            let acts = end.agreement.hear(MS, answer, true);
            end.act(acts);
            assert_eq!(end.sends, 2, "and to a new one it does");
        }
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
                let acts = end.agreement.propose(at / 10 * MS, (random & 3) as u16, random & 4 == 0);
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
