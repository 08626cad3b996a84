//! The namespace prefixes that a peer watches, which must not overlap.

use std::{collections::BTreeSet, pin::pin, sync::Arc, time::Duration};

use millrace_moq::{Namespace, code, message::RequestError};
use parking_lot::Mutex;
use tokio::{sync::Notify, time};

/// How much later than a new request the cancellation of an earlier request may arrive. QUIC does not keep the order
/// between their streams.
const OVERTAKEN: Duration = Duration::from_millis(500);

/// The prefixes that a session watches with one kind of request. No two overlap.
#[derive(Default)]
pub struct PrefixClaims {
    held: Mutex<BTreeSet<Namespace>>,
    freed: Notify,
}

/// A watched prefix. Dropping it frees the prefix.
pub struct PrefixClaim {
    claims: Arc<PrefixClaims>,
    prefix: Namespace,
}

impl PrefixClaims {
    /// Claims `prefix` once no other claim overlaps with it. Waits for at most [`OVERTAKEN`] until overlapping claims
    /// are freed.
    pub async fn claim(self: &Arc<Self>, prefix: Namespace) -> Result<PrefixClaim, RequestError> {
        let mut over = pin!(time::sleep(OVERTAKEN));
        loop {
            let mut freed = pin!(self.freed.notified());
            // The notification is enabled before the check, so that a prefix that is freed during the check is noticed.
            freed.as_mut().enable();
            let refused = match self.claim_now(&prefix) {
                Ok(claim) => return Ok(claim),
                Err(refused) => refused,
            };
            tokio::select! {
                // A freed prefix is preferred to the timeout if both are ready, however late this task runs.
                biased;
                () = freed => {}
                () = &mut over => return Err(refused),
            }
        }
    }

    fn claim_now(self: &Arc<Self>, prefix: &Namespace) -> Result<PrefixClaim, RequestError> {
        add(&mut self.held.lock(), prefix)?;
        Ok(PrefixClaim { claims: Arc::clone(self), prefix: prefix.clone() })
    }
}

impl PrefixClaim {
    pub fn prefix(&self) -> &Namespace {
        &self.prefix
    }

    /// Replaces the claimed prefix by another one. On error, the present claim stays.
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

impl Drop for PrefixClaim {
    fn drop(&mut self) {
        self.claims.held.lock().remove(&self.prefix);
        self.claims.freed.notify_waiters();
    }
}

fn add(claims: &mut BTreeSet<Namespace>, prefix: &Namespace) -> Result<(), RequestError> {
    // In the sorted set `claims`, the namespaces that begin with `prefix` come directly after it.
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
    fn namespace_prefix_claim_that_overlaps_another_is_refused() {
        let claims = Arc::<PrefixClaims>::default();
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
    async fn namespace_request_waits_for_the_end_of_an_overlapping_one() {
        let claims = Arc::<PrefixClaims>::default();
        let held = claims.claim(namespace("a")).await.unwrap();
        let (next, ()) = tokio::join!(claims.claim(namespace("a/b")), async { drop(held) });
        let next = next.unwrap();
        assert!(claims.claim(namespace("a")).await.is_err(), "{} has not ended", next.prefix());
    }

    /// The test would take minutes if each claim were compared with all others.
    #[test]
    fn claims_of_100_000_namespace_prefixes_take_no_quadratic_time() {
        let claims = Arc::<PrefixClaims>::default();
        let claim = |number: u32| claims.claim_now(&namespace(&format!("a/{number}")));
        let held: Vec<_> = (0..100_000).map(|number| claim(number).unwrap()).collect();
        assert!(claim(7).is_err());
        drop(held);
        assert!(claims.held.lock().is_empty());
    }
}
