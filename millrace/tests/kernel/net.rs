//! A relay in a lab that forwards in the kernel, and the media that is played through it.

use std::{
    cell::Cell,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use millrace_lab::lab::{Impairment, Lab, LabNode, LinkDirection, Topology};
use millrace_moq::TrackName;
use millrace_relay_daemon::{
    config::{Config, EngineChoice, GateChoice, Settings},
    server::{RelayIdentity, RunningServer},
    status::{RelaySessionStatus, Status, StatusSource},
    tls,
};
use millrace_testkit::{wait_for, wait_until};
use nix::unistd::{Uid, setfsuid};
use tokio::{runtime::Runtime, time};

use crate::{
    peer::{PATIENCE, PeerStreamEnd, TestPeer, header, track},
    site,
};

pub const PORT: u16 = 4443;
pub const PUBLISHER_LINK: &str = "pub-relay";
/// Track alias of the publisher's only track.
pub const ALIAS: u64 = 7;

/// The transport of a peer's session.
#[derive(Clone, Copy, Debug)]
pub enum PeerKind {
    Quic,
    Web,
}

/// A relay that forwards in the kernel, in an emulated network with a host for each peer.
pub struct KernelNetwork {
    pub runtime: Runtime,
    pub server: Arc<RunningServer>,
    pub lab: Lab,
    /// The configuration that the relay was started with.
    pub config: Config,
}

impl KernelNetwork {
    pub fn new(subscribers: usize, emulate: bool, change: impl FnOnce(&mut Config)) -> Self {
        let mut topology = Topology::standard(1, subscribers);
        topology.netem = false;
        topology.links.iter_mut().for_each(|link| link.emulate = emulate);
        Self::from_topology(&topology, change)
    }

    pub fn from_topology(topology: &Topology, change: impl FnOnce(&mut Config)) -> Self {
        Self::owned_by(topology, 0, change)
    }

    /// Starts a relay whose sockets belong to this user.
    pub fn owned_by(topology: &Topology, user: u32, change: impl FnOnce(&mut Config)) -> Self {
        let lab = Lab::new(topology).unwrap();
        let runtime = Runtime::new().unwrap();
        let config = configure(&lab, change);
        let server = start(&lab, &runtime, config.clone(), user).unwrap();
        Self { runtime, server: Arc::new(server), lab, config }
    }

    pub fn relay(&self) -> &LabNode {
        self.lab.node("relay").unwrap()
    }

    pub fn peer(&self, node: &str) -> TestPeer {
        self.peer_at(node, self.relay().addr_v4().into())
    }

    /// Connects a peer on the host `node` of the emulated network to this address of the relay.
    pub fn peer_at(&self, node: &str, ip: IpAddr) -> TestPeer {
        self.peer_from(node, ip, quinn::EndpointConfig::default())
    }

    pub fn peer_from(&self, node: &str, ip: IpAddr, endpoint: quinn::EndpointConfig) -> TestPeer {
        self.connect(node, format!("moqt://{}", SocketAddr::new(ip, PORT)), endpoint)
    }

    /// Connects a peer over QUIC or WebTransport.
    pub fn peer_by(&self, node: &str, by: PeerKind) -> TestPeer {
        let scheme = match by {
            PeerKind::Quic => "moqt",
            PeerKind::Web => "https",
        };
        let url = format!("{scheme}://{}", SocketAddr::new(self.relay().addr_v4().into(), PORT));
        self.connect(node, url, quinn::EndpointConfig::default())
    }

    fn connect(&self, node: &str, url: String, endpoint: quinn::EndpointConfig) -> TestPeer {
        let url = url.parse().unwrap();
        let connect = || self.runtime.block_on(TestPeer::connect_from(url, endpoint));
        self.lab.node(node).unwrap().enter(connect).unwrap()
    }

    pub fn impair(&self, link: &str, what: &str) {
        let impairment = Impairment::parse(what).unwrap();
        for direction in [LinkDirection::Forward, LinkDirection::Backward] {
            self.lab.link(link).unwrap().set(direction, impairment.clone()).unwrap();
        }
    }

    pub fn status(&self) -> Status {
        self.server.status()
    }

    /// Waits until the relay's status is as wanted, and returns it. The runtime keeps running meanwhile.
    #[track_caller]
    pub fn until(&self, what: &str, wanted: impl Fn(&Status) -> bool) -> Status {
        wait_until(what, || self.status(), wanted)
    }

    /// Waits until all sent data is acknowledged, and returns the status. After that, no counter of media changes any
    /// more.
    #[track_caller]
    pub fn settled(&self) -> Status {
        self.until("acknowledgements of everything", is_quiet);
        // The relay adds the kernel's packets to its totals only in the next status, so the status is read again.
        self.status() // exact: the packet counts are final, since everything sent has been acknowledged
    }

    /// Runs `work` to its end on the runtime of the relay.
    pub fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }
}

/// Returns a configuration with which the relay forwards in the kernel on all interfaces of its node, as `change`
/// modifies it.
pub fn configure(lab: &Lab, change: impl FnOnce(&mut Config)) -> Config {
    let node = lab.node("relay").unwrap();
    let addr = SocketAddr::new(node.addr_v4().into(), PORT);
    // How late media is depends on the machine's load, so no media is dropped for being late.
    let max_delay = Some("off".parse().unwrap());
    let listen = Some(vec![addr.into()]);
    let settings = Settings { listen, public: Some(true), max_delay, ..Settings::default() };
    let mut config = Config::new(settings, None).unwrap();
    config.http = None;
    config.engine = EngineChoice::Kernel;
    config.gate = GateChoice::Off;
    config.interfaces = node.interfaces().iter().map(|interface| interface.device.clone()).collect();
    change(&mut config);
    config
}

pub fn start(
    lab: &Lab,
    runtime: &Runtime,
    config: Config,
    user: u32,
) -> Result<RunningServer, millrace_relay_daemon::server::RelayStartError> {
    start_on(lab.node("relay").unwrap(), runtime, config, user)
}

pub fn start_on(
    node: &LabNode,
    runtime: &Runtime,
    config: Config,
    user: u32,
) -> Result<RunningServer, millrace_relay_daemon::server::RelayStartError> {
    site::log();
    let certificate = tls::identity(&config.identity, vec!["localhost".into()]).unwrap();
    let key_log =
        config.key_log_file.as_ref().map(|path| Arc::new(tls::KeyLogFile::open(path).unwrap()) as _);
    let identity = RelayIdentity { key_log, ..RelayIdentity::from_certificate(certificate) };
    node.enter(|| {
        // setfsuid applies to this thread only, which ends here.
        setfsuid(Uid::from_raw(user));
        let _inside = runtime.enter();
        RunningServer::start(config, identity)
    })
    .unwrap()
}

/// Waits until `reached` is true, while the runtime keeps running.
#[track_caller]
pub fn until(what: &str, reached: impl Fn() -> bool) {
    wait_for(what, reached);
}

/// Reports whether no session has data to be sent or acknowledged.
pub fn is_quiet(status: &Status) -> bool {
    status.sessions.iter().all(|session| session.pending == 0 && session.in_flight == 0)
}

/// The groups of a track that a test publishes, and what the subscribers must receive. The publisher waits until
/// subscribers have received earlier objects, so that it is never far ahead of a relay that gets little CPU time: the
/// kernel sends only objects that arrive after the relay has handed a stream over.
pub struct GroupStream {
    pub groups: u64,
    pub objects: u64,
    pub bytes: usize,
    pub pause: Duration,
    /// Largest number of published objects that subscribers have not received yet; `None` is any number.
    pub ahead: Option<u64>,
}

/// Largest number of objects of [`SHOW`] that the publisher has sent and subscribers have not received. Their packets
/// fit into the smallest congestion window.
pub const AHEAD: u64 = 8;
pub const SHOW: GroupStream =
    GroupStream { groups: 10, objects: 50, bytes: 1000, pause: Duration::from_millis(2), ahead: Some(AHEAD) };

/// Number of objects at the beginning of a group that are sent one by one, because the relay opens the group's streams
/// for them.
const ONE_BY_ONE: u64 = 4;

/// Smallest number of packets of each group of a [`GroupStream`] that the kernel must send. It usually sends most of a
/// group, and on a busy machine at least this number.
pub const OF_A_GROUP: u64 = 5;

/// Number of objects that have begun to arrive at each subscriber.
pub struct Arrived(Vec<Cell<u64>>);

impl Arrived {
    pub fn new(subscribers: usize) -> Self {
        Self((0..subscribers).map(|_| Cell::new(0)).collect())
    }

    pub fn at(&self, subscriber: usize) -> impl Fn(usize) {
        let cell = &self.0[subscriber];
        move |more| cell.set(cell.get() + more as u64)
    }

    /// Waits until every subscriber has `count` objects.
    pub async fn wait(&self, count: u64) {
        let missing = || self.0.iter().any(|arrived| arrived.get() < count);
        let arrived = async {
            while missing() {
                // exact: the pause between two checks for objects; with a longer pause the publisher would fall behind
                time::sleep(Duration::from_micros(200)).await;
            }
        };
        time::timeout(PATIENCE, arrived).await.unwrap_or_else(|_| panic!("{count} objects do not arrive"));
    }
}

impl GroupStream {
    /// Publishes all groups, and calls `between` before each group.
    pub async fn play(
        &self,
        publisher: &TestPeer,
        subscribers: Vec<TestPeer>,
        between: impl FnMut(u64),
    ) -> Vec<TestPeer> {
        let arrived = Arrived::new(subscribers.len());
        let receiving =
            subscribers.into_iter().enumerate().map(|(at, peer)| self.receive(peer, arrived.at(at)));
        tokio::join!(self.publish(publisher, &arrived, between), futures_join(receiving.collect())).1
    }

    async fn publish(&self, publisher: &TestPeer, arrived: &Arrived, mut between: impl FnMut(u64)) {
        for group in 0..self.groups {
            between(group);
            let mut subgroup = publisher.subgroup(header(ALIAS, group)).await;
            for id in 0..self.objects {
                subgroup.object(id, self.bytes).await;
                if let Some(most) = self.ahead {
                    let ahead = if id < ONE_BY_ONE { 0 } else { most };
                    arrived.wait((group * self.objects + id + 1).saturating_sub(ahead)).await;
                }
                time::sleep(self.pause).await; // exact: this pause sets the publisher's sending rate
            }
            subgroup.finish();
        }
    }

    /// Receives every group, and checks that each is complete. Streams may arrive in any order.
    async fn receive(&self, mut subscriber: TestPeer, tell: impl Fn(usize)) -> TestPeer {
        let mut groups = Vec::new();
        for _ in 0..self.groups {
            let received = subscriber.next_subgroup().await;
            groups.push(received.header.group);
            assert_eq!(received.all_telling(&tell).await, ((0..self.objects).collect(), PeerStreamEnd::Fin));
        }
        groups.sort_unstable();
        assert_eq!(groups, (0..self.groups).collect::<Vec<_>>());
        subscriber
    }
}

/// A publisher, and the subscribers of its only track, all of them connected.
pub struct Cast {
    pub publisher: TestPeer,
    pub subscribers: Vec<TestPeer>,
    pub _requests: Vec<millrace_client::session::SessionRequest>,
}

pub fn cast(net: &KernelNetwork, names: &[&str]) -> Cast {
    introduce(net, net.peer("pub"), names.iter().map(|name| net.peer(name)).collect())
}

pub fn cast_by(net: &KernelNetwork, publisher: PeerKind, subscribers: &[(&str, PeerKind)]) -> Cast {
    let subscribers = subscribers.iter().map(|(name, by)| net.peer_by(name, *by)).collect();
    introduce(net, net.peer_by("pub", publisher), subscribers)
}

pub fn introduce(net: &KernelNetwork, mut publisher: TestPeer, subscribers: Vec<TestPeer>) -> Cast {
    let track: TrackName = track("live/cam", "video");
    let requests = net.run(async {
        let mut requests = vec![publisher.publish_namespace("live/cam").await];
        let mut all = subscribers.iter();
        let first = all.next().unwrap();
        let (one, upstream) =
            tokio::join!(first.subscribe(&track), publisher.accept_subscribe(&track, ALIAS));
        requests.extend([one.0, upstream.0]);
        for subscriber in all {
            requests.push(subscriber.subscribe(&track).await.0);
        }
        requests
    });
    Cast { publisher, subscribers, _requests: requests }
}

/// Publishes all groups to the subscribers. Returns the relay's status when everything sent is acknowledged.
pub fn play(net: &KernelNetwork, cast: Cast, show: &GroupStream, between: impl FnMut(u64)) -> Status {
    let Cast { publisher, subscribers, _requests } = cast;
    net.run(async {
        let _subscribers = show.play(&publisher, subscribers, between).await;
        net.settled()
    })
}

pub async fn futures_join<T>(futures: Vec<impl Future<Output = T>>) -> Vec<T> {
    let mut futures: Vec<_> = futures.into_iter().map(Box::pin).collect();
    let mut done: Vec<Option<T>> = futures.iter().map(|_| None).collect();
    std::future::poll_fn(|context| {
        for (future, done) in futures.iter_mut().zip(&mut done) {
            if done.is_none()
                && let std::task::Poll::Ready(value) = future.as_mut().poll(context)
            {
                *done = Some(value);
            }
        }
        if done.iter().all(Option::is_some) { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    done.into_iter().flatten().collect()
}

pub fn subscribers(status: &Status) -> impl Iterator<Item = &RelaySessionStatus> {
    status.sessions.iter().filter(|session| session.subscriber)
}

pub fn sum(status: &Status, field: fn(&RelaySessionStatus) -> u64) -> u64 {
    subscribers(status).map(field).sum()
}

/// Checks that the kernel sent at least this number of packets to every subscriber. Userspace sends the others; their
/// number depends on the machine's load, and `millrace-lab bench relay` measures it.
pub fn assert_forwarded(status: &Status, packets: u64) {
    for session in subscribers(status) {
        assert!(session.kernel.packets >= packets, "{session:#?} {:#?}", status.engine);
    }
}
