//! The store in which relays of a cluster register and look up namespaces.

use std::pin::Pin;

use millrace_moq::{Namespace, message::RequestError};
use millrace_relay_status as status;

use crate::config::ClusterPeer;

/// The relays that have a namespace, the nearest one first.
pub type LookedUpPeers<'a> =
    Pin<Box<dyn Future<Output = Result<Vec<ClusterPeer>, RequestError>> + Send + 'a>>;

/// Registers the namespaces of this relay's publishers in a store, and looks up those of other relays.
///
/// What the store says is a hint: the relay connects to a relay that it names, and uses what that relay announces.
pub trait NamespaceDirectory: Send + Sync {
    /// Looks up the relays with a publisher of `namespace` or of a prefix of it. Fails if the store gives no answer.
    fn lookup<'a>(&'a self, namespace: &'a Namespace) -> LookedUpPeers<'a>;

    /// Notes whether a namespace has a publisher at this relay.
    fn set_published(&self, namespace: &Namespace, is_published: bool);

    /// Returns what the directory has done, and what it knows.
    fn status(&self) -> status::LookupStatus;

    /// Returns the answer of an earlier lookup of the namespace, if it is known.
    fn recall(&self, namespace: &Namespace) -> Option<Vec<status::RegisteredRelay>>;
}
