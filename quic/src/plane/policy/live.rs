//! The policy for live media, where data that arrives late is useless.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    time::{Duration, Instant},
};

use super::{
    Drop, DropReason, DroppedEnd, QueueLimits, QueuePolicy, StreamImportance, WaitingQueue, WaitingStream,
};
use crate::plane::types::{PriorityLevel, StreamKey};

/// A policy that bounds how long streams wait, how many bytes wait, and how many streams wait.
///
/// * **Late**: once a stream has waited for longer than its limit, streams of the same owner and priority level are
///   dropped: those that have waited for more than half of their limit. With this hysteresis drops are rare, and the
///   next stream is well in time.
/// * **Hopeless**: if the owner has a newer group, a stream is dropped as soon as its rest would be late. The time of
///   arrival is estimated from the bandwidth and from the data that is sent first. The saved bandwidth is used for the
///   newer group and its key frame.
/// * **Bytes**: above the hard limit of bytes at once, and above the soft limit after a while, streams are dropped.
///   Three quarters of that limit are left. The least urgent priority level loses streams first. But it keeps a number
///   of bytes that is reserved for each level. Within a level, the owner with the most waiting bytes loses its oldest
///   stream.
/// * **Streams**: above the limit of streams, streams are dropped by the same order until seven eighths of the limit
///   are left.
///
/// The most urgent subgroup of an owner's newest group is dropped only if the number of streams exceeds its limit
/// without other streams to drop.
#[derive(Default)]
pub struct LivePolicy {
    /// The time since which more bytes wait to be sent than the soft limit allows.
    over_since: Option<Instant>,
}

/// This fraction (1/`RESERVE`) of the bytes that stay queued after a drop is reserved for the priority levels in equal
/// parts.
const RESERVE: u64 = 2;

impl QueuePolicy for LivePolicy {
    fn review(&mut self, now: Instant, queue: &WaitingQueue, limits: &QueueLimits) -> Vec<Drop> {
        let late = late_streams(now, &queue.streams);
        let mut gone: HashSet<_> = late.iter().map(|stream| stream.key).collect();
        let hopeless = hopeless(now, queue, &gone);
        gone.extend(hopeless.iter().map(|stream| stream.key));
        let counted = |stream: &&WaitingStream| {
            stream.standing != StreamImportance::Asked && !gone.contains(&stream.key)
        };
        let left: Vec<_> = queue.streams.iter().filter(counted).copied().collect();
        let bytes = queue.datagram_bytes + left.iter().map(|stream| stream.bytes).sum::<u64>();
        let mut drops = named(late, DropReason::Late);
        drops.extend(named(hopeless, DropReason::Hopeless));
        if let Some(target) = self.target(now, bytes, limits) {
            let mut shares = QueueShares::new(&left, |stream| stream.bytes, target);
            drops.extend(named(shares.take(bytes, target, StreamImportance::Ordinary), DropReason::Bytes));
        }
        drops
    }

    fn overflow(&self, queue: &WaitingQueue, limits: &QueueLimits) -> Vec<Drop> {
        if queue.streams.len() <= limits.streams {
            return Vec::new();
        }
        let target = (limits.streams - limits.streams / 8) as u64;
        let mut count = queue.streams.len() as u64;
        let mut shares = QueueShares::new(&queue.streams, |_| 1, target);
        let mut drops = Vec::new();
        // Streams that have requested old data or belong to newest groups may exceed the limit on their own. Then some
        // of them are dropped as well, but no more than necessary.
        let most = limits.streams as u64;
        for (standing, target) in [
            (StreamImportance::Ordinary, target),
            (StreamImportance::Newest, most),
            (StreamImportance::Asked, most),
        ] {
            let taken = shares.take(count, target, standing);
            count -= taken.len() as u64;
            drops.extend(named(taken, DropReason::Streams));
        }
        drops
    }

    fn datagrams(&self) -> DroppedEnd {
        DroppedEnd::Oldest
    }

    fn rest(&mut self) {
        self.over_since = None;
    }
}

impl LivePolicy {
    /// Returns the number of bytes to which the waiting data has to be reduced, or `None` if no limit is exceeded.
    fn target(&mut self, now: Instant, bytes: u64, limits: &QueueLimits) -> Option<u64> {
        let soft = limits.bytes / 2;
        if bytes <= soft {
            self.over_since = None;
            return None;
        }
        let since = *self.over_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= limits.burst {
            self.over_since = None;
            // The waiting data is reduced to three quarters of the limit, so that the next drop is not needed at once.
            return Some(soft - soft / 4);
        }
        (bytes > limits.bytes).then_some(limits.bytes - limits.bytes / 4)
    }
}

/// Returns the streams to drop because a stream of the same owner and priority level is late. The least urgent streams
/// come first in the result, and within a level the oldest.
fn late_streams(now: Instant, streams: &[WaitingStream]) -> Vec<WaitingStream> {
    let over = |stream: &WaitingStream, limit: fn(Duration) -> Duration| {
        let waited = stream.since.map(|since| now.saturating_duration_since(since));
        let ordinary = stream.standing == StreamImportance::Ordinary;
        ordinary && waited.zip(stream.max_delay).is_some_and(|(waited, most)| waited > limit(most))
    };
    let late: HashSet<_> = streams
        .iter()
        .filter(|stream| over(stream, |most| most))
        .map(|stream| (stream.owner, stream.level))
        .collect();
    if late.is_empty() {
        return Vec::new();
    }
    let goes = |stream: &&WaitingStream| {
        late.contains(&(stream.owner, stream.level)) && over(stream, |most| most / 2)
    };
    let mut gone: Vec<_> = streams.iter().filter(goes).copied().collect();
    gone.sort_unstable_by_key(|stream| (Reverse(stream.level), stream.since, stream.key));
    gone
}

/// Returns the streams that cannot be delivered in time, among those of older groups than the newest of their
/// subscription.
fn hopeless(now: Instant, queue: &WaitingQueue, gone: &HashSet<StreamKey>) -> Vec<WaitingStream> {
    let may_go = |stream: &WaitingStream| {
        stream.superseded.is_some()
            && stream.max_delay.is_some()
            && stream.standing == StreamImportance::Ordinary
    };
    if queue.rate == 0 || !queue.streams.iter().any(may_go) {
        return Vec::new();
    }
    let mut levels = BTreeMap::<PriorityLevel, LevelQueue>::new();
    for stream in queue.streams.iter().filter(|stream| !gone.contains(&stream.key)) {
        let line = levels.entry(stream.level).or_default();
        line.bytes += stream.bytes;
        let owner = line.owners.entry(stream.owner).or_default();
        owner.bytes += stream.bytes;
        owner.streams.push(*stream);
    }
    let mut before = 0;
    let mut hopeless = Vec::new();
    for line in levels.into_values() {
        let bytes = line.bytes;
        for mut owner in line.owners.into_values() {
            owner.streams.sort_unstable_by_key(|stream| (stream.order, stream.key));
            // Streams are checked in sending order, up to the first one that would arrive in time. Subscriptions of one
            // priority level send in turn. So until this stream is complete, the other subscriptions of the level
            // together are assumed to send at most as many bytes as this stream.
            let others = bytes - owner.bytes;
            let is_hopeless = |stream: &&WaitingStream| {
                let ahead = before + stream.bytes + others.min(stream.bytes);
                let through = Duration::from_secs_f64(ahead as f64 / queue.rate as f64);
                let by =
                    stream.superseded.zip(stream.max_delay).and_then(|(last, most)| last.checked_add(most));
                may_go(stream) && by.is_some_and(|by| now + through > by)
            };
            hopeless.extend(owner.streams.iter().take_while(is_hopeless).copied());
        }
        before += bytes;
    }
    hopeless
}

/// Waiting data of one priority level, and of each owner (subscription) in this level.
#[derive(Default)]
struct LevelQueue {
    bytes: u64,
    owners: HashMap<u64, OwnerShare>,
}

#[derive(Default)]
struct OwnerShare {
    bytes: u64,
    streams: Vec<WaitingStream>,
}

fn named(streams: Vec<WaitingStream>, reason: DropReason) -> Vec<Drop> {
    streams.into_iter().map(|stream| Drop { key: stream.key, reason }).collect()
}

/// How much of the waiting data (bytes or streams) belongs to each priority level, and to each owner in a level.
struct QueueShares {
    levels: BTreeMap<PriorityLevel, LevelShare>,
    weight: fn(&WaitingStream) -> u64,
    /// Number of waiting bytes or streams that is reserved for each priority level. A level loses streams below this
    /// number only if no other level exceeds it.
    reserve: u64,
}

#[derive(Default)]
struct LevelShare {
    weight: u64,
    owners: HashMap<u64, Holding>,
}

#[derive(Default)]
struct Holding {
    weight: u64,
    /// The owner's streams by importance. The last element of each list is dropped first.
    streams: BTreeMap<StreamImportance, Vec<WaitingStream>>,
}

impl QueueShares {
    fn new(streams: &[WaitingStream], weight: fn(&WaitingStream) -> u64, target: u64) -> Self {
        let mut levels = BTreeMap::<PriorityLevel, LevelShare>::new();
        for stream in streams {
            let share = levels.entry(stream.level).or_default();
            let holding = share.owners.entry(stream.owner).or_default();
            share.weight += weight(stream);
            holding.weight += weight(stream);
            holding.streams.entry(stream.standing).or_default().push(*stream);
        }
        for streams in levels.values_mut().flat_map(|share| share.owners.values_mut()) {
            for streams in streams.streams.values_mut() {
                // Streams are dropped from the end of the list: the oldest first, and among equally old ones the
                // largest subgroup first.
                streams.sort_unstable_by_key(|stream| {
                    Reverse((stream.since, Reverse(stream.subgroup), stream.key))
                });
            }
        }
        let reserve = target / RESERVE / levels.len().max(1) as u64;
        Self { levels, weight, reserve }
    }

    /// Drops streams of one importance until `total` is at most `target`. Levels above their reserve lose streams
    /// first.
    fn take(&mut self, mut total: u64, target: u64, standing: StreamImportance) -> Vec<WaitingStream> {
        let mut taken = Vec::new();
        // The first pass leaves each priority level its reserve. If still too much is left, the second pass drops from
        // the reserves.
        for keep in [self.reserve, 0] {
            for share in self.levels.values_mut().rev() {
                share.take(&mut total, target, keep, self.weight, standing, &mut taken);
            }
        }
        taken
    }
}

impl LevelShare {
    fn take(
        &mut self,
        total: &mut u64,
        target: u64,
        keep: u64,
        weight: fn(&WaitingStream) -> u64,
        standing: StreamImportance,
        taken: &mut Vec<WaitingStream>,
    ) {
        let has = |holding: &Holding| holding.streams.get(&standing).is_some_and(|these| !these.is_empty());
        let owners = self.owners.iter().filter(|(_, holding)| has(holding));
        let mut largest: BTreeSet<_> = owners.map(|(owner, holding)| (holding.weight, *owner)).collect();
        while *total > target
            && self.weight > keep
            && let Some((_, owner)) = largest.pop_last()
        {
            let Some(holding) = self.owners.get_mut(&owner) else { continue };
            let Some(stream) = holding.streams.get_mut(&standing).and_then(Vec::pop) else { continue };
            let weight = weight(&stream);
            *total = total.saturating_sub(weight);
            self.weight -= weight;
            holding.weight -= weight;
            taken.push(stream);
            if has(holding) {
                largest.insert((holding.weight, owner));
            }
        }
    }
}
