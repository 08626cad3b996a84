//! Connections that media arrives on, and who gets their streams.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use libbpf_rs::MapCore;

use super::ids::Ids;
use super::keystream::{Compute, Refill, Ring, Want};
use super::{DeferredSocket, Downstream, Error, Lookup, Shared, intf, lock, write};
use crate::crypto::QuicKeys;
use crate::intf::Plain;

/// log2 of the packet numbers in a word of the replay window.
const BLOCK_BITS: u32 = 5;

/// A connection that media arrives on. The kernel opens its packets from when an ID and keys are there; when it
/// is dropped, no packet of it is opened any more, up to runs of the program that have begun.
pub struct Upstream {
    shared: Arc<Shared>,
    index: u32,
    ids: Ids,
    /// Held while keys are changed.
    changing: Mutex<()>,
    ring: Mutex<Ring>,
}

impl Upstream {
    pub(super) fn new(shared: Arc<Shared>, expected: u64) -> Result<Self, Error> {
        let index = shared.take(|free| &mut free.upstreams, "upstreams")?;
        let entry = shared.upstreams.get(index);
        entry.generations.iter().for_each(|generation| generation.store(0, Ordering::Relaxed));
        entry.expected.store(expected, Ordering::Relaxed);
        entry.lookups.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        entry.ring.run.store(0, Ordering::Relaxed);
        for word in [&entry.session, &entry.deferred_socket, &entry.deferred] {
            word.store(0, Ordering::Relaxed);
        }
        fill_window(&entry.seen, expected);
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

    /// As [`Downstream::refill`], for the packets that are expected next, with the keys of `generation`.
    pub fn refill(&self, generation: u16, want: Want, compute: impl Compute) -> Refill {
        lock(&self.ring).refill(&self.entry().ring, (generation, self.expected()), want, compute)
    }

    /// One more than the largest packet number received.
    pub fn expected(&self) -> u64 {
        self.entry().expected.load(Ordering::Relaxed)
    }

    /// Packets whose keystream came from there.
    pub fn lookups(&self, lookup: Lookup) -> u64 {
        self.entry().lookups[lookup as usize].load(Ordering::Relaxed)
    }

    /// Userspace opened packet `number`: it is not forwarded later. To be called for every packet while nothing
    /// is attached, since the kernel saw none of them; at other times it changes nothing.
    pub fn observe(&self, number: u64) {
        let entry = self.entry();
        entry.expected.fetch_max(number + 1, Ordering::Relaxed);
        mark_seen(&entry.seen, number);
    }

    /// How events name the connection.
    pub fn set_session(&self, session: u32) {
        self.entry().session.store(session, Ordering::Relaxed);
    }

    /// Leads packets that are of no hurry for userspace to a socket of their own; see [`Slot::set_exclusive`].
    pub fn set_deferred_socket(&self, socket: &DeferredSocket) {
        self.entry().deferred_socket.store(socket.index + 1, Ordering::Relaxed);
    }

    /// Forwards a stream of this connection, to nobody yet. One slot per stream at a time.
    pub fn slot(&self, stream_id: u64) -> Slot {
        self.slot_of(intf::STREAM, stream_id)
    }

    /// Forwards the datagrams of the track that this connection calls `alias`; otherwise as [`slot`](Self::slot).
    pub fn datagrams(&self, alias: u64) -> Slot {
        self.slot_of(intf::DATAGRAMS, alias)
    }

    fn slot_of(&self, kind: u32, id: u64) -> Slot {
        let key = intf::Slot { id, upstream: self.index, kind };
        Slot { shared: self.shared.clone(), key, egresses: Vec::new(), exclusive: false }
    }
}

impl Drop for Upstream {
    fn drop(&mut self) {
        self.ids.clear();
        self.entry().generations.iter().for_each(|generation| generation.store(0, Ordering::SeqCst));
        self.shared.retire(|free| &mut free.upstreams, self.index);
    }
}

/// Everything before `expected` has been seen. The entry is not in use yet.
fn fill_window(seen: &[AtomicU64; intf::SEEN_WORDS], expected: u64) {
    let last = expected >> BLOCK_BITS;
    let words = intf::SEEN_WORDS as u64;
    seen.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    for block in last.saturating_sub(words - 1)..=last {
        let bits = if block < last { u32::MAX } else { (1 << (expected & 31)) - 1 };
        seen[(block % words) as usize].store(block << 32 | u64::from(bits), Ordering::Relaxed);
    }
}

/// As `mark_seen` of the program.
fn mark_seen(seen: &[AtomicU64; intf::SEEN_WORDS], number: u64) {
    let block = number >> BLOCK_BITS;
    let bit = 1 << (number & 31);
    let word = &seen[(block % intf::SEEN_WORDS as u64) as usize];
    let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| {
        match ((old >> 32) as u32).wrapping_sub(block as u32) as i32 {
            0 => Some(old | bit),
            ahead if ahead < 0 => Some(block << 32 | bit),
            _ => None,
        }
    });
}

/// One subscriber's copy of an upstream stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Egress {
    /// The downstream stream.
    pub stream_id: u64,
    /// Downstream offset minus upstream offset.
    pub shift: i64,
    /// Upstream offset: frames that begin before it are userspace's.
    pub from: u64,
    /// Downstream offset: the peer's MAX_STREAM_DATA.
    pub max_offset: u64,
    /// Comes back in registrations.
    pub tag: u64,
    /// Of urgency, smaller is more urgent: see [`Downstream::set_waiting`].
    pub level: u16,
    /// How events name what it carries.
    pub track: u32,
    pub group: u64,
}

/// One subscriber's copy of a track's datagrams: of those from the first location on, to the last group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagrams {
    /// The track's downstream.
    pub alias: u64,
    /// Group and object.
    pub first: (u64, u64),
    pub last_group: u64,
    /// As of [`Egress`].
    pub tag: u64,
    /// As of [`Egress`]; the publisher's part, the low 8 bits, is for datagrams that do not have their own.
    pub level: u16,
    pub track: u32,
}

/// An egress of one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EgressKey(u32);

/// An upstream stream, or the datagrams of a track, with their egresses. When it is dropped, they are userspace's again.
pub struct Slot {
    shared: Arc<Shared>,
    key: intf::Slot,
    /// In the order in which the program follows them.
    egresses: Vec<u32>,
    exclusive: bool,
}

impl Slot {
    /// Forwards datagrams to one more subscriber; only for a slot of [`Upstream::datagrams`].
    pub fn add_datagrams(&mut self, downstream: &Downstream, egress: &Datagrams) -> Result<EgressKey, Error> {
        let (from, shift) = egress.first;
        let egress = Egress {
            stream_id: egress.alias,
            shift: shift as i64,
            from,
            max_offset: egress.last_group,
            tag: egress.tag,
            level: egress.level,
            track: egress.track,
            group: 0,
        };
        self.add(downstream, &egress)
    }

    /// Forwards the stream to one more subscriber.
    pub fn add(&mut self, downstream: &Downstream, egress: &Egress) -> Result<EgressKey, Error> {
        let index = self.shared.take(|free| &mut free.egresses, "egresses")?;
        let entry = self.shared.egresses.get(index);
        for (word, value) in [
            (&entry.upstream_id, self.key.id),
            (&entry.id, egress.stream_id),
            (&entry.shift, egress.shift as u64),
            (&entry.from, egress.from),
            (&entry.max_offset, egress.max_offset),
            (&entry.tag, egress.tag),
            (&entry.group, egress.group),
        ] {
            word.store(value, Ordering::Relaxed);
        }
        for (word, value) in [
            (&entry.next, intf::END),
            (&entry.downstream, downstream.id().index),
            (&entry.upstream, self.key.upstream),
            (&entry.level, u32::from(egress.level)),
            (&entry.exclusive, u32::from(self.exclusive)),
            (&entry.track, egress.track),
            (&entry.kind, self.key.kind),
        ] {
            word.store(value, Ordering::Relaxed);
        }
        // Last: a packet between two runs may lead to the entry already.
        entry.epoch.store(downstream.id().epoch, Ordering::Release);
        match self.egresses.last() {
            Some(last) => self.shared.egresses.get(*last).next.store(index, Ordering::Release),
            None => self.steer_to(index).inspect_err(|_| self.retire(index))?,
        }
        self.egresses.push(index);
        Ok(EgressKey(index))
    }

    /// The peer raised MAX_STREAM_DATA of the egress's stream.
    pub fn set_max_offset(&self, egress: EgressKey, max: u64) {
        if self.egresses.contains(&egress.0) {
            self.shared.egresses.get(egress.0).max_offset.store(max, Ordering::Relaxed);
        }
    }

    /// Whether nobody but the egresses waits for the stream. What all of them were sent is then no hurry for userspace,
    /// and a packet with nothing else in it goes to the deferred socket, 31 times in a row at most.
    pub fn set_exclusive(&mut self, exclusive: bool) {
        if exclusive != self.exclusive {
            self.exclusive = exclusive;
            let entries = self.egresses.iter().map(|egress| self.shared.egresses.get(*egress));
            entries.for_each(|entry| entry.exclusive.store(u32::from(exclusive), Ordering::Relaxed));
        }
    }

    /// Takes the stream back from one subscriber's egress.
    pub fn remove(&mut self, egress: EgressKey) -> Result<(), Error> {
        let Some(at) = self.egresses.iter().position(|index| *index == egress.0) else { return Ok(()) };
        let next = self.egresses.get(at + 1).copied();
        match (at.checked_sub(1).and_then(|before| self.egresses.get(before)), next) {
            (Some(before), _) => {
                self.shared.egresses.get(*before).next.store(next.unwrap_or(intf::END), Ordering::Release);
            }
            (None, Some(next)) => self.steer_to(next)?,
            (None, None) => self.unlink(),
        }
        self.egresses.remove(at);
        self.retire(egress.0);
        Ok(())
    }

    pub fn is_empty(&self) -> bool {
        self.egresses.is_empty()
    }

    fn steer_to(&self, egress: u32) -> Result<(), Error> {
        write(&self.shared.slots, "slots", self.key.as_bytes(), &egress.to_ne_bytes())
    }

    /// Fails where there is no egress, and so nothing to remove.
    fn unlink(&self) {
        let _ = self.shared.slots.delete(self.key.as_bytes());
    }

    fn retire(&self, egress: u32) {
        self.shared.egresses.get(egress).epoch.store(0, Ordering::Release);
        self.shared.retire(|free| &mut free.egresses, egress);
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        if !self.egresses.is_empty() {
            self.unlink();
        }
        self.egresses.iter().for_each(|egress| self.retire(*egress));
    }
}
