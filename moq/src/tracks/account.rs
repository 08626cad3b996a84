//! Counts of cache memory in use: one count for each publisher, and one for all publishers of a client or of a network.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};

/// The cache memory of one publisher, which holds all groups that the publisher opened.
#[derive(Debug)]
pub struct Account {
    id: u64,
    bytes: AtomicUsize,
    share: Option<Arc<CacheShare>>,
}

/// The cache memory of all publishers of one client or one wider network.
#[derive(Debug)]
pub struct CacheShare {
    limit: usize,
    bytes: AtomicUsize,
    within: Option<Arc<CacheShare>>,
}

impl CacheShare {
    /// Makes the count of cache memory of a client or network that may use at most `limit` bytes. The bytes are also
    /// counted in `within`, the count of a wider network.
    pub fn new(limit: usize, within: Option<Arc<CacheShare>>) -> Self {
        Self { limit, bytes: AtomicUsize::new(0), within }
    }

    /// Returns this count of cache memory and the counts of the wider networks, the narrowest network first.
    pub(super) fn levels(self: &Arc<Self>) -> impl Iterator<Item = &Arc<Self>> {
        std::iter::successors(Some(self), |share| share.within.as_ref())
    }

    /// Returns the cache memory of the groups that the publishers of this client or network opened, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// Reports whether the publishers of this client or network use more cache memory than its limit.
    pub(super) fn is_exceeded(&self) -> bool {
        self.bytes() > self.limit
    }
}

impl Default for Account {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { id: NEXT.fetch_add(1, Relaxed), bytes: AtomicUsize::new(0), share: None }
    }
}

impl Account {
    /// Makes a count for another publisher of the client whose cache memory is counted in `share`.
    pub fn from_share(share: Arc<CacheShare>) -> Self {
        Self { share: Some(share), ..Self::default() }
    }

    /// Returns the counts of the client and of the wider networks that include this publisher's memory, the narrowest
    /// network first.
    pub(super) fn shares(&self) -> impl Iterator<Item = &Arc<CacheShare>> {
        self.share.iter().flat_map(CacheShare::levels)
    }

    /// Returns the ID of this publisher's count of memory, which is unique in this process.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Returns the memory of the groups that the publisher opened, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    pub(super) fn add(&self, cost: usize) {
        // Relaxed ordering is enough: the counters only bound memory, and no other memory access depends on them.
        for bytes in self.counts() {
            bytes.fetch_add(cost, Relaxed);
        }
    }

    pub(super) fn subtract(&self, cost: usize) {
        for bytes in self.counts() {
            bytes.fetch_sub(cost, Relaxed);
        }
    }

    fn counts(&self) -> impl Iterator<Item = &AtomicUsize> {
        [&self.bytes].into_iter().chain(self.shares().map(|share| &share.bytes))
    }
}
