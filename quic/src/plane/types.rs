//! What the modules of the data plane tell each other about streams, priorities and acknowledgements.

use std::{ops::RangeInclusive, time::Duration};

use crate::ack::EcnCounts;

/// Names a stream of one connection. Never reused; keys compare by age.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamKey(pub u64);

/// Subscriber and publisher priority: the part of a [`Priority`] that compares across subscriptions.
pub type Level = (u8, u8);

/// Order of sending: smaller first, field by field (draft-18, section "Priorities").
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Priority {
    pub subscriber: u8,
    pub publisher: u8,
    /// Group ID for ascending order, its complement (`!group`) for descending.
    pub group: u64,
    pub subgroup: u64,
}

impl Priority {
    /// Streams and datagrams of the same level take turns.
    pub fn level(&self) -> Level {
        (self.subscriber, self.publisher)
    }
}

/// What a stream or datagram carries, for whoever watches single packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// The caller's number of the track; 0: of none in particular.
    pub track: u32,
    pub group: u64,
}

/// An ACK frame in packet numbers on the wire: ranges descend and are disjoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ack {
    pub delay: Duration,
    pub ranges: Vec<RangeInclusive<u64>>,
    /// What the peer has counted on the connection so far.
    pub ecn: Option<EcnCounts>,
}
