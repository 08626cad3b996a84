//! Where an object is in its track, and which objects a subscription asks for.

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

/// Which objects of a track a subscription asks for (draft-18, "Subscription Filters").
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// From the group after the largest one.
    NextGroupStart,
    /// From the object after the largest one.
    LargestObject,
    AbsoluteStart(Location),
    /// From `start` to the last object of `end_group`, which is not before `start.group`.
    AbsoluteRange {
        start: Location,
        end_group: u64,
    },
}

impl Filter {
    /// The first location that passes, if `largest` is the track's largest so far.
    pub fn start(&self, largest: Option<Location>) -> Location {
        match (*self, largest) {
            (Self::AbsoluteStart(start) | Self::AbsoluteRange { start, .. }, _) => start,
            (_, None) => Location::default(),
            (Self::NextGroupStart, Some(largest)) => Location::new(largest.group.saturating_add(1), 0),
            (Self::LargestObject, Some(largest)) => match largest.object.checked_add(1) {
                Some(object) => Location { object, ..largest },
                None => Location::new(largest.group.saturating_add(1), 0),
            },
        }
    }

    /// The last group that passes, if the filter has an end.
    pub fn end_group(&self) -> Option<u64> {
        match *self {
            Self::AbsoluteRange { end_group, .. } => Some(end_group),
            _ => None,
        }
    }

    pub(super) fn decode(input: &mut Reader) -> Result<Self, DecodeError> {
        Ok(match input.vi64()? {
            1 => Self::NextGroupStart,
            2 => Self::LargestObject,
            3 => Self::AbsoluteStart(Location::decode(input)?),
            4 => {
                let start = Location::decode(input)?;
                let end_group = start
                    .group
                    .checked_add(input.vi64()?)
                    .ok_or(DecodeError::violation("the filter's end group is above 2^64 - 1"))?;
                Self::AbsoluteRange { start, end_group }
            }
            _ => return Err(DecodeError::violation("unknown subscription filter type")),
        })
    }

    pub(super) fn encode(self, out: &mut Vec<u8>) {
        match self {
            Self::NextGroupStart => vi64::encode(1, out),
            Self::LargestObject => vi64::encode(2, out),
            Self::AbsoluteStart(start) => {
                vi64::encode(3, out);
                start.encode(out);
            }
            Self::AbsoluteRange { start, end_group } => {
                vi64::encode(4, out);
                start.encode(out);
                vi64::encode(end_group.saturating_sub(start.group), out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filters_start_relative_to_the_largest_object() {
        let largest = Some(Location::new(7, 3));
        assert_eq!(Filter::NextGroupStart.start(largest), Location::new(8, 0));
        assert_eq!(Filter::LargestObject.start(largest), Location::new(7, 4));
        assert_eq!(Filter::LargestObject.start(None), Location::new(0, 0));
        assert_eq!(Filter::AbsoluteStart(Location::new(2, 1)).start(largest), Location::new(2, 1));
    }

    #[test]
    fn an_end_group_past_the_last_one_is_refused() {
        let mut body = vec![4];
        Location::new(u64::MAX, 0).encode(&mut body);
        vi64::encode(1, &mut body);
        let error = Filter::decode(&mut Reader::new(body.into())).unwrap_err();
        assert_eq!(error.code, crate::moq::code::Session::PROTOCOL_VIOLATION);
    }

    #[test]
    fn locations_are_in_track_order() {
        assert!(Location::new(1, 9) < Location::new(2, 0));
        assert!(Location::new(2, 0) < Location::new(2, 1));
    }
}
