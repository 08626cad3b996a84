//! Prefixes that a peer watches.

use std::{collections::BTreeSet, sync::Arc};

use millrace_proto::moq::{Namespace, code, message::RequestError};
use parking_lot::Mutex;

/// The prefixes of one kind that a session watches. They must not overlap.
#[derive(Default)]
pub struct Claims(Mutex<BTreeSet<Namespace>>);

/// A prefix that is watched, until this is dropped.
pub struct Claim {
    claims: Arc<Claims>,
    prefix: Namespace,
}

impl Claims {
    pub fn claim(self: &Arc<Self>, prefix: Namespace) -> Result<Claim, RequestError> {
        add(&mut self.0.lock(), &prefix)?;
        Ok(Claim { claims: Arc::clone(self), prefix })
    }
}

impl Claim {
    pub fn prefix(&self) -> &Namespace {
        &self.prefix
    }

    /// Watches another prefix from now on; after an error, the one of before.
    pub fn move_to(&mut self, prefix: Namespace) -> Result<(), RequestError> {
        let mut claims = self.claims.0.lock();
        claims.remove(&self.prefix);
        let added = add(&mut claims, &prefix);
        match added {
            Ok(()) => self.prefix = prefix,
            Err(_) => drop(claims.insert(self.prefix.clone())),
        }
        added
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.claims.0.lock().remove(&self.prefix);
    }
}

fn add(claims: &mut BTreeSet<Namespace>, prefix: &Namespace) -> Result<(), RequestError> {
    // What a namespace is a prefix of stands right behind it.
    let longer = claims.range(prefix..).next().is_some_and(|next| prefix.is_prefix_of(next));
    if longer || prefix.prefixes().any(|shorter| claims.contains(&shorter)) {
        let reason = "the prefix overlaps with another of this session";
        return Err(RequestError::new(code::Request::PREFIX_OVERLAP, reason));
    }
    claims.insert(prefix.clone());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(path: &str) -> Namespace {
        Namespace::from_path(path).unwrap()
    }

    #[test]
    fn prefixes_overlap_with_shorter_and_longer_ones() {
        let claims = Arc::<Claims>::default();
        let mut held = claims.claim(namespace("a/b")).unwrap();
        let _beside = claims.claim(namespace("a/bc")).unwrap();
        for (path, overlaps) in [("a", true), ("a/b", true), ("a/b/c", true), ("a/a", false), ("b", false)] {
            assert_eq!(claims.claim(namespace(path)).is_err(), overlaps, "{path}");
        }
        assert!(claims.claim(Namespace::default()).is_err());
        assert!(held.move_to(namespace("a/bc/d")).is_err());
        assert!(claims.claim(namespace("a/b")).is_err(), "it has not moved");
        held.move_to(namespace("a/b/c")).unwrap();
        drop(held);
        assert!(claims.claim(namespace("a/b")).is_ok());
    }

    /// Comparing each with all others, this would take minutes.
    #[test]
    fn any_number_of_prefixes() {
        let claims = Arc::<Claims>::default();
        let claim = |number: u32| claims.claim(namespace(&format!("a/{number}")));
        let held: Vec<_> = (0..100_000).map(|number| claim(number).unwrap()).collect();
        assert!(claim(7).is_err());
        drop(held);
        assert!(claims.0.lock().is_empty());
    }
}
