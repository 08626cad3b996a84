//! Switching sets (draft-wilaw-moq-moqt-ssts): the subscriber names tracks of the same content, and each group is forwarded from the
//! one that its path has room for.

use std::{collections::BTreeMap, slice, sync::Arc, time::Instant};

use millrace_moq::{
    code,
    message::RequestError,
    param::Assignment,
    tracks::adapt::{
        Choice, Decider, NOBODY, Sample,
        sets::{self, Allocation},
    },
};
use millrace_transport::Connection;
use parking_lot::Mutex;
use tokio::time::sleep;

use super::{
    Entry, Subscribed, Subscriptions,
    adapt::{LOOK, sample},
};
use crate::{
    hub::Counters,
    subscription::{Options, Place},
    wire::SessionError,
};

/// Tracks in switching sets that a session has at most.
const MAX_TRACKS: usize = 16;

/// The switching sets of one session.
#[derive(Default)]
pub(super) struct Sets(Mutex<State>);

#[derive(Default)]
struct State {
    sets: BTreeMap<u64, Set>,
    /// What more and more throughput buys the sets that are switched, in the order of their numbers.
    rungs: Vec<(u64, Allocation)>,
    decider: Option<Decider>,
    /// Somebody looks at the path.
    watched: bool,
}

struct Set {
    /// As last said.
    properties: Assignment,
    /// By what they need.
    tracks: Vec<Track>,
    /// Once there were enough tracks.
    choice: Option<Arc<Mutex<Choice>>>,
}

struct Track {
    request_id: u64,
    /// kbit/s.
    threshold: u64,
    subscribed: Subscribed,
    /// Among those that the set chooses from.
    number: usize,
}

impl Entry {
    /// Has the subscription be one of a switching set, or changes the set, if the subscriber says so.
    ///
    /// # Errors
    /// It cannot be, and the request has failed.
    pub(super) fn assign(&self, assignment: Option<&Assignment>) -> Result<(), RequestError> {
        let Some(assignment) = assignment else { return Ok(()) };
        let sample = sample(self.context().connection(), Instant::now());
        self.family.sets.assign(self.request_id, &self.subscribed, assignment, &sample)?;
        self.family.watch_path();
        Ok(())
    }
}

impl Subscriptions {
    /// Whether a subscriber may say this.
    ///
    /// # Errors
    /// Of the session, as for a parameter that is not known; of the request.
    pub(super) fn check(
        &self,
        assignment: Option<&Assignment>,
    ) -> Result<Result<(), RequestError>, SessionError> {
        let Some(assignment) = assignment else { return Ok(Ok(())) };
        if !self.context.hub().switching_sets {
            return Err(SessionError::violation("a parameter that this message does not allow"));
        }
        let unsupported =
            |reason: &str| Ok(Err(RequestError::new(code::Request::UNSUPPORTED_EXTENSION, reason)));
        if !self.context.knows_switching_sets() {
            return unsupported("SETUP has no algorithm of switching sets");
        }
        if assignment.algorithm != Assignment::ALGORITHM {
            return unsupported("switching sets have algorithm 0");
        }
        Ok(Ok(()))
    }

    /// Looks at the path for as long as a set is switched.
    fn watch_path(self: &Arc<Self>) {
        if !self.sets.begin_watch() {
            return;
        }
        let family = Arc::clone(self);
        self.context.spawn(async move {
            let (connection, counters) = (family.context.connection(), &family.context.hub().counters);
            loop {
                sleep(LOOK).await;
                if !family.sets.look(connection, counters) {
                    return Ok(());
                }
            }
        });
    }
}

impl Sets {
    fn assign(
        &self,
        request_id: u64,
        subscribed: &Subscribed,
        assignment: &Assignment,
        sample: &Sample,
    ) -> Result<(), RequestError> {
        let state = &mut *self.0.lock();
        let known =
            state.sets.iter().find(|(_, set)| set.tracks.iter().any(|track| track.request_id == request_id));
        let count: usize = state.sets.values().map(|set| set.tracks.len()).sum();
        match known {
            Some((number, _)) if *number != assignment.set => {
                let reason = "the track is in another switching set";
                return Err(RequestError::new(code::Request::UNSUPPORTED_EXTENSION, reason));
            }
            None if count >= MAX_TRACKS => {
                let reason = "too many tracks in switching sets";
                return Err(RequestError::new(code::Request::EXCESSIVE_LOAD, reason));
            }
            _ => {}
        }
        let set = state.sets.entry(assignment.set).or_insert_with(|| Set {
            properties: *assignment,
            tracks: Vec::new(),
            choice: None,
        });
        set.properties = *assignment;
        set.put(request_id, subscribed, assignment.threshold);
        state.settle(sample);
        Ok(())
    }

    /// The subscription is over.
    pub fn remove(&self, request_id: u64, connection: &Connection) {
        let state = &mut *self.0.lock();
        let found = state.sets.values_mut().find_map(|set| set.take(request_id));
        if found.is_some() {
            state.sets.retain(|_, set| !set.tracks.is_empty());
            state.settle(&sample(connection, Instant::now()));
        }
    }

    /// Whether somebody has to begin to look at the path.
    fn begin_watch(&self) -> bool {
        let state = &mut *self.0.lock();
        let begins = !state.watched && state.decider.is_some();
        state.watched |= begins;
        begins
    }

    /// Has groups that have not begun come from what the path has room for. Returns whether anything is left to switch.
    fn look(&self, connection: &Connection, counters: &Counters) -> bool {
        let now = Instant::now();
        let sample = sample(connection, now);
        let state = &mut *self.0.lock();
        let Some(decider) = &mut state.decider else {
            state.watched = false;
            return false;
        };
        let rung = decider.look(&sample);
        let allocation =
            state.rungs.get(rung).map(|(_, allocation)| allocation.as_slice()).unwrap_or_default();
        let switched = state.sets.values().filter(|set| set.is_switched());
        for (set, wanted) in switched.zip(allocation) {
            set.choose(*wanted, now, counters);
        }
        true
    }
}

impl State {
    /// Tracks or properties have changed: sets with enough tracks begin, and what fits is worked out anew.
    fn settle(&mut self, sample: &Sample) {
        let switched = || self.sets.values().filter(|set| set.is_switched());
        let sets: Vec<_> = switched().map(Set::needs).collect();
        if sets.is_empty() {
            (self.decider, self.rungs) = (None, Vec::new());
            return;
        }
        self.rungs = sets::rungs(&sets);
        let bits = |kbps: u64| kbps.saturating_mul(1000);
        let fits = |(kbps, _): &(u64, Allocation)| bits(*kbps) / 8 <= sample.bandwidth;
        // What is not known to fit is not known to be too much either: something is sent, to find out.
        let least = usize::from(self.rungs.first().is_some_and(|(_, none)| none.iter().all(Option::is_none)));
        let rung = self.rungs.iter().rposition(fits).unwrap_or(0).max(least).min(self.rungs.len() - 1);
        self.decider = Some(Decider::new(self.rungs.iter().map(|(kbps, _)| bits(*kbps)), rung));
        let allocation = self.rungs.get(rung).map(|(_, allocation)| allocation.clone()).unwrap_or_default();
        let switched = self.sets.values_mut().filter(|set| set.is_switched());
        for (set, wanted) in switched.zip(allocation) {
            set.begin(wanted);
        }
    }
}

impl Set {
    fn is_switched(&self) -> bool {
        let activate = self.properties.activate;
        activate > 0 && self.tracks.len() as u64 >= activate
    }

    fn needs(&self) -> sets::Set {
        let Assignment { rank, weight, .. } = self.properties;
        sets::Set { rank, weight, thresholds: self.tracks.iter().map(|track| track.threshold).collect() }
    }

    /// One more track, or another threshold of one.
    fn put(&mut self, request_id: u64, subscribed: &Subscribed, threshold: u64) {
        let known = self.tracks.iter().position(|track| track.request_id == request_id);
        let known = known.map(|known| Track { threshold, ..self.tracks.remove(known) });
        let new = || Track { request_id, threshold, subscribed: subscribed.clone(), number: NOBODY };
        let track = known.unwrap_or_else(new);
        let (number, place) =
            (track.number, self.tracks.partition_point(|track| track.threshold <= threshold));
        self.tracks.insert(place, track);
        match &self.choice {
            Some(choice) if number != NOBODY => choice.lock().reorder(number, place),
            Some(_) => {
                self.join(place);
                self.tracks[place].forward();
            }
            None => {}
        }
    }

    /// The track ended, or nobody asks for it any more: the set takes one less to be switched.
    fn take(&mut self, request_id: u64) -> Option<Track> {
        let place = self.tracks.iter().position(|track| track.request_id == request_id)?;
        let track = self.tracks.remove(place);
        self.choice.iter().for_each(|choice| choice.lock().remove(track.number));
        self.properties.activate = self.properties.activate.saturating_sub(1);
        Some(track)
    }

    /// The track at this place is one that groups may come from.
    fn join(&mut self, place: usize) {
        let (Some(choice), Some(track)) = (&self.choice, self.tracks.get_mut(place)) else { return };
        let newest = track.subscribed.track.data.largest().map(|largest| largest.group);
        let mut known = choice.lock();
        track.number = known.add(place);
        known.join(track.number, newest);
        drop(known);
        track.subscribed.subscription.take_place(Place { choice: Arc::clone(choice), number: track.number });
    }

    /// There are enough tracks, perhaps for the first time. What is forwarded already goes on until the next group.
    fn begin(&mut self, wanted: Option<usize>) {
        if self.choice.is_some() {
            return;
        }
        let choice = Arc::new(Mutex::new(Choice::new(0, NOBODY)));
        self.choice = Some(Arc::clone(&choice));
        let forwards = |track: &Track| track.subscribed.subscription.options().forward;
        let up_to = self.tracks.get(..=wanted.unwrap_or(0)).unwrap_or(&self.tracks);
        let base = up_to.iter().rposition(forwards).or_else(|| self.tracks.iter().position(forwards));
        for place in 0..self.tracks.len() {
            self.join(place);
        }
        if let Some(base) = base {
            choice.lock().start_with(self.tracks[base].number);
        }
        self.tracks.iter().for_each(Track::forward);
    }

    fn choose(&self, wanted: Option<usize>, now: Instant, counters: &Counters) {
        let Some(choice) = &self.choice else { return };
        let of = |number: usize| self.tracks.iter().position(|track| track.number == number);
        let mut choice = choice.lock();
        let before = choice.current().member;
        let best = wanted.map_or(NOBODY, |place| choice.best(place));
        if before == best {
            return;
        }
        // What the offload has opened may be of any group.
        let settled = of(before).is_none_or(|place| self.tracks[place].subscribed.subscription.withdraw(now));
        if settled {
            choice.switch(best);
        }
        let after = choice.current().member;
        drop(choice);
        if let Some(place) = of(after) {
            // What was prepared for the one before has been taken back.
            self.tracks[place].offer_openings();
        }
        counters.count_switch(of(before), of(after));
    }
}

impl Track {
    /// It is the sender now who says what is forwarded.
    fn forward(&self) {
        let Subscribed { track, subscription } = &self.subscribed;
        let options = subscription.options();
        if !options.forward {
            let options = Options { forward: true, ..options };
            self.subscribed.change(options, track.data.largest(), slice::from_ref(track));
        }
    }

    fn offer_openings(&self) {
        self.subscribed.track.offer_openings(&self.subscribed.subscription);
    }
}
