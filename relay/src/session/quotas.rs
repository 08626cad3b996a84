//! What one session may use at a time.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Datagrams of a session that may wait for the control message that explains them.
const MAX_WAITING_DATAGRAMS: usize = 64;

/// Tracks of a session whose streams, or datagrams, the offload is told of before they come: an eighth of those that the kernel has room
/// for. What begins beyond goes its way stream by stream.
const MAX_OFFLOADED_TRACKS: usize = 128;

/// What is left of a session's quotas. A place is given back when its permit is dropped.
pub struct Quotas {
    waiting_datagrams: Arc<Semaphore>,
    offloaded_tracks: Arc<Semaphore>,
}

impl Quotas {
    /// Places of the upstream relay's session: it has the tracks of everybody there.
    pub fn of_upstream() -> Self {
        Self { offloaded_tracks: Arc::new(Semaphore::new(Semaphore::MAX_PERMITS)), ..Self::default() }
    }
}

impl Default for Quotas {
    fn default() -> Self {
        Self {
            waiting_datagrams: Arc::new(Semaphore::new(MAX_WAITING_DATAGRAMS)),
            offloaded_tracks: Arc::new(Semaphore::new(MAX_OFFLOADED_TRACKS)),
        }
    }
}

impl Quotas {
    /// A place for a track that the offload is told of; `None` if all are taken.
    pub fn offloaded_track(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.offloaded_tracks).try_acquire_owned().ok()
    }

    /// A place for a datagram that waits; `None` if all are taken.
    pub fn waiting_datagram(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.waiting_datagrams).try_acquire_owned().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The kernel has 1024 tracks for everybody.
    #[test]
    fn one_publisher_takes_an_eighth_of_the_kernels_tracks() {
        let quotas = Quotas::default();
        let mut places: Vec<_> = std::iter::from_fn(|| quotas.offloaded_track()).take(10_000).collect();
        assert_eq!(places.len(), 128);
        places.pop();
        assert!(quotas.offloaded_track().is_some());
        let upstream = Quotas::of_upstream();
        let places: Vec<_> = std::iter::from_fn(|| upstream.offloaded_track()).take(10_000).collect();
        assert_eq!(places.len(), 10_000);
    }
}
