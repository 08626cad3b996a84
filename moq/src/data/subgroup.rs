//! Encoding and decoding of the objects on a subgroup stream.

use bytes::Bytes;

use super::super::{DecodeError, vi64};
use super::scan::{ScanStop, ScannedFields, Scanner};
use super::{Field, Position, Status, SubgroupHeader};

/// An object whose header has arrived completely. Its payload may arrive later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectStart {
    /// The object ID.
    pub id: u64,
    /// The block of properties without its length, empty if there is none.
    pub properties: Bytes,
    /// Length of the payload, in bytes.
    pub payload_len: u64,
    /// The status, which is present exactly when the payload is empty.
    pub status: Option<Status>,
    /// Stream offset of the first byte of the object's header.
    pub start: u64,
    /// Stream offset of the payload's first byte, which is also the end of the header.
    pub payload: u64,
}

impl ObjectStart {
    /// Returns the stream offset of the first byte after the object.
    pub const fn end(&self) -> u64 {
        self.payload + self.payload_len
    }
}

/// A parser that finds the objects in the bytes of a subgroup stream after its header. The bytes may arrive in pieces
/// of any size.
#[derive(Clone, Debug)]
pub struct ObjectParser {
    scanner: Scanner,
    /// The stream's type.
    kind: u8,
    has_properties: bool,
    previous: Option<u64>,
    ended: bool,
}

impl ObjectParser {
    /// Makes a parser that starts after `header`, which ended at stream offset `offset`.
    pub fn new(header: &SubgroupHeader, offset: u64) -> Self {
        Self {
            scanner: Scanner::new(offset),
            kind: header.kind() as u8,
            has_properties: header.properties,
            previous: None,
            ended: false,
        }
    }

    /// Consumes `chunk` up to the end of the next object header and returns that object. Returns `None` once all of
    /// `chunk` is consumed. The caller has to call this method until it returns `None`.
    pub fn next(&mut self, chunk: &mut &[u8]) -> Result<Option<ObjectStart>, DecodeError> {
        if self.ended && !chunk.is_empty() {
            return Err(DecodeError::violation("an object after the end of its group or track"));
        }
        let previous = self.previous;
        let has_properties = self.has_properties;
        let found = self.scanner.next(chunk, |fields| read_object(fields, previous, has_properties))?;
        let Some(found) = found else { return Ok(None) };
        let object = ObjectStart { start: found.start, payload: found.payload, ..found.header };
        self.previous = Some(object.id);
        self.ended = matches!(object.status, Some(Status::EndOfGroup | Status::EndOfTrack));
        Ok(Some(object))
    }

    /// Returns the stream offset of the next byte that the parser expects.
    pub fn offset(&self) -> u64 {
        self.scanner.offset()
    }

    /// Returns the parser's state, from which another parser can continue.
    pub fn position(&self) -> Position {
        let position = Position {
            offset: self.scanner.offset(),
            field: Field::Object,
            previous: self.previous,
            ended: self.ended,
            kind: self.kind,
            ..Position::default()
        };
        match self.scanner.payload_left() {
            0 => position.inside_header(self.scanner.partial()),
            left => Position { field: Field::Payload, left, ..position },
        }
    }

    /// Returns the number of bytes that the parser stores of an incomplete object header.
    pub fn incomplete(&self) -> usize {
        self.scanner.incomplete()
    }

    /// Reports whether every object parsed so far is complete, so that the stream may end after the bytes parsed so
    /// far.
    pub fn at_boundary(&self) -> bool {
        self.scanner.at_boundary()
    }

    /// Checks that the stream may end with FIN after the bytes parsed so far.
    ///
    /// # Errors
    /// Fails if the stream ends inside an object.
    pub fn finish(&self) -> Result<(), DecodeError> {
        match self.at_boundary() {
            true => Ok(()),
            false => Err(DecodeError::violation("a stream ends inside an object")),
        }
    }
}

fn read_object(
    fields: &mut ScannedFields<'_>,
    previous: Option<u64>,
    has_properties: bool,
) -> Result<(ObjectStart, u64), ScanStop> {
    let delta = fields.vi64()?;
    let id = match previous {
        None => Some(delta),
        Some(previous) => previous.checked_add(delta).and_then(|id| id.checked_add(1)),
    };
    let id = id.ok_or(DecodeError::violation("an object ID is above 2^64 - 1"))?;
    let properties = if has_properties { fields.properties()? } else { &[] };
    let payload_len = fields.vi64()?;
    let status = match payload_len {
        0 => Some(Status::from_wire(fields.vi64()?)?),
        _ => None,
    };
    if !properties.is_empty() && !matches!(status, None | Some(Status::Normal)) {
        return Err(DecodeError::violation("properties on an object that is not normal").into());
    }
    let properties = Bytes::copy_from_slice(properties);
    Ok((ObjectStart { id, properties, payload_len, status, start: 0, payload: 0 }, payload_len))
}

/// Appends the header of an object of a subgroup stream.
///
/// `previous` is the ID of the previous object on the same stream, if any, and is less than `id`. `properties` must be
/// `Some`, with an empty block if there are none, exactly if the stream's header says that objects have properties.
/// `status` is encoded only if `payload_len` is 0.
pub fn encode_object_header(
    previous: Option<u64>,
    id: u64,
    properties: Option<&[u8]>,
    payload_len: u64,
    status: Status,
    out: &mut Vec<u8>,
) {
    debug_assert!(previous.is_none_or(|previous| previous < id), "object IDs ascend");
    let delta = previous.map_or(id, |previous| id.wrapping_sub(previous).wrapping_sub(1));
    vi64::encode(delta, out);
    if let Some(properties) = properties {
        vi64::encode(properties.len() as u64, out);
        out.extend_from_slice(properties);
    }
    vi64::encode(payload_len, out);
    if payload_len == 0 {
        vi64::encode(status.to_wire(), out);
    }
}
