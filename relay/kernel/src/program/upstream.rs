//! Connections on which media arrives.

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
use super::keystream::{Compute, KeystreamRing, Refill, WantedRing};
use super::outcome::Lookup;
use super::shared::{RelayMaps, lock};
use super::slot::SlotRecord;
use super::track::TrackRecord;

/// log2 of how many packet numbers one word of the replay window covers.
const BLOCK_BITS: u32 = 5;

/// A connection on which media arrives. The kernel decrypts its packets as soon as it has a connection ID and keys.
/// When this is dropped, the kernel stops decrypting the connection's packets, except in program runs that have already
/// begun.
pub struct UpstreamRecord {
    shared: Arc<RelayMaps>,
    index: u32,
    ids: Ids,
    /// This lock is held while receive keys are installed.
    changing: Mutex<()>,
    ring: Mutex<KeystreamRing>,
}

impl UpstreamRecord {
    pub(super) fn new(shared: Arc<RelayMaps>, expected: u64, streams: u64) -> Result<Self, Error> {
        let index = shared.take(|free| &mut free.upstreams, "upstreams")?;
        let entry = shared.upstreams.get(index);
        // A reused entry still has the values of its previous connection.
        entry.generations.iter().for_each(|generation| generation.store(0, Ordering::Relaxed));
        entry.expected.store(expected, Ordering::Relaxed);
        entry.lookups.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        entry.ring.run.store(0, Ordering::Relaxed);
        for word in [&entry.session, &entry.deferred_socket, &entry.deferred, &entry.tracks] {
            word.store(0, Ordering::Relaxed);
        }
        // The replay window starts as if all packets before `expected` had arrived.
        fill_window(&entry.seen, expected);
        fill_window(&entry.streams, streams);
        entry.preambles.iter().chain(&entry.late).for_each(|word| word.store(0, Ordering::Relaxed));
        entry.web.store(intf::BARE, Ordering::Relaxed);
        let ring = Mutex::new(KeystreamRing::new(shared.clone()));
        let ids = Ids::new(shared.clone(), index);
        Ok(Self { shared, index, ids, changing: Mutex::default(), ring })
    }

    fn entry(&self) -> &intf::Upstream {
        self.shared.upstreams.get(self.index)
    }

    /// Adds a destination connection ID of the connection's packets. `id` has the configured length.
    pub fn add_id(&self, id: &[u8]) -> Result<(), Error> {
        self.ids.add(id)
    }

    /// Removes a connection ID that the peer does not use any more.
    pub fn remove_id(&self, id: &[u8]) -> Result<(), Error> {
        self.ids.remove(id)
    }

    /// Installs the receive keys of a generation, replacing those of the last generation but one. Does nothing if they
    /// are installed. Should be called well before the peer updates its keys, since packets without keys are left to
    /// userspace.
    pub fn set_keys(&self, generation: u16, keys: &QuicKeys) -> Result<(), Error> {
        let _changing = lock(&self.changing);
        let phase = u32::from(generation & 1);
        let installed = &self.entry().generations[phase as usize];
        // The keys in use are not removed for a moment, in which this thread may be preempted.
        if installed.load(Ordering::Relaxed) == u32::from(generation) + 1 {
            return Ok(());
        }
        // A run that reads half-written keys finds the packet not authentic, and leaves it to userspace.
        installed.store(0, Ordering::SeqCst);
        let index = 2 * self.index + phase;
        write(&self.shared.open_keys, "open_keys", &index.to_ne_bytes(), keys.as_bytes())?;
        installed.store(u32::from(generation) + 1, Ordering::Release);
        Ok(())
    }

    /// Reports whether the kernel can decrypt the connection's packets: it has a connection ID and keys.
    pub fn is_open(&self) -> bool {
        let has_keys = self.entry().generations.iter().any(|one| one.load(Ordering::Relaxed) > 0);
        has_keys && !self.ids.is_empty()
    }

    /// Precomputes keystreams as [`DownstreamRecord::refill`](super::DownstreamRecord::refill) does, for the packets
    /// that are expected next, encrypted with the keys of `generation`.
    pub fn refill(&self, generation: u16, want: WantedRing, compute: impl Compute) -> Refill {
        lock(&self.ring).refill(&self.entry().ring, generation, self.expected(), want, compute)
    }

    /// Returns the largest received packet number plus 1.
    pub fn expected(&self) -> u64 {
        self.entry().expected.load(Ordering::Relaxed)
    }

    /// Returns the number of packets with this result of the keystream lookup.
    pub fn lookups(&self, lookup: Lookup) -> u64 {
        self.entry().lookups[lookup as usize].load(Ordering::Relaxed)
    }

    /// Records that userspace has decrypted packet `number`, so that the program does not forward it later. While the
    /// program is not attached to any interface, this has to be called for every packet. Returns whether the program
    /// may have decrypted it, too.
    pub fn observe(&self, number: u64) -> bool {
        let entry = self.entry();
        entry.expected.fetch_max(number + 1, Ordering::Relaxed);
        !mark_seen(&entry.seen, number)
    }

    /// Records that userspace keeps bytes of a stream from a packet that the program did not decrypt. The program then
    /// forwards no other version of these bytes. If it may have done so already, [`SlotRecord::is_contradicted`]
    /// reports it.
    pub fn leave(&self, stream_id: u64, bytes: &Range<u64>, fin: bool) {
        // The stream's bit in the bitmap `late` is set before the stream's map entry is looked up. A program run checks
        // that bit before it assigns an entry to the stream.
        mark_seen(&self.entry().late, stream_id >> 2);
        let key = intf::Slot { id: stream_id, upstream: self.index, kind: intf::STREAM };
        let found = self.shared.slots.lookup(key.as_bytes(), MapFlags::ANY).ok().flatten();
        if let Some(index) = found.and_then(|index| Some(u32::from_ne_bytes(index.try_into().ok()?))) {
            ingress::leave(self.shared.ingresses.get(index), stream_id, bytes, fin);
        }
    }

    /// Records that bytes of a stream arrived before the program handled the connection, so that the program never
    /// opens subscribers' streams for it.
    pub fn note_begun(&self, stream_id: u64) {
        mark_seen(&self.entry().late, stream_id >> 2);
    }

    /// Stops the decryption of the connection's packets, except in program runs that have already begun.
    pub fn stop(&self) {
        self.ids.clear();
        self.entry().generations.iter().for_each(|generation| generation.store(0, Ordering::SeqCst));
    }

    /// Claims a unidirectional stream of the peer for userspace, so that the program never opens subscribers' streams
    /// for it. Returns false if it was claimed before.
    pub fn take_stream(&self, id: u64) -> bool {
        mark_seen(&self.entry().streams, id >> 2)
    }

    /// Registers a track of this connection's publisher. The program may open subscribers' streams for the publisher's
    /// streams with this track alias, if their subgroup is later than `last` (group ID and subgroup ID).
    pub fn track(&self, alias: u64, last: (u64, u64)) -> Result<TrackRecord, Error> {
        TrackRecord::new(self.shared.clone(), self.index, alias, last)
    }

    /// Makes an opening: an entry (slot) for a publisher's stream that has not begun. Subscribers are added to it
    /// afterwards. See [`TrackRecord::put`].
    pub fn opening(&self) -> Result<SlotRecord, Error> {
        let key = intf::Slot { id: intf::UNBOUND, upstream: self.index, kind: intf::STREAM };
        SlotRecord::opening(self.shared.clone(), key)
    }

    /// Sets the ID of the WebTransport session in which media arrives. `None`, the initial value, stands for plain
    /// QUIC. Has to be called before anything is forwarded.
    pub fn set_web(&self, session: Option<u64>) {
        self.entry().web.store(session.unwrap_or(intf::BARE), Ordering::Relaxed);
    }

    /// Sets the number that stands for the connection in trace events.
    pub fn set_session(&self, session: u32) {
        self.entry().session.store(session, Ordering::Relaxed);
    }

    /// Sets the socket for packets that need not wake userspace at once (deferred packets).
    /// [`SlotRecord::set_exclusive`] decides which packets are deferred.
    pub fn set_deferred_socket(&self, socket: &DeferredSocket) {
        self.entry().deferred_socket.store(socket.index + 1, Ordering::Relaxed);
    }

    /// Makes the entry (slot) by which the program forwards a stream of this connection. Subscribers are added to it
    /// afterwards. A stream may have one slot at a time.
    pub fn slot(&self, stream_id: u64) -> SlotRecord {
        self.slot_of(intf::STREAM, stream_id)
    }

    /// Makes the entry (slot) by which the program forwards the datagrams of the track with this alias. Subscribers are
    /// added to it afterwards.
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

/// Marks all packet numbers before `expected` as seen in the replay window of an entry that is not in use yet.
fn fill_window(seen: &[AtomicU64], expected: u64) {
    let last = expected >> BLOCK_BITS;
    let words = seen.len() as u64;
    seen.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    for block in last.saturating_sub(words - 1)..=last {
        let bits = if block < last { u32::MAX } else { (1 << (expected & 31)) - 1 };
        seen[(block % words) as usize].store(block << 32 | u64::from(bits), Ordering::Relaxed);
    }
}

/// Marks a stream or packet number as seen in a sliding bitmap, as `mark_seen` in the program does. Returns true if it
/// was not marked before.
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
