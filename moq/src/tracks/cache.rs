//! Bounds the memory of all tracks. Groups are dropped when they are too old. If the cache exceeds its limit, the
//! publisher with the most memory loses groups first. If the publishers of a client exceed the share of cache memory
//! that one client may use, they lose groups.

use std::{
    cmp::Reverse,
    collections::{HashMap, VecDeque},
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use parking_lot::Mutex;

use super::{
    account::{Account, CacheShare},
    track::{GROUP_COST, Track},
};

/// Limits of the [`TrackCache`].
#[derive(Clone, Copy, Debug)]
pub struct CacheLimits {
    /// Largest memory for the media of all tracks, including bookkeeping, in bytes.
    pub bytes: usize,
    /// Age of a group's last data at which the group is dropped, unless it is its track's newest group.
    pub age: Duration,
}

/// When the limit is exceeded, groups are dropped until a fraction of the limit (1/`SLACK`) is free. Without free
/// memory, each new group would have to evict another.
const SLACK: usize = 64;

/// To free memory, groups that are not the newest of their track are dropped first. At most this many of a publisher's
/// groups are examined to find one.
const LOOKS: usize = 64;

/// The cached groups of all tracks, by the publisher that opened each group. The [`Track`]s own the groups.
///
/// A group is *begun* ([`Self::began`]) and *grows* ([`Self::grew`]) while its publisher sends. It is dropped by age
/// ([`Self::expire`]), with its track ([`Self::forget`]), or because the cache is over a limit. A reader that still
/// references one of its subgroups reads no more bytes. The total of bytes is updated with relaxed atomics, because no
/// other memory access depends on it. The total may exceed the limit briefly.
pub struct TrackCache {
    limits: CacheLimits,
    bytes: AtomicUsize,
    evicted: AtomicU64,
    over_share: AtomicU64,
    holders: Mutex<HashMap<u64, CacheHolder>>,
}

/// A publisher's count of cache memory (account), and the cached groups that the publisher opened.
struct CacheHolder {
    account: Arc<Account>,
    /// The groups in order of arrival. Groups that were examined and kept, because they are their track's newest, are
    /// moved to the end.
    groups: VecDeque<CacheEntry>,
}

struct CacheEntry {
    track: Weak<Track>,
    group: u64,
    first_at: Instant,
}

/// Statistics of the [`TrackCache`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUsage {
    /// Memory of all cached groups, in bytes.
    pub bytes: usize,
    /// Number of cached groups.
    pub groups: usize,
    /// Number of groups that were dropped so far.
    pub evicted: u64,
    /// Number of groups that were dropped because their client exceeded its share of the cache memory.
    pub over_share: u64,
}

impl TrackCache {
    /// Makes an empty cache.
    pub fn new(limits: CacheLimits) -> Self {
        Self {
            limits,
            bytes: AtomicUsize::new(0),
            evicted: AtomicU64::new(0),
            over_share: AtomicU64::new(0),
            holders: Mutex::default(),
        }
    }

    /// Returns the limits.
    pub fn limits(&self) -> CacheLimits {
        self.limits
    }

    /// Returns the cache's current statistics.
    pub fn usage(&self) -> CacheUsage {
        CacheUsage {
            bytes: self.bytes.load(Relaxed),
            groups: self.holders.lock().values().map(|holder| holder.groups.len()).sum(),
            evicted: self.evicted.load(Relaxed),
            over_share: self.over_share.load(Relaxed),
        }
    }

    /// Records that a group began in `track`. `account` counts the cache memory of the publisher that opened the group.
    pub fn began(&self, now: Instant, track: &Weak<Track>, group: u64, account: &Arc<Account>) {
        let entry = CacheEntry { track: Weak::clone(track), group, first_at: now };
        let new = || CacheHolder { account: Arc::clone(account), groups: VecDeque::new() };
        self.holders.lock().entry(account.id()).or_insert_with(new).groups.push_back(entry);
        self.grew(GROUP_COST);
        self.hold(account);
    }

    /// Records that the cached groups grew by `cost` bytes, and drops groups if the cache exceeds its limit.
    pub fn grew(&self, cost: usize) {
        let bytes = self.bytes.fetch_add(cost, Relaxed) + cost;
        if bytes > self.limits.bytes {
            self.shrink();
        }
    }

    /// Drops groups that are too old. Call this about twice a second.
    pub fn expire(&self, now: Instant) {
        let expired = self.take(|entry| {
            let Some(track) = entry.track.upgrade() else { return true };
            let limit = track.max_cache_duration().map_or(self.limits.age, |max| max.min(self.limits.age));
            let is_old = |since: Instant| now.saturating_duration_since(since) > limit;
            // A group's age is the age of its last data. A subscriber that lags slightly still needs the recent end of
            // a long group.
            is_old(entry.first_at)
                && !track.is_newest(entry.group)
                && track.last_at(entry.group).is_none_or(is_old)
        });
        expired.iter().for_each(|entry| self.drop_group(entry));
        let accounts: Vec<_> =
            self.holders.lock().values().map(|holder| Arc::clone(&holder.account)).collect();
        accounts.iter().for_each(|account| self.hold(account));
    }

    /// Drops groups until the client of the publisher with `account`, and each wider network of the client, is within
    /// its share of the cache memory. The publisher with the most memory loses groups first, and a track's newest group
    /// is dropped last.
    fn hold(&self, account: &Account) {
        account.shares().for_each(|share| self.hold_share(share));
    }

    fn hold_share(&self, share: &Arc<CacheShare>) {
        while share.is_exceeded() {
            let entry = {
                let mut holders = self.holders.lock();
                let counts = |holder: &&mut CacheHolder| {
                    holder.account.shares().any(|other| Arc::ptr_eq(other, share))
                        && !holder.groups.is_empty()
                };
                let most = holders.values_mut().filter(counts).max_by_key(|holder| holder.account.bytes());
                most.and_then(|holder| holder.take_old().or_else(|| holder.groups.pop_front()))
            };
            let Some(entry) = entry else { return };
            self.drop_group(&entry);
            self.over_share.fetch_add(1, Relaxed);
        }
    }

    /// Drops all groups of `track`, which is being removed.
    pub fn forget(&self, track: &Track) {
        if track.held().groups == 0 {
            return;
        }
        for entry in self.take(|entry| std::ptr::eq(entry.track.as_ptr(), track)) {
            self.release(track.evict(entry.group));
        }
    }

    /// Removes and returns the groups for which `wanted` returns true.
    fn take(&self, wanted: impl Fn(&CacheEntry) -> bool) -> Vec<CacheEntry> {
        let mut taken = Vec::new();
        self.holders.lock().retain(|_, holder| {
            holder.groups.retain_mut(|entry| {
                let goes = wanted(entry);
                if goes {
                    taken.push(std::mem::replace(entry, CacheEntry::empty_since(entry.first_at)));
                }
                !goes
            });
            !holder.groups.is_empty()
        });
        taken
    }

    /// Drops groups until the cache is within its limit. Each call sorts the publishers by memory only once, however
    /// many groups it drops.
    fn shrink(&self) {
        let mut largest: Vec<(usize, u64)> = {
            let holders = self.holders.lock();
            holders.values().map(|holder| (holder.account.bytes(), holder.account.id())).collect()
        };
        largest.sort_unstable_by_key(|holder| Reverse(*holder));
        while self.bytes.load(Relaxed) > self.limits.bytes - self.limits.bytes / SLACK {
            let Some((at, entry)) = self.victim(&largest) else { return };
            self.drop_group(&entry);
            // The list of publishers is sorted by memory, so the publisher that lost the group is inserted again
            // according to its remaining memory.
            let (_, id) = largest.remove(at);
            let bytes = self.holders.lock().get(&id).map_or(0, |holder| holder.account.bytes());
            let place = largest.partition_point(|(other, _)| *other >= bytes);
            largest.insert(place, (bytes, id));
        }
    }

    /// Returns the next group to drop, and the index of its publisher in the list. The publisher with the most memory
    /// loses old groups first. A track's newest group is dropped only if no publisher with at least half as much memory
    /// has a group that is not its track's newest. Without this rule, a publisher of many tracks with one large group
    /// each would evict the groups of all other publishers.
    fn victim(&self, largest: &[(usize, u64)]) -> Option<(usize, CacheEntry)> {
        let mut holders = self.holders.lock();
        let most = largest.first()?.0;
        for (at, (_, id)) in largest.iter().enumerate().take_while(|(_, (bytes, _))| *bytes >= most / 2) {
            if let Some(entry) = holders.get_mut(id).and_then(CacheHolder::take_old) {
                return Some((at, entry));
            }
        }
        largest
            .iter()
            .enumerate()
            .find_map(|(at, (_, id))| Some((at, holders.get_mut(id)?.groups.pop_front()?)))
    }

    fn drop_group(&self, entry: &CacheEntry) {
        if let Some(track) = entry.track.upgrade() {
            self.release(track.evict(entry.group));
            self.evicted.fetch_add(1, Relaxed);
        }
    }

    fn release(&self, cost: usize) {
        // New bytes are added first to the group's memory and later to the cache's total. If the group is dropped in
        // between, the total does not include all of the group's memory yet. It must not fall below 0.
        let _ = self.bytes.fetch_update(Relaxed, Relaxed, |bytes| Some(bytes.saturating_sub(cost)));
    }
}

impl CacheEntry {
    const fn empty_since(first_at: Instant) -> Self {
        Self { track: Weak::new(), group: 0, first_at }
    }
}

impl CacheHolder {
    /// Removes and returns the oldest group that is not its track's newest. It examines at most `LOOKS` groups, and
    /// moves groups that are their track's newest to the end of the list.
    fn take_old(&mut self) -> Option<CacheEntry> {
        for _ in 0..self.groups.len().min(LOOKS) {
            let entry = self.groups.pop_front()?;
            let is_newest = entry.track.upgrade().is_some_and(|track| track.is_newest(entry.group));
            if !is_newest {
                return Some(entry);
            }
            self.groups.push_back(entry);
        }
        None
    }
}
