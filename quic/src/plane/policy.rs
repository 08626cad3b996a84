//! Policies for a receiver that cannot keep up: they decide which waiting data is dropped.
//!
//! A [`QueuePolicy`] gets the streams that have bytes to send, and returns those to be reset. It reads no clock and
//! resets no stream itself. [`LivePolicy`] bounds how long and how much data may wait, and drops the oldest; [`Tail`]
//! drops the newest.

mod live;
mod tail;

use std::time::{Duration, Instant};

pub use self::{live::LivePolicy, tail::Tail};
use super::types::{PriorityLevel, StreamKey};

/// A stream with bytes to send.
#[derive(Clone, Copy, Debug)]
pub struct WaitingStream {
    /// The stream's key. Keys compare by age.
    pub key: StreamKey,
    /// The stream's owner.
    pub owner: u64,
    /// The stream's level. Smaller is more urgent.
    pub level: PriorityLevel,
    /// Order of sending among the streams of its owner and level.
    pub order: (u64, u64),
    /// The subgroup's ID.
    pub subgroup: u64,
    /// Bytes that wait to be sent.
    pub bytes: u64,
    /// When the oldest of the waiting bytes arrived, if known.
    pub since: Option<Instant>,
    /// When the newest of the waiting bytes arrived, if known, and if the stream's group is no longer its owner's
    /// newest.
    pub superseded: Option<Instant>,
    /// Longest time that bytes may wait.
    pub max_delay: Option<Duration>,
    /// Importance of the stream's group for the receiver.
    pub standing: StreamImportance,
}

/// Importance of a stream for its receiver, in the order in which streams are dropped if there are too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StreamImportance {
    /// The stream is not the most important one of its owner.
    Ordinary,
    /// The stream is the most urgent subgroup of its owner's newest group.
    Newest,
    /// The stream has old data that the receiver requested: by a FETCH, or from the cache when a subscription began.
    Asked,
}

/// The data that waits on a connection.
#[derive(Clone, Debug, Default)]
pub struct WaitingQueue {
    /// Streams with bytes that wait.
    pub streams: Vec<WaitingStream>,
    /// Memory of waiting datagrams with their bookkeeping, bytes.
    pub datagram_bytes: u64,
    /// Estimated bandwidth of the path, bytes per second.
    pub rate: u64,
}

/// Bounds on a [`WaitingQueue`].
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    /// Largest number of streams that may have bytes to send at the same time.
    pub streams: usize,
    /// Largest number of bytes that may wait, not counting requested old data. Half of it is a soft limit.
    pub bytes: u64,
    /// Time for which the soft limit may be exceeded.
    pub burst: Duration,
}

/// A stream to be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drop {
    /// The stream.
    pub key: StreamKey,
    /// The reason, for the counts.
    pub reason: DropReason,
}

/// Reason why a stream is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// The stream has waited for too long.
    Late,
    /// The owner has a newer group, and the path cannot carry the rest of this stream in time.
    Hopeless,
    /// Too many bytes wait.
    Bytes,
    /// Too many streams have bytes to send.
    Streams,
}

/// The end of the queue at which datagrams are dropped if there are too many. The least urgent level is dropped first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DroppedEnd {
    /// The datagrams that have waited longest.
    Oldest,
    /// The datagrams that were queued last.
    Newest,
}

/// A rule for dropping streams.
pub trait QueuePolicy: Send {
    /// Returns the streams to drop now.
    fn review(&mut self, now: Instant, queue: &WaitingQueue, limits: &QueueLimits) -> Vec<Drop>;

    /// Returns the streams to drop if more than [`QueueLimits::streams`] have bytes to send. At most as many as the
    /// limit remain.
    fn overflow(&self, queue: &WaitingQueue, limits: &QueueLimits) -> Vec<Drop>;

    /// Returns which datagrams are dropped if there are too many.
    fn datagrams(&self) -> DroppedEnd;

    /// Notes that no data waits any more.
    fn rest(&mut self) {}
}

/// The available policies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyKind {
    /// [`LivePolicy`], which bounds how long data may wait.
    #[default]
    Live,
    /// [`Tail`], which drops the newest data.
    Tail,
}

impl PolicyKind {
    /// Creates the policy.
    pub fn build(self) -> Box<dyn QueuePolicy> {
        match self {
            Self::Live => Box::new(LivePolicy::default()),
            Self::Tail => Box::new(Tail),
        }
    }
}

#[cfg(test)]
mod tests;
