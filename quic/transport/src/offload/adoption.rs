//! Prepares streams that the kernel offload may open. Once the data plane has the source of such a stream's data, the
//! data plane adopts the stream, so that it can retransmit the data.

use std::{sync::Arc, time::Instant};

use millrace_quic::plane::downstream::{Downstream, Label, NewStream, StreamKey};
use tracing::debug;

use super::{
    LockedOffload, OffloadIngress, OpeningRequest, OpeningSide, OpeningTerms,
    openings::{OpeningEntry, TAG},
    state::Offloaded,
};

impl LockedOffload<'_> {
    /// Allows the kernel offload to open a stream on this subscriber's connection as the copy of a publisher's stream
    /// that has not begun. `ingress` is the handle of that future stream. Returns whether the offload may open it.
    pub fn prepare(&mut self, ingress: &Arc<dyn OffloadIngress>, terms: &OpeningTerms) -> bool {
        let Some(offloaded) = self.offloaded.as_deref_mut() else { return false };
        let place = (terms.owner, ingress.serial());
        let Some(offload) = offloaded.takes().map(Arc::clone) else { return false };
        // At most one outgoing stream is prepared for each owner (subscription) and incoming stream.
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
                debug!(%declined, "the kernel declined to open the track's streams to a subscriber: userspace opens the streams");
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

    /// Returns the stream that the kernel offload has opened as this subscription's copy of the incoming stream
    /// `ingress`, and gives it the source of `stream`. If the offload has opened none, the data plane opens `stream`.
    /// Returns `None` if the offload's stream has ended already.
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
        // If the subscriber priority has changed, the kernel offload would keep sending at the previous one, so the
        // data plane recalls the stream.
        if changed {
            self.downstream.take_back(key);
        }
        Some(key)
    }

    /// Returns the stream that the kernel offload has opened as this subscription's copy of the incoming stream
    /// `ingress`, and the subscriber priority at which the offload sends. Returns `None` if the offload has opened no
    /// such stream, and never will.
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

    /// Resets the stream that the kernel offload has opened as this subscription's copy of the incoming stream
    /// `ingress`, because the subscription does not want it.
    pub fn refuse(&mut self, now: Instant, ingress: &Arc<dyn OffloadIngress>, owner: u64) {
        let Some(offloaded) = self.offloaded.as_deref_mut() else { return };
        offloaded.drain(now, self.downstream);
        if let Some(tag) = offloaded.openings.waiting.get(&(owner, ingress.serial())).copied() {
            offloaded.abandon(self.downstream, &[tag]);
        }
    }

    /// Stops the kernel offload from opening streams for an owner (subscription), until [`Self::prepare`] allows
    /// opening again. Returns whether the data plane has the source of every stream that the offload has opened for the
    /// owner.
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

    /// Stops the kernel offload from opening streams for an owner (subscription), and resets opened streams whose
    /// source the data plane does not have.
    pub fn abandon(&mut self, now: Instant, owner: u64) {
        let Some(offloaded) = self.offloaded.as_deref_mut() else { return };
        offloaded.drain(now, self.downstream);
        let tags = offloaded.openings.owner_streams(owner);
        offloaded.abandon(self.downstream, &tags);
    }
}

impl Offloaded {
    /// Marks a prepared stream as adopted by the data plane, which has or refuses its source. Returns the stream that
    /// the kernel offload has opened, or `None` if the offload has opened none, and never will.
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

    /// Withdraws prepared streams whose source the data plane will not get, and resets those that the kernel offload
    /// has already opened.
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

    /// Stops the kernel offload from opening any streams. Streams that it has opened count as delegated, and can still
    /// be adopted later.
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
