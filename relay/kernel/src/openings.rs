//! Openings: what streams of a publisher's track are bound to when they begin.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::program as bpf;
use millrace_transport::offload::{self, Seen};
use parking_lot::Mutex;

use super::{
    connection::{Binds, KernelConnection},
    ingress::KernelIngress,
};

/// Openings of a track that wait, at first. There are more where streams have found none.
const FIRST: u32 = 4;

/// The part of all egresses that the openings of one track may take.
const PART: u32 = 8;

/// The openings of one track of a publisher.
pub(super) struct KernelOpenings {
    // Dropped first: then nothing more is bound.
    track: bpf::TrackRecord,
    /// Those that nobody has taken, bound or not.
    openings: Mutex<Vec<Arc<KernelIngress>>>,
    wanted: AtomicU32,
    /// Streams that had found none when `wanted` was set.
    missed: AtomicU32,
    connection: Arc<KernelConnection>,
    held: Arc<dyn Any + Send + Sync>,
}

impl KernelOpenings {
    pub fn new(
        connection: Arc<KernelConnection>,
        (alias, last): (u64, (u64, u64)),
        seen: Seen,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<Self>, millrace_kernel::Error> {
        let track = connection.open_from(&seen)?.track(alias, last)?;
        track.set_low(FIRST / 2);
        Ok(Arc::new(Self {
            track,
            openings: Mutex::default(),
            wanted: AtomicU32::new(FIRST),
            missed: AtomicU32::new(0),
            connection,
            held,
        }))
    }

    /// Openings that there should be.
    fn wanted(&self) -> u32 {
        let missed = self.track.missed();
        if self.missed.swap(missed, Ordering::Relaxed) != missed {
            let wanted = self.wanted.load(Ordering::Relaxed).saturating_mul(2).min(bpf::TrackRecord::MOST);
            self.wanted.store(wanted, Ordering::Relaxed);
            self.track.set_low(wanted / 2);
        }
        self.wanted.load(Ordering::Relaxed)
    }
}

impl Binds for KernelOpenings {
    fn take_bound(&self, stream: u64) -> Option<Arc<dyn offload::Ingress>> {
        let mut openings = self.openings.lock();
        let at = openings.iter().position(|opening| opening.slot.lock().bound() == Some(stream))?;
        let opening = openings.swap_remove(at);
        opening.slot.lock().bind(stream);
        Some(opening)
    }
}

impl offload::Made for KernelOpenings {
    fn is_over(&self) -> bool {
        self.connection.is_released.load(Ordering::Relaxed)
    }
}

impl offload::Openings for KernelOpenings {
    fn missing(&self, subscribers: usize) -> usize {
        let most = (self.connection.kernel.max_streams / PART) as usize;
        let most = most.checked_div(subscribers).unwrap_or(0);
        let wanted = most.min(self.wanted() as usize);
        wanted.saturating_sub(self.track.waiting() as usize)
    }

    fn make(&self) -> Option<Arc<dyn offload::Ingress>> {
        let slot = self.connection.upstream()?.opening();
        let room = &self.connection.kernel.room;
        let slot = slot.inspect_err(|error| room.explain(error, "streams are opened in userspace")).ok()?;
        Some(KernelIngress::new(Arc::clone(&self.connection), slot, Arc::clone(&self.held)))
    }

    fn put(&self, opening: Arc<dyn offload::Ingress>) {
        let opening = opening as Arc<dyn Any + Send + Sync>;
        let Ok(opening) = opening.downcast::<KernelIngress>() else { return };
        let mut openings = self.openings.lock();
        let is_put = self.track.put(&opening.slot.lock());
        if is_put {
            openings.push(opening);
        }
    }

    fn waiting(&self) -> Vec<Arc<dyn offload::Ingress>> {
        let openings = self.openings.lock();
        let waiting = openings.iter().filter(|opening| opening.slot.lock().bound().is_none());
        waiting.map(|opening| Arc::clone(opening) as _).collect()
    }

    fn began(&self, subgroup: (u64, u64)) {
        self.track.began(subgroup);
    }
}
