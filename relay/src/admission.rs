//! Decides which clients may have a session with the relay.

use std::{any::Any, net::IpAddr};

/// Counts a session against the limits of its client and its client's networks, until it is dropped.
pub type Permit = Box<dyn Any + Send>;

/// The limit that one more session of a client would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TooManySessions {
    /// The client's address has as many sessions as one address may have.
    Client,
    /// A network that contains the client's address has as many sessions as such a network may have.
    Network,
}

impl TooManySessions {
    /// Returns the close reason that is sent to the refused client.
    pub(crate) fn reason(self) -> &'static [u8] {
        match self {
            Self::Client => b"this client has as many sessions as it may have",
            Self::Network => b"this client's network has as many sessions as it may have",
        }
    }
}

/// Limits how many sessions a client may have. The relay asks it before a client's handshake and again after the
/// handshake.
pub trait Admission: Send + Sync {
    /// Decides whether a handshake may begin. The source address may still be forged.
    ///
    /// # Errors
    /// Returns an error if the client or one of its networks has as many sessions as it may have.
    fn may_connect(&self, client: IpAddr) -> Result<(), TooManySessions>;

    /// Counts a new session of a client. The handshake has proved the client's address.
    ///
    /// # Errors
    /// Returns an error if the client or one of its networks has as many sessions as it may have.
    fn admit(&self, client: IpAddr) -> Result<Permit, TooManySessions>;
}

/// An admission that lets every client in.
pub struct OpenAdmission;

impl Admission for OpenAdmission {
    fn may_connect(&self, _: IpAddr) -> Result<(), TooManySessions> {
        Ok(())
    }

    fn admit(&self, _: IpAddr) -> Result<Permit, TooManySessions> {
        Ok(Box::new(()))
    }
}
