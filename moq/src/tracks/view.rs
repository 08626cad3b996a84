//! A subgroup as it is sent to one subscriber: a header for that subscriber, followed by the subgroup's bytes.

use std::{ops::Range, sync::Arc, time::Instant};

use millrace_quic::plane::source::{Source, SourceExtent};

use super::subgroup::{SubgroupObject, SubgroupStream};
use crate::{Status, SubgroupHeader, SubgroupId, data::encode_object_header};

/// A subgroup stream for one subscriber, from any object of the subgroup on.
///
/// It begins with a prefix: the preamble of the subscriber's streams and a SUBGROUP_HEADER for the subscriber. If the
/// view starts inside the subgroup, the prefix also contains the first object's header, with an absolute ID. The
/// subgroup's bytes follow unchanged, at offsets that differ by a constant.
pub struct SubgroupView {
    subgroup: Arc<SubgroupStream>,
    prefix: Vec<u8>,
    /// The offset in the subgroup's bytes from which the view continues after its prefix (WebTransport's stream header
    /// and the SUBGROUP_HEADER).
    from: u64,
    /// The largest object ID in the view, if the view may end before the subgroup does.
    last: Option<u64>,
}

impl SubgroupView {
    /// Makes a view of the whole subgroup with another track alias. If possible, the alias is encoded in as many bytes
    /// as the publisher's alias, so that stream offsets stay the same.
    pub fn whole(subgroup: Arc<SubgroupStream>, alias: u64) -> Self {
        let header = SubgroupHeader { alias, ..*subgroup.header() };
        let mut prefix = Vec::with_capacity(32);
        header.encode_padded(subgroup.header_len(), &mut prefix);
        Self { subgroup, prefix, from: 0, last: None }
    }

    /// Makes a view of the subgroup from `object` on. `object` must not be the first object of the subgroup.
    pub fn from_object(subgroup: Arc<SubgroupStream>, alias: u64, object: &SubgroupObject) -> Self {
        // The view does not contain the subgroup's first object, so its header has to state the subgroup's ID.
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
        // `object` is the first one on the subscriber's stream, so its ID is encoded in full.
        encode_object_header(None, start.id, properties, start.payload_len, status, &mut prefix);
        Self { subgroup, prefix, from: start.payload, last: None }
    }

    /// Inserts `preamble` (WebTransport's stream header) at the start of the view.
    pub fn with_preamble(mut self, preamble: &[u8]) -> Self {
        self.prefix.splice(0..0, preamble.iter().copied());
        self
    }

    /// Ends the view after the object with ID `last`, unless `last` is `None`. Where that object ends is known only
    /// when the next object begins. The kernel would forward bytes beyond that end, so it must not forward this view.
    pub fn up_to(self, last: Option<u64>) -> Self {
        Self { last, ..self }
    }

    /// Reports whether the view may end before the subgroup does, because it has a last object.
    pub fn is_cut(&self) -> bool {
        self.last.is_some()
    }

    /// Returns the subgroup.
    pub fn subgroup(&self) -> &Arc<SubgroupStream> {
        &self.subgroup
    }

    /// Returns the difference between a byte's offset in this view and its offset in the publisher's stream.
    pub fn shift(&self) -> i64 {
        self.prefix.len() as i64 - self.from as i64 - self.subgroup.body() as i64
    }

    /// Returns the offset in the publisher's stream up to which bytes have arrived or are skipped by the view. From
    /// that offset on, [`Self::shift`] converts offsets between the two streams.
    pub fn received(&self) -> u64 {
        self.subgroup.body() + self.subgroup.extent().len.max(self.from)
    }
}

impl Source for SubgroupView {
    fn extent(&self) -> SourceExtent {
        let SourceExtent { len, end } = match self.last {
            None => self.subgroup.extent(),
            Some(last) => self.subgroup.extent_to(last),
        };
        SourceExtent { len: self.prefix.len() as u64 + len.saturating_sub(self.from), end }
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
        // The range of the view's first object includes the view's prefix (preamble and SUBGROUP_HEADER). If the view
        // starts inside the subgroup, the prefix contains that object's header.
        let start = object.start.checked_sub(self.from).filter(|start| *start > 0);
        Some(start.map_or(0, |start| start + prefix)..object.end.checked_sub(self.from)? + prefix)
    }
}
