//! Counts of streams and datagrams that a peer sends outside its WebTransport session.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counters of one connection, for HTTP/3 streams and datagrams that do not belong to its WebTransport session.
#[derive(Debug, Default)]
pub struct Foreign {
    /// Bidirectional streams. They carry requests, which are refused.
    requests: AtomicU64,
    /// Unidirectional streams, whose contents are read and discarded.
    streams: AtomicU64,
    /// Datagrams outside of the session, which are dropped.
    datagrams: AtomicU64,
}

impl Foreign {
    /// Largest number of requests, and of unidirectional streams, that a peer may send outside its WebTransport
    /// session. Clients need three streams: the control stream and two for header compression. Some clients also send
    /// streams of reserved types.
    pub const MOST: u64 = 64;

    /// Counts a request. Returns whether it is the first one above the limit.
    pub(crate) fn request(&self) -> bool {
        self.requests.fetch_add(1, Relaxed) == Self::MOST
    }

    /// Counts a unidirectional stream. Returns whether it is the first one above the limit.
    pub(crate) fn stream(&self) -> bool {
        self.streams.fetch_add(1, Relaxed) == Self::MOST
    }

    pub(crate) fn datagram(&self) {
        self.datagrams.fetch_add(1, Relaxed);
    }

    /// Returns the numbers of requests, unidirectional streams and datagrams that the peer has sent outside its
    /// session.
    pub fn counts(&self) -> [u64; 3] {
        [&self.requests, &self.streams, &self.datagrams].map(|counter| counter.load(Relaxed))
    }
}
