//! Policies for a receiver that cannot keep up: they decide which waiting data is dropped.
//!
//! A [`QueuePolicy`] gets the streams that have bytes to send, and returns those to be reset. A policy reads no clock
//! and resets no stream itself. [`LivePolicy`] bounds how long and how much data may wait, and drops the oldest;
//! [`Tail`] drops the newest.

mod live;
mod tail;

use std::time::{Duration, Instant};

pub use self::{live::LivePolicy, tail::Tail};
use super::types::{PriorityLevel, StreamKey};

/// A stream with bytes to send.
#[derive(Clone, Copy, Debug)]
pub struct WaitingStream {
    /// The stream's key. Older streams have smaller keys.
    pub key: StreamKey,
    /// The stream's owner: the number that the caller has given to the subscription.
    pub owner: u64,
    /// The stream's priority level. A smaller level is more urgent.
    pub level: PriorityLevel,
    /// Sort key (group, then subgroup) that orders sending among the streams of the same owner and priority level.
    pub order: (u64, u64),
    /// The subgroup's ID.
    pub subgroup: u64,
    /// Bytes of the stream that wait to be sent.
    pub bytes: u64,
    /// Time when the oldest of the stream's waiting bytes arrived, if known.
    pub since: Option<Instant>,
    /// Time when the newest of the stream's waiting bytes arrived. `None` if unknown, or if the stream's group is the
    /// newest of its subscription.
    pub superseded: Option<Instant>,
    /// Longest time that the stream's bytes may wait to be sent.
    pub max_delay: Option<Duration>,
    /// Importance of the stream for the receiver, which decides what is dropped last.
    pub standing: StreamImportance,
}

/// Importance of a stream for its receiver, in the order in which streams are dropped if there are too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StreamImportance {
    /// The stream is neither the most urgent of its subscription's newest group, nor old data that the receiver
    /// requested. Such streams are dropped first.
    Ordinary,
    /// The stream is the most urgent subgroup of its subscription's newest group. It is dropped later than `Ordinary`
    /// streams.
    Newest,
    /// The stream has old data that the receiver requested: by a FETCH, or from the cache when a subscription began.
    Asked,
}

/// The data that waits on a connection.
#[derive(Clone, Debug, Default)]
pub struct WaitingQueue {
    /// Streams with bytes that wait to be sent.
    pub streams: Vec<WaitingStream>,
    /// Memory of waiting datagrams with their bookkeeping, bytes.
    pub datagram_bytes: u64,
    /// Estimated bandwidth of the path, bytes per second.
    pub rate: u64,
}

/// Limits on the data in a [`WaitingQueue`].
#[derive(Clone, Copy, Debug)]
pub struct QueueLimits {
    /// Largest number of streams that may have bytes to send at the same time.
    pub streams: usize,
    /// Largest number of bytes that may wait to be sent, not counting requested old data. Half of this number is a soft
    /// limit.
    pub bytes: u64,
    /// Time for which more bytes than the soft limit may wait, before streams are dropped.
    pub burst: Duration,
}

/// A stream to be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drop {
    /// The stream.
    pub key: StreamKey,
    /// The reason for the reset. Resets are counted separately for each reason.
    pub reason: DropReason,
}

/// Reason why a stream is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// The stream's data has waited to be sent for longer than [`WaitingStream::max_delay`] allows.
    Late,
    /// The stream's subscription has a newer group, and the path cannot carry the remaining bytes of this stream in
    /// time.
    Hopeless,
    /// Too many bytes wait to be sent on the connection.
    Bytes,
    /// Too many streams of the connection have bytes to send.
    Streams,
}

/// The end of the queue at which datagrams are dropped if too many wait. Datagrams of the least urgent priority level
/// are dropped first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DroppedEnd {
    /// The datagrams that have waited longest are dropped.
    Oldest,
    /// The datagrams that were queued last are dropped.
    Newest,
}

/// A policy that selects the streams to drop when data arrives faster than it can be sent.
pub trait QueuePolicy: Send {
    /// Returns the streams to drop now.
    fn review(&mut self, now: Instant, queue: &WaitingQueue, limits: &QueueLimits) -> Vec<Drop>;

    /// Returns the streams to drop if more than [`QueueLimits::streams`] have bytes to send. After these drops, at most
    /// that many remain.
    fn overflow(&self, queue: &WaitingQueue, limits: &QueueLimits) -> Vec<Drop>;

    /// Returns which datagrams are dropped if too many wait: the oldest or the newest.
    fn datagrams(&self) -> DroppedEnd;

    /// Notes that no data waits to be sent any more.
    fn rest(&mut self) {}
}

/// The policies that can be configured for a receiver that cannot keep up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyKind {
    /// [`LivePolicy`], which bounds how long data may wait.
    #[default]
    Live,
    /// [`Tail`], which drops the newest data.
    Tail,
}

impl PolicyKind {
    /// Creates the policy that this value names.
    pub fn build(self) -> Box<dyn QueuePolicy> {
        match self {
            Self::Live => Box::new(LivePolicy::default()),
            Self::Tail => Box::new(Tail),
        }
    }
}

#[cfg(test)]
mod tests;
