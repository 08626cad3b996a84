//! Decides which connections get a record, an entry in the kernel's tables, with which the kernel can send media on the
//! connection. They are the connections to which a record is worth most.
//!
//! A connection *claims* a record, and states its worth. If no record is free, it waits, ordered by worth and then by
//! the time when it began to wait. A record that has no worth to its connection any more goes to a waiting connection.
//! A connection without subscriptions loses its record to one that has some. A publisher, without which nothing can be
//! forwarded, takes the record of a subscriber.
//!
//! A claim has no record, has one, or is returning it, from [`RecordDecision::Recall`] until
//! [`RecordClaims::returned`]. Only the engine's thread calls [`RecordClaims::decide`], and carries out its decisions.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    time::{Duration, Instant},
};

use millrace_transport::offload::{OffloadStanding, Worth};
use parking_lot::Mutex;

/// How long a connection keeps its record in the kernel's tables after its last subscription, although other
/// connections wait for a record. A subscriber that changes tracks has no subscription for a moment.
const GRACE: Duration = Duration::from_millis(500);

/// The claims of connections to records in the kernel's tables. `T` identifies the connection.
pub(super) struct RecordClaims<T>(Mutex<RecordsState<T>>);

struct RecordsState<T> {
    most: usize,
    /// Number of records in the kernel's tables that exist or are about to be made.
    made: usize,
    next: u64,
    claims: HashMap<u64, RecordClaim<T>>,
    /// The claims of connections that wait for a record in the kernel's tables, and to which it would be of use. The
    /// claim that gets the next record comes first.
    waiting: BTreeSet<(Reverse<Worth>, u64, u64)>,
    /// Claims that have a record in the kernel's tables. The claim that loses its record next comes first.
    holders: BTreeSet<(Worth, Reverse<u64>, u64)>,
    taken: u64,
}

struct RecordClaim<T> {
    of: T,
    worth: Worth,
    since: Instant,
    /// Order among connections to which a record in the kernel's tables is worth equally much. Connections that began
    /// to wait later have larger values.
    place: u64,
    holds: Holds,
    was_taken: bool,
    is_over: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Holds {
    Nothing,
    Record,
    /// The connection has been asked to return its record in the kernel's tables.
    Recalled,
}

/// A decision that the engine's thread carries out.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum RecordDecision<T> {
    /// Make a record in the kernel's tables for the claim with this number.
    Grant(u64, T),
    /// Ask this connection to return its record in the kernel's tables.
    Recall(T),
}

/// The decisions for the engine's thread, and whether connections wait because the kernel's table of connections
/// (records) is full.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Decided<T> {
    pub decisions: Vec<RecordDecision<T>>,
    pub is_short: bool,
}

impl<T: Clone> RecordClaims<T> {
    pub fn new(most: usize) -> Self {
        Self(Mutex::new(RecordsState {
            most,
            made: 0,
            next: 0,
            claims: HashMap::new(),
            waiting: BTreeSet::new(),
            holders: BTreeSet::new(),
            taken: 0,
        }))
    }

    /// Adds a connection's claim to a record in the kernel's tables, which is of no use to the connection yet. Returns
    /// the claim's number.
    pub fn enter(&self, of: T, now: Instant) -> u64 {
        let mut state = self.0.lock();
        let number = state.place();
        let worth = Worth::Nothing;
        let holds = Holds::Nothing;
        let claim = RecordClaim { of, worth, since: now, place: 0, holds, was_taken: false, is_over: false };
        state.claims.insert(number, claim);
        number
    }

    /// Sets how much a record in the kernel's tables is worth to a connection. Returns whether [`Self::decide`] has to
    /// be called.
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

    /// Notes that a connection has ended and needs no record. Returns whether [`Self::decide`] has to be called.
    pub fn end(&self, number: u64) -> bool {
        let mut state = self.0.lock();
        state.change(number, |claim| (claim.worth, claim.is_over) = (Worth::Nothing, true));
        !state.waiting.is_empty()
    }

    /// Removes a claim. If the claim has a record in the kernel's tables, the record is returned later. Returns whether
    /// [`Self::decide`] has to be called.
    pub fn leave(&self, number: u64) -> bool {
        let mut state = self.0.lock();
        state.unlist(number);
        state.claims.remove(&number);
        !state.waiting.is_empty()
    }

    /// Notes that the record in the kernel's tables that a connection had claimed is free again, or could not be made.
    /// Returns whether [`Self::decide`] has to be called.
    pub fn returned(&self, number: u64) -> bool {
        let mut state = self.0.lock();
        state.made -= 1;
        state.change(number, |claim| claim.holds = Holds::Nothing);
        !state.waiting.is_empty()
    }

    pub fn standing(&self, number: u64) -> OffloadStanding {
        let state = self.0.lock();
        match state.claims.get(&number) {
            Some(RecordClaim { holds: Holds::Record, .. }) => OffloadStanding::Held,
            Some(RecordClaim { worth: Worth::Nothing, .. }) | None => OffloadStanding::Unproven,
            Some(RecordClaim { was_taken: true, .. }) => OffloadStanding::Taken,
            Some(_) => OffloadStanding::Waiting,
        }
    }

    /// Returns how many connections wait for a record in the kernel's tables.
    pub fn waiting(&self) -> usize {
        self.0.lock().waiting.len()
    }

    /// Returns how many records in the kernel's tables were taken from subscribers since the engine started.
    pub fn taken(&self) -> u64 {
        self.0.lock().taken
    }

    /// Decides which connections get a record in the kernel's tables, and which have to return theirs.
    pub fn decide(&self, now: Instant) -> Decided<T> {
        let mut state = self.0.lock();
        let mut decisions = Vec::new();
        while state.made < state.most
            && let Some((_, _, number)) = state.waiting.first().copied()
        {
            state.made += 1;
            state.change(number, |claim| (claim.holds, claim.was_taken) = (Holds::Record, false));
            decisions.extend(
                state.claims.get(&number).map(|claim| RecordDecision::Grant(number, claim.of.clone())),
            );
        }
        let is_short = !state.waiting.is_empty();
        // Records that are being returned will go to the first waiting claims. Only claims after these may take records
        // from other connections.
        let coming = state.made - state.holders.len();
        let most = state.holders.len();
        let worths: Vec<_> =
            state.waiting.iter().skip(coming).take(most).map(|(Reverse(worth), ..)| *worth).collect();
        for worth in worths {
            let Some(number) = state.victim(worth, now) else { break };
            let was_taken = state.claims.get(&number).is_some_and(|claim| claim.worth == Worth::Subscriber);
            state.taken += u64::from(was_taken);
            state.change(number, |claim| (claim.holds, claim.was_taken) = (Holds::Recalled, was_taken));
            decisions.extend(state.claims.get(&number).map(|claim| RecordDecision::Recall(claim.of.clone())));
        }
        Decided { decisions, is_short }
    }
}

impl<T> RecordsState<T> {
    fn place(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Changes a connection's claim to a record in the kernel's tables, and moves it to the list that matches its new
    /// state.
    fn change(&mut self, number: u64, change: impl FnOnce(&mut RecordClaim<T>)) {
        self.unlist(number);
        let Some(claim) = self.claims.get_mut(&number) else { return };
        change(claim);
        let RecordClaim { worth, place, holds, .. } = *claim;
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
        if let Some(RecordClaim { worth, place, .. }) = self.claims.get(&number) {
            self.waiting.remove(&(Reverse(*worth), *place, number));
            self.holders.remove(&(*worth, Reverse(*place), number));
        }
    }

    /// Returns the number of the claim that loses its record in the kernel's tables to a waiting connection, to which a
    /// record is worth `to`.
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
