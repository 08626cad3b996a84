//! Lists what stands below a prefix, a page at a time: no look at it holds a lock for longer, or takes more than is wanted.

use std::{
    collections::BTreeMap,
    ops::Bound::{self, Excluded, Included, Unbounded},
};

use bytes::Bytes;
use millrace_moq::{Namespace, TrackName};

/// Entries of a page at most.
pub const PAGE: usize = 64;

/// Returns the next page.
pub type Pages<E> = Box<dyn FnMut() -> Page<E> + Send>;

pub struct Page<E> {
    /// Entries of the page that are wanted.
    pub found: Vec<E>,
    /// There may be another page.
    pub more: bool,
}

/// Takes the next entries of `map` behind `behind`, as long as they are `below` what is looked for, and returns what `take` makes of them.
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
    let more = entries.len() == PAGE;
    Page { found: entries.into_iter().filter_map(|(key, value)| take(key, value)).collect(), more }
}

/// The place in front of all tracks below a prefix.
pub fn front(prefix: &Namespace) -> Bound<TrackName> {
    // It is as long as a namespace may be, and a name of no bytes adds nothing.
    TrackName::new(prefix.clone(), Bytes::new()).map_or(Unbounded, Included)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn track(path: &str, name: u32) -> TrackName {
        TrackName::new(Namespace::from_path(path).unwrap(), name.to_string().into_bytes()).unwrap()
    }

    #[test]
    fn pages_are_of_the_prefix_only_and_bounded() {
        let others = (0..10_000).map(|number| track("other/room", number));
        let near = [track("a/b", 7), track("a/c/d", 7), track("a/ca", 7), track("b", 7)];
        let wanted: Vec<_> = (0..200).map(|number| track("a/c", number)).collect();
        let tracks: BTreeMap<_, _> =
            others.chain(near).chain(wanted.iter().cloned()).map(|name| (name, ())).collect();
        let prefix = Namespace::from_path("a/c").unwrap();
        let (mut behind, mut found, mut pages) = (front(&prefix), Vec::new(), 0);
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
