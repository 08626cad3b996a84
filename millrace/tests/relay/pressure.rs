//! Tests of subscribers that read too slowly, and of the relay's limits on sessions, tracks and delays.

use std::{future::poll_fn, pin::pin, time::Duration};

use futures_core::Stream as _;
use millrace_moq::{Filter, Parameters, StreamHeader, code, property::TrackProperties};
use millrace_relay::trace::{EventFilter, event::TraceEvent};
use millrace_relay_daemon::{
    config::{Config, Settings},
    metrics,
    status::Status,
};

use super::peer::{
    PeerStreamEnd, TestPeer, TestRelay, at, first_subscriber, header, patiently, with_publisher,
};

/// Size of a small cache in bytes.
const CACHE: u64 = 6 << 20;

/// Publishes `groups` groups of one object with `len` bytes each.
async fn publish(publisher: &TestPeer, groups: std::ops::Range<u64>, len: usize) {
    for group in groups {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        subgroup.object(0, len).await;
        subgroup.finish();
    }
}

#[tokio::test]
async fn subscriber_that_reads_no_streams_does_not_delay_another_subscriber() {
    let relay = TestRelay::with(|config| config.cache_bytes = CACHE);
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut reader, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    // A second subscriber reads no streams. Each group is larger than a stream's flow-control credit, so the relay
    // cannot finish sending it.
    let sleeper = relay.peer().await;
    let _asleep = sleeper.subscribe(&track).await;
    for group in 0..30 {
        publish(&publisher, group..group + 1, 2_000_000).await;
        let received = reader.next_subgroup().await;
        assert_eq!((received.header.group, received.all().await), (group, (vec![0], PeerStreamEnd::Fin)));
    }
    let status = relay.until("most groups are evicted", |status| status.cache.evicted > 20).await;
    assert!(status.cache.bytes <= CACHE, "{} bytes cached", status.cache.bytes);
    relay.until("dropped subgroups of the blocked subscriber", |status| status.drops["evicted"] > 10).await;
    let owed = |status: &Status| status.sessions.iter().map(|session| session.pending).sum::<u64>();
    relay.until("more media waits than the cache holds", |status| owed(status) <= CACHE).await;
}

#[tokio::test]
async fn an_evicted_subgroup_is_reset_at_the_subscriber() {
    let relay = TestRelay::with(|config| config.cache_bytes = 1 << 20);
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut slow, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    publish(&publisher, 0..1, 400_000).await;
    let first = slow.next_subgroup().await;
    assert_eq!(first.all().await.1, PeerStreamEnd::Fin);
    // Together these groups are larger than the connection's flow-control credit plus the cache.
    publish(&publisher, 1..40, 900_000).await;
    relay.until("subgroups are dropped", |status| status.drops["evicted"] > 0).await;
    // Groups that were dropped before their streams were opened never arrive. The newest group does.
    let mut ends = Vec::new();
    let mut is_newest = false;
    while !is_newest {
        let (header, mut stream) = patiently(slow.streams.recv()).await.unwrap();
        let end = loop {
            match patiently(stream.chunk()).await {
                Ok(Some(_)) => {}
                Ok(None) => break PeerStreamEnd::Fin,
                Err(_) => break PeerStreamEnd::Reset,
            }
        };
        is_newest = matches!(header, StreamHeader::Subgroup(header) if header.group == 39);
        ends.push(end);
    }
    assert_eq!(ends.last(), Some(&PeerStreamEnd::Fin), "the newest arrives: {ends:?}");
}

#[tokio::test]
async fn stop_sending_ends_one_stream_and_not_the_subscription() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut unwanted = publisher.subgroup(header(1, 0)).await;
    unwanted.object(0, 100).await;
    let mut received = subscriber.next_subgroup().await;
    received.stop(code::Reset::CANCELLED);
    relay.until("the stream is reset", |status| status.drops["stopped_by_subscriber"] == 1).await;
    unwanted.object(1, 100).await;
    unwanted.finish();
    publish(&publisher, 1..2, 100).await;
    let next = subscriber.next_subgroup().await;
    assert_eq!((next.header.group, next.all().await), (1, (vec![0], PeerStreamEnd::Fin)));
    subscriber.expect_no_stream().await;
}

#[tokio::test]
async fn unsubscribing_resets_streams_and_ends_upstream() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, mut request, _, upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut subgroup = publisher.subgroup(header(1, 0)).await;
    subgroup.object(0, 100).await;
    let mut received = subscriber.next_subgroup().await;
    assert_eq!(received.objects(1).await, [0]);
    request.cancel();
    assert_eq!(received.all().await, (vec![], PeerStreamEnd::Reset));
    relay.until("nobody is subscribed", |status| status.tracks[0].subscribers == 0).await;
    // After the last subscriber has left, the relay keeps its own subscription at the publisher for a while, and then
    // ends it.
    patiently(upstream.stopped()).await;
    relay.until("no publisher to feed the track", |status| status.tracks[0].publishers == 0).await;
}

#[tokio::test]
async fn objects_past_their_delivery_timeout_are_not_sent() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let mut subscriber = relay.peer().await;
    let timeout = TrackProperties { object_delivery_timeout: Some(500), ..TrackProperties::default() };
    let ((_request, _ok), _upstream) = tokio::join!(
        subscriber.subscribe(&track),
        publisher.accept_subscribe_with(&track, 1, Parameters::default(), timeout.encode())
    );
    let mut subgroup = publisher.subgroup(header(1, 0)).await;
    // The object is far larger than the stream's flow-control credit, so the rest waits until it is too old.
    subgroup.object(0, 4_000_000).await;
    subgroup.finish();
    let received = subscriber.next_subgroup().await;
    // exact: this pause is longer than the delivery timeout, which the test checks
    tokio::time::sleep(Duration::from_millis(510)).await;
    // Reading gives credit, but by now the delivery timeout has passed.
    assert_eq!(received.all().await, (vec![0], PeerStreamEnd::Reset));
    // exact: the relay counts a dropped object before it resets the object's stream
    assert_eq!(relay.status().drops["object_delivery_timeout"], 1);
}

/// A group that waits too long is dropped only when a newer group exists: the newest group is never dropped for its
/// age.
#[tokio::test]
async fn group_past_the_max_delay_is_dropped_only_when_the_next_group_begins() {
    let max_delay = Duration::from_millis(50);
    let relay = TestRelay::with(|config| config.queue.delays.default = Some(max_delay));
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    // The object is far larger than the stream's flow-control credit, so the rest waits for the subscriber.
    publish(&publisher, 0..1, 4_000_000).await;
    let first = subscriber.next_subgroup().await;
    relay
        .until("the waiting subscription", |status| {
            status.sessions.iter().any(|session| session.pending > 1_000_000)
        })
        .await;
    // exact: this pause is longer than the relay's maximum delay of a group, which the test checks
    tokio::time::sleep(4 * max_delay).await;
    // exact: the count of late groups stays 0 until the publisher begins the next group
    assert_eq!(relay.status().drops["late"], 0);
    publish(&publisher, 1..2, 100).await;
    relay.until("it goes", |status| status.drops["late"] == 1).await;
    let second = subscriber.next_subgroup().await;
    assert_eq!((second.header.group, second.all().await), (1, (vec![0], PeerStreamEnd::Fin)));
    assert_eq!(first.all().await, (vec![0], PeerStreamEnd::Reset));
    // exact: the drop counters are final, since the streams of both groups have ended
    let status = relay.status();
    let mut drops: Vec<_> = status.sessions.iter().map(|session| session.drops.clone()).collect();
    drops.retain(|drops| !drops.is_empty());
    assert_eq!(drops, [[("late".to_owned(), 1)].into()], "the drops of its session only");
}

#[tokio::test]
async fn earlier_objects_requested_by_a_filter_are_not_dropped_by_max_delay() {
    let max_delay = Duration::from_millis(50);
    let relay = TestRelay::with(|config| config.queue.delays.default = Some(max_delay));
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut reader, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    // The group is larger than a stream's flow-control credit.
    publish(&publisher, 0..1, 4_000_000).await;
    assert_eq!(reader.next_subgroup().await.all().await, (vec![0], PeerStreamEnd::Fin));
    let mut late = relay.peer().await;
    let filter = Some(Filter::AbsoluteStart(at(0, 0)));
    let _late = late.try_subscribe(&track, Parameters { filter, ..Parameters::default() }).await.unwrap();
    publish(&publisher, 1..2, 100).await;
    let one = late.next_subgroup().await;
    let other = late.next_subgroup().await;
    // exact: this pause is longer than the relay's maximum delay of a group, which the test checks
    tokio::time::sleep(4 * max_delay).await;
    let whole = || (vec![0], PeerStreamEnd::Fin);
    assert_eq!(tokio::join!(one.all(), other.all()), (whole(), whole()));
    // exact: the count of late groups is final, since the streams of both groups have arrived completely
    assert_eq!(relay.status().drops["late"], 0);
}

#[tokio::test]
async fn sessions_over_max_sessions_are_refused() {
    let relay = TestRelay::with(|config| config.max_sessions = 2);
    let _one = relay.peer().await;
    let _two = relay.peer().await;
    relay.until("both subscriptions to exist", |status| status.sessions.len() == 2).await;
    let remote =
        millrace_client::session::Remote::new(relay.url(), millrace_client::tls::CertificateTrust::Anyone);
    assert!(millrace_client::session::Session::connect(&remote).await.is_err());
    relay.until("the refusal to be counted", |status| status.drops["session_limit"] >= 1).await;
}

#[tokio::test]
async fn tracks_over_the_limit_are_refused() {
    let relay = TestRelay::with(|config| config.max_tracks = 1);
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (subscriber, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    let other = super::peer::track("live/cam", "audio");
    let refused = subscriber.try_subscribe(&other, Parameters::default()).await.err().unwrap();
    assert_eq!(refused.code, code::Request::EXCESSIVE_LOAD);
}

#[tokio::test]
async fn status_reports_bandwidth_and_loss_of_the_subscribers_path() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut reader, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut watch = pin!(relay.server.tracer().watch(EventFilter::default()).unwrap());
    for group in 0..10 {
        publish(&publisher, group..group + 1, 100_000).await;
        assert_eq!(reader.next_subgroup().await.all().await.1, PeerStreamEnd::Fin);
    }
    let told = |status: &Status| {
        let mut subscribers = status.sessions.iter().filter(|session| session.subscriber);
        subscribers.any(|session| session.bandwidth.is_some() && session.loss.is_some())
    };
    let status = relay.until("bandwidth and loss in the status", told).await;
    let subscriber = status.sessions.iter().find(|session| session.subscriber).unwrap().id;
    let change = loop {
        let lines = patiently(poll_fn(|context| watch.as_mut().poll_next(context))).await.unwrap().unwrap();
        let lines = String::from_utf8(lines.to_vec()).unwrap();
        let events = lines.lines().filter(|line| !line.is_empty());
        let mut events = events.map(|line| serde_json::from_str::<TraceEvent>(line).unwrap());
        let of_subscriber = |event| match event {
            TraceEvent::Path(path) if u64::from(path.session) == subscriber => Some(path),
            _ => None,
        };
        if let Some(path) = events.find_map(of_subscriber) {
            break path;
        }
    };
    assert!(change.rtt_us > 0, "{change:?}");
    let metrics = metrics::encode(status).unwrap();
    let family = r#"millrace_relay_path_bandwidth_bytes_per_second{quantile="0"}"#;
    assert!(metrics.contains(family), "{family} is not in\n{metrics}");
}

#[tokio::test]
async fn max_delay_can_be_changed_at_run_time() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (_reader, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    // The subscriber reads no streams. Each group is larger than a stream's flow-control credit.
    let sleeper = relay.peer().await;
    let _asleep = sleeper.subscribe(&track).await;
    publish(&publisher, 0..3, 2_000_000).await;
    relay.until_largest(at(2, 0)).await;
    let settings = Settings { max_delay: Some("0.05".parse().unwrap()), ..Settings::default() };
    relay.server.set_delays(&Config::new(settings, None).unwrap());
    // exact: the relay has not applied the new maximum delay yet, since no other task has run
    assert_eq!(relay.status().drops["late"], 0, "nothing was late before");
    publish(&publisher, 3..6, 2_000_000).await;
    relay.until("late groups", |status| status.drops["late"] > 0).await;
}
