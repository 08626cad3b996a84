//! Datagrams that wait to be sent, ordered by priority and then by arrival.

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
    policy::DroppedEnd,
    types::{Label, Priority, PriorityLevel},
};

/// A datagram to be sent.
pub struct NewDatagram {
    /// The payload of the DATAGRAM frame.
    pub payload: Bytes,
    /// Priority of the datagram among all waiting datagrams and streams.
    pub priority: Priority,
    /// Time after which the datagram is dropped, as its publisher or subscriber requested.
    pub expires: Option<Instant>,
    /// Time after which the datagram is dropped because it would be too late for any receiver to use.
    pub late: Option<Instant>,
    /// The datagram's track and group, for packet traces.
    pub label: Label,
}

impl NewDatagram {
    /// Returns how many bytes of memory the datagram takes while it waits.
    pub(super) fn held(&self) -> u64 {
        (size_of::<((Priority, u64), Self)>() + self.payload.len()) as u64
    }

    pub(super) fn is_expired(&self, now: Instant) -> bool {
        self.expires.is_some_and(|at| at <= now)
    }

    pub(super) fn is_late(&self, now: Instant) -> bool {
        self.late.is_some_and(|at| at <= now)
    }

    /// Returns the time after which the datagram is dropped.
    fn deadline(&self) -> Option<Instant> {
        self.expires.into_iter().chain(self.late).min()
    }
}

/// Memory for waiting datagrams, shared by many connections. A connection may hold at most as many bytes as the pool
/// has free, so the connections that hold most drop datagrams first.
#[derive(Debug)]
pub struct DatagramPool {
    total: u64,
    /// Bytes in use. All accesses are relaxed, because this counter orders no other memory.
    used: AtomicU64,
}

impl DatagramPool {
    /// Creates a pool of `total` bytes.
    pub fn new(total: u64) -> Self {
        Self { total, used: AtomicU64::new(0) }
    }

    /// Returns how many bytes of the pool are in use.
    pub fn used(&self) -> u64 {
        self.used.load(Relaxed)
    }

    fn free(&self) -> u64 {
        self.total.saturating_sub(self.used())
    }
}

/// Counts of datagrams that were dropped because of their age. `expired`: the requested delivery timeout had passed.
/// `late`: no receiver could have used the datagram any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Overdue {
    pub expired: u64,
    pub late: u64,
}

/// The waiting datagrams of one connection.
#[derive(Default)]
pub struct WaitingDatagrams {
    waiting: BTreeMap<(Priority, u64), NewDatagram>,
    /// Bytes of memory that the datagrams hold.
    bytes: u64,
    /// Number of datagrams ever queued, which orders those of the same priority by arrival.
    queued: u64,
    pool: Option<Arc<DatagramPool>>,
}

impl WaitingDatagrams {
    /// Creates an empty queue. Connections with the same `pool` share its memory.
    pub fn new(pool: Option<Arc<DatagramPool>>) -> Self {
        Self { waiting: BTreeMap::new(), bytes: 0, queued: 0, pool }
    }

    /// Returns the number of waiting datagrams.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Returns whether no datagram waits.
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Returns the bytes of memory that the waiting datagrams hold.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the priority level of the datagram to send next.
    pub fn level(&self) -> Option<PriorityLevel> {
        self.waiting.first_key_value().map(|((priority, _), _)| priority.level())
    }

    /// Returns the datagram to send next.
    pub fn first(&self) -> Option<&NewDatagram> {
        self.waiting.first_key_value().map(|(_, first)| first)
    }

    /// Adds a datagram.
    pub fn push(&mut self, datagram: NewDatagram) {
        self.hold(datagram.held());
        self.waiting.insert((datagram.priority, self.queued), datagram);
        self.queued += 1;
    }

    /// Removes the datagram to send next, and returns it.
    pub fn pop(&mut self) -> Option<NewDatagram> {
        let (_, first) = self.waiting.pop_first()?;
        self.release(first.held());
        Some(first)
    }

    /// Drops datagrams whose deadline has passed. Returns how many, and the next deadline.
    pub fn expire(&mut self, now: Instant) -> (Overdue, Option<Instant>) {
        let mut overdue = Overdue::default();
        let mut freed = 0;
        let mut next = None::<Instant>;
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

    /// Drops datagrams until this connection's datagrams take at most `limit` bytes, and at most as many as the pool
    /// has free. Returns how many were dropped.
    pub fn trim(&mut self, limit: u64, end: DroppedEnd) -> u64 {
        // A connection may hold at most as many bytes as the pool has free.
        let most = |these: &Self| match &these.pool {
            Some(pool) => limit.min(these.bytes.saturating_add(pool.free()) / 2),
            None => limit,
        };
        if self.bytes <= most(self) {
            return 0;
        }
        // Finding the oldest datagrams takes a search, so an eighth more than needed is dropped at once, to search less
        // often.
        let least = |these: &Self| match end {
            DroppedEnd::Oldest => most(these) - most(these) / 8,
            DroppedEnd::Newest => most(these),
        };
        let mut gone = 0;
        while self.bytes > least(self)
            && let Some(((last, _), _)) = self.waiting.last_key_value()
        {
            let level = last.level();
            let of_level = self.waiting.keys().rev().take_while(|(priority, _)| priority.level() == level);
            let mut keys: Vec<_> = of_level.copied().collect();
            keys.sort_unstable_by_key(|(_, order)| match end {
                DroppedEnd::Oldest => *order,
                DroppedEnd::Newest => u64::MAX - order,
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

impl Drop for WaitingDatagrams {
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

    /// Connections that hold most of the shared memory drop datagrams first. A connection that ends frees its memory.
    #[test]
    fn connection_queues_datagrams_up_to_the_free_bytes_of_the_shared_pool() {
        let pool = Arc::new(DatagramPool::new(100_000));
        let mut one = WaitingDatagrams::new(Some(Arc::clone(&pool)));
        let fill = |datagrams: &mut WaitingDatagrams| {
            for _ in 0..500 {
                datagrams.push(datagram(1, 1000));
                datagrams.trim(u64::MAX, DroppedEnd::Oldest);
                assert!(pool.used() <= 100_000);
            }
            datagrams.bytes()
        };
        assert!((40_000..=50_000).contains(&fill(&mut one)));
        let mut others: Vec<_> = (0..3).map(|_| WaitingDatagrams::new(Some(Arc::clone(&pool)))).collect();
        for other in &mut others {
            fill(other);
        }
        // All connections queue datagrams until each holds as many bytes as the pool has free.
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
    fn least_urgent_datagrams_are_dropped_first() {
        for end in [DroppedEnd::Oldest, DroppedEnd::Newest] {
            let mut datagrams = WaitingDatagrams::default();
            for subscriber in [9, 3, 9, 3] {
                datagrams.push(datagram(subscriber, 1000));
            }
            let all = datagrams.bytes();
            assert_eq!(datagrams.trim(all - 1, end), 1);
            assert_eq!(datagrams.trim(all / 2, end), if end == DroppedEnd::Oldest { 2 } else { 1 });
            assert_eq!(datagrams.level(), Some((3, 0)));
            assert_eq!(datagrams.trim(0, end), if end == DroppedEnd::Oldest { 1 } else { 2 });
            assert_eq!((datagrams.len(), datagrams.bytes()), (0, 0));
        }
    }
}
