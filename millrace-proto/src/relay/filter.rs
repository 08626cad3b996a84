//! Which objects a subscription gets (draft-18, section "Subscription Filters").

use crate::moq::{Filter, Location};

/// A filter made absolute when the subscription was established.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Window {
    pub start: Location,
    /// Last group, inclusive.
    pub end_group: Option<u64>,
}

/// The filter ends before the current group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the filter ends with group {end_group}, and the track is already at group {largest_group}")]
pub struct OutOfRange {
    pub end_group: u64,
    pub largest_group: u64,
}

impl Window {
    /// Resolves `filter` for a track whose largest object is `largest`.
    ///
    /// A subscription without a filter, or with an absolute start in the past, begins with the current
    /// group, which the cache holds; older groups are for FETCH.
    pub fn resolve(filter: Option<&Filter>, largest: Option<Location>) -> Result<Self, OutOfRange> {
        let current = Location { group: largest.map_or(0, |largest| largest.group), object: 0 };
        let window = Self {
            start: filter.map_or(current, |filter| filter.start(largest).max(current)),
            end_group: filter.and_then(Filter::end_group),
        };
        match (window.end_group, largest) {
            (Some(end_group), Some(largest)) if end_group < largest.group => {
                Err(OutOfRange { end_group, largest_group: largest.group })
            }
            _ => Ok(window),
        }
    }

    pub fn contains(&self, location: Location) -> bool {
        location >= self.start && !self.is_past(location.group)
    }

    /// Whether any object of `group` can be inside.
    pub fn touches_group(&self, group: u64) -> bool {
        group >= self.start.group && !self.is_past(group)
    }

    /// The smallest object ID of `group` that is inside. The group must be one that [touches](Self::touches_group).
    pub fn first_object(&self, group: u64) -> u64 {
        if group == self.start.group { self.start.object } else { 0 }
    }

    /// Whether `group` comes after the last one asked for.
    pub fn is_past(&self, group: u64) -> bool {
        self.end_group.is_some_and(|end| group > end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(group: u64, object: u64) -> Location {
        Location { group, object }
    }

    #[test]
    fn filters_become_windows() {
        let now = Some(at(7, 3));
        let table = [
            ("unfiltered, running", None, now, at(7, 0), None),
            ("unfiltered, nothing yet", None, None, at(0, 0), None),
            ("largest object", Some(Filter::LargestObject), now, at(7, 4), None),
            ("largest object, nothing yet", Some(Filter::LargestObject), None, at(0, 0), None),
            ("next group", Some(Filter::NextGroupStart), now, at(8, 0), None),
            ("next group, nothing yet", Some(Filter::NextGroupStart), None, at(0, 0), None),
            ("absolute start in the past", Some(Filter::AbsoluteStart(at(2, 5))), now, at(7, 0), None),
            ("absolute start in the group", Some(Filter::AbsoluteStart(at(7, 2))), now, at(7, 2), None),
            ("absolute start ahead", Some(Filter::AbsoluteStart(at(9, 1))), now, at(9, 1), None),
            ("range", Some(Filter::AbsoluteRange { start: at(7, 1), end_group: 9 }), now, at(7, 1), Some(9)),
        ];
        for (name, filter, largest, start, end_group) in table {
            let window = Window::resolve(filter.as_ref(), largest).expect(name);
            assert_eq!(window, Window { start, end_group }, "{name}");
        }
    }

    #[test]
    fn a_range_that_is_over_is_refused() {
        let filter = Filter::AbsoluteRange { start: at(1, 0), end_group: 6 };
        let refused = OutOfRange { end_group: 6, largest_group: 7 };
        assert_eq!(Window::resolve(Some(&filter), Some(at(7, 0))), Err(refused));
    }

    #[test]
    fn windows_bound_groups_and_objects() {
        let window = Window { start: at(4, 2), end_group: Some(5) };
        for (location, inside) in
            [(at(4, 1), false), (at(4, 2), true), (at(5, 0), true), (at(6, 0), false), (at(3, 9), false)]
        {
            assert_eq!(window.contains(location), inside, "{location:?}");
        }
        assert_eq!(window.first_object(4), 2);
        assert_eq!(window.first_object(5), 0);
    }
}
