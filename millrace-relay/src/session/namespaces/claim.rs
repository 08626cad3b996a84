//! Prefixes that a peer watches.

use std::sync::Arc;

use millrace_proto::moq::{Namespace, code, message::RequestError};
use parking_lot::Mutex;

/// The prefixes of one kind that a session watches. They must not overlap.
#[derive(Default)]
pub struct Claims(Mutex<Vec<Namespace>>);

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
        claims.retain(|other| *other != self.prefix);
        let added = add(&mut claims, &prefix);
        match added {
            Ok(()) => self.prefix = prefix,
            Err(_) => claims.push(self.prefix.clone()),
        }
        added
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.claims.0.lock().retain(|other| *other != self.prefix);
    }
}

fn add(claims: &mut Vec<Namespace>, prefix: &Namespace) -> Result<(), RequestError> {
    if claims.iter().any(|other| other.overlaps(prefix)) {
        let reason = "the prefix overlaps with another of this session";
        return Err(RequestError::new(code::Request::PREFIX_OVERLAP, reason));
    }
    claims.push(prefix.clone());
    Ok(())
}
