use std::{future::poll_fn, pin::pin};

use millrace_moq::tracks::cache::{self, TrackCache};
use millrace_quic::plane::downstream::{FrameContent, Label, PacketFrame};
use millrace_testkit::{BOUND, async_wait_for};
use millrace_transport::trace::{OffloadTraceEvent as OffloadEvent, OffloadTraceKind};

use crate::{AdaptiveMode, Delays};

use super::{
    super::hub::HubLimits,
    event::{Carries, TraceUserspace},
    *,
};

const PATIENCE: Duration = BOUND;

/// Makes a tracer for a relay with engine `user`, and the [`Tap`] that tells the tracer about packets that userspace
/// has sent.
fn tracer() -> (Arc<EventTracer>, Arc<Tap>) {
    let cache = Arc::new(TrackCache::new(cache::CacheLimits { bytes: 1 << 20, age: Duration::from_secs(1) }));
    let limits = HubLimits {
        max_tracks: 10,
        offloaded_tracks: 128,
        linger: Duration::from_secs(1),
        absence: Duration::ZERO,
        max_rendezvous: Duration::from_secs(1),
        max_routes: 0,
        request_timeout: Duration::from_secs(1),
    };
    let tap = Arc::<Tap>::default();
    let hub = Arc::new(Hub::new(limits, cache, Delays::default(), AdaptiveMode::Off, false));
    let engine = Arc::new(RelayEngine::user("as configured"));
    (EventTracer::new(hub, engine, Arc::clone(&tap), Arc::default()), tap)
}

fn send(tap: &Tap, session: u32, number: u64) {
    let carried = FrameContent::Bytes { offset: 5, len: 100, fin: false, again: true };
    let piece = PacketFrame { label: Label { track: 1, group: 2 }, stream_id: Some(3), carried };
    tap.add(session, number, 150, std::iter::once(piece));
}

/// Returns the events of the next batch of lines that has any; no events once the trace has ended.
async fn next(watch: &mut TraceLines) -> Vec<TraceEvent> {
    loop {
        let polled = poll_fn(|context| pin!(&mut *watch).poll_next(context));
        let Some(lines) = tokio::time::timeout(PATIENCE, polled).await.expect("events") else {
            return vec![];
        };
        let lines = String::from_utf8(lines.unwrap().to_vec()).unwrap();
        let filled = lines.lines().filter(|line| !line.is_empty());
        let events: Vec<_> = filled.map(|line| serde_json::from_str(line).unwrap()).collect();
        if !events.is_empty() {
            return events;
        }
    }
}

fn number(event: &TraceEvent) -> u64 {
    match event {
        TraceEvent::Sent(sent) => sent.number,
        other => panic!("{other:?}"),
    }
}

async fn numbers(watch: &mut TraceLines, count: usize) -> Vec<u64> {
    let mut numbers = Vec::new();
    while numbers.len() < count {
        numbers.extend(next(watch).await.iter().map(number));
    }
    numbers
}

async fn until(condition: impl Fn() -> bool) {
    async_wait_for("the tracer", condition).await;
}

#[tokio::test]
async fn trace_collects_only_while_somebody_watches() {
    let (tracer, tap) = tracer();
    assert!(!tap.is_on());
    for _ in 0..2 {
        let mut watch = tracer.watch(EventFilter::default()).unwrap();
        let other = tracer.watch(EventFilter::default()).unwrap();
        assert!(tap.is_on());
        let start = next(&mut watch).await;
        let [TraceEvent::Start { engine, notes, .. }] = &start[..] else { panic!("{start:?}") };
        assert_eq!(engine, "user");
        assert!(notes[0].contains("cannot be seen"), "{notes:?}");
        send(&tap, 7, 9);
        let events = next(&mut watch).await;
        let [TraceEvent::Sent(sent)] = &events[..] else { panic!("{events:?}") };
        let want = TraceUserspace {
            time_us: sent.time_us,
            subscriber: 7,
            number: 9,
            bytes: 150,
            carries: Carries::Repair,
            media: event::TraceMedia {
                track: None,
                group: Some(2),
                stream: Some(3),
                offset: Some(5),
                len: Some(100),
                fin: false,
            },
        };
        assert_eq!(*sent, want);
        drop(other);
        drop(watch);
        // Events after the last viewer has disconnected are dropped.
        send(&tap, 7, 10);
        until(|| !tap.is_on()).await;
    }
}

#[tokio::test]
async fn trace_viewers_get_the_events_they_asked_for() {
    let (tracer, tap) = tracer();
    let every = |every| NonZero::new(every).unwrap();
    let mut one =
        tracer.watch(EventFilter { session: NonZero::new(1), every: every(4), track: None }).unwrap();
    let mut other =
        tracer.watch(EventFilter { session: NonZero::new(2), every: every(6), track: None }).unwrap();
    for number in 0..24 {
        send(&tap, 1, number);
        send(&tap, 2, number);
    }
    next(&mut one).await;
    next(&mut other).await;
    assert_eq!(numbers(&mut one, 6).await, [0, 4, 8, 12, 16, 20]);
    assert_eq!(numbers(&mut other, 4).await, [0, 6, 12, 18]);
    // With only one viewer left, the sender in userspace reports only events that pass this viewer's filter.
    drop(other);
    until(|| tracer.state.lock().told.is_some_and(|told| told.every == every(4))).await;
    send(&tap, 2, 24);
    assert_eq!(tap.take().0, []);
}

#[tokio::test]
async fn slow_trace_viewer_gets_the_number_of_dropped_events() {
    const ROUND: usize = QUEUE / 2;
    let (tracer, tap) = tracer();
    let mut slow = tracer.watch(EventFilter::default()).unwrap();
    let mut fast = tracer.watch(EventFilter::default()).unwrap();
    next(&mut fast).await;
    for round in 0..4 {
        let sent: Vec<_> = (0..ROUND as u64).map(|index| round * ROUND as u64 + index).collect();
        sent.iter().for_each(|number| send(&tap, 1, *number));
        assert_eq!(numbers(&mut fast, ROUND).await, sent);
    }
    next(&mut slow).await;
    let mut events = next(&mut slow).await;
    assert_eq!(events.remove(0), TraceEvent::Lost { count: 2 * ROUND as u64, place: LossPlace::Viewer });
    let mut got: Vec<_> = events.iter().map(number).collect();
    got.extend(numbers(&mut slow, QUEUE - got.len()).await);
    assert!(got.into_iter().eq(0..QUEUE as u64), "the first ones, in order");
}

#[tokio::test]
async fn trace_ends_when_the_relay_stops_and_viewers_are_limited() {
    let (tracer, tap) = tracer();
    let mut all: Vec<_> = (0..MAX_VIEWERS).map(|_| tracer.watch(EventFilter::default()).unwrap()).collect();
    assert!(tracer.watch(EventFilter::default()).is_err());
    drop(all.pop());
    all.push(tracer.watch(EventFilter::default()).unwrap());
    tracer.stop();
    for watch in &mut all {
        next(watch).await;
        assert_eq!(next(watch).await, []);
    }
    until(|| !tap.is_on()).await;
}

#[test]
fn invalid_trace_query_is_refused() {
    let table = [
        ("", Ok(EventFilter::default())),
        ("sample=8", Ok(EventFilter { every: NonZero::new(8).unwrap(), ..EventFilter::default() })),
        (
            "session=3&track=live-cam--v",
            Ok(EventFilter {
                session: NonZero::new(3),
                track: Some("live-cam--v".parse().unwrap()),
                ..EventFilter::default()
            }),
        ),
        ("sample=0", Err(BadQuery::Number("sample".into()))),
        ("session=-1", Err(BadQuery::Number("session".into()))),
        ("every=1", Err(BadQuery::Unknown("every".into()))),
    ];
    for (query, want) in table {
        assert_eq!(EventFilter::parse(query), want, "{query}");
    }
    assert!(matches!(EventFilter::parse("track=x"), Err(BadQuery::Track(_))));
}

#[test]
fn kernel_trace_events_are_filtered_by_publisher_subscriber_or_track() {
    let what = OffloadTraceKind::Copy {
        outcome: "sent",
        subscriber: 2,
        sent: Some((50, 1000)),
        track: 9,
        group: 0,
        stream_id: 3,
        offset: 0,
        len: 900,
        fin: false,
    };
    let copy = OffloadEvent { arrived_ns: 1, time_ns: 2, publisher: 1, received: 8, what };
    let packet = OffloadEvent { what: OffloadTraceKind::Packet { outcome: "replayed", size: 9 }, ..copy };
    let wanted = |track, session, every| PacketFilter {
        every: NonZero::new(every).unwrap(),
        track: NonZero::new(track),
        session: NonZero::new(session),
    };
    for (track, session, every, want) in [
        (0, 0, 1, (true, true)),
        (0, 0, 4, (true, true)),
        (0, 0, 3, (false, false)),
        (0, 1, 1, (true, true)),
        (0, 2, 1, (true, false)),
        (0, 3, 1, (false, false)),
        (9, 0, 1, (true, false)),
        (8, 0, 1, (false, false)),
        (9, 2, 8, (true, false)),
    ] {
        let wanted = wanted(track, session, every);
        let passes = [copy, packet].map(|event| RawEvent::Offload(event).passes(&wanted));
        assert_eq!((passes[0], passes[1]), want, "{wanted:?}");
    }
}

#[test]
fn trace_collects_events_matching_any_viewers_filter() {
    let tracing = |every, track, session| PacketFilter {
        every: NonZero::new(every).unwrap(),
        track: NonZero::new(track),
        session: NonZero::new(session),
    };
    for (one, other, want) in [
        (tracing(4, 1, 2), tracing(6, 1, 2), tracing(2, 1, 2)),
        (tracing(1, 1, 2), tracing(6, 3, 2), tracing(1, 0, 2)),
        (tracing(9, 1, 0), tracing(9, 1, 2), tracing(9, 1, 0)),
    ] {
        assert_eq!(union(one, other), want);
        assert_eq!(union(other, one), want);
    }
}
