//! The protocol by which both ends of a session change to another list of functions. The code does no I/O, and gets the
//! time as an argument.
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
//! A change takes two round trips, and neither end ever sends packets that the other does not accept. Lost messages are
//! repeated. When no packet of the old list can be in flight any more, packets of the old list are no longer accepted.
//! Messages of another attempt, such as replayed ones, have no effect: attempts are counted, and the other end changes
//! only after the right answer to a challenge that it has never sent before. Only an end that has switched to the new
//! list can compute that answer. (Sealed messages could not be replayed at all, but these messages may be unencrypted.)
//!
//! **Stateless.** A change may drop the session's state: packet numbers and the state of functions restart, and only
//! the new list is accepted. Each end restarts at the point where it would otherwise have switched, and sends nothing
//! until it knows that the other end has restarted, too. Packets in flight at that time are lost; `losses` counts them.

use std::time::Duration;

use super::paths::COUNT;

/// ID of a change: the number of the new function list, and the number of the attempt in 14 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ListId {
    /// The number of the new function list.
    pub list: u16,
    /// The number of the attempt to change.
    pub attempt: u16,
    /// True if the change restarts the session without its state.
    pub anew: bool,
}

/// A message between the two ends of a session about a change of the function list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListMessage {
    /// The sender proposes a change to a function list.
    Propose(ListId),
    /// The sender accepts packets of the new function list.
    Ready(ListId),
    /// The sender already sends with the new function list, and has not received the challenge.
    Switched(ListId),
    /// The end that accepts the new function list challenges the end that has proposed it, with 31 bits that are never
    /// the same twice.
    Challenge(u32),
    /// The answer to the challenge, from the end that has switched to the new function list.
    Answer(u32),
    /// The sender knows that both ends send with the new function list.
    Done(ListId),
    /// The sender refuses to change to the function list, or has abandoned the change.
    Refuse(ListId),
    /// Time at which the sender's daemon was started.
    Hello(Since),
    /// Number of the application's datagrams that the sender had sent before it restarted, modulo 2^32.
    Sent(u32),
    /// Number of datagrams that the receiver of this message had sent before it restarted, and that have not arrived at
    /// the sender of this message.
    Lost(u32),
    /// Number of packets that the sender has received on one path of the session, modulo 2^30.
    Came {
        /// Index of the path within the session.
        path: u8,
        /// Number of packets that have arrived on the path.
        count: u32,
    },
}

/// The time at which the daemon of one end was started, in tenths of a second. It has 31 bits, so it wraps around after
/// 6.8 years.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Since(u32);

impl Since {
    const BITS: u32 = 0x7fff_ffff;

    /// Converts the Unix time at which the daemon of one end was started to tenths of a second.
    pub fn new(unix_time: Duration) -> Self {
        Self((unix_time.as_millis() / 100) as u32 & Self::BITS)
    }

    /// Reports whether this start time is later than the other. Replayed messages have earlier start times.
    pub fn is_later_than(self, other: Self) -> bool {
        let difference = self.0.wrapping_sub(other.0) & Self::BITS;
        difference != 0 && difference <= Self::BITS / 2
    }
}

/// The actions that follow from a message or from a time-out. The caller carries them out in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListAction {
    /// Accept packets of this function list as well. It replaces any other list that this end accepts but does not send
    /// with.
    Accept(u16),
    /// Send packets with the function list that was accepted last.
    Switch,
    /// Prepare to restart the session with this function list.
    Expect(u16),
    /// Restart the session with this function list. Accept no earlier packets, and send nothing until both ends agree
    /// on the list.
    Begin(u16),
    /// Stop accepting packets of the function list that this end accepts but does not send with.
    Retire,
    /// Send this message to the other end.
    Say(ListMessage),
    /// Both ends send packets with this function list.
    Agreed(u16),
    /// The change of the function list has failed, and the session continues with its previous list.
    Failed(u16, ListRefusal),
}

/// The reason why a change of the function list failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ListRefusal {
    /// The other end does not have the function list.
    Refused,
    /// The other end does not answer.
    Silent,
    /// Another change of the session's function list is in progress.
    Busy,
    /// A function cannot continue with the state that its previous version left.
    NoState,
}

/// Pause before a message is repeated for the first time, and the longest pause (`AGAIN_MOST`). The pause doubles with
/// each repetition. If the round trip is longer than the pause, the needless repetitions are harmless. A short pause
/// means that a lost message costs little time.
const AGAIN: Duration = Duration::from_millis(20);
const AGAIN_MOST: Duration = Duration::from_millis(250);
/// Time limit for the other end's answer to a proposal.
const PATIENCE: Duration = Duration::from_secs(5);
/// Longest time that a packet may be in flight.
pub(super) const LINGER: Duration = Duration::from_secs(2);

/// The times at which an unanswered message is repeated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Again {
    next: Duration,
    pause: Duration,
}

impl Again {
    fn after(now: Duration) -> Self {
        Self { next: now + AGAIN, pause: AGAIN }
    }

    /// Schedules the next repetition of the message, after a longer pause.
    fn put_off(&mut self, now: Duration) {
        self.pause = (2 * self.pause).min(AGAIN_MOST);
        self.next = now + self.pause;
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AgreeState {
    Idle,
    Proposing {
        id: ListId,
        again: Again,
        until: Duration,
    },
    Switching {
        id: ListId,
        again: Again,
    },
    /// The other end has proposed this function list, and may already send with it.
    Following {
        id: ListId,
        challenge: u32,
        next: Duration,
    },
    /// Both ends send with the new function list, and still accept packets of the old one.
    Lingering {
        until: Duration,
    },
}

/// One end's state of the agreement about a session's function list.
///
/// # States
///
/// * *Idle*: both ends send with the same list, and no packet of another list is in flight.
/// * *Proposing*: this end accepts packets of the new list, and repeats its proposal until the other end is ready,
///   refuses, or is silent for too long.
/// * *Switching*: this end sends with the new list, and repeats the message about its switch until the other end has
///   also switched.
/// * *Following*: the other end has proposed. This end accepts packets of the new list, and has sent a challenge.
/// * *Lingering*: both ends send with the new list, and packets of the old one may be in flight.
///
/// [`Self::propose`] begins a change, [`Self::on_message`] handles each message, and [`Self::tick`] has to be called at
/// the time of [`Self::next`]. Each returns actions that the caller carries out in their order, before the next call.
/// If an action fails, [`Self::cannot`] returns what to do. Between calls, this end accepts every packet that the other
/// end may send, except during a stateless change.
#[derive(Debug)]
pub struct ListAgreement {
    state: AgreeState,
    /// The function list with which this end sends packets.
    list: u16,
    /// The latest change that this end has completed.
    latest: Option<ListId>,
    /// True if this end's proposal wins when both ends propose at the same time.
    goes_first: bool,
    /// Numbers of this end's latest attempt, and of its latest challenge.
    attempt: u16,
    challenge: u32,
    /// The other end's challenge for this end's proposal, once the challenge has arrived.
    heard: Option<u32>,
    /// True if this end has proposed the same function list as the other end, and has yielded to that end's proposal.
    gave_way: bool,
}

impl ListAgreement {
    /// Creates the state of one end. `random` has the first values of the counters of attempts and challenges, so that
    /// they differ from those before a restart.
    pub fn new(list: u16, goes_first: bool, random: [u8; 6]) -> Self {
        let [a, b, c, d, e, f] = random;
        Self {
            state: AgreeState::Idle,
            list,
            latest: None,
            goes_first,
            attempt: u16::from_ne_bytes([a, b]),
            challenge: u32::from_ne_bytes([c, d, e, f]),
            heard: None,
            gave_way: false,
        }
    }

    /// Restarts with this function list. A change that is in progress is dropped.
    pub fn begin(&mut self, list: u16) {
        (self.state, self.list, self.latest, self.heard) = (AgreeState::Idle, list, None, None);
    }

    /// Returns the function list with which this end sends packets.
    pub fn list(&self) -> u16 {
        self.list
    }

    /// Proposes a change to a function list. `now` is the time since any fixed moment.
    pub fn propose(&mut self, now: Duration, list: u16, anew: bool) -> Vec<ListAction> {
        match self.state {
            // The session already uses this function list, so nothing changes.
            AgreeState::Idle if list == self.list && !anew => vec![ListAction::Agreed(list)],
            AgreeState::Idle => {
                self.attempt = self.attempt.wrapping_add(1);
                let id = ListId { list, attempt: self.attempt & ListId::ATTEMPT, anew };
                // A challenge for an earlier attempt must not be answered.
                self.heard = None;
                self.state = AgreeState::Proposing { id, again: Again::after(now), until: now + PATIENCE };
                vec![id.preparation(), ListAction::Say(ListMessage::Propose(id))]
            }
            _ => vec![ListAction::Failed(list, ListRefusal::Busy)],
        }
    }

    /// Handles a message. `is_known` is true if this end has the function list that the message names.
    pub fn on_message(&mut self, now: Duration, message: ListMessage, is_known: bool) -> Vec<ListAction> {
        // Time-outs are handled first, since they decide whether the message still counts.
        let mut acts = self.tick(now);
        acts.extend(self.answer(now, message, is_known));
        acts
    }

    fn answer(&mut self, now: Duration, message: ListMessage, is_known: bool) -> Vec<ListAction> {
        match (message, self.state) {
            // An end that does not have the function list refuses to change to it.
            (ListMessage::Propose(id), _) if !is_known => vec![ListAction::Say(ListMessage::Refuse(id))],
            (ListMessage::Propose(id), _) => self.hear_proposal(now, id),
            // The other end accepts packets of the new function list, so this end may send with it.
            (ListMessage::Ready(id), AgreeState::Proposing { id: own, .. }) if id == own => {
                self.changed(id);
                self.state = AgreeState::Switching { id, again: Again::after(now) };
                let mut acts = vec![id.change()];
                acts.extend(self.say_switched(id));
                acts
            }
            // The other end repeats `Ready` because it has missed this end's answer, which is sent again.
            (ListMessage::Ready(id), _) if self.latest == Some(id) => self.say_switched(id),
            (ListMessage::Ready(id), _) => vec![ListAction::Say(ListMessage::Refuse(id))],
            (ListMessage::Refuse(id), AgreeState::Proposing { id: own, .. }) if id == own => {
                self.give_up(id.list, ListRefusal::Refused)
            }
            // The other end has withdrawn its proposal, so the new function list is no longer accepted.
            (ListMessage::Refuse(id), AgreeState::Following { id: own, .. }) if id == own => {
                self.state = AgreeState::Idle;
                let failed = self.gave_way.then_some(ListAction::Failed(id.list, ListRefusal::Busy));
                [ListAction::Retire].into_iter().chain(failed).collect()
            }
            // Messages arrive in any order, so the challenge may come before `Ready`.
            (ListMessage::Challenge(heard), AgreeState::Proposing { .. }) => {
                self.heard = Some(heard);
                Vec::new()
            }
            (ListMessage::Challenge(heard), AgreeState::Switching { id, .. }) => {
                self.heard = Some(heard);
                vec![ListAction::Say(ListMessage::Answer(id.answer(heard)))]
            }
            // The answer to the challenge was lost, or this message was replayed. The challenge is sent again.
            (ListMessage::Switched(id), AgreeState::Following { id: own, challenge, .. }) if id == own => {
                vec![ListAction::Say(ListMessage::Challenge(challenge))]
            }
            // Only an end that has switched can compute this answer, so this end may switch, too.
            (ListMessage::Answer(answer), AgreeState::Following { id, challenge, .. })
                if answer == id.answer(challenge) =>
            {
                self.changed(id);
                self.state = AgreeState::Lingering { until: now + LINGER };
                vec![id.change(), ListAction::Say(ListMessage::Done(id)), ListAction::Agreed(id.list)]
            }
            // The message `Done` of this end was lost, so it is sent again.
            (ListMessage::Switched(id), _) if self.latest == Some(id) => {
                vec![ListAction::Say(ListMessage::Done(id))]
            }
            (ListMessage::Answer(answer), _) => {
                let latest = self.latest.filter(|id| answer == id.answer(self.challenge & ListId::CHALLENGE));
                latest.map(|id| ListAction::Say(ListMessage::Done(id))).into_iter().collect()
            }
            // Both ends send with the new function list now.
            (ListMessage::Done(id), AgreeState::Switching { id: own, .. }) if id == own => {
                self.state = AgreeState::Lingering { until: now + LINGER };
                vec![ListAction::Agreed(id.list)]
            }
            _ => Vec::new(),
        }
    }

    fn hear_proposal(&mut self, now: Duration, id: ListId) -> Vec<ListAction> {
        match self.state {
            AgreeState::Following { id: own, challenge, .. } if id == own => say_ready(id, challenge),
            // A late repetition of a proposal that is already completed must not start another change.
            AgreeState::Idle if id.list != self.list || (id.anew && self.latest != Some(id)) => {
                self.follow(now, id)
            }
            // Both ends have proposed at the same time. The end with the higher address drops its proposal.
            AgreeState::Proposing { id: own, .. } if !self.goes_first => {
                let is_same = own.list == id.list;
                let mut acts = if is_same { Vec::new() } else { self.give_up(own.list, ListRefusal::Busy) };
                acts.extend(self.follow(now, id));
                self.gave_way = is_same;
                acts
            }
            // The proposal is ignored for now: the other end repeats it, and it is accepted later.
            _ => Vec::new(),
        }
    }

    fn follow(&mut self, now: Duration, id: ListId) -> Vec<ListAction> {
        self.gave_way = false;
        self.challenge = self.challenge.wrapping_add(1);
        let challenge = self.challenge & ListId::CHALLENGE;
        self.state = AgreeState::Following { id, challenge, next: now + 4 * AGAIN_MOST };
        let mut acts = vec![id.preparation()];
        acts.extend(say_ready(id, challenge));
        acts
    }

    /// Sends the answer to the challenge if the challenge has arrived. Otherwise sends `Switched`, so that the other
    /// end repeats the challenge.
    fn say_switched(&self, id: ListId) -> Vec<ListAction> {
        let is_own = matches!(self.state, AgreeState::Switching { id: own, .. } if own == id);
        let heard = self.heard.filter(|_| is_own);
        vec![ListAction::Say(
            heard.map_or(ListMessage::Switched(id), |heard| ListMessage::Answer(id.answer(heard))),
        )]
    }

    /// Ends the attempt, because the function list could not be accepted or prepared at this end.
    pub fn cannot(&mut self) -> Vec<ListAction> {
        match self.state {
            AgreeState::Proposing { id, .. } => self.give_up(id.list, ListRefusal::NoState),
            AgreeState::Following { id, .. } => {
                let mut acts = self.give_up(id.list, ListRefusal::NoState);
                acts.push(ListAction::Say(ListMessage::Refuse(id)));
                acts
            }
            _ => Vec::new(),
        }
    }

    fn changed(&mut self, id: ListId) {
        (self.list, self.latest) = (id.list, Some(id));
    }

    fn give_up(&mut self, list: u16, why: ListRefusal) -> Vec<ListAction> {
        self.state = AgreeState::Idle;
        vec![ListAction::Retire, ListAction::Failed(list, why)]
    }

    /// Handles time-outs and repetitions. It must be called at the time of [`next`](Self::next).
    pub fn tick(&mut self, now: Duration) -> Vec<ListAction> {
        match &mut self.state {
            AgreeState::Proposing { id, until, .. } if now >= *until => {
                let list = id.list;
                self.give_up(list, ListRefusal::Silent)
            }
            AgreeState::Proposing { id, again, .. } if now >= again.next => {
                again.put_off(now);
                vec![ListAction::Say(ListMessage::Propose(*id))]
            }
            // The other end accepts the function list with which this end sends, so this end repeats `Switched` or the
            // answer without a time limit.
            AgreeState::Switching { id, again } if now >= again.next => {
                again.put_off(now);
                let id = *id;
                self.say_switched(id)
            }
            // The other end may already send with the function list, so packets of the list are accepted until that end
            // refuses the change.
            AgreeState::Following { id, challenge, next } if now >= *next => {
                *next = now + 4 * AGAIN_MOST;
                say_ready(*id, *challenge)
            }
            AgreeState::Lingering { until } if now >= *until => {
                self.state = AgreeState::Idle;
                vec![ListAction::Retire]
            }
            _ => Vec::new(),
        }
    }

    /// Returns the time of the next `tick`, or `None` if no change is in progress.
    pub fn next(&self) -> Option<Duration> {
        match self.state {
            AgreeState::Idle => None,
            AgreeState::Proposing { again, until, .. } => Some(again.next.min(until)),
            AgreeState::Switching { again, .. } => Some(again.next),
            AgreeState::Following { next, .. } | AgreeState::Lingering { until: next } => Some(next),
        }
    }
}

fn say_ready(id: ListId, challenge: u32) -> Vec<ListAction> {
    vec![ListAction::Say(ListMessage::Challenge(challenge)), ListAction::Say(ListMessage::Ready(id))]
}

impl ListId {
    const CHALLENGE: u32 = 0x7fff_ffff;
    const ATTEMPT: u16 = 0x3fff;
    /// Bit above the 14 bits of the attempt's number, in the 32-bit number of a message. It is set if the change drops
    /// the session's state.
    const ANEW: u32 = 1 << 30;

    fn preparation(self) -> ListAction {
        if self.anew { ListAction::Expect(self.list) } else { ListAction::Accept(self.list) }
    }

    fn change(self) -> ListAction {
        if self.anew { ListAction::Begin(self.list) } else { ListAction::Switch }
    }

    /// Returns the answer to a challenge. It depends on the function list that the answering end has switched to.
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

impl ListMessage {
    /// Returns the message's kind (one of eight) and a 32-bit number with the message's contents, as they are encoded
    /// in a packet.
    pub fn encode(self) -> (u8, u32) {
        // Kinds 1, 3 and 7 each stand for two messages, which differ in the highest bit of the 32-bit number.
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
            Self::Challenge(challenge) => (7, challenge & ListId::CHALLENGE),
            Self::Answer(answer) => (7, ANSWER | answer & ListId::CHALLENGE),
        }
    }

    /// Reads a message. Returns `None` if the kind does not exist.
    pub fn decode(kind: u8, number: u32) -> Option<Self> {
        let id = ListId::decode(number);
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
            (7, 1) => Some(Self::Answer(number & ListId::CHALLENGE)),
            _ => None,
        }
    }

    /// Returns the function list that the message names, if it names one.
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

    /// One end of a simulated session: the function lists that it accepts and sends with, according to its actions.
    #[derive(Debug)]
    struct AgreeEnd {
        agreement: ListAgreement,
        takes: Vec<u16>,
        sends: u16,
        agreed: Vec<u16>,
        agreed_at: Duration,
        failed: Vec<(u16, ListRefusal)>,
        begun: u32,
        expects: Option<u16>,
    }

    impl AgreeEnd {
        fn new(goes_first: bool) -> Self {
            let agreement = ListAgreement::new(1, goes_first, [u8::from(goes_first); 6]);
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

        fn act(&mut self, acts: Vec<ListAction>) -> Vec<ListMessage> {
            let mut said = Vec::new();
            for act in acts {
                match act {
                    ListAction::Accept(list) => {
                        self.takes.retain(|taken| *taken == self.sends);
                        self.takes.push(list);
                    }
                    ListAction::Switch => self.sends = *self.takes.last().expect("one that was accepted"),
                    ListAction::Expect(list) => self.expects = Some(list),
                    ListAction::Begin(list) => {
                        assert_eq!(self.expects, Some(list));
                        (self.sends, self.takes) = (list, vec![list]);
                        self.begun += 1;
                    }
                    ListAction::Retire => {
                        self.takes.retain(|list| *list == self.sends);
                        self.expects = None;
                    }
                    ListAction::Say(message) => said.push(message),
                    ListAction::Agreed(list) => self.agreed.push(list),
                    ListAction::Failed(list, why) => self.failed.push((list, why)),
                }
            }
            said
        }
    }

    fn run(
        ends: [AgreeEnd; 2],
        proposals: [Option<u16>; 2],
        knows: bool,
        loses: impl Fn(u64) -> bool,
    ) -> [AgreeEnd; 2] {
        run_each(ends, proposals.map(|list| Some((list?, false))), knows, loses)
    }

    /// Simulates two ends for a minute, on a path with a delay of 10 ms that loses messages as `loses` decides. Each
    /// proposal has a function list, and is stateless or not.
    fn run_each(
        mut ends: [AgreeEnd; 2],
        proposals: [Option<(u16, bool)>; 2],
        knows: bool,
        loses: impl Fn(u64) -> bool,
    ) -> [AgreeEnd; 2] {
        let is_anew = proposals.iter().flatten().any(|(_, anew)| *anew);
        let mut flying: Vec<(Duration, usize, ListMessage)> = Vec::new();
        let mut said = 0;
        for at in 0..60_000 {
            let now = at * MS;
            for from in 0..2 {
                let mut messages = Vec::new();
                if let (0, Some((list, anew))) = (at, proposals[from]) {
                    let acts = ends[from].agreement.propose(now, list, anew);
                    messages.extend(ends[from].act(acts));
                }
                let (arrived, rest) =
                    flying.into_iter().partition(|(when, to, _)| *when <= now && *to == from);
                flying = rest;
                for (_, _, message) in arrived {
                    let acts = ends[from].agreement.on_message(now, message, knows);
                    messages.extend(ends[from].act(acts));
                }
                let acts = ends[from].agreement.tick(now);
                messages.extend(ends[from].act(acts));
                if ends[from].agreed_at.is_zero() && !ends[from].agreed.is_empty() {
                    ends[from].agreed_at = now;
                }
                for message in messages {
                    assert_eq!(ListMessage::decode(message.encode().0, message.encode().1), Some(message));
                    said += 1;
                    if !loses(said) {
                        flying.push((now + 10 * MS, 1 - from, message));
                    }
                }
            }
            // Each end always accepts what the other one sends.
            let takes = |one: usize| ends[one].takes.contains(&ends[1 - one].sends);
            assert!(is_anew || takes(0) && takes(1), "{now:?} {ends:?}");
        }
        ends
    }

    #[test]
    fn agreed_function_list_is_used_by_both_session_ends_despite_losses() {
        let at_random = |count: u64| count.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & 7 < 4;
        for loses in [|_| false, |count| count % 3 == 0, at_random, |count| count < 9] {
            let ends = run([AgreeEnd::new(true), AgreeEnd::new(false)], [Some(2), None], true, loses);
            for end in ends {
                assert_eq!((end.sends, &end.takes[..], &end.agreed[..]), (2, &[2][..], &[2][..]));
                assert_eq!(end.agreement.next(), None);
            }
        }
    }

    /// Each end restarts only once, however often the proposal is repeated, even if the new function list equals the
    /// old one.
    #[test]
    fn function_list_change_without_state_restarts_each_session_end_once() {
        for list in [1, 2] {
            for loses in [|_| false, |count| count % 3 == 0, |count| count < 9] {
                let ends = run_each(
                    [AgreeEnd::new(true), AgreeEnd::new(false)],
                    [Some((list, true)), None],
                    true,
                    loses,
                );
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
    fn function_list_change_without_a_state_migration_is_refused() {
        let mut end = AgreeEnd::new(true);
        let proposed = ListId { list: 2, attempt: 3, anew: false };
        let acts = end.agreement.on_message(MS, ListMessage::Propose(proposed), true);
        assert!(
            matches!(acts[..], [ListAction::Accept(2), ListAction::Say(ListMessage::Challenge(_)), _]),
            "{acts:?}"
        );
        assert_eq!(acts[2], ListAction::Say(ListMessage::Ready(proposed)));
        let acts = end.agreement.cannot();
        let refuses = ListAction::Say(ListMessage::Refuse(proposed));
        assert_eq!(acts, [ListAction::Retire, ListAction::Failed(2, ListRefusal::NoState), refuses]);
        assert_eq!((end.agreement.list(), end.agreement.next()), (1, None));
    }

    #[test]
    fn lost_function_list_message_is_repeated_after_doubling_delays() {
        for lost in 0..4 {
            let ends = run([AgreeEnd::new(true), AgreeEnd::new(false)], [Some(2), None], true, |count| {
                count <= lost
            });
            let two_round_trips = 40 * MS;
            assert_eq!(ends[0].agreed_at, two_round_trips + AGAIN * ((1 << lost) - 1), "{lost} lost");
        }
    }

    #[test]
    fn one_of_two_simultaneous_function_list_proposals_wins() {
        for proposals in [[Some(2), Some(3)], [Some(2), Some(2)]] {
            let ends = run([AgreeEnd::new(true), AgreeEnd::new(false)], proposals, true, |_| false);
            assert!(ends.iter().all(|end| end.sends == 2 && end.takes == [2]), "{ends:?}");
        }
    }

    #[test]
    fn proposal_of_an_unknown_function_list_changes_nothing() {
        let ends = run([AgreeEnd::new(true), AgreeEnd::new(false)], [Some(2), None], false, |_| false);
        assert_eq!(ends[0].failed, [(2, ListRefusal::Refused)]);
        assert!(ends.iter().all(|end| end.sends == 1 && end.takes == [1]));
    }

    #[test]
    fn session_end_start_times_are_ordered_across_wraparound() {
        let at = |tenths: u64| Since::new(Duration::from_millis(tenths * 100));
        let end = u64::from(Since::BITS);
        for (early, late) in [(0, 1), (5, 1 << 30), (end, end + 1), (end - 7, end + 7)] {
            assert!(
                at(late).is_later_than(at(early)) && !at(early).is_later_than(at(late)),
                "{early} {late}"
            );
        }
        assert!(!at(3).is_later_than(at(3)));
        let hello = ListMessage::Hello(at(1 << 20));
        assert_eq!(ListMessage::decode(hello.encode().0, hello.encode().1), Some(hello));
    }

    /// An attacker replays all messages of both ends, to either end and in any order, also while both ends make another
    /// change.
    #[test]
    fn replayed_messages_to_both_session_ends_change_no_function_list() {
        let mut ends = [AgreeEnd::new(true), AgreeEnd::new(false)];
        let mut recorded = Vec::new();
        let mut now = Duration::ZERO;
        let mut random = 1_u32;
        let mut flying: Vec<(usize, ListMessage)> = Vec::new();
        let mut current = 1;
        let mut changed = 0;
        for round in 0..400_u32 {
            // The two ends make changes in turn, with and without the session's state.
            let from = (round / 2 % 2) as usize;
            let list = 3 - current;
            let anew = round % 5 == 0;
            let begun = ends[0].begun;
            let failed = ends[from].failed.len();
            let acts = ends[from].agreement.propose(now, list, anew);
            flying.extend(ends[from].act(acts).into_iter().map(|message| (1 - from, message)));
            for step in 0..5500_u32 {
                now += MS;
                for (to, message) in std::mem::take(&mut flying) {
                    recorded.push((to, message));
                    let acts = ends[to].agreement.on_message(now, message, true);
                    flying.extend(ends[to].act(acts).into_iter().map(|message| (1 - to, message)));
                }
                for (to, end) in ends.iter_mut().enumerate() {
                    let acts = end.agreement.tick(now);
                    flying.extend(end.act(acts).into_iter().map(|message| (1 - to, message)));
                }
                random = random.wrapping_mul(0x9e37_79b9).wrapping_add(step);
                if !recorded.is_empty() && random >> 20 & 3 == 0 && step < 2500 {
                    let (to, message) = recorded[(random >> 8) as usize % recorded.len()];
                    let acts = ends[to].agreement.on_message(now, message, true);
                    flying.extend(ends[to].act(acts).into_iter().map(|message| (1 - to, message)));
                }
                let takes = |one: usize| ends[one].takes.contains(&ends[1 - one].sends);
                assert!(ends[0].begun != ends[1].begun || takes(0) && takes(1), "{round} {ends:?}");
            }
            // A replayed proposal may collide with a new one. Then the new change fails, and the session keeps its
            // function list.
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

    /// One end receives replayed messages, and its replies do not reach the other end.
    #[test]
    fn replay_to_an_isolated_session_end_changes_no_function_list() {
        let recorded =
            [ListId { list: 2, attempt: 5, anew: false }, ListId { list: 2, attempt: 6, anew: true }];
        for id in recorded {
            let mut end = AgreeEnd::new(false);
            let mut said = Vec::new();
            for old in [5, 77] {
                for message in [
                    ListMessage::Propose(id),
                    ListMessage::Switched(id),
                    ListMessage::Answer(id.answer(old)),
                    ListMessage::Done(id),
                ] {
                    let acts = end.agreement.on_message(MS, message, true);
                    said.extend(end.act(acts));
                }
            }
            assert_eq!((end.sends, end.begun, end.agreement.list()), (1, 0, 1), "{said:?}");
            let challenge = said.iter().find_map(|message| match message {
                ListMessage::Challenge(challenge) => Some(*challenge),
                _ => None,
            });
            let answer = ListMessage::Answer(id.answer(challenge.expect("a challenge")));
            let acts = end.agreement.on_message(MS, answer, true);
            end.act(acts);
            assert_eq!(end.sends, 2, "and to a new one it does");
        }
    }

    #[test]
    fn unanswered_function_list_proposal_changes_neither_session_end() {
        let ends = run([AgreeEnd::new(true), AgreeEnd::new(false)], [Some(2), None], true, |_| true);
        assert_eq!(ends[0].failed, [(2, ListRefusal::Silent)]);
        assert!(ends.iter().all(|end| end.sends == 1 && end.takes == [1]));
    }

    #[test]
    fn random_messages_leave_the_sent_function_list_receivable() {
        let mut end = AgreeEnd::new(true);
        for at in 0..100_000u32 {
            let random = at.wrapping_mul(0x9e37_79b9);
            let message = ListMessage::decode((random >> 30) as u8, random >> 8 & 0xc001_0003);
            if at % 97 == 0 {
                let acts = end.agreement.propose(at / 10 * MS, (random & 3) as u16, random & 4 == 0);
                end.act(acts);
            }
            let now = at / 10 * MS;
            let acts = message
                .map(|message| end.agreement.on_message(now, message, random & 1 == 0))
                .unwrap_or_default();
            end.act(acts);
            let acts = end.agreement.tick(now);
            end.act(acts);
            assert!(end.takes.len() <= 2 && end.takes.contains(&end.sends), "{end:?}");
        }
    }
}
