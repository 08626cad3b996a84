//! Who may have a session.

use std::{any::Any, net::IpAddr};

/// A session's place among those of its client, until it is dropped.
pub type Permit = Box<dyn Any + Send>;

/// Why a client may not have one more session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crowded {
    /// The client has as many as it may.
    Client,
    /// A wider network that the client is in has as many as that may.
    Network,
}

impl Crowded {
    /// Returns the reason that is sent to the client.
    pub(crate) fn reason(self) -> &'static [u8] {
        match self {
            Self::Client => b"this client has as many sessions as it may have",
            Self::Network => b"this client's network has as many sessions as it may have",
        }
    }
}

/// Asked before a session is made.
pub trait Admission: Send + Sync {
    /// Decides whether a client, whose address is not proved yet, may try.
    ///
    /// # Errors
    /// It may not.
    fn may_connect(&self, client: IpAddr) -> Result<(), Crowded>;

    /// Makes a place for a session of a client, whose address its handshake has proved.
    ///
    /// # Errors
    /// It may not have one more.
    fn admit(&self, client: IpAddr) -> Result<Permit, Crowded>;
}

/// Everybody may.
pub struct Open;

impl Admission for Open {
    fn may_connect(&self, _: IpAddr) -> Result<(), Crowded> {
        Ok(())
    }

    fn admit(&self, _: IpAddr) -> Result<Permit, Crowded> {
        Ok(Box::new(()))
    }
}
