//! Tests of the publisher against the subscriber, in one process and without a relay.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use millrace_moq::message::{FetchKind, SetupOptions};
use millrace_moq::param::RangeFilter;
use millrace_moq::property::TrackProperties;
use millrace_moq::{
    Draft, Filter, GroupOrder, Location, Namespace, Parameters, Properties, SubgroupId, TrackName, code,
};
use parking_lot::Mutex;
use quinn::crypto::rustls::QuicServerConfig;
use rustls::pki_types::PrivatePkcs8KeyDer;
use tokio::sync::mpsc;

use crate::broadcast::{Broadcast, BroadcastTrack, DatagramObject, History};
use crate::generate::{Generator, ObjectShape, Settings};
use crate::object::ObjectStream;
use crate::order::Sequencer;
use crate::receive::{ObjectReceiver, ObjectSink, TrackEvent};
use crate::serve::BroadcastServer;
use crate::session::{Error, Remote, Session};
use crate::stats::ObjectFigures;
use crate::tls::CertificateTrust;

/// A subscriber connected to a publisher.
struct ConnectedPair {
    broadcast: Arc<Broadcast>,
    receiver: Arc<ObjectReceiver>,
}

impl ConnectedPair {
    async fn new() -> Self {
        Self::with_draft(Draft::NEWEST).await
    }

    /// Connects a publisher that supports every draft to a subscriber that supports `draft`.
    async fn with_draft(draft: Draft) -> Self {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut tls = rustls::ServerConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key.into())
            .unwrap();
        tls.alpn_protocols = Draft::ALL.map(|draft| draft.alpn().to_vec()).to_vec();
        let crypto = QuicServerConfig::try_from(tls).unwrap();
        let mut config = quinn::ServerConfig::with_crypto(Arc::new(crypto));
        config.transport_config(Arc::new(super::dial::transport()));
        let endpoint = quinn::Endpoint::server(config, (Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let port = endpoint.local_addr().unwrap().port();

        let broadcast = Broadcast::new(Namespace::from_path("a/b").unwrap(), History::default());
        let served = broadcast.clone();
        tokio::spawn(async move {
            let connection = endpoint.accept().await.unwrap().await.unwrap();
            let session =
                Session::start(endpoint, connection, None, None, SetupOptions::default(), 1).await.unwrap();
            let server = BroadcastServer::new(session.clone(), served);
            session.run(server).await
        });
        let url = format!("moqt://127.0.0.1:{port}").parse().unwrap();
        let remote = Remote { drafts: vec![draft], ..Remote::new(url, CertificateTrust::Anyone) };
        let session = Session::connect(&remote).await.unwrap();
        assert_eq!(session.draft(), draft);
        let receiver = ObjectReceiver::new(session.clone());
        tokio::spawn(session.run(receiver.clone()));
        Self { broadcast, receiver }
    }

    fn name(&self, track: &str) -> TrackName {
        TrackName::new(self.broadcast.namespace().clone(), track.to_owned()).unwrap()
    }

    fn track(&self, name: &str) -> Arc<BroadcastTrack> {
        self.broadcast.create(name, Properties::default()).unwrap()
    }
}

fn text(group: u64, object: u64) -> Bytes {
    format!("{group}.{object}").into()
}

/// Writes groups with these IDs, each with three objects.
fn write_groups(track: &Arc<BroadcastTrack>, groups: std::ops::Range<u64>) {
    for group in groups {
        let mut writer = track.open(group, SubgroupId::Zero, 0);
        (0..3).for_each(|object| writer.write(object, text(group, object)));
    }
}

/// Returns the payloads of all objects in a track's queue, in the order of their locations.
async fn collect(mut steps: mpsc::Receiver<TrackEvent>) -> Vec<String> {
    let mut sequencer = Sequencer::default();
    while let Some(step) = steps.recv().await {
        sequencer.push(step);
    }
    std::iter::from_fn(|| sequencer.pop(true))
        .map(|object| String::from_utf8_lossy(&object.payload).into_owned())
        .collect()
}

async fn fetched(mut objects: ObjectStream) -> Vec<String> {
    let mut all = Vec::new();
    while let Some(object) = objects.next().await.unwrap() {
        all.push(String::from_utf8_lossy(&object.payload).into_owned());
    }
    all
}

async fn within<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("in time")
}

#[tokio::test(flavor = "multi_thread")]
async fn subscriber_gets_current_group_and_later_ones() {
    within(async {
        let pair = ConnectedPair::new().await;
        let track = pair.track("t");
        write_groups(&track, 0..2);
        let (queue, steps) = mpsc::channel(64);
        let subscribed =
            pair.receiver.subscribe(pair.name("t"), Parameters::default(), ObjectSink::Queue(queue));
        let mut subscription = subscribed.await.unwrap();
        assert_eq!(subscription.ok.parameters.largest_object, Some(Location::new(1, 2)));
        write_groups(&track, 2..4);
        track.end();
        let done = subscription.done().await.unwrap();
        assert_eq!((done.code, done.stream_count), (code::Done::TRACK_ENDED, 3));
        pair.receiver.forget(subscription);
        let all = collect(steps).await;
        assert_eq!(all, ["1.0", "1.1", "1.2", "2.0", "2.1", "2.2", "3.0", "3.1", "3.2"]);
    })
    .await;
}

/// In drafts 18 and 19, a subscription also ends when its filter's range ends. In later drafts, it ends only if the
/// subscriber cancels it or the track ends.
#[tokio::test(flavor = "multi_thread")]
async fn end_of_a_filter_ends_its_subscription_up_to_draft_19() {
    within(async {
        for draft in Draft::ALL {
            let pair = ConnectedPair::with_draft(draft).await;
            let track = pair.track("t");
            write_groups(&track, 0..3);
            let filter = Filter::AbsoluteRange { start: Location::new(1, 1), end_group: 3, end_object: None };
            let parameters = Parameters { filter: Some(filter), ..Parameters::default() };
            let (queue, steps) = mpsc::channel(64);
            let subscribed = pair.receiver.subscribe(pair.name("t"), parameters, ObjectSink::Queue(queue));
            let mut subscription = subscribed.await.unwrap();
            write_groups(&track, 3..6);
            let mut expected = code::Done::SUBSCRIPTION_ENDED;
            if draft >= Draft::D20 {
                track.end();
                expected = code::Done::TRACK_ENDED;
            }
            let done = subscription.done().await.unwrap();
            assert_eq!((done.code, done.stream_count), (expected, 3), "{draft}");
            pair.receiver.forget(subscription);
            let all = collect(steps).await;
            assert_eq!(all, ["1.1", "1.2", "2.0", "2.1", "2.2", "3.0", "3.1", "3.2"], "{draft}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn filter_that_ends_within_a_group_delivers_no_object_beyond_its_end() {
    within(async {
        let pair = ConnectedPair::new().await;
        let track = pair.track("t");
        write_groups(&track, 0..1);
        let filter = Filter::range(Location::new(1, 1), Location::new(2, 1));
        let parameters = Parameters { filter: Some(filter), ..Parameters::default() };
        let (queue, steps) = mpsc::channel(64);
        let subscribed = pair.receiver.subscribe(pair.name("t"), parameters, ObjectSink::Queue(queue));
        let mut subscription = subscribed.await.unwrap();
        write_groups(&track, 1..4);
        track.end();
        assert_eq!(subscription.done().await.unwrap().stream_count, 2);
        pair.receiver.forget(subscription);
        assert_eq!(collect(steps).await, ["1.1", "1.2", "2.0", "2.1"]);
    })
    .await;
}

/// Depending on the draft, the objects from before a subscription arrive in response to a joining FETCH, or in the
/// stream that FILL_PARAMETERS requests.
#[tokio::test(flavor = "multi_thread")]
async fn joining_fetch_or_fill_delivers_all_objects_before_the_subscription() {
    within(async {
        for draft in Draft::ALL {
            let pair = ConnectedPair::with_draft(draft).await;
            let track = pair.track("t");
            write_groups(&track, 0..3);
            let mut current = track.open(3, SubgroupId::Zero, 0);
            current.write(0, text(3, 0));
            let parameters = pair.receiver.joining(1, Parameters::default());
            assert_eq!(parameters.fill.is_some(), draft.has_fills());
            let (queue, steps) = mpsc::channel(64);
            let subscribed = pair.receiver.subscribe(pair.name("t"), parameters, ObjectSink::Queue(queue));
            let mut subscription = subscribed.await.unwrap();
            current.write(1, text(3, 1));
            let joined = pair.receiver.join(&mut subscription, 1).await.unwrap().unwrap();
            assert_eq!(fetched(joined).await, ["2.0", "2.1", "2.2", "3.0"], "{draft}");
            drop(current);
            track.end();
            let done = subscription.done().await.unwrap();
            assert_eq!(done.stream_count, 1 + u64::from(draft.has_fills()), "{draft}");
            pair.receiver.forget(subscription);
            assert_eq!(collect(steps).await, ["3.1"], "{draft}");
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn joining_fetch_or_fill_of_a_track_without_objects_returns_none() {
    within(async {
        for draft in [Draft::D19, Draft::D20] {
            let pair = ConnectedPair::with_draft(draft).await;
            let track = pair.track("t");
            let parameters = pair.receiver.joining(5, Parameters::default());
            let (queue, steps) = mpsc::channel(64);
            let subscribed = pair.receiver.subscribe(pair.name("t"), parameters, ObjectSink::Queue(queue));
            let mut subscription = subscribed.await.unwrap();
            assert!(pair.receiver.join(&mut subscription, 5).await.unwrap().is_none());
            write_groups(&track, 0..1);
            track.end();
            assert_eq!(subscription.done().await.unwrap().stream_count, 1);
            pair.receiver.forget(subscription);
            assert_eq!(collect(steps).await, ["0.0", "0.1", "0.2"]);
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fetch_obeys_the_group_order_and_fails_for_a_track_without_objects() {
    within(async {
        for draft in Draft::ALL {
            let pair = ConnectedPair::with_draft(draft).await;
            let track = pair.track("t");
            let standalone = |start, last| FetchKind::Standalone {
                track: pair.name("t"),
                range: Filter::range(start, last),
            };
            let nothing = standalone(Location::new(0, 0), Location::new(9, 0));
            let nothing = pair.receiver.fetch(nothing, GroupOrder::Ascending);
            let Err(Error::Refused(error)) = nothing.await.map(drop) else { panic!("the track has objects") };
            assert_eq!(error.code, code::Request::INVALID_RANGE);
            write_groups(&track, 0..3);
            let range = standalone(Location::new(0, 2), Location::new(1, 1));
            let up = pair.receiver.fetch(range.clone(), GroupOrder::Ascending).await.unwrap();
            assert_eq!(fetched(up).await, ["0.2", "1.0", "1.1"], "{draft}");
            let down = pair.receiver.fetch(range, GroupOrder::Descending).await.unwrap();
            assert_eq!(fetched(down).await, ["1.0", "1.1", "0.2"], "{draft}");
            let whole = standalone(Location::new(1, 1), Location::new(1, u64::MAX));
            let whole = pair.receiver.fetch(whole, GroupOrder::Ascending).await.unwrap();
            assert_eq!(fetched(whole).await, ["1.1", "1.2"], "{draft}");
            let kind = FetchKind::AbsoluteJoining { subscription: 400, first_group: 0 };
            let unknown = pair.receiver.fetch(kind, GroupOrder::Ascending).await.map(drop);
            match unknown {
                Err(Error::Refused(error)) if !draft.has_fills() => {
                    assert_eq!(error.code, code::Request::INVALID_JOINING_REQUEST_ID);
                }
                Err(Error::Encode(_)) if draft.has_fills() => {}
                other => panic!("{draft}: {other:?}"),
            }
            let (queue, _) = mpsc::channel(1);
            let absent =
                pair.receiver.subscribe(pair.name("x"), Parameters::default(), ObjectSink::Queue(queue));
            let Err(Error::Refused(error)) = absent.await.map(drop) else { panic!("no such track") };
            assert_eq!(error.code, code::Request::DOES_NOT_EXIST);
        }
    })
    .await;
}

/// Only draft-20 and later can express a FETCH range that depends on the track's largest object.
#[tokio::test(flavor = "multi_thread")]
async fn fetch_of_a_range_relative_to_the_largest_object_returns_its_objects() {
    within(async {
        let pair = ConnectedPair::new().await;
        write_groups(&pair.track("t"), 0..4);
        let table: [(Filter, &[&str]); 3] = [
            (Filter::Relative(1), &["3.0", "3.1", "3.2"]),
            (Filter::AbsoluteStart(Location::new(2, 2)), &["2.2", "3.0", "3.1", "3.2"]),
            (Filter::range(Location::new(3, 1), Location::new(7, 0)), &["3.1", "3.2"]),
        ];
        for (range, expected) in table {
            let kind = FetchKind::Standalone { track: pair.name("t"), range };
            let objects = pair.receiver.fetch(kind, GroupOrder::Ascending).await.unwrap();
            assert_eq!(fetched(objects).await, expected, "{range:?}");
        }
        let next = FetchKind::Standalone { track: pair.name("t"), range: Filter::NextObject };
        let refused = pair.receiver.fetch(next, GroupOrder::Ascending).await.map(drop);
        let Err(Error::Refused(error)) = refused else { panic!("the next object does not exist yet") };
        assert_eq!(error.code, code::Request::INVALID_RANGE);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn publisher_refuses_range_filters_and_omits_track_properties_on_request() {
    within(async {
        let pair = ConnectedPair::new().await;
        let priority = TrackProperties { publisher_priority: Some(9), ..TrackProperties::default() };
        pair.broadcast.create("t", priority.encode()).unwrap();
        for (include, expected) in [(Some(false), Properties::default()), (None, priority.encode())] {
            let parameters = Parameters { include_properties: include, ..Parameters::default() };
            let (queue, _) = mpsc::channel(1);
            let subscribed = pair.receiver.subscribe(pair.name("t"), parameters, ObjectSink::Queue(queue));
            assert_eq!(subscribed.await.unwrap().ok.properties, expected);
        }
        let filter = RangeFilter { kind: 0x25, value: Bytes::from_static(&[0, 1, 1]) };
        let parameters = Parameters { range_filters: vec![filter], ..Parameters::default() };
        let (queue, _) = mpsc::channel(1);
        let refused =
            pair.receiver.subscribe(pair.name("t"), parameters, ObjectSink::Queue(queue)).await.map(drop);
        let Err(Error::Refused(error)) = refused else { panic!("the filter was accepted") };
        assert_eq!(error.code, code::Request::INVALID_FILTER);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn generated_objects_arrive_undamaged_and_are_counted() {
    within(async {
        for shape in [ObjectShape::Groups, ObjectShape::Objects] {
            let pair = ConnectedPair::new().await;
            let track = pair.track("objects");
            let figures = Arc::new(Mutex::new(ObjectFigures::new()));
            let sink = ObjectSink::Figures(figures.clone());
            let subscribed = pair.receiver.subscribe(pair.name("objects"), Parameters::default(), sink);
            let mut subscription = subscribed.await.unwrap();
            let generator = Generator::new(Settings {
                object_bytes: 3000,
                sizes: Vec::new(),
                rate_hz: 2000.0,
                objects_per_group: 10,
                duration: Some(0.1),
                priority_pattern: vec![0, 1],
                shape,
            });
            let generator = generator.unwrap();
            tokio::task::spawn_blocking(move || generator.run(&track)).await.unwrap();
            let done = subscription.done().await.unwrap();
            let expected_streams = if shape == ObjectShape::Groups { 40 } else { 200 };
            assert_eq!(done.stream_count, expected_streams);
            let report = figures.lock().report(true);
            assert_eq!((report.delivered, report.lost, report.corrupted), (200, 0, 0));
            assert_eq!((report.duplicates, report.disordered, report.resets), (0, 0, 0));
            assert_eq!((report.streams, report.bytes), (expected_streams, 600_000));
        }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_in_datagrams_reach_a_subscriber() {
    within(async {
        let pair = ConnectedPair::new().await;
        let track = pair.track("t");
        let (queue, mut steps) = mpsc::channel(64);
        let subscribed =
            pair.receiver.subscribe(pair.name("t"), Parameters::default(), ObjectSink::Queue(queue));
        let _subscription = subscribed.await.unwrap();
        let location = Location::new(0, 1);
        track.send_datagram(DatagramObject { location, priority: 1, payload: text(0, 1) });
        let Some(TrackEvent::Datagram(object)) = steps.recv().await else { panic!("no datagram") };
        assert_eq!((object.location, object.payload), (location, text(0, 1)));
    })
    .await;
}
