//! What goes when a receiver cannot keep up: decisions over what waits, as values.
//!
//! A [`Policy`] sees the streams that have bytes to send and names those to be reset. It keeps no clock and does nothing
//! itself. [`Live`] bounds how long and how much may wait, and drops what is oldest; [`Tail`] drops what came last.

mod live;
mod tail;

use std::time::{Duration, Instant};

pub use self::{live::Live, tail::Tail};
use super::types::{Level, StreamKey};

/// A stream with bytes to send.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// Keys compare by age.
    pub key: StreamKey,
    pub owner: u64,
    pub level: Level,
    /// Where it is among those of its owner and level that are sent in order.
    pub order: (u64, u64),
    pub subgroup: u64,
    /// Bytes that wait.
    pub bytes: u64,
    /// Since when the oldest of them has waited, where that is known.
    pub since: Option<Instant>,
    /// When the newest of them came, where that is known, of a stream of a group that is not its owner's newest any more.
    pub superseded: Option<Instant>,
    /// How long it may wait.
    pub max_delay: Option<Duration>,
    pub standing: Standing,
}

/// What a stream is to whoever gets it, in the order in which streams go when there are too many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// One of its owner's, and not what it can least do without.
    Ordinary,
    /// The most urgent subgroup of its owner's newest group.
    Newest,
    /// It was asked for from the past: a FETCH, or what the cache had when a subscription began.
    Asked,
}

/// All that waits on a connection.
#[derive(Clone, Debug, Default)]
pub struct Queue {
    pub streams: Vec<Waiting>,
    /// Waiting datagrams with what keeps them, bytes.
    pub datagram_bytes: u64,
    /// What the path is thought to carry, bytes per second.
    pub rate: u64,
}

/// Bounds on a [`Queue`].
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Streams that may have bytes to send at the same time.
    pub streams: usize,
    /// Bytes that may wait, without those that were asked for from the past. Half of it is a soft limit.
    pub bytes: u64,
    /// How long the soft limit may be exceeded.
    pub burst: Duration,
}

/// A stream to be reset.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drop {
    pub key: StreamKey,
    pub reason: Reason,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// It has waited for too long.
    Late,
    /// Its owner has a newer group, and the path does not carry the rest of it in time.
    Hopeless,
    /// Too many bytes wait.
    Bytes,
    /// Too many streams have bytes to send.
    Streams,
}

/// Which datagrams go when there are too many: those of the least urgent level, and of them..
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    Oldest,
    Newest,
}

pub trait Policy: Send {
    /// What of the queue goes now.
    fn review(&mut self, now: Instant, queue: &Queue, limits: &Limits) -> Vec<Drop>;

    /// More than [`Limits::streams`] have bytes to send: afterwards they do not.
    fn overflow(&self, queue: &Queue, limits: &Limits) -> Vec<Drop>;

    fn datagrams(&self) -> End;

    /// Nothing waits any more.
    fn rest(&mut self) {}
}

/// The policies that there are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kind {
    #[default]
    Live,
    Tail,
}

impl Kind {
    pub fn build(self) -> Box<dyn Policy> {
        match self {
            Self::Live => Box::new(Live::default()),
            Self::Tail => Box::new(Tail),
        }
    }
}

#[cfg(test)]
mod tests;
