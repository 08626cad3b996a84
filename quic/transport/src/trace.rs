//! Events about single packets, for observers.

use std::num::NonZero;

/// Selects the packets that become events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketFilter {
    /// Packets whose number on their connection is a multiple of this, with all their copies.
    pub every: NonZero<u32>,
    /// Copies of this track only.
    pub track: Option<NonZero<u32>>,
    /// Copies from or to this session only, and its packets.
    pub session: Option<NonZero<u32>>,
}

/// The outcome of a packet that an offload saw, or of one copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadTraceEvent {
    /// When the packet arrived, `CLOCK_MONOTONIC`.
    pub arrived_ns: u64,
    /// When the packet, or the copy, was finished.
    pub time_ns: u64,
    /// The session that the packet came on.
    pub publisher: u32,
    /// The packet's number there; 0 if it is unknown, a guess if the packet was not authentic.
    pub received: u64,
    /// The packet's fate.
    pub what: OffloadTraceKind,
}

/// The fate of a packet, or of one copy of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadTraceKind {
    /// A packet that did not just become copies.
    Packet {
        /// The program's name for the outcome.
        outcome: &'static str,
        /// UDP payload, bytes.
        size: u16,
    },
    /// The copy of one frame for one subscriber.
    Copy {
        /// `sent`, or the program's name for the reason why not.
        outcome: &'static str,
        /// The session that the copy is for.
        subscriber: u32,
        /// Packet number and UDP payload, where the copy got that far.
        sent: Option<(u64, u16)>,
        /// The track's number.
        track: u32,
        /// The group ID.
        group: u64,
        /// The stream's ID on the subscriber's connection. It means nothing for datagrams.
        stream_id: u64,
        /// Offset of the first byte on that stream; for datagrams, the object ID.
        offset: u64,
        /// Stream bytes, or the bytes of the datagram.
        len: u16,
        /// The frame ends the stream.
        fin: bool,
    },
}
