//! The location of an object in its track.

use super::wire::WireReader;
use super::{DecodeError, vi64};

/// Group and object ID of an object. Locations compare in the order of the track.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Location {
    /// The group ID.
    pub group: u64,
    /// The object ID.
    pub object: u64,
}

impl Location {
    /// Makes a location.
    pub const fn new(group: u64, object: u64) -> Self {
        Self { group, object }
    }

    /// Returns the exclusive end of a FETCH range whose last location is `self`, as drafts 18 and 19 encode it. If the
    /// range includes the whole last group, the object ID is 0.
    pub(super) fn exclusive(self) -> Self {
        Self { object: self.object.checked_add(1).unwrap_or(0), ..self }
    }

    /// Returns the last location of a FETCH range whose exclusive end is `self`. Object ID 0 in `self` means that the
    /// range includes the whole group.
    pub(super) fn inclusive(self) -> Self {
        Self { object: self.object.checked_sub(1).unwrap_or(u64::MAX), ..self }
    }

    pub(super) fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        Ok(Self { group: input.vi64()?, object: input.vi64()? })
    }

    pub(super) fn encode(self, out: &mut Vec<u8>) {
        vi64::encode(self.group, out);
        vi64::encode(self.object, out);
    }
}

/// The order of groups. It sets the priority of a subscription's groups, and the order in which a FETCH response is
/// sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum GroupOrder {
    /// The group with the smallest ID comes first.
    #[default]
    Ascending,
    /// The group with the largest ID comes first.
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
    fn locations_are_ordered_by_group_and_then_by_object_id() {
        assert!(Location::new(1, 9) < Location::new(2, 0));
        assert!(Location::new(2, 0) < Location::new(2, 1));
    }
}
