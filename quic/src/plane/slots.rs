//! Storage of the streams of one connection until they end.

use super::{stream::PlaneStream, types::StreamKey};

/// Number of bits of a key that hold the stream's index in the vector of streams. The higher bits count the streams
/// ever opened, so keys are never reused, and older streams have smaller keys.
const INDEX_BITS: u32 = 24;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;

/// The streams of a connection that have not ended, by key.
#[derive(Default)]
pub struct StreamSlots {
    slots: Vec<Option<(StreamKey, PlaneStream)>>,
    /// Indices of free elements of the vector of streams.
    free: Vec<u32>,
    opened: u64,
}

impl StreamSlots {
    /// Stores a stream under a new key.
    pub fn insert(&mut self, stream: PlaneStream) -> StreamKey {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            (self.slots.len() - 1) as u32
        });
        let key = StreamKey(self.opened << INDEX_BITS | u64::from(index));
        self.opened += 1;
        if let Some(slot) = self.slots.get_mut(index as usize) {
            *slot = Some((key, stream));
        }
        key
    }

    /// Returns a stream.
    pub fn get(&self, key: StreamKey) -> Option<&PlaneStream> {
        let (owner, stream) = self.slots.get(index(key))?.as_ref()?;
        (*owner == key).then_some(stream)
    }

    /// Returns a mutable reference to a stream.
    pub fn get_mut(&mut self, key: StreamKey) -> Option<&mut PlaneStream> {
        let (owner, stream) = self.slots.get_mut(index(key))?.as_mut()?;
        (*owner == key).then_some(stream)
    }

    /// Removes a stream.
    pub fn remove(&mut self, key: StreamKey) -> Option<PlaneStream> {
        self.get(key)?;
        let (_, stream) = self.slots.get_mut(index(key))?.take()?;
        self.free.push(index(key) as u32);
        Some(stream)
    }

    /// Returns all streams with their keys.
    pub fn iter(&self) -> impl Iterator<Item = (StreamKey, &PlaneStream)> {
        self.slots.iter().flatten().map(|(key, stream)| (*key, stream))
    }

    /// Returns the number of streams.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

fn index(key: StreamKey) -> usize {
    (key.0 & INDEX_MASK) as usize
}
