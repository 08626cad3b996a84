//! Events about single packets, for packet traces.

use std::num::NonZero;

/// A filter that selects the packets that become events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketFilter {
    /// The filter passes packets whose number on their connection is a multiple of this, with all their copies.
    pub every: NonZero<u32>,
    /// The only track whose copies pass, if set.
    pub track: Option<NonZero<u32>>,
    /// The only session whose packets pass, and copies from or to it, if set.
    pub session: Option<NonZero<u32>>,
}

/// The outcome of a packet that an offload saw, or of one copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadTraceEvent {
    /// Time at which the packet arrived, on `CLOCK_MONOTONIC`, nanoseconds.
    pub arrived_ns: u64,
    /// Time at which the packet, or the copy, was finished, on the same clock.
    pub time_ns: u64,
    /// The session on which the packet arrived.
    pub publisher: u32,
    /// The packet's number on that connection. It is 0 if unknown, and unreliable if the packet was not authentic.
    pub received: u64,
    /// The outcome of the packet or copy.
    pub what: OffloadTraceKind,
}

/// The outcome of a packet, or of one copy of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadTraceKind {
    /// A packet whose outcome is not only its copies.
    Packet {
        /// The program's name for the outcome.
        outcome: &'static str,
        /// Size of the UDP payload, bytes.
        size: u16,
    },
    /// The copy of one frame for one subscriber.
    Copy {
        /// The word `sent`, or the program's name for the reason why the copy was not sent.
        outcome: &'static str,
        /// The session that the copy is for.
        subscriber: u32,
        /// Packet number and size of the UDP payload in bytes, if the copy was numbered.
        sent: Option<(u64, u16)>,
        /// The track's number.
        track: u32,
        /// The group ID.
        group: u64,
        /// The stream's ID on the subscriber's connection. It has no meaning for datagrams.
        stream_id: u64,
        /// Offset of the first byte on that stream, or the object ID of a datagram.
        offset: u64,
        /// Number of stream bytes, or of the datagram's bytes.
        len: u16,
        /// True if the frame ends the stream.
        fin: bool,
    },
}
