//! Tests of clusters of relays, which choose routes to publishers, and change them when a relay or a publisher
//! disappears.

use std::{net::SocketAddr, time::Duration};

use millrace_client::{
    session::{Error, Remote, SessionRequest},
    tls::CertificateTrust,
};
use millrace_moq::{
    HopId, HopPath, Message, Namespace, Parameters, TrackName, code,
    message::{PublishNamespace, RequestError, RequestUpdate, SubscribeNamespace},
};
use millrace_relay::access::{AccessRule, Principal};
use millrace_relay_daemon::{
    config::{self, UpstreamConfig},
    status::{ClusterStatus, LookupStatus, RouteStatus, StatusSource as _},
};
use millrace_testkit::async_wait_until;
use nix::sys::signal::Signal;

use super::etcd::Etcd;
use super::groups::{expect_group, publish_group};
use super::peer::{TestPeer, TestRelay, at, patiently, track, with_publisher};
use super::site::{RelayHost, RelaySite, wants_web};

/// Time for which relays keep subscriptions without a publisher. It is longer than any test takes.
const LINGER: Duration = Duration::from_secs(600);

/// Starts a relay of the cluster with this hop ID, which connects to the other relays.
fn relay_with(hop: u16, peers: Vec<config::PeerConfig>, routes: usize) -> TestRelay {
    relay_with_rules(hop, peers, routes, Vec::new())
}

fn relay_with_rules(
    hop: u16,
    peers: Vec<config::PeerConfig>,
    routes: usize,
    rules: Vec<AccessRule>,
) -> TestRelay {
    TestRelay::at(|host, config| {
        join_cluster(host, config, hop, peers, routes);
        config.access.rules = rules;
    })
}

/// Changes the settings to those of a relay of the cluster with this hop ID, which connects to the other relays.
pub fn join_cluster(
    host: RelayHost<'_>,
    config: &mut config::Config,
    hop: u16,
    peers: Vec<config::PeerConfig>,
    routes: usize,
) {
    config.listen = vec![SocketAddr::new(host.v4().into(), host.port(hop))];
    config.linger = LINGER;
    config.upstream = Some(UpstreamConfig { urls: Vec::new(), tls_root: None, token: None, identity: None });
    config.cluster = Some(config::ClusterConfig {
        hop: Some(HopId(hop.into())),
        cost: None,
        peers,
        discovery: None,
        max_routes: routes,
    });
}

pub fn relay(hop: u16, peers: &[&TestRelay]) -> TestRelay {
    relay_with(hop, peers.iter().map(|peer| peer_at(peer, None)).collect(), 100)
}

pub fn peer_at(relay: &TestRelay, cost: Option<u64>) -> config::PeerConfig {
    config::PeerConfig { url: relay.url(), cost, namespaces: Vec::new() }
}

fn namespace(path: &str) -> Namespace {
    Namespace::from_path(path).unwrap()
}

/// Returns the relay's routes to `live/cam`, the preferred one first.
fn routes(relay: &TestRelay) -> Vec<RouteStatus> {
    let routes = relay.server.routes(&namespace("live/cam")).expect("the relay is in no cluster");
    routes.namespaces.into_iter().flat_map(|routed| routed.routes).collect()
}

/// Returns the hop IDs of the relays on a route. The first two entries of the path are left out: the publisher's
/// session, and 0 for a publisher without an identity.
fn relays_on(route: &RouteStatus) -> &[u64] {
    assert_eq!(route.path[1], 0, "the publisher has an identity");
    &route.path[2..]
}

pub async fn until_routes(
    relay: &TestRelay,
    what: &str,
    wanted: impl Fn(&[RouteStatus]) -> bool,
) -> Vec<RouteStatus> {
    async_wait_until(what, || routes(relay), |routes| wanted(routes)).await
}

pub async fn until_cluster(relay: &TestRelay, what: &str, wanted: impl Fn(&ClusterStatus) -> bool) {
    relay.until(what, |status| status.cluster.as_ref().is_some_and(&wanted)).await;
}

/// Subscribes to the track with a timeout, so that the relay waits until it knows a publisher.
pub async fn subscribe(viewer: &TestPeer, track: &TrackName) -> SessionRequest {
    let waiting = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
    viewer.try_subscribe(track, waiting).await.unwrap().0
}

#[tokio::test]
async fn chain_of_relays_carries_a_track_once_and_reports_its_path() {
    let first = relay(1, &[]);
    let middle = relay(2, &[&first]);
    let last = relay(3, &[&middle]);
    let (mut publisher, mut announced, name) = with_publisher(&first).await;
    let known = until_routes(&last, "the route to be known", |routes| !routes.is_empty()).await;
    assert_eq!((relays_on(&known[0]), known[0].cost, known.len()), (&[1, 2][..], 2, 1));

    let mut viewer = last.peer().await;
    let (_subscribed, (_upstream, _)) =
        tokio::join!(subscribe(&viewer, &name), publisher.accept_subscribe(&name, 1));
    publish_group(&publisher, 1, 0).await;
    expect_group(&mut viewer, 0).await;
    // Subscribers at the other relays get the track from the first relay.
    let mut near = middle.peer().await;
    let mut other = last.peer().await;
    let _near = subscribe(&near, &name).await;
    let _other = subscribe(&other, &name).await;
    for viewer in [&mut near, &mut other] {
        expect_group(viewer, 0).await;
    }
    publish_group(&publisher, 1, 1).await;
    for viewer in [&mut viewer, &mut near, &mut other] {
        expect_group(viewer, 1).await;
        viewer.expect_no_stream().await;
    }
    assert!(publisher.requests.try_recv().is_err(), "the publisher was asked once");
    for relay in [&first, &middle, &last] {
        relay.until("one source", |status| status.tracks[0].publishers == 1).await;
    }

    // The middle relay receives the track already, so it announces a route to the track with cost 0.
    let warm = |routes: &[RouteStatus]| routes.iter().any(|route| route.cost == 1 && route.carried);
    until_routes(&last, "the route to the copy", warm).await;
    announced.cancel();
    for relay in [&first, &middle, &last] {
        until_routes(relay, "no stale route to be left", <[RouteStatus]>::is_empty).await;
    }
    let refused = other.try_subscribe(&track("live/other", "video"), Parameters::default()).await.err();
    assert_eq!(refused.map(|refused| refused.code), Some(code::Request::DOES_NOT_EXIST));
}

/// Starts a relay of the cluster with this hop ID, which finds the other relays through etcd.
fn relay_found_by(etcd: &Etcd, hop: u16, region: &str) -> TestRelay {
    relay_at(etcd, hop, region, None)
}

/// Starts a relay of the cluster that looks up namespaces in etcd, and ends sessions that nobody needs after a second.
fn relay_with_lookups(etcd: &Etcd, hop: u16) -> TestRelay {
    relay_at(etcd, hop, "north", Some(config::LookupConfig { idle: Duration::from_secs(1), rate: 100 }))
}

fn relay_at(etcd: &Etcd, hop: u16, region: &str, lookup: Option<config::LookupConfig>) -> TestRelay {
    TestRelay::at(|host, config| {
        // The relay stores its URL in etcd before it listens, so the test must choose the port, and on loopback the
        // address as well.
        let addr = match host.port(hop) {
            0 => SocketAddr::new(Etcd::address().into(), 30_000 + hop),
            port => SocketAddr::new(host.v4().into(), port),
        };
        config.listen = vec![addr];
        config.linger = LINGER;
        config.upstream =
            Some(UpstreamConfig { urls: Vec::new(), tls_root: None, token: None, identity: None });
        let url =
            format!("{}://{}", if wants_web() { "https" } else { "moqt" }, config.listen[0]).parse().unwrap();
        config.cluster = Some(config::ClusterConfig {
            hop: Some(HopId(hop.into())),
            cost: None,
            peers: Vec::new(),
            discovery: Some(config::DiscoveryConfig {
                store: config::DiscoveryStore::Etcd {
                    endpoints: vec![etcd.endpoint.clone()],
                    prefix: "/test/".to_owned(),
                    lease: Duration::from_secs(2),
                    user: None,
                },
                url: Some(url),
                region: Some(region.to_owned()),
                region_cost: 7,
                namespaces: Vec::new(),
                lookup,
                tls_root: None,
                identity: None,
            }),
            max_routes: 100,
        });
    })
}

/// Returns the number of relays whose URL is earlier in alphabetical order than that of `relay`. `relay` connects to
/// these relays.
fn earlier_than(relay: &TestRelay, all: &[&TestRelay]) -> usize {
    all.iter().filter(|other| other.url().as_str() < relay.url().as_str()).count()
}

/// Reports whether the relay has found `count` relays to connect to, and has a session with each.
fn is_up(cluster: &ClusterStatus, count: usize) -> bool {
    cluster.peers.len() == count && cluster.peers.iter().all(|peer| peer.found && peer.session.is_some())
}

#[tokio::test]
async fn relays_find_each_other_through_etcd_and_survive_its_outage() {
    // The test setup may move this thread to another network namespace, and etcd must run in that namespace, so the
    // setup is made first.
    let _site = RelaySite::of_this_test();
    let Some(etcd) = Etcd::start() else { return };
    let first = relay_found_by(&etcd, 1, "north");
    let near = relay_found_by(&etcd, 2, "north");
    let far = relay_found_by(&etcd, 3, "south");
    // Of two relays, the relay whose URL is later in alphabetical order connects to the other one.
    let all = [&first, &near, &far];
    for relay in all {
        until_cluster(relay, "etcd to name both other relays", |cluster| {
            let discovery = cluster.discovery.as_ref().expect("a store");
            discovery.found == 2 && discovery.registered
        })
        .await;
        until_cluster(relay, "a session with each relay that this one connects to", |cluster| {
            is_up(cluster, earlier_than(relay, &all))
        })
        .await;
    }
    let is_far = |cluster: &ClusterStatus| cluster.links.iter().all(|link| link.cost == 7);
    until_cluster(&far, "a route from another region to cost more", is_far).await;

    let (mut publisher, _announced, name) = with_publisher(&first).await;
    let mut viewer = far.peer().await;
    let (_subscribed, (_upstream, _)) =
        tokio::join!(subscribe(&viewer, &name), publisher.accept_subscribe(&name, 1));
    publish_group(&publisher, 1, 0).await;
    expect_group(&mut viewer, 0).await;

    // Sessions and routes stay when etcd is unreachable. Only new relays are not found.
    etcd.signal(Signal::SIGSTOP);
    until_cluster(&far, "etcd to be unreachable", |cluster| {
        cluster.discovery.as_ref().is_some_and(|discovery| !discovery.error.is_empty())
    })
    .await;
    publish_group(&publisher, 1, 1).await;
    expect_group(&mut viewer, 1).await;
    until_cluster(&far, "the relay's sessions to stay", |cluster| is_up(cluster, earlier_than(&far, &all)))
        .await;
    let late = relay_found_by(&etcd, 4, "north");
    etcd.signal(Signal::SIGCONT);
    until_cluster(&late, "a session with each other relay", |cluster| {
        is_up(cluster, earlier_than(&late, &all))
    })
    .await;

    // A relay that drains deletes its record in etcd, and no other relay connects to it any more.
    near.server.drain().await;
    drop(near);
    let left = [&first, &far, &late];
    for relay in left {
        until_cluster(relay, "the relay that left is forgotten", |cluster| {
            let discovery = cluster.discovery.as_ref().expect("a store");
            discovery.found == 2 && is_up(cluster, earlier_than(relay, &left))
        })
        .await;
    }
    publish_group(&publisher, 1, 2).await;
    expect_group(&mut viewer, 2).await;
}

async fn until_lookup(relay: &TestRelay, what: &str, wanted: impl Fn(&LookupStatus) -> bool) {
    let is_so = |cluster: &ClusterStatus| {
        let discovery = cluster.discovery.as_ref().expect("a store");
        discovery.registered && discovery.found == 2 && wanted(&discovery.lookup.expect("lookups"))
    };
    until_cluster(relay, what, is_so).await;
}

/// Waits until the relay has this many sessions with clients and relays.
async fn until_sessions(relay: &TestRelay, what: &str, count: usize) {
    relay.until(what, |status| status.sessions.len() == count).await;
}

#[tokio::test]
async fn relays_with_lookups_connect_on_demand_and_outlive_etcd_and_publisher() {
    let _site = RelaySite::of_this_test();
    let Some(etcd) = Etcd::start() else { return };
    let [origin, other, edge] = [11, 12, 13].map(|hop| relay_with_lookups(&etcd, hop));
    for relay in [&origin, &other, &edge] {
        until_lookup(relay, "etcd to name both other relays", |lookup| lookup.followed).await;
    }
    let mut viewer = edge.peer().await;
    let name = track("live/cam", "video");
    let refused =
        viewer.try_subscribe(&name, Parameters::default()).await.err().expect("nobody publishes it");
    assert_eq!(refused.code, code::Request::DOES_NOT_EXIST);

    let (mut publisher, _announced, _) = with_publisher(&origin).await;
    let (subscribed, (_upstream, _)) =
        tokio::join!(subscribe(&viewer, &name), publisher.accept_subscribe(&name, 1));
    let mut second = edge.peer().await;
    let also = subscribe(&second, &name).await;
    publish_group(&publisher, 1, 0).await;
    for viewer in [&mut viewer, &mut second] {
        expect_group(viewer, 0).await;
    }
    assert!(publisher.requests.try_recv().is_err(), "the publisher was asked once");
    // There is one session between relays: from the viewers' relay to the publisher's.
    until_cluster(&edge, "a session on demand", |cluster| {
        let peer = cluster.peers.first().expect("a peer");
        cluster.peers.len() == 1 && peer.on_demand && peer.session.is_some()
    })
    .await;
    until_sessions(&edge, "two viewers and a relay", 3).await;
    until_sessions(&origin, "the publisher and a relay", 2).await;
    until_sessions(&other, "no session", 0).await;
    until_lookup(&origin, "one registration", |lookup| lookup.registered == 1).await;
    let said = edge.server.routes(&namespace("live/cam")).and_then(|routes| routes.lookup).expect("a lookup");
    assert!(said.known && said.registered.len() == 1 && said.registered[0].usable, "{said:?}");
    assert!(said.tried.len() == 1 && said.tried[0].failure.is_empty(), "{said:?}");

    // The session ends when nobody needs it.
    drop((subscribed, also));
    [viewer, second].iter().for_each(|viewer| viewer.session.close(code::Session::NO_ERROR, ""));
    edge.until("the session to end unneeded", |status| status.totals.sessions_unneeded == 1).await;
    until_sessions(&origin, "the publisher alone", 1).await;

    // Without etcd, a namespace that was looked up is found, and another relay cannot find any.
    etcd.signal(Signal::SIGSTOP);
    let mut viewer = edge.peer().await;
    let audio = track("live/cam", "audio");
    let (_subscribed, (_upstream, _)) =
        tokio::join!(subscribe(&viewer, &audio), publisher.accept_subscribe(&audio, 2));
    let blind = other.peer().await;
    let refused = blind.try_subscribe(&audio, Parameters::default()).await.err().expect("etcd is away");
    assert_eq!(refused.code, code::Request::INTERNAL_ERROR);
    assert!(refused.reason.contains("the discovery store does not answer"), "{}", refused.reason);
    publish_group(&publisher, 2, 0).await;
    expect_group(&mut viewer, 0).await;
    etcd.signal(Signal::SIGCONT);
    let mut late = other.peer().await;
    let _late = subscribe(&late, &audio).await;
    publish_group(&publisher, 2, 1).await;
    for group in 0..2 {
        expect_group(&mut late, group).await;
    }
    expect_group(&mut viewer, 1).await;
    assert!(publisher.requests.try_recv().is_err(), "the publisher was asked once");

    // The publisher goes to a new relay. Its namespace is registered there, and the edge's subscription goes on.
    publisher.session.close(code::Session::NO_ERROR, "");
    let new = relay_with_lookups(&etcd, 14);
    let (mut publisher, _announced, _) = with_publisher(&new).await;
    let (_upstream, _) = publisher.accept_subscribe(&audio, 3).await;
    publish_group(&publisher, 3, 2).await;
    expect_group(&mut viewer, 2).await;
    until_sessions(&edge, "a viewer and the relay of the publisher", 2).await;
}

/// Starts three relays: the indirect route costs 2, and the direct one 10.
async fn triangle() -> (TestRelay, TestRelay, TestRelay) {
    let first = relay(1, &[]);
    let middle = relay(2, &[&first]);
    let last = relay_with(3, vec![peer_at(&first, Some(10)), peer_at(&middle, None)], 100);
    until_cluster(&last, "both sessions", |cluster| cluster.links.len() == 2).await;
    (first, middle, last)
}

#[tokio::test]
async fn dead_relay_is_bypassed_without_duplicates() {
    let (first, middle, last) = triangle().await;
    let (mut publisher, _announced, name) = with_publisher(&first).await;
    let known = until_routes(&last, "both routes to be known", |routes| routes.len() == 2).await;
    assert_eq!(known.iter().map(relays_on).collect::<Vec<_>>(), [&[1, 2][..], &[1]]);
    assert_eq!(known.iter().map(|route| route.cost).collect::<Vec<_>>(), [2, 10]);

    let mut viewer = last.peer().await;
    let (subscribed, (_upstream, _)) =
        tokio::join!(subscribe(&viewer, &name), publisher.accept_subscribe(&name, 1));
    let mut request = subscribed;
    for group in 0..3 {
        publish_group(&publisher, 1, group).await;
        expect_group(&mut viewer, group).await;
    }
    until_routes(&last, "the route through the middle relay to be used", |routes| routes[0].carried).await;
    middle.until("the middle relay to have the track", |status| status.tracks.len() == 1).await;

    middle.server.stop().await;
    let left = until_routes(&last, "the direct route", |routes| routes.len() == 1 && routes[0].carried).await;
    assert_eq!(relays_on(&left[0]), [1]);
    for group in 3..6 {
        publish_group(&publisher, 1, group).await;
        expect_group(&mut viewer, group).await;
    }
    viewer.expect_no_stream().await;
    let end = tokio::time::timeout(Duration::ZERO, request.answer()).await;
    assert!(end.is_err(), "the subscription has ended: {end:?}");
    last.until_largest(at(5, 1)).await;
}

/// A relay that drains sends GOAWAY first. Subscriptions at other relays move to another route while it still forwards
/// their tracks.
#[tokio::test]
async fn subscriptions_move_to_another_route_before_a_draining_relay_ends() {
    let (first, middle, last) = triangle().await;
    let (mut publisher, _announced, name) = with_publisher(&first).await;
    until_routes(&last, "both routes to be known", |routes| routes.len() == 2).await;
    let mut viewer = last.peer().await;
    let (_subscribed, (_upstream, _)) =
        tokio::join!(subscribe(&viewer, &name), publisher.accept_subscribe(&name, 1));
    publish_group(&publisher, 1, 0).await;
    expect_group(&mut viewer, 0).await;
    let leaving = tokio::spawn({
        let server = std::sync::Arc::clone(&middle.server);
        async move { server.drain().await }
    });
    let moved = |routes: &[RouteStatus]| routes.iter().any(|route| route.carried && relays_on(route) == [1]);
    until_routes(&last, "the direct route", moved).await;
    for group in 1..4 {
        publish_group(&publisher, 1, group).await;
        expect_group(&mut viewer, group).await;
    }
    patiently(leaving).await.unwrap();
    publish_group(&publisher, 1, 4).await;
    expect_group(&mut viewer, 4).await;
    viewer.expect_no_stream().await;
    last.until("it moved", |status| status.totals.reroutes >= 1).await;
}

/// Two relays that have routes through each other lose the publisher at the same time. Neither may keep a stale route
/// through the other.
#[tokio::test]
async fn lost_publisher_leaves_no_stale_routes_or_loops() {
    let first = relay(1, &[]);
    let second = relay(2, &[&first]);
    let third = relay(3, &[&first, &second]);
    let (mut publisher, mut announced, name) = with_publisher(&first).await;
    for relay in [&second, &third] {
        until_routes(relay, "two ways", |routes| routes.len() == 2).await;
    }
    let viewer = second.peer().await;
    let other = third.peer().await;
    let (_subscribed, (_upstream, _)) =
        tokio::join!(subscribe(&viewer, &name), publisher.accept_subscribe(&name, 1));
    let _also = subscribe(&other, &name).await;
    announced.cancel();
    for relay in [&first, &second, &third] {
        until_routes(relay, "no route", <[RouteStatus]>::is_empty).await;
    }
    // A relay that was asked for a track by another relay must not ask that relay back.
    let refused = viewer.try_subscribe(&track("live/cam", "audio"), Parameters::default()).await.err();
    assert_eq!(refused.map(|refused| refused.code), Some(code::Request::DOES_NOT_EXIST));
}

#[tokio::test]
async fn announced_namespaces_outside_a_peers_allow_list_are_refused() {
    let first = relay(1, &[]);
    let allowed = vec!["live/*".parse().unwrap()];
    let edge = relay_with(2, vec![config::PeerConfig { namespaces: allowed, ..peer_at(&first, None) }], 100);
    let publisher = first.peer().await;
    // The edge asks for namespaces below `live`, and its pattern allows one more field.
    let _elsewhere = publisher.publish_namespace("other/cam").await;
    let _below = publisher.publish_namespace("live/hall/cam").await;
    let _live = publisher.publish_namespace("live/cam").await;
    until_routes(&edge, "the allowed route", |routes| routes.len() == 1).await;
    edge.until("one announcement to be refused", |status| status.totals.routes_refused == 1).await;
    for path in ["other/cam", "live/hall/cam"] {
        let other = edge.server.routes(&namespace(path)).unwrap();
        assert!(other.namespaces.is_empty(), "{other:?}");
    }
}

#[tokio::test]
async fn relay_learns_routes_from_a_peer_whose_rules_allow_only_their_prefix() {
    let rule = AccessRule {
        namespace: "live/**".parse().unwrap(),
        publish: vec![Principal::Anyone],
        subscribe: vec![Principal::Anyone],
        path: None,
        authority: None,
    };
    let first = relay_with_rules(1, Vec::new(), 100, vec![rule]);
    let allowed = ["live/a/**", "live/**", "live/*/b"].map(|pattern| pattern.parse().unwrap()).to_vec();
    let edge = relay_with(2, vec![config::PeerConfig { namespaces: allowed, ..peer_at(&first, None) }], 100);
    let (mut publisher, _announced, name) = with_publisher(&first).await;
    until_routes(&edge, "the route", |routes| routes.len() == 1).await;
    let mut viewer = edge.peer().await;
    let (_subscribed, (_upstream, _)) =
        tokio::join!(subscribe(&viewer, &name), publisher.accept_subscribe(&name, 1));
    publish_group(&publisher, 1, 0).await;
    expect_group(&mut viewer, 0).await;
}

/// Connects a peer that claims to be a relay, with hop ID 77.
async fn claimant(relay: &TestRelay) -> TestPeer {
    let remote = Remote { hop: Some(HopId(77)), ..Remote::new(relay.url(), CertificateTrust::Anyone) };
    TestPeer::connect_to(&remote, quinn::EndpointConfig::default()).await
}

fn path(hops: &[u64]) -> HopPath {
    let first = HopPath::new(HopId(hops[0]));
    hops[1..].iter().fold(first, |path, hop| path.then(HopId(*hop)).unwrap())
}

fn by(hops: &[u64], cost: u64) -> Parameters {
    Parameters { hop_path: Some(path(hops)), route_cost: Some(cost), ..Parameters::default() }
}

async fn announce(peer: &TestPeer, at: &str, parameters: Parameters) -> Result<SessionRequest, RequestError> {
    let request_id = peer.session.next_request_id();
    let message = PublishNamespace { request_id, namespace: namespace(at), parameters };
    let mut request = peer.session.request(message).await.unwrap();
    match patiently(request.answer()).await {
        Ok(Message::RequestOk(_)) => Ok(request),
        Err(Error::Refused(refused)) => Err(refused),
        other => panic!("no answer to PUBLISH_NAMESPACE: {other:?}"),
    }
}

#[tokio::test]
async fn peer_relays_routes_are_limited_and_changed_by_request_update() {
    let relay = relay_with(9, Vec::new(), 3);
    let peer = claimant(&relay).await;
    let mut request = announce(&peer, "live/cam", by(&[5, 77], 3)).await.unwrap();
    let [route] = &routes(&relay)[..] else { panic!("one route") };
    assert_eq!((&route.path[..], route.cost), (&[5, 77][..], 4));
    let update = |parameters| {
        let request_id = peer.session.next_request_id();
        RequestUpdate { request_id, parameters }
    };
    let cheaper = Parameters { route_cost: Some(0), ..Parameters::default() };
    request.send(update(cheaper)).await.unwrap();
    assert!(matches!(patiently(request.next()).await, Ok(Some(Message::RequestOk(_)))));
    assert_eq!(routes(&relay)[0].cost, 1);
    // The path of the new route contains this relay's own hop ID, so the relay must drop the route.
    let back = Parameters { hop_path: Some(path(&[5, 9, 77])), ..Parameters::default() };
    request.send(update(back)).await.unwrap();
    assert!(matches!(patiently(request.next()).await, Ok(Some(Message::RequestOk(_)))));
    assert!(routes(&relay).is_empty());
    let _more = [
        announce(&peer, "live/1", by(&[5, 77], 0)).await.unwrap(),
        announce(&peer, "live/2", by(&[5, 77], 0)).await.unwrap(),
        announce(&peer, "live/3", by(&[5, 77], 0)).await.unwrap(),
    ];
    let refused = announce(&peer, "live/4", by(&[5, 77], 0)).await.err();
    assert_eq!(refused.map(|refused| refused.code), Some(code::Request::EXCESSIVE_LOAD));
    until_cluster(&relay, "its routes", |cluster| (cluster.namespaces, cluster.links.len()) == (3, 1)).await;
    peer.session.close(code::Session::NO_ERROR, "");
    until_cluster(&relay, "all routes to end with the session", |cluster| cluster.namespaces == 0).await;
}

#[tokio::test]
async fn hop_path_mismatch_with_the_cluster_extension_ends_the_session() {
    let in_cluster = relay(9, &[]);
    let alone = TestRelay::start();
    for (relay, claims, parameters) in [
        (&in_cluster, true, Parameters::default()),
        (&in_cluster, false, by(&[5, 77], 0)),
        (&alone, true, by(&[5, 77], 0)),
    ] {
        let peer = if claims { claimant(relay).await } else { relay.peer().await };
        let request_id = peer.session.next_request_id();
        let message = PublishNamespace { request_id, namespace: namespace("live/cam"), parameters };
        let _request = peer.session.request(message).await.unwrap();
        peer.ended().await;
        relay.until("the loop to be counted", |status| status.drops["protocol_violation"] >= 1).await;
    }
}

/// NAMESPACE to a peer relay contains the route's path. Routes that pass the peer itself are left out.
#[tokio::test]
async fn peer_relay_gets_added_and_removed_routes_except_those_through_itself() {
    let relay = relay(9, &[]);
    let mut peer = claimant(&relay).await;
    let _own = announce(&peer, "live/own", by(&[5, 77], 0)).await.unwrap();
    let request_id = peer.session.next_request_id();
    let watch =
        SubscribeNamespace { request_id, prefix: namespace("live"), parameters: Parameters::default() };
    let mut request = peer.session.request(watch).await.unwrap();
    assert!(matches!(patiently(request.answer()).await, Ok(Message::RequestOk(_))));
    let (_publisher, mut announced, _) = with_publisher(&relay).await;
    let Ok(Some(Message::Namespace(found))) = patiently(request.next()).await else { panic!("NAMESPACE") };
    let parameters = found.parameters.expect("the path of the route");
    let told = parameters.hop_path.unwrap();
    assert_eq!((found.suffix, parameters.route_cost), (namespace("cam"), None));
    assert!(told.has_unnamed() && told.sender() == HopId(9) && told.hops().len() == 3, "{told}");
    announced.cancel();
    let done = patiently(request.next()).await;
    assert!(
        matches!(&done, Ok(Some(Message::NamespaceDone(done))) if done.suffix == namespace("cam")),
        "{done:?}"
    );
    // A client that sent no hop ID, and therefore is no relay, gets NAMESPACE without parameters.
    let client = relay.peer().await;
    let request_id = client.session.next_request_id();
    let watch =
        SubscribeNamespace { request_id, prefix: namespace("live"), parameters: Parameters::default() };
    let mut plain = client.session.request(watch).await.unwrap();
    assert!(matches!(patiently(plain.answer()).await, Ok(Message::RequestOk(_))));
    let Ok(Some(Message::Namespace(found))) = patiently(plain.next()).await else { panic!("NAMESPACE") };
    assert_eq!((found.suffix, found.parameters), (namespace("own"), None));
    assert!(peer.requests.try_recv().is_err(), "the relay asks the peer for nothing");
}

/// A peer subscribes to a namespace that it announces itself. It must not get its own media back.
#[tokio::test]
async fn peer_does_not_get_its_own_media_back() {
    let relay = relay(9, &[]);
    let mut peer = claimant(&relay).await;
    let _announced = announce(&peer, "live/cam", by(&[5, 77], 0)).await.unwrap();
    let name = track("live/cam", "video");
    let refused = peer.try_subscribe(&name, Parameters::default()).await.err();
    assert_eq!(refused.map(|refused| refused.code), Some(code::Request::DOES_NOT_EXIST));
    // Clients other than this peer do get objects by the route through the peer.
    let viewer = relay.peer().await;
    let (_subscribed, (_upstream, _)) =
        tokio::join!(subscribe(&viewer, &name), peer.accept_subscribe(&name, 1));
    let refused = peer.try_subscribe(&name, Parameters::default()).await.err();
    assert_eq!(refused.map(|refused| refused.code), Some(code::Request::DOES_NOT_EXIST));
}

#[tokio::test]
async fn relays_with_the_same_hop_id_refuse_each_other() {
    let first = relay(5, &[]);
    let second = TestRelay::at(|host, config| {
        config.listen = vec![SocketAddr::new(host.v4().into(), host.port(6))];
        config.upstream =
            Some(UpstreamConfig { urls: Vec::new(), tls_root: None, token: None, identity: None });
        let peers = vec![peer_at(&first, None)];
        config.cluster = Some(config::ClusterConfig {
            hop: Some(HopId(5)),
            cost: None,
            peers,
            discovery: None,
            max_routes: 100,
        });
    });
    let is_refused = |cluster: &ClusterStatus| cluster.peers.iter().any(|peer| !peer.reason.is_empty());
    until_cluster(&second, "the session ended", is_refused).await;
    until_cluster(&first, "no relay", |cluster| cluster.links.is_empty()).await;
}
