//! Streams that the kernel offload opens. The IDs of these streams and of the data plane's come from one counter, which
//! the offload owns while it may open streams: see [`Downstream::next_stream`].
//!
//! The data plane gets the source of a stream that the offload has opened only later, when it *adopts* the stream.
//! Until it adopts the stream, the data plane sends and retransmits nothing on it, and only notes the offload's packets
//! and the peer's feedback.

use std::{sync::Arc, time::Instant};

use super::{Cause, Downstream, DownstreamEvent, EventKind, Label, NewStream, Priority, StreamKey};
use crate::plane::{
    source::{Source, SourceEnd, SourceExtent},
    stream::{AskedRange, PlaneStream},
};

/// Placeholder for the bytes of a stream that the kernel offload has opened, until the data plane gets the stream's
/// real source.
struct NoSource;

impl Source for NoSource {
    fn extent(&self) -> SourceExtent {
        SourceExtent { len: 0, end: SourceEnd::Open }
    }

    fn read(&self, _offset: u64, _buf: &mut [u8]) -> usize {
        0
    }

    fn received_at(&self, _offset: u64) -> Option<Instant> {
        None
    }
}

impl Downstream {
    /// Returns the index of the next stream to be opened (its ID without the two low bits).
    pub fn next_stream(&self) -> u64 {
        self.next_stream
    }

    /// Returns the number of unidirectional streams that may ever be opened on the connection.
    pub fn max_streams(&self) -> u64 {
        self.peer.max_streams_uni
    }

    /// Returns whether a stream with this ID is open.
    pub fn knows(&self, id: u64) -> bool {
        self.by_id.contains_key(&id)
    }

    /// Returns the two low bits of the data plane's stream IDs, which are the same in all its stream IDs.
    pub fn stream_bits(&self) -> u64 {
        self.stream_id(0)
    }

    /// Returns the peer's initial flow control limit of each stream, bytes.
    pub fn initial_stream_credit(&self) -> u64 {
        self.peer.max_stream_data_uni
    }

    /// Notes that all streams with an index below `next` have been opened, some of them by the kernel offload. This
    /// must be called before the data plane opens a stream.
    pub fn on_streams_opened(&mut self, next: u64) {
        self.next_stream = self.next_stream.max(next);
    }

    /// Notes that the kernel offload has opened a stream and may send on it. If `id` is `None`, the offload is about to
    /// open the stream.
    pub fn opened(&mut self, owner: u64, label: Label, id: Option<u64>) -> StreamKey {
        let stream = NewStream {
            source: Arc::new(NoSource),
            priority: Priority::default(),
            owner,
            object_timeout: None,
            subgroup_timeout: None,
            max_delay: None,
            asked: AskedRange::All,
            label,
        };
        self.owners.entry(owner).or_default().open(&stream);
        let mut stream = PlaneStream::new(stream, self.peer.max_stream_data_uni);
        stream.delegated = true;
        let key = self.streams.insert(stream);
        if let Some(id) = id {
            self.on_opened(key, id);
        }
        key
    }

    /// Notes the ID of a stream that the kernel offload has opened. Returns whether the ID was not known before.
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
        self.events.push_back(DownstreamEvent { key, owner, kind: EventKind::Opened });
        self.place(key);
        true
    }

    /// Sets the source and the properties of a stream that the kernel offload has opened. Returns false if the stream
    /// has ended, because the peer has already acknowledged all of it.
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

    /// Resets a stream that the kernel offload has opened, because its data never arrived at the data plane.
    pub fn abandon(&mut self, key: StreamKey) {
        self.begin_reset(key, self.config.reset_codes.gone, Cause::Requested);
    }

    /// Recalls the stream from the kernel offload, because the offload uses another priority than the data plane.
    pub fn take_back(&mut self, key: StreamKey) {
        self.recall(key);
    }
}
