//! A subscription that is served from several renditions of its track.

use std::time::Instant;

use millrace_moq::{Filter, Location, code, tracks::adapt::Choice};

use super::{Ended, Origin, Place, Subscription, TrackRef};

impl Subscription {
    /// From now on groups may come from any of `tracks`, of which its own is the one at `base`. Each of them has to tell
    /// the subscription of what comes from when on: [`Self::join`]. Returns false, and changes nothing, if this was said before or
    /// a switching set chooses by now.
    pub fn adapt(&self, tracks: Vec<TrackRef>, base: usize) -> bool {
        let mut state = self.state.lock();
        let mut choice = Choice::new(tracks.len(), base);
        if !matches!(state.origin, Origin::Own) || self.renditions.set(tracks).is_err() {
            return false;
        }
        choice.join(base, self.track.data.largest().map(|largest| largest.group));
        state.origin = Origin::Renditions(choice);
        // Of another rendition they would be other datagrams.
        self.connection.offload(|offload| offload.recall_datagrams(self.owner));
        true
    }

    /// The track of this number tells of its groups from now on; `newest` is there already.
    pub fn join(&self, number: u32, newest: Option<u64>) {
        let Some(member) = self.member(number) else { return };
        if let Origin::Renditions(choice) = &mut self.state.lock().origin {
            choice.join(member, newest);
        }
    }

    /// Nothing more comes of the track of this number: of the subscription's own, it ends.
    pub fn end_of(&self, number: u32, ended: &Ended) {
        if number == self.track.number {
            return self.end(ended.clone());
        }
        let Some(member) = self.member(number) else { return };
        if let Origin::Renditions(choice) = &mut self.state.lock().origin {
            choice.lose(member);
        }
    }

    /// The subscriber may not have the rendition of this number any more: what is open of it is reset, and nothing more comes
    /// of it. Never the subscription's own track, whose request ends instead.
    pub fn give_up(&self, number: u32, now: Instant) {
        let Some(member) = self.member(number) else { return };
        let mut state = self.state.lock();
        let Origin::Renditions(choice) = &mut state.origin else { return };
        choice.lose(member);
        if choice.current().member == member {
            // What the offload has opened is of this one.
            self.connection.offload(|offload| offload.abandon(now, self.owner));
        }
        let mut downstream = self.connection.downstream();
        let of_it = state.open.iter().filter(|(_, (track, _))| *track == number);
        of_it.for_each(|(key, _)| downstream.reset(*key, code::Reset::CANCELLED.0));
    }

    /// Has the groups that have not begun come from the best rendition up to `wanted` that can be had. Returns where they
    /// came from and where they come from now, if something was to change.
    pub fn choose(&self, wanted: usize, now: Instant) -> Option<(usize, usize)> {
        let mut state = self.state.lock();
        let Origin::Renditions(choice) = &state.origin else { return None };
        let (before, best) = (choice.current().member, choice.best(wanted));
        if before == best {
            return None;
        }
        // What the offload has opened may be of any group.
        let settled = self.connection.offload(|offload| offload.withdraw(now, self.owner));
        let Origin::Renditions(choice) = &mut state.origin else { return None };
        if settled {
            choice.switch(best);
        }
        Some((before, choice.current().member))
    }

    /// From now on it gets those groups of its track that the switching set has come from there.
    pub fn take_place(&self, place: Place) {
        let mut state = self.state.lock();
        state.origin = Origin::Set(place);
        self.take_back(Instant::now());
    }

    /// Has the offload open no more streams for it. Returns whether there is none of which it is not known yet what it carries.
    pub fn withdraw(&self, now: Instant) -> bool {
        self.connection.offload(|offload| offload.withdraw(now, self.owner))
    }

    /// What comes next of what the subscription gets; `largest` is that of its own track, which others are not level with.
    pub(super) fn resume_at(&self, origin: &Origin, largest: Option<Location>) -> Location {
        let largests = || self.renditions.get().into_iter().flatten().map(|track| track.data.largest());
        let newest = largests().flatten().map(|largest| largest.group).max();
        let (Origin::Renditions(choice), Some(group)) = (origin, newest) else {
            return Filter::NextObject.start(largest);
        };
        let of_group = largests().nth(choice.of(group)).flatten().filter(|largest| largest.group == group);
        of_group.map_or(Location::new(group, 0), |largest| Filter::NextObject.start(Some(largest)))
    }

    /// The rendition's place among those that the subscription is served from.
    pub(super) fn member(&self, number: u32) -> Option<usize> {
        self.renditions.get()?.iter().position(|track| track.number == number)
    }

    /// The track of this number, which tells of something.
    pub(super) fn source(&self, number: u32) -> &TrackRef {
        let other = || self.renditions.get()?.iter().find(|track| track.number == number);
        if number == self.track.number { &self.track } else { other().unwrap_or(&self.track) }
    }
}
