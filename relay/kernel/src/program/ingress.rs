//! How far a stream was judged: the program and userspace tell each other, in memory that they share.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use millrace_kernel::Error;

use super::intf;
use super::shared::Shared;

/// Times that the lock is tried: the program has it for less than a microsecond, unless its CPU is taken away.
const ATTEMPTS: usize = 1000;

/// A place in an upstream stream, and where in its framing that is: `millrace_moq::data::Position`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PositionRecord {
    /// Of the next byte in the stream.
    pub offset: u64,
    /// What that is of.
    pub field: u8,
    /// The integer that is being read, as far as it is there.
    pub value: u64,
    /// Its bytes that are to come.
    pub missing: u8,
    /// Bytes of properties or payload that are to come.
    pub left: u64,
    /// ID of the last object whose ID is there.
    pub previous: Option<u64>,
    /// The object whose header is being read has properties, not empty ones.
    pub with_properties: bool,
    /// No object follows.
    pub ended: bool,
    /// The stream's type.
    pub kind: u8,
}

impl PositionRecord {
    /// In a stream without framing.
    pub fn opaque(offset: u64) -> Self {
        Self { offset, field: intf::OPAQUE, ..Self::default() }
    }

    fn state(&self) -> intf::State {
        let flag = |set, bit: u8| if set { bit } else { 0 };
        intf::State {
            value: self.value,
            left: self.left,
            previous: self.previous.unwrap_or(0),
            field: self.field,
            missing: self.missing,
            flags: flag(self.previous.is_some(), intf::HAS_PREVIOUS)
                | flag(self.with_properties, intf::WITH_PROPERTIES)
                | flag(self.ended, intf::ENDED),
            kind: self.kind,
            pad: 0,
        }
    }
}

/// The entry of a slot that has egresses, or of an opening.
pub(super) struct IngressRecord {
    shared: Arc<Shared>,
    index: u32,
}

impl IngressRecord {
    /// In nobody's reach yet, at `position`.
    pub fn new(
        shared: Arc<Shared>,
        slot: &intf::Slot,
        first: u32,
        position: &PositionRecord,
    ) -> Result<Self, Error> {
        let index = shared.take(|free| &mut free.ingresses, "slots")?;
        let ingress = Self { shared, index };
        let entry = ingress.entry();
        entry.id.store(slot.id, Ordering::Relaxed);
        entry.upstream.store(slot.upstream, Ordering::Relaxed);
        entry.kind.store(slot.kind, Ordering::Relaxed);
        entry.first.store(first, Ordering::Relaxed);
        ingress.set(position);
        Ok(ingress)
    }

    fn entry(&self) -> &intf::Ingress {
        self.shared.ingresses.get(self.index)
    }

    pub fn index(&self) -> u32 {
        self.index
    }

    /// The stream's ID.
    pub fn id(&self) -> u64 {
        self.entry().id.load(Ordering::SeqCst)
    }

    pub fn set_first(&self, egress: u32) {
        self.entry().first.store(egress, Ordering::Release);
    }

    /// The stream's bytes before this offset were judged.
    pub fn next(&self) -> u64 {
        self.entry().next.load(Ordering::Relaxed)
    }

    /// Begins there, whatever was before.
    pub fn set(&self, position: &PositionRecord) {
        let entry = self.entry();
        let Some(_locked) = Locked::new(&entry.lock) else { return };
        entry.final_size.store(intf::UNKNOWN, Ordering::Relaxed);
        entry.run.store(0, Ordering::Relaxed);
        entry.run_end.store(0, Ordering::Relaxed);
        entry.apart.store(0, Ordering::Relaxed);
        entry.apart_end.store(0, Ordering::Relaxed);
        entry.contradicted.store(0, Ordering::Relaxed);
        self.write(position);
    }

    /// Says that userspace has come to this position. If the program is behind, it goes on from there; if it is at the same offset, both must
    /// have found the same.
    pub fn advance(&self, position: &PositionRecord) {
        let entry = self.entry();
        if self.next() > position.offset {
            return;
        }
        let Some(_locked) = Locked::new(&entry.lock) else { return };
        let next = self.next();
        if next < position.offset {
            self.write(position);
        } else if next == position.offset && self.differs(position) {
            contradict(entry);
        }
    }

    /// Reports, with the lock held, whether the program stands at another place in the framing.
    fn differs(&self, position: &PositionRecord) -> bool {
        // SAFETY: whoever has the lock may read.
        let state = unsafe { *self.entry().state.get() };
        state.field < intf::OPAQUE && state != position.state()
    }

    /// The program may have forwarded other bytes than userspace has.
    pub fn is_contradicted(&self) -> bool {
        self.entry().contradicted.load(Ordering::Relaxed) != 0
    }

    /// With the lock.
    fn write(&self, position: &PositionRecord) {
        let entry = self.entry();
        // SAFETY: whoever has the lock may write.
        unsafe { *entry.state.get() = position.state() };
        entry.next.store(position.offset, Ordering::Relaxed);
    }
}

impl Drop for IngressRecord {
    /// It has been unlinked.
    fn drop(&mut self) {
        self.shared.retire(|free| &mut free.ingresses, self.index);
    }
}

/// Notes bytes of a stream that only userspace has seen.
pub(super) fn leave(entry: &intf::Ingress, stream_id: u64, bytes: &Range<u64>, fin: bool) {
    let Some(_locked) = Locked::new(&entry.lock) else { return };
    if entry.id.load(Ordering::Relaxed) != stream_id {
        return;
    }
    let [next, size, apart, end] = [&entry.next, &entry.final_size, &entry.apart, &entry.apart_end]
        .map(|word| word.load(Ordering::Relaxed));
    if next > bytes.start {
        contradict(entry);
        return;
    }
    if fin && size == intf::UNKNOWN {
        entry.final_size.store(bytes.end, Ordering::Relaxed);
    }
    if end <= next || bytes.start < apart {
        entry.apart.store(bytes.start, Ordering::Relaxed);
    }
    entry.apart_end.store(end.max(bytes.end), Ordering::Relaxed);
}

/// Has the program, with the lock held, forward nothing more of the stream.
fn contradict(entry: &intf::Ingress) {
    // SAFETY: whoever has the lock may write.
    unsafe { (*entry.state.get()).field = intf::BROKEN };
    entry.contradicted.store(1, Ordering::Relaxed);
}

/// A lock that the program and userspace share.
pub(super) struct Locked<'a>(&'a AtomicU32);

impl<'a> Locked<'a> {
    /// `None`: somebody else has it for longer than that takes.
    pub fn new(lock: &'a AtomicU32) -> Option<Self> {
        for _ in 0..ATTEMPTS {
            if lock.swap(1, Ordering::Acquire) == 0 {
                return Some(Self(lock));
            }
            std::hint::spin_loop();
        }
        None
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        fence(Ordering::SeqCst);
        self.0.store(0, Ordering::Release);
    }
}
