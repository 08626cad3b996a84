//! Tests with more sessions than kernel records (the state of a session that the kernel needs to serve it): which
//! sessions have a record, which lose it, and how their media continues.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use millrace_client::session::SessionRequest;
use millrace_lab::{
    hostile::{
        params::ClientLimits,
        peer::{HostilePeer as Client, PeerTarget},
    },
    transport::LabTransport,
};
use millrace_moq::{Message, ObjectParser, Parameters, StreamHeader, TrackName, code, message::Subscribe};
use millrace_relay_daemon::status::{RelaySessionStatus, Status};
use millrace_testkit::{StopOnDrop, wait_for};
use tokio::time;

use crate::{
    needs_root,
    net::{ALIAS, KernelNetwork, PORT},
    peer::{TestPeer, header, track},
};

/// Pause between two checks of idle clients, and longest time for which a subscriber waits for a packet.
const PAUSE: Duration = Duration::from_millis(5);
const OBJECTS: u64 = 20;
const LEN: usize = 800;

fn target(net: &KernelNetwork) -> PeerTarget {
    PeerTarget {
        addr: SocketAddr::new(net.relay().addr_v4().into(), PORT),
        name: "localhost".into(),
        path: String::new(),
        transport: LabTransport::Raw,
    }
}

fn limited(subscribers: usize, sessions: u32) -> KernelNetwork {
    KernelNetwork::new(subscribers, false, |config| config.kernel.sessions = sessions)
}

fn has_record(session: &&RelaySessionStatus) -> bool {
    session.kernel_record.as_deref() == Some("held")
}

fn viewers(status: &Status) -> impl Iterator<Item = &RelaySessionStatus> {
    status.sessions.iter().filter(|session| session.subscriptions > 0)
}

fn publishers_have_one(status: &Status) -> bool {
    status.sessions.iter().filter(|session| session.publications > 0).all(|session| has_record(&session))
}

fn viewers_with_one(status: &Status) -> usize {
    viewers(status).filter(has_record).count()
}

/// Returns the sessions whose peers have sent nothing but the handshake.
fn strangers(status: &Status) -> impl Iterator<Item = &RelaySessionStatus> {
    status.sessions.iter().filter(|session| session.identity.is_none())
}

/// Clients that have done a handshake and send nothing. The relay closes them after a while, and they connect again.
struct Idlers<'a> {
    net: &'a KernelNetwork,
    stops: AtomicBool,
    connected: AtomicU64,
}

impl<'a> Idlers<'a> {
    /// Keeps `count` idle clients connected while `meanwhile` runs.
    fn with<T>(net: &'a KernelNetwork, count: usize, meanwhile: impl FnOnce() -> T) -> T {
        let idlers = Self { net, stops: AtomicBool::new(false), connected: AtomicU64::new(0) };
        let node = net.lab.node("sub1").unwrap();
        thread::scope(|scope| {
            let _stop = StopOnDrop(&idlers.stops);
            scope.spawn(|| node.enter(|| idlers.stay(count)).unwrap());
            wait_for("idle handshakes", || idlers.connected.load(Relaxed) == count as u64);
            meanwhile()
        })
    }

    fn stay(&self, count: usize) {
        let target = target(self.net);
        let connect = || Client::handshake(&target, ClientLimits::default()).ok();
        let mut all: Vec<Option<Client>> = (0..count).map(|_| None).collect();
        while !self.stops.load(Relaxed) {
            for client in &mut all {
                if client.as_ref().is_none_or(|client| client.closed.is_some()) {
                    *client = connect();
                }
                if let Some(client) = client {
                    client.pump(Duration::ZERO, |_| false);
                }
                if self.stops.load(Relaxed) {
                    break;
                }
            }
            self.connected.store(all.iter().flatten().count() as u64, Relaxed);
            thread::sleep(PAUSE); // exact: this pause sets how often idle clients are checked
        }
        all.into_iter().flatten().for_each(|client| drop(client.close()));
    }
}

/// A publisher of a track with subscribers.
struct RecordStream {
    publisher: TestPeer,
    subscribers: Vec<(TestPeer, SessionRequest)>,
    name: TrackName,
    _requests: Vec<SessionRequest>,
}

impl RecordStream {
    /// Disconnects the first `count` subscribers.
    fn leave(&mut self, count: usize) {
        self.subscribers.drain(..count).for_each(|(peer, _)| close(&peer));
    }

    fn end(mut self) {
        self.leave(self.subscribers.len());
        close(&self.publisher);
    }
}

fn close(peer: &TestPeer) {
    peer.session.close(code::Session::NO_ERROR, "");
}

fn show(
    net: &KernelNetwork,
    namespace: &str,
    publisher: TestPeer,
    subscribers: Vec<TestPeer>,
) -> RecordStream {
    let name = track(namespace, "video");
    net.run(async {
        let mut publisher = publisher;
        let mut requests = vec![publisher.publish_namespace(namespace).await];
        let mut all = Vec::new();
        for subscriber in subscribers {
            let request = if all.is_empty() {
                let (one, asked) =
                    tokio::join!(subscriber.subscribe(&name), publisher.accept_subscribe(&name, ALIAS));
                requests.push(asked.0);
                one.0
            } else {
                subscriber.subscribe(&name).await.0
            };
            all.push((subscriber, request));
        }
        RecordStream { publisher, subscribers: all, name, _requests: requests }
    })
}

#[test]
fn publisher_has_a_kernel_record_despite_idle_handshakes() {
    needs_root!(publisher_has_a_kernel_record_despite_idle_handshakes);
    let net = limited(2, 4);
    Idlers::with(&net, 8, || {
        // Sessions of viewers get all kernel records as long as no publisher has sent anything.
        let waiting: Vec<_> = (0..5).map(|_| net.peer("sub2")).collect();
        net.until("four of five sessions have a record", |status| {
            status.sessions.iter().filter(has_record).count() == 4 && status.engine.records_waiting == 1
        });
        let mut show = show(&net, "live/cam", net.peer("pub"), waiting);
        let status = net.until("the publisher and three viewers have a record", |status| {
            publishers_have_one(status) && viewers_with_one(status) == 3
        });
        assert!(strangers(&status).count() >= 8);
        assert!(!strangers(&status).any(|stranger| has_record(&stranger)), "{status:#?}");
        assert!(strangers(&status).all(|one| one.kernel_record.as_deref() == Some("no right yet")));
        let why: Vec<_> = viewers(&status).filter_map(|viewer| viewer.kernel_record.as_deref()).collect();
        assert_eq!(why.iter().filter(|why| **why != "held").count(), 2, "{why:?}");
        assert_eq!(status.engine.records_waiting, 2);
        assert!(status.engine.records["downstreams"].used <= 4);

        // Subscribers with a kernel record disconnect, and sessions without one get the freed records.
        show.leave(2);
        net.until("all remaining sessions have a record", |status| {
            viewers(status).count() == 3 && viewers_with_one(status) == 3 && publishers_have_one(status)
        });
    });
}

#[test]
fn kernel_record_of_a_session_without_media_is_given_to_a_viewer() {
    needs_root!(kernel_record_of_a_session_without_media_is_given_to_a_viewer);
    let net = limited(2, 3);
    let others: Vec<_> = (0..2).map(|_| net.peer("sub1")).collect();
    net.until("records without use", |status| status.sessions.iter().filter(has_record).count() == 2);
    let viewers = vec![net.peer("sub2"), net.peer("sub2")];
    let _show = show(&net, "live/cam", net.peer("pub"), viewers);
    let status = net.until("the publisher and the viewers have records", |status| {
        publishers_have_one(status) && viewers_with_one(status) == 2
    });
    assert_eq!(status.engine.records_taken, 0, "a session lost a record in use");
    others.iter().for_each(close);
}

/// A subscriber that records the numbers of the packets it receives.
struct PacketWatcher {
    client: Client,
    /// The bytes received on each stream.
    streams: BTreeMap<u64, Vec<u8>>,
}

impl PacketWatcher {
    fn subscribe(target: &PeerTarget, name: &TrackName) -> Self {
        let mut client = Client::establish(target).unwrap();
        let parameters = Parameters::default();
        let request = client.request(Subscribe { request_id: 0, track: name.clone(), parameters }).unwrap();
        assert!(matches!(client.answer(request).unwrap(), Message::SubscribeOk(_)));
        Self { client, streams: BTreeMap::new() }
    }

    fn look(&mut self) {
        self.client.pump(PAUSE, |_| false);
        assert_eq!(self.client.closed, None);
        for id in self.client.incoming_streams() {
            let bytes = self.client.take(id);
            self.streams.entry(id).or_default().extend(bytes);
        }
    }

    /// Returns the whole objects, by group.
    fn objects(&self) -> BTreeMap<u64, Vec<u64>> {
        self.streams.values().filter_map(|bytes| objects_of(bytes)).collect()
    }
}

/// Returns the whole objects of a subgroup's stream, or `None` if it is another stream or its header is incomplete.
fn objects_of(bytes: &[u8]) -> Option<(u64, Vec<u64>)> {
    let mut rest = bytes;
    let Ok(Some(StreamHeader::Subgroup(subgroup))) = StreamHeader::decode(&mut rest) else { return None };
    let group = subgroup.group;
    let begin = bytes.len() - rest.len();
    let mut parser = ObjectParser::new(&subgroup, begin as u64);
    let mut found = Vec::new();
    let mut front = rest;
    while let Some(object) = parser.next(&mut front).expect("well-formed") {
        let payload = object.payload as usize..(object.payload + object.payload_len) as usize;
        let Some(payload) = bytes.get(payload) else { break };
        assert_eq!(payload, crate::peer::payload(group, object.id, LEN), "object {} of {group}", object.id);
        found.push(object.id);
    }
    Some((group, found))
}

/// Publishes groups one after the other until `stops` is set, and counts them.
async fn publish(publisher: &TestPeer, stops: &AtomicBool, published: &AtomicU64) {
    for group in 0.. {
        let mut subgroup = publisher.subgroup(header(ALIAS, group)).await;
        for id in 0..OBJECTS {
            subgroup.object(id, LEN).await;
            // exact: this pause sets the publisher's sending rate
            time::sleep(Duration::from_millis(2)).await;
        }
        subgroup.finish();
        published.store(group + 1, Relaxed);
        if stops.load(Relaxed) {
            return;
        }
    }
}

fn of_address(status: &Status, address: SocketAddr) -> Option<&RelaySessionStatus> {
    status.sessions.iter().find(|session| session.remote.ip() == address.ip())
}

/// Makes the relay remove a subscriber's kernel record (the kernel's state of the session) and add it again, many times
/// in the middle of groups. `disturb` runs after every check of the subscriber's packets.
fn lose_and_regain(times: usize, disturb: impl Fn(&mut Client, usize) + Sync) {
    let net = &limited(3, 2);
    // A first subscriber makes the publisher send the track.
    let mut first = show(net, "live/cam", net.peer("pub"), vec![net.peer("sub1")]);
    let mut viewers = std::mem::take(&mut first.subscribers);
    let stops = &AtomicBool::new(false);
    let published = &AtomicU64::new(0);
    let ends = &AtomicBool::new(false);
    let node = net.lab.node("sub2").unwrap();
    let target = target(net);
    let name = first.name.clone();
    let address = SocketAddr::new(node.addr_v4().into(), 0);
    thread::scope(|scope| {
        let _stop = (StopOnDrop(stops), StopOnDrop(ends));
        let watching = scope.spawn(|| {
            let watch = || {
                let mut watcher = PacketWatcher::subscribe(&target, &name);
                let mut looks = 0;
                while !ends.load(Relaxed) {
                    watcher.look();
                    disturb(&mut watcher.client, looks);
                    looks += 1;
                }
                watcher
            };
            node.enter(watch).unwrap()
        });
        net.until("the watcher's subscription", |status| {
            of_address(status, address).is_some_and(|watcher| watcher.subscriptions > 0)
        });
        // The watched subscriber has subscribed. After the viewers have closed, only it and the publisher have kernel
        // records.
        viewers.drain(..).for_each(|(viewer, _)| close(&viewer));
        let publisher = &first.publisher;
        let publishing = scope.spawn(move || net.run(publish(publisher, stops, published)));
        let kernel = |status: &Status| of_address(status, address).map_or(0, |one| one.kernel.packets);
        for round in 0..times {
            // exact: a lower bound; the next line waits until the kernel has sent more packets than this
            let before = kernel(&net.status());
            net.until("the kernel sends to the watcher", |status| kernel(status) > before + OBJECTS / 2);
            let other = show(net, "other", net.peer("sub3"), vec![net.peer("sub1")]);
            let taken = |status: &Status| {
                let watcher = of_address(status, address).expect("it stays");
                watcher.kernel_record.as_deref() == Some("taken for a publisher")
            };
            let status = net.until("the watcher's record is taken", taken);
            assert!(status.engine.records_taken > round as u64);
            let group = published.load(Relaxed);
            wait_for("more groups", || published.load(Relaxed) > group + 1);
            other.end();
        }
        // exact: a lower bound; the next line waits until the kernel has sent more packets than this
        let before = kernel(&net.status());
        net.until("the kernel sends to the watcher again", |status| kernel(status) > before);
        stops.store(true, Relaxed);
        publishing.join().unwrap();
        let last = published.load(Relaxed) - 1;
        net.until("the last object at the relay, and acknowledgements of everything", |status| {
            let is_whole = status.tracks.iter().any(|track| track.largest == Some((last, OBJECTS - 1)));
            is_whole && crate::net::is_quiet(status)
        });
        // exact: the packet counts are final, since everything sent has been acknowledged
        let status = net.status();
        let session = of_address(&status, address).unwrap();
        assert_eq!(session.kernel_unregistered, 0);
        ends.store(true, Relaxed);
        let watcher = watching.join().unwrap();
        let groups = watcher.objects();
        let seen: Vec<_> = groups.keys().copied().collect();
        assert_eq!(seen, (seen[0]..=last).collect::<Vec<_>>(), "no group is missing");
        for (group, objects) in &groups {
            assert_eq!(*objects, (0..OBJECTS).collect::<Vec<_>>(), "group {group}");
        }
        assert_eq!(watcher.client.counts.repeated, 0, "a packet number came twice");
    });
}

#[test]
fn subscriber_that_loses_its_kernel_record_loses_no_object() {
    needs_root!(subscriber_that_loses_its_kernel_record_loses_no_object);
    lose_and_regain(3, |_, _| {});
}

#[test]
fn key_update_or_move_without_a_kernel_record_loses_no_object() {
    needs_root!(key_update_or_move_without_a_kernel_record_loses_no_object);
    lose_and_regain(3, |client, look| match look % 16 {
        3 => client.update_keys().unwrap(),
        11 => client.hop().unwrap(),
        _ => {}
    });
}

/// The settings have `--kernel-sessions 64`, with 1,000 idle clients and 100 viewers.
#[test]
#[ignore = "test-all: 1,100 connections"]
fn viewers_have_kernel_records_despite_a_thousand_idle_handshakes() {
    needs_root!(viewers_have_kernel_records_despite_a_thousand_idle_handshakes);
    const IDLE: usize = 1000;
    let net = limited(2, 64);
    Idlers::with(&net, IDLE, || {
        let viewers: Vec<_> = (0..100).map(|_| net.peer("sub2")).collect();
        let mut show = show(&net, "live/cam", net.peer("pub"), viewers);
        let status = net.until("64 sessions have a record", |status| {
            viewers_with_one(status) >= 60 && publishers_have_one(status)
        });
        let idle = strangers(&status).count();
        assert!(idle >= IDLE * 9 / 10, "{idle} strangers");
        assert!(!strangers(&status).any(|stranger| has_record(&stranger)));
        let had: Vec<u64> = viewers_held(&status);

        let left = Instant::now();
        show.leave(10);
        let status = net.until("ten other sessions have a record", |status| {
            let others = viewers_held(status).iter().filter(|id| !had.contains(id)).count();
            others >= 10 && publishers_have_one(status)
        });
        let took = left.elapsed();
        println!("{} viewers of 90 have a record, {took:?} after ten have left", viewers_held(&status).len());
        assert!(took < Duration::from_secs(5), "{took:?}");
        assert!(!strangers(&status).any(|stranger| has_record(&stranger)));
    });
}

fn viewers_held(status: &Status) -> Vec<u64> {
    viewers(status).filter(has_record).map(|viewer| viewer.id).collect()
}
