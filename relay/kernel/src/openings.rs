//! The openings of a publisher's track: entries in the kernel's tables that are prepared for streams that have not
//! begun.

use std::{
    any::Any,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::program as bpf;
use millrace_transport::offload::{self, BeforeOffload};
use parking_lot::Mutex;

use super::{
    connection::{Binds, KernelConnection},
    ingress::KernelIngress,
};

/// The number of openings (entries for streams that have not begun) that a track gets at first. The number doubles when
/// streams have begun without a free opening.
const FIRST: u32 = 4;

/// The openings (entries for streams that have not begun) of one track may use at most one eighth of the egresses
/// (entries for subscribers' copies). Only a track's first opening may use more.
const PART: usize = 8;

/// How full the kernel's table of egresses (entries for subscribers' copies of a stream) is. It limits how many
/// openings (entries for streams that have not begun) a track gets.
struct Supply {
    /// Number of all entries for subscribers' copies (egresses) in the kernel's table, used and free.
    all: usize,
    /// Number of egresses (entries for subscribers' copies) that wait for a stream to begin, for all tracks.
    prepared: usize,
    /// Number of this track's subscribers. Each opening (entry for a stream that has not begun) takes one egress for
    /// each of them.
    subscribers: usize,
}

impl Supply {
    /// Returns how many openings to add for a track that has `waiting` openings and wants `wanted`. The track may add
    /// its first opening while less than three quarters of all egresses are prepared, and further openings while less
    /// than half are. All openings of the track may use an eighth of all egresses.
    fn missing(&self, wanted: usize, waiting: usize) -> usize {
        let Self { all, prepared, subscribers } = *self;
        let room = |part: usize| part.saturating_sub(prepared).checked_div(subscribers).unwrap_or(0);
        let first = usize::from(waiting == 0).min(room(all / 4 * 3));
        let most = (all / PART).checked_div(subscribers).unwrap_or(0).min(wanted);
        most.saturating_sub(waiting).min(room(all / 2)).max(first)
    }
}

/// The openings of one track of a publisher: entries that are prepared for streams that have not begun.
pub(super) struct KernelOpenings {
    // `track` is dropped before `openings` (entries for streams that have not begun), so that the program assigns no
    // further stream to them.
    track: bpf::TrackRecord,
    /// The openings (prepared entries) that userspace has not taken over yet. The program may have bound some of them
    /// to a stream already.
    openings: Mutex<Vec<Arc<KernelIngress>>>,
    wanted: AtomicU32,
    /// Number of streams that had begun without an opening when `wanted` was last adjusted.
    missed: AtomicU32,
    connection: Arc<KernelConnection>,
    held: Arc<dyn Any + Send + Sync>,
}

impl KernelOpenings {
    pub fn new(
        connection: Arc<KernelConnection>,
        alias: u64,
        last: (u64, u64),
        seen: BeforeOffload,
        held: Arc<dyn Any + Send + Sync>,
    ) -> Result<Arc<Self>, millrace_kernel::Error> {
        let track = connection.open_from(&seen)?.track(alias, last)?;
        // The program wakes userspace to prepare further openings (entries for streams that have not begun) when `FIRST
        // / 2` of them are left.
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

    /// Returns how many openings (entries for streams that have not begun) the track should have. Doubles the number if
    /// a stream has begun without a free opening since the last call.
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
    fn take_bound(&self, stream: u64) -> Option<Arc<dyn offload::OffloadIngress>> {
        let mut openings = self.openings.lock();
        let at = openings.iter().position(|opening| opening.slot.lock().bound() == Some(stream))?;
        let opening = openings.swap_remove(at);
        opening.slot.lock().bind(stream);
        Some(opening)
    }
}

impl offload::OffloadResult for KernelOpenings {
    fn is_over(&self) -> bool {
        self.connection.is_released.load(Ordering::Relaxed)
    }
}

impl offload::OffloadOpenings for KernelOpenings {
    fn missing(&self, subscribers: usize) -> usize {
        let kernel = &self.connection.kernel;
        let prepared = kernel.prepared.load(Ordering::Relaxed);
        let supply = Supply { all: kernel.max_streams as usize, prepared, subscribers };
        let waiting = self.track.waiting() as usize;
        let missing = supply.missing(self.wanted() as usize, waiting);
        if subscribers > 0 && waiting + missing == 0 {
            let error = millrace_kernel::Error::Full { what: "egresses" };
            kernel.room.explain(&error, "userspace opens a track's streams to subscribers");
        }
        missing
    }

    fn make(&self) -> Option<Arc<dyn offload::OffloadIngress>> {
        let slot = self.connection.upstream()?.opening();
        let room = &self.connection.kernel.room;
        let slot = slot
            .inspect_err(|error| room.explain(error, "userspace opens a track's streams to subscribers"))
            .ok()?;
        Some(KernelIngress::new(Arc::clone(&self.connection), slot, Arc::clone(&self.held)))
    }

    fn put(&self, opening: Arc<dyn offload::OffloadIngress>) {
        let opening = opening as Arc<dyn Any + Send + Sync>;
        let Ok(opening) = opening.downcast::<KernelIngress>() else { return };
        let mut openings = self.openings.lock();
        let is_put = self.track.put(&opening.slot.lock());
        if is_put {
            openings.push(opening);
        }
    }

    fn waiting(&self) -> Vec<Arc<dyn offload::OffloadIngress>> {
        let openings = self.openings.lock();
        let waiting = openings.iter().filter(|opening| opening.slot.lock().bound().is_none());
        waiting.map(|opening| Arc::clone(opening) as _).collect()
    }

    fn claim(&self, subgroup: (u64, u64)) -> bool {
        self.track.claim(subgroup)
    }

    fn close(&self) -> (u64, u64) {
        let last = self.track.close();
        self.openings.lock().retain(|opening| opening.slot.lock().bound().is_some());
        last
    }

    fn has_bound(&self) -> bool {
        self.openings.lock().iter().any(|opening| opening.slot.lock().bound().is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_watched_track_gets_one_preopened_stream_and_busy_tracks_more() {
        for (prepared, subscribers, wanted, waiting, missing, why) in [
            (0, 8, 4, 0, 4, "as many as it wants"),
            (32, 8, 64, 4, 60, "busy"),
            (0, 1024, 64, 0, 4, "an eighth of all"),
            (0, 5000, 64, 0, 1, "more subscribers than that"),
            (5000, 5000, 64, 1, 0, "it has one"),
            (16_384, 8, 4, 0, 1, "half are taken by others"),
            (16_384, 8, 4, 1, 0, "likewise, and it has one"),
            (24_576, 8, 4, 0, 0, "three quarters are"),
            (0, 30_000, 4, 0, 0, "it would take nearly all"),
            (0, 0, 4, 0, 0, "nobody watches it"),
        ] {
            let supply = Supply { all: 32_768, prepared, subscribers };
            assert_eq!(supply.missing(wanted, waiting), missing, "{why}");
        }
    }
}
