//! Bounds the memory of all tracks: the oldest groups are dropped first, by bytes and by age.

use std::{
    collections::VecDeque,
    sync::{
        Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::track::{GROUP_COST, Track};

/// Limits of the [`Cache`].
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Memory for the media of all tracks, bookkeeping included, bytes.
    pub bytes: usize,
    /// A group is dropped this long after its first byte, unless it is its track's newest.
    pub age: Duration,
}

/// All cached groups in order of arrival. The groups themselves are in their [`Track`]s.
pub struct Cache {
    limits: Limits,
    bytes: AtomicUsize,
    evicted: AtomicU64,
    order: Mutex<VecDeque<Entry>>,
}

struct Entry {
    track: Weak<Track>,
    group: u64,
    first_at: Instant,
}

/// Figures of the [`Cache`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub bytes: usize,
    pub groups: usize,
    /// Groups dropped so far.
    pub evicted: u64,
}

impl Cache {
    pub fn new(limits: Limits) -> Self {
        Self { limits, bytes: AtomicUsize::new(0), evicted: AtomicU64::new(0), order: Mutex::default() }
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    pub fn usage(&self) -> Usage {
        Usage {
            bytes: self.bytes.load(Relaxed),
            groups: self.order.lock().len(),
            evicted: self.evicted.load(Relaxed),
        }
    }

    /// A group began in `track`.
    pub fn began(&self, now: Instant, track: &Weak<Track>, group: u64) {
        self.order.lock().push_back(Entry { track: Weak::clone(track), group, first_at: now });
        self.grew(GROUP_COST);
    }

    /// The cached groups grew by `cost` bytes; drops the oldest ones while there are too many.
    pub fn grew(&self, cost: usize) {
        let bytes = self.bytes.fetch_add(cost, Relaxed) + cost;
        if bytes > self.limits.bytes {
            self.shrink();
        }
    }

    /// Drops groups that are too old. Call this about twice a second.
    pub fn expire(&self, now: Instant) {
        let mut expired = Vec::new();
        self.order.lock().retain(|entry| {
            let Some(track) = entry.track.upgrade() else { return false };
            let age = now.saturating_duration_since(entry.first_at);
            let limit = track.max_cache_duration().map_or(self.limits.age, |max| max.min(self.limits.age));
            let keep = age <= limit || track.is_newest(entry.group);
            if !keep {
                expired.push((track, entry.group));
            }
            keep
        });
        for (track, group) in expired {
            self.drop_group(&track, group);
        }
    }

    /// Drops all groups of `track`, which goes away.
    pub fn forget(&self, track: &Track) {
        let mut groups = Vec::new();
        self.order.lock().retain(|entry| {
            let same = std::ptr::eq(entry.track.as_ptr(), track);
            if same {
                groups.push(entry.group);
            }
            !same
        });
        for group in groups {
            self.release(track.evict(group));
        }
    }

    fn shrink(&self) {
        while self.bytes.load(Relaxed) > self.limits.bytes {
            let Some(oldest) = self.order.lock().pop_front() else { return };
            if let Some(track) = oldest.track.upgrade() {
                self.drop_group(&track, oldest.group);
            }
        }
    }

    fn drop_group(&self, track: &Track, group: u64) {
        self.release(track.evict(group));
        self.evicted.fetch_add(1, Relaxed);
    }

    fn release(&self, cost: usize) {
        // Growth is counted in the group first and here second. If the group is dropped in between, its cost is more
        // than what was counted here.
        let _ = self.bytes.fetch_update(Relaxed, Relaxed, |bytes| Some(bytes.saturating_sub(cost)));
    }
}
