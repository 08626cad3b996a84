//! Preparation and adoption of streams that the offload opens.

use std::{sync::Arc, time::Instant};

use millrace_quic::plane::downstream::{Downstream, Label, NewStream, StreamKey};
use tracing::debug;

use super::{
    LockedOffload, OffloadIngress, OpeningRequest, OpeningSide, OpeningTerms,
    openings::{OpeningEntry, TAG},
    state::Offloaded,
};

impl LockedOffload<'_> {
    /// Allows the offload to open a stream of this connection for the stream to which the ingress will be bound.
    /// Returns whether the offload may open it.
    pub fn prepare(&mut self, ingress: &Arc<dyn OffloadIngress>, terms: &OpeningTerms) -> bool {
        let Some(offloaded) = self.offloaded.as_deref_mut() else { return false };
        let place = (terms.owner, ingress.serial());
        let Some(offload) = offloaded.takes().map(Arc::clone) else { return false };
        // There is at most one opening for each owner and ingress.
        if offloaded.openings.waiting.contains_key(&place) {
            return false;
        }
        let tag = TAG | offloaded.openings.made;
        offloaded.openings.made += 1;
        let max_offset = self.downstream.initial_stream_credit();
        let request = OpeningRequest { tag, max_offset, terms: *terms };
        let delegation = match offloaded.places.within(|| offload.prepare(ingress, &request)) {
            Ok(delegation) => delegation,
            Err(declined) => {
                debug!(%declined, "userspace opens the track's streams to a subscriber: the kernel declined");
                return false;
            }
        };
        let entry = OpeningEntry {
            owner: terms.owner,
            ingress: place.1,
            label: Label { track: terms.track, group: 0 },
            priority: terms.level.to_be_bytes()[0],
            delegation: Some(delegation),
            key: None,
            adopted: false,
            returned: false,
        };
        offloaded.openings.by_tag.insert(tag, entry);
        offloaded.openings.waiting.insert(place, tag);
        true
    }

    /// Returns the stream that the offload has opened for `stream`, the owner's copy of the ingress. If it has opened
    /// none, `stream` is opened now. Returns `None` if the offload's stream has ended already.
    pub fn adopt(
        &mut self,
        now: Instant,
        ingress: &Arc<dyn OffloadIngress>,
        stream: NewStream,
    ) -> Option<StreamKey> {
        let Some((key, priority)) = self.take_opened(now, ingress, stream.owner) else {
            return Some(self.downstream.open(stream));
        };
        let changed = priority.is_some_and(|priority| priority != stream.priority.subscriber);
        if !self.downstream.adopt(key, stream) {
            return None;
        }
        // The offload keeps its old priority for the stream, so the plane takes the stream back.
        if changed {
            self.downstream.take_back(key);
        }
        Some(key)
    }

    /// Returns the stream that the offload has opened for this owner's copy of an ingress, and the priority that it
    /// used. Returns `None` if it has opened none, and never will.
    fn take_opened(
        &mut self,
        now: Instant,
        ingress: &Arc<dyn OffloadIngress>,
        owner: u64,
    ) -> Option<(StreamKey, Option<u8>)> {
        let offloaded = self.offloaded.as_deref_mut()?;
        offloaded.drain(now, self.downstream);
        let tag = *offloaded.openings.waiting.get(&(owner, ingress.serial()))?;
        ingress.on_adopted();
        let key = offloaded.settle(self.downstream, tag)?;
        let priority = offloaded.openings.by_tag.get(&tag).map(|opening| opening.priority);
        offloaded.openings.forget(tag);
        Some((key, priority))
    }

    /// Resets the stream that the offload has opened for this owner's copy of an ingress, because the owner does not
    /// want it.
    pub fn refuse(&mut self, now: Instant, ingress: &Arc<dyn OffloadIngress>, owner: u64) {
        let Some(offloaded) = self.offloaded.as_deref_mut() else { return };
        offloaded.drain(now, self.downstream);
        if let Some(tag) = offloaded.openings.waiting.get(&(owner, ingress.serial())).copied() {
            offloaded.abandon(self.downstream, &[tag]);
        }
    }

    /// Stops the offload from opening streams for an owner, until [`Self::prepare`] allows it again. Returns whether
    /// the owner has adopted all streams that the offload has opened.
    pub fn withdraw(&mut self, now: Instant, owner: u64) -> bool {
        let Some(offloaded) = self.drained(now) else { return true };
        for tag in offloaded.openings.owner_streams(owner) {
            let Some(opening) = offloaded.openings.by_tag.get(&tag) else { continue };
            let closed = opening.delegation.as_ref().is_some_and(|one| one.close() == OpeningSide::Userspace);
            if closed {
                offloaded.openings.take(tag);
                offloaded.openings.by_tag.remove(&tag);
            }
        }
        offloaded.openings.owner_streams(owner).is_empty()
    }

    /// Stops the offload from opening streams for an owner, and resets those that the owner has not adopted.
    pub fn abandon(&mut self, now: Instant, owner: u64) {
        let Some(offloaded) = self.offloaded.as_deref_mut() else { return };
        offloaded.drain(now, self.downstream);
        let tags = offloaded.openings.owner_streams(owner);
        offloaded.abandon(self.downstream, &tags);
    }
}

impl Offloaded {
    /// Removes an opening from those that wait for adoption. Returns its stream, or `None` if the offload has opened
    /// none, and never will.
    fn settle(&mut self, downstream: &mut Downstream, tag: u64) -> Option<StreamKey> {
        self.openings.take(tag);
        let opening = self.openings.by_tag.get(&tag)?;
        if opening.key.is_some() {
            return opening.key;
        }
        match opening.delegation.as_ref()?.close() {
            OpeningSide::Userspace => {
                self.openings.by_tag.remove(&tag);
                None
            }
            OpeningSide::Offload(id) => self.openings.key(tag, id, downstream, &mut self.delegations),
        }
    }

    /// Gives up openings that will not be adopted, and resets streams that were opened for them.
    pub fn abandon(&mut self, downstream: &mut Downstream, tags: &[u64]) {
        for tag in tags {
            if self.openings.by_tag.get(tag).is_none_or(|opening| opening.adopted) {
                continue;
            }
            if let Some(key) = self.settle(downstream, *tag) {
                downstream.abandon(key);
                self.openings.forget(*tag);
            }
        }
    }

    /// Stops the offload from opening any streams. Streams that it has opened count as delegated, and can still be
    /// adopted later.
    pub(super) fn close_openings(&mut self, downstream: &mut Downstream) {
        for tag in self.openings.prepared() {
            let delegation = self.openings.by_tag.get(&tag).and_then(|opening| opening.delegation.as_ref());
            match delegation.map(|delegation| delegation.close()) {
                Some(OpeningSide::Userspace) => {
                    self.openings.take(tag);
                    self.openings.by_tag.remove(&tag);
                }
                Some(OpeningSide::Offload(id)) => {
                    self.openings.key(tag, id, downstream, &mut self.delegations);
                }
                None => {}
            }
        }
    }
}
