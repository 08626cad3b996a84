//! Tests of publishers and upstream relays that change. Each object must arrive once, and the kernel must forward again
//! from the next group on.

use std::{collections::BTreeMap, net::SocketAddr, sync::Arc, time::Duration};

use millrace_client::session::SessionRequest;
use millrace_lab::lab::{Lab, Topology};
use millrace_moq::{
    ObjectDatagram, Parameters, Status as ObjectStatus, SubgroupId, code, data::encode_object_header,
};
use millrace_relay_daemon::{
    config::{EngineChoice, UpstreamConfig},
    server::RunningServer,
    status::Status,
};
use millrace_testkit::async_wait_until;
use tokio::{runtime::Runtime, sync::mpsc};

use crate::{
    needs_root,
    net::{self, ALIAS, KernelNetwork, PORT, PeerKind, subscribers},
    open::{BYTES, assert_all_bound, named, publish, ready_by, settled, since, single},
    peer::{PeerStreamEnd, TestPeer, patiently, payload, track},
};

/// Number of objects in a group. Each object has a stream of its own.
const OBJECTS: u64 = 10;

/// The objects that a subscriber has received, each with the number of times that it arrived.
struct SubscriberInbox {
    streams: mpsc::UnboundedReceiver<((u64, u64), PeerStreamEnd)>,
    came: BTreeMap<(u64, u64), u64>,
}

impl SubscriberInbox {
    /// Starts tasks that read all streams to the subscriber.
    fn from_subscriber(mut subscriber: TestPeer) -> Self {
        let (sender, streams) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            loop {
                let received = subscriber.next_subgroup().await;
                let SubgroupId::Explicit(id) = received.header.subgroup else {
                    panic!("{:?}", received.header)
                };
                let group = received.header.group;
                let sender = sender.clone();
                tokio::spawn(async move {
                    let (objects, end) = received.all().await;
                    assert!(end == PeerStreamEnd::Reset || objects == [id]);
                    let _ = sender.send(((group, id), end)); // sending fails only after the test has ended
                });
            }
        });
        Self { streams, came: BTreeMap::new() }
    }

    /// Waits until `count` more streams have arrived. Each must contain one complete object.
    async fn expect(&mut self, count: usize) {
        for _ in 0..count {
            let (at, end) = patiently(self.streams.recv()).await.unwrap();
            assert_eq!(end, PeerStreamEnd::Fin, "{at:?} was reset");
            *self.came.entry(at).or_default() += 1;
            assert_eq!(self.came[&at], 1, "{at:?} came twice");
        }
    }

    /// Checks that all objects of these groups arrived, and no others.
    fn assert_whole(&mut self, groups: u64, objects: impl Fn(u64) -> u64) {
        assert!(self.streams.try_recv().is_err(), "more objects arrived than were published");
        self.came.retain(|(group, _), _| *group > 0);
        let all = (1..=groups).flat_map(|group| (0..objects(group)).map(move |object| (group, object)));
        assert!(self.came.keys().copied().eq(all), "{:?}", self.came);
    }
}

/// Publishes objects of group 0 until the kernel has sent packets to every subscriber.
async fn warm_up(net: &KernelNetwork, publisher: &TestPeer, inboxes: &mut [SubscriberInbox]) {
    let mut object = 0;
    // exact: the test rereads the kernel's packet counts of the subscribers after each published object
    while subscribers(&net.status()).any(|session| session.kernel.packets == 0) {
        // exact: the status is printed only if the test fails
        assert!(object < 10_000, "{:#?}", net.status());
        publish(publisher, 0, object).await;
        for inbox in inboxes.iter_mut() {
            inbox.expect(1).await;
        }
        settled(net, (0, object), inboxes.len() as u64).await;
        object += 1;
    }
}

/// Publishes a group at one publisher. The kernel must forward all of it except the first object.
async fn forwarded_group(
    net: &KernelNetwork,
    publisher: &TestPeer,
    group: u64,
    inboxes: &mut [SubscriberInbox],
) {
    let count = inboxes.len() as u64;
    publish(publisher, group, 0).await;
    settled(net, (group, 0), count).await;
    let before = net.settled();
    for object in 1..OBJECTS {
        publish(publisher, group, object).await;
        settled(net, (group, object), count).await;
    }
    let now = net.settled();
    assert_all_bound(&now, &before, OBJECTS - 1);
    // Userspace opens the streams that the kernel did not open. Their number depends on the machine's load.
    let sent = |status: &Status| named(&since(&status.engine.copies, &None), "sent");
    assert!(sent(&now) - sent(&before) >= OBJECTS - 1, "{:#?}", now.engine);
    for inbox in inboxes {
        inbox.expect(OBJECTS as usize).await;
    }
}

/// Publishes the same object from both publishers, one after the other. The relay sends STOP_SENDING on the stream of
/// an object that it already has.
async fn publish_copies(publishers: [&TestPeer; 2], group: u64, object: u64) {
    for publisher in publishers {
        let header = single(group, object);
        let mut bytes = Vec::new();
        header.encode(&mut bytes);
        encode_object_header(None, object, None, BYTES as u64, ObjectStatus::Normal, &mut bytes);
        bytes.extend(payload(group, object, BYTES));
        let mut stream = publisher.session.streams().open_uni().await.unwrap();
        if stream.write_all(&bytes).await.is_ok() {
            let _ = stream.finish(); // an error means that the relay has stopped the stream
        }
    }
}

/// Returns both publishers in the order in which they send this object. The order changes every three objects.
fn in_turn<'a>(one: &'a TestPeer, other: &'a TestPeer, object: u64) -> [&'a TestPeer; 2] {
    if (object / 3).is_multiple_of(2) { [one, other] } else { [other, one] }
}

async fn publishers(net: &KernelNetwork, count: u64) {
    let what = format!("{count} publishers");
    async_wait_until(&what, || net.status(), |status| status.tracks[0].publishers == count).await;
}

fn change_publishers(rounds: u64) {
    let net = KernelNetwork::new(2, false, |_| {});
    let both = [("sub1", PeerKind::Quic), ("sub2", PeerKind::Web)];
    let net::Cast { publisher: first, subscribers, _requests } = ready_by(&net, PeerKind::Quic, &both);
    net.run(async {
        let mut inboxes: Vec<_> = subscribers.into_iter().map(SubscriberInbox::from_subscriber).collect();
        warm_up(&net, &first, &mut inboxes).await;
        forwarded_group(&net, &first, 1, &mut inboxes).await;
        for group in (2..2 + 2 * rounds).step_by(2) {
            let mut second = tokio::task::block_in_place(|| net.peer("pub"));
            let _namespace = second.publish_namespace("live/cam").await;
            let (_upstream, _) = second.accept_subscribe(&track("live/cam", "video"), ALIAS).await;
            publishers(&net, 2).await;
            for object in 0..OBJECTS {
                publish_copies(in_turn(&first, &second, object), group, object).await;
            }
            for inbox in &mut inboxes {
                inbox.expect(OBJECTS as usize).await;
            }
            second.session.close(code::Session::NO_ERROR, "");
            publishers(&net, 1).await;
            forwarded_group(&net, &first, group + 1, &mut inboxes).await;
            inboxes.iter_mut().for_each(|inbox| inbox.assert_whole(group + 1, |_| OBJECTS));
        }
    });
}

#[test]
fn kernel_keeps_forwarding_when_a_second_publisher_joins_and_leaves() {
    needs_root!(kernel_keeps_forwarding_when_a_second_publisher_joins_and_leaves);
    change_publishers(3);
}

#[test]
#[ignore = "test-all: twenty handovers take minutes"]
fn second_publisher_comes_and_goes_twenty_times_without_loss() {
    needs_root!(second_publisher_comes_and_goes_twenty_times_without_loss);
    change_publishers(20);
}

fn datagram(group: u64, object: u64) -> ObjectDatagram {
    ObjectDatagram {
        alias: ALIAS,
        group,
        object,
        priority: None,
        end_of_group: false,
        properties: Default::default(),
        status: None,
        payload: payload(group, object, 300).into(),
    }
}

/// Sends the same object from both publishers, one after the other, and waits until the relay and every subscriber have
/// it.
async fn exchange(
    net: &KernelNetwork,
    publishers: &[&TestPeer],
    subscribers: &mut [TestPeer],
    at: (u64, u64),
) {
    for publisher in publishers {
        let mut bytes = Vec::new();
        datagram(at.0, at.1).encode(&mut bytes);
        publisher.session.streams().send_datagram(bytes.into()).unwrap();
    }
    for subscriber in subscribers {
        let received = patiently(subscriber.datagrams.recv()).await.unwrap();
        assert_eq!(received, ObjectDatagram { alias: received.alias, ..datagram(at.0, at.1) });
    }
    settled_at(net, at).await;
}

#[test]
fn datagrams_of_two_publishers_arrive_once() {
    needs_root!(datagrams_of_two_publishers_arrive_once);
    let net = KernelNetwork::new(2, false, |_| {});
    let both = [("sub1", PeerKind::Quic), ("sub2", PeerKind::Web)];
    let net::Cast { publisher: first, mut subscribers, _requests } = ready_by(&net, PeerKind::Quic, &both);
    let good = |status: &Status| named(&since(&status.engine.frames, &None), "good");
    net.run(async {
        let mut sent = 0;
        for round in 0..3 {
            // Userspace forwards datagrams until it has handed the track over to the kernel.
            for object in 0.. {
                let before = net.settled();
                exchange(&net, &[&first], &mut subscribers, (10 * round, object)).await;
                sent += 1;
                if good(&net.settled()) > good(&before) {
                    break;
                }
                assert!(object < 100, "{:#?}", net.settled().engine);
            }
            let group = 10 * round + 1;
            let before = net.settled();
            for object in 0..OBJECTS {
                exchange(&net, &[&first], &mut subscribers, (group, object)).await;
            }
            assert_eq!(good(&net.settled()) - good(&before), OBJECTS);
            let mut second = tokio::task::block_in_place(|| net.peer("pub"));
            let _namespace = second.publish_namespace("live/cam").await;
            let (_upstream, _) = second.accept_subscribe(&track("live/cam", "video"), ALIAS).await;
            publishers(&net, 2).await;
            for object in OBJECTS..3 * OBJECTS {
                exchange(&net, &in_turn(&first, &second, object), &mut subscribers, (group, object)).await;
            }
            sent += 3 * OBJECTS;
            second.session.close(code::Session::NO_ERROR, "");
            publishers(&net, 1).await;
        }
        let status = net.settled();
        assert_eq!(status.totals.datagrams_sent, 2 * sent);
        assert!(subscribers.iter_mut().all(|subscriber| subscriber.datagrams.try_recv().is_err()));
    });
}

/// An upstream relay of the edge relay, and the publisher that is connected to this upstream relay.
struct OriginRelay {
    server: Arc<RunningServer>,
    publisher: TestPeer,
    _namespace: SessionRequest,
}

/// An edge relay that forwards in the kernel. Its upstream relays run on the publishers' node of the lab.
struct Edge {
    net: KernelNetwork,
}

impl Edge {
    fn new(subscribers: usize) -> Self {
        let mut topology = Topology::standard(1, subscribers);
        topology.netem = false;
        topology.links.iter_mut().for_each(|link| link.emulate = false);
        let lab = Lab::new(&topology).unwrap();
        let runtime = Runtime::new().unwrap();
        let upstream =
            UpstreamConfig { urls: vec![Self::url(&lab, 0)], tls_root: None, token: None, identity: None };
        let config = net::configure(&lab, |config| config.upstream = Some(upstream));
        let server = Arc::new(net::start(&lab, &runtime, config.clone(), 0).unwrap());
        Self { net: KernelNetwork { runtime, server, lab, config } }
    }

    /// Returns the address of the origin relay with this number.
    fn addr(lab: &Lab, number: u16) -> SocketAddr {
        SocketAddr::new(lab.node("pub").unwrap().addr_v4().into(), PORT + 1 + number)
    }

    fn url(lab: &Lab, number: u16) -> url::Url {
        format!("moqt://{}", Self::addr(lab, number)).parse().unwrap()
    }

    /// Starts an origin relay. When it is drained, it redirects its peers to the next origin.
    fn origin(&self, number: u16) -> OriginRelay {
        let KernelNetwork { lab, runtime, .. } = &self.net;
        let config = net::configure(lab, |config| {
            config.listen = vec![Self::addr(lab, number)];
            config.engine = EngineChoice::User;
            config.interfaces.clear();
            config.goaway_uri = Some(Self::url(lab, number + 1));
            config.drain_timeout = Duration::from_secs(300);
        });
        let node = lab.node("pub").unwrap();
        let server = Arc::new(net::start_on(node, runtime, config, 0).unwrap());
        let connect = || {
            runtime.block_on(async {
                let publisher = TestPeer::connect(Self::url(lab, number)).await;
                let namespace = publisher.publish_namespace("live/cam").await;
                (publisher, namespace)
            })
        };
        let (publisher, _namespace) = node.enter(connect).unwrap();
        OriginRelay { server, publisher, _namespace }
    }
}

/// Number of objects in the group during which the upstream relay changes.
const DURING: u64 = 40;

fn change_upstreams(rounds: u16) {
    let edge = Edge::new(2);
    let net = &edge.net;
    let track = track("live/cam", "video");
    let mut origin = edge.origin(0);
    net.until("the upstream", |status| status.sessions.iter().any(|session| session.upstream));
    let peers = ["sub1", "sub2"].map(|node| net.peer(node));
    let mut inboxes: Vec<_> = Vec::new();
    let mut requests = Vec::new();
    net.run(async {
        let waiting = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
        for (at, subscriber) in peers.into_iter().enumerate() {
            let subscribing = subscriber.try_subscribe(&track, waiting.clone());
            if at == 0 {
                let accepting = origin.publisher.accept_subscribe(&track, ALIAS);
                let (subscribed, upstream) = tokio::join!(subscribing, accepting);
                requests.extend([subscribed.unwrap().0, upstream.0]);
            } else {
                requests.push(subscribing.await.unwrap().0);
            }
            inboxes.push(SubscriberInbox::from_subscriber(subscriber));
        }
    });
    let is_ready = |status: &Status| status.sessions.iter().all(|session| session.kernel_ready == Some(true));
    net.until("records", is_ready);
    net.run(async {
        warm_up(net, &origin.publisher, &mut inboxes).await;
        forwarded_group(net, &origin.publisher, 1, &mut inboxes).await;
    });
    for round in 1..=rounds {
        let next = tokio::task::block_in_place(|| edge.origin(round));
        let group = 2 * u64::from(round);
        net.run(async {
            let server = Arc::clone(&origin.server);
            let draining = tokio::spawn(async move { server.drain().await });
            let OriginRelay { mut publisher, server, _namespace } = next;
            // The old publisher sends objects while the edge moves to the new origin.
            let (told, mut moved) = mpsc::unbounded_channel();
            let accepting = async {
                let accepted = publisher.accept_subscribe(&track, ALIAS).await;
                told.send(()).unwrap();
                accepted
            };
            let before = async {
                let mut object = 0;
                while moved.try_recv().is_err() && object < DURING / 2 {
                    publish(&origin.publisher, group, object).await;
                    settled_at(net, (group, object)).await;
                    object += 1;
                }
                object
            };
            let ((upstream, _), begun) = tokio::join!(accepting, before);
            requests.push(upstream);
            publishers(net, 2).await;
            for object in begun..DURING {
                publish_copies(in_turn(&origin.publisher, &publisher, object), group, object).await;
            }
            for inbox in &mut inboxes {
                inbox.expect(DURING as usize).await;
            }
            // The first stream of the next group comes from the new origin.
            publish(&origin.publisher, group + 1, 0).await;
            publishers(net, 1).await;
            let addr = Edge::addr(&net.lab, round);
            let is_left = |status: &Status| {
                let mut upstreams = status.sessions.iter().filter(|session| session.upstream);
                upstreams.all(|session| session.remote == addr) && is_ready(status)
            };
            async_wait_until("the old origin to be left", || net.status(), is_left).await;
            origin.publisher.session.close(code::Session::NO_ERROR, "");
            patiently(draining).await.unwrap();
            forwarded_group(net, &publisher, group + 1, &mut inboxes).await;
            let objects = |group: u64| if group.is_multiple_of(2) { DURING } else { OBJECTS };
            inboxes.iter_mut().for_each(|inbox| inbox.assert_whole(group + 1, objects));
            origin = OriginRelay { server, publisher, _namespace };
        });
    }
}

async fn settled_at(net: &KernelNetwork, at: (u64, u64)) {
    let what = format!("{at:?} at the relay");
    async_wait_until(&what, || net.status(), |status| status.tracks[0].largest == Some(at)).await;
}

#[test]
fn kernel_keeps_forwarding_when_the_upstream_relay_changes() {
    needs_root!(kernel_keeps_forwarding_when_the_upstream_relay_changes);
    change_upstreams(3);
}

#[test]
#[ignore = "test-all: twenty handovers take minutes"]
fn upstream_relay_changes_twenty_times_without_loss() {
    needs_root!(upstream_relay_changes_twenty_times_without_loss);
    change_upstreams(20);
}
