//! Switching sets (draft-wilaw-moq-moqt-ssts): the subscriber names tracks with the same content, and the relay
//! forwards each group from the track that the path's bandwidth allows.

use std::{collections::BTreeMap, slice, sync::Arc, time::Instant};

use millrace_moq::{
    code,
    message::RequestError,
    param::Assignment,
    tracks::adapt::{
        ConnectionSample, Decider, NOBODY, RenditionChoice,
        sets::{self, Allocation},
    },
};
use millrace_transport::Connection;
use parking_lot::Mutex;
use tokio::time::sleep;

use super::{
    SubscribedTrack, SubscriptionEntry, Subscriptions,
    adapt::{LOOK, sample},
};
use crate::{
    hub::OperatorCounters,
    subscription::{SubscriptionOptions, SwitchingPlace},
    wire::SessionError,
};

/// The most tracks of a session that may be in switching sets.
const MAX_TRACKS: usize = 16;

/// The switching sets of one session.
#[derive(Default)]
pub(super) struct Sets(Mutex<SwitchingState>);

#[derive(Default)]
struct SwitchingState {
    sets: BTreeMap<u64, SwitchedSet>,
    /// The possible allocations of tracks to the switched sets, in rising order of the total bitrate (kbit/s) that each
    /// needs. An allocation lists the sets in the order of their numbers.
    rungs: Vec<(u64, Allocation)>,
    decider: Option<Decider>,
    /// True while a task checks the path's bandwidth for this session.
    watched: bool,
}

struct SwitchedSet {
    /// The switching set's properties, as the subscriber sent them last.
    properties: Assignment,
    /// The tracks of the switching set, in rising order of the throughput that they need.
    tracks: Vec<SwitchedTrack>,
    /// Chooses the track that each group is sent from. `None` until the switching set has had enough tracks to switch
    /// between.
    choice: Option<Arc<Mutex<RenditionChoice>>>,
}

struct SwitchedTrack {
    request_id: u64,
    /// The throughput that a track of a switching set needs, in kbit/s.
    threshold: u64,
    subscribed: SubscribedTrack,
    /// The track's index in the switching set's [`RenditionChoice`], or `NOBODY` if the set cannot choose the track
    /// yet.
    number: usize,
}

impl SubscriptionEntry {
    /// Adds the subscription to a switching set or changes the set, if `assignment` asks for it.
    ///
    /// # Errors
    /// Returns an error if the subscription cannot be added. The request fails then.
    pub(super) fn assign(&self, assignment: Option<&Assignment>) -> Result<(), RequestError> {
        let Some(assignment) = assignment else { return Ok(()) };
        let sample = sample(self.context().connection(), Instant::now());
        self.family.sets.assign(self.request_id, &self.subscribed, assignment, &sample)?;
        self.family.watch_path();
        Ok(())
    }
}

impl Subscriptions {
    /// Checks whether the subscriber may use this assignment to a switching set.
    ///
    /// # Errors
    /// An error in the outer `Result` closes the session, because the parameter is not allowed at all. An error in the
    /// inner `Result` refuses the request.
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

    /// Starts the task that checks the path's bandwidth, unless it runs already or no switching set has enough tracks
    /// to switch between.
    fn watch_path(self: &Arc<Self>) {
        if !self.sets.begin_watch() {
            return;
        }
        let family = Arc::clone(self);
        self.context.spawn(async move {
            let connection = family.context.connection();
            let counters = &family.context.hub().counters;
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
        subscribed: &SubscribedTrack,
        assignment: &Assignment,
        sample: &ConnectionSample,
    ) -> Result<(), RequestError> {
        let state = &mut *self.0.lock();
        // An update may change the throughput that a track of a switching set needs. It may not move the track to
        // another set.
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
        let set = state.sets.entry(assignment.set).or_insert_with(|| SwitchedSet {
            properties: *assignment,
            tracks: Vec::new(),
            choice: None,
        });
        set.properties = *assignment;
        set.put(request_id, subscribed, assignment.threshold);
        state.settle(sample);
        Ok(())
    }

    /// Removes the track of a subscription that is over from its switching set.
    pub fn remove(&self, request_id: u64, connection: &Connection) {
        let state = &mut *self.0.lock();
        let found = state.sets.values_mut().find_map(|set| set.take(request_id));
        if found.is_some() {
            state.sets.retain(|_, set| !set.tracks.is_empty());
            state.settle(&sample(connection, Instant::now()));
        }
    }

    /// Reports whether the task that checks the bandwidth has to be started.
    fn begin_watch(&self) -> bool {
        let state = &mut *self.0.lock();
        let begins = !state.watched && state.decider.is_some();
        state.watched |= begins;
        begins
    }

    /// Switches the next groups to the tracks that the path's bandwidth allows. Returns false if no switching set is
    /// left that has tracks to switch between.
    fn look(&self, connection: &Connection, counters: &OperatorCounters) -> bool {
        let now = Instant::now();
        let sample = sample(connection, now);
        let state = &mut *self.0.lock();
        let Some(decider) = &mut state.decider else {
            // The flag `watched` is changed under the lock that `begin_watch` holds to read it, so that at most one
            // task checks the bandwidth.
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

impl SwitchingState {
    /// Recomputes the allocations after a change of tracks or properties. Starts to switch the sets that now have
    /// enough tracks.
    fn settle(&mut self, sample: &ConnectionSample) {
        let switched = || self.sets.values().filter(|set| set.is_switched());
        let sets: Vec<_> = switched().map(SwitchedSet::allocation_needs).collect();
        if sets.is_empty() {
            (self.decider, self.rungs) = (None, Vec::new());
            return;
        }
        // The possible allocations (`rungs`) are sorted by total bitrate, as `Decider` expects.
        self.rungs = sets::rungs(&sets);
        let bits = |kbps: u64| kbps.saturating_mul(1000);
        let fits = |(kbps, _): &(u64, Allocation)| bits(*kbps) / 8 <= sample.bandwidth;
        // The bandwidth may still be unknown. At least one track is sent, so that the bandwidth can be measured.
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

impl SwitchedSet {
    fn is_switched(&self) -> bool {
        let activate = self.properties.activate;
        activate > 0 && self.tracks.len() as u64 >= activate
    }

    fn allocation_needs(&self) -> sets::SwitchingSet {
        let Assignment { rank, weight, .. } = self.properties;
        sets::SwitchingSet {
            rank,
            weight,
            thresholds: self.tracks.iter().map(|track| track.threshold).collect(),
        }
    }

    /// Adds a track to the switching set, or changes the throughput that the track needs.
    fn put(&mut self, request_id: u64, subscribed: &SubscribedTrack, threshold: u64) {
        let known = self.tracks.iter().position(|track| track.request_id == request_id);
        let known = known.map(|known| SwitchedTrack { threshold, ..self.tracks.remove(known) });
        let new = || SwitchedTrack { request_id, threshold, subscribed: subscribed.clone(), number: NOBODY };
        let track = known.unwrap_or_else(new);
        let number = track.number;
        let place = self.tracks.partition_point(|track| track.threshold <= threshold);
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

    /// Removes a track that has ended. The number of tracks that the switching set needs decreases by one, so that
    /// switching continues.
    fn take(&mut self, request_id: u64) -> Option<SwitchedTrack> {
        let place = self.tracks.iter().position(|track| track.request_id == request_id)?;
        let track = self.tracks.remove(place);
        self.choice.iter().for_each(|choice| choice.lock().remove(track.number));
        self.properties.activate = self.properties.activate.saturating_sub(1);
        Some(track)
    }

    /// Lets the switching set choose the track at index `place` for its next groups.
    fn join(&mut self, place: usize) {
        let (Some(choice), Some(track)) = (&self.choice, self.tracks.get_mut(place)) else { return };
        let newest = track.subscribed.track.data.largest().map(|largest| largest.group);
        let mut known = choice.lock();
        track.number = known.add(place);
        known.join(track.number, newest);
        drop(known);
        track
            .subscribed
            .subscription
            .take_place(SwitchingPlace { choice: Arc::clone(choice), number: track.number });
    }

    /// Starts to switch between the tracks of the switching set when it has enough tracks for the first time. A track
    /// that is forwarded already continues until the next group.
    fn begin(&mut self, wanted: Option<usize>) {
        if self.choice.is_some() {
            return;
        }
        let choice = Arc::new(Mutex::new(RenditionChoice::new(0, NOBODY)));
        self.choice = Some(Arc::clone(&choice));
        let forwards = |track: &SwitchedTrack| track.subscribed.subscription.options().forward;
        let up_to = self.tracks.get(..=wanted.unwrap_or(0)).unwrap_or(&self.tracks);
        let base = up_to.iter().rposition(forwards).or_else(|| self.tracks.iter().position(forwards));
        for place in 0..self.tracks.len() {
            self.join(place);
        }
        if let Some(base) = base {
            choice.lock().start_with(self.tracks[base].number);
        }
        self.tracks.iter().for_each(SwitchedTrack::forward);
    }

    fn choose(&self, wanted: Option<usize>, now: Instant, counters: &OperatorCounters) {
        let Some(choice) = &self.choice else { return };
        let of = |number: usize| self.tracks.iter().position(|track| track.number == number);
        let mut choice = choice.lock();
        let before = choice.current().member;
        let best = wanted.map_or(NOBODY, |place| choice.best(place));
        if before == best {
            return;
        }
        // The kernel may have opened streams of groups that userspace has not seen yet.
        let settled = of(before).is_none_or(|place| self.tracks[place].subscribed.subscription.withdraw(now));
        if settled {
            choice.switch(best);
        }
        let after = choice.current().member;
        drop(choice);
        if let Some(place) = of(after) {
            // The streams that the kernel had prepared for the previous track were withdrawn.
            self.tracks[place].offer_openings();
        }
        counters.count_switch(of(before), of(after));
    }
}

impl SwitchedTrack {
    /// Sets FORWARD for the subscription. In a switching set, the relay decides what is forwarded, not the subscriber.
    fn forward(&self) {
        let SubscribedTrack { track, subscription } = &self.subscribed;
        let options = subscription.options();
        if !options.forward {
            let options = SubscriptionOptions { forward: true, ..options };
            self.subscribed.change(options, track.data.largest(), slice::from_ref(track));
        }
    }

    fn offer_openings(&self) {
        self.subscribed.track.offer_openings(&self.subscribed.subscription);
    }
}
