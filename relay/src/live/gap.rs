//! The gap of a live track: what it may have missed since its source was lost or has changed.

use std::sync::{Arc, Weak};

use millrace_moq::tracks::gap::GapState;
use parking_lot::Mutex;

use crate::upstream::UpstreamTrack;

/// The gap of a live track.
#[derive(Default)]
pub struct TrackGap {
    pub state: Mutex<GapState>,
    /// The sources that were lost. Their streams may still be breaking off.
    lost: Mutex<Vec<Weak<UpstreamTrack>>>,
    /// Held by the session that fills the gap.
    pub filling: tokio::sync::Mutex<()>,
}

impl TrackGap {
    pub fn is_open(&self) -> bool {
        self.state.lock().from().is_some()
    }

    /// Notes that a source of the track was lost.
    pub fn lost(&self, upstream: &Arc<UpstreamTrack>) {
        let mut lost = self.lost.lock();
        lost.retain(|lost| lost.strong_count() > 0);
        lost.push(Arc::downgrade(upstream));
    }

    /// Returns the lost sources whose streams may still be open.
    pub fn lost_sources(&self) -> Vec<Arc<UpstreamTrack>> {
        self.lost.lock().iter().filter_map(Weak::upgrade).collect()
    }
}
