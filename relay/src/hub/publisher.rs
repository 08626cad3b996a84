//! The traits by which the hub, the state that all sessions share, calls sessions. Sessions implement them, so that the
//! hub's code does not depend on theirs.

use std::{pin::Pin, sync::Arc};

use bytes::Bytes;
use millrace_moq::{
    FetchItem, GroupOrder, Location, Namespace, TrackName,
    message::{FetchOk, RequestError},
};
use tokio::sync::mpsc;

use crate::live::LiveTrack;
use millrace_relay_cluster::{HopId, Neighbour};

/// A publisher's answer to the relay's SUBSCRIBE.
pub type SubscribeAnswer = Result<(), RequestError>;

/// A FETCH that waits for the publisher's answer. Dropping it cancels the FETCH.
pub type Fetching<'a> = Pin<Box<dyn Future<Output = Result<FetchAnswer, RequestError>> + Send + 'a>>;

/// A publisher's answer to FETCH.
pub struct FetchAnswer {
    pub ok: FetchOk,
    pub objects: Box<dyn FetchedObjects>,
}

/// The objects of a FETCH response, as they arrive. Dropping it cancels the FETCH.
pub trait FetchedObjects: Send {
    /// Returns the next piece of the response, or `None` at its end. Flow control makes the publisher wait while no
    /// piece is taken.
    fn next(&mut self)
    -> Pin<Box<dyn Future<Output = Result<Option<FetchPiece>, RequestError>> + Send + '_>>;
}

/// A piece of a FETCH response.
#[derive(Debug)]
pub enum FetchPiece {
    Item(FetchItem),
    /// A further part of the payload of the object in the last [`Self::Item`].
    Payload(Bytes),
}

/// A session with a publisher, at which the hub subscribes to tracks and fetches objects.
pub trait HubPublisher: Send + Sync {
    /// Returns the ID of the publisher's session.
    fn id(&self) -> u64;

    /// Reports whether this publisher is the configured upstream relay.
    fn is_upstream(&self) -> bool;

    /// Subscribes to `track` in a task of the publisher's session. The result is sent to `answers`.
    fn subscribe(&self, track: Arc<LiveTrack>, answers: mpsc::Sender<SubscribeAnswer>);

    /// Subscribes to `tracks` that already have another publisher, a few at a time. Skips tracks that are queued
    /// already, and tracks for which the queue has no space.
    fn back_up(&self, tracks: Vec<Arc<LiveTrack>>);

    /// Fetches the objects of `range` in `order`. Both ends of the range are included.
    fn fetch(&self, track: TrackName, range: (Location, Location), order: GroupOrder) -> Fetching<'_>;
}

/// Finds publishers at other relays, for relays that do not announce namespaces to each other.
pub trait NamespaceSeeker: Send + Sync {
    /// Connects to a relay that has `namespace`. Returns once a relay has announced it or a prefix of it.
    fn seek(self: Arc<Self>, namespace: Namespace) -> Pin<Box<dyn Future<Output = SubscribeAnswer> + Send>>;

    /// Does the same in a task of its own, one at a time for a namespace.
    fn want(self: Arc<Self>, namespace: Namespace);
}

/// The session from which a request to the hub came.
#[derive(Clone, Copy, Debug)]
pub struct Requester {
    pub session: u64,
    /// True if the session is the one with the configured upstream relay.
    pub is_upstream: bool,
    /// True if the requesting session's peer is a relay of the cluster.
    pub is_relay: bool,
    /// The hop ID of the peer, or [`HopId::UNNAMED`] if the peer has none.
    pub hop: HopId,
}

impl Requester {
    /// The requester that stands for this relay itself.
    pub const NOBODY: Self = Self::client(0);

    /// Returns the requester for a session with a client that is no relay.
    pub const fn client(session: u64) -> Self {
        Self { session, is_upstream: false, is_relay: false, hop: HopId::UNNAMED }
    }

    pub fn neighbour(self) -> Neighbour {
        Neighbour { link: self.session, hop: self.hop }
    }
}
