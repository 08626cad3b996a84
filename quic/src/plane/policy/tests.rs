//! Tests of the live policy and the tail policy over random queues.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

const LIMITS: QueueLimits = QueueLimits { streams: 40, bytes: 40_000, burst: Duration::from_secs(1) };

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Generates the present time, and a queue of up to 80 streams that have waited for up to a second. The key of a stream
/// is its position in the queue.
fn queues() -> impl Strategy<Value = (Instant, WaitingQueue)> {
    let standing = prop_oneof![
        4 => Just(StreamImportance::Ordinary),
        1 => Just(StreamImportance::Newest),
        1 => Just(StreamImportance::Asked)
    ];
    let stream =
        (1..4_u64, 0..3_u8, 0..3_u64, 1..3000_u64, 0..1000_u64, prop::option::of(50..600_u64), standing);
    (prop::collection::vec(stream, 0..80), 0..30_000_u64).prop_map(|(streams, datagram_bytes)| {
        let now = Instant::now() + Duration::from_secs(10);
        let with_key = |(key, stream)| {
            let (owner, publisher, subgroup, bytes, waited, max_delay, standing): (
                _,
                u8,
                _,
                _,
                _,
                Option<u64>,
                _,
            ) = stream;
            WaitingStream {
                key: StreamKey(key),
                owner,
                level: (128, publisher),
                order: (key, subgroup),
                subgroup,
                bytes,
                since: Some(now - ms(waited)),
                superseded: None,
                max_delay: max_delay.map(ms),
                standing,
            }
        };
        (now, WaitingQueue { streams: (0..).zip(streams).map(with_key).collect(), datagram_bytes, rate: 0 })
    })
}

fn find(queue: &WaitingQueue, key: StreamKey) -> WaitingStream {
    *queue.streams.iter().find(|stream| stream.key == key).expect("one of the queue")
}

fn left(queue: &WaitingQueue, drops: &[Drop]) -> WaitingQueue {
    let mut left = queue.clone();
    left.streams.retain(|stream| drops.iter().all(|drop| drop.key != stream.key));
    assert_eq!(
        left.streams.len() + drops.len(),
        queue.streams.len(),
        "each drop names a different stream of the queue"
    );
    left
}

fn counted(queue: &WaitingQueue) -> u64 {
    let streams = queue.streams.iter().filter(|stream| stream.standing != StreamImportance::Asked);
    queue.datagram_bytes + streams.map(|stream| stream.bytes).sum::<u64>()
}

fn waited(now: Instant, stream: &WaitingStream) -> Duration {
    now - stream.since.expect("known")
}

proptest! {
    #[test]
    fn live_policy_drops_late_streams_and_keeps_recent_ones((now, queue) in queues()) {
        let limits = QueueLimits { bytes: u64::MAX, ..LIMITS };
        let drops = LivePolicy::default().review(now, &queue, &limits);
        let left = left(&queue, &drops);
        let late = |stream: &WaitingStream| stream.max_delay.is_some_and(|most| waited(now, stream) > most);
        for drop in &drops {
            let stream = find(&queue, drop.key);
            prop_assert_eq!(drop.reason, DropReason::Late);
            prop_assert_eq!(stream.standing, StreamImportance::Ordinary);
            prop_assert!(waited(now, &stream) > stream.max_delay.expect("has one") / 2);
            let same = |other: &&WaitingStream| (other.owner, other.level) == (stream.owner, stream.level);
            prop_assert!(queue.streams.iter().filter(same).any(|other| late(other) && other.standing == StreamImportance::Ordinary));
        }
        let levels: Vec<_> = drops.iter().map(|drop| find(&queue, drop.key).level).collect();
        prop_assert!(levels.is_sorted_by(|one, next| one >= next), "the least urgent first");
        prop_assert!(!left.streams.iter().any(|stream| stream.standing == StreamImportance::Ordinary && late(stream)));
        prop_assert_eq!(LivePolicy::default().review(now, &left, &limits), [], "a second review drops nothing");
    }

    #[test]
    fn live_policy_drops_a_subscriptions_oldest_streams_over_the_byte_limit((now, mut queue) in queues()) {
        queue.streams.iter_mut().for_each(|stream| stream.max_delay = None);
        let drops = LivePolicy::default().review(now, &queue, &LIMITS);
        let left = left(&queue, &drops);
        let target = LIMITS.bytes - LIMITS.bytes / 4;
        let ordinary: Vec<_> = left.streams.iter().filter(|s| s.standing == StreamImportance::Ordinary).collect();
        prop_assert!(drops.is_empty() || counted(&queue) > LIMITS.bytes);
        prop_assert!(counted(&left) <= LIMITS.bytes || ordinary.is_empty());
        prop_assert!(drops.is_empty() || counted(&left) <= target || ordinary.is_empty());
        for drop in &drops {
            let gone = find(&queue, drop.key);
            prop_assert_eq!((drop.reason, gone.standing), (DropReason::Bytes, StreamImportance::Ordinary));
            // Of the streams with the same owner and priority level, the oldest was dropped.
            for other in ordinary.iter().filter(|o| (o.owner, o.level) == (gone.owner, gone.level)) {
                prop_assert!(other.since >= gone.since);
            }
        }
        // A priority level loses streams only if no less urgent level has more bytes left than are reserved for it.
        // Levels without droppable streams do not count.
        let mut levels = HashMap::<PriorityLevel, u64>::new();
        for stream in left.streams.iter().filter(|stream| stream.standing != StreamImportance::Asked) {
            *levels.entry(stream.level).or_default() += stream.bytes;
        }
        let count = queue.streams.iter().filter(|s| s.standing != StreamImportance::Asked).map(|s| s.level);
        let count = count.collect::<std::collections::HashSet<_>>().len().max(1) as u64;
        let most = drops.iter().map(|drop| find(&queue, drop.key).level).min();
        for stream in ordinary.iter().filter(|stream| most.is_some_and(|most| stream.level > most)) {
            prop_assert!(levels[&stream.level] <= target / 2 / count, "{stream:?} stays before {most:?}");
        }
    }

    #[test]
    fn waiting_streams_over_the_stream_count_limit_are_dropped((_, queue) in queues()) {
        for policy in [PolicyKind::Live.build(), PolicyKind::Tail.build()] {
            let drops = policy.overflow(&queue, &LIMITS);
            let left = left(&queue, &drops);
            prop_assert!(left.streams.len() <= LIMITS.streams);
            prop_assert!(drops.is_empty() || queue.streams.len() > LIMITS.streams);
            prop_assert!(drops.iter().all(|drop| drop.reason == DropReason::Streams));
        }
    }

    /// Streams of a higher importance are dropped only after all streams of lower importance.
    #[test]
    fn live_policy_drops_the_newest_groups_last((_, queue) in queues()) {
        let drops = LivePolicy::default().overflow(&queue, &LIMITS);
        let left = left(&queue, &drops);
        for drop in &drops {
            let standing = find(&queue, drop.key).standing;
            prop_assert!(left.streams.iter().all(|stream| stream.standing >= standing));
        }
    }

    /// The tail policy drops the newest streams of the least urgent priority level first.
    #[test]
    fn tail_drop_policy_drops_the_newest_streams((now, queue) in queues()) {
        let mut line = queue.streams.clone();
        line.sort_by_key(|stream| (stream.level, stream.key));
        let model = |over: &dyn Fn(&[WaitingStream]) -> bool, mut line: Vec<WaitingStream>| {
            let mut gone = Vec::new();
            while over(&line) && let Some(last) = line.pop() {
                gone.push(last.key);
            }
            gone
        };
        let keys = |drops: Vec<Drop>| drops.into_iter().map(|drop| drop.key).collect::<Vec<_>>();
        let overflow = model(&|line| line.len() > LIMITS.streams, line.clone());
        prop_assert_eq!(keys(Tail.overflow(&queue, &LIMITS)), overflow);
        line.retain(|stream| stream.standing != StreamImportance::Asked);
        let bytes = |line: &[WaitingStream]| queue.datagram_bytes + line.iter().map(|stream| stream.bytes).sum::<u64>();
        let review = model(&|line| bytes(line) > LIMITS.bytes, line);
        prop_assert_eq!(keys(Tail.review(now, &queue, &LIMITS)), review);
    }
}

fn stream(key: u64, owner: u64, publisher: u8, bytes: u64, since: Instant) -> WaitingStream {
    WaitingStream {
        key: StreamKey(key),
        owner,
        level: (128, publisher),
        order: (key, 0),
        subgroup: 0,
        bytes,
        since: Some(since),
        superseded: None,
        max_delay: None,
        standing: StreamImportance::Ordinary,
    }
}

fn keys(drops: &[Drop]) -> Vec<u64> {
    drops.iter().map(|drop| drop.key.0).collect()
}

#[test]
fn bytes_over_the_soft_limit_are_dropped_after_one_second() {
    let now = Instant::now();
    let streams = (0..6).map(|key| stream(key, 1, 1, 5000, now + ms(key))).collect();
    let queue = WaitingQueue { streams, datagram_bytes: 0, rate: 0 };
    let mut live = LivePolicy::default();
    assert_eq!(live.review(now, &queue, &LIMITS), []);
    assert_eq!(live.review(now + ms(999), &queue, &LIMITS), []);
    // Streams are dropped until 15,000 bytes wait, three quarters of the soft limit.
    assert_eq!(keys(&live.review(now + ms(1000), &queue, &LIMITS)), [0, 1, 2]);
    // The time for which more than the soft limit may wait starts again after a drop, and whenever no data waits.
    assert_eq!(live.review(now + ms(1900), &queue, &LIMITS), []);
    live.rest();
    assert_eq!(live.review(now + ms(2900), &queue, &LIMITS), []);
}

#[test]
fn subscription_with_most_waiting_bytes_loses_streams_first() {
    let now = Instant::now();
    let of =
        |owner, count: u64| (0..count).map(move |at| stream(owner * 100 + at, owner, 1, 1000, now + ms(at)));
    let queue = WaitingQueue { streams: of(1, 10).chain(of(2, 40)).collect(), datagram_bytes: 0, rate: 0 };
    let drops = LivePolicy::default().review(now, &queue, &LIMITS);
    assert_eq!(
        keys(&drops),
        (200..220).collect::<Vec<_>>(),
        "30,000 bytes remain, and only the owner with most bytes loses streams"
    );
}

#[test]
fn each_priority_keeps_its_reserved_bytes_over_the_queue_byte_limit() {
    let now = Instant::now();
    let of = |publisher: u8, count: u64| {
        (0..count).map(move |at| stream(u64::from(publisher) * 100 + at, 1, publisher, 1000, now + ms(at)))
    };
    let queue = WaitingQueue { streams: of(1, 40).chain(of(2, 10)).collect(), datagram_bytes: 0, rate: 0 };
    let drops = LivePolicy::default().review(now, &queue, &LIMITS);
    // 30,000 bytes may be left, of which 7500 are reserved for each priority level.
    assert_eq!(keys(&drops), (200..203).chain(100..117).collect::<Vec<_>>());
}

/// The rate is 1000 bytes per second, and data may wait for a second. So 1000 bytes that arrived at `now` are in time,
/// and more are not.
#[test]
fn superseded_group_that_cannot_arrive_in_time_is_dropped() {
    let now = Instant::now() + ms(1000);
    let old = |key, owner, publisher, bytes, came| WaitingStream {
        superseded: Some(now - ms(came)),
        max_delay: Some(ms(1000)),
        ..stream(key, owner, publisher, bytes, now - ms(came))
    };
    let new = |key, owner, bytes| WaitingStream {
        max_delay: Some(ms(1000)),
        standing: StreamImportance::Newest,
        ..stream(key, owner, 1, bytes, now)
    };
    let limits = QueueLimits { bytes: u64::MAX, ..LIMITS };
    let none = [0_u64; 0];
    let gone = |streams: &[WaitingStream], rate| {
        let queue = WaitingQueue { streams: streams.to_vec(), datagram_bytes: 0, rate };
        let drops = LivePolicy::default().review(now, &queue, &limits);
        assert!(drops.iter().all(|drop| drop.reason == DropReason::Hopeless));
        keys(&drops)
    };
    assert_eq!(gone(&[old(1, 1, 1, 900, 0), new(2, 1, 100)], 1000), none);
    assert_eq!(
        gone(&[old(1, 1, 1, 900, 200), new(2, 1, 100)], 1000),
        [1],
        "the stream has waited for 200 ms"
    );
    assert_eq!(gone(&[old(1, 1, 1, 1100, 0), new(2, 1, 100)], 1000), [1]);
    assert_eq!(gone(&[old(1, 1, 1, 1100, 0), new(2, 1, 100)], 0), none, "the bandwidth is unknown");
    assert_eq!(gone(&[stream(1, 1, 1, 5000, now), new(2, 1, 100)], 1000), none, "there is no newer group");
    assert_eq!(
        gone(&[stream(0, 2, 0, 200, now), old(1, 1, 1, 900, 0)], 1000),
        [1],
        "a more urgent stream is sent first"
    );
    assert_eq!(
        gone(&[stream(0, 2, 1, 9000, now), old(1, 1, 1, 400, 0)], 1000),
        none,
        "owners of a level take turns"
    );
    assert_eq!(gone(&[stream(0, 2, 1, 9000, now), old(1, 1, 1, 600, 0)], 1000), [1]);
    // Stream 1 is in time, so stream 2, which is sent after it, is not dropped either.
    assert_eq!(gone(&[old(1, 1, 1, 500, 0), old(2, 1, 1, 5000, 0), new(3, 1, 100)], 1000), none);
    assert_eq!(gone(&[old(1, 1, 1, 5000, 0), old(2, 1, 1, 5000, 0), new(3, 1, 100)], 1000), [1, 2]);
}
