//! Engine `kernel` between unmodified peers, each in a network namespace of its own. Needs root.

#![allow(clippy::unwrap_used)]

#[allow(dead_code)]
#[path = "relay/peer.rs"]
mod peer;
#[path = "support/site.rs"]
mod site;

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use millrace::{
    lab::{Direction, Impairment, Lab, Node, Topology},
    relay::{
        config::{CipherSuite, Config, EngineChoice, Settings},
        server::{Identity, Server},
        status::{Session, Status, StatusSource, Supply},
        tls,
    },
};
use millrace_proto::moq::{TrackName, code};
use nix::unistd::geteuid;
use peer::{End, Peer, header, track};
use tokio::{runtime::Runtime, time};

const PORT: u16 = 4443;
const PUBLISHER_LINK: &str = "pub-relay";

/// A relay with engine `kernel`, and where its peers are.
struct Net {
    runtime: Runtime,
    server: Arc<Server>,
    lab: Lab,
}

impl Net {
    fn new(subscribers: usize, emulate: bool, change: impl FnOnce(&mut Config)) -> Self {
        let mut topology = Topology::standard(1, subscribers);
        topology.netem = false;
        topology.links.iter_mut().for_each(|link| link.emulate = emulate);
        let lab = Lab::new(&topology).unwrap();
        let runtime = Runtime::new().unwrap();
        let server = start(&lab, &runtime, change).unwrap();
        Self { runtime, server: Arc::new(server), lab }
    }

    fn relay(&self) -> &Node {
        self.lab.node("relay").unwrap()
    }

    fn peer(&self, node: &str) -> Peer {
        let url = format!("moqt://{}:{PORT}", self.relay().addr_v4()).parse().unwrap();
        self.lab.node(node).unwrap().enter(|| self.runtime.block_on(Peer::connect(url))).unwrap()
    }

    fn impair(&self, link: &str, what: &str) {
        let impairment = Impairment::parse(what).unwrap();
        for direction in [Direction::Forward, Direction::Backward] {
            self.lab.link(link).unwrap().set(direction, impairment.clone()).unwrap();
        }
    }

    fn status(&self) -> Status {
        self.server.status()
    }

    /// Runs until the end, and leaves nothing behind.
    fn run<T>(&self, work: impl Future<Output = T>) -> T {
        self.runtime.block_on(work)
    }
}

fn start(
    lab: &Lab,
    runtime: &Runtime,
    change: impl FnOnce(&mut Config),
) -> Result<Server, millrace::relay::server::StartError> {
    let node = lab.node("relay").unwrap();
    let addr = SocketAddr::new(node.addr_v4().into(), PORT);
    let settings = Settings { listen: Some(vec![addr]), ..Settings::default() };
    let mut config = Config::new(settings, None).unwrap();
    config.http = None;
    config.engine = EngineChoice::Kernel;
    config.interfaces = node.interfaces().iter().map(|interface| interface.device.clone()).collect();
    change(&mut config);
    let certificate = tls::identity(&config.identity, vec!["localhost".into()]).unwrap();
    let identity = Identity { certificate, upstream_roots: None, key_log: None };
    node.enter(|| {
        let _inside = runtime.enter();
        Server::start(config, identity)
    })
    .unwrap()
}

/// One at a time: they share the processors that they measure on, and the files of this process.
static ALONE: Mutex<()> = Mutex::new(());

macro_rules! needs_root {
    ($name:ident) => {
        if !geteuid().is_root() {
            println!("SKIP {}: needs root", stringify!($name));
            return;
        }
        let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    };
}

/// A stream of groups, and what its subscribers have to get.
struct Show {
    groups: u64,
    objects: u64,
    bytes: usize,
    pause: Duration,
}

const SHOW: Show = Show { groups: 10, objects: 50, bytes: 1000, pause: Duration::from_millis(2) };

impl Show {
    /// Publishes all groups, and runs `between` before each.
    async fn publish(&self, publisher: &Peer, alias: u64, mut between: impl FnMut(u64)) {
        for group in 0..self.groups {
            between(group);
            let mut subgroup = publisher.subgroup(header(alias, group)).await;
            for id in 0..self.objects {
                subgroup.object(id, self.bytes).await;
                time::sleep(self.pause).await;
            }
            subgroup.finish();
        }
    }

    /// Every group whole, whatever order the streams come in.
    async fn receive(&self, mut subscriber: Peer) -> Peer {
        let mut groups = Vec::new();
        for _ in 0..self.groups {
            let received = subscriber.next_subgroup().await;
            groups.push(received.header.group);
            assert_eq!(received.all().await, ((0..self.objects).collect(), End::Fin));
        }
        groups.sort_unstable();
        assert_eq!(groups, (0..self.groups).collect::<Vec<_>>());
        subscriber
    }
}

/// The publisher, and `names` as subscribers of the one track, all of them connected.
struct Cast {
    publisher: Peer,
    subscribers: Vec<Peer>,
    _requests: Vec<millrace::client::session::Request>,
}

fn cast(net: &Net, names: &[&str]) -> Cast {
    let mut publisher = net.peer("pub");
    let subscribers: Vec<_> = names.iter().map(|name| net.peer(name)).collect();
    let track: TrackName = track("live/cam", "video");
    let requests = net.run(async {
        let mut requests = vec![publisher.publish_namespace("live/cam").await];
        let mut all = subscribers.iter();
        let first = all.next().unwrap();
        let (one, upstream) = tokio::join!(first.subscribe(&track), publisher.accept_subscribe(&track, 7));
        requests.extend([one.0, upstream.0]);
        for subscriber in all {
            requests.push(subscriber.subscribe(&track).await.0);
        }
        requests
    });
    Cast { publisher, subscribers, _requests: requests }
}

/// Plays the show to the end; returns the status then.
fn play(net: &Net, cast: Cast, show: &Show, between: impl FnMut(u64)) -> Status {
    let Cast { publisher, subscribers, _requests } = cast;
    net.run(async {
        let receiving = subscribers.into_iter().map(|subscriber| show.receive(subscriber));
        let receiving = futures_join(receiving.collect());
        let (_, _subscribers) = tokio::join!(show.publish(&publisher, 7, between), receiving);
        net.status()
    })
}

async fn futures_join<T>(futures: Vec<impl Future<Output = T>>) -> Vec<T> {
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

fn subscribers(status: &Status) -> impl Iterator<Item = &Session> {
    status.sessions.iter().filter(|session| session.subscriber)
}

fn sum(status: &Status, field: fn(&Session) -> u64) -> u64 {
    subscribers(status).map(field).sum()
}

/// Percent of the media packets that the kernel sent.
fn share(session: &Session) -> u64 {
    session.kernel.packets * 100 / (session.kernel.packets + session.data_plane.packets).max(1)
}

#[test]
fn the_kernel_forwards_a_steady_stream_to_everybody() {
    needs_root!(the_kernel_forwards_a_steady_stream_to_everybody);
    for suite in [CipherSuite::Chacha20Poly1305, CipherSuite::Aes128Gcm] {
        let net = Net::new(2, false, |config| config.cipher_suites = vec![suite]);
        let cast = cast(&net, &["sub1", "sub2"]);
        let status = play(&net, cast, &SHOW, |_| {});
        assert_eq!(status.engine.name, "kernel");
        assert_eq!(subscribers(&status).count(), 2);
        for session in subscribers(&status) {
            assert!(share(session) > 90, "{session:#?} {:#?}", status.engine);
        }
    }
}

#[test]
fn what_is_lost_on_either_link_is_repaired() {
    needs_root!(what_is_lost_on_either_link_is_repaired);
    for (loss, least) in [("loss=1%", 60), ("loss=5%", 20)] {
        for link in [PUBLISHER_LINK, "relay-sub1"] {
            let net = Net::new(2, true, |_| {});
            let cast = cast(&net, &["sub1", "sub2"]);
            net.impair(link, loss);
            let show = Show { groups: 6, ..SHOW };
            let status = play(&net, cast, &show, |_| {});
            let lost = sum(&status, |session| session.packets_lost);
            assert!(link == PUBLISHER_LINK || lost > 0, "{loss} on {link}");
            for session in subscribers(&status) {
                assert!(share(session) >= least, "{loss} on {link}: {session:#?}");
            }
        }
    }
}

#[test]
fn keys_are_updated_by_every_side_in_the_middle_of_it() {
    needs_root!(keys_are_updated_by_every_side_in_the_middle_of_it);
    for suite in [CipherSuite::Chacha20Poly1305, CipherSuite::Aes128Gcm] {
        let net = Net::new(1, false, |config| config.cipher_suites = vec![suite]);
        let cast = cast(&net, &["sub1"]);
        let ends = [&cast.publisher, &cast.subscribers[0]].map(|peer| peer.session.connection().clone());
        let show = Show { groups: 30, objects: 20, ..SHOW };
        // The one's keys seal media on its way to the relay, the other's have the relay renew its own.
        let status = play(&net, cast, &show, |group| ends[group as usize % 2].force_key_update());
        for session in subscribers(&status) {
            assert!(share(session) > 80, "{session:#?} {:#?}", status.engine);
        }
    }
}

/// Every packet that the kernel sent to the subscribers has its keystream from somewhere.
fn sealed(status: &Status) -> Supply {
    let mut all = Supply::default();
    for session in subscribers(status) {
        let sealed = session.keystreams.unwrap().sealed;
        assert_eq!(sealed.counts().iter().map(|(_, count)| count).sum::<u64>(), session.kernel.packets);
        all.add(sealed);
    }
    all
}

fn opened(status: &Status) -> Supply {
    let mut publishers = status.sessions.iter().filter(|session| session.publisher);
    publishers.next().unwrap().keystreams.unwrap().opened
}

fn is_ahead(supply: Supply, percent: u64) -> bool {
    supply.ahead * 100 >= (supply.ahead + supply.stale + supply.dry) * percent
}

#[test]
fn keystreams_are_there_before_the_packets() {
    needs_root!(keystreams_are_there_before_the_packets);
    for suite in [CipherSuite::Chacha20Poly1305, CipherSuite::Aes128Gcm] {
        let net = Net::new(2, false, |config| config.cipher_suites = vec![suite]);
        let cast = cast(&net, &["sub1", "sub2"]);
        let status = play(&net, cast, &Show { groups: 20, ..SHOW }, |_| {});
        assert!(is_ahead(sealed(&status), 95), "{status:#?}");
        assert!(is_ahead(opened(&status), 95), "{status:#?}");
    }
}

#[test]
fn keystreams_follow_the_keys() {
    needs_root!(keystreams_follow_the_keys);
    let net = Net::new(1, false, |_| {});
    let cast = cast(&net, &["sub1"]);
    let ends = [&cast.publisher, &cast.subscribers[0]].map(|peer| peer.session.connection().clone());
    let show = Show { groups: 20, ..SHOW };
    let status = play(&net, cast, &show, |group| ends[group as usize % 2].force_key_update());
    let (sealed, opened) = (sealed(&status), opened(&status));
    // What came first with new keys told that there are some.
    assert!(opened.stale > 5 && is_ahead(opened, 95), "{status:#?}");
    assert!(is_ahead(sealed, 95), "{status:#?}");
}

#[test]
fn without_memory_for_keystreams_the_kernel_computes_them() {
    needs_root!(without_memory_for_keystreams_the_kernel_computes_them);
    let net = Net::new(2, false, |config| config.keystream_bytes = 0);
    let cast = cast(&net, &["sub1", "sub2"]);
    let status = play(&net, cast, &SHOW, |_| {});
    assert!(subscribers(&status).all(|session| share(session) > 90), "{status:#?}");
    for supply in [sealed(&status), opened(&status)] {
        assert!(supply.dry > 0 && supply.ahead + supply.stale == 0, "{status:#?}");
    }
}

#[test]
fn detached_behind_its_back_it_goes_on_in_userspace() {
    needs_root!(detached_behind_its_back_it_goes_on_in_userspace);
    let others = tcx_links();
    let net = Net::new(2, false, |_| {});
    let cast = cast(&net, &["sub1", "sub2"]);
    let before = std::cell::OnceCell::new();
    let status = play(&net, cast, &SHOW, |group| {
        if group == SHOW.groups / 2 {
            detach_all(net.relay(), &others);
            before.set(sum(&net.status(), |session| session.kernel.packets)).unwrap();
        }
    });
    let before = *before.get().unwrap();
    assert!(before > 2 * 4 * 40, "{before}");
    let after = sum(&status, |session| session.kernel.packets);
    assert!(after - before < 10, "{before} and {after}: what was under way");
    assert!(sum(&status, |session| session.data_plane.packets) >= 2 * 5 * SHOW.objects);
}

/// The TCX links of this process, found among its files.
fn tcx_links() -> Vec<String> {
    std::fs::read_dir("/proc/self/fdinfo")
        .unwrap()
        .filter_map(|entry| std::fs::read_to_string(entry.unwrap().path()).ok())
        .filter(|info| info.contains("link_type:\ttcx"))
        .filter_map(|info| {
            Some(info.lines().find_map(|line| line.strip_prefix("link_id:"))?.trim().to_owned())
        })
        .collect()
}

/// As another program would. The relay of a test before may still be going down.
fn detach_all(node: &Node, others: &[String]) {
    let mut links = tcx_links();
    links.retain(|link| !others.contains(link));
    assert_eq!(links.len(), node.interfaces().len());
    for id in links {
        let detached = std::process::Command::new("bpftool").args(["link", "detach", "id", &id]).status();
        assert!(detached.unwrap().success());
    }
}

#[test]
fn a_stream_that_is_given_up_is_taken_back_first() {
    needs_root!(a_stream_that_is_given_up_is_taken_back_first);
    let net = Net::new(2, false, |_| {});
    let Cast { publisher, mut subscribers, _requests } = cast(&net, &["sub1", "sub2"]);
    net.run(async {
        for group in 0..20 {
            let mut subgroup = publisher.subgroup(header(7, group)).await;
            subgroup.object(0, 1000).await;
            let mut received = Vec::new();
            for subscriber in &mut subscribers {
                received.push(subscriber.next_subgroup().await);
            }
            // The one stops while media is on its way; then the publisher resets, in the middle of it too.
            for id in 1..40 {
                subgroup.object(id, 1000).await;
                if id == 20 {
                    received[0].stop(code::Reset::CANCELLED);
                }
                time::sleep(Duration::from_micros(300)).await;
            }
            subgroup.reset(code::Reset::CANCELLED);
            assert_eq!(received.pop().unwrap().all().await.1, End::Reset);
        }
        // Had a stream got more than its final size says, its peer would have closed the connection.
        for subscriber in &subscribers {
            assert!(subscriber.session.connection().close_reason().is_none());
        }
    });
    let status = net.status();
    assert!(sum(&status, |session| session.kernel.packets) > 200, "{:#?}", status.engine);
    let legs_are_back = async {
        while net.status().engine.streams > 0 {
            time::sleep(Duration::from_millis(5)).await;
        }
    };
    net.run(async {
        time::timeout(peer::PATIENCE, legs_are_back).await.expect("no stream is left in the kernel")
    });
}

#[test]
fn an_engine_that_cannot_attach_says_why_or_is_not_picked() {
    needs_root!(an_engine_that_cannot_attach_says_why_or_is_not_picked);
    let lab = Lab::new(&Topology::standard(1, 1)).unwrap();
    let runtime = Runtime::new().unwrap();
    let nowhere = |config: &mut Config| config.interfaces = vec!["nowhere0".to_owned()];
    let error = start(&lab, &runtime, nowhere).err().expect("refused").to_string();
    assert!(error.contains("nowhere0"), "{error}");
    let auto = start(&lab, &runtime, |config| {
        nowhere(config);
        config.engine = EngineChoice::Auto;
    })
    .unwrap();
    assert_eq!(auto.engine().0, "user");
    assert!(auto.engine().1.contains("nowhere0"), "{}", auto.engine().1);
    drop(auto);
    // By name it finds the interfaces of the listen address; `auto` does not take it unasked.
    runtime.block_on(async { time::sleep(Duration::from_millis(50)).await });
    let auto = start(&lab, &runtime, |config| {
        config.interfaces.clear();
        config.listen[0].set_port(PORT + 1);
        config.engine = EngineChoice::Auto;
    })
    .unwrap();
    assert_eq!(auto.engine().0, "user", "{}", auto.engine().1);
    let by_name = start(&lab, &runtime, |config| {
        config.interfaces.clear();
        config.listen[0].set_port(PORT + 2);
    })
    .unwrap();
    assert_eq!(by_name.engine().0, "kernel", "{}", by_name.engine().1);
}
