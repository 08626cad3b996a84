//! Datagrams that wait to be sent, by priority and in order of arrival.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Instant,
};

use bytes::Bytes;

use super::{
    policy::End,
    types::{Label, Level, Priority},
};

pub struct NewDatagram {
    pub payload: Bytes,
    pub priority: Priority,
    /// Dropped when it has not been sent by then, as its publisher or subscriber wants it.
    pub expires: Option<Instant>,
    /// Dropped when it has not been sent by then, since nobody can use it any more.
    pub late: Option<Instant>,
    pub label: Label,
}

impl NewDatagram {
    /// What it takes while it waits, bytes.
    pub(super) fn held(&self) -> u64 {
        (size_of::<((Priority, u64), Self)>() + self.payload.len()) as u64
    }

    pub(super) fn is_expired(&self, now: Instant) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.late.is_some_and(|at| at <= now)
    }

    /// When it goes.
    fn deadline(&self) -> Option<Instant> {
        self.expires.into_iter().chain(self.late).min()
    }
}

/// Memory that the datagrams of many connections share: each may hold as much as is free, so that those who hold most are
/// the first to go without.
#[derive(Debug)]
pub struct Pool {
    total: u64,
    used: AtomicU64,
}

impl Pool {
    pub fn new(total: u64) -> Self {
        Self { total, used: AtomicU64::new(0) }
    }

    /// Bytes that are held.
    pub fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    fn free(&self) -> u64 {
        self.total.saturating_sub(self.used())
    }
}

/// What was dropped since its time was over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overdue {
    pub expired: u64,
    pub late: u64,
}

#[derive(Default)]
pub struct Datagrams {
    waiting: BTreeMap<(Priority, u64), NewDatagram>,
    /// What they hold.
    bytes: u64,
    queued: u64,
    pool: Option<Arc<Pool>>,
}

impl Datagrams {
    pub fn new(pool: Option<Arc<Pool>>) -> Self {
        Self { waiting: BTreeMap::new(), bytes: 0, queued: 0, pool }
    }

    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The level of the one to be sent next.
    pub fn level(&self) -> Option<Level> {
        self.waiting.first_key_value().map(|((priority, _), _)| priority.level())
    }

    pub fn first(&self) -> Option<&NewDatagram> {
        self.waiting.first_key_value().map(|(_, first)| first)
    }

    pub fn push(&mut self, datagram: NewDatagram) {
        self.hold(datagram.held());
        self.waiting.insert((datagram.priority, self.queued), datagram);
        self.queued += 1;
    }

    pub fn pop(&mut self) -> Option<NewDatagram> {
        let (_, first) = self.waiting.pop_first()?;
        self.release(first.held());
        Some(first)
    }

    /// Drops those whose time is over. Returns when the next one's is.
    pub fn expire(&mut self, now: Instant) -> (Overdue, Option<Instant>) {
        let mut overdue = Overdue::default();
        let (mut freed, mut next) = (0, None::<Instant>);
        self.waiting.retain(|_, datagram| {
            let expired = datagram.is_expired(now);
            let goes = expired || datagram.is_late(now);
            if goes {
                freed += datagram.held();
                *(if expired { &mut overdue.expired } else { &mut overdue.late }) += 1;
            } else {
                next = next.into_iter().chain(datagram.deadline()).min();
            }
            !goes
        });
        self.release(freed);
        (overdue, next)
    }

    /// Drops until they hold no more than they may, `limit` bytes at most. Returns how many went.
    pub fn trim(&mut self, limit: u64, end: End) -> u64 {
        let most = |these: &Self| match &these.pool {
            Some(pool) => limit.min(these.bytes.saturating_add(pool.free()) / 2),
            None => limit,
        };
        if self.bytes <= most(self) {
            return 0;
        }
        // Not for each one anew: the oldest have to be looked for.
        let least = |these: &Self| match end {
            End::Oldest => most(these) - most(these) / 8,
            End::Newest => most(these),
        };
        let mut gone = 0;
        while self.bytes > least(self)
            && let Some(((last, _), _)) = self.waiting.last_key_value()
        {
            let level = last.level();
            let of_level = self.waiting.keys().rev().take_while(|(priority, _)| priority.level() == level);
            let mut keys: Vec<_> = of_level.copied().collect();
            keys.sort_unstable_by_key(|(_, order)| match end {
                End::Oldest => *order,
                End::Newest => u64::MAX - order,
            });
            for key in keys {
                if self.bytes <= least(self) {
                    break;
                }
                let Some(datagram) = self.waiting.remove(&key) else { continue };
                self.release(datagram.held());
                gone += 1;
            }
        }
        gone
    }

    fn hold(&mut self, bytes: u64) {
        self.bytes += bytes;
        if let Some(pool) = &self.pool {
            pool.used.fetch_add(bytes, Relaxed);
        }
    }

    fn release(&mut self, bytes: u64) {
        self.bytes -= bytes;
        if let Some(pool) = &self.pool {
            pool.used.fetch_sub(bytes, Relaxed);
        }
    }
}

impl Drop for Datagrams {
    fn drop(&mut self) {
        self.release(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn datagram(subscriber: u8, len: usize) -> NewDatagram {
        NewDatagram {
            payload: vec![subscriber; len].into(),
            priority: Priority { subscriber, ..Priority::default() },
            expires: None,
            late: None,
            label: Label::default(),
        }
    }

    /// Whoever holds most of what all share goes without first, and what a connection held is free once it is gone.
    #[test]
    fn connections_share_what_there_is() {
        let pool = Arc::new(Pool::new(100_000));
        let mut one = Datagrams::new(Some(Arc::clone(&pool)));
        let fill = |datagrams: &mut Datagrams| {
            for _ in 0..500 {
                datagrams.push(datagram(1, 1000));
                datagrams.trim(u64::MAX, End::Oldest);
                assert!(pool.used() <= 100_000);
            }
            datagrams.bytes()
        };
        assert!((40_000..=50_000).contains(&fill(&mut one)));
        let mut others: Vec<_> = (0..3).map(|_| Datagrams::new(Some(Arc::clone(&pool)))).collect();
        for other in &mut others {
            fill(other);
        }
        // All have kept sending: each comes to have as much as is free.
        for _ in 0..5 {
            for datagrams in others.iter_mut().chain([&mut one]) {
                let held = fill(datagrams);
                assert!(held >= 12_000, "{held}");
            }
        }
        drop((one, others));
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn the_least_urgent_go_whatever_their_age() {
        for end in [End::Oldest, End::Newest] {
            let mut datagrams = Datagrams::default();
            for subscriber in [9, 3, 9, 3] {
                datagrams.push(datagram(subscriber, 1000));
            }
            let all = datagrams.bytes();
            assert_eq!(datagrams.trim(all - 1, end), 1);
            assert_eq!(datagrams.trim(all / 2, end), if end == End::Oldest { 2 } else { 1 });
            assert_eq!(datagrams.level(), Some((3, 0)));
            assert_eq!(datagrams.trim(0, end), if end == End::Oldest { 1 } else { 2 });
            assert_eq!((datagrams.len(), datagrams.bytes()), (0, 0));
        }
    }
}
