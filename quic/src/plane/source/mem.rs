//! Sources in memory, for tests.

use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::Instant,
};

use super::{End, Extent, Source};

/// A source whose first 8 bytes are its tag; the others follow from tag and offset.
pub struct Mem {
    pub tag: u64,
    len: AtomicU64,
    end: Mutex<End>,
    evicted: AtomicU64,
    /// Arrival of each stretch of bytes, by its first offset.
    received: Mutex<BTreeMap<u64, Instant>>,
}

impl Mem {
    pub fn new(tag: u64) -> Arc<Self> {
        Arc::new(Self {
            tag,
            len: AtomicU64::new(0),
            end: Mutex::new(End::Open),
            evicted: AtomicU64::new(0),
            received: Mutex::default(),
        })
    }

    pub fn push(&self, bytes: u64, now: Instant) {
        let start = self.len.fetch_add(bytes, Ordering::Relaxed);
        self.received.lock().expect("no panic").insert(start, now);
    }

    pub fn finish(&self, end: End) {
        *self.end.lock().expect("no panic") = end;
    }

    pub fn evict(&self) {
        self.evicted.store(u64::MAX, Ordering::Relaxed);
    }

    #[allow(clippy::len_without_is_empty, reason = "it counts what has been written")]
    pub fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    pub fn byte(tag: u64, offset: u64) -> u8 {
        match offset {
            0..8 => tag.to_be_bytes()[offset as usize],
            _ => (tag.wrapping_mul(31) ^ offset ^ offset >> 8) as u8,
        }
    }
}

impl Source for Mem {
    fn extent(&self) -> Extent {
        Extent { len: self.len(), end: *self.end.lock().expect("no panic") }
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> usize {
        if offset < self.evicted.load(Ordering::Relaxed) && self.evicted.load(Ordering::Relaxed) != 0 {
            return 0;
        }
        let len = buf.len().min((self.len() - offset) as usize);
        for (byte, offset) in buf[..len].iter_mut().zip(offset..) {
            *byte = Self::byte(self.tag, offset);
        }
        len
    }

    fn received_at(&self, offset: u64) -> Option<Instant> {
        let received = self.received.lock().expect("no panic");
        received.range(..=offset).next_back().map(|(_, at)| *at)
    }

    /// Each push is an object.
    fn object_at(&self, offset: u64) -> Option<Range<u64>> {
        let received = self.received.lock().expect("no panic");
        let (start, _) = received.range(..=offset).next_back()?;
        let end = received.range(offset + 1..).next().map_or(self.len(), |(next, _)| *next);
        Some(*start..end)
    }
}

/// A source that costs one copy to read, as a cache does.
pub struct Fast(AtomicU64, Vec<u8>);

impl Fast {
    pub fn new() -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(0), vec![7; 1200]))
    }

    pub fn push(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Source for Fast {
    fn extent(&self) -> Extent {
        Extent { len: self.0.load(Ordering::Relaxed), end: End::Open }
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> usize {
        buf.copy_from_slice(&self.1[..buf.len()]);
        buf.len()
    }

    fn received_at(&self, _: u64) -> Option<Instant> {
        None
    }
}
