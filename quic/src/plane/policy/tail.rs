//! Plain tail drop: what came last goes first.

use std::{cmp::Reverse, time::Instant};

use super::{Drop, End, Limits, Policy, Queue, Reason, Standing, Waiting};

/// Drops the youngest of the least urgent streams when there is too much, and nothing for being late.
pub struct Tail;

impl Policy for Tail {
    fn review(&mut self, _: Instant, queue: &Queue, limits: &Limits) -> Vec<Drop> {
        let counted = queue.streams.iter().filter(|stream| stream.standing != Standing::Asked);
        let mut bytes = queue.datagram_bytes + counted.clone().map(|stream| stream.bytes).sum::<u64>();
        let youngest = youngest_first(counted.copied().collect());
        let gone = youngest.into_iter().take_while(|stream| {
            let is_over = bytes > limits.bytes;
            bytes = bytes.saturating_sub(stream.bytes);
            is_over
        });
        gone.map(|stream| Drop { key: stream.key, reason: Reason::Bytes }).collect()
    }

    fn overflow(&self, queue: &Queue, limits: &Limits) -> Vec<Drop> {
        let excess = queue.streams.len().saturating_sub(limits.streams);
        let gone = youngest_first(queue.streams.clone()).into_iter().take(excess);
        gone.map(|stream| Drop { key: stream.key, reason: Reason::Streams }).collect()
    }

    fn datagrams(&self) -> End {
        End::Newest
    }
}

fn youngest_first(mut streams: Vec<Waiting>) -> Vec<Waiting> {
    streams.sort_unstable_by_key(|stream| Reverse((stream.level, stream.key)));
    streams
}
