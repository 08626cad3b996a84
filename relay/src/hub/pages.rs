//! Lists the entries of a map below a prefix in pages, so that the map's lock is held for one page at a time, and
//! listing can stop early.

use std::{
    collections::BTreeMap,
    ops::Bound::{self, Excluded, Included, Unbounded},
};

use bytes::Bytes;
use millrace_moq::{Namespace, TrackName};

/// The most map entries that one page of a listing covers.
pub const PAGE: usize = 64;

/// A function that lists map entries: each call returns the next page of the listing.
pub type Pages<E> = Box<dyn FnMut() -> Page<E> + Send>;

pub struct Page<E> {
    /// The entries of this page that passed the caller's filter.
    pub found: Vec<E>,
    /// True if another page of the listing may follow.
    pub more: bool,
}

/// Reads up to [`PAGE`] entries of `map` that follow `behind`, up to the first key for which `below` is false. Returns
/// what `take` makes of them, and moves `behind` to the last entry read.
pub fn page<K: Ord + Clone, V, E>(
    map: &BTreeMap<K, V>,
    behind: &mut Bound<K>,
    below: impl Fn(&K) -> bool,
    take: impl Fn(&K, &V) -> Option<E>,
) -> Page<E> {
    let entries = map.range((behind.clone(), Unbounded)).take_while(|(key, _)| below(key)).take(PAGE);
    let entries: Vec<_> = entries.collect();
    if let Some((last, _)) = entries.last() {
        *behind = Excluded((*last).clone());
    }
    // A full page may have been the last one. In that case, the next page is empty.
    let more = entries.len() == PAGE;
    Page { found: entries.into_iter().filter_map(|(key, value)| take(key, value)).collect(), more }
}

/// Calls `visit` for each entry of all pages.
pub fn each<E>(mut pages: Pages<E>, mut visit: impl FnMut(E)) {
    loop {
        let page = pages();
        page.found.into_iter().for_each(&mut visit);
        if !page.more {
            return;
        }
    }
}

/// Returns the lower bound of the range of tracks below a namespace prefix.
pub fn front(prefix: &Namespace) -> Bound<TrackName> {
    // The empty track name sorts before every other track of the namespace. It adds no bytes, so the full name cannot
    // exceed the length limit.
    TrackName::new(prefix.clone(), Bytes::new()).map_or(Unbounded, Included)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn track(path: &str, name: u32) -> TrackName {
        TrackName::new(Namespace::from_path(path).unwrap(), name.to_string().into_bytes()).unwrap()
    }

    #[test]
    fn track_pages_hold_only_the_namespace_prefix_up_to_the_page_size() {
        let others = (0..10_000).map(|number| track("other/room", number));
        let near = [track("a/b", 7), track("a/c/d", 7), track("a/ca", 7), track("b", 7)];
        let wanted: Vec<_> = (0..200).map(|number| track("a/c", number)).collect();
        let tracks: BTreeMap<_, _> =
            others.chain(near).chain(wanted.iter().cloned()).map(|name| (name, ())).collect();
        let prefix = Namespace::from_path("a/c").unwrap();
        let mut behind = front(&prefix);
        let mut found = Vec::new();
        let mut pages = 0;
        let below = |name: &TrackName| prefix.is_prefix_of(name.namespace());
        loop {
            let page = page(&tracks, &mut behind, below, |name, ()| Some(name.clone()));
            assert!(page.found.len() <= PAGE);
            found.extend(page.found);
            pages += 1;
            if !page.more {
                break;
            }
        }
        let mut expected: Vec<_> = wanted.into_iter().chain([track("a/c/d", 7)]).collect();
        expected.sort();
        assert_eq!((found, pages), (expected, 201_usize.div_ceil(PAGE)));
    }
}
