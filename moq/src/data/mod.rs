//! Objects on unidirectional streams and in datagrams (draft-18, section 11).

mod datagram;
mod fetch;
mod position;
mod scan;
mod subgroup;
#[cfg(test)]
mod tests;

pub use datagram::ObjectDatagram;
pub use fetch::{FetchDecoder, FetchEncoder, FetchItem, FetchObject, FetchParser, FetchStart, RangeEnd};
pub use position::{Field, Position};
pub use subgroup::{ObjectParser, ObjectStart, encode_object_header};

use super::{DecodeError, vi64};

/// The longest block of object properties that is accepted, in bytes.
///
/// The draft sets no limit. This limit bounds the memory that a peer can make a receiver hold for one object.
pub const MAX_PROPERTIES: u64 = 1 << 16;

/// The status of an object, which says what follows it in its group or track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The object exists, with a payload or an empty one.
    Normal,
    /// No object of the group has this ID or a larger one.
    EndOfGroup,
    /// No object of the track has this location or a larger one.
    EndOfTrack,
}

impl Status {
    fn from_wire(value: u64) -> Result<Self, DecodeError> {
        match value {
            0 => Ok(Self::Normal),
            3 => Ok(Self::EndOfGroup),
            4 => Ok(Self::EndOfTrack),
            _ => Err(DecodeError::violation("unknown object status")),
        }
    }

    const fn to_wire(self) -> u64 {
        match self {
            Self::Normal => 0,
            Self::EndOfGroup => 3,
            Self::EndOfTrack => 4,
        }
    }
}

const FETCH: u64 = 0x05;
const SETUP: u64 = 0x2f00;
const PADDING: u64 = 0x132b_3e28;

/// The first bytes of a unidirectional stream, which say what the stream carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamHeader {
    /// A control stream. Decoding consumes no bytes, since the stream type is also the type of the SETUP message.
    Setup,
    /// Objects of a subgroup.
    Subgroup(SubgroupHeader),
    /// Objects of the FETCH with this request ID.
    Fetch {
        /// The request ID of the FETCH.
        request_id: u64,
    },
    /// Padding: zeros that the receiver discards.
    Padding,
}

impl StreamHeader {
    /// Length of the longest stream header, in bytes.
    pub const MAX_LEN: usize = 4 * vi64::MAX_LEN + 1;

    /// Removes the stream header from the front of `input` and returns it. If the header is incomplete, returns `None`
    /// and leaves `input` unchanged.
    pub fn decode(input: &mut &[u8]) -> Result<Option<Self>, DecodeError> {
        let mut rest = *input;
        let Some(kind) = vi64::decode(&mut rest) else { return Ok(None) };
        let header = match kind {
            SETUP => return Ok(Some(Self::Setup)),
            PADDING => Some(Self::Padding),
            FETCH => vi64::decode(&mut rest).map(|request_id| Self::Fetch { request_id }),
            kind => SubgroupHeader::decode_fields(kind, &mut rest)?.map(Self::Subgroup),
        };
        if header.is_some() {
            *input = rest;
        }
        Ok(header)
    }
}

/// Appends FETCH_HEADER.
pub fn encode_fetch_header(request_id: u64, out: &mut Vec<u8>) {
    vi64::encode(FETCH, out);
    vi64::encode(request_id, out);
}

/// The way in which a SUBGROUP_HEADER encodes the subgroup's ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubgroupId {
    /// The subgroup ID is 0.
    Zero,
    /// The subgroup ID is the ID of the first object on the stream.
    FirstObject,
    /// The subgroup ID is a field of the header.
    Explicit(u64),
}

/// SUBGROUP_HEADER: names the track, group and subgroup whose objects the stream carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubgroupHeader {
    /// The track alias.
    pub alias: u64,
    /// The group ID.
    pub group: u64,
    /// The subgroup ID.
    pub subgroup: SubgroupId,
    /// The publisher's priority; `None` means the track's default.
    pub priority: Option<u8>,
    /// Whether every object has a block of properties, which may be empty.
    pub properties: bool,
    /// Whether the last object before FIN is the last one of the group.
    pub end_of_group: bool,
    /// Whether the first object on the stream is the first one published in the subgroup.
    pub first_object: bool,
}

impl SubgroupHeader {
    const PROPERTIES: u64 = 0x01;
    const ID_MODE: u64 = 0x06;
    const ID_FIRST_OBJECT: u64 = 0x02;
    const ID_EXPLICIT: u64 = 0x04;
    const END_OF_GROUP: u64 = 0x08;
    const SUBGROUP: u64 = 0x10;
    const DEFAULT_PRIORITY: u64 = 0x20;
    const FIRST_OBJECT: u64 = 0x40;

    /// Returns the stream type, whose bits say which fields are present.
    fn kind(&self) -> u64 {
        let flag = |set: bool, bit: u64| if set { bit } else { 0 };
        Self::SUBGROUP
            | flag(self.properties, Self::PROPERTIES)
            | flag(self.end_of_group, Self::END_OF_GROUP)
            | flag(self.priority.is_none(), Self::DEFAULT_PRIORITY)
            | flag(self.first_object, Self::FIRST_OBJECT)
            | match self.subgroup {
                SubgroupId::Zero => 0,
                SubgroupId::FirstObject => Self::ID_FIRST_OBJECT,
                SubgroupId::Explicit(_) => Self::ID_EXPLICIT,
            }
    }

    /// Appends the SUBGROUP_HEADER in its shortest form.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.encode_padded(0, out);
    }

    /// Appends the SUBGROUP_HEADER in exactly `len` bytes if a longer encoding of the alias makes that possible, or
    /// else in the fewest bytes.
    ///
    /// A relay that changes the alias uses this to keep the stream offsets of everything after the header.
    pub fn encode_padded(&self, len: usize, out: &mut Vec<u8>) {
        let start = out.len();
        vi64::encode(self.kind(), out);
        let alias = out.len();
        vi64::encode(self.alias, out);
        self.encode_behind_alias(out);
        let missing = (start + len).saturating_sub(out.len());
        let stretched = vi64::len(self.alias) + missing;
        if missing > 0 && stretched <= vi64::MAX_LEN {
            out.truncate(alias);
            vi64::encode_in(self.alias, stretched, out);
            self.encode_behind_alias(out);
        }
    }

    fn encode_behind_alias(&self, out: &mut Vec<u8>) {
        vi64::encode(self.group, out);
        if let SubgroupId::Explicit(id) = self.subgroup {
            vi64::encode(id, out);
        }
        out.extend(self.priority);
    }

    /// Reads the fields that follow the stream type `kind`. Returns `None` if `input` ends before the last of the
    /// fields.
    fn decode_fields(kind: u64, input: &mut &[u8]) -> Result<Option<Self>, DecodeError> {
        let set = |bit: u64| kind & bit != 0;
        if kind > 0x7f || !set(Self::SUBGROUP) {
            return Err(DecodeError::violation("unknown stream type"));
        }
        let mode = kind & Self::ID_MODE;
        if mode == Self::ID_MODE {
            return Err(DecodeError::violation("reserved subgroup ID mode"));
        }
        let mut fields = || {
            let alias = vi64::decode(input)?;
            let group = vi64::decode(input)?;
            let subgroup = match mode {
                Self::ID_FIRST_OBJECT => SubgroupId::FirstObject,
                Self::ID_EXPLICIT => SubgroupId::Explicit(vi64::decode(input)?),
                _ => SubgroupId::Zero,
            };
            let priority = match set(Self::DEFAULT_PRIORITY) {
                true => None,
                false => Some(*input.split_off_first()?),
            };
            Some(Self {
                alias,
                group,
                subgroup,
                priority,
                properties: set(Self::PROPERTIES),
                end_of_group: set(Self::END_OF_GROUP),
                first_object: set(Self::FIRST_OBJECT),
            })
        };
        Ok(fields())
    }
}
