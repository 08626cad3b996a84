//! What a peer sends beside its session.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// Counts what the peer of one connection sends that belongs to HTTP/3, or to no session.
#[derive(Debug, Default)]
pub struct Foreign {
    /// Bidirectional streams: requests, which are refused.
    requests: AtomicU64,
    /// Unidirectional streams, which are read and forgotten.
    streams: AtomicU64,
    /// Datagrams, which are dropped.
    datagrams: AtomicU64,
}

impl Foreign {
    /// Requests, and as many unidirectional streams, that a peer may send beside its session. Clients need three of those: the
    /// control stream and two of header compression; some send one now and then of a type that means nothing.
    pub const MOST: u64 = 64;

    /// Counts one, and says whether it is the one too many.
    pub(crate) fn request(&self) -> bool {
        self.requests.fetch_add(1, Relaxed) == Self::MOST
    }

    /// As [`Self::request`].
    pub(crate) fn stream(&self) -> bool {
        self.streams.fetch_add(1, Relaxed) == Self::MOST
    }

    pub(crate) fn datagram(&self) {
        self.datagrams.fetch_add(1, Relaxed);
    }

    /// What has come: requests, unidirectional streams, datagrams.
    pub fn counts(&self) -> [u64; 3] {
        [&self.requests, &self.streams, &self.datagrams].map(|counter| counter.load(Relaxed))
    }
}
