//! What all sessions of one client take up together.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_proto::relay::account;
use millrace_transport as transport;
use parking_lot::Mutex;

use super::budget::{Limits, Share, Usage};

/// A client that has sessions.
#[derive(Debug)]
pub struct Client {
    pub usage: Arc<Usage>,
    pub cache: Arc<account::Share>,
    pub receive: Arc<transport::Share>,
    fetch: Fetch,
}

/// A token bucket, of bytes.
#[derive(Debug)]
struct Fetch {
    bytes_per_second: u64,
    full_at: Mutex<Option<Instant>>,
    bytes: AtomicU64,
}

impl Client {
    /// `cache`: of its earlier sessions too.
    pub fn new(limits: &Limits, cache: Arc<account::Share>) -> Arc<Self> {
        Arc::new(Self {
            usage: Usage::new(limits.client),
            cache,
            receive: Arc::new(transport::Share::new(limits.share.receive_bytes)),
            fetch: Fetch {
                bytes_per_second: limits.share.fetch_bytes_per_second,
                full_at: Mutex::default(),
                bytes: AtomicU64::new(0),
            },
        })
    }

    /// One that may take up anything.
    pub fn unlimited() -> Arc<Self> {
        let limits = Limits { share: Share::UNLIMITED, ..Limits::default() };
        Self::new(&limits, Arc::new(limits.share.of_cache()))
    }

    /// So many bytes of objects go into its FETCH responses.
    pub fn fetched(&self, now: Instant, bytes: u64) {
        self.fetch.bytes.fetch_add(bytes, Relaxed);
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.fetch.bytes_per_second.max(1));
        // An hour is longer than any response is waited for.
        let cost =
            Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).min(Duration::from_secs(3600));
        let mut full_at = self.fetch.full_at.lock();
        *full_at = Some(full_at.map_or(now, |at| at.max(now)) + cost);
    }

    /// Until when no more of them go there.
    pub fn fetch_waits(&self, now: Instant) -> Option<Instant> {
        let full_at = (*self.fetch.full_at.lock())?;
        full_at.checked_sub(Duration::from_secs(1)).filter(|until| *until > now)
    }

    /// Bytes of objects in its FETCH responses so far.
    pub fn fetched_bytes(&self) -> u64 {
        self.fetch.bytes.load(Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fetches_have_a_seconds_worth_and_then_the_rate() {
        let share = Share { fetch_bytes_per_second: 1000, ..Share::default() };
        let limits = Limits { share, ..Limits::default() };
        let client = Client::new(&limits, Arc::new(share.of_cache()));
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        client.fetched(start, 1000);
        assert_eq!(client.fetch_waits(start), None);
        client.fetched(start, 500);
        assert_eq!(client.fetch_waits(start), Some(at(500)));
        assert_eq!(client.fetch_waits(at(500)), None);
        client.fetched(at(60_000), 1500);
        assert_eq!(client.fetch_waits(at(60_000)), Some(at(60_500)), "no more than a second is saved up");
        assert_eq!(client.fetched_bytes(), 3000);
        client.fetched(at(70_000), u64::MAX);
        assert!(client.fetch_waits(at(80_000)).is_some());
    }
}
