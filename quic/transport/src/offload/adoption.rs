//! Preparing streams that the offload opens, and adopting them.

use std::sync::Arc;

use millrace_quic::plane::downstream::{Downstream, Label, NewStream, StreamKey};
use tracing::debug;

use super::{
    Ingress, Opened, Opener, Opens,
    openings::{Adopted, Opening, TAG},
    state::Offloaded,
};

impl Offloaded {
    /// Has it open a stream for whatever the ingress will be bound to. Returns whether it may.
    pub fn prepare(&mut self, downstream: &Downstream, ingress: &Arc<dyn Ingress>, opens: &Opens) -> bool {
        let place = (opens.owner, ingress.serial());
        let Some(offload) = self.takes().map(Arc::clone) else { return false };
        if self.openings.waiting.contains_key(&place) {
            return false;
        }
        let tag = TAG | self.openings.made;
        self.openings.made += 1;
        let opened = Opened { tag, max_offset: downstream.initial_stream_credit(), opens: *opens };
        let delegation = match self.places.within(|| offload.prepare(ingress, &opened)) {
            Ok(delegation) => delegation,
            Err(declined) => {
                debug!(%declined, "streams are opened in userspace");
                return false;
            }
        };
        let opening = Opening {
            owner: opens.owner,
            ingress: place.1,
            label: Label { track: opens.track, group: 0 },
            priority: opens.level.to_be_bytes()[0],
            delegation: Some(delegation),
            key: None,
            adopted: false,
            returned: false,
        };
        self.openings.by_tag.insert(tag, opening);
        self.openings.waiting.insert(place, tag);
        true
    }

    /// It is known what arrives at the ingress, and that `stream` is the subscription's part in it. All that it has sent
    /// has been drained.
    pub fn adopt(
        &mut self,
        downstream: &mut Downstream,
        ingress: &Arc<dyn Ingress>,
        stream: NewStream,
    ) -> (Adopted, Option<NewStream>) {
        let Some(tag) = self.openings.waiting.get(&(stream.owner, ingress.serial())).copied() else {
            return (Adopted::Unopened, Some(stream));
        };
        ingress.on_adopted();
        let Some(key) = self.settle(downstream, tag) else { return (Adopted::Unopened, Some(stream)) };
        let priority = self.openings.by_tag.get(&tag).map(|opening| opening.priority);
        self.openings.forget(tag);
        let changed = priority.is_some_and(|priority| priority != stream.priority.subscriber);
        if !downstream.adopt(key, stream) {
            return (Adopted::Over, None);
        }
        if changed {
            downstream.take_back(key);
        }
        (Adopted::Stream(key), None)
    }

    /// The stream of an opening that nobody asks for after this; `None`: there is none, and will not be.
    fn settle(&mut self, downstream: &mut Downstream, tag: u64) -> Option<StreamKey> {
        self.openings.take(tag);
        let opening = self.openings.by_tag.get(&tag)?;
        if opening.key.is_some() {
            return opening.key;
        }
        match opening.delegation.as_ref()?.close() {
            Opener::Userspace => {
                self.openings.by_tag.remove(&tag);
                None
            }
            Opener::Offload(id) => self.openings.key(tag, id, downstream, &mut self.delegations),
        }
    }

    /// Nothing will come that these were prepared for, as far as the subscription knows: streams that were opened are reset.
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

    /// The subscription is over.
    pub fn abandon_all(&mut self, downstream: &mut Downstream, owner: u64) {
        let tags = self.openings.of_owner(owner);
        self.abandon(downstream, &tags);
    }

    /// The subscription does not want what arrives at the ingress.
    pub fn refuse(&mut self, downstream: &mut Downstream, owner: u64, ingress: &Arc<dyn Ingress>) {
        if let Some(tag) = self.openings.waiting.get(&(owner, ingress.serial())).copied() {
            self.abandon(downstream, &[tag]);
        }
    }

    /// Has the offload open no more streams for the subscription, until more is prepared. Returns whether there is none that it
    /// has opened and nobody adopted.
    pub fn withdraw(&mut self, owner: u64) -> bool {
        for tag in self.openings.of_owner(owner) {
            let Some(opening) = self.openings.by_tag.get(&tag) else { continue };
            let closed = opening.delegation.as_ref().is_some_and(|one| one.close() == Opener::Userspace);
            if closed {
                self.openings.take(tag);
                self.openings.by_tag.remove(&tag);
            }
        }
        self.openings.of_owner(owner).is_empty()
    }

    /// Stops the offload from opening streams for anybody. Those that it has opened are as if they were delegated: whoever asks for one
    /// later still finds it.
    pub(super) fn close_openings(&mut self, downstream: &mut Downstream) {
        for tag in self.openings.prepared() {
            let delegation = self.openings.by_tag.get(&tag).and_then(|opening| opening.delegation.as_ref());
            match delegation.map(|delegation| delegation.close()) {
                Some(Opener::Userspace) => {
                    self.openings.take(tag);
                    self.openings.by_tag.remove(&tag);
                }
                Some(Opener::Offload(id)) => {
                    self.openings.key(tag, id, downstream, &mut self.delegations);
                }
                None => {}
            }
        }
    }
}
