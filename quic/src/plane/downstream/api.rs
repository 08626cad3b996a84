//! Parameters and results of a [`Downstream`].

use std::{sync::Arc, time::Duration};

#[cfg(doc)]
use super::Downstream;
use crate::plane::{
    congestion::CongestionAlgorithm,
    datagrams::DatagramPool,
    ecn, policy,
    recovery::{self, NeverSent},
    types::StreamKey,
};

/// Settings of a data plane.
#[derive(Clone, Debug)]
pub struct Config {
    /// The congestion controller.
    pub algorithm: CongestionAlgorithm,
    /// True if packets are paced. Otherwise they are sent as soon as the window allows.
    pub pacing: bool,
    /// True if packets are marked ECT(0) on paths that deliver ECN marks unchanged.
    pub ecn: bool,
    /// Initial path MTU: the largest UDP payload to send, bytes.
    pub mtu: usize,
    /// Round trip that is assumed before the first sample.
    pub initial_rtt: Duration,
    /// The policy that selects data to drop if it arrives faster than it can be sent to the peer.
    pub policy: policy::PolicyKind,
    /// Bounds on the number of bytes, and on the number of streams, that wait to be sent.
    pub queue: policy::QueueLimits,
    /// Largest number of bytes of memory that waiting datagrams may take, including their bookkeeping. Above it,
    /// datagrams of the lowest priority are dropped.
    pub max_datagram_bytes: u64,
    /// The memory that datagrams of several connections share.
    pub datagram_pool: Option<Arc<DatagramPool>>,
    /// The error codes for streams that the data plane resets by itself.
    pub reset_codes: ResetCodes,
}

/// The application's error codes for streams that the data plane resets by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResetCodes {
    /// Code for a stream whose delivery timeout has expired.
    pub late: u64,
    /// Code for a stream whose source evicted its bytes, or that was dropped because too much data waited to be sent.
    pub behind: u64,
    /// Code for a stream that the offload (another sender on the connection) opened, if its data never arrived at the
    /// data plane.
    pub gone: u64,
}

impl Config {
    /// Returns default settings with the application's error codes.
    pub fn new(reset_codes: ResetCodes) -> Self {
        Self {
            algorithm: CongestionAlgorithm::default(),
            pacing: true,
            ecn: false,
            mtu: 1200,
            initial_rtt: Duration::from_millis(333),
            policy: policy::PolicyKind::default(),
            queue: policy::QueueLimits { streams: 4096, bytes: 16 << 20, burst: Duration::from_secs(1) },
            max_datagram_bytes: 1 << 20,
            datagram_pool: None,
            reset_codes,
        }
    }
}

/// The peer's limits, from its transport parameters (RFC 9000, section 18.2).
#[derive(Clone, Copy, Debug, Default)]
pub struct PeerLimits {
    /// Bytes that the data plane may send on the connection: the peer's limit minus the QUIC stack's part.
    pub max_data: u64,
    /// The peer's initial credit for each unidirectional stream, bytes.
    pub max_stream_data_uni: u64,
    /// Unidirectional streams that may ever be opened on the connection, including the QUIC stack's.
    pub max_streams_uni: u64,
    /// Index of the data plane's first unidirectional stream. The streams with smaller indices are the QUIC stack's.
    pub first_stream_uni: u64,
    /// Largest DATAGRAM frame that the peer accepts, bytes, or 0 if it accepts none (RFC 9221).
    pub max_datagram_frame_size: u64,
    /// Longest time by which the peer delays an acknowledgement on purpose.
    pub max_ack_delay: Duration,
    /// True if this endpoint is the QUIC server, which determines the low bits of stream IDs.
    pub is_server: bool,
}

/// An event of a stream, from [`Downstream::poll_event`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DownstreamEvent {
    /// The key of the stream that the event is about.
    pub key: StreamKey,
    /// The stream's owner: [`NewStream::owner`](super::NewStream::owner).
    pub owner: u64,
    /// The event at the stream.
    pub kind: EventKind,
}

/// An event at a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The stream got its QUIC stream ID.
    Opened,
    /// The peer sent STOP_SENDING; the stream is being reset with the same code.
    Stopped(u64),
    /// The peer has acknowledged all bytes and FIN. The stream's key is no longer valid.
    Finished,
    /// The peer has acknowledged the reset, or the stream was dropped before it got an ID. The stream's key is no
    /// longer valid.
    Reset(u64),
}

impl EventKind {
    /// Returns whether the stream has ended.
    pub fn is_end(self) -> bool {
        matches!(self, Self::Finished | Self::Reset(_))
    }
}

/// Counts of the streams of one owner, such as a subscription.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owned {
    /// Streams that ever got an ID.
    pub opened: u64,
    /// Streams that have not ended yet.
    pub live: u64,
}

/// Error: the DATAGRAM frame is larger than the peer accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a DATAGRAM frame of {size} bytes exceeds the peer's limit of {limit}")]
pub struct TooLarge {
    /// Size of the frame, bytes.
    pub size: u64,
    /// Largest DATAGRAM frame that the peer accepts, bytes.
    pub limit: u64,
}

/// A protocol violation of the peer: the connection has to be closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolViolation {
    /// PROTOCOL_VIOLATION (RFC 9000, section 13.1).
    #[error(transparent)]
    NeverSent(#[from] NeverSent),
    /// STREAM_STATE_ERROR (RFC 9000, sections 19.5 and 19.10).
    #[error("stream {0} was never opened")]
    NeverOpened(u64),
}

/// Counts of streams that were reset, one field for each reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resets {
    /// Streams whose source ended with a reset.
    pub source: u64,
    /// Streams for which [`Downstream::reset`] was called.
    pub requested: u64,
    /// Streams for which the peer sent STOP_SENDING.
    pub stopped: u64,
    /// Streams whose OBJECT_DELIVERY_TIMEOUT expired.
    pub object_timeout: u64,
    /// Streams whose SUBGROUP_DELIVERY_TIMEOUT expired.
    pub subgroup_timeout: u64,
    /// Streams whose source evicted bytes before they were sent.
    pub evicted: u64,
    /// Streams that were dropped because more than [`policy::QueueLimits::streams`] had bytes to send.
    pub overflow: u64,
    /// Streams that were dropped because their data had waited longer than the stream's maximum delay.
    pub late: u64,
    /// Streams of an older group whose remaining bytes would have arrived too late, after a newer group had begun.
    pub hopeless: u64,
    /// Streams that were dropped because more than [`policy::QueueLimits::bytes`] bytes were waiting.
    pub queue_full: u64,
    /// Streams that were reset before they got an ID. Each is also counted in the field of its reason.
    pub unopened: u64,
}

/// A connection's throughput, and the time for which its data has waited to be sent.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionRoom {
    /// Bytes that the peer has acknowledged so far.
    pub delivered: u64,
    /// Estimated bandwidth of the path, bytes per second: the congestion controller's estimate, or one window per round
    /// trip if the controller has none.
    pub bandwidth: u64,
    /// Highest delivery rate of the last seconds, bytes per second.
    pub fastest: u64,
    /// Time for which the oldest waiting data has waited to be sent, not counting old objects that the receiver
    /// requested.
    pub waiting: Duration,
    /// Smoothed round-trip time.
    pub round_trip: Duration,
}

/// Counters since the connection began, and the connection's current state.
#[derive(Clone, Debug, Default)]
pub struct DownstreamStats {
    /// Packets sent, acknowledged and lost.
    pub recovery: recovery::RecoveryCounts,
    /// Stream bytes that were sent for the first time.
    pub stream_bytes: u64,
    /// Stream bytes that were sent again.
    pub retransmitted_bytes: u64,
    /// Datagrams that were sent.
    pub datagrams_sent: u64,
    /// Datagrams that were dropped because their delivery timeout had expired.
    pub datagrams_expired: u64,
    /// Datagrams that were dropped because they had waited for longer than allowed.
    pub datagrams_late: u64,
    /// Datagrams that were refused because they exceed the peer's limit.
    pub datagrams_too_large: u64,
    /// Datagrams that were dropped because the waiting datagrams took too much memory.
    pub datagrams_overflowed: u64,
    /// Packets sent by the offload, another sender on the connection. [`recovery::RecoveryCounts`] includes them.
    pub offloaded_packets: u64,
    /// Bytes of UDP payload of the packets sent by the offload, another sender on the connection.
    pub offloaded_bytes: u64,
    /// Streams that were opened, so that they got a QUIC stream ID.
    pub streams_opened: u64,
    /// Streams whose bytes were all acknowledged.
    pub streams_finished: u64,
    /// Streams that were reset, by reason.
    pub resets: Resets,
    /// Streams that have not ended yet.
    pub live_streams: u64,
    /// Stream bytes that wait to be sent.
    pub pending_bytes: u64,
    /// Congestion window, bytes.
    pub window: u64,
    /// Estimated bandwidth of the path, bytes per second; `None` if the congestion controller does not estimate it.
    pub bandwidth: Option<u64>,
    /// The state of ECN marking.
    pub ecn: ecn::EcnState,
    /// Bytes of packets that are neither acknowledged nor lost.
    pub bytes_in_flight: u64,
    /// Smoothed round-trip time (RFC 9002, section 5.3).
    pub smoothed_rtt: Duration,
    /// Shortest round-trip time of the path.
    pub min_rtt: Duration,
}
