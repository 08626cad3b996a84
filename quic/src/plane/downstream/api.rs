//! What goes into a [`Downstream`] and comes out of it.

use std::{sync::Arc, time::Duration};

#[cfg(doc)]
use super::Downstream;
use crate::plane::{
    congestion::Algorithm,
    datagrams::Pool,
    ecn, policy,
    recovery::{self, NeverSent},
    types::StreamKey,
};

#[derive(Clone, Debug)]
pub struct Config {
    pub algorithm: Algorithm,
    pub pacing: bool,
    /// Packets are marked ECT(0) where the path takes that.
    pub ecn: bool,
    /// Largest UDP payload that the path is known to take at first, bytes.
    pub mtu: usize,
    /// Round trip to assume before the first sample.
    pub initial_rtt: Duration,
    /// What goes when the peer does not keep up.
    pub policy: policy::Kind,
    /// Bounds on the streams that wait.
    pub queue: policy::Limits,
    /// What waiting datagrams may take, bytes, with what keeps them. Beyond it datagrams of the lowest priority are dropped.
    pub max_datagram_bytes: u64,
    /// Where those of several connections are taken from.
    pub datagram_pool: Option<Arc<Pool>>,
    pub reset_codes: ResetCodes,
}

/// The application's error codes for streams that the data plane resets by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResetCodes {
    /// A delivery timeout expired.
    pub late: u64,
    /// The bytes were evicted, or the stream's turn would never come.
    pub behind: u64,
    /// The offload opened the stream for something that does not come here.
    pub gone: u64,
}

impl Config {
    /// Defaults for everything but the application's codes.
    pub fn new(reset_codes: ResetCodes) -> Self {
        Self {
            algorithm: Algorithm::default(),
            pacing: true,
            ecn: false,
            mtu: 1200,
            initial_rtt: Duration::from_millis(333),
            policy: policy::Kind::default(),
            queue: policy::Limits { streams: 4096, bytes: 16 << 20, burst: Duration::from_secs(1) },
            max_datagram_bytes: 1 << 20,
            datagram_pool: None,
            reset_codes,
        }
    }
}

/// Limits of the peer, from its transport parameters (RFC 9000, section 18.2).
#[derive(Clone, Copy, Debug, Default)]
pub struct PeerLimits {
    /// Bytes that the data plane may send on the connection: the peer's limit without the QUIC stack's part.
    pub max_data: u64,
    /// Initial credit of each unidirectional stream, bytes.
    pub max_stream_data_uni: u64,
    /// Unidirectional streams that may ever be opened on the connection, including the QUIC stack's.
    pub max_streams_uni: u64,
    /// Index of the data plane's first unidirectional stream. Those before it are the QUIC stack's.
    pub first_stream_uni: u64,
    /// Largest DATAGRAM frame that the peer takes, bytes; 0: none (RFC 9221).
    pub max_datagram_frame_size: u64,
    pub max_ack_delay: Duration,
    /// Whether this end is the QUIC server, which shows in the low bits of stream IDs.
    pub is_server: bool,
}

/// What [`Downstream::poll_event`] reports about a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    pub key: StreamKey,
    pub owner: u64,
    pub kind: EventKind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The stream got an ID.
    Opened,
    /// The peer sent STOP_SENDING; the stream is being reset with the same code.
    Stopped(u64),
    /// Everything is acknowledged, FIN included. The key is gone.
    Finished,
    /// The reset is acknowledged, or the stream was dropped before it got an ID. The key is gone.
    Reset(u64),
}

impl EventKind {
    /// Whether the stream is gone.
    pub fn is_end(self) -> bool {
        matches!(self, Self::Finished | Self::Reset(_))
    }
}

/// The streams of one owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owned {
    /// Streams that ever got an ID.
    pub opened: u64,
    /// Streams that are not over.
    pub live: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a DATAGRAM frame of {size} bytes exceeds the peer's limit of {limit}")]
pub struct TooLarge {
    pub size: u64,
    pub limit: u64,
}

/// The peer broke the protocol: the connection must be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Violation {
    /// PROTOCOL_VIOLATION (RFC 9000, section 13.1).
    #[error(transparent)]
    NeverSent(#[from] NeverSent),
    /// STREAM_STATE_ERROR (RFC 9000, sections 19.5 and 19.10).
    #[error("stream {0} was never opened")]
    NeverOpened(u64),
}

/// Why streams were reset, and how many.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resets {
    /// The source ended with a reset.
    pub source: u64,
    /// [`Downstream::reset`].
    pub requested: u64,
    /// STOP_SENDING.
    pub stopped: u64,
    pub object_timeout: u64,
    pub subgroup_timeout: u64,
    /// The source lost its bytes before they were sent.
    pub evicted: u64,
    /// More than [`policy::Limits::streams`] had bytes to send.
    pub overflow: u64,
    /// It had waited for longer than it may.
    pub late: u64,
    /// A newer group had begun, and it would have come too late.
    pub hopeless: u64,
    /// More than [`policy::Limits::bytes`] waited.
    pub queue_full: u64,
    /// Streams that never got an ID; they are counted above as well.
    pub unopened: u64,
}

/// What a connection carries, and what stands in a queue for it.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Bytes that were acknowledged.
    pub delivered: u64,
    /// What the path is thought to carry, bytes per second: as the congestion controller estimates it, or else a window in
    /// each round trip.
    pub bandwidth: u64,
    /// The most that it was seen to deliver in the last seconds, bytes per second.
    pub fastest: u64,
    /// How long the oldest of what is sent live has waited.
    pub waiting: Duration,
    /// Smoothed.
    pub round_trip: Duration,
}

/// Counters since the connection began, and its current state.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    pub recovery: recovery::Counts,
    /// Stream bytes sent for the first time, and again.
    pub stream_bytes: u64,
    pub retransmitted_bytes: u64,
    pub datagrams_sent: u64,
    /// A delivery timeout was over.
    pub datagrams_expired: u64,
    /// They had waited for longer than they may.
    pub datagrams_late: u64,
    pub datagrams_too_large: u64,
    pub datagrams_overflowed: u64,
    /// Packets that the offload sent, and their UDP payload. [`recovery::Counts`] includes them.
    pub offloaded_packets: u64,
    pub offloaded_bytes: u64,
    pub streams_opened: u64,
    pub streams_finished: u64,
    pub resets: Resets,
    pub live_streams: u64,
    /// Stream bytes that wait to be sent.
    pub pending_bytes: u64,
    pub window: u64,
    /// What the path is thought to carry, bytes per second, where the congestion controller estimates it.
    pub bandwidth: Option<u64>,
    pub ecn: ecn::State,
    pub bytes_in_flight: u64,
    pub smoothed_rtt: Duration,
    pub min_rtt: Duration,
}
