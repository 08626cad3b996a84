//! For live media: a late picture is no picture.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    time::{Duration, Instant},
};

use super::{Drop, End, Limits, Policy, Queue, Reason, Standing, Waiting};
use crate::plane::types::{Level, StreamKey};

/// Bounds how long streams wait, and how much does.
///
/// * **Late**: once a stream has waited for longer than it may, all of its owner and level go that have waited for more
///   than half of what they may (hysteresis: drops come seldom, and what is sent next is well in time).
/// * **Hopeless**: a stream whose owner has a newer group by now goes at once if the rest of it, after what is sent before it,
///   would come too late at the rate that the path is thought to carry. What would be sent of it until it is late is room that
///   the newer group, with its key frame, has in time.
/// * **Bytes**: above the hard limit at once, and above the soft limit for longer than a burst, streams go until three
///   quarters of that limit are left. The least urgent level goes first, but keeps its share of a reserve; in it the
///   owner that has most waiting, and of that the oldest.
/// * **Streams**: the same by number instead of bytes, down to seven eighths.
///
/// The newest group of an owner keeps its most urgent subgroup, except where there are more streams than may be.
#[derive(Default)]
pub struct Live {
    /// Since when the soft limit has been exceeded.
    over_since: Option<Instant>,
}

/// One in so many of what may be left is kept for the levels, in equal parts.
const RESERVE: u64 = 2;

impl Policy for Live {
    fn review(&mut self, now: Instant, queue: &Queue, limits: &Limits) -> Vec<Drop> {
        let late = late(now, &queue.streams);
        let mut gone: HashSet<_> = late.iter().map(|stream| stream.key).collect();
        let hopeless = hopeless(now, queue, &gone);
        gone.extend(hopeless.iter().map(|stream| stream.key));
        let counted = |stream: &&Waiting| stream.standing != Standing::Asked && !gone.contains(&stream.key);
        let left: Vec<_> = queue.streams.iter().filter(counted).copied().collect();
        let bytes = queue.datagram_bytes + left.iter().map(|stream| stream.bytes).sum::<u64>();
        let mut drops = named(late, Reason::Late);
        drops.extend(named(hopeless, Reason::Hopeless));
        if let Some(target) = self.target(now, bytes, limits) {
            let mut shares = Shares::new(&left, |stream| stream.bytes, target);
            drops.extend(named(shares.take(bytes, target, Standing::Ordinary), Reason::Bytes));
        }
        drops
    }

    fn overflow(&self, queue: &Queue, limits: &Limits) -> Vec<Drop> {
        if queue.streams.len() <= limits.streams {
            return Vec::new();
        }
        let target = (limits.streams - limits.streams / 8) as u64;
        let mut count = queue.streams.len() as u64;
        let mut shares = Shares::new(&queue.streams, |_| 1, target);
        let mut drops = Vec::new();
        // More of the newest groups, or of what was asked for, than may be has to go as well, but no more than that.
        let most = limits.streams as u64;
        for (standing, target) in
            [(Standing::Ordinary, target), (Standing::Newest, most), (Standing::Asked, most)]
        {
            let taken = shares.take(count, target, standing);
            count -= taken.len() as u64;
            drops.extend(named(taken, Reason::Streams));
        }
        drops
    }

    fn datagrams(&self) -> End {
        End::Oldest
    }

    fn rest(&mut self) {
        self.over_since = None;
    }
}

impl Live {
    /// Down to how many bytes the queue has to go, if it has to.
    fn target(&mut self, now: Instant, bytes: u64, limits: &Limits) -> Option<u64> {
        let soft = limits.bytes / 2;
        if bytes <= soft {
            self.over_since = None;
            return None;
        }
        let since = *self.over_since.get_or_insert(now);
        if now.saturating_duration_since(since) >= limits.burst {
            self.over_since = None;
            return Some(soft - soft / 4);
        }
        (bytes > limits.bytes).then_some(limits.bytes - limits.bytes / 4)
    }
}

/// The streams that go since one of their owner and level is late; the least urgent first, and of those the oldest.
fn late(now: Instant, streams: &[Waiting]) -> Vec<Waiting> {
    let over = |stream: &Waiting, limit: fn(Duration) -> Duration| {
        let waited = stream.since.map(|since| now.saturating_duration_since(since));
        let ordinary = stream.standing == Standing::Ordinary;
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
    let goes =
        |stream: &&Waiting| late.contains(&(stream.owner, stream.level)) && over(stream, |most| most / 2);
    let mut gone: Vec<_> = streams.iter().filter(goes).copied().collect();
    gone.sort_unstable_by_key(|stream| (Reverse(stream.level), stream.since, stream.key));
    gone
}

/// Streams of groups that are not their owner's newest any more, and cannot be through in time.
fn hopeless(now: Instant, queue: &Queue, gone: &HashSet<StreamKey>) -> Vec<Waiting> {
    let may_go = |stream: &Waiting| {
        stream.superseded.is_some() && stream.max_delay.is_some() && stream.standing == Standing::Ordinary
    };
    if queue.rate == 0 || !queue.streams.iter().any(may_go) {
        return Vec::new();
    }
    let mut levels = BTreeMap::<Level, Line>::new();
    for stream in queue.streams.iter().filter(|stream| !gone.contains(&stream.key)) {
        let line = levels.entry(stream.level).or_default();
        line.bytes += stream.bytes;
        let owner = line.owners.entry(stream.owner).or_default();
        owner.bytes += stream.bytes;
        owner.streams.push(*stream);
    }
    let (mut before, mut hopeless) = (0, Vec::new());
    for line in levels.into_values() {
        let bytes = line.bytes;
        for mut owner in line.owners.into_values() {
            owner.streams.sort_unstable_by_key(|stream| (stream.order, stream.key));
            // Only what is sent next keeps the newer group waiting. Owners of one level take turns.
            let others = bytes - owner.bytes;
            let is_hopeless = |stream: &&Waiting| {
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

/// What waits of a level, and in it of each owner.
#[derive(Default)]
struct Line {
    bytes: u64,
    owners: HashMap<u64, Own>,
}

#[derive(Default)]
struct Own {
    bytes: u64,
    streams: Vec<Waiting>,
}

fn named(streams: Vec<Waiting>, reason: Reason) -> Vec<Drop> {
    streams.into_iter().map(|stream| Drop { key: stream.key, reason }).collect()
}

/// What the levels, and in them the owners, have of a queue.
struct Shares {
    levels: BTreeMap<Level, Share>,
    weight: fn(&Waiting) -> u64,
    /// That each level may keep whatever comes.
    reserve: u64,
}

#[derive(Default)]
struct Share {
    weight: u64,
    owners: HashMap<u64, Holding>,
}

#[derive(Default)]
struct Holding {
    weight: u64,
    /// By standing: the one that goes first is the last.
    streams: BTreeMap<Standing, Vec<Waiting>>,
}

impl Shares {
    fn new(streams: &[Waiting], weight: fn(&Waiting) -> u64, target: u64) -> Self {
        let mut levels = BTreeMap::<Level, Share>::new();
        for stream in streams {
            let share = levels.entry(stream.level).or_default();
            let holding = share.owners.entry(stream.owner).or_default();
            share.weight += weight(stream);
            holding.weight += weight(stream);
            holding.streams.entry(stream.standing).or_default().push(*stream);
        }
        for streams in levels.values_mut().flat_map(|share| share.owners.values_mut()) {
            for streams in streams.streams.values_mut() {
                streams.sort_unstable_by_key(|stream| {
                    Reverse((stream.since, Reverse(stream.subgroup), stream.key))
                });
            }
        }
        let reserve = target / RESERVE / levels.len().max(1) as u64;
        Self { levels, weight, reserve }
    }

    /// Takes streams of one standing until `total` is at most `target`: first those beyond their level's reserve.
    fn take(&mut self, mut total: u64, target: u64, standing: Standing) -> Vec<Waiting> {
        let mut taken = Vec::new();
        for keep in [self.reserve, 0] {
            for share in self.levels.values_mut().rev() {
                share.take(&mut total, (target, keep), self.weight, standing, &mut taken);
            }
        }
        taken
    }
}

impl Share {
    fn take(
        &mut self,
        total: &mut u64,
        (target, keep): (u64, u64),
        weight: fn(&Waiting) -> u64,
        standing: Standing,
        taken: &mut Vec<Waiting>,
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
