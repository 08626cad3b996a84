//! Quotas that apply to each session by itself.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::info;

/// The most datagrams of a session that may wait for the control message that defines their track alias.
const MAX_WAITING_DATAGRAMS: usize = 64;

/// The quotas of one session. A permit that is dropped becomes available again.
pub struct Quotas {
    session: u64,
    waiting_datagrams: Arc<Semaphore>,
    offloaded_tracks: Arc<Semaphore>,
    /// True once the log has reported that the session has used up its quota of tracks that are forwarded in the
    /// kernel.
    is_told: AtomicBool,
}

impl Quotas {
    /// Returns the quotas of a session. `offloaded_tracks` is the setting of the same name in
    /// [`Config`](crate::Config).
    pub fn new(session: u64, offloaded_tracks: usize) -> Self {
        let offloaded_tracks = offloaded_tracks.min(Semaphore::MAX_PERMITS);
        Self {
            session,
            waiting_datagrams: Arc::new(Semaphore::new(MAX_WAITING_DATAGRAMS)),
            offloaded_tracks: Arc::new(Semaphore::new(offloaded_tracks)),
            is_told: AtomicBool::new(false),
        }
    }

    /// Returns the quotas for the session with an upstream relay, which publishes the tracks of many publishers.
    pub fn for_upstream(session: u64) -> Self {
        Self::new(session, usize::MAX)
    }

    /// Takes a permit for a track whose next streams or datagrams the kernel may forward. Returns `None` if the session
    /// has used up its quota, which is logged once.
    pub fn offloaded_track(&self) -> Option<OwnedSemaphorePermit> {
        let place = Arc::clone(&self.offloaded_tracks).try_acquire_owned().ok();
        if place.is_none() && !self.is_told.swap(true, Relaxed) {
            info!(
                session = self.session,
                "the session publishes more tracks than its share in the kernel, an eighth of kernel-tracks: userspace opens streams for the other tracks"
            );
        }
        place
    }

    /// Takes a permit for a datagram that waits for its track alias. Returns `None` if the quota is used up.
    pub fn waiting_datagram(&self) -> Option<OwnedSemaphorePermit> {
        Arc::clone(&self.waiting_datagrams).try_acquire_owned().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn session_offloads_at_most_its_quota_of_tracks_to_the_kernel() {
        let quotas = Quotas::new(1, 128);
        let mut places: Vec<_> = std::iter::from_fn(|| quotas.offloaded_track()).take(10_000).collect();
        assert_eq!(places.len(), 128);
        assert!(quotas.is_told.load(Relaxed));
        places.pop();
        assert!(quotas.offloaded_track().is_some());
        let upstream = Quotas::for_upstream(2);
        let places: Vec<_> = std::iter::from_fn(|| upstream.offloaded_track()).take(10_000).collect();
        assert_eq!(places.len(), 10_000);
    }
}
