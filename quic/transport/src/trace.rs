//! Events about single packets, for packet traces.

use std::num::NonZero;

/// A filter that selects the packets for which trace events are collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PacketFilter {
    /// The filter passes packets whose packet number is a multiple of this number, and all copies of their contents for
    /// subscribers.
    pub every: NonZero<u32>,
    /// If set, only copies of this MoQ track's data for subscribers pass the filter.
    pub track: Option<NonZero<u32>>,
    /// If set, only packets that arrive on this MoQ session, and copies of data from or to this session, pass the
    /// filter.
    pub session: Option<NonZero<u32>>,
}

/// A trace event: what a kernel offload did with a received packet, or with one copy of its contents for a subscriber.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffloadTraceEvent {
    /// Time at which the packet arrived, on `CLOCK_MONOTONIC`, nanoseconds.
    pub arrived_ns: u64,
    /// Time at which the packet or the copy was completely processed, on `CLOCK_MONOTONIC`, nanoseconds.
    pub time_ns: u64,
    /// The number that identifies the session on which the packet arrived.
    pub publisher: u32,
    /// The packet number of the received packet: 0 if it is unknown, and unreliable if the packet was not authentic.
    pub received: u64,
    /// The kernel offload's outcome for the packet or copy.
    pub what: OffloadTraceKind,
}

/// A kernel offload's outcome for a received packet, or for one copy of its contents for a subscriber.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OffloadTraceKind {
    /// The kernel offload's outcome for a received packet as a whole, for example why it was not forwarded.
    Packet {
        /// The BPF program's name for what it did with the packet.
        outcome: &'static str,
        /// Size of the UDP payload, bytes.
        size: u16,
    },
    /// The copy of one frame for one subscriber.
    Copy {
        /// `sent`, or the BPF program's name for the reason why the copy was not sent.
        outcome: &'static str,
        /// The subscriber's session to which the copy is sent.
        subscriber: u32,
        /// Packet number and size of the UDP payload in bytes, if a packet number was drawn for the copy.
        sent: Option<(u64, u16)>,
        /// The number by which traces identify the track.
        track: u32,
        /// The group ID.
        group: u64,
        /// The stream's ID on the subscriber's connection. It has no meaning for datagrams.
        stream_id: u64,
        /// Offset of the frame's first byte on the subscriber's stream, or the object ID of a datagram.
        offset: u64,
        /// Number of stream bytes in the frame, or of bytes in the datagram.
        len: u16,
        /// True if the frame ends the stream.
        fin: bool,
    },
}
