//! Whatever a hostile client does, its bystanders get every object, and nothing of it is left.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use millrace_client::{
    session::{Remote, Session},
    tls::Trust,
};
use millrace_lab::{
    hostile::{
        self,
        params::Params,
        peer::{Acks, Kind, Target},
        scenario::{self, Effort, Report, Scenario},
    },
    transport::Transport,
};
use millrace_moq::{
    Parameters, Status as ObjectStatus, SubgroupHeader, code,
    data::encode_object_header,
    message::{Publish, Subscribe},
    vi64,
};
use millrace_quic::frame;
use millrace_relay_daemon::status::Status;
use tokio::{runtime::Handle, sync::watch, task::spawn_blocking, time::sleep};

use super::{
    peer::{
        End, PATIENCE, Peer, Relay, expect_done, first_subscriber, header, patiently, payload,
        track as track_of, with_publisher,
    },
    site::{wants_kernel, wants_web},
};

/// Objects of a group of the bystanders', and the time between them.
const OBJECTS: u64 = 10;
const PAUSE: Duration = Duration::from_millis(5);
/// Scenarios that the relay has no reason to end: what is too much of them is refused, or waits.
const GO_ON: [&str; 7] = ["no-credit", "overlap", "steady", "same-track", "track-hog", "waiters", "updates"];

/// Publishes groups until it is told to stop, and returns how many.
async fn publish(publisher: &Peer, stop: Arc<AtomicBool>) -> u64 {
    let mut group = 0;
    while !stop.load(Relaxed) {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        for id in 0..OBJECTS {
            subgroup.object(id, 1000).await;
            sleep(PAUSE).await; // exact: paces the publisher
        }
        subgroup.finish();
        group += 1;
    }
    group
}

/// Takes groups, each whole and once, until there are as many as were published. Where a packet is lost, a group may begin before the one
/// before it.
async fn take(subscriber: &mut Peer, mut published: watch::Receiver<Option<u64>>) {
    let mut taken = BTreeSet::new();
    while *published.borrow_and_update() != Some(taken.len() as u64) {
        let received = tokio::select! {
            received = subscriber.next_subgroup() => received,
            _ = published.changed() => continue,
        };
        let group = received.header.group;
        assert_eq!(received.all().await, ((0..OBJECTS).collect(), End::Fin), "group {group}");
        assert!(taken.insert(group), "group {group} comes twice");
    }
}

/// For clients that come as the test's peers do.
fn target(relay: &Relay) -> Target {
    target_over(relay, if wants_web() { Transport::Webtransport } else { Transport::Raw })
}

fn target_over(relay: &Relay, transport: Transport) -> Target {
    Target { addr: relay.addr, name: "localhost".into(), path: String::new(), transport }
}

/// So many clients that have begun a handshake, have got the answer, and do not go on.
async fn begin_handshakes(relay: &Relay, count: usize) -> Vec<hostile::peer::Peer> {
    let target = target(relay);
    let begin = move || {
        let start = |_| hostile::peer::Peer::start(&target, Params::default()).unwrap();
        (0..count).map(start).collect()
    };
    patiently(spawn_blocking(begin)).await.unwrap()
}

/// One round of a scenario, on a thread of its own.
async fn attack(relay: &Relay, transport: Transport, scenario: &'static Scenario) -> Report {
    let target = target_over(relay, transport);
    let round = spawn_blocking(move || scenario::run(scenario, &target, Effort::default(), None));
    patiently(round).await.unwrap().unwrap_or_else(|error| panic!("{}: {error:#}", scenario.name))
}

/// Programs of the userspace engine share both: strangers come as its own peers do.
fn is_elsewhere(transport: Transport) -> bool {
    !wants_kernel() && wants_web() != (transport == Transport::Webtransport)
}

#[tokio::test]
async fn bystanders_lose_nothing_and_nothing_is_left() {
    if is_elsewhere(Transport::Raw) {
        return;
    }
    let counted = attacked_over(Transport::Raw).await;
    assert!(counted.values().any(|count| *count > 0), "{counted:?}");
}

#[tokio::test]
#[ignore = "test-all: a minute of strangers by the other transport"]
async fn bystanders_lose_nothing_to_strangers_over_webtransport() {
    if is_elsewhere(Transport::Webtransport) {
        return;
    }
    let counted = attacked_over(Transport::Webtransport).await;
    // Half requests; those that are none; requests, streams and datagrams beside a session.
    for reason in ["web_late", "web_request", "http_request", "http_stream", "http_datagram"] {
        assert!(counted[reason] > 0, "{reason}: {counted:?}");
    }
    assert!(counted["protocol_violation"] > 0, "{counted:?}");
}

/// All scenarios there are, while others publish and subscribe. What is left of all together is counted at the end: `millrace
/// lab hostile` says of which one it is. Returns what the relay has counted.
async fn attacked_over(transport: Transport) -> BTreeMap<String, u64> {
    let relay = Relay::with(|config| {
        // What a bystander has not got by then is lost to it: far more than a busy machine keeps it waiting.
        config.cache_age = Duration::from_secs(10);
        config.cache_bytes = 16 << 20;
        config.idle_timeout = Duration::from_secs(8);
    });
    // exact: a relay begins with all the tasks that it has when idle
    let tasks = Handle::current().metrics().num_alive_tasks();
    let (mut publisher, namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, request, _, upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    let (stop, total) = (Arc::new(AtomicBool::new(false)), watch::Sender::new(None));
    let publishing = async { total.send_replace(Some(publish(&publisher, Arc::clone(&stop)).await)) };
    let attacking = async {
        for scenario in scenario::over(transport) {
            let report = attack(&relay, transport, scenario).await;
            println!("{}: {:?}", scenario.name, report.rounds);
            // These go on whatever the relay closes.
            if GO_ON.contains(&scenario.name) || scenario.name.starts_with("web-") {
                assert_eq!(report.rounds[0].ended, None, "{}", scenario.name);
            }
        }
        stop.store(true, Relaxed);
    };
    tokio::join!(attacking, publishing, take(&mut subscriber, total.subscribe()));
    for peer in [publisher, subscriber] {
        peer.session.connection().close(0u32.into(), b"");
        peer.ended().await;
    }
    drop((namespace, request, upstream));
    relay
        .until("nothing is left", |status| {
            (status.sessions.len(), status.handshakes, status.tracks.len()) == (0, 0, 0)
                && (status.cache.bytes, status.cache.groups, status.engine.streams) == (0, 0, 0)
                && Handle::current().metrics().num_alive_tasks() == tasks
        })
        .await;
    relay.status().drops.clone() // exact: no task is left that could count
}

/// Does something with a hostile client, on a thread of its own.
async fn with<R: Send + 'static>(
    mut peer: hostile::peer::Peer,
    act: impl FnOnce(&mut hostile::peer::Peer) -> R + Send + 'static,
) -> (hostile::peer::Peer, R) {
    let acting = spawn_blocking(move || {
        let result = act(&mut peer);
        (peer, result)
    });
    patiently(acting).await.unwrap()
}

async fn establish(relay: &Relay) -> hostile::peer::Peer {
    let target = target(relay);
    patiently(spawn_blocking(move || hostile::peer::Peer::establish(&target).unwrap())).await.unwrap()
}

/// A subscriber that begins to lie in its acknowledgements; with engine `kernel` once the kernel has sent to it. It is
/// closed, and a bystander gets everything.
async fn close_who_acknowledges(acks: Acks) {
    const PROTOCOL_VIOLATION: &str = "0xa ";
    let relay = Relay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut bystander, _request, _, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    let liar = establish(&relay).await;
    let subscribe = Subscribe { request_id: 0, track, parameters: Parameters::default() };
    let (liar, _) = with(liar, move |liar| {
        let request = liar.request(subscribe).unwrap();
        liar.answer(request).unwrap()
    })
    .await;
    let (stop, total) = (Arc::new(AtomicBool::new(false)), watch::Sender::new(None));
    let publishing = async { total.send_replace(Some(publish(&publisher, Arc::clone(&stop)).await)) };
    let lie = Arc::new(AtomicBool::new(false));
    let lying = async {
        let begun = Arc::clone(&lie);
        let (_, closed) = with(liar, move |liar| {
            liar.pump(PATIENCE, |_| begun.load(Relaxed));
            liar.acks = acks;
            liar.pump(PATIENCE, |liar| liar.closed.is_some());
            liar.closed.clone()
        })
        .await;
        stop.store(true, Relaxed);
        closed
    };
    let watching = async {
        let is_served = |status: &Status| {
            let liar = status.sessions.iter().max_by_key(|session| session.id).unwrap();
            if wants_kernel() { liar.kernel.packets > 0 } else { liar.data_plane.packets > 0 }
        };
        relay.until("it is served", is_served).await;
        lie.store(true, Relaxed);
    };
    let (closed, (), _, ()) =
        tokio::join!(lying, watching, publishing, take(&mut bystander, total.subscribe()));
    assert!(closed.as_ref().is_some_and(|closed| closed.starts_with(PROTOCOL_VIOLATION)), "{closed:?}");
}

#[tokio::test]
async fn who_acknowledges_what_was_not_sent_is_closed() {
    close_who_acknowledges(Acks::Optimistic).await;
}

#[tokio::test]
async fn who_acknowledges_numbers_that_were_left_out_is_closed() {
    close_who_acknowledges(Acks::Gapless).await;
}

/// The end of a stream that is reset in the packet of its last data: with its final size, with one that is larger, and with
/// one that cannot be.
#[tokio::test]
async fn a_stream_may_be_reset_in_the_packet_of_its_data() {
    const FINAL_SIZE_ERROR: &str = "0x6 ";
    const PIECE: usize = 500;
    const PIECES: usize = 8;
    let relay = Relay::start();
    let bystander = relay.peer().await;
    let _still = bystander.publish_namespace("b").await;
    for (round, beyond) in [0i64, 1000, -100].into_iter().enumerate() {
        let mut publisher = establish(&relay).await;
        let track = track_of("reset", &round.to_string());
        let (parameters, properties) = Default::default();
        let message = Publish { request_id: 0, track: track.clone(), track_alias: 0, parameters, properties };
        (publisher, _) = with(publisher, move |publisher| {
            let request = publisher.request(message).unwrap();
            publisher.answer(request).unwrap()
        })
        .await;
        let mut subscriber = relay.peer().await;
        let (mut request, _ok) = subscriber.subscribe(&track).await;
        relay.until_ready().await;
        // One object of which not all will come, a few pieces of it at a time.
        let mut front = Vec::new();
        let subgroup = SubgroupHeader { properties: false, ..header(0, 0) };
        subgroup.encode(&mut front);
        encode_object_header(None, 0, None, 1 << 20, ObjectStatus::Normal, &mut front);
        let whole = payload(0, 0, 1 << 20);
        front.extend_from_slice(&whole[..PIECE]);
        let mut offset = front.len() as u64;
        let stream;
        (publisher, stream) = with(publisher, move |publisher| {
            let stream = publisher.open(Kind::Data, &front, false).unwrap();
            publisher.settle().unwrap();
            stream
        })
        .await;
        let mut received = subscriber.next_subgroup().await;
        received.bytes(PIECE).await;
        for piece in 1..PIECES {
            let bytes = whole[piece * PIECE..][..PIECE].to_vec();
            offset += PIECE as u64;
            (publisher, _) = with(publisher, move |publisher| {
                publisher.write(stream, &bytes, false).unwrap();
                publisher.settle().unwrap();
            })
            .await;
            received.bytes((piece + 1) * PIECE).await;
        }
        let last = whole[PIECES * PIECE..][..PIECE].to_vec();
        let closed;
        (publisher, closed) = with(publisher, move |publisher| {
            let mut frames = Vec::new();
            frame::write_stream(stream, offset, &last, false, &mut frames);
            let size = (offset + PIECE as u64).checked_add_signed(beyond).unwrap();
            frame::write_reset_stream(stream, 0, size, &mut frames);
            publisher.send(frames, true).unwrap();
            let _ = publisher.settle(); // closed
            publisher.closed.clone()
        })
        .await;
        // Whether the last piece came is not certain; that the stream is reset is, and that nobody's session is hurt.
        assert_eq!(received.all().await.1, End::Reset, "{beyond}");
        if beyond < 0 {
            assert!(closed.as_ref().is_some_and(|closed| closed.starts_with(FINAL_SIZE_ERROR)), "{closed:?}");
            assert_eq!(expect_done(&mut request).await.code, code::Done::INTERNAL_ERROR);
        } else {
            assert_eq!(closed, None);
            let mut next = Vec::new();
            SubgroupHeader { properties: false, ..header(0, 1) }.encode(&mut next);
            encode_object_header(None, 0, None, 700, ObjectStatus::Normal, &mut next);
            next.extend_from_slice(&payload(1, 0, 700));
            let (publisher, _) = with(publisher, move |publisher| {
                publisher.open(Kind::Data, &next, true).unwrap();
                publisher.settle().unwrap();
            })
            .await;
            assert_eq!(subscriber.next_subgroup().await.all().await, (vec![0], End::Fin));
            drop(publisher);
        }
        let status = relay.status(); // exact: the bystander was let in before
        assert!(status.sessions.iter().any(|session| session.subscriber || session.publisher), "{status:#?}");
    }
    relay.assert_forwarded();
}

/// Two frames at one offset: 53 bytes of an object of 1000, and 54 bytes, which are a whole object. They are in one packet, or the
/// second one is in a packet before, which the kernel does not look at. Whichever of them the relay takes, its subscribers get the same
/// by both its ways, and so nothing that ends their sessions.
#[tokio::test]
async fn publisher_that_contradicts_itself_ends_no_subscriber() {
    const ROUNDS: u64 = 4;
    const PIECES: usize = 8;
    let relay = Relay::start();
    let (mut honest, _namespace, good) = with_publisher(&relay).await;
    let (mut subscriber, _request, ok, _upstream) = first_subscriber(&relay, &mut honest, &good, 1).await;
    for round in 0..ROUNDS {
        let track = track_of("overlap", &round.to_string());
        let (parameters, properties) = Default::default();
        let message = Publish { request_id: 0, track: track.clone(), track_alias: 0, parameters, properties };
        let (mut hostile, _) = with(establish(&relay).await, move |hostile| {
            let request = hostile.request(message).unwrap();
            hostile.answer(request).unwrap()
        })
        .await;
        let (_both, _ok) = subscriber.subscribe(&track).await;
        relay.until_ready().await;
        // Media that the kernel has come to forward, with engine `kernel`.
        let object = |id: u64| {
            let mut bytes = Vec::new();
            encode_object_header(id.checked_sub(1), id, None, 100, ObjectStatus::Normal, &mut bytes);
            bytes.extend(payload(0, id, 100));
            bytes
        };
        let mut front = Vec::new();
        header(0, 0).encode(&mut front);
        front.extend(object(0));
        let stream;
        (hostile, stream) = with(hostile, move |hostile| {
            let stream = hostile.open(Kind::Data, &front, false).unwrap();
            hostile.settle().unwrap();
            stream
        })
        .await;
        let mut received = subscriber.next_subgroup().await;
        received.objects(1).await;
        for bytes in (1..PIECES as u64).map(object) {
            (hostile, _) = with(hostile, move |hostile| {
                hostile.write(stream, &bytes, false).unwrap();
                hostile.settle().unwrap();
            })
            .await;
            received.objects(1).await;
        }
        let (hostile, len) =
            with(hostile, move |hostile| contradict(hostile, stream, PIECES as u64, round % 2 == 1)).await;
        // Either the second version, or the first one, until the relay has found out how that ends.
        received.well_formed(PIECES * 102 + len).await;
        drop((received, hostile));
        // The session goes on, with the others' media.
        let mut group = honest.subgroup(header(1, round)).await;
        for id in 0..OBJECTS {
            group.object(id, 1000).await;
        }
        group.finish();
        let received = loop {
            let received = subscriber.next_subgroup().await;
            if received.header.alias == ok.track_alias {
                break received;
            }
        };
        assert_eq!(received.all().await, ((0..OBJECTS).collect(), End::Fin));
    }
    relay.assert_forwarded();
}

/// Goes on with a stream in two ways, and then in the second one, of which the bytes are malformed where an object of the first one
/// ends. Returns how many bytes these are.
fn contradict(hostile: &mut hostile::peer::Peer, stream: u64, next: u64, hidden: bool) -> usize {
    let objects = |len: usize, count: u64| {
        let mut bytes = Vec::new();
        for id in next..next + count {
            encode_object_header(id.checked_sub(1), id, None, len as u64, ObjectStatus::Normal, &mut bytes);
            bytes.resize(bytes.len() + len, 0xff);
        }
        bytes
    };
    let (x, y) = (objects(1000, 1), objects(52, 40));
    assert_eq!(objects(52, 1).len(), 54);
    let at = hostile.claim(stream, y.len() as u64);
    let [mut first, mut second] = [Vec::new(), Vec::new()];
    frame::write_stream(stream, at, &x[..53], false, &mut first);
    frame::write_stream(stream, at, &y[..54], false, &mut second);
    if hidden {
        hostile.send_hidden(second).unwrap();
    } else {
        first.extend(second);
    }
    hostile.send(first, true).unwrap();
    hostile.settle().unwrap();
    for (object, offset) in y[54..].chunks(54).zip((54..).step_by(54)) {
        let mut frames = Vec::new();
        frame::write_stream(stream, at + offset, object, false, &mut frames);
        // Closed, where it is found out.
        if hostile.send(frames, true).and_then(|()| hostile.settle()).is_err() {
            break;
        }
    }
    y.len()
}

/// What of a stream is read before it is known to mean nothing comes in two copies at once, and then more of it.
#[tokio::test]
async fn a_stream_that_is_forgotten_may_come_twice() {
    const PADDING: u64 = 0x132b_3e28;
    let relay = Relay::start();
    let bystander = relay.peer().await;
    let stranger = establish(&relay).await;
    let (stranger, closed) = with(stranger, |stranger| {
        let mut front = stranger.binding.uni().to_vec();
        vi64::encode(PADDING, &mut front);
        front.extend_from_slice(&[0; 100]);
        let id = stranger.open_bare(Kind::Data, &[], false).unwrap();
        let mut frames = Vec::new();
        (0..2).for_each(|_| frame::write_stream(id, 0, &front, false, &mut frames));
        stranger.send(frames, true).unwrap();
        stranger.settle().unwrap();
        for offset in [front.len(), front.len() + 200, front.len() + 100] {
            let mut frames = Vec::new();
            frame::write_stream(id, offset as u64, &[0; 100], false, &mut frames);
            stranger.send(frames, true).unwrap();
            stranger.settle().unwrap();
        }
        stranger.closed.clone()
    })
    .await;
    assert_eq!(closed, None);
    let _still = bystander.publish_namespace("b").await;
    drop(stranger);
}

#[tokio::test]
async fn handshakes_count_as_sessions() {
    let relay = Relay::with(|config| config.max_sessions = 5);
    let held = begin_handshakes(&relay, 5).await;
    relay.until("all are under way", |status| status.handshakes == 5).await;
    assert!(Session::connect(&remote(&relay)).await.is_err());
    relay.until("it is counted", |status| status.drops["session_limit"] >= 1).await;
    drop(held);
}

#[tokio::test]
async fn with_many_handshakes_under_way_addresses_have_to_be_proved() {
    const UNPROVED: u64 = 64;
    let relay = Relay::start();
    let held = begin_handshakes(&relay, 100).await;
    relay.until("more have to", |status| status.totals.retries == 100 - UNPROVED).await;
    // exact: retries are only for what comes behind these
    assert_eq!(relay.status().handshakes, UNPROVED);
    // Whoever can prove its address is served.
    let peer = relay.peer().await;
    let status = relay.until("a session", |status| status.sessions.len() == 1).await;
    assert_eq!((status.handshakes, status.totals.retries), (UNPROVED, 100 - UNPROVED + 1));
    drop((held, peer));
}

/// Of a control message and of an object header, all but the end.
#[tokio::test]
async fn a_session_may_leave_so_much_incomplete() {
    const BYTES: usize = 60_000;
    let mut message = vec![0x03, 0xff, 0xff];
    message.resize(BYTES, 0);
    let mut object = vec![0, 0xc0, 0xff, 0xff];
    object.resize(BYTES, 0);
    for objects in [false, true] {
        let relay = Relay::start();
        let (mut publisher, _namespace, track) = with_publisher(&relay).await;
        let (subscriber, _request, _, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
        let connection = publisher.session.connection().clone();
        let mut streams = Vec::new();
        // The relay closes the connection before all are there.
        let sending = async {
            for group in 0..200 {
                let mut stream = match objects {
                    true => {
                        let properties = SubgroupHeader { properties: true, ..header(1, group) };
                        publisher.subgroup(properties).await.stream
                    }
                    false => publisher.session.streams().open_bi().await.unwrap().0,
                };
                if stream.write_all(if objects { &object } else { &message }).await.is_err() {
                    break;
                }
                streams.push(stream);
            }
            connection.closed().await;
        };
        patiently(sending).await;
        let closed = publisher.ended().await;
        assert!(closed.to_string().contains("not complete"), "{closed}");
        assert!(streams.len() >= (4 << 20) / BYTES, "{}", streams.len());
        drop(subscriber);
    }
}

fn remote(relay: &Relay) -> Remote {
    Remote::new(relay.url(), Trust::Anyone)
}
