//! What all handles share: the maps, and which of their entries are free.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libbpf_rs::MapHandle;
use millrace_kernel::Error;
use millrace_kernel::barrier::Barrier;
use millrace_kernel::crypto::QuicKeys;
use millrace_kernel::object::{Loaded, write};

use super::buddy::{Run, Runs};
use super::config::Config;
use super::intf;
use super::memory::Table;

/// What all handles of a relay use.
pub(super) struct Shared {
    pub ids: MapHandle,
    pub slots: MapHandle,
    pub open_keys: MapHandle,
    pub seal_keys: MapHandle,
    pub barrier: Barrier,
    pub sockets: MapHandle,
    pub deferrals: Table<intf::Deferral>,
    pub sockets_used: AtomicU32,
    pub arrivals: Table<intf::Arrival>,
    pub upstreams: Table<intf::Upstream>,
    pub tracks: Table<intf::Track>,
    pub ingresses: Table<intf::Ingress>,
    pub egresses: Table<intf::Egress>,
    pub downstreams: Table<intf::Downstream>,
    pub keystreams: Table<intf::Keystream>,
    pub free: Mutex<Free>,
    pub epochs: AtomicU32,
}

/// Entries of the tables that are not in use.
pub(super) struct Free {
    pub upstreams: Slab,
    pub tracks: Slab,
    pub ingresses: Slab,
    pub egresses: Slab,
    pub downstreams: Slab,
    pub keystreams: Runs,
}

impl Shared {
    pub fn new(object: &mut Loaded, config: &Config) -> Result<Self, Error> {
        let upstreams = object.table("upstreams")?;
        let tracks = object.table("tracks")?;
        let ingresses = object.table("ingresses")?;
        let egresses = object.table("egresses")?;
        let downstreams = object.table("downstreams")?;
        let free = Free {
            upstreams: Slab::new(upstreams.len()),
            tracks: Slab::new(tracks.len()),
            ingresses: Slab::new(ingresses.len()),
            egresses: Slab::new(egresses.len()),
            downstreams: Slab::new(downstreams.len()),
            keystreams: Runs::new(config.keystream_entries()),
        };
        Ok(Self {
            ids: object.handle("ids")?,
            slots: object.handle("slots")?,
            open_keys: object.handle("open_keys")?,
            seal_keys: object.handle("seal_keys")?,
            barrier: Barrier::new(object)?,
            sockets: object.handle("sockets")?,
            deferrals: object.table("deferrals")?,
            sockets_used: AtomicU32::new(0),
            arrivals: object.table("arrivals")?,
            upstreams,
            tracks,
            ingresses,
            egresses,
            downstreams,
            keystreams: object.table("keystreams")?,
            free: Mutex::new(free),
            epochs: AtomicU32::new(1),
        })
    }

    /// Keys and keystreams of what has ended are erased now: while runs that have begun use them, they must not change.
    pub fn settle(&self) -> Result<(), Error> {
        let retired = lock(&self.free).take_retired();
        let result = self.barrier.wait_for_runs().and_then(|()| self.erase(&retired));
        let free = &mut lock(&self.free);
        match result {
            Ok(()) => free.reuse(retired),
            Err(_) => free.put_back(retired),
        }
        result
    }

    fn erase(&self, retired: &Retired) -> Result<(), Error> {
        let [upstreams, downstreams, ..] = &retired.slabs;
        for index in upstreams.iter().flat_map(|index| [2 * index, 2 * index + 1]) {
            write(&self.open_keys, "open_keys", &index.to_ne_bytes(), QuicKeys::NONE.as_bytes())?;
        }
        for index in downstreams.iter().flat_map(|index| [2 * index, 2 * index + 1]) {
            write(&self.seal_keys, "seal_keys", &index.to_ne_bytes(), QuicKeys::NONE.as_bytes())?;
        }
        let places = retired.runs.iter().flat_map(|run| run.start..run.start + run.len());
        places.for_each(|place| self.keystreams.get(place).erase());
        Ok(())
    }

    /// Never waits.
    pub fn take(&self, which: fn(&mut Free) -> &mut Slab, what: &'static str) -> Result<u32, Error> {
        let mut free = lock(&self.free);
        let slab = which(&mut free);
        let full = if slab.retired.is_empty() { Error::Full { what } } else { Error::Unsettled { what } };
        slab.take().ok_or(full)
    }

    /// To be called when entry `index` is unlinked: only runs of the program that have begun can still reach it.
    pub fn retire(&self, which: fn(&mut Free) -> &mut Slab, index: u32) {
        which(&mut lock(&self.free)).retired.push(index);
    }

    /// Not 0, which stands for "not in use".
    pub fn next_epoch(&self) -> u32 {
        match self.epochs.fetch_add(1, Ordering::Relaxed) {
            0 => self.epochs.fetch_add(1, Ordering::Relaxed),
            epoch => epoch,
        }
    }
}

/// Entries that were unlinked, and may still be in use.
struct Retired {
    slabs: [Vec<u32>; 5],
    runs: Vec<Run>,
}

impl Free {
    fn slabs(&mut self) -> [&mut Slab; 5] {
        let Self { upstreams, downstreams, tracks, ingresses, egresses, .. } = self;
        [upstreams, downstreams, tracks, ingresses, egresses]
    }

    /// Whether there are keys of connections that have ended.
    pub fn has_old_keys(&self) -> bool {
        !self.upstreams.retired.is_empty() || !self.downstreams.retired.is_empty()
    }

    pub fn needs_settling(&mut self) -> bool {
        self.slabs().into_iter().any(|slab| slab.is_low())
    }

    fn take_retired(&mut self) -> Retired {
        let runs = std::mem::take(&mut self.keystreams.retired);
        Retired { slabs: self.slabs().map(|slab| std::mem::take(&mut slab.retired)), runs }
    }

    fn reuse(&mut self, retired: Retired) {
        for (slab, indexes) in self.slabs().into_iter().zip(retired.slabs) {
            slab.free.extend(indexes);
        }
        retired.runs.into_iter().for_each(|run| self.keystreams.give(run));
    }

    fn put_back(&mut self, retired: Retired) {
        for (slab, indexes) in self.slabs().into_iter().zip(retired.slabs) {
            slab.retired.extend(indexes);
        }
        self.keystreams.retired.extend(retired.runs);
    }
}

/// Hands out indexes.
pub(super) struct Slab {
    len: u32,
    untouched: std::ops::Range<u32>,
    free: Vec<u32>,
    /// Unlinked: free once the program runs that have begun have ended.
    retired: Vec<u32>,
}

impl Slab {
    fn new(len: u32) -> Self {
        Self { len, untouched: 0..len, free: Vec::new(), retired: Vec::new() }
    }

    fn take(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| self.untouched.next())
    }

    /// Returns how many entries are in use, or may still be, and how many there are.
    pub fn fill(&self) -> (u32, u32) {
        (self.len - (self.free.len() + self.untouched.len()) as u32, self.len)
    }

    /// Whether more entries wait to become free than are free.
    fn is_low(&self) -> bool {
        self.retired.len() > self.free.len() + self.untouched.len()
    }
}

/// Nothing that is done under these locks leaves a state half changed.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
