//! Tests of an edge relay with several upstream relays. Some of them do not answer.

use std::{
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use millrace_moq::Parameters;
use millrace_relay_daemon::{
    config::{Config, UpstreamConfig},
    status::Status,
};
use tokio::{net::UdpSocket, task::JoinHandle};
use url::Url;

use super::groups::{expect_group, publish_group};
use super::peer::{TestRelay, at, with_publisher};
use super::site::RelayHost;

/// Time for which relays keep subscriptions without a publisher. It is longer than any test takes.
const LINGER: Duration = Duration::from_secs(600);

/// A forwarder of UDP packets between a client and a relay. Cutting it acts as if the relay's machine had lost power.
pub struct CuttableRoute {
    pub addr: SocketAddr,
    is_cut: Arc<AtomicBool>,
    task: JoinHandle<()>,
}

impl CuttableRoute {
    /// Starts a forwarder. The sockets `front` (to the client) and `back` (to the relay) are bound in the relay's
    /// network namespace.
    fn to(relay: SocketAddr, front: std::net::UdpSocket, back: std::net::UdpSocket) -> Self {
        let addr = front.local_addr().unwrap();
        let open = |socket: std::net::UdpSocket| {
            socket.set_nonblocking(true).unwrap();
            UdpSocket::from_std(socket).unwrap()
        };
        let front = open(front);
        let back = open(back);
        let is_cut = Arc::new(AtomicBool::new(false));
        let cut = Arc::clone(&is_cut);
        let task = tokio::spawn(async move {
            let mut up = vec![0; 65_536];
            let mut down = vec![0; 65_536];
            let mut client = None;
            loop {
                // Packets that the socket does not accept are lost, as on any network path.
                tokio::select! {
                    Ok((len, from)) = front.recv_from(&mut up) => {
                        client = Some(from);
                        if !cut.load(Relaxed) {
                            let _ = back.send_to(&up[..len], relay).await;
                        }
                    }
                    Ok(len) = back.recv(&mut down) => {
                        if let Some(to) = client.filter(|_| !cut.load(Relaxed)) {
                            let _ = front.send_to(&down[..len], to).await;
                        }
                    }
                }
            }
        });
        Self { addr, is_cut, task }
    }

    pub fn cut(&self, is_cut: bool) {
        self.is_cut.store(is_cut, Relaxed);
    }

    /// Returns the URL by which the edge reaches the relay through the forwarder.
    pub fn url(&self, relay: &TestRelay) -> Url {
        let mut url = relay.url();
        url.set_port(Some(self.addr.port())).unwrap();
        url
    }
}

impl Drop for CuttableRoute {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Starts a relay, and a forwarder in front of it.
pub fn relay_behind_a_way() -> (TestRelay, CuttableRoute) {
    relay_with_a_way(|_, _| {})
}

/// Starts a relay with changed settings, and a forwarder in front of it.
pub fn relay_with_a_way(change: impl FnOnce(RelayHost<'_>, &mut Config)) -> (TestRelay, CuttableRoute) {
    let mut sockets = None;
    let relay = TestRelay::at(|host, config| {
        change(host, config);
        let bind = || std::net::UdpSocket::bind((host.v4(), 0)).unwrap();
        sockets = Some(host.enter(|| (bind(), bind())));
    });
    let (front, back) = sockets.unwrap();
    let way = CuttableRoute::to(relay.addr, front, back);
    (relay, way)
}

/// Starts an edge relay with these upstream relays.
pub fn edge_of(urls: Vec<Url>) -> TestRelay {
    TestRelay::at(|host, config| {
        config.listen = vec![SocketAddr::new(host.v4().into(), host.port(1))];
        config.linger = LINGER;
        config.upstream = Some(UpstreamConfig { urls, tls_root: None, token: None, identity: None });
    })
}

/// Returns the port of the relay that the edge has a session with, if it has exactly one upstream session.
pub fn only_upstream(status: &Status) -> Option<u16> {
    let mut upstreams = status.sessions.iter().filter(|session| session.upstream);
    let only = upstreams.next().filter(|_| upstreams.next().is_none())?;
    let known = status.upstream.as_ref()?;
    (known.session == Some(only.id)).then_some(only.remote.port())
}

/// Returns the reason why the edge has no connection to the preferred relay.
fn why_not_the_first(status: &Status) -> Option<&str> {
    let reason = status.upstream.as_ref()?.sources[0].reason.as_str();
    (!reason.is_empty()).then_some(reason)
}

#[tokio::test]
async fn silent_upstream_relay_is_replaced_until_it_answers_again() {
    let (first, way) = relay_behind_a_way();
    let second = TestRelay::start();
    let edge = edge_of(vec![way.url(&first), second.url()]);
    edge.until("the first", |status| only_upstream(status) == Some(way.addr.port())).await;
    let (mut before, _namespace, track) = with_publisher(&first).await;
    let (mut after, _other_namespace, _) = with_publisher(&second).await;
    let mut subscriber = edge.peer().await;
    let waiting = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
    let (subscribed, (_upstream, _)) =
        tokio::join!(subscriber.try_subscribe(&track, waiting), before.accept_subscribe(&track, 1));
    let _request = subscribed.unwrap();
    for group in 0..3 {
        publish_group(&before, 1, group).await;
        expect_group(&mut subscriber, group).await;
    }

    way.cut(true);
    let (_moved, _) = after.accept_subscribe(&track, 2).await;
    edge.until("the second", |status| only_upstream(status) == Some(second.addr.port())).await;
    // The second upstream relay also publishes group 2, which the edge relay already has, as if it had got the group
    // later.
    for group in 2..6 {
        publish_group(&after, 2, group).await;
        if group > 2 {
            expect_group(&mut subscriber, group).await;
        }
    }
    let away =
        edge.until("the reason in the edge's status", |status| why_not_the_first(status).is_some()).await;
    let reason = why_not_the_first(&away).unwrap();
    assert!(reason.contains("did not answer within 5 s"), "{reason}");

    way.cut(false);
    edge.until("both upstream relays to feed the track", |status| status.tracks[0].publishers == 2).await;
    // The groups are published at both upstream relays. The two copies of a group may reach the edge relay in any
    // order.
    for group in 6..8 {
        publish_group(&after, 2, group).await;
        publish_group(&before, 1, group).await;
        expect_group(&mut subscriber, group).await;
    }
    let back = edge
        .until("the first upstream relay to be used again", |status| {
            only_upstream(status) == Some(way.addr.port())
        })
        .await;
    // exact: the edge relay's changes of its upstream are complete: to the second relay and back
    assert_eq!(back.totals.upstream_changes, 2);
    for group in 8..10 {
        publish_group(&before, 1, group).await;
        expect_group(&mut subscriber, group).await;
    }
    subscriber.expect_no_stream().await;
}

#[tokio::test]
async fn subscription_over_a_second_upstream_works_if_the_first_never_answers() {
    let (first, way) = relay_behind_a_way();
    way.cut(true);
    let second = TestRelay::start();
    let edge = edge_of(vec![way.url(&first), second.url()]);
    edge.until("the second", |status| only_upstream(status) == Some(second.addr.port())).await;
    let (mut publisher, _namespace, track) = with_publisher(&second).await;
    let mut subscriber = edge.peer().await;
    let waiting = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
    let (subscribed, (_upstream, _)) =
        tokio::join!(subscriber.try_subscribe(&track, waiting), publisher.accept_subscribe(&track, 1));
    let _request = subscribed.unwrap();
    publish_group(&publisher, 1, 0).await;
    expect_group(&mut subscriber, 0).await;
}

/// The only upstream relay is silent for less than the connection's idle timeout. The same subscription must continue.
#[tokio::test]
async fn subscription_survives_silence_of_the_only_upstream_below_idle_timeout() {
    let (first, way) = relay_behind_a_way();
    let edge = edge_of(vec![way.url(&first)]);
    edge.until("connected", |status| only_upstream(status).is_some()).await;
    let (mut publisher, _namespace, track) = with_publisher(&first).await;
    let mut subscriber = edge.peer().await;
    let waiting = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
    let (subscribed, (_upstream, _)) =
        tokio::join!(subscriber.try_subscribe(&track, waiting), publisher.accept_subscribe(&track, 1));
    let mut request = subscribed.unwrap().0;
    publish_group(&publisher, 1, 0).await;
    expect_group(&mut subscriber, 0).await;
    way.cut(true);
    edge.until("another connection was tried", |status| why_not_the_first(status).is_some()).await;
    way.cut(false);
    publish_group(&publisher, 1, 1).await;
    expect_group(&mut subscriber, 1).await;
    let end = tokio::time::timeout(Duration::ZERO, request.answer()).await;
    assert!(end.is_err(), "the subscription has ended: {end:?}");
    edge.until_largest(at(1, 1)).await;
}
