//! The position up to which a publisher's stream was parsed, which the program and userspace exchange in shared memory.

#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering, fence};

use millrace_kernel::Error;
use millrace_moq::Position;

use super::intf;
use super::shared::RelayMaps;

/// Number of attempts to take the lock that is shared with the program, before userspace gives up. The program holds a
/// lock for less than a microsecond, unless it is preempted.
const ATTEMPTS: usize = 1000;

/// Returns the state of a track's datagrams after this object: it and the objects before it count as arrived.
pub(super) fn behind_object(group: u64, object: u64) -> Position {
    Position { value: group, previous: Some(object.saturating_add(1)), left: u64::MAX, ..Position::default() }
}

/// Returns the group and the ID of the first object of a track's datagrams that has not arrived.
pub(super) fn next_object(position: &Position) -> (u64, u64) {
    (position.value, position.previous.unwrap_or(0))
}

/// Returns a parser's state in the form that the program uses.
fn state_of(position: &Position) -> intf::State {
    let flag = |set, bit: u8| if set { bit } else { 0 };
    intf::State {
        value: position.value,
        left: position.left,
        previous: position.previous.unwrap_or(0),
        field: position.field as u8,
        missing: position.missing,
        flags: flag(position.previous.is_some(), intf::HAS_PREVIOUS)
            | flag(position.with_properties, intf::WITH_PROPERTIES)
            | flag(position.ended, intf::ENDED),
        kind: position.kind,
        pad: 0,
    }
}

/// An entry in the BPF map `ingresses`: for a publisher's stream or a track's datagrams that have subscribers, or for a
/// stream that has not begun.
pub(super) struct IngressRecord {
    shared: Arc<RelayMaps>,
    index: u32,
}

impl IngressRecord {
    /// Makes the entry (ingress) of a stream whose parser begins in the state `position`. The program cannot find the
    /// entry yet.
    pub fn new(
        shared: Arc<RelayMaps>,
        slot: &intf::Slot,
        first: u32,
        position: &Position,
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

    /// Returns the ID of the publisher's stream that this entry belongs to.
    pub fn id(&self) -> u64 {
        self.entry().id.load(Ordering::SeqCst)
    }

    pub fn set_first(&self, egress: u32) {
        self.entry().first.store(egress, Ordering::Release);
    }

    /// Returns the stream offset up to which the program or userspace has parsed.
    pub fn next(&self) -> u64 {
        self.entry().next.load(Ordering::Relaxed)
    }

    /// Sets the position from which the program parses the stream, and discards what the program has recorded of the
    /// stream: its final size and the ranges of bytes that arrived after missing bytes.
    pub fn set(&self, position: &Position) {
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

    /// Records that userspace has parsed the stream up to this position. If the program has parsed less, it continues
    /// at this position. If the program and userspace have parsed to the same offset with different results, the
    /// program stops forwarding the stream.
    pub fn advance(&self, position: &Position) {
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

    /// Reports whether the program's parser is in another state than userspace's parser (`position`). The caller holds
    /// the entry's lock.
    fn differs(&self, position: &Position) -> bool {
        // SAFETY: the parser state may be read by the holder of the entry's lock, which the caller is.
        let state = unsafe { *self.entry().state.get() };
        state.field < intf::OPAQUE && state != state_of(position)
    }

    /// Claims an object of a track's datagrams for userspace, so that the program does not forward it. Returns false if
    /// the program has forwarded it, or may have. Works as `is_first` in `relay_judge.h`.
    pub fn claim_object(&self, group: u64, object: u64) -> bool {
        let entry = self.entry();
        let Some(_locked) = Locked::new(&entry.lock) else { return false };
        // SAFETY: the datagram state may be read and written by the holder of the entry's lock, which this function has
        // taken.
        let state = unsafe { &mut *entry.state.get() };
        if group < state.value || object == u64::MAX {
            return false;
        }
        if group > state.value || object >= state.previous {
            let ahead = object + 1 - if group > state.value { 0 } else { state.previous };
            let goes_on = group == state.value && state.previous > 0;
            state.left = match u32::try_from(ahead) {
                Ok(ahead @ 1..=64) if goes_on => {
                    state.left.checked_shl(ahead).unwrap_or(0) | 1 << (ahead - 1)
                }
                _ => 0,
            };
            (state.value, state.previous) = (group, object + 1);
            return true;
        }
        let behind = state.previous - 1 - object;
        let bit = behind.checked_sub(1).and_then(|at| 1u64.checked_shl(u32::try_from(at).ok()?));
        let is_first = bit.is_some_and(|bit| state.left & bit == 0);
        state.left |= bit.unwrap_or(0);
        is_first
    }

    /// Reports whether the program may have forwarded bytes that differ from those that userspace has kept for the same
    /// stream offsets.
    pub fn is_contradicted(&self) -> bool {
        self.entry().contradicted.load(Ordering::Relaxed) != 0
    }

    /// Writes the parser's position and state to the entry that the program reads. The caller holds the entry's lock.
    fn write(&self, position: &Position) {
        let entry = self.entry();
        // SAFETY: the parser state may be written by the holder of the entry's lock, which the caller is.
        unsafe { *entry.state.get() = state_of(position) };
        entry.next.store(position.offset, Ordering::Relaxed);
    }
}

impl Drop for IngressRecord {
    /// Retires the map entry, which the program can no longer find. The entry is reused once the present program runs
    /// have ended.
    fn drop(&mut self) {
        self.shared.retire(|free| &mut free.ingresses, self.index);
    }
}

/// Records bytes of a stream that only userspace has received.
pub(super) fn leave(entry: &intf::Ingress, stream_id: u64, bytes: &Range<u64>, fin: bool) {
    let Some(_locked) = Locked::new(&entry.lock) else { return };
    if entry.id.load(Ordering::Relaxed) != stream_id {
        return;
    }
    let [next, size, apart, end] = [&entry.next, &entry.final_size, &entry.apart, &entry.apart_end]
        .map(|word| word.load(Ordering::Relaxed));
    // The program has parsed bytes at these stream offsets already. A packet with the same offsets may contain other
    // bytes, so the program may have forwarded bytes that userspace does not have.
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

/// Stops the program from forwarding the stream. The caller holds the lock.
fn contradict(entry: &intf::Ingress) {
    // SAFETY: the parser state may be written by the holder of the entry's lock, which the caller is.
    unsafe { (*entry.state.get()).field = intf::BROKEN };
    entry.contradicted.store(1, Ordering::Relaxed);
}

/// A lock that the program and userspace share.
///
/// The program never waits for the lock: a run that finds it taken leaves the frame to userspace. Userspace gives up
/// after [`ATTEMPTS`], because a run may be preempted while it holds the lock.
pub(super) struct Locked<'a>(&'a AtomicU32);

impl<'a> Locked<'a> {
    /// Takes the lock. Returns `None` if it stays taken for [`ATTEMPTS`] attempts.
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
        // The program reads the fields without acquire semantics after its test-and-set, so the stores made under the
        // lock must be visible before it is released.
        fence(Ordering::SeqCst);
        self.0.store(0, Ordering::Release);
    }
}
