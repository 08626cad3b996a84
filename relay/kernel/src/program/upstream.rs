//! Connections that media arrives on.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use libbpf_rs::{MapCore as _, MapFlags};
use millrace_kernel::Error;
use millrace_kernel::crypto::QuicKeys;
use millrace_kernel::intf::Plain as _;
use millrace_kernel::object::write;

use super::defer::DeferredSocket;
use super::ids::Ids;
use super::ingress;
use super::intf;
use super::keystream::{Compute, Refill, Ring, Want};
use super::outcome::Lookup;
use super::shared::{Shared, lock};
use super::slot::SlotRecord;
use super::track::TrackRecord;

/// log2 of the packet numbers in a word of the replay window.
const BLOCK_BITS: u32 = 5;

/// A connection that media arrives on. The kernel opens its packets from when an ID and keys are there; when it
/// is dropped, no packet of it is opened any more, up to runs of the program that have begun.
pub struct UpstreamRecord {
    shared: Arc<Shared>,
    index: u32,
    ids: Ids,
    /// Held while keys are changed.
    changing: Mutex<()>,
    ring: Mutex<Ring>,
}

impl UpstreamRecord {
    pub(super) fn new(shared: Arc<Shared>, expected: u64, streams: u64) -> Result<Self, Error> {
        let index = shared.take(|free| &mut free.upstreams, "upstreams")?;
        let entry = shared.upstreams.get(index);
        entry.generations.iter().for_each(|generation| generation.store(0, Ordering::Relaxed));
        entry.expected.store(expected, Ordering::Relaxed);
        entry.lookups.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        entry.ring.run.store(0, Ordering::Relaxed);
        for word in [&entry.session, &entry.deferred_socket, &entry.deferred, &entry.tracks] {
            word.store(0, Ordering::Relaxed);
        }
        fill_window(&entry.seen, expected);
        fill_window(&entry.streams, streams);
        entry.preambles.iter().chain(&entry.late).for_each(|word| word.store(0, Ordering::Relaxed));
        entry.web.store(intf::BARE, Ordering::Relaxed);
        let ring = Mutex::new(Ring::new(shared.clone()));
        let ids = Ids::new(shared.clone(), index);
        Ok(Self { shared, index, ids, changing: Mutex::default(), ring })
    }

    fn entry(&self) -> &intf::Upstream {
        self.shared.upstreams.get(self.index)
    }

    /// Packets with this destination connection ID belong to the connection. `id` has the length that the fast
    /// path was configured for.
    pub fn add_id(&self, id: &[u8]) -> Result<(), Error> {
        self.ids.add(id)
    }

    pub fn remove_id(&self, id: &[u8]) -> Result<(), Error> {
        self.ids.remove(id)
    }

    /// Installs the receive keys of a generation, in place of those of the last but one. Best done long before
    /// the peer updates its keys: packets whose keys are missing are left to userspace.
    pub fn set_keys(&self, generation: u16, keys: &QuicKeys) -> Result<(), Error> {
        let _changing = lock(&self.changing);
        let phase = u32::from(generation & 1);
        let installed = &self.entry().generations[phase as usize];
        // A run that reads half of them finds the packet not authentic.
        installed.store(0, Ordering::SeqCst);
        let index = 2 * self.index + phase;
        write(&self.shared.open_keys, "open_keys", &index.to_ne_bytes(), keys.as_bytes())?;
        installed.store(u32::from(generation) + 1, Ordering::Release);
        Ok(())
    }

    /// As [`DownstreamRecord::refill`](super::DownstreamRecord::refill), for the packets that are expected next, with the keys of `generation`.
    pub fn refill(&self, generation: u16, want: Want, compute: impl Compute) -> Refill {
        lock(&self.ring).refill(&self.entry().ring, (generation, self.expected()), want, compute)
    }

    /// One more than the largest packet number received.
    pub fn expected(&self) -> u64 {
        self.entry().expected.load(Ordering::Relaxed)
    }

    /// Packets whose keystream look-up ended so.
    pub fn lookups(&self, lookup: Lookup) -> u64 {
        self.entry().lookups[lookup as usize].load(Ordering::Relaxed)
    }

    /// Userspace opened packet `number`: it is not forwarded later. To be called for every packet while nothing
    /// is attached, since the kernel saw none of them. Returns whether the program has opened it, too, or may have.
    pub fn observe(&self, number: u64) -> bool {
        let entry = self.entry();
        entry.expected.fetch_max(number + 1, Ordering::Relaxed);
        !mark_seen(&entry.seen, number)
    }

    /// Userspace keeps bytes of a stream from a packet that the program did not open: whatever else comes for them is not forwarded. If
    /// the program may have forwarded others in their place already, [`SlotRecord::is_contradicted`] says so.
    pub fn leave(&self, stream_id: u64, bytes: &Range<u64>, fin: bool) {
        // First, so that a stream which is bound this moment is found.
        mark_seen(&self.entry().late, stream_id >> 2);
        let key = intf::Slot { id: stream_id, upstream: self.index, kind: intf::STREAM };
        let found = self.shared.slots.lookup(key.as_bytes(), MapFlags::ANY).ok().flatten();
        if let Some(index) = found.and_then(|index| Some(u32::from_ne_bytes(index.try_into().ok()?))) {
            ingress::leave(self.shared.ingresses.get(index), stream_id, bytes, fin);
        }
    }

    /// Something of a stream has come before the program looked at the connection: the stream is bound to no opening.
    pub fn note_begun(&self, stream_id: u64) {
        mark_seen(&self.entry().late, stream_id >> 2);
    }

    /// Opens no packet of the connection any more, up to runs of the program that have begun.
    pub fn stop(&self) {
        self.ids.clear();
        self.entry().generations.iter().for_each(|generation| generation.store(0, Ordering::SeqCst));
    }

    /// Userspace takes a unidirectional stream of the peer, unless it was taken before, which this returns. From then on
    /// nothing binds it to an opening.
    pub fn take_stream(&self, id: u64) -> bool {
        mark_seen(&self.entry().streams, id >> 2)
    }

    /// Streams that begin under this alias may be bound to openings: those of subgroups that come behind this one, which is
    /// given by group and subgroup ID.
    pub fn track(&self, alias: u64, last: (u64, u64)) -> Result<TrackRecord, Error> {
        TrackRecord::new(self.shared.clone(), self.index, alias, last)
    }

    /// Egresses for a stream that has not begun: see [`TrackRecord::put`].
    pub fn opening(&self) -> Result<SlotRecord, Error> {
        let key = intf::Slot { id: intf::UNBOUND, upstream: self.index, kind: intf::STREAM };
        SlotRecord::opening(self.shared.clone(), key)
    }

    /// What arrives is of the WebTransport session with this ID; `None`: it is on the bare connection, as at first. To be called
    /// before anything is forwarded.
    pub fn set_web(&self, session: Option<u64>) {
        self.entry().web.store(session.unwrap_or(intf::BARE), Ordering::Relaxed);
    }

    /// How events name the connection.
    pub fn set_session(&self, session: u32) {
        self.entry().session.store(session, Ordering::Relaxed);
    }

    /// Where its deferred packets are steered to; [`SlotRecord::set_exclusive`] says which these are.
    pub fn set_deferred_socket(&self, socket: &DeferredSocket) {
        self.entry().deferred_socket.store(socket.index + 1, Ordering::Relaxed);
    }

    /// Forwards a stream of this connection, to nobody yet. One slot per stream at a time.
    pub fn slot(&self, stream_id: u64) -> SlotRecord {
        self.slot_of(intf::STREAM, stream_id)
    }

    /// Forwards the datagrams of the track that this connection calls `alias`; otherwise as [`slot`](Self::slot).
    pub fn datagrams(&self, alias: u64) -> SlotRecord {
        self.slot_of(intf::DATAGRAMS, alias)
    }

    fn slot_of(&self, kind: u32, id: u64) -> SlotRecord {
        SlotRecord::new(self.shared.clone(), intf::Slot { id, upstream: self.index, kind })
    }
}

impl Drop for UpstreamRecord {
    fn drop(&mut self) {
        self.stop();
        self.shared.retire(|free| &mut free.upstreams, self.index);
    }
}

/// Everything before `expected` has been seen. The entry is not in use yet.
fn fill_window(seen: &[AtomicU64], expected: u64) {
    let last = expected >> BLOCK_BITS;
    let words = seen.len() as u64;
    seen.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    for block in last.saturating_sub(words - 1)..=last {
        let bits = if block < last { u32::MAX } else { (1 << (expected & 31)) - 1 };
        seen[(block % words) as usize].store(block << 32 | u64::from(bits), Ordering::Relaxed);
    }
}

/// As `mark_seen` of the program; returns whether it was not marked before.
fn mark_seen(seen: &[AtomicU64], number: u64) -> bool {
    let block = number >> BLOCK_BITS;
    let bit = 1 << (number & 31);
    let word = &seen[(block % seen.len() as u64) as usize];
    let marked = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| {
        match ((old >> 32) as u32).wrapping_sub(block as u32) as i32 {
            0 if old & bit != 0 => None,
            0 => Some(old | bit),
            ahead if ahead < 0 => Some(block << 32 | bit),
            _ => None,
        }
    });
    marked.is_ok()
}
