//! Encoding and decoding of the objects in a FETCH response.

use bytes::Bytes;

use super::super::{DecodeError, Draft, GroupOrder, Location, vi64};
use super::scan::{ScanStop, ScannedFields, Scanner};

const SUBGROUP_MODE: u64 = 0x03;
const SUBGROUP_PRIOR: u64 = 0x01;
const SUBGROUP_NEXT: u64 = 0x02;
const SUBGROUP_EXPLICIT: u64 = 0x03;
const OBJECT: u64 = 0x04;
const GROUP: u64 = 0x08;
const PRIORITY: u64 = 0x10;
const PROPERTIES: u64 = 0x20;
const DATAGRAM: u64 = 0x40;
const END_NON_EXISTENT: u64 = 0x8c;
const END_UNKNOWN: u64 = 0x10c;
/// The marker for the end of a range whose objects timed out. It exists in draft-20 and later.
const END_TIMED_OUT: u64 = 0x20c;

/// The header of an object in a FETCH response; `payload_len` bytes of payload follow it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchObject {
    /// The object's location.
    pub location: Location,
    /// The subgroup ID; `None` if the object was sent as a datagram.
    pub subgroup: Option<u64>,
    /// The publisher's priority; a lower value is sent first.
    pub priority: u8,
    /// The block of properties without its length, empty if there is none.
    pub properties: Bytes,
    /// Length of the payload, in bytes. A FETCH response carries no status: it leaves out objects that do not exist.
    pub payload_len: u64,
}

/// The reason why a range has no objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeEnd {
    /// The objects do not exist.
    NonExistent,
    /// The sender does not know whether the objects exist.
    Unknown,
    /// The objects did not arrive from upstream in time. Drafts 18 and 19 report such a range as unknown.
    TimedOut,
}

/// One item of a FETCH response: an object, or a range without objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FetchItem {
    /// An object; its payload follows.
    Object(FetchObject),
    /// A range from the location after the previous item up to and including `last`. It has no objects, or the sender
    /// does not know whether it has.
    Range {
        /// The last location of the range.
        last: Location,
        /// The reason why the range has no objects.
        end: RangeEnd,
    },
}

impl FetchItem {
    const fn location(&self) -> Location {
        match self {
            Self::Object(object) => object.location,
            Self::Range { last, .. } => *last,
        }
    }
}

/// Fields of the previous items of a FETCH response. The encoding of the next item may omit fields that have the same
/// values as in the previous item.
#[derive(Clone, Copy, Debug, Default)]
struct Prior {
    /// Location of the last item, object or range.
    location: Option<Location>,
    /// Subgroup and priority of the last object.
    object: Option<(Option<u64>, u8)>,
}

impl Prior {
    fn observe(&mut self, item: &FetchItem) {
        self.location = Some(item.location());
        if let FetchItem::Object(object) = item {
            self.object = Some((object.subgroup, object.priority));
        }
    }

    fn subgroup(&self) -> Option<u64> {
        self.object.and_then(|(subgroup, _)| subgroup)
    }

    fn priority(&self) -> Option<u8> {
        self.object.map(|(_, priority)| priority)
    }
}

const NO_PRIOR: DecodeError =
    DecodeError::violation("a fetched object refers to a previous one that does not exist");
const ID_RANGE: DecodeError = DecodeError::violation("an ID of a fetched object is outside 0 to 2^64 - 1");

/// A decoder of the items of a FETCH response. After each object, the caller must remove the payload from the input
/// before it decodes the next item.
#[derive(Clone, Debug)]
pub struct FetchDecoder {
    draft: Draft,
    order: GroupOrder,
    prior: Prior,
}

impl FetchDecoder {
    /// Makes a decoder for a response in `order`, the group order that the FETCH asked for.
    pub fn new(draft: Draft, order: GroupOrder) -> Self {
        Self { draft, order, prior: Prior::default() }
    }

    /// Removes one item from the front of `input` and returns it. If the item is incomplete, returns `None` and leaves
    /// `input` unchanged.
    pub fn decode(&mut self, input: &mut &[u8]) -> Result<Option<FetchItem>, DecodeError> {
        let mut fields = ScannedFields::new(input);
        match self.read(&mut fields) {
            Ok(item) => {
                *input = fields.rest();
                self.prior.observe(&item);
                Ok(Some(item))
            }
            Err(ScanStop::Need(_)) => Ok(None),
            Err(ScanStop::Bad(error)) => Err(error),
        }
    }

    fn read(&self, fields: &mut ScannedFields<'_>) -> Result<FetchItem, ScanStop> {
        let range = |fields: &mut ScannedFields<'_>, end| {
            // The location of a range is encoded in full, while an object's is relative to the previous one (draft-18,
            // "End of Range").
            let last = Location { group: fields.vi64()?, object: fields.vi64()? };
            Ok(FetchItem::Range { last, end })
        };
        match fields.vi64()? {
            END_NON_EXISTENT => range(fields, RangeEnd::NonExistent),
            END_UNKNOWN => range(fields, RangeEnd::Unknown),
            END_TIMED_OUT if self.draft.has_timed_out_ranges() => range(fields, RangeEnd::TimedOut),
            0x80.. => Err(DecodeError::violation("unknown serialization flags in a fetch").into()),
            flags => self.read_object(flags, fields).map(FetchItem::Object),
        }
    }

    fn read_object(&self, flags: u64, fields: &mut ScannedFields<'_>) -> Result<FetchObject, ScanStop> {
        let set = |bit: u64| flags & bit != 0;
        let group = self.read_group(set(GROUP), fields)?;
        let subgroup = match flags & SUBGROUP_MODE {
            // For an object that was sent as a datagram, the subgroup mode bits have no meaning.
            _ if set(DATAGRAM) => None,
            SUBGROUP_PRIOR => Some(self.prior.subgroup().ok_or(NO_PRIOR)?),
            SUBGROUP_NEXT => Some(self.prior.subgroup().ok_or(NO_PRIOR)?.checked_add(1).ok_or(ID_RANGE)?),
            SUBGROUP_EXPLICIT => Some(fields.vi64()?),
            _ => Some(0),
        };
        let object = self.read_object_id(set(GROUP), set(OBJECT), fields)?;
        let priority = if set(PRIORITY) { fields.u8()? } else { self.prior.priority().ok_or(NO_PRIOR)? };
        let properties = if set(PROPERTIES) { fields.properties()? } else { &[] };
        let payload_len = fields.vi64()?;
        Ok(FetchObject {
            location: Location { group, object },
            subgroup,
            priority,
            properties: Bytes::copy_from_slice(properties),
            payload_len,
        })
    }

    fn read_group(&self, present: bool, fields: &mut ScannedFields<'_>) -> Result<u64, ScanStop> {
        match (self.prior.location, present) {
            (None, true) => fields.vi64(),
            (None, false) => Err(NO_PRIOR.into()),
            (Some(prior), false) => Ok(prior.group),
            (Some(prior), true) => {
                let step = fields.vi64()?.checked_add(1).ok_or(ID_RANGE)?;
                let group = match self.order {
                    GroupOrder::Ascending => prior.group.checked_add(step),
                    GroupOrder::Descending => prior.group.checked_sub(step),
                };
                Ok(group.ok_or(ID_RANGE)?)
            }
        }
    }

    /// Reads an object ID. It is encoded in full if the group is new, and relative to the previous ID otherwise. An
    /// omitted ID means the previous ID plus one, even in a new group.
    fn read_object_id(
        &self,
        new_group: bool,
        present: bool,
        fields: &mut ScannedFields<'_>,
    ) -> Result<u64, ScanStop> {
        match (self.prior.location, present) {
            (None, false) => Err(NO_PRIOR.into()),
            (None, true) => fields.vi64(),
            (Some(_), true) if new_group => fields.vi64(),
            (Some(prior), true) => Ok(prior.object.checked_add(fields.vi64()?).ok_or(ID_RANGE)?),
            (Some(prior), false) => Ok(prior.object.checked_add(1).ok_or(ID_RANGE)?),
        }
    }
}

/// An encoder of the items of a FETCH response, in the order that the FETCH asked for.
#[derive(Clone, Debug)]
pub struct FetchEncoder {
    draft: Draft,
    order: GroupOrder,
    prior: Prior,
}

impl FetchEncoder {
    /// Makes an encoder for a response in `order`.
    pub fn new(draft: Draft, order: GroupOrder) -> Self {
        Self { draft, order, prior: Prior::default() }
    }

    /// Appends an item. In the response's group order, the item's location must come after the previous item's
    /// location.
    pub fn encode(&mut self, item: &FetchItem, out: &mut Vec<u8>) {
        match item {
            FetchItem::Object(object) => self.encode_object(object, out),
            FetchItem::Range { last, end } => {
                let flags = match end {
                    RangeEnd::NonExistent => END_NON_EXISTENT,
                    RangeEnd::TimedOut if self.draft.has_timed_out_ranges() => END_TIMED_OUT,
                    RangeEnd::Unknown | RangeEnd::TimedOut => END_UNKNOWN,
                };
                vi64::encode(flags, out);
                last.encode(out);
            }
        }
        self.prior.observe(item);
    }

    fn encode_object(&self, object: &FetchObject, out: &mut Vec<u8>) {
        let group = self.group_field(object.location);
        let id = self.object_field(object.location);
        let (mode, subgroup) = self.subgroup_field(object.subgroup);
        let priority = (self.prior.priority() != Some(object.priority)).then_some(object.priority);
        let flag = |set: bool, bit: u64| if set { bit } else { 0 };
        let flags = mode
            | flag(group.is_some(), GROUP)
            | flag(id.is_some(), OBJECT)
            | flag(priority.is_some(), PRIORITY)
            | flag(!object.properties.is_empty(), PROPERTIES);
        vi64::encode(flags, out);
        for field in [group, subgroup, id].into_iter().flatten() {
            vi64::encode(field, out);
        }
        out.extend(priority);
        if !object.properties.is_empty() {
            vi64::encode(object.properties.len() as u64, out);
            out.extend_from_slice(&object.properties);
        }
        vi64::encode(object.payload_len, out);
    }

    fn group_field(&self, location: Location) -> Option<u64> {
        let Some(prior) = self.prior.location else { return Some(location.group) };
        if prior.group == location.group {
            return None;
        }
        let step = match self.order {
            GroupOrder::Ascending => location.group.checked_sub(prior.group),
            GroupOrder::Descending => prior.group.checked_sub(location.group),
        };
        debug_assert!(step.is_some(), "groups follow the order of the response");
        Some(step.unwrap_or(0).saturating_sub(1))
    }

    fn object_field(&self, location: Location) -> Option<u64> {
        match self.prior.location {
            // An object ID that is the previous ID plus one may be omitted, even in a new group.
            Some(prior) if prior.object.checked_add(1) == Some(location.object) => None,
            Some(prior) if prior.group == location.group => {
                debug_assert!(prior.object < location.object, "object IDs ascend in a group");
                Some(location.object.saturating_sub(prior.object))
            }
            _ => Some(location.object),
        }
    }

    fn subgroup_field(&self, subgroup: Option<u64>) -> (u64, Option<u64>) {
        let prior = self.prior.subgroup();
        match subgroup {
            None => (DATAGRAM, None),
            Some(0) => (0, None),
            Some(id) if prior == Some(id) => (SUBGROUP_PRIOR, None),
            Some(id) if prior.and_then(|prior| prior.checked_add(1)) == Some(id) => (SUBGROUP_NEXT, None),
            Some(id) => (SUBGROUP_EXPLICIT, Some(id)),
        }
    }
}

/// An item and its stream offsets in the response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchStart {
    /// The object, or the range without objects.
    pub item: FetchItem,
    /// Stream offset of the item's first byte.
    pub start: u64,
    /// Stream offset of the payload's first byte, which is also the end of the header.
    pub payload: u64,
}

/// A parser that finds the items in the bytes of a FETCH response after its header. The bytes may arrive in pieces of
/// any size.
#[derive(Clone, Debug)]
pub struct FetchParser {
    scanner: Scanner,
    decoder: FetchDecoder,
}

impl FetchParser {
    /// Makes a parser that starts after FETCH_HEADER, at stream offset `offset`.
    pub fn new(draft: Draft, order: GroupOrder, offset: u64) -> Self {
        Self { scanner: Scanner::new(offset), decoder: FetchDecoder::new(draft, order) }
    }

    /// Consumes `chunk` up to the end of the next item's header and returns that item. Returns `None` once all of
    /// `chunk` is consumed. The caller has to call this method until it returns `None`.
    pub fn next(&mut self, chunk: &mut &[u8]) -> Result<Option<FetchStart>, DecodeError> {
        let decoder = &self.decoder;
        let found = self.scanner.next(chunk, |fields| {
            let item = decoder.read(fields)?;
            let payload_len = match &item {
                FetchItem::Object(object) => object.payload_len,
                FetchItem::Range { .. } => 0,
            };
            Ok((item, payload_len))
        })?;
        let Some(found) = found else { return Ok(None) };
        self.decoder.prior.observe(&found.header);
        Ok(Some(FetchStart { item: found.header, start: found.start, payload: found.payload }))
    }

    /// Returns the stream offset of the next byte that the parser expects.
    pub fn offset(&self) -> u64 {
        self.scanner.offset()
    }

    /// Returns the number of bytes that the parser stores of an incomplete item header. It never stores payloads.
    pub fn incomplete(&self) -> usize {
        self.scanner.incomplete()
    }

    /// Reports whether every item parsed so far is complete, so that the stream may end after the bytes parsed so far.
    pub fn at_boundary(&self) -> bool {
        self.scanner.at_boundary()
    }
}
