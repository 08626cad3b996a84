//! Where an object is in its track.

use super::wire::Reader;
use super::{DecodeError, vi64};

/// Group and object ID: the place of an object in its track, in track order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    pub group: u64,
    pub object: u64,
}

impl Location {
    pub const fn new(group: u64, object: u64) -> Self {
        Self { group, object }
    }

    /// The location behind this one where a whole group has the object ID 0, as FETCH has its end in drafts 18 and 19.
    pub(super) fn exclusive(self) -> Self {
        Self { object: self.object.checked_add(1).unwrap_or(0), ..self }
    }

    /// The last location before such an end.
    pub(super) fn inclusive(self) -> Self {
        Self { object: self.object.checked_sub(1).unwrap_or(u64::MAX), ..self }
    }

    pub(super) fn decode(input: &mut Reader) -> Result<Self, DecodeError> {
        Ok(Self { group: input.vi64()?, object: input.vi64()? })
    }

    pub(super) fn encode(self, out: &mut Vec<u8>) {
        vi64::encode(self.group, out);
        vi64::encode(self.object, out);
    }
}

/// The order of groups, in priority for a subscription and on the wire for a fetch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GroupOrder {
    #[default]
    Ascending,
    Descending,
}

impl GroupOrder {
    pub(super) const fn from_wire(value: u64) -> Option<Self> {
        match value {
            1 => Some(Self::Ascending),
            2 => Some(Self::Descending),
            _ => None,
        }
    }

    pub(super) const fn to_wire(self) -> u8 {
        match self {
            Self::Ascending => 1,
            Self::Descending => 2,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn locations_are_in_track_order() {
        assert!(Location::new(1, 9) < Location::new(2, 0));
        assert!(Location::new(2, 0) < Location::new(2, 1));
    }
}
