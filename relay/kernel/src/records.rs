//! Decides which connections have one of the kernel's records: those to which it is worth most.
//!
//! A connection *claims* a record, and says what it is worth to it. Where none is free, it waits, behind those to which one is worth more
//! and behind those that began to wait before. A record that is not worth anything any more goes to whoever waits. So does that of a
//! connection without subscriptions, to one that has some; and a publisher, without which nothing can be forwarded, takes a subscriber's.
//!
//! States of a claim: without a record, with one, and giving it back, from [`Decision::Recall`] until [`Records::returned`].
//! [`Records::decide`] is called by the engine's thread alone, which carries out what it says.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    time::{Duration, Instant},
};

use millrace_transport::offload::{Standing, Worth};
use parking_lot::Mutex;

/// How long a connection keeps its record after its last subscription, where others wait that have some: one that changes tracks has none
/// for a moment.
const GRACE: Duration = Duration::from_millis(500);

/// The claims to the engine's records. `T` stands for the connection.
pub(super) struct Records<T>(Mutex<State<T>>);

struct State<T> {
    most: usize,
    /// Records that exist, and those that are about to be made.
    made: usize,
    next: u64,
    claims: HashMap<u64, Claim<T>>,
    /// Claims that have a worth and no record, the first to be served first.
    waiting: BTreeSet<(Reverse<Worth>, u64, u64)>,
    /// Claims with a record, the first to lose it first.
    holders: BTreeSet<(Worth, Reverse<u64>, u64)>,
    taken: u64,
}

struct Claim<T> {
    of: T,
    worth: Worth,
    since: Instant,
    /// The place among claims of the same worth: claims that began to wait later have larger ones.
    place: u64,
    holds: Holds,
    was_taken: bool,
    is_over: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Holds {
    Nothing,
    Record,
    /// The connection is giving its record back.
    Recalled,
}

/// A task for the engine's thread.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Decision<T> {
    /// Make a record for the claim of this number.
    Grant(u64, T),
    /// Ask the connection to give its record back.
    Recall(T),
}

/// Tasks for the thread, and whether there are too few records.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Decided<T> {
    pub decisions: Vec<Decision<T>>,
    pub is_short: bool,
}

impl<T: Clone> Records<T> {
    pub fn new(most: usize) -> Self {
        Self(Mutex::new(State {
            most,
            made: 0,
            next: 0,
            claims: HashMap::new(),
            waiting: BTreeSet::new(),
            holders: BTreeSet::new(),
            taken: 0,
        }))
    }

    /// Adds a connection, to which a record is worth nothing yet. Returns the number of its claim.
    pub fn enter(&self, of: T, now: Instant) -> u64 {
        let mut state = self.0.lock();
        let number = state.place();
        let (worth, holds) = (Worth::Nothing, Holds::Nothing);
        let claim = Claim { of, worth, since: now, place: 0, holds, was_taken: false, is_over: false };
        state.claims.insert(number, claim);
        number
    }

    /// Says what a record is worth to a connection. Returns whether there is something to decide.
    pub fn set_worth(&self, number: u64, worth: Worth, now: Instant) -> bool {
        let mut state = self.0.lock();
        let place = state.place();
        state.change(number, |claim| {
            if claim.is_over || claim.worth == worth {
                return;
            }
            if claim.worth == Worth::Nothing && claim.holds == Holds::Nothing {
                claim.place = place;
            }
            (claim.worth, claim.since) = (worth, now);
        });
        !state.waiting.is_empty()
    }

    /// The connection is over: nothing is worth anything to it from now on. Returns whether there is something to decide.
    pub fn end(&self, number: u64) -> bool {
        let mut state = self.0.lock();
        state.change(number, |claim| (claim.worth, claim.is_over) = (Worth::Nothing, true));
        !state.waiting.is_empty()
    }

    /// Forgets a claim. Its record, if it has one, is still to be returned. Returns whether there is something to decide.
    pub fn leave(&self, number: u64) -> bool {
        let mut state = self.0.lock();
        state.unlist(number);
        state.claims.remove(&number);
        !state.waiting.is_empty()
    }

    /// A record of the claim is free again, or could not be made. Returns whether there is something to decide.
    pub fn returned(&self, number: u64) -> bool {
        let mut state = self.0.lock();
        state.made -= 1;
        state.change(number, |claim| claim.holds = Holds::Nothing);
        !state.waiting.is_empty()
    }

    pub fn standing(&self, number: u64) -> Standing {
        let state = self.0.lock();
        match state.claims.get(&number) {
            Some(Claim { holds: Holds::Record, .. }) => Standing::Held,
            Some(Claim { worth: Worth::Nothing, .. }) | None => Standing::Unproven,
            Some(Claim { was_taken: true, .. }) => Standing::Taken,
            Some(_) => Standing::Waiting,
        }
    }

    /// Returns how many connections wait for a record.
    pub fn waiting(&self) -> usize {
        self.0.lock().waiting.len()
    }

    /// Returns how many records were taken from subscribers so far.
    pub fn taken(&self) -> u64 {
        self.0.lock().taken
    }

    /// Decides which connections get a record, and which have to give one back.
    pub fn decide(&self, now: Instant) -> Decided<T> {
        let mut state = self.0.lock();
        let mut decisions = Vec::new();
        while state.made < state.most
            && let Some((_, _, number)) = state.waiting.first().copied()
        {
            state.made += 1;
            state.change(number, |claim| (claim.holds, claim.was_taken) = (Holds::Record, false));
            decisions
                .extend(state.claims.get(&number).map(|claim| Decision::Grant(number, claim.of.clone())));
        }
        let is_short = !state.waiting.is_empty();
        // Who is served by what is on its way back needs nobody else's.
        let coming = state.made - state.holders.len();
        let most = state.holders.len();
        let worths: Vec<_> =
            state.waiting.iter().skip(coming).take(most).map(|(Reverse(worth), ..)| *worth).collect();
        for worth in worths {
            let Some(number) = state.victim(worth, now) else { break };
            let was_taken = state.claims.get(&number).is_some_and(|claim| claim.worth == Worth::Subscriber);
            state.taken += u64::from(was_taken);
            state.change(number, |claim| (claim.holds, claim.was_taken) = (Holds::Recalled, was_taken));
            decisions.extend(state.claims.get(&number).map(|claim| Decision::Recall(claim.of.clone())));
        }
        Decided { decisions, is_short }
    }
}

impl<T> State<T> {
    fn place(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Changes a claim, and lists it where it belongs then.
    fn change(&mut self, number: u64, change: impl FnOnce(&mut Claim<T>)) {
        self.unlist(number);
        let Some(claim) = self.claims.get_mut(&number) else { return };
        change(claim);
        let Claim { worth, place, holds, .. } = *claim;
        match holds {
            Holds::Nothing if worth > Worth::Nothing => {
                self.waiting.insert((Reverse(worth), place, number));
            }
            Holds::Record => {
                self.holders.insert((worth, Reverse(place), number));
            }
            Holds::Nothing | Holds::Recalled => {}
        }
    }

    fn unlist(&mut self, number: u64) {
        if let Some(Claim { worth, place, .. }) = self.claims.get(&number) {
            self.waiting.remove(&(Reverse(*worth), *place, number));
            self.holders.remove(&(*worth, Reverse(*place), number));
        }
    }

    /// Returns the claim that has to give its record to one to which it is worth so much.
    fn victim(&self, to: Worth, now: Instant) -> Option<u64> {
        let above = if to >= Worth::Publisher { Worth::Publisher } else { Worth::Subscriber };
        let is_old = |number: u64| {
            self.claims.get(&number).is_some_and(|claim| now.saturating_duration_since(claim.since) >= GRACE)
        };
        let gives = |(worth, number): &(Worth, u64)| match worth {
            Worth::Nothing => true,
            Worth::Idle if to == Worth::Subscriber => is_old(*number),
            _ => to >= Worth::Publisher,
        };
        let below = self.holders.iter().map(|(worth, _, number)| (*worth, *number));
        below.take_while(|(worth, _)| *worth < above).find(gives).map(|(_, number)| number)
    }
}

#[cfg(test)]
mod tests;
