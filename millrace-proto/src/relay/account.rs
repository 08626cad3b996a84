//! What each publisher takes up in the cache.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// What one publisher takes up: the groups that it opened.
#[derive(Debug)]
pub struct Account {
    id: u64,
    bytes: AtomicUsize,
}

impl Default for Account {
    fn default() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self { id: NEXT.fetch_add(1, Relaxed), bytes: AtomicUsize::new(0) }
    }
}

impl Account {
    /// Tells it from every other in the process.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// Memory of the groups that the publisher opened, bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Relaxed)
    }

    pub(super) fn add(&self, cost: usize) {
        self.bytes.fetch_add(cost, Relaxed);
    }

    pub(super) fn subtract(&self, cost: usize) {
        self.bytes.fetch_sub(cost, Relaxed);
    }
}
