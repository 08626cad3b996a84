//! What one subscriber connection is owed, has been sent and has acknowledged.

use std::{
    ops::RangeInclusive,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;

use super::source::Source;

/// Limits of the peer, from its transport parameters (RFC 9000, section 18.2), less what quinn was granted.
#[derive(Clone, Copy, Debug, Default)]
pub struct PeerLimits {
    /// Bytes that the data plane may send on the connection (already without quinn's grant).
    pub max_data: u64,
    /// Initial credit of each unidirectional stream, bytes.
    pub max_stream_data_uni: u64,
    /// Unidirectional streams that may ever be opened on the connection, quinn's included.
    pub max_streams_uni: u64,
    /// Index of the first unidirectional stream that is ours (quinn's SETUP stream comes before).
    pub first_stream_uni: u64,
    /// Largest DATAGRAM frame that the peer takes, bytes; 0: none (RFC 9221).
    pub max_datagram_frame_size: u64,
    pub max_ack_delay: Duration,
    /// Whether this end is the QUIC server (decides the low bits of stream IDs).
    pub is_server: bool,
}

/// Order of sending: smaller first, field by field (draft-18, section "Priorities").
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Priority {
    pub subscriber: u8,
    pub publisher: u8,
    /// Group ID for ascending order, its complement (`!group`) for descending.
    pub group: u64,
    pub subgroup: u64,
}

/// Names a stream of one [`Downstream`] for as long as it lives; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StreamKey(pub u64);

pub struct NewStream {
    pub source: Arc<dyn Source>,
    pub priority: Priority,
    /// OBJECT_DELIVERY_TIMEOUT: an object not yet handed to the network this long after its first byte
    /// arrived resets the stream.
    pub object_timeout: Option<Duration>,
    /// SUBGROUP_DELIVERY_TIMEOUT: time from the FIN's arrival to the last acknowledgement.
    pub subgroup_timeout: Option<Duration>,
}

pub struct NewDatagram {
    pub payload: Bytes,
    pub priority: Priority,
    /// Dropped when it has not been sent by then.
    pub expires: Option<Instant>,
}

/// A wire ACK frame: largest first, ranges descending and disjoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ack {
    pub delay: Duration,
    pub ranges: Vec<RangeInclusive<u64>>,
}
