//! Handles of tracks. When a publisher begins a stream of such a track, the program may open the streams to
//! subscribers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use libbpf_rs::MapCore;
use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::write;

use super::ingress::Locked;
use super::intf;
use super::shared::RelayMaps;
use super::slot::SlotRecord;

/// A track of an upstream with openings: entries that wait for the track's next streams. When this is dropped, no
/// further stream is bound to an opening, except in program runs that have already begun.
pub struct TrackRecord {
    shared: Arc<RelayMaps>,
    key: intf::Slot,
    index: u32,
    is_closed: AtomicBool,
}

impl TrackRecord {
    /// How often `close` yields to a preempted program run that holds the lock, before it gives up.
    const PATIENCE: usize = 100;

    /// The most openings (entries for streams that have not begun) of one track that may wait for a stream at the same
    /// time.
    pub const MOST: u32 = intf::OPENINGS as u32;

    pub(super) fn new(
        shared: Arc<RelayMaps>,
        upstream: u32,
        alias: u64,
        last: (u64, u64),
    ) -> Result<Self, Error> {
        let index = shared.take(|free| &mut free.tracks, "tracks")?;
        let key = intf::Slot { id: alias, upstream, kind: intf::TRACK };
        let entry = shared.tracks.get(index);
        entry.alias.store(alias, Ordering::Relaxed);
        entry.upstream.store(upstream, Ordering::Relaxed);
        entry.group.store(last.0, Ordering::Relaxed);
        entry.subgroup.store(last.1, Ordering::Relaxed);
        for word in [&entry.lock, &entry.put, &entry.taken, &entry.low, &entry.missed] {
            word.store(0, Ordering::Relaxed);
        }
        if let Err(error) = write(&shared.slots, "slots", key.as_bytes(), &index.to_ne_bytes()) {
            shared.retire(|free| &mut free.tracks, index);
            return Err(error);
        }
        // The program looks for openings (entries for streams that have not begun) only if such a track is registered
        // for the publisher's connection.
        shared.upstreams.get(upstream).tracks.fetch_add(1, Ordering::Relaxed);
        Ok(Self { shared, key, index, is_closed: AtomicBool::new(false) })
    }

    fn entry(&self) -> &intf::Track {
        self.shared.tracks.get(self.index)
    }

    /// Adds an opening: a slot for a stream that has not begun. The program binds streams to openings in the order in
    /// which they were added. Returns false if the track has [`Self::MOST`] openings already.
    pub fn put(&self, opening: &SlotRecord) -> bool {
        let entry = self.entry();
        let Some(ingress) = opening.ingress() else { return false };
        let Some(_locked) = Locked::new(&entry.lock) else { return false };
        let put = entry.put.load(Ordering::Relaxed);
        if put.wrapping_sub(entry.taken.load(Ordering::Relaxed)) >= Self::MOST {
            return false;
        }
        entry.openings[put as usize % intf::OPENINGS].store(ingress, Ordering::Relaxed);
        entry.put.store(put.wrapping_add(1), Ordering::Relaxed);
        true
    }

    /// Returns the number of openings (prepared entries) that wait for a stream to begin.
    pub fn waiting(&self) -> u32 {
        let entry = self.entry();
        let put = entry.put.load(Ordering::Relaxed);
        put.wrapping_sub(entry.taken.load(Ordering::Relaxed)).min(Self::MOST)
    }

    /// Returns the number of streams that began while no slot was prepared for them (no opening).
    pub fn missed(&self) -> u32 {
        self.entry().missed.load(Ordering::Relaxed)
    }

    /// Sets the number of remaining openings (entries for streams that have not begun) at which the program wakes
    /// userspace to prepare more.
    pub fn set_low(&self, low: u32) {
        self.entry().low.store(low, Ordering::Relaxed);
    }

    /// Returns the newest subgroup that has begun, as group and subgroup ID, as far as the program and userspace have
    /// recorded it.
    fn last(&self) -> (u64, u64) {
        let entry = self.entry();
        (entry.group.load(Ordering::Relaxed), entry.subgroup.load(Ordering::Relaxed))
    }

    /// Claims a subgroup (group ID and subgroup ID) for userspace. The program then opens subscribers' streams only for
    /// later subgroups. Returns false if the program has done so for this or a later subgroup, or if userspace has
    /// claimed one.
    pub fn claim(&self, subgroup: (u64, u64)) -> bool {
        // Most calls are for subgroups that are already claimed, so the subgroup is first compared without the lock.
        if subgroup <= self.last() {
            return false;
        }
        let entry = self.entry();
        let Some(_locked) = Locked::new(&entry.lock) else { return false };
        let is_next = subgroup > self.last();
        if is_next {
            entry.group.store(subgroup.0, Ordering::Relaxed);
            entry.subgroup.store(subgroup.1, Ordering::Relaxed);
        }
        is_next
    }

    /// Removes the track from the program's map, so that its openings (entries for streams that have not begun) get no
    /// further stream. Returns the newest subgroup that the program or userspace has recorded as begun.
    pub fn close(&self) -> (u64, u64) {
        if self.is_closed.swap(true, Ordering::Relaxed) {
            return self.last();
        }
        // The track's key is in the map `slots`, so the deletion cannot fail.
        let _ = self.shared.slots.delete(self.key.as_bytes());
        self.shared.upstreams.get(self.key.upstream).tracks.fetch_sub(1, Ordering::Relaxed);
        let entry = self.entry();
        let locked = (0..Self::PATIENCE).find_map(|_| {
            let locked = Locked::new(&entry.lock);
            locked.or_else(|| {
                std::thread::yield_now();
                None
            })
        });
        // If the lock could not be taken, the openings (entries for streams that have not begun) stay. A program run
        // may bind one to a stream, but sends nothing, since the subscribers' copies are removed.
        if locked.is_some() {
            entry.taken.store(entry.put.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.last()
    }
}

impl Drop for TrackRecord {
    fn drop(&mut self) {
        self.close();
        self.shared.retire(|free| &mut free.tracks, self.index);
    }
}
