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

use super::{Source, SourceEnd, SourceExtent};

/// A source of test data. Its first 8 bytes are its tag, a number that the test chooses. Each later byte is computed
/// from the tag and the byte's offset.
pub struct Mem {
    pub tag: u64,
    len: AtomicU64,
    end: Mutex<SourceEnd>,
    evicted: AtomicU64,
    /// Arrival time of each range of bytes, by its first offset.
    received: Mutex<BTreeMap<u64, Instant>>,
}

impl Mem {
    /// Creates an empty source.
    pub fn new(tag: u64) -> Arc<Self> {
        Arc::new(Self {
            tag,
            len: AtomicU64::new(0),
            end: Mutex::new(SourceEnd::Open),
            evicted: AtomicU64::new(0),
            received: Mutex::default(),
        })
    }

    /// Appends `bytes`, which arrive at `now`.
    pub fn push(&self, bytes: u64, now: Instant) {
        let start = self.len.fetch_add(bytes, Ordering::Relaxed);
        self.received.lock().expect("no panic").insert(start, now);
    }

    /// Ends the source.
    pub fn finish(&self, end: SourceEnd) {
        *self.end.lock().expect("no panic") = end;
    }

    /// Evicts all bytes of the source, so that they can no longer be read.
    pub fn evict(&self) {
        self.evicted.store(u64::MAX, Ordering::Relaxed);
    }

    /// Returns the number of bytes that the source has got so far.
    #[allow(clippy::len_without_is_empty, reason = "the length is the number of bytes written")]
    pub fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Returns the byte that a source with the tag `tag` has at `offset`.
    pub fn byte(tag: u64, offset: u64) -> u8 {
        match offset {
            0..8 => tag.to_be_bytes()[offset as usize],
            _ => (tag.wrapping_mul(31) ^ offset ^ offset >> 8) as u8,
        }
    }
}

impl Source for Mem {
    fn extent(&self) -> SourceExtent {
        SourceExtent { len: self.len(), end: *self.end.lock().expect("no panic") }
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

    /// Returns the range of one `push`: each call of `push` counts as one object.
    fn object_at(&self, offset: u64) -> Option<Range<u64>> {
        let received = self.received.lock().expect("no panic");
        let (start, _) = received.range(..=offset).next_back()?;
        let end = received.range(offset + 1..).next().map_or(self.len(), |(next, _)| *next);
        Some(*start..end)
    }
}

/// A source for measurements: each read copies prepared bytes, so it costs as much as a read from a cache.
pub struct Fast(AtomicU64, Vec<u8>);

impl Fast {
    /// Creates an empty source.
    pub fn new() -> Arc<Self> {
        Arc::new(Self(AtomicU64::new(0), vec![7; 1200]))
    }

    /// Appends bytes.
    pub fn push(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

impl Source for Fast {
    fn extent(&self) -> SourceExtent {
        SourceExtent { len: self.0.load(Ordering::Relaxed), end: SourceEnd::Open }
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> usize {
        buf.copy_from_slice(&self.1[..buf.len()]);
        buf.len()
    }

    fn received_at(&self, _: u64) -> Option<Instant> {
        None
    }
}
