//! Handles of publishers' streams and datagrams that the program forwards (slots), and of the subscribers' copies
//! (egresses).

use std::sync::Arc;
use std::sync::atomic::Ordering;

use libbpf_rs::MapCore;
use millrace_kernel::Error;
use millrace_kernel::intf::Plain;
use millrace_kernel::object::write;
use millrace_moq::Position;
use millrace_transport::offload::DatagramCopy;

use super::downstream::DownstreamRecord;
use super::ingress::{IngressRecord, behind_object, next_object};
use super::intf;
use super::shared::RelayMaps;

/// One subscriber's copy of a publisher's stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EgressRecord {
    /// ID of the stream on the subscriber's connection.
    pub stream_id: u64,
    /// Offset in the subscriber's stream minus offset in the publisher's stream.
    pub shift: i64,
    /// Offset in the publisher's stream from which the program sends. Userspace sends the frames that begin before it.
    pub from: u64,
    /// The subscriber's flow control limit (MAX_STREAM_DATA), as an offset in its stream.
    pub max_offset: u64,
    /// A number that the caller chooses. The program's reports about sent packets contain it.
    pub tag: u64,
    /// Priority, where smaller is more urgent. See [`DownstreamRecord::set_waiting`].
    pub level: u16,
    /// The number that stands for the track in trace events.
    pub track: u32,
    /// The group ID that trace events show for the stream.
    pub group: u64,
}

/// One subscriber's copy of a stream that has not begun. The program opens the subscriber's stream with the first
/// packet, if the subgroup begins between `first` and the end of `last_group`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpeningRecord {
    /// The track alias that the subscriber knows.
    pub alias: u64,
    /// Group ID and object ID of the first object that the subscriber requested.
    pub first: (u64, u64),
    /// ID of the last group that is forwarded.
    pub last_group: u64,
    /// The subscriber's initial MAX_STREAM_DATA, in bytes.
    pub max_offset: u64,
    /// Priority, as in [`EgressRecord`]. A SUBGROUP_HEADER's own priority replaces the low 8 bits.
    pub level: u16,
    /// A number that the caller chooses. The program's reports about sent packets contain it.
    pub tag: u64,
    /// The number that stands for the track in trace events.
    pub track: u32,
}

/// Says whether userspace or the program opens a subscriber's stream that was prepared for the program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpeningRecordSide {
    /// Userspace opens the stream; the program no longer may.
    Userspace,
    /// The program has opened the stream with this ID. `None`: the program is opening the stream now, so its ID is not
    /// known yet.
    Program(Option<u64>),
}

/// Identifies one subscriber's copy of a forwarded stream, or of a track's datagrams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EgressKey(u32);

/// A publisher's stream, or a track's datagrams, with the subscribers' copies of it (egresses). When this is dropped,
/// userspace sends all of these copies.
pub struct SlotRecord {
    shared: Arc<RelayMaps>,
    key: intf::Slot,
    /// The entry in the map `ingresses`, by which the program parses the stream or datagrams. `Some` while there are
    /// subscribers' copies (egresses).
    ingress: Option<IngressRecord>,
    /// Indexes of the subscribers' copies in the map `egresses`, in the order of the program's linked list.
    egresses: Vec<u32>,
    exclusive: bool,
    /// True while the slot is an opening: prepared for a stream that has not begun.
    unbound: bool,
    /// The position in the stream up to which userspace has parsed it.
    position: Position,
}

impl SlotRecord {
    pub(super) fn new(shared: Arc<RelayMaps>, key: intf::Slot) -> Self {
        let position = Position::default();
        Self { shared, key, ingress: None, egresses: Vec::new(), exclusive: false, unbound: false, position }
    }

    pub(super) fn opening(shared: Arc<RelayMaps>, key: intf::Slot) -> Result<Self, Error> {
        let ingress = IngressRecord::new(shared.clone(), &key, intf::END, &Position::default())?;
        let mut slot = Self::new(shared, key);
        slot.ingress = Some(ingress);
        slot.unbound = true;
        Ok(slot)
    }

    /// Forwards the track's datagrams to one more subscriber. Must be called only for a handle made by
    /// [`UpstreamRecord::datagrams`](super::UpstreamRecord::datagrams).
    pub fn add_datagrams(
        &mut self,
        downstream: &DownstreamRecord,
        egress: &DatagramCopy,
    ) -> Result<EgressKey, Error> {
        let (from, shift) = egress.first;
        // `shift` and `max_offset` have another meaning for datagrams, see `relay_egress` in relay_intf.h.
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

    /// Claims an object of a track's datagrams that userspace has received, so that the program does not forward it.
    /// Returns false if the program may have forwarded it already.
    pub fn claim_object(&self, object: (u64, u64)) -> bool {
        let before = next_object(&self.position);
        object < before
            || self.ingress.as_ref().is_none_or(|ingress| ingress.claim_object(object.0, object.1))
    }

    /// Notes that a track's datagrams up to this object may have arrived before. If no subscriber gets the datagrams
    /// yet, subscribers that are added later get those after this object.
    pub fn skip_to(&mut self, group: u64, object: u64) {
        if self.ingress.is_none() {
            self.position = behind_object(group, object);
        }
    }

    /// Forwards the stream to one more subscriber.
    pub fn add(&mut self, downstream: &DownstreamRecord, egress: &EgressRecord) -> Result<EgressKey, Error> {
        self.insert(downstream, egress, None)
    }

    /// Adds a subscriber to this opening (a slot prepared for a stream that has not begun). The program will forward
    /// the stream to the subscriber. Must be called only for a slot that is or was an opening.
    pub fn add_opened(
        &mut self,
        downstream: &DownstreamRecord,
        opened: &OpeningRecord,
    ) -> Result<EgressKey, Error> {
        let OpeningRecord { max_offset, tag, level, track, .. } = *opened;
        let egress = EgressRecord {
            // `UNOPENED` means that the subscriber's copy has no stream yet, and that the program may open one.
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

    /// Makes userspace open a subscriber's stream, unless the program has opened it already. Returns which of the two
    /// opens the stream.
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

    /// Returns the ID of the publisher's stream that the program has assigned to this opening (an entry for a stream
    /// that had not begun), if any.
    pub fn bound(&self) -> Option<u64> {
        self.ingress.as_ref().map(IngressRecord::id).filter(|id| *id != intf::UNBOUND)
    }

    /// Turns this opening (a slot for a stream that had not begun), which the program has bound to the stream
    /// `stream_id`, into an ordinary slot of that stream.
    pub fn bind(&mut self, stream_id: u64) {
        self.key.id = stream_id;
        self.unbound = false;
        if self.egresses.is_empty() {
            self.unlink();
        }
    }

    /// Returns this entry's index in the map `ingresses`, if it is an opening: an entry for a stream that has not
    /// begun, and not yet passed to [`Self::bind`].
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
        // The epoch, which makes the entry usable, is stored last: a packet that is queued for a further program run
        // may continue with this entry.
        entry.epoch.store(downstream.id().epoch, Ordering::Release);
        match self.egresses.last() {
            Some(last) => self.shared.egresses.get(*last).next.store(index, Ordering::Release),
            None if self.ingress.is_some() => self.set_first(index),
            None => self.link(index).inspect_err(|_| self.retire(index))?,
        }
        self.egresses.push(index);
        Ok(EgressKey(index))
    }

    /// Sets the flow control limit (MAX_STREAM_DATA) of a subscriber's stream after the subscriber has raised it.
    pub fn set_max_offset(&self, egress: EgressKey, max: u64) {
        if self.egresses.contains(&egress.0) {
            self.shared.egresses.get(egress.0).max_offset.store(max, Ordering::Relaxed);
        }
    }

    /// Sets whether the program serves every subscriber of the stream. If so, a packet is deferred (does not wake
    /// userspace) when all of its copies were sent and it has no other content. At most 31 packets in a row are
    /// deferred.
    pub fn set_exclusive(&mut self, exclusive: bool) {
        if exclusive != self.exclusive {
            self.exclusive = exclusive;
            let entries = self.egresses.iter().map(|egress| self.shared.egresses.get(*egress));
            entries.for_each(|entry| entry.exclusive.store(u32::from(exclusive), Ordering::Relaxed));
        }
    }

    /// Reports that userspace has parsed the stream up to this position. If the program has parsed less of the stream,
    /// it continues from this position. While bytes of the stream are missing, the program forwards no later bytes,
    /// unless userspace has parsed beyond the missing ones. Makes no system call.
    pub fn advance(&mut self, position: &Position) {
        self.position = *position;
        if let Some(ingress) = &self.ingress {
            ingress.advance(position);
        }
    }

    /// Makes the program continue at `position`, and forget everything it has recorded of the stream.
    pub fn set_position(&mut self, position: &Position) {
        self.position = *position;
        if let Some(ingress) = &self.ingress {
            ingress.set(position);
        }
    }

    /// Reports whether the program may have forwarded bytes of the stream that differ from the version that userspace
    /// keeps. If so, it has stopped forwarding, and userspace should reset the stream to all subscribers.
    pub fn is_contradicted(&self) -> bool {
        self.ingress.as_ref().is_some_and(IngressRecord::is_contradicted)
    }

    /// Returns the stream offset up to which the program or userspace has parsed.
    pub fn judged(&self) -> u64 {
        self.ingress.as_ref().map_or(self.position.offset, IngressRecord::next)
    }

    /// Removes a subscriber's copy (egress): userspace sends the stream to this subscriber from now on.
    pub fn remove(&mut self, egress: EgressKey) {
        let Some(at) = self.egresses.iter().position(|index| *index == egress.0) else { return };
        let next = self.egresses.get(at + 1).copied();
        // Program runs that have reached the removed entry still find its `next`: the entry is not reused before they
        // end.
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

    /// Reports whether the stream or track has no subscribers' copies (egresses), so that the program forwards nothing
    /// of it.
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

    /// Removes the stream's entry from the map `slots`, by which the program finds streams. Fails only if the entry is
    /// not in the map.
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
        // A program run may be assigning this entry to a new stream at this moment. The entry is then removed from the
        // map under that stream's ID.
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
