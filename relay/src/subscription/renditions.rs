//! Serves a subscription from several renditions of its track.

use std::time::Instant;

use millrace_moq::{Filter, Location, code, tracks::adapt::RenditionChoice};

use super::{GroupOrigin, Subscription, SubscriptionEnd, SwitchingPlace, TrackRef};

impl Subscription {
    /// Lets groups come from any of `tracks`. The subscription's own track is `tracks[base]`. For each of the others,
    /// the caller has to call [`Self::join`]. Returns false, and changes nothing, if the subscription is served from
    /// several renditions already, or belongs to a switching set.
    pub fn adapt(&self, tracks: Vec<TrackRef>, base: usize) -> bool {
        let mut state = self.state.lock();
        let mut choice = RenditionChoice::new(tracks.len(), base);
        if !matches!(state.origin, GroupOrigin::Own) || self.renditions.set(tracks).is_err() {
            return false;
        }
        choice.join(base, self.track.data.largest().map(|largest| largest.group));
        state.origin = GroupOrigin::Renditions(choice);
        // The kernel has been sending the datagrams of the subscription's own track. It has to stop, since groups may
        // now come from other renditions.
        self.connection.offload(|offload| offload.recall_datagrams(self.owner));
        true
    }

    /// Makes the track with this number available to the subscription from now on. Its group `newest` has begun
    /// already.
    pub fn join(&self, number: u32, newest: Option<u64>) {
        let Some(member) = self.member(number) else { return };
        if let GroupOrigin::Renditions(choice) = &mut self.state.lock().origin {
            choice.join(member, newest);
        }
    }

    /// Records that the track with this number has ended. If it is the subscription's own track, the subscription ends.
    pub fn end_of(&self, number: u32, ended: &SubscriptionEnd) {
        if number == self.track.number {
            return self.end(ended.clone());
        }
        let Some(member) = self.member(number) else { return };
        if let GroupOrigin::Renditions(choice) = &mut self.state.lock().origin {
            choice.lose(member);
        }
    }

    /// Gives up the rendition with this number, because the subscriber's right to it has ended. Its open streams are
    /// reset. It is never the subscription's own track, whose request would end instead.
    pub fn give_up(&self, number: u32, now: Instant) {
        let Some(member) = self.member(number) else { return };
        let mut state = self.state.lock();
        let GroupOrigin::Renditions(choice) = &mut state.origin else { return };
        choice.lose(member);
        if choice.current().member == member {
            // The kernel opens streams only for the present rendition. Since that is the one given up, the kernel
            // abandons its streams.
            self.connection.offload(|offload| offload.abandon(now, self.owner));
        }
        let mut downstream = self.connection.downstream();
        let of_it = state.open.iter().filter(|(_, (track, _))| *track == number);
        of_it.for_each(|(key, _)| downstream.reset(*key, code::Reset::CANCELLED.0));
    }

    /// Switches the next groups to the best available rendition up to `wanted`. Returns the previous and the new
    /// rendition, if they differ.
    pub fn choose(&self, wanted: usize, now: Instant) -> Option<(usize, usize)> {
        let mut state = self.state.lock();
        let GroupOrigin::Renditions(choice) = &state.origin else { return None };
        let before = choice.current().member;
        let best = choice.best(wanted);
        if before == best {
            return None;
        }
        // The kernel may have opened streams of groups that userspace has not seen yet, so a switch has to wait for
        // them.
        let settled = self.connection.offload(|offload| offload.withdraw(now, self.owner));
        let GroupOrigin::Renditions(choice) = &mut state.origin else { return None };
        if settled {
            choice.switch(best);
        }
        Some((before, choice.current().member))
    }

    /// Limits the subscription to those groups that the switching set chooses for its track.
    pub fn take_place(&self, place: SwitchingPlace) {
        let mut state = self.state.lock();
        state.origin = GroupOrigin::Set(place);
        self.take_back(Instant::now());
    }

    /// Stops the kernel from opening streams for the subscription. Returns whether userspace knows the groups of all
    /// streams that the kernel has opened.
    pub fn withdraw(&self, now: Instant) -> bool {
        self.connection.offload(|offload| offload.withdraw(now, self.owner))
    }

    /// Returns the location at which the subscription continues. `largest` is the largest location of the
    /// subscription's own track; other renditions may have larger locations.
    pub(super) fn resume_at(&self, origin: &GroupOrigin, largest: Option<Location>) -> Location {
        let largests = || self.renditions.get().into_iter().flatten().map(|track| track.data.largest());
        let newest = largests().flatten().map(|largest| largest.group).max();
        let (GroupOrigin::Renditions(choice), Some(group)) = (origin, newest) else {
            return Filter::NextObject.start(largest);
        };
        let of_group =
            largests().nth(choice.member_of_group(group)).flatten().filter(|largest| largest.group == group);
        of_group.map_or(Location::new(group, 0), |largest| Filter::NextObject.start(Some(largest)))
    }

    /// Returns the index of the track with this number among the renditions.
    pub(super) fn member(&self, number: u32) -> Option<usize> {
        self.renditions.get()?.iter().position(|track| track.number == number)
    }

    /// Returns the track with this number: the subscription's own, or a rendition.
    pub(super) fn source(&self, number: u32) -> &TrackRef {
        let other = || self.renditions.get()?.iter().find(|track| track.number == number);
        if number == self.track.number { &self.track } else { other().unwrap_or(&self.track) }
    }
}
