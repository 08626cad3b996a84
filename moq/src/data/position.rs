//! The state of a parser of a subgroup stream. Another parser, such as the kernel's, can continue from this state.

use super::super::vi64;

/// The field that the next byte of a subgroup stream belongs to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum Field {
    /// The stream's type.
    #[default]
    Type = 0,
    /// The track alias.
    Alias,
    /// The group ID.
    Group,
    /// The subgroup ID.
    SubgroupId,
    /// The publisher's priority.
    Priority,
    /// The object's ID, encoded as the difference to the previous ID minus 1.
    Object,
    /// Length of the object's properties.
    PropertiesLength,
    /// The object's properties.
    Properties,
    /// Length of the payload.
    Length,
    /// The object's status.
    Status,
    /// The object's payload.
    Payload,
    /// A byte of a stream whose contents are not parsed as fields. Any byte value is valid, and the stream may end
    /// after any byte.
    Opaque,
}

/// The state of a parser after some bytes of a subgroup stream, so that another parser can continue from there. Fields
/// that have no meaning in a state are 0. Two parsers that have read the same bytes are therefore in equal states,
/// however those bytes were divided.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Position {
    /// Stream offset of the next byte.
    pub offset: u64,
    /// The field that the next byte belongs to.
    pub field: Field,
    /// The bits read so far of a variable-length integer, if the next byte is within one.
    pub value: u64,
    /// Number of bytes that are missing from the variable-length integer in `value`. 0 if the next byte is not within
    /// an integer.
    pub missing: u8,
    /// Number of bytes of properties or payload still to be read.
    pub left: u64,
    /// ID of the last object whose ID is complete.
    pub previous: Option<u64>,
    /// Whether the object whose header is being read has properties that are not empty.
    pub with_properties: bool,
    /// Whether the group or track has ended, so that no object may follow.
    pub ended: bool,
    /// The stream's type; 0 until it is known.
    pub kind: u8,
}

impl Position {
    /// Makes the parser state for a stream whose structure is not parsed.
    pub fn opaque(offset: u64) -> Self {
        Self { offset, field: Field::Opaque, ..Self::default() }
    }

    /// Advances the state over `partial`, the received bytes of an object's incomplete header, which are well-formed.
    /// `offset` stays the same, because it already includes these bytes.
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
                    // The parser has checked that the object ID does not overflow.
                    previous.wrapping_add(value).wrapping_add(1)
                }));
                let properties = self.kind & super::SubgroupHeader::PROPERTIES as u8 != 0;
                self.field = if properties { Field::PropertiesLength } else { Field::Length };
            }
            Field::PropertiesLength => {
                (self.left, self.with_properties) = (value, value > 0);
                self.field = if value > 0 { Field::Properties } else { Field::Length };
            }
            // The field is `Length`, the payload length. If it completes no header, the payload length is 0 and a
            // status follows.
            _ => self.field = Field::Status,
        }
    }

    fn inside_integer(self, bytes: &[u8]) -> Self {
        let width = bytes.first().map_or(0, |first| vi64::encoded_len(*first));
        // The first byte of an integer begins with the length in unary, which is masked out here.
        let top = bytes.first().map_or(0, |first| first & 0xffu8.checked_shr(width as u32).unwrap_or(0));
        let value = bytes.iter().skip(1).fold(u64::from(top), |value, byte| value << 8 | u64::from(*byte));
        Self { value, missing: (width - bytes.len()) as u8, ..self }
    }
}
