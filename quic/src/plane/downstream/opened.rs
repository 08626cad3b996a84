//! Streams that the offload opens. Their IDs and the plane's come from one count, which the offload has while it may open
//! streams: see [`Downstream::next_stream`].
//!
//! What such a stream carries is known here only later. Until it is *adopted* nothing is sent or repaired on it from here:
//! all that is noted is what the offload sent, and what the peer says of it.

use std::{sync::Arc, time::Instant};

use super::{Cause, Downstream, Event, EventKind, Label, NewStream, Priority, StreamKey};
use crate::plane::{
    source::{End, Extent, Source},
    stream::{Asked, Stream},
};

/// What a stream has before it is known what it carries.
struct Nothing;

impl Source for Nothing {
    fn extent(&self) -> Extent {
        Extent { len: 0, end: End::Open }
    }

    fn read(&self, _offset: u64, _buf: &mut [u8]) -> usize {
        0
    }

    fn received_at(&self, _offset: u64) -> Option<Instant> {
        None
    }
}

impl Downstream {
    /// Index of the next stream to be opened (its ID without the two low bits).
    pub fn next_stream(&self) -> u64 {
        self.next_stream
    }

    /// Unidirectional streams that may ever be opened on the connection.
    pub fn max_streams(&self) -> u64 {
        self.peer.max_streams_uni
    }

    /// Whether a stream with this ID is open.
    pub fn knows(&self, id: u64) -> bool {
        self.by_id.contains_key(&id)
    }

    /// Low bits of the IDs of the streams.
    pub fn stream_bits(&self) -> u64 {
        self.stream_id(0)
    }

    /// The peer's initial limit of each stream, bytes.
    pub fn initial_stream_credit(&self) -> u64 {
        self.peer.max_stream_data_uni
    }

    /// All streams before this index are open, some of them by the offload. To be called before the plane may open any.
    pub fn on_streams_opened(&mut self, next: u64) {
        self.next_stream = self.next_stream.max(next);
    }

    /// The offload has opened a stream, and may send on it; without an ID, it is about to.
    pub fn opened(&mut self, owner: u64, label: Label, id: Option<u64>) -> StreamKey {
        let stream = NewStream {
            source: Arc::new(Nothing),
            priority: Priority::default(),
            owner,
            object_timeout: None,
            subgroup_timeout: None,
            max_delay: None,
            asked: Asked::All,
            label,
        };
        self.owners.entry(owner).or_default().open(&stream);
        let mut stream = Stream::new(stream, self.peer.max_stream_data_uni);
        stream.delegated = true;
        let key = self.streams.insert(stream);
        if let Some(id) = id {
            self.on_opened(key, id);
        }
        key
    }

    /// The offload has opened the stream with this ID; returns whether that is news.
    pub fn on_opened(&mut self, key: StreamKey, id: u64) -> bool {
        let Some(stream) = self.streams.get_mut(key).filter(|stream| stream.id.is_none()) else {
            return false;
        };
        stream.id = Some(id);
        let owner = stream.owner;
        self.next_stream = self.next_stream.max((id >> 2) + 1);
        self.by_id.insert(id, key);
        if let Some(owner) = self.owners.get_mut(&owner) {
            owner.owned.opened += 1;
        }
        self.stats.streams_opened += 1;
        self.events.push_back(Event { key, owner, kind: EventKind::Opened });
        self.place(key);
        true
    }

    /// What a stream carries that the offload has opened. Returns whether the stream is still there: all may have been
    /// acknowledged by now, or it was reset.
    pub fn adopt(&mut self, key: StreamKey, stream: NewStream) -> bool {
        let Some(opened) = self.streams.get_mut(key) else { return false };
        if opened.is_reset() {
            return true;
        }
        if let Some(owner) = self.owners.get_mut(&stream.owner) {
            self.superseded |= owner.note(&stream);
        }
        opened.adopt(stream);
        self.wake(key);
        true
    }

    /// What the offload has opened the stream for does not come.
    pub fn abandon(&mut self, key: StreamKey) {
        self.begin_reset(key, self.config.reset_codes.gone, Cause::Requested);
    }

    /// Has the stream back from the offload, which goes by another priority than the plane.
    pub fn take_back(&mut self, key: StreamKey) {
        self.recall(key);
    }
}
