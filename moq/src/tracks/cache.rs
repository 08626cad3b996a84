//! Bounds the memory of all tracks: groups are dropped by age, and where there are too many, from the publisher who takes
//! up most. A client whose publishers take up more than its share loses theirs.

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
    account::{Account, Share},
    track::{GROUP_COST, Track},
};

/// Limits of the [`Cache`].
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Memory for the media of all tracks, bookkeeping included, bytes.
    pub bytes: usize,
    /// A group is dropped this long after the last of it came, unless it is its track's newest.
    pub age: Duration,
}

/// This part of the limit is left free where groups are dropped, so that not each new one has to look for room.
const SLACK: usize = 64;

/// Groups of an account that are looked at to find one that is not its track's newest.
const LOOKS: usize = 64;

/// All cached groups by the publisher that opened them. The groups themselves are in their [`Track`]s.
pub struct Cache {
    limits: Limits,
    bytes: AtomicUsize,
    evicted: AtomicU64,
    over_share: AtomicU64,
    holders: Mutex<HashMap<u64, Holder>>,
}

/// An account and its groups.
struct Holder {
    account: Arc<Account>,
    /// In order of arrival, but for newest groups that were looked at and kept.
    groups: VecDeque<Entry>,
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
    /// Those of them that were dropped since their client had more than its share.
    pub over_share: u64,
}

impl Cache {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            bytes: AtomicUsize::new(0),
            evicted: AtomicU64::new(0),
            over_share: AtomicU64::new(0),
            holders: Mutex::default(),
        }
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    pub fn usage(&self) -> Usage {
        Usage {
            bytes: self.bytes.load(Relaxed),
            groups: self.holders.lock().values().map(|holder| holder.groups.len()).sum(),
            evicted: self.evicted.load(Relaxed),
            over_share: self.over_share.load(Relaxed),
        }
    }

    /// A group began in `track`, opened by whose `account` it is.
    pub fn began(&self, now: Instant, track: &Weak<Track>, group: u64, account: &Arc<Account>) {
        let entry = Entry { track: Weak::clone(track), group, first_at: now };
        let new = || Holder { account: Arc::clone(account), groups: VecDeque::new() };
        self.holders.lock().entry(account.id()).or_insert_with(new).groups.push_back(entry);
        self.grew(GROUP_COST);
        self.hold(account);
    }

    /// The cached groups grew by `cost` bytes; drops groups while there are too many.
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
            // The end of a long group is as young as any other object: who lags by a moment still waits for it.
            is_old(entry.first_at)
                && !track.is_newest(entry.group)
                && track.last_at(entry.group).is_none_or(is_old)
        });
        expired.iter().for_each(|entry| self.drop_group(entry));
        let accounts: Vec<_> =
            self.holders.lock().values().map(|holder| Arc::clone(&holder.account)).collect();
        accounts.iter().for_each(|account| self.hold(account));
    }

    /// Drops groups of the client of `account`, and of its wider networks, until each has no more than its share: each time of the
    /// publisher that takes up most, and the newest of a track last.
    fn hold(&self, account: &Account) {
        account.shares().for_each(|share| self.hold_share(share));
    }

    fn hold_share(&self, share: &Arc<Share>) {
        while share.is_exceeded() {
            let entry = {
                let mut holders = self.holders.lock();
                let counts = |holder: &&mut Holder| {
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

    /// Drops all groups of `track`, which goes away.
    pub fn forget(&self, track: &Track) {
        if track.held().groups == 0 {
            return;
        }
        for entry in self.take(|entry| std::ptr::eq(entry.track.as_ptr(), track)) {
            self.release(track.evict(entry.group));
        }
    }

    /// Takes out the groups for which `wanted`.
    fn take(&self, wanted: impl Fn(&Entry) -> bool) -> Vec<Entry> {
        let mut taken = Vec::new();
        self.holders.lock().retain(|_, holder| {
            holder.groups.retain_mut(|entry| {
                let goes = wanted(entry);
                if goes {
                    taken.push(std::mem::replace(entry, Entry::none(entry.first_at)));
                }
                !goes
            });
            !holder.groups.is_empty()
        });
        taken
    }

    /// Drops groups until all fit. One pass over the holders serves for as many as it takes.
    fn shrink(&self) {
        let mut largest: Vec<(usize, u64)> = {
            let holders = self.holders.lock();
            holders.values().map(|holder| (holder.account.bytes(), holder.account.id())).collect()
        };
        largest.sort_unstable_by_key(|holder| Reverse(*holder));
        while self.bytes.load(Relaxed) > self.limits.bytes - self.limits.bytes / SLACK {
            let Some((at, entry)) = self.victim(&largest) else { return };
            self.drop_group(&entry);
            // The same account, with what is left, in its new place.
            let (_, id) = largest.remove(at);
            let bytes = self.holders.lock().get(&id).map_or(0, |holder| holder.account.bytes());
            let place = largest.partition_point(|(other, _)| *other >= bytes);
            largest.insert(place, (bytes, id));
        }
    }

    /// The group to be dropped next, and whose it is. Whoever takes up most loses old groups first. A track's newest group
    /// is dropped only where nobody who takes up at least half as much has an old one: otherwise many tracks of one large
    /// group each would cost everybody else theirs.
    fn victim(&self, largest: &[(usize, u64)]) -> Option<(usize, Entry)> {
        let mut holders = self.holders.lock();
        let most = largest.first()?.0;
        for (at, (_, id)) in largest.iter().enumerate().take_while(|(_, (bytes, _))| *bytes >= most / 2) {
            if let Some(entry) = holders.get_mut(id).and_then(Holder::take_old) {
                return Some((at, entry));
            }
        }
        largest
            .iter()
            .enumerate()
            .find_map(|(at, (_, id))| Some((at, holders.get_mut(id)?.groups.pop_front()?)))
    }

    fn drop_group(&self, entry: &Entry) {
        if let Some(track) = entry.track.upgrade() {
            self.release(track.evict(entry.group));
            self.evicted.fetch_add(1, Relaxed);
        }
    }

    fn release(&self, cost: usize) {
        // Growth is counted in the group first and here second. If the group is dropped in between, its cost is more
        // than what was counted here.
        let _ = self.bytes.fetch_update(Relaxed, Relaxed, |bytes| Some(bytes.saturating_sub(cost)));
    }
}

impl Entry {
    const fn none(first_at: Instant) -> Self {
        Self { track: Weak::new(), group: 0, first_at }
    }
}

impl Holder {
    /// The oldest group that is not its track's newest, of the first few. Newest ones go to the back.
    fn take_old(&mut self) -> Option<Entry> {
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
