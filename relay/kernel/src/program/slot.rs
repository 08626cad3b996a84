//! What is forwarded, and to whom: slots and their egresses.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use libbpf_rs::MapCore;
use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::write;

use super::downstream::DownstreamRecord;
use super::ingress::{IngressRecord, PositionRecord};
use super::intf;
use super::shared::Shared;

/// One subscriber's copy of an upstream stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EgressRecord {
    /// The downstream stream.
    pub stream_id: u64,
    /// Downstream offset minus upstream offset.
    pub shift: i64,
    /// Upstream offset: frames that begin before it are left to userspace.
    pub from: u64,
    /// Downstream offset: the peer's MAX_STREAM_DATA.
    pub max_offset: u64,
    /// Comes back in registrations.
    pub tag: u64,
    /// Priority, smaller is more urgent: see [`DownstreamRecord::set_waiting`].
    pub level: u16,
    /// How events name what the stream carries.
    pub track: u32,
    pub group: u64,
}

/// One subscriber's copy of a track's datagrams, from the first location on and to the last group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DatagramRecord {
    /// The track's downstream.
    pub alias: u64,
    /// Group and object.
    pub first: (u64, u64),
    pub last_group: u64,
    /// As of [`EgressRecord`].
    pub tag: u64,
    /// As of [`EgressRecord`]. A datagram with a priority of its own has that in place of the low 8 bits.
    pub level: u16,
    pub track: u32,
}

/// One subscriber's copy of a stream that has not begun. The program opens the subscriber's stream with the first packet,
/// if what it carries begins within these bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpeningRecord {
    /// The track's downstream.
    pub alias: u64,
    /// Group and object of the first that is wanted.
    pub first: (u64, u64),
    pub last_group: u64,
    /// Of the peer's MAX_STREAM_DATA, at the beginning of a stream.
    pub max_offset: u64,
    /// As of [`EgressRecord`]. A SUBGROUP_HEADER with a priority of its own has that in place of the low 8 bits.
    pub level: u16,
    pub tag: u64,
    pub track: u32,
}

/// Who opens the stream of an egress that was prepared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpeningRecordSide {
    /// Userspace: the program does not any more.
    Userspace,
    /// The program, with this ID; `None`: it is about to.
    Program(Option<u64>),
}

/// An egress of one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EgressKey(u32);

/// A stream of an upstream, or a track whose objects come as its datagrams, with its egresses. Dropping it recalls them all.
pub struct SlotRecord {
    shared: Arc<Shared>,
    key: intf::Slot,
    /// While there are egresses.
    ingress: Option<IngressRecord>,
    /// In the order in which the program follows them.
    egresses: Vec<u32>,
    exclusive: bool,
    /// It waits for its stream to begin.
    unbound: bool,
    /// Of userspace.
    position: PositionRecord,
}

impl SlotRecord {
    pub(super) fn new(shared: Arc<Shared>, key: intf::Slot) -> Self {
        let position = PositionRecord::default();
        Self { shared, key, ingress: None, egresses: Vec::new(), exclusive: false, unbound: false, position }
    }

    pub(super) fn opening(shared: Arc<Shared>, key: intf::Slot) -> Result<Self, Error> {
        let ingress = IngressRecord::new(shared.clone(), &key, intf::END, &PositionRecord::default())?;
        let mut slot = Self::new(shared, key);
        slot.ingress = Some(ingress);
        slot.unbound = true;
        Ok(slot)
    }

    /// Forwards datagrams to one more subscriber; only for a slot of [`UpstreamRecord::datagrams`](super::UpstreamRecord::datagrams).
    pub fn add_datagrams(
        &mut self,
        downstream: &DownstreamRecord,
        egress: &DatagramRecord,
    ) -> Result<EgressKey, Error> {
        let (from, shift) = egress.first;
        let egress = EgressRecord {
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
    pub fn add(&mut self, downstream: &DownstreamRecord, egress: &EgressRecord) -> Result<EgressKey, Error> {
        self.insert(downstream, egress, None)
    }

    /// Forwards the stream that will begin to one more subscriber; only for an opening, or what has become of one.
    pub fn add_opened(
        &mut self,
        downstream: &DownstreamRecord,
        opened: &OpeningRecord,
    ) -> Result<EgressKey, Error> {
        let OpeningRecord { max_offset, tag, level, track, .. } = *opened;
        let egress = EgressRecord {
            stream_id: intf::UNOPENED,
            shift: 0,
            from: 0,
            max_offset,
            tag,
            level,
            track,
            group: 0,
        };
        self.insert(downstream, &egress, Some(opened))
    }

    /// Has userspace open the stream of an egress, if the program has not done so.
    pub fn close(&self, egress: EgressKey) -> OpeningRecordSide {
        if !self.egresses.contains(&egress.0) {
            return OpeningRecordSide::Userspace;
        }
        let id = &self.shared.egresses.get(egress.0).id;
        match id.compare_exchange(intf::UNOPENED, intf::CLOSED, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) | Err(intf::CLOSED) => OpeningRecordSide::Userspace,
            Err(intf::OPENING) => OpeningRecordSide::Program(None),
            Err(id) => OpeningRecordSide::Program(Some(id)),
        }
    }

    /// Of an opening: the stream that it has been bound to.
    pub fn bound(&self) -> Option<u64> {
        self.ingress.as_ref().map(IngressRecord::id).filter(|id| *id != intf::UNBOUND)
    }

    /// Takes over an opening that the program has bound to a stream.
    pub fn bind(&mut self, stream_id: u64) {
        self.key.id = stream_id;
        self.unbound = false;
        if self.egresses.is_empty() {
            self.unlink();
        }
    }

    /// Of an opening.
    pub(super) fn ingress(&self) -> Option<u32> {
        self.ingress.as_ref().filter(|_| self.unbound).map(IngressRecord::index)
    }

    fn insert(
        &mut self,
        downstream: &DownstreamRecord,
        egress: &EgressRecord,
        opened: Option<&OpeningRecord>,
    ) -> Result<EgressKey, Error> {
        let index = self.shared.take(|free| &mut free.egresses, "egresses")?;
        let entry = self.shared.egresses.get(index);
        let bounds = opened.map(|opened| (opened.alias, opened.first, opened.last_group));
        let (alias, (first_group, first_object), last_group) = bounds.unwrap_or_default();
        for (word, value) in [
            (&entry.alias, alias),
            (&entry.first_group, first_group),
            (&entry.first_object, first_object),
            (&entry.last_group, last_group),
            (&entry.upstream_id, self.key.id),
            (&entry.id, egress.stream_id),
            (&entry.shift, egress.shift as u64),
            (&entry.from, egress.from),
            (&entry.max_offset, egress.max_offset),
            (&entry.tag, egress.tag),
            (&entry.group, egress.group),
            (&entry.counted, egress.from.wrapping_add_signed(egress.shift)),
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
            (&entry.ingress, self.ingress.as_ref().map_or(intf::END, IngressRecord::index)),
        ] {
            word.store(value, Ordering::Relaxed);
        }
        // Last: a packet between two runs may have this entry as its next.
        entry.epoch.store(downstream.id().epoch, Ordering::Release);
        match self.egresses.last() {
            Some(last) => self.shared.egresses.get(*last).next.store(index, Ordering::Release),
            None if self.ingress.is_some() => self.set_first(index),
            None => self.link(index).inspect_err(|_| self.retire(index))?,
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

    /// Whether nobody waits for the stream but its egresses. Then a packet that all of them were sent, and that has nothing
    /// else in it, is deferred: it goes to the deferred socket, 31 times in a row at most.
    pub fn set_exclusive(&mut self, exclusive: bool) {
        if exclusive != self.exclusive {
            self.exclusive = exclusive;
            let entries = self.egresses.iter().map(|egress| self.shared.egresses.get(*egress));
            entries.for_each(|entry| entry.exclusive.store(u32::from(exclusive), Ordering::Relaxed));
        }
    }

    /// Userspace has the stream's bytes up to this position. The program forwards what follows its own position, which is
    /// this one if that is behind; at first the stream's beginning. Where it finds a hole it forwards nothing more until the
    /// hole is filled, or userspace has gone past it. No system call.
    pub fn advance(&mut self, position: &PositionRecord) {
        self.position = *position;
        if let Some(ingress) = &self.ingress {
            ingress.advance(position);
        }
    }

    /// Has the program go on there, whatever it knows of the stream.
    pub fn set_position(&mut self, position: &PositionRecord) {
        self.position = *position;
        if let Some(ingress) = &self.ingress {
            ingress.set(position);
        }
    }

    /// Whether the program may have forwarded other bytes of the stream than userspace has. It forwards no more of it then, and userspace
    /// should end it everywhere.
    pub fn is_contradicted(&self) -> bool {
        self.ingress.as_ref().is_some_and(IngressRecord::is_contradicted)
    }

    /// Offset of the stream at which the program goes on.
    pub fn judged(&self) -> u64 {
        self.ingress.as_ref().map_or(self.position.offset, IngressRecord::next)
    }

    /// Recalls one subscriber's stream.
    pub fn remove(&mut self, egress: EgressKey) {
        let Some(at) = self.egresses.iter().position(|index| *index == egress.0) else { return };
        let next = self.egresses.get(at + 1).copied();
        match (at.checked_sub(1).and_then(|before| self.egresses.get(before)), next) {
            (Some(before), _) => {
                self.shared.egresses.get(*before).next.store(next.unwrap_or(intf::END), Ordering::Release);
            }
            (None, Some(next)) => self.set_first(next),
            (None, None) if self.unbound => self.set_first(intf::END),
            (None, None) => self.unlink(),
        }
        self.egresses.remove(at);
        self.retire(egress.0);
    }

    pub fn is_empty(&self) -> bool {
        self.egresses.is_empty()
    }

    fn set_first(&self, egress: u32) {
        if let Some(ingress) = &self.ingress {
            ingress.set_first(egress);
        }
    }

    fn link(&mut self, egress: u32) -> Result<(), Error> {
        let ingress = IngressRecord::new(self.shared.clone(), &self.key, egress, &self.position)?;
        write(&self.shared.slots, "slots", self.key.as_bytes(), &ingress.index().to_ne_bytes())?;
        self.ingress = Some(ingress);
        Ok(())
    }

    /// Fails only if there is no egress, and so nothing to remove.
    fn unlink(&mut self) {
        if !self.unbound {
            let _ = self.shared.slots.delete(self.key.as_bytes());
        }
        self.ingress = None;
    }

    fn retire(&self, egress: u32) {
        self.shared.egresses.get(egress).epoch.store(0, Ordering::Release);
        self.shared.retire(|free| &mut free.egresses, egress);
    }
}

impl Drop for SlotRecord {
    fn drop(&mut self) {
        // Bound this very moment, by a run that has taken it out of the track.
        if let Some(bound) = self.bound().filter(|_| self.unbound) {
            self.key.id = bound;
            self.unbound = false;
        }
        if self.ingress.is_some() {
            self.unlink();
        }
        self.egresses.iter().for_each(|egress| self.retire(*egress));
    }
}
