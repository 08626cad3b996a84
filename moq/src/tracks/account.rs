//! What each publisher takes up in the cache, and what all publishers of a client do.

use std::sync::{
    Arc,
    atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
};

/// What one publisher takes up: the groups that it opened.
#[derive(Debug)]
pub struct Account {
    id: u64,
    bytes: AtomicUsize,
    share: Option<Arc<Share>>,
}

/// Bytes that the publishers of one client, or of a wider network, take up together.
#[derive(Debug)]
pub struct Share {
    limit: usize,
    bytes: AtomicUsize,
    within: Option<Arc<Share>>,
}

impl Share {
    /// Makes one of `limit` bytes, which counts for the share of a wider network as well.
    pub fn new(limit: usize, within: Option<Arc<Share>>) -> Self {
        Self { limit, bytes: AtomicUsize::new(0), within }
    }

    /// Returns this share and the wider ones that it is within, the narrowest first.
    pub(super) fn levels(self: &Arc<Self>) -> impl Iterator<Item = &Arc<Self>> {
        std::iter::successors(Some(self), |share| share.within.as_ref())
    }

    /// Memory of the groups that they opened, bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    /// They take up more than they may.
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
    /// Of one more publisher of a client.
    pub fn of(share: Arc<Share>) -> Self {
        Self { share: Some(share), ..Self::default() }
    }

    /// Returns the shares that it counts for, the narrowest first.
    pub(super) fn shares(&self) -> impl Iterator<Item = &Arc<Share>> {
        self.share.iter().flat_map(Share::levels)
    }

    /// Tells it from every other in the process.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Memory of the groups that the publisher opened, bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    pub(super) fn add(&self, cost: usize) {
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
