//! Budgets for the requests and tracks of a session, and of all sessions of a client.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_moq::tracks::account;
use parking_lot::Mutex;

use super::{refusal::AccessRefusal, unproven};

/// The limits on requests and tracks of one session, or of all sessions of one client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Largest number of requests per second, and largest burst of requests.
    pub requests_per_second: u64,
    /// Largest number of tracks that open requests use at the same time.
    pub tracks: u64,
}

/// Delayed messages never use the last part of their token bucket, which refills in this time. Requests, which are
/// refused and not delayed when the bucket is empty, may use this part, too.
const LEFT: Duration = Duration::from_millis(500);

/// The most that one client may use of what all clients share: cache, FETCH bandwidth, receive windows and forwarded
/// streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientShare {
    /// Largest number of bytes of the cache that groups of the client's tracks take.
    pub cache_bytes: u64,
    /// Largest number of bytes that FETCH responses send the client per second, and in one burst.
    pub fetch_bytes_per_second: u64,
    /// Largest number of bytes of the receive windows of all the client's sessions.
    pub receive_bytes: u64,
    /// Largest number of streams to the client's subscribers that engine `kernel` forwards at the same time.
    pub kernel_streams: u64,
}

impl ClientShare {
    /// No limit on what one client may use of the cache, FETCH bandwidth, receive windows and forwarded streams.
    pub const UNLIMITED: Self = Self {
        cache_bytes: u64::MAX,
        fetch_bytes_per_second: u64::MAX,
        receive_bytes: u64::MAX,
        kernel_streams: u64::MAX,
    };

    /// Returns a new account of the cache memory that the client's tracks use, with this limit. The memory also counts
    /// against `within`, the account of the client's network.
    pub fn cache_share(&self, within: Option<Arc<account::CacheShare>>) -> account::CacheShare {
        account::CacheShare::new(usize::try_from(self.cache_bytes).unwrap_or(usize::MAX), within)
    }

    /// Returns the limits of a network of clients, if `self` has the limits of one client. The network's limits are
    /// `times` as high, but at most `most`, and not lower than one client's.
    fn network_limits(&self, times: u64, most: &Self) -> Self {
        let wider = |of_client: u64, most: u64| of_client.saturating_mul(times).min(most.max(of_client));
        Self {
            cache_bytes: wider(self.cache_bytes, most.cache_bytes),
            fetch_bytes_per_second: wider(self.fetch_bytes_per_second, most.fetch_bytes_per_second),
            receive_bytes: wider(self.receive_bytes, most.receive_bytes),
            kernel_streams: wider(self.kernel_streams, most.kernel_streams),
        }
    }
}

impl Default for ClientShare {
    fn default() -> Self {
        Self { fetch_bytes_per_second: 256 << 20, receive_bytes: 256 << 20, ..Self::UNLIMITED }
    }
}

/// The limits on what sessions, clients and networks of clients may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BudgetLimits {
    /// The budget of one session for requests and tracks.
    pub session: Budget,
    /// The budget for requests and tracks that all sessions of one client share.
    pub client: Budget,
    /// Largest number of subscriptions of one session to the same track at the same time.
    pub same_track: u64,
    /// The most that one client may use of the cache, FETCH bandwidth, receive windows and streams, which all clients
    /// share.
    pub share: ClientShare,
    /// The most that a network of clients may use of the resources that all clients share. If one client's limit is
    /// higher, it applies to the network, too.
    pub network: ClientShare,
    /// Largest number of bytes of a session's registered tokens (MAX_AUTH_TOKEN_CACHE_SIZE).
    pub token_cache: u64,
    /// Limits on sessions whose peer has not shown yet that it may subscribe or publish: their number, and the time
    /// that they have to do so.
    pub unproven: unproven::UnprovenBounds,
}

impl Default for BudgetLimits {
    fn default() -> Self {
        Self {
            session: Budget { requests_per_second: 1000, tracks: 10_000 },
            client: Budget { requests_per_second: 10_000, tracks: 100_000 },
            same_track: 4,
            share: ClientShare::default(),
            network: ClientShare::UNLIMITED,
            token_cache: 16 << 10,
            unproven: unproven::UnprovenBounds::default(),
        }
    }
}

impl BudgetLimits {
    /// Returns the limits of a network of clients that together may use `times` as much as one client: those on
    /// requests and tracks, and those on shared resources.
    pub fn network_budget(&self, times: u64) -> (Budget, ClientShare) {
        let Budget { requests_per_second, tracks } = self.client;
        let budget = Budget {
            requests_per_second: requests_per_second.saturating_mul(times),
            tracks: tracks.saturating_mul(times),
        };
        (budget, self.share.network_limits(times, &self.network))
    }
}

/// A budget for requests and tracks, and how much of it is used up.
#[derive(Debug)]
pub struct BudgetUsage {
    budget: Budget,
    requests: Mutex<BudgetBucket>,
    tracks: AtomicU64,
    /// Number of requests that were admitted.
    admitted: AtomicU64,
    refused: AtomicU64,
}

/// A token bucket.
#[derive(Debug)]
struct BudgetBucket {
    /// The time when the bucket will be full again; `None` if it was never used.
    full_at: Option<Instant>,
}

/// A track that counts against one or several budgets. Dropping this value stops counting the track.
#[derive(Debug, Default)]
pub struct BudgetPlace(Vec<Arc<BudgetUsage>>);

impl Drop for BudgetPlace {
    fn drop(&mut self) {
        for usage in &self.0 {
            usage.tracks.fetch_sub(1, Relaxed);
        }
    }
}

impl BudgetUsage {
    /// Makes an unused budget for a session or a client.
    pub fn new(budget: Budget) -> Arc<Self> {
        Arc::new(Self {
            budget,
            requests: Mutex::new(BudgetBucket { full_at: None }),
            tracks: AtomicU64::new(0),
            admitted: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        })
    }

    /// Charges a request to the budget as `cost` requests.
    ///
    /// # Errors
    /// Fails if there were too many requests.
    pub fn request(&self, now: Instant, cost: u64) -> Result<(), AccessRefusal> {
        let taken = self.requests.lock().take(now, self.budget.requests_per_second, cost);
        let count = if taken { &self.admitted } else { &self.refused };
        count.fetch_add(1, Relaxed);
        taken.then_some(()).ok_or(AccessRefusal::Rate)
    }

    /// Charges a message to the budget as `cost` requests, even if the budget is used up. Returns the time when the
    /// message may be processed.
    pub fn reserve(&self, now: Instant, cost: u64) -> Instant {
        self.requests.lock().reserve(now, self.budget.requests_per_second, cost)
    }

    /// Counts a track against every budget of `usages`.
    ///
    /// # Errors
    /// Fails if one of the budgets is used up. In that case the track may already count against some of the other
    /// budgets. It does so until `place` is dropped.
    pub fn track<'a>(
        place: &mut BudgetPlace,
        usages: impl IntoIterator<Item = &'a Arc<Self>>,
    ) -> Result<(), AccessRefusal> {
        for usage in usages {
            let most = usage.budget.tracks;
            let more = |tracks: u64| (tracks < most).then_some(tracks + 1);
            if usage.tracks.fetch_update(Relaxed, Relaxed, more).is_err() {
                usage.refused.fetch_add(1, Relaxed);
                return Err(AccessRefusal::Tracks);
            }
            place.0.push(Arc::clone(usage));
        }
        Ok(())
    }

    /// Returns the number of tracks that open requests use at present.
    pub fn tracks(&self) -> u64 {
        self.tracks.load(Relaxed)
    }

    /// Returns how many requests were admitted.
    pub fn admitted(&self) -> u64 {
        self.admitted.load(Relaxed)
    }

    /// Returns how many requests were refused because the budget was used up.
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }
}

impl BudgetBucket {
    /// Charges `cost` requests if the bucket holds at least one request. The bucket may go below zero, so that a
    /// request whose cost exceeds the bucket's capacity can pass at all.
    fn take(&mut self, now: Instant, rate: u64, cost: u64) -> bool {
        // A bucket that was full in the past is full now, and holds no more for the time since.
        let full_at = self.full_at.map_or(now, |at| at.max(now));
        let fits =
            (full_at + time_for_cost(1, rate)).saturating_duration_since(now) <= Duration::from_secs(1);
        if fits {
            self.full_at = Some(full_at + time_for_cost(cost, rate));
        }
        fits
    }

    /// Charges `cost` requests. Returns the time at which they may be processed. Until then, earlier charges would
    /// leave less in the bucket than the requests that accrue during [`LEFT`].
    fn reserve(&mut self, now: Instant, rate: u64, cost: u64) -> Instant {
        let full_at = self.full_at.map_or(now, |at| at.max(now));
        self.full_at = Some(full_at + time_for_cost(cost, rate));
        full_at.checked_sub(LEFT).map_or(now, |at| at.max(now))
    }
}

/// Returns the time in which `cost` requests become available at a rate.
fn time_for_cost(cost: u64, rate: u64) -> Duration {
    Duration::from_nanos(1_000_000_000 / rate.max(1)).saturating_mul(u32::try_from(cost).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_budget_allows_a_burst_of_one_second_and_then_its_rate() {
        let usage = BudgetUsage::new(Budget { requests_per_second: 10, tracks: 1 });
        let start = Instant::now();
        let taken = |now| (0..100).filter(|_| usage.request(now, 1).is_ok()).count();
        assert_eq!(taken(start), 10);
        assert_eq!(taken(start + Duration::from_millis(99)), 0);
        assert_eq!(taken(start + Duration::from_millis(300)), 3);
        assert_eq!(taken(start + Duration::from_secs(60)), 10);
        assert_eq!((usage.admitted(), usage.refused()), (23, 377));
    }

    #[test]
    fn request_of_cost_five_takes_five_tokens_of_the_request_budget() {
        let usage = BudgetUsage::new(Budget { requests_per_second: 10, tracks: 1 });
        let start = Instant::now();
        assert_eq!((0..100).filter(|_| usage.request(start, 5).is_ok()).count(), 2);
        let small = BudgetUsage::new(Budget { requests_per_second: 1, tracks: 1 });
        assert!(small.request(start, 8).is_ok(), "or it could never be let in");
        assert!(small.request(start + Duration::from_secs(6), 1).is_err());
    }

    /// Checks that delayed messages pass at the configured rate in the long run, and leave the last half second of the
    /// token bucket to requests.
    #[test]
    fn delayed_messages_are_admitted_at_the_request_budgets_rate() {
        let usage = BudgetUsage::new(Budget { requests_per_second: 10, tracks: 1 });
        let start = Instant::now();
        let due: Vec<_> = (0..26).map(|_| (usage.reserve(start, 1) - start).as_millis()).collect();
        assert_eq!(due[..6], [0; 6]);
        assert!(due[5..].iter().zip((0..).step_by(100)).all(|(due, expected)| *due == expected), "{due:?}");
        assert!(usage.request(start + Duration::from_secs(1), 1).is_err(), "they are there");
        let later = start + Duration::from_millis(2600);
        assert_eq!((0..100).filter(|_| usage.request(later, 1).is_ok()).count(), 10);
    }

    #[test]
    fn track_counts_against_session_and_client_budget_or_neither() {
        let of = |tracks| BudgetUsage::new(Budget { requests_per_second: 1, tracks });
        let session = of(2);
        let client = of(1);
        let both = [&session, &client];
        let mut place = BudgetPlace::default();
        BudgetUsage::track(&mut place, both).unwrap();
        let mut other = BudgetPlace::default();
        assert_eq!(BudgetUsage::track(&mut other, both), Err(AccessRefusal::Tracks));
        drop(other);
        assert_eq!((session.tracks(), client.tracks()), (1, 1));
        drop(place);
        assert_eq!((session.tracks(), client.tracks()), (0, 0));
    }
}
