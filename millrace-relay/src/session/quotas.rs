//! What one session may use at a time.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Datagrams of a session that may wait for the control message that explains them.
const MAX_WAITING_DATAGRAMS: usize = 64;

/// What is left of a session's quotas. A place is given back when its permit is dropped.
pub struct Quotas {
    waiting_datagrams: Arc<Semaphore>,
}

impl Default for Quotas {
    fn default() -> Self {
        Self { waiting_datagrams: Arc::new(Semaphore::new(MAX_WAITING_DATAGRAMS)) }
    }
}

impl Quotas {
    /// A place for a datagram that waits; `None` if all are taken.
    pub fn waiting_datagram(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.waiting_datagrams).try_acquire_owned().ok()
    }
}
