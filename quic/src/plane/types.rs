//! Types that the data plane's modules share: streams, priorities and acknowledgements.

use std::{ops::RangeInclusive, time::Duration};

use crate::ack::EcnCounts;

/// Identifies a stream within one connection of the data plane. Values are never reused, and older streams have smaller
/// ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamKey(pub u64);

/// Subscriber and publisher priority: the part of a [`Priority`] that is compared between streams of different
/// subscriptions.
pub type PriorityLevel = (u8, u8);

/// The order of sending: smaller values first, field by field (MoQ Transport draft-18, section "Priorities").
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Priority {
    /// The subscriber's priority of the track.
    pub subscriber: u8,
    /// The publisher's priority of the subgroup.
    pub publisher: u8,
    /// Group ID if groups are sent in ascending order, or its complement (`!group`) if they are sent in descending
    /// order.
    pub group: u64,
    /// Subgroup ID.
    pub subgroup: u64,
}

impl Priority {
    /// Returns the priority level: the priorities of the subscriber and the publisher. Streams and datagrams of the
    /// same level are sent in turn.
    pub fn level(&self) -> PriorityLevel {
        (self.subscriber, self.publisher)
    }
}

/// Track and group of a stream or datagram, for packet traces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// The number by which packet traces identify the track, or 0 for none.
    pub track: u32,
    /// Group ID.
    pub group: u64,
}

/// The contents of an ACK frame. Packet numbers are those on the wire, since the QUIC stack numbers only its own
/// packets. The ranges descend and are disjoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AckRanges {
    /// Time between the arrival of the packet with the largest number and the sending of the frame.
    pub delay: Duration,
    /// Ranges of acknowledged packet numbers.
    pub ranges: Vec<RangeInclusive<u64>>,
    /// The peer's ECN counts on the connection so far.
    pub ecn: Option<EcnCounts>,
}
