//! Storage for the live streams of one connection.

use super::{stream::Stream, types::StreamKey};

/// Bits of a key that say where the stream is stored. The bits above them count the streams ever opened, so keys are
/// never reused and compare by age.
const INDEX_BITS: u32 = 24;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;

#[derive(Default)]
pub struct Slots {
    slots: Vec<Option<(StreamKey, Stream)>>,
    free: Vec<u32>,
    opened: u64,
}

impl Slots {
    pub fn insert(&mut self, stream: Stream) -> StreamKey {
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

    pub fn get(&self, key: StreamKey) -> Option<&Stream> {
        let (owner, stream) = self.slots.get(index(key))?.as_ref()?;
        (*owner == key).then_some(stream)
    }

    pub fn get_mut(&mut self, key: StreamKey) -> Option<&mut Stream> {
        let (owner, stream) = self.slots.get_mut(index(key))?.as_mut()?;
        (*owner == key).then_some(stream)
    }

    pub fn remove(&mut self, key: StreamKey) -> Option<Stream> {
        self.get(key)?;
        let (_, stream) = self.slots.get_mut(index(key))?.take()?;
        self.free.push(index(key) as u32);
        Some(stream)
    }

    pub fn iter(&self) -> impl Iterator<Item = (StreamKey, &Stream)> {
        self.slots.iter().flatten().map(|(key, stream)| (*key, stream))
    }

    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }
}

fn index(key: StreamKey) -> usize {
    (key.0 & INDEX_MASK) as usize
}
