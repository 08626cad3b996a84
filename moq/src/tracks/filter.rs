//! The range of objects that a subscription receives (draft-22, section "Location Filters").

use crate::{Filter, Location};

/// A location filter that was converted to absolute locations when the subscription was established.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LocationWindow {
    /// The first location that the filter includes.
    pub start: Location,
    /// The last location that the filter includes. The largest possible object ID means the end of the group.
    pub end: Option<Location>,
}

/// The error for a filter that ends before the current group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the filter ends with group {end_group}, and the track is already at group {largest_group}")]
pub struct OutOfRange {
    /// The ID of the last group that the filter includes.
    pub end_group: u64,
    /// The largest group ID of the track.
    pub largest_group: u64,
}

impl LocationWindow {
    /// Converts `filter` to absolute locations, for a track whose largest object is `largest`.
    ///
    /// A subscription without a filter, or with a start in the past, begins with the current group, which the cache
    /// holds. A subscriber gets older groups only by FETCH or FILL_PARAMETERS.
    pub fn resolve(filter: Option<&Filter>, largest: Option<Location>) -> Self {
        let current = Location { group: largest.map_or(0, |largest| largest.group), object: 0 };
        Self {
            start: filter.map_or(current, |filter| filter.start(largest).max(current)),
            end: filter.and_then(Filter::end),
        }
    }

    /// Checks that objects of the subscription's range may still arrive.
    ///
    /// # Errors
    /// Fails if the range has ended.
    pub fn check(&self, largest: Option<Location>) -> Result<(), OutOfRange> {
        match (self.end, largest) {
            (Some(end), Some(largest)) if end.group < largest.group => {
                Err(OutOfRange { end_group: end.group, largest_group: largest.group })
            }
            _ => Ok(()),
        }
    }

    /// Reports whether the subscription's range includes the location.
    pub fn contains(&self, location: Location) -> bool {
        location >= self.start && self.end.is_none_or(|end| location <= end)
    }

    /// Reports whether the subscription's range can include any object of `group`.
    pub fn touches_group(&self, group: u64) -> bool {
        group >= self.start.group && !self.is_past(group)
    }

    /// Returns the smallest object ID of `group` in the subscription's range. The range must
    /// [touch](Self::touches_group) the group.
    pub fn first_object(&self, group: u64) -> u64 {
        if group == self.start.group { self.start.object } else { 0 }
    }

    /// Returns the largest object ID of `group` in the subscription's range, or `None` if the range covers the group's
    /// end. The range must touch the group.
    pub fn last_object(&self, group: u64) -> Option<u64> {
        self.end.filter(|end| end.group == group && end.object != u64::MAX).map(|end| end.object)
    }

    /// Returns the last group that the subscription's range includes up to the group's end. Returns `None` if the range
    /// includes the end of no group.
    pub fn last_whole_group(&self) -> Option<u64> {
        match self.end {
            None => Some(u64::MAX),
            Some(Location { group, object: u64::MAX }) => Some(group),
            Some(end) => end.group.checked_sub(1).filter(|group| *group >= self.start.group),
        }
    }

    /// Reports whether `group` comes after the last group of the subscription's range.
    pub fn is_past(&self, group: u64) -> bool {
        self.end.is_some_and(|end| group > end.group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(group: u64, object: u64) -> Location {
        Location { group, object }
    }

    /// Returns the last location of a range that ends with the end of `group`.
    const fn whole(group: u64) -> Option<Location> {
        Some(at(group, u64::MAX))
    }

    fn range(start: Location, end_group: u64, end_object: Option<u64>) -> Option<Filter> {
        Some(Filter::AbsoluteRange { start, end_group, end_object })
    }

    #[test]
    fn subscription_filters_resolve_to_start_and_end_locations() {
        let now = Some(at(7, 3));
        let table = [
            ("unfiltered, running", None, now, at(7, 0), None),
            ("unfiltered, nothing yet", None, None, at(0, 0), None),
            ("all", Some(Filter::All), now, at(7, 0), None),
            ("next object", Some(Filter::NextObject), now, at(7, 4), None),
            ("next object, nothing yet", Some(Filter::NextObject), None, at(0, 0), None),
            ("next group", Some(Filter::NEXT_GROUP), now, at(8, 0), None),
            ("next group, nothing yet", Some(Filter::NEXT_GROUP), None, at(0, 0), None),
            ("current group", Some(Filter::Relative(1)), now, at(7, 0), None),
            ("groups back", Some(Filter::Relative(5)), now, at(7, 0), None),
            ("absolute start in the past", Some(Filter::AbsoluteStart(at(2, 5))), now, at(7, 0), None),
            ("absolute start in the group", Some(Filter::AbsoluteStart(at(7, 2))), now, at(7, 2), None),
            ("absolute start ahead", Some(Filter::AbsoluteStart(at(9, 1))), now, at(9, 1), None),
            ("range", range(at(7, 1), 9, None), now, at(7, 1), whole(9)),
            ("range to an object", range(at(7, 1), 9, Some(4)), now, at(7, 1), Some(at(9, 4))),
        ];
        for (name, filter, largest, start, end) in table {
            let window = LocationWindow::resolve(filter.as_ref(), largest);
            assert_eq!(window, LocationWindow { start, end }, "{name}");
            assert_eq!(window.check(largest), Ok(()), "{name}");
        }
    }

    #[test]
    fn subscription_range_below_the_largest_group_is_refused() {
        let window = LocationWindow::resolve(range(at(1, 0), 6, None).as_ref(), Some(at(7, 0)));
        assert_eq!(window.check(Some(at(7, 0))), Err(OutOfRange { end_group: 6, largest_group: 7 }));
        for group in 0..9 {
            assert!(!window.touches_group(group) && !window.contains(at(group, 1)), "{group}");
        }
    }

    #[test]
    fn subscription_range_excludes_locations_before_start_and_after_end() {
        let window = LocationWindow { start: at(4, 2), end: Some(at(5, 3)) };
        for (location, inside) in [
            (at(4, 1), false),
            (at(4, 2), true),
            (at(4, 9), true),
            (at(5, 3), true),
            (at(5, 4), false),
            (at(6, 0), false),
            (at(3, 9), false),
        ] {
            assert_eq!(window.contains(location), inside, "{location:?}");
        }
        assert_eq!((window.first_object(4), window.first_object(5)), (2, 0));
        assert_eq!((window.last_object(4), window.last_object(5)), (None, Some(3)));
        assert_eq!(window.last_whole_group(), Some(4));
        assert_eq!(LocationWindow { end: Some(at(4, 3)), ..window }.last_whole_group(), None);
        assert_eq!(LocationWindow { end: whole(5), ..window }.last_whole_group(), Some(5));
        assert_eq!(LocationWindow { end: whole(5), ..window }.last_object(5), None);
        assert_eq!(LocationWindow { end: None, ..window }.last_whole_group(), Some(u64::MAX));
    }
}
