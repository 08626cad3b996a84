//! Tracks whose streams the program may open.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use libbpf_rs::MapCore;
use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::write;

use super::ingress::Locked;
use super::intf;
use super::shared::Shared;
use super::slot::SlotRecord;

/// A track of an upstream, with openings: slots that wait for the track's streams to begin. When it is dropped no stream is
/// bound any more, up to runs of the program that have begun.
pub struct TrackRecord {
    shared: Arc<Shared>,
    key: intf::Slot,
    index: u32,
}

impl TrackRecord {
    /// Openings that may wait at a time.
    pub const MOST: u32 = intf::OPENINGS as u32;

    pub(super) fn new(
        shared: Arc<Shared>,
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
        shared.upstreams.get(upstream).tracks.fetch_add(1, Ordering::Relaxed);
        Ok(Self { shared, key, index })
    }

    fn entry(&self) -> &intf::Track {
        self.shared.tracks.get(self.index)
    }

    /// Has the next stream that begins bound to `opening`, behind those that were put in before. Returns whether there was
    /// room for it.
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

    /// Openings that wait.
    pub fn waiting(&self) -> u32 {
        let entry = self.entry();
        let put = entry.put.load(Ordering::Relaxed);
        put.wrapping_sub(entry.taken.load(Ordering::Relaxed)).min(Self::MOST)
    }

    /// Streams that would have been bound if there had been an opening.
    pub fn missed(&self) -> u32 {
        self.entry().missed.load(Ordering::Relaxed)
    }

    /// Has userspace woken by the stream after which only so many openings wait.
    pub fn set_low(&self, low: u32) {
        self.entry().low.store(low, Ordering::Relaxed);
    }

    /// A subgroup has begun, by group and subgroup ID: streams are bound of those behind it.
    pub fn began(&self, subgroup: (u64, u64)) {
        let entry = self.entry();
        let last = || (entry.group.load(Ordering::Relaxed), entry.subgroup.load(Ordering::Relaxed));
        if subgroup <= last() {
            return;
        }
        let Some(_locked) = Locked::new(&entry.lock) else { return };
        if subgroup > last() {
            entry.group.store(subgroup.0, Ordering::Relaxed);
            entry.subgroup.store(subgroup.1, Ordering::Relaxed);
        }
    }
}

impl Drop for TrackRecord {
    fn drop(&mut self) {
        let _ = self.shared.slots.delete(self.key.as_bytes()); // it is there
        self.shared.upstreams.get(self.key.upstream).tracks.fetch_sub(1, Ordering::Relaxed);
        let entry = self.entry();
        // A run that has the lock for longer finds egresses that are removed.
        if let Some(_locked) = Locked::new(&entry.lock) {
            entry.taken.store(entry.put.load(Ordering::Relaxed), Ordering::Relaxed);
        }
        self.shared.retire(|free| &mut free.tracks, self.index);
    }
}
