//! Budgets and usage of a client, over all its sessions, and of the networks that the client is in.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use millrace_moq::tracks::account;
use millrace_transport as transport;
use parking_lot::Mutex;

use super::budget::{self, BudgetLimits, BudgetUsage, ClientShare};
use super::refusal::AccessRefusal;

/// A client that has sessions, or a network with such clients. The clients of a network share a multiple of one
/// client's budget.
#[derive(Debug)]
pub struct AccessClient {
    /// How much the client has used of its budgets for requests and tracks.
    pub usage: Arc<BudgetUsage>,
    /// Cache memory that the client's tracks use, and its limit.
    pub cache: Arc<account::CacheShare>,
    /// Bytes of receive windows of the client's sessions, and their limit.
    pub receive: Arc<transport::WindowShare>,
    /// Number of streams to the client that engine `kernel` forwards, and its limit.
    pub kernel_streams: Arc<transport::WindowShare>,
    fetch: FetchBucket,
    /// Multiple of one client's budget that this client or network has: 1 for a client, and more for a network.
    times: u64,
    /// The next wider network that the client is in.
    within: Option<Arc<AccessClient>>,
}

/// A token bucket for the bytes of FETCH responses. A full bucket has what the rate allows in one second.
#[derive(Debug)]
struct FetchBucket {
    bytes_per_second: u64,
    /// The time at which the bucket is full again. `None`: nothing was taken yet.
    full_at: Mutex<Option<Instant>>,
    /// Total number of bytes of FETCH responses that were charged to the bucket.
    bytes: AtomicU64,
}

impl AccessClient {
    /// Makes a client or network whose budget is `times` that of one client. `cache` counts the cache memory of its
    /// tracks, including groups that the client's earlier sessions have left in the cache. `within` is the next wider
    /// network.
    pub fn new(
        limits: &BudgetLimits,
        times: u64,
        cache: Arc<account::CacheShare>,
        within: Option<Arc<AccessClient>>,
    ) -> Arc<Self> {
        let (budget, share) = limits.network_budget(times);
        let around = within.as_ref().map(|network| Arc::clone(&network.receive));
        let streams_around = within.as_ref().map(|network| Arc::clone(&network.kernel_streams));
        Arc::new(Self {
            usage: BudgetUsage::new(budget),
            cache,
            receive: Arc::new(transport::WindowShare::new(share.receive_bytes, around)),
            kernel_streams: Arc::new(transport::WindowShare::new(share.kernel_streams, streams_around)),
            fetch: FetchBucket {
                bytes_per_second: share.fetch_bytes_per_second,
                full_at: Mutex::default(),
                bytes: AtomicU64::new(0),
            },
            times,
            within,
        })
    }

    /// Reports whether this is a network of clients and no single client.
    pub fn is_network(&self) -> bool {
        self.times > 1
    }

    /// Returns a client without limits.
    pub fn unlimited() -> Arc<Self> {
        let limits = BudgetLimits { share: ClientShare::UNLIMITED, ..BudgetLimits::default() };
        Self::new(&limits, 1, Arc::new(limits.share.cache_share(None)), None)
    }

    /// Returns the client, and then its networks from the narrowest to the widest.
    fn levels(&self) -> impl Iterator<Item = &Self> {
        std::iter::successors(Some(self), |client| client.within.as_deref())
    }

    fn networks(&self) -> impl Iterator<Item = &Self> {
        self.levels().skip(1)
    }

    /// Charges a request as `cost` requests to the budgets of the client and of its networks. If the client's own
    /// budget is used up, nothing is taken from its networks' budgets.
    ///
    /// # Errors
    /// Fails if the budget of the client or of one of its networks is used up.
    pub fn request(&self, now: Instant, cost: u64) -> Result<(), AccessRefusal> {
        self.usage.request(now, cost)?;
        let of_networks = self.networks().try_for_each(|network| network.usage.request(now, cost));
        of_networks.map_err(|_| AccessRefusal::NetworkRate)
    }

    /// Charges a message as `cost` requests to the budgets of the client and of its networks. Returns the time at which
    /// all of these budgets allow the message.
    pub fn reserve(&self, now: Instant, cost: u64) -> Instant {
        self.levels().map(|level| level.usage.reserve(now, cost)).max().unwrap_or(now)
    }

    /// Counts a track against the budgets of the session, the client and the client's networks.
    ///
    /// # Errors
    /// Fails if one of these budgets allows no further track.
    pub fn track(&self, session: &Arc<BudgetUsage>) -> Result<budget::BudgetPlace, AccessRefusal> {
        let mut place = budget::BudgetPlace::default();
        // If a later budget is used up, dropping `place` takes back the counts that were already made.
        BudgetUsage::track(&mut place, [session, &self.usage])?;
        BudgetUsage::track(&mut place, self.networks().map(|network| &network.usage))
            .map_err(|_| AccessRefusal::NetworkTracks)?;
        Ok(place)
    }

    /// Counts bytes of objects that are sent in the client's FETCH responses.
    pub fn fetched(&self, now: Instant, bytes: u64) {
        self.levels().for_each(|level| level.fetch.take(now, bytes));
    }

    /// Returns the time until which the client's FETCH responses have to wait, or `None` if they may be sent now.
    pub fn fetch_waits(&self, now: Instant) -> Option<Instant> {
        self.levels().filter_map(|level| level.fetch.waits(now)).max()
    }

    /// Returns the bytes of objects that were sent in FETCH responses so far.
    pub fn fetched_bytes(&self) -> u64 {
        self.fetch.bytes.load(Relaxed)
    }
}

impl FetchBucket {
    fn take(&self, now: Instant, bytes: u64) {
        self.bytes.fetch_add(bytes, Relaxed);
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_second.max(1));
        // The cost is capped at an hour, so that one huge number of bytes cannot stop FETCH responses for longer.
        let cost =
            Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)).min(Duration::from_secs(3600));
        let mut full_at = self.full_at.lock();
        *full_at = Some(full_at.map_or(now, |at| at.max(now)) + cost);
    }

    fn waits(&self, now: Instant) -> Option<Instant> {
        let full_at = (*self.full_at.lock())?;
        // The bucket fills in one second, so it is empty one second before the time when it is full again.
        full_at.checked_sub(Duration::from_secs(1)).filter(|until| *until > now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Budget;

    fn within(limits: &BudgetLimits, times: u64, network: Option<&Arc<AccessClient>>) -> Arc<AccessClient> {
        let cache = limits.share.cache_share(network.map(|network| Arc::clone(&network.cache)));
        AccessClient::new(limits, times, Arc::new(cache), network.cloned())
    }

    /// Gives a network of clients 8 times the budget of one. Requests beyond a client's own budget take nothing from
    /// the network's.
    #[test]
    fn clients_of_a_network_share_eight_times_one_clients_request_budget() {
        let client = Budget { requests_per_second: 10, tracks: 2 };
        let share = ClientShare { fetch_bytes_per_second: 1000, ..ClientShare::default() };
        let limits = BudgetLimits { client, share, ..BudgetLimits::default() };
        let network = within(&limits, 8, None);
        let clients: Vec<_> = (0..100).map(|_| within(&limits, 1, Some(&network))).collect();
        let start = Instant::now();
        let greedy = (0..1000).filter(|_| clients[0].request(start, 1).is_ok()).count();
        assert_eq!(greedy, 10);
        assert_eq!(clients[0].request(start, 1), Err(AccessRefusal::Rate));
        let others = clients.iter().skip(1).flat_map(|one| (0..10).map(|_| one.request(start, 1)));
        let others: Vec<_> = others.collect();
        assert_eq!(others.iter().filter(|one| one.is_ok()).count(), 70);
        assert_eq!(others.last(), Some(&Err(AccessRefusal::NetworkRate)));

        let session = BudgetUsage::new(Budget { requests_per_second: 1, tracks: 1000 });
        let tracks: Vec<_> =
            clients.iter().flat_map(|one| [one.track(&session), one.track(&session)]).collect();
        assert_eq!(tracks.iter().filter(|one| one.is_ok()).count(), 16);
        assert_eq!(tracks.last().unwrap().as_ref().err(), Some(&AccessRefusal::NetworkTracks));
        assert_eq!(session.tracks(), 16, "a refused track holds no place");
        drop(tracks);
        assert_eq!((session.tracks(), network.usage.tracks()), (0, 0));

        clients.iter().take(9).for_each(|one| one.fetched(start, 1000));
        assert!(clients[99].fetch_waits(start).is_some(), "the network has fetched 9 times as much");
        assert_eq!(within(&limits, 1, None).fetch_waits(start), None);
    }

    #[test]
    fn network_limits_are_at_least_those_of_one_client() {
        let share = ClientShare {
            cache_bytes: 100,
            fetch_bytes_per_second: 7,
            receive_bytes: 600,
            ..ClientShare::UNLIMITED
        };
        let network = ClientShare {
            cache_bytes: 500,
            fetch_bytes_per_second: u64::MAX,
            receive_bytes: 500,
            ..ClientShare::UNLIMITED
        };
        let (_, wider) = BudgetLimits { share, network, ..BudgetLimits::default() }.network_budget(64);
        assert_eq!(
            wider,
            ClientShare {
                cache_bytes: 500,
                fetch_bytes_per_second: 448,
                receive_bytes: 600,
                ..ClientShare::UNLIMITED
            }
        );
    }

    #[test]
    fn fetch_waits_once_one_second_of_the_byte_rate_is_used() {
        let share = ClientShare { fetch_bytes_per_second: 1000, ..ClientShare::default() };
        let limits = BudgetLimits { share, ..BudgetLimits::default() };
        let client = within(&limits, 1, None);
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        client.fetched(start, 1000);
        assert_eq!(client.fetch_waits(start), None);
        client.fetched(start, 500);
        assert_eq!(client.fetch_waits(start), Some(at(500)));
        assert_eq!(client.fetch_waits(at(500)), None);
        client.fetched(at(60_000), 1500);
        assert_eq!(
            client.fetch_waits(at(60_000)),
            Some(at(60_500)),
            "an idle bucket holds one second of its rate"
        );
        assert_eq!(client.fetched_bytes(), 3000);
        client.fetched(at(70_000), u64::MAX);
        assert!(client.fetch_waits(at(80_000)).is_some());
    }
}
