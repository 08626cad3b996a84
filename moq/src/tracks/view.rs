//! A subgroup as one subscriber gets it: a header of its own, then the subgroup's bytes.

use std::{ops::Range, sync::Arc, time::Instant};

use millrace_quic::plane::source::{Extent, Source};

use super::subgroup::{Object, Subgroup};
use crate::{Status, SubgroupHeader, SubgroupId, data::encode_object_header};

/// A subgroup stream for one subscriber, from some object on.
///
/// It begins with a prefix: what the subscriber's streams begin with, its own SUBGROUP_HEADER and, when it joins inside the subgroup, the first
/// object's header with an absolute ID. The subgroup's bytes follow unchanged, at offsets that differ from the
/// subgroup's by a constant.
pub struct View {
    subgroup: Arc<Subgroup>,
    prefix: Vec<u8>,
    /// The offset in the subgroup at which the view goes on behind its prefix.
    from: u64,
    /// The largest object ID of the view, if it is to end before the subgroup does.
    last: Option<u64>,
}

impl View {
    /// The whole subgroup under another track alias. The alias is encoded in as many bytes as the publisher's where
    /// it fits, so that offsets stay the same.
    pub fn whole(subgroup: Arc<Subgroup>, alias: u64) -> Self {
        let header = SubgroupHeader { alias, ..*subgroup.header() };
        let mut prefix = Vec::with_capacity(32);
        header.encode_padded(subgroup.header_len(), &mut prefix);
        Self { subgroup, prefix, from: 0, last: None }
    }

    /// The subgroup from `object` on, which is not its first.
    pub fn from_object(subgroup: Arc<Subgroup>, alias: u64, object: &Object) -> Self {
        let id = match subgroup.header().subgroup {
            SubgroupId::FirstObject => SubgroupId::Explicit(subgroup.id().unwrap_or_default()),
            other => other,
        };
        let header = SubgroupHeader { alias, first_object: false, subgroup: id, ..*subgroup.header() };
        let mut prefix = Vec::with_capacity(64);
        header.encode(&mut prefix);
        let start = &object.start;
        let properties = header.properties.then_some(&start.properties[..]);
        let status = start.status.unwrap_or(Status::Normal);
        encode_object_header(None, start.id, properties, start.payload_len, status, &mut prefix);
        Self { subgroup, prefix, from: start.payload, last: None }
    }

    /// With `preamble` in front of everything.
    pub fn behind(mut self, preamble: &[u8]) -> Self {
        self.prefix.splice(0..0, preamble.iter().copied());
        self
    }

    /// Up to the object with the ID `last`, if that is said. Nobody else may send on what it has then: where it ends is known when
    /// the next object begins.
    pub fn up_to(self, last: Option<u64>) -> Self {
        Self { last, ..self }
    }

    /// Whether it may end before the subgroup does.
    pub fn is_cut(&self) -> bool {
        self.last.is_some()
    }

    pub fn subgroup(&self) -> &Arc<Subgroup> {
        &self.subgroup
    }

    /// What to add to an offset in the publisher's stream to get the offset in this one.
    pub fn shift(&self) -> i64 {
        self.prefix.len() as i64 - self.from as i64 - self.subgroup.body() as i64
    }

    /// The offset in the publisher's stream up to which bytes have arrived or are not part of the view. From there on,
    /// offsets differ by [`Self::shift`].
    pub fn received(&self) -> u64 {
        self.subgroup.body() + self.subgroup.extent().len.max(self.from)
    }
}

impl Source for View {
    fn extent(&self) -> Extent {
        let Extent { len, end } = match self.last {
            None => self.subgroup.extent(),
            Some(last) => self.subgroup.extent_to(last),
        };
        Extent { len: self.prefix.len() as u64 + len.saturating_sub(self.from), end }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> usize {
        let prefix = usize::try_from(offset).ok().and_then(|offset| self.prefix.get(offset..)).unwrap_or(&[]);
        let head = prefix.len().min(buf.len());
        buf[..head].copy_from_slice(&prefix[..head]);
        if head == buf.len() {
            return head;
        }
        let raw = offset + head as u64 - self.prefix.len() as u64 + self.from;
        head + self.subgroup.read(raw, &mut buf[head..])
    }

    fn is_evicted(&self) -> bool {
        self.subgroup.is_evicted()
    }

    fn received_at(&self, offset: u64) -> Option<Instant> {
        self.subgroup.received_at(offset.saturating_sub(self.prefix.len() as u64) + self.from)
    }

    fn object_at(&self, offset: u64) -> Option<Range<u64>> {
        let prefix = self.prefix.len() as u64;
        let object = self.subgroup.object_at(offset.saturating_sub(prefix) + self.from)?;
        // The prefix belongs to the first object, and the header of one that is joined at is in it.
        let start = object.start.checked_sub(self.from).filter(|start| *start > 0);
        Some(start.map_or(0, |start| start + prefix)..object.end.checked_sub(self.from)? + prefix)
    }
}
