//! Prefixes that a peer watches.

use std::{collections::BTreeSet, pin::pin, sync::Arc, time::Duration};

use millrace_moq::{Namespace, code, message::RequestError};
use parking_lot::Mutex;
use tokio::{sync::Notify, time};

/// How far behind a request the end of another may be that was cancelled before it: each has a stream of its own.
const OVERTAKEN: Duration = Duration::from_millis(500);

/// The prefixes of one kind that a session watches. They must not overlap.
#[derive(Default)]
pub struct Claims {
    held: Mutex<BTreeSet<Namespace>>,
    freed: Notify,
}

/// A prefix that is watched, until this is dropped.
pub struct Claim {
    claims: Arc<Claims>,
    prefix: Namespace,
}

impl Claims {
    /// Watches `prefix` as soon as no other overlaps with it, which may take a moment.
    pub async fn claim(self: &Arc<Self>, prefix: Namespace) -> Result<Claim, RequestError> {
        let mut over = pin!(time::sleep(OVERTAKEN));
        loop {
            let mut freed = pin!(self.freed.notified());
            // Before the look, so that none is missed.
            freed.as_mut().enable();
            let refused = match self.claim_now(&prefix) {
                Ok(claim) => return Ok(claim),
                Err(refused) => refused,
            };
            tokio::select! {
                // However late this runs: what has ended meanwhile counts.
                biased;
                () = freed => {}
                () = &mut over => return Err(refused),
            }
        }
    }

    fn claim_now(self: &Arc<Self>, prefix: &Namespace) -> Result<Claim, RequestError> {
        add(&mut self.held.lock(), prefix)?;
        Ok(Claim { claims: Arc::clone(self), prefix: prefix.clone() })
    }
}

impl Claim {
    pub fn prefix(&self) -> &Namespace {
        &self.prefix
    }

    /// Watches another prefix from now on; after an error, the one of before.
    pub fn move_to(&mut self, prefix: Namespace) -> Result<(), RequestError> {
        let mut held = self.claims.held.lock();
        held.remove(&self.prefix);
        let added = add(&mut held, &prefix);
        match added {
            Ok(()) => self.prefix = prefix,
            Err(_) => drop(held.insert(self.prefix.clone())),
        }
        self.claims.freed.notify_waiters();
        added
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.claims.held.lock().remove(&self.prefix);
        self.claims.freed.notify_waiters();
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
        let mut held = claims.claim_now(&namespace("a/b")).unwrap();
        let _beside = claims.claim_now(&namespace("a/bc")).unwrap();
        for (path, overlaps) in [("a", true), ("a/b", true), ("a/b/c", true), ("a/a", false), ("b", false)] {
            assert_eq!(claims.claim_now(&namespace(path)).is_err(), overlaps, "{path}");
        }
        assert!(claims.claim_now(&Namespace::default()).is_err());
        assert!(held.move_to(namespace("a/bc/d")).is_err());
        assert!(claims.claim_now(&namespace("a/b")).is_err(), "it has not moved");
        held.move_to(namespace("a/b/c")).unwrap();
        drop(held);
        assert!(claims.claim_now(&namespace("a/b")).is_ok());
    }

    #[tokio::test]
    async fn a_request_that_overtakes_the_end_of_another_waits_for_it() {
        let claims = Arc::<Claims>::default();
        let held = claims.claim(namespace("a")).await.unwrap();
        let (next, ()) = tokio::join!(claims.claim(namespace("a/b")), async { drop(held) });
        let next = next.unwrap();
        assert!(claims.claim(namespace("a")).await.is_err(), "{} has not ended", next.prefix());
    }

    /// Comparing each with all others, this would take minutes.
    #[test]
    fn any_number_of_prefixes() {
        let claims = Arc::<Claims>::default();
        let claim = |number: u32| claims.claim_now(&namespace(&format!("a/{number}")));
        let held: Vec<_> = (0..100_000).map(|number| claim(number).unwrap()).collect();
        assert!(claim(7).is_err());
        drop(held);
        assert!(claims.held.lock().is_empty());
    }
}
