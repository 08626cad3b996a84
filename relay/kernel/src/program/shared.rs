//! The state that all handles share: the maps, and the list of free entries.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use libbpf_rs::MapHandle;
use millrace_kernel::Error;
use millrace_kernel::barrier::Barrier;
use millrace_kernel::crypto::QuicKeys;
use millrace_kernel::object::{LoadedObject, write};

use super::buddy::{BuddyRun, Runs};
use super::config::Config;
use super::intf;
use super::memory::MappedArray;

/// The maps that all handles of a relay use, and their free entries.
///
/// Each entry of a table is *free*, *in use* or *retired*. [`Self::take`] returns the index of a free one. The handle
/// that takes it fills it, and then makes it reachable for the program, by an epoch, an ID or an index. When the handle
/// is dropped, it makes the entry unreachable and calls [`Self::retire`]. Program runs that have begun may still use
/// it. [`Self::settle`] waits for them, erases keys and keystreams, and makes the entry free. The program can never
/// reach a free entry.
pub(super) struct RelayMaps {
    pub ids: MapHandle,
    pub slots: MapHandle,
    pub open_keys: MapHandle,
    pub seal_keys: MapHandle,
    pub barrier: Barrier,
    pub sockets: MapHandle,
    pub deferrals: MappedArray<intf::Deferral>,
    pub sockets_used: AtomicU32,
    pub arrivals: MappedArray<intf::Arrival>,
    pub upstreams: MappedArray<intf::Upstream>,
    pub tracks: MappedArray<intf::Track>,
    pub ingresses: MappedArray<intf::Ingress>,
    pub egresses: MappedArray<intf::Egress>,
    pub downstreams: MappedArray<intf::Downstream>,
    pub keystreams: MappedArray<intf::Keystream>,
    pub free: Mutex<Free>,
    pub epochs: AtomicU32,
}

/// The free entries of each of the program's tables, and the retired entries, which become free when program runs have
/// ended.
pub(super) struct Free {
    pub upstreams: Slab,
    pub tracks: Slab,
    pub ingresses: Slab,
    pub egresses: Slab,
    pub downstreams: Slab,
    pub keystreams: Runs,
}

impl RelayMaps {
    pub fn new(object: &mut LoadedObject, config: &Config) -> Result<Self, Error> {
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
            // Epochs begin at 1, because epoch 0 marks an entry that is not in use.
            epochs: AtomicU32::new(1),
        })
    }

    /// Waits for program runs that may still use removed (retired) entries. Then erases the keys and keystreams of
    /// these entries, and makes the entries free.
    pub fn settle(&self) -> Result<(), Error> {
        // Entries that are removed during the wait do not become free yet, since later program runs may have seen them.
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

    /// Takes a free entry of the table `which`, without waiting for program runs. Returns the entry's index.
    pub fn take(&self, which: fn(&mut Free) -> &mut Slab, what: &'static str) -> Result<u32, Error> {
        let mut free = lock(&self.free);
        let slab = which(&mut free);
        let full = if slab.retired.is_empty() { Error::Full { what } } else { Error::Unsettled { what } };
        slab.take().ok_or(full)
    }

    /// Retires an entry. The caller has made it unreachable, except for program runs that have already begun.
    pub fn retire(&self, which: fn(&mut Free) -> &mut Slab, index: u32) {
        which(&mut lock(&self.free)).retired.push(index);
    }

    /// Returns a new epoch: the number that marks a map entry as in use, and tells it from earlier uses of the entry.
    /// It is never 0, which means "not in use".
    pub fn next_epoch(&self) -> u32 {
        match self.epochs.fetch_add(1, Ordering::Relaxed) {
            0 => self.epochs.fetch_add(1, Ordering::Relaxed),
            epoch => epoch,
        }
    }
}

/// Entries that are unreachable for new program runs, and may still be used by older ones.
struct Retired {
    slabs: [Vec<u32>; 5],
    runs: Vec<BuddyRun>,
}

impl Free {
    fn slabs(&mut self) -> [&mut Slab; 5] {
        let Self { upstreams, downstreams, tracks, ingresses, egresses, .. } = self;
        [upstreams, downstreams, tracks, ingresses, egresses]
    }

    /// Reports whether keys of ended connections are left that were not erased yet.
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

/// Allocates the entries of one table.
pub(super) struct Slab {
    len: u32,
    untouched: std::ops::Range<u32>,
    free: Vec<u32>,
    /// Retired entries, which are freed once all program runs that may still use them have ended.
    retired: Vec<u32>,
}

impl Slab {
    fn new(len: u32) -> Self {
        Self { len, untouched: 0..len, free: Vec::new(), retired: Vec::new() }
    }

    fn take(&mut self) -> Option<u32> {
        self.free.pop().or_else(|| self.untouched.next())
    }

    /// Returns how many entries are not free, in use or removed a short time ago, and how many the table has.
    pub fn fill(&self) -> (u32, u32) {
        (self.len - (self.free.len() + self.untouched.len()) as u32, self.len)
    }

    /// Reports whether more entries wait for the end of program runs than are free.
    fn is_low(&self) -> bool {
        self.retired.len() > self.free.len() + self.untouched.len()
    }
}

/// Locks a mutex even if it is poisoned. A panic while one of the mutexes of the program's handles is locked cannot
/// leave inconsistent state.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
