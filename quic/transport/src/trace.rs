//! Events about single packets, for whoever watches them.

use std::num::NonZero;

/// Which packets become events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filter {
    /// Of each connection's packets those whose number is a multiple of it, with all their copies.
    pub every: NonZero<u32>,
    /// Copies of this track only.
    pub track: Option<NonZero<u32>>,
    /// Copies from or to this session only, and its packets.
    pub session: Option<NonZero<u32>>,
}

/// Something that became of a packet that an offload met.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// When the packet arrived, `CLOCK_MONOTONIC`.
    pub arrived_ns: u64,
    /// When it, or the copy, had been dealt with.
    pub time_ns: u64,
    /// The session that the packet came on.
    pub publisher: u32,
    /// The packet's number there; 0 where it could not be told, a guess where it was not authentic.
    pub received: u64,
    pub what: What,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// A packet that did not just become copies.
    Packet {
        outcome: &'static str,
        /// UDP payload, bytes.
        size: u16,
    },
    /// One frame of the packet for one subscriber.
    Copy {
        outcome: &'static str,
        subscriber: u32,
        /// Packet number and UDP payload, where the copy got that far.
        sent: Option<(u64, u16)>,
        track: u32,
        group: u64,
        stream_id: u64,
        offset: u64,
        len: u16,
        fin: bool,
    },
}
