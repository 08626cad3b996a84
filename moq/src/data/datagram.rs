//! OBJECT_DATAGRAM: an object in one datagram.

use bytes::{Buf, Bytes};

use super::super::{DecodeError, vi64};
use super::{MAX_PROPERTIES, Status};

const PADDING: u64 = 0x132b_3e29;

const PROPERTIES: u64 = 0x01;
const END_OF_GROUP: u64 = 0x02;
const ZERO_OBJECT_ID: u64 = 0x04;
const DEFAULT_PRIORITY: u64 = 0x08;
const STATUS: u64 = 0x20;
const KNOWN: u64 = 0x2f;

const TRUNCATED: DecodeError = DecodeError::violation("a datagram ends inside its header");

/// An object that is sent as one datagram.
///
/// ```
/// use bytes::Bytes;
/// use millrace_moq::ObjectDatagram;
///
/// let object = ObjectDatagram {
///     alias: 7,
///     group: 1,
///     object: 0,
///     priority: None,
///     end_of_group: false,
///     properties: Bytes::new(),
///     status: None,
///     payload: Bytes::from_static(b"20 ms of audio"),
/// };
/// let mut bytes = Vec::new();
/// object.encode(&mut bytes);
/// assert_eq!(ObjectDatagram::decode(Bytes::from(bytes))?, Some(object));
/// # Ok::<(), millrace_moq::DecodeError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectDatagram {
    /// The track alias.
    pub alias: u64,
    /// The group ID.
    pub group: u64,
    /// The object ID.
    pub object: u64,
    /// The publisher's priority; `None` means the track's default.
    pub priority: Option<u8>,
    /// Whether this is the last object of its group. It is never set together with `status`.
    pub end_of_group: bool,
    /// The block of properties without its length, empty if there is none.
    pub properties: Bytes,
    /// The status of an object without a payload.
    pub status: Option<Status>,
    /// The payload; empty if there is a status.
    pub payload: Bytes,
}

impl ObjectDatagram {
    /// Reads a whole datagram. Properties and payload in the result share `datagram`'s memory. Returns `None` for a
    /// padding datagram.
    pub fn decode(datagram: Bytes) -> Result<Option<Self>, DecodeError> {
        let mut rest = &datagram[..];
        let kind = vi64::decode(&mut rest).ok_or(TRUNCATED)?;
        if kind == PADDING {
            return Ok(None);
        }
        let set = |bit: u64| kind & bit != 0;
        // The draft forbids the end-of-group flag together with a status, because the status itself says whether the
        // group ends.
        if kind & !KNOWN != 0 || (set(STATUS) && set(END_OF_GROUP)) {
            return Err(DecodeError::violation("unknown datagram type"));
        }
        let mut integer = || vi64::decode(&mut rest).ok_or(TRUNCATED);
        let alias = integer()?;
        let group = integer()?;
        let object = if set(ZERO_OBJECT_ID) { 0 } else { integer()? };
        let priority = match set(DEFAULT_PRIORITY) {
            true => None,
            false => Some(*rest.split_off_first().ok_or(TRUNCATED)?),
        };
        let properties = if set(PROPERTIES) { read_properties(&datagram, &mut rest)? } else { Bytes::new() };
        let status = match set(STATUS) {
            true => Some(Status::from_wire(vi64::decode(&mut rest).ok_or(TRUNCATED)?)?),
            false => None,
        };
        if set(STATUS) && !rest.is_empty() {
            return Err(DecodeError::violation("a payload after a status"));
        }
        if set(PROPERTIES) && !matches!(status, None | Some(Status::Normal)) {
            return Err(DecodeError::violation("properties on an object that is not normal"));
        }
        let payload = datagram.slice(datagram.len() - rest.len()..);
        let end_of_group = set(END_OF_GROUP);
        Ok(Some(Self { alias, group, object, priority, end_of_group, properties, status, payload }))
    }

    /// Reports whether the object is the last one of its group, by flag or status.
    pub fn ends_group(&self) -> bool {
        self.end_of_group || self.status == Some(Status::EndOfGroup)
    }

    /// Appends the datagram without the payload to `out`.
    pub fn encode_header(&self, out: &mut Vec<u8>) {
        debug_assert!(self.status.is_none() || (self.payload.is_empty() && !self.end_of_group));
        let flag = |set: bool, bit: u64| if set { bit } else { 0 };
        let kind = flag(!self.properties.is_empty(), PROPERTIES)
            | flag(self.end_of_group, END_OF_GROUP)
            | flag(self.object == 0, ZERO_OBJECT_ID)
            | flag(self.priority.is_none(), DEFAULT_PRIORITY)
            | flag(self.status.is_some(), STATUS);
        vi64::encode(kind, out);
        vi64::encode(self.alias, out);
        vi64::encode(self.group, out);
        if self.object != 0 {
            vi64::encode(self.object, out);
        }
        out.extend(self.priority);
        if !self.properties.is_empty() {
            vi64::encode(self.properties.len() as u64, out);
            out.extend_from_slice(&self.properties);
        }
        if let Some(status) = self.status {
            vi64::encode(status.to_wire(), out);
        }
    }

    /// Appends the whole datagram to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.encode_header(out);
        out.extend_from_slice(&self.payload);
    }
}

fn read_properties(datagram: &Bytes, rest: &mut &[u8]) -> Result<Bytes, DecodeError> {
    let len = vi64::decode(rest).ok_or(TRUNCATED)?;
    if len == 0 || len > MAX_PROPERTIES {
        return Err(DecodeError::violation("an empty or too long block of properties in a datagram"));
    }
    let (properties, behind) = rest.split_at_checked(len as usize).ok_or(TRUNCATED)?;
    *rest = behind;
    // Slices share the datagram's memory, so the properties are not copied.
    let mut shared = datagram.slice(..datagram.len() - behind.len());
    shared.advance(shared.len() - properties.len());
    Ok(shared)
}
