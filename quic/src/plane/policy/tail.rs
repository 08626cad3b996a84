//! Plain tail drop: the newest stream is dropped first.

use std::{cmp::Reverse, time::Instant};

use super::{
    Drop, DropReason, DroppedEnd, QueueLimits, QueuePolicy, StreamImportance, WaitingQueue, WaitingStream,
};

/// A policy that drops the newest of the least urgent streams if there is too much data. Late data is not dropped.
pub struct Tail;

impl QueuePolicy for Tail {
    fn review(&mut self, _: Instant, queue: &WaitingQueue, limits: &QueueLimits) -> Vec<Drop> {
        let counted = queue.streams.iter().filter(|stream| stream.standing != StreamImportance::Asked);
        let mut bytes = queue.datagram_bytes + counted.clone().map(|stream| stream.bytes).sum::<u64>();
        let youngest = youngest_first(counted.copied().collect());
        let gone = youngest.into_iter().take_while(|stream| {
            let is_over = bytes > limits.bytes;
            bytes = bytes.saturating_sub(stream.bytes);
            is_over
        });
        gone.map(|stream| Drop { key: stream.key, reason: DropReason::Bytes }).collect()
    }

    fn overflow(&self, queue: &WaitingQueue, limits: &QueueLimits) -> Vec<Drop> {
        let excess = queue.streams.len().saturating_sub(limits.streams);
        let gone = youngest_first(queue.streams.clone()).into_iter().take(excess);
        gone.map(|stream| Drop { key: stream.key, reason: DropReason::Streams }).collect()
    }

    fn datagrams(&self) -> DroppedEnd {
        DroppedEnd::Newest
    }
}

fn youngest_first(mut streams: Vec<WaitingStream>) -> Vec<WaitingStream> {
    streams.sort_unstable_by_key(|stream| Reverse((stream.level, stream.key)));
    streams
}
