//! Where a parser stands in a subgroup stream, so that another one can go on from there.

use super::super::vi64;

/// What the next byte of a subgroup stream is of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Field {
    #[default]
    Type = 0,
    Alias,
    Group,
    SubgroupId,
    Priority,
    /// An object's ID, less the one before and 1.
    Object,
    PropertiesLength,
    Properties,
    /// Of the payload.
    Length,
    Status,
    Payload,
    /// A stream without framing: any bytes, and any end.
    Opaque,
}

/// A place in a subgroup stream, and all that whoever goes on there has to know of what was before.
///
/// What does not matter at a field is 0: after the same bytes two parsers are at equal positions, however the bytes came.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Of the next byte in the stream.
    pub offset: u64,
    pub field: Field,
    /// The integer that is being read, as far as it is there.
    pub value: u64,
    /// Its bytes that are to come; 0: none of it is there.
    pub missing: u8,
    /// Bytes of properties or payload that are to come.
    pub left: u64,
    /// ID of the last object whose ID is there.
    pub previous: Option<u64>,
    /// The object whose header is being read has properties, not empty ones.
    pub with_properties: bool,
    /// No object follows.
    pub ended: bool,
    /// The stream's type, once that is there.
    pub kind: u8,
}

impl Position {
    /// In a stream whose bytes have no framing.
    pub fn opaque(offset: u64) -> Self {
        Self { offset, field: Field::Opaque, ..Self::default() }
    }

    /// Goes into an object's header that is not all there, but well-formed so far; the offset stays.
    pub(super) fn inside_header(mut self, mut partial: &[u8]) -> Self {
        while !partial.is_empty() {
            if self.field == Field::Properties {
                let taken = usize::try_from(self.left).map_or(partial.len(), |left| left.min(partial.len()));
                partial = &partial[taken..];
                self.left -= taken as u64;
                if self.left == 0 {
                    self.field = Field::Length;
                }
                continue;
            }
            match vi64::decode(&mut partial) {
                Some(value) => self.take(value),
                None => return self.inside_integer(partial),
            }
        }
        self
    }

    fn take(&mut self, value: u64) {
        match self.field {
            Field::Object => {
                self.previous = Some(self.previous.map_or(value, |previous| {
                    previous.wrapping_add(value).wrapping_add(1) // checked by the parser
                }));
                let properties = self.kind & super::SubgroupHeader::PROPERTIES as u8 != 0;
                self.field = if properties { Field::PropertiesLength } else { Field::Length };
            }
            Field::PropertiesLength => {
                (self.left, self.with_properties) = (value, value > 0);
                self.field = if value > 0 { Field::Properties } else { Field::Length };
            }
            // A payload's length would have completed the header.
            _ => self.field = Field::Status,
        }
    }

    fn inside_integer(self, bytes: &[u8]) -> Self {
        let width = bytes.first().map_or(0, |first| vi64::encoded_len(*first));
        let top = bytes.first().map_or(0, |first| first & 0xffu8.checked_shr(width as u32).unwrap_or(0));
        let value = bytes.iter().skip(1).fold(u64::from(top), |value, byte| value << 8 | u64::from(*byte));
        Self { value, missing: (width - bytes.len()) as u8, ..self }
    }
}
