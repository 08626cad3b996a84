//! What the hub needs to know of sessions. Sessions implement it: the hub stands below them.

use std::{pin::Pin, sync::Arc};

use bytes::Bytes;
use millrace_moq::{
    FetchItem, GroupOrder, Location, TrackName,
    message::{FetchOk, RequestError},
};
use tokio::sync::mpsc;

use crate::live::LiveTrack;

/// Whether a publisher has taken a SUBSCRIBE of the relay.
pub type Answer = Result<(), RequestError>;

/// What becomes of a FETCH at a publisher; dropping it gives it up.
pub type Fetching<'a> = Pin<Box<dyn Future<Output = Result<Fetched, RequestError>> + Send + 'a>>;

/// A publisher's answer to FETCH.
pub struct Fetched {
    pub ok: FetchOk,
    pub objects: Box<dyn Objects>,
}

/// The objects of a FETCH that is under way; dropping it gives it up.
pub trait Objects: Send {
    /// What comes next; `None` at the end. The publisher sends no more than is taken here, but for its flow control window.
    fn next(&mut self) -> Pin<Box<dyn Future<Output = Result<Option<Piece>, RequestError>> + Send + '_>>;
}

/// A piece of a FETCH response.
#[derive(Debug)]
pub enum Piece {
    Item(FetchItem),
    /// More of the payload of the last item.
    Payload(Bytes),
}

/// A session that publishes, as the relay asks it for tracks and objects.
pub trait Publisher: Send + Sync {
    /// The session's.
    fn id(&self) -> u64;

    /// It is the configured upstream relay.
    fn is_upstream(&self) -> bool;

    /// Subscribes to `track`, in a task of the publisher's own session, which says into `answers` how that went.
    fn subscribe(&self, track: Arc<LiveTrack>, answers: mpsc::Sender<Answer>);

    /// Subscribes to `tracks`, which others publish already, a few at a time. Those that wait for that already, and those
    /// beyond what may wait, are passed over.
    fn back_up(&self, tracks: Vec<Arc<LiveTrack>>);

    /// Fetches objects from the first to the last of `range`, both inclusive, in `order`.
    fn fetch(&self, track: TrackName, range: (Location, Location), order: GroupOrder) -> Fetching<'_>;
}

/// The session that a request came from.
#[derive(Clone, Copy, Debug)]
pub struct Requester {
    pub session: u64,
    /// It is the configured upstream relay.
    pub is_upstream: bool,
}
