//! Who may have a session.

use std::{any::Any, net::IpAddr};

/// A session's place among those of its client, until it is dropped.
pub type Permit = Box<dyn Any + Send>;

/// Asked before a session is made.
pub trait Admission: Send + Sync {
    /// Whether a client, whose address is not proved yet, may try.
    fn may_connect(&self, client: IpAddr) -> bool;

    /// A session of a client, whose address its handshake has proved; `None`: it may not have one more.
    fn admit(&self, client: IpAddr) -> Option<Permit>;
}

/// Everybody may.
pub struct Open;

impl Admission for Open {
    fn may_connect(&self, _: IpAddr) -> bool {
        true
    }

    fn admit(&self, _: IpAddr) -> Option<Permit> {
        Some(Box::new(()))
    }
}
