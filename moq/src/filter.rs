//! Location filters: which objects a subscription or a FETCH asks for (draft-22, "Location Filters").

use super::wire::{WireReader, WireWriter};
use super::{DecodeError, Location};

/// A location filter. Relative filters refer to the track's largest object at the time when the request is processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filter {
    /// All objects, as without a filter. A REQUEST_UPDATE uses it to remove an earlier filter.
    All,
    /// Starts this many groups before the group that follows the largest one: 0 means the next group, 1 the current
    /// group.
    Relative(u64),
    /// Starts with the object after the largest one.
    NextObject,
    /// Starts with the object at this location.
    AbsoluteStart(Location),
    /// The objects from `start` to `end_object` of `end_group`, or to the end of that group. `end_group` is not
    /// before `start.group`.
    AbsoluteRange {
        /// The location of the first object.
        start: Location,
        /// The ID of the last group.
        end_group: u64,
        /// The ID of the last object in the last group; `None` for the whole group.
        end_object: Option<u64>,
    },
}

/// Filter types of drafts 18 and 19.
mod tag {
    pub const NEXT_GROUP: u64 = 1;
    pub const LARGEST_OBJECT: u64 = 2;
    pub const ABSOLUTE_START: u64 = 3;
    pub const ABSOLUTE_RANGE: u64 = 4;
}

/// Filter types of draft-22.
mod kind {
    pub const ALL: u64 = 0;
    pub const RELATIVE: u64 = 1;
    pub const ABSOLUTE_START: u64 = 2;
    pub const TO_GROUP: u64 = 3;
    pub const TO_OBJECT: u64 = 4;
    pub const NEXT_OBJECT: u64 = 5;
}

impl Filter {
    /// The filter that starts with the group after the largest one.
    pub const NEXT_GROUP: Self = Self::Relative(0);

    /// Makes a filter for the objects from `start` to `last`, both inclusive.
    pub fn range(start: Location, last: Location) -> Self {
        let end_object = Some(last.object).filter(|object| *object != u64::MAX);
        Self::AbsoluteRange { start, end_group: last.group, end_object }
    }

    /// Returns the first location that matches, if `largest` is the track's largest location now.
    pub fn start(&self, largest: Option<Location>) -> Location {
        match (*self, largest) {
            (Self::AbsoluteStart(start) | Self::AbsoluteRange { start, .. }, _) => start,
            (Self::All, _) | (_, None) => Location::default(),
            (Self::Relative(back), Some(Location { group, .. })) => {
                let group = match back.checked_sub(1) {
                    Some(before) => group.saturating_sub(before),
                    None => group.saturating_add(1),
                };
                Location::new(group, 0)
            }
            (Self::NextObject, Some(largest)) => match largest.object.checked_add(1) {
                Some(object) => Location { object, ..largest },
                None => Location::new(largest.group.saturating_add(1), 0),
            },
        }
    }

    /// Returns the last location that matches, or `None` if the filter has no end. The object ID `u64::MAX` means the
    /// end of the group.
    pub fn end(&self) -> Option<Location> {
        match *self {
            Self::AbsoluteRange { end_group, end_object, .. } => {
                Some(Location::new(end_group, end_object.unwrap_or(u64::MAX)))
            }
            _ => None,
        }
    }

    /// Reports whether the filter's start is absolute, so that it does not depend on the track's largest object.
    pub fn is_absolute(&self) -> bool {
        !matches!(self, Self::Relative(_) | Self::NextObject)
    }

    /// Reads the value of LOCATION_FILTER.
    pub(super) fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        if input.draft().has_typed_filters() {
            return Self::decode_typed(input);
        }
        let mut value = input.nested()?;
        let filter = match input.draft().has_relative_filters() {
            true => Self::decode_fields(&mut value)?,
            false => Self::decode_tagged(&mut value)?,
        };
        value.finish()?;
        Ok(filter)
    }

    fn decode_tagged(input: &mut WireReader) -> Result<Self, DecodeError> {
        Ok(match input.vi64()? {
            tag::NEXT_GROUP => Self::NEXT_GROUP,
            tag::LARGEST_OBJECT => Self::NextObject,
            tag::ABSOLUTE_START => Self::AbsoluteStart(Location::decode(input)?),
            tag::ABSOLUTE_RANGE => {
                let start = Location::decode(input)?;
                let end_group = end_group(start, input)?;
                Self::AbsoluteRange { start, end_group, end_object: None }
            }
            _ => return Err(UNKNOWN),
        })
    }

    /// Reads the fields of a filter in drafts 20 and 21. The number of fields determines the kind of filter.
    fn decode_fields(input: &mut WireReader) -> Result<Self, DecodeError> {
        if input.is_empty() {
            return Ok(Self::All);
        }
        let group = input.vi64()?;
        if input.is_empty() {
            return Ok(Self::Relative(group));
        }
        let start = Location::new(group, input.vi64()?);
        if input.is_empty() {
            // A filter that starts at location 0/0 is encoded without fields. Group 0 and object 0 as explicit fields
            // therefore mean the next object.
            let is_next = start == Location::default();
            return Ok(if is_next { Self::NextObject } else { Self::AbsoluteStart(start) });
        }
        let end_group = end_group(start, input)?;
        let end_object = if input.is_empty() { None } else { Some(input.vi64()?) };
        Ok(Self::AbsoluteRange { start, end_group, end_object })
    }

    fn decode_typed(input: &mut WireReader) -> Result<Self, DecodeError> {
        Ok(match input.vi64()? {
            kind::ALL => Self::All,
            kind::RELATIVE => Self::Relative(input.vi64()?),
            kind::ABSOLUTE_START => Self::AbsoluteStart(Location::decode(input)?),
            kind @ (kind::TO_GROUP | kind::TO_OBJECT) => {
                let start = Location::decode(input)?;
                let end_group = end_group(start, input)?;
                let end_object = if kind == kind::TO_OBJECT { Some(input.vi64()?) } else { None };
                Self::AbsoluteRange { start, end_group, end_object }
            }
            kind::NEXT_OBJECT => Self::NextObject,
            _ => return Err(UNKNOWN),
        })
    }

    pub(super) fn encode(self, out: &mut WireWriter<'_>) {
        if let Self::AbsoluteRange { start, end_group, .. } = self
            && end_group < start.group
        {
            out.cannot_express("filter that ends before it begins");
        }
        match out.draft() {
            draft if draft.has_typed_filters() => self.encode_typed(out),
            draft if draft.has_relative_filters() => out.nested(|out| self.encode_fields(out)),
            _ => out.nested(|out| self.encode_tagged(out)),
        }
    }

    fn encode_tagged(self, out: &mut WireWriter<'_>) {
        match self {
            Self::All => put(out, &[tag::ABSOLUTE_START, 0, 0]),
            Self::Relative(0) => put(out, &[tag::NEXT_GROUP]),
            Self::Relative(_) => out.cannot_express("filter that begins some groups back"),
            Self::NextObject => put(out, &[tag::LARGEST_OBJECT]),
            Self::AbsoluteStart(Location { group, object }) => {
                put(out, &[tag::ABSOLUTE_START, group, object]);
            }
            Self::AbsoluteRange { start, end_group, end_object } => {
                if end_object.is_some() {
                    out.cannot_express("filter that ends within a group");
                }
                put(
                    out,
                    &[tag::ABSOLUTE_RANGE, start.group, start.object, end_group.saturating_sub(start.group)],
                );
            }
        }
    }

    fn encode_fields(self, out: &mut WireWriter<'_>) {
        match self {
            // Group 0 and object 0 as explicit fields would mean the next object. A start at location 0/0 is therefore
            // encoded without fields, as a filter for all objects.
            Self::All | Self::AbsoluteStart(Location { group: 0, object: 0 }) => {}
            Self::Relative(back) => put(out, &[back]),
            Self::NextObject => put(out, &[0, 0]),
            Self::AbsoluteStart(Location { group, object }) => put(out, &[group, object]),
            Self::AbsoluteRange { start, end_group, end_object } => {
                put(out, &[start.group, start.object, end_group.saturating_sub(start.group)]);
                end_object.into_iter().for_each(|object| out.vi64(object));
            }
        }
    }

    fn encode_typed(self, out: &mut WireWriter<'_>) {
        match self {
            Self::All => put(out, &[kind::ALL]),
            Self::Relative(back) => put(out, &[kind::RELATIVE, back]),
            Self::NextObject => put(out, &[kind::NEXT_OBJECT]),
            Self::AbsoluteStart(Location { group, object }) => {
                put(out, &[kind::ABSOLUTE_START, group, object]);
            }
            Self::AbsoluteRange { start, end_group, end_object } => {
                let kind = if end_object.is_some() { kind::TO_OBJECT } else { kind::TO_GROUP };
                put(out, &[kind, start.group, start.object, end_group.saturating_sub(start.group)]);
                end_object.into_iter().for_each(|object| out.vi64(object));
            }
        }
    }
}

const UNKNOWN: DecodeError = DecodeError::violation("unknown location filter type");

fn end_group(start: Location, input: &mut WireReader) -> Result<u64, DecodeError> {
    const TOO_LARGE: DecodeError = DecodeError::violation("the filter's end group is above 2^64 - 1");
    start.group.checked_add(input.vi64()?).ok_or(TOO_LARGE)
}

fn put(out: &mut WireWriter<'_>, fields: &[u64]) {
    fields.iter().for_each(|field| out.vi64(*field));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Draft;

    const START: Location = Location::new(128, 3);

    fn encode(draft: Draft, filter: Filter) -> Result<Vec<u8>, crate::EncodeError> {
        let mut bytes = Vec::new();
        let mut out = WireWriter::new(draft, &mut bytes);
        filter.encode(&mut out);
        out.finish().map(|()| bytes)
    }

    fn decode(draft: Draft, bytes: &[u8]) -> Result<Filter, DecodeError> {
        let mut input = WireReader::new(draft, bytes::Bytes::copy_from_slice(bytes));
        let filter = Filter::decode(&mut input)?;
        input.finish()?;
        Ok(filter)
    }

    /// The group IDs in this test take two bytes, so that the encoded length in bytes differs from the number of
    /// fields.
    #[test]
    fn subscription_filter_is_encoded_as_each_moqt_draft_defines() {
        let to_group = Filter::AbsoluteRange { start: START, end_group: 130, end_object: None };
        let to_object = Filter::AbsoluteRange { start: START, end_group: 130, end_object: Some(9) };
        /// A filter, and its three encodings: in drafts 18 and 19 (if they can express it), in drafts 20 and 21, and in
        /// draft-22.
        type Row<'a> = (Filter, Option<&'a [u8]>, &'a [u8], &'a [u8]);
        let table: [Row<'_>; 7] = [
            (Filter::NEXT_GROUP, Some(&[1, 1]), &[1, 0], &[1, 0]),
            (Filter::NextObject, Some(&[1, 2]), &[2, 0, 0], &[5]),
            (
                Filter::AbsoluteStart(START),
                Some(&[4, 3, 0x80, 128, 3]),
                &[3, 0x80, 128, 3],
                &[2, 0x80, 128, 3],
            ),
            (to_group, Some(&[5, 4, 0x80, 128, 3, 2]), &[4, 0x80, 128, 3, 2], &[3, 0x80, 128, 3, 2]),
            (to_object, None, &[5, 0x80, 128, 3, 2, 9], &[4, 0x80, 128, 3, 2, 9]),
            (Filter::Relative(200), None, &[2, 0x80, 200], &[1, 0x80, 200]),
            (Filter::All, Some(&[3, 3, 0, 0]), &[0], &[0]),
        ];
        for (filter, old, counted, typed) in table {
            for draft in Draft::ALL {
                let expected = match draft {
                    Draft::D18 | Draft::D19 => old,
                    Draft::D20 | Draft::D21 => Some(counted),
                    Draft::D22 => Some(typed),
                };
                assert_eq!(encode(draft, filter).ok().as_deref(), expected, "{draft} {filter:?}");
                let Some(bytes) = expected else { continue };
                let read = match (filter, draft) {
                    (Filter::All, Draft::D18 | Draft::D19) => Filter::AbsoluteStart(Location::default()),
                    _ => filter,
                };
                assert_eq!(decode(draft, bytes), Ok(read), "{draft}");
            }
        }
    }

    #[test]
    fn malformed_filter_is_a_violation() {
        let table: [(Draft, &[u8]); 9] = [
            (Draft::D19, &[1, 5]),             // invalid: the filter type is undefined
            (Draft::D19, &[2, 2, 0]),          // invalid: bytes follow the filter
            (Draft::D20, &[2, 0x80]),          // invalid: a field exceeds the message
            (Draft::D20, &[5, 1, 1, 1, 1, 1]), // invalid: a filter has at most four fields
            (Draft::D22, &[6]),                // invalid: the filter type is undefined
            (Draft::D22, &[4, 1, 1, 1]),       // invalid: a field of the filter is missing
            (Draft::D22, &[0, 0]),             // invalid: bytes follow the filter
            (Draft::D21, &[11, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 1]), // invalid: the end group overflows
            (Draft::D22, &[3, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 1]),
        ];
        for (draft, bytes) in table {
            let error = decode(draft, bytes).unwrap_err();
            assert_eq!(error.code, crate::code::Session::PROTOCOL_VIOLATION, "{draft} {bytes:x?}");
        }
    }

    #[test]
    fn absolute_start_at_0_0_is_encoded_as_all_in_draft_20() {
        let beginning = Filter::AbsoluteStart(Location::default());
        assert_eq!(encode(Draft::D20, beginning), Ok(vec![0]));
        assert_eq!(encode(Draft::D22, beginning), Ok(vec![2, 0, 0]));
    }

    #[test]
    fn subscription_filter_starts_relative_to_the_largest_object() {
        let largest = Some(Location::new(7, 3));
        let table = [
            (Filter::NEXT_GROUP, Location::new(8, 0)),
            (Filter::Relative(1), Location::new(7, 0)),
            (Filter::Relative(3), Location::new(5, 0)),
            (Filter::Relative(u64::MAX), Location::new(0, 0)),
            (Filter::NextObject, Location::new(7, 4)),
            (Filter::AbsoluteStart(Location::new(2, 1)), Location::new(2, 1)),
            (Filter::All, Location::default()),
        ];
        for (filter, start) in table {
            assert_eq!(filter.start(largest), start, "{filter:?}");
            if !filter.is_absolute() {
                assert_eq!(filter.start(None), Location::default(), "{filter:?}");
            }
        }
        let last = Some(Location::new(u64::MAX, u64::MAX));
        assert_eq!(Filter::NextObject.start(last), Location::new(u64::MAX, 0));
        assert_eq!(Filter::NEXT_GROUP.start(last), Location::new(u64::MAX, 0));
    }

    #[test]
    fn range_filter_ends_at_its_last_object() {
        let range = Filter::range(Location::new(2, 1), Location::new(3, 4));
        assert_eq!(range.end(), Some(Location::new(3, 4)));
        let whole = Filter::range(Location::new(2, 1), Location::new(3, u64::MAX));
        assert_eq!(
            whole,
            Filter::AbsoluteRange { start: Location::new(2, 1), end_group: 3, end_object: None }
        );
        assert_eq!(whole.end(), Some(Location::new(3, u64::MAX)));
        assert_eq!(Filter::NextObject.end(), None);
    }
}
