//! Tests of hostile clients. Every bystander (a well-behaved client) must get all objects. No state of a hostile client
//! may be left in the relay.

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
    tls::CertificateTrust,
};
use millrace_lab::{
    hostile::{
        self,
        params::ClientLimits,
        peer::{Acks, PeerTarget, StreamKind},
        scenario::{self, Effort, HostileScenario, ScenarioReport},
    },
    transport::LabTransport,
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
        PATIENCE, PeerStreamEnd, TestPeer, TestRelay, expect_done, first_subscriber, header, patiently,
        payload, track as track_of, with_publisher,
    },
    site::{wants_kernel, wants_web},
};

/// Number of objects in each group of the bystander (the well-behaved publisher), and the time between two objects.
const OBJECTS: u64 = 10;
const PAUSE: Duration = Duration::from_millis(5);
/// Scenarios in which the relay must not close the hostile session: it refuses excess requests, or delays them.
const GO_ON: [&str; 7] = ["no-credit", "overlap", "steady", "same-track", "track-hog", "waiters", "updates"];

/// Publishes groups until it is stopped, and returns their number.
async fn publish(publisher: &TestPeer, stop: Arc<AtomicBool>) -> u64 {
    let mut group = 0;
    while !stop.load(Relaxed) {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        for id in 0..OBJECTS {
            subgroup.object(id, 1000).await;
            sleep(PAUSE).await; // exact: this pause sets the publisher's sending rate
        }
        subgroup.finish();
        group += 1;
    }
    group
}

/// Reads groups until all published ones have arrived, and checks that each is complete and arrives once. If a packet
/// is lost, a group may begin before the previous one ends.
async fn take(subscriber: &mut TestPeer, mut published: watch::Receiver<Option<u64>>) {
    let mut taken = BTreeSet::new();
    while *published.borrow_and_update() != Some(taken.len() as u64) {
        let received = tokio::select! {
            received = subscriber.next_subgroup() => received,
            _ = published.changed() => continue,
        };
        let group = received.header.group;
        assert_eq!(received.all().await, ((0..OBJECTS).collect(), PeerStreamEnd::Fin), "group {group}");
        assert!(taken.insert(group), "group {group} comes twice");
    }
}

/// Returns the relay's address for hostile clients, with the transport that the test's other peers use: QUIC or
/// WebTransport.
fn target(relay: &TestRelay) -> PeerTarget {
    target_over(relay, if wants_web() { LabTransport::Webtransport } else { LabTransport::Raw })
}

fn target_over(relay: &TestRelay, transport: LabTransport) -> PeerTarget {
    PeerTarget { addr: relay.addr, name: "localhost".into(), path: String::new(), transport }
}

/// Starts clients that send an Initial, receive the relay's handshake packets, and never answer.
async fn begin_handshakes(relay: &TestRelay, count: usize) -> Vec<hostile::peer::HostilePeer> {
    let target = target(relay);
    let begin = move || {
        let start = |_| hostile::peer::HostilePeer::start(&target, ClientLimits::default()).unwrap();
        (0..count).map(start).collect()
    };
    patiently(spawn_blocking(begin)).await.unwrap()
}

/// Runs the hostile client of a scenario once, on a thread of its own.
async fn attack(
    relay: &TestRelay,
    transport: LabTransport,
    scenario: &'static HostileScenario,
) -> ScenarioReport {
    let target = target_over(relay, transport);
    let round = spawn_blocking(move || scenario::run(scenario, &target, Effort::default(), None));
    patiently(round).await.unwrap().unwrap_or_else(|error| panic!("{}: {error:#}", scenario.name))
}

/// Reports whether another test program runs the scenarios over this transport. If the relay forwards in userspace, one
/// test program runs the scenarios over QUIC, and another one runs them over WebTransport.
fn is_elsewhere(transport: LabTransport) -> bool {
    !wants_kernel() && wants_web() != (transport == LabTransport::Webtransport)
}

#[tokio::test]
async fn hostile_clients_disturb_no_other_session_and_leave_no_state() {
    if is_elsewhere(LabTransport::Raw) {
        return;
    }
    let counted = attacked_over(LabTransport::Raw).await;
    assert!(counted.values().any(|count| *count > 0), "{counted:?}");
}

#[tokio::test]
#[ignore = "test-all: a minute of strangers by the other transport"]
async fn hostile_webtransport_clients_disturb_no_other_session() {
    if is_elsewhere(LabTransport::Webtransport) {
        return;
    }
    let counted = attacked_over(LabTransport::Webtransport).await;
    // The relay's counters of these names count incomplete session requests, malformed session requests, and HTTP
    // requests, streams and datagrams that belong to no WebTransport session.
    for reason in ["web_late", "web_request", "http_request", "http_stream", "http_datagram"] {
        assert!(counted[reason] > 0, "{reason}: {counted:?}");
    }
    assert!(counted["protocol_violation"] > 0, "{counted:?}");
}

/// Runs all scenarios while bystanders publish and subscribe. At the end no session, track or task of a scenario may be
/// left in the relay; `millrace-lab lab hostile` shows which scenario left such state behind. Returns the relay's
/// counters.
async fn attacked_over(transport: LabTransport) -> BTreeMap<String, u64> {
    let relay = TestRelay::with(|config| {
        // A bystander loses groups that are dropped from the cache before it reads them. On a busy machine it may read
        // late, so the cache keeps groups for much longer.
        config.cache_age = Duration::from_secs(10);
        config.cache_bytes = 16 << 20;
        config.idle_timeout = Duration::from_secs(8);
    });
    // exact: the number of tasks of an idle relay is constant
    let tasks = Handle::current().metrics().num_alive_tasks();
    let (mut publisher, namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, request, _, upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    let stop = Arc::new(AtomicBool::new(false));
    let total = watch::Sender::new(None);
    let publishing = async { total.send_replace(Some(publish(&publisher, Arc::clone(&stop)).await)) };
    let attacking = async {
        for scenario in scenario::over(transport) {
            let report = attack(&relay, transport, scenario).await;
            println!("{}: {:?}", scenario.name, report.rounds);
            // In the scenarios listed in `GO_ON`, and in those over WebTransport, the hostile client must complete its
            // scenario without an error.
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
        .until("an empty relay", |status| {
            (status.sessions.len(), status.handshakes, status.tracks.len()) == (0, 0, 0)
                && (status.cache.bytes, status.cache.groups, status.engine.streams) == (0, 0, 0)
                && Handle::current().metrics().num_alive_tasks() == tasks
        })
        .await;
    // exact: the drop counters are final, since all sessions and their tasks have ended
    relay.status().drops.clone()
}

/// Runs `work` with a hostile client, on a thread of its own.
async fn with<R: Send + 'static>(
    mut peer: hostile::peer::HostilePeer,
    act: impl FnOnce(&mut hostile::peer::HostilePeer) -> R + Send + 'static,
) -> (hostile::peer::HostilePeer, R) {
    let acting = spawn_blocking(move || {
        let result = act(&mut peer);
        (peer, result)
    });
    patiently(acting).await.unwrap()
}

async fn establish(relay: &TestRelay) -> hostile::peer::HostilePeer {
    let target = target(relay);
    patiently(spawn_blocking(move || hostile::peer::HostilePeer::establish(&target).unwrap())).await.unwrap()
}

/// A subscriber sends false acknowledgements. If the relay forwards in the kernel, the subscriber first waits until the
/// kernel has sent to it. The relay must close the subscriber's session, and a bystander must get everything.
async fn close_who_acknowledges(acks: Acks) {
    const PROTOCOL_VIOLATION: &str = "0xa ";
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut bystander, _request, _, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    let liar = establish(&relay).await;
    let subscribe = Subscribe { request_id: 0, track, parameters: Parameters::default() };
    let (liar, _) = with(liar, move |liar| {
        let request = liar.request(subscribe).unwrap();
        liar.answer(request).unwrap()
    })
    .await;
    let stop = Arc::new(AtomicBool::new(false));
    let total = watch::Sender::new(None);
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
        relay.until("the subscriber to be served", is_served).await;
        lie.store(true, Relaxed);
    };
    let (closed, (), _, ()) =
        tokio::join!(lying, watching, publishing, take(&mut bystander, total.subscribe()));
    assert!(closed.as_ref().is_some_and(|closed| closed.starts_with(PROTOCOL_VIOLATION)), "{closed:?}");
}

#[tokio::test]
async fn acknowledgement_of_unsent_packet_closes_the_session() {
    close_who_acknowledges(Acks::Optimistic).await;
}

#[tokio::test]
async fn acknowledgement_of_a_skipped_packet_number_closes_the_session() {
    close_who_acknowledges(Acks::Gapless).await;
}

/// A stream is reset in the packet that has its last data: with the right final size, with a larger one, and with an
/// impossible one.
#[tokio::test]
async fn a_stream_may_be_reset_in_the_packet_of_its_data() {
    const FINAL_SIZE_ERROR: &str = "0x6 ";
    const PIECE: usize = 500;
    const PIECES: usize = 8;
    let relay = TestRelay::start();
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
        // The publisher sends an object a few pieces at a time, and never completes it.
        let mut front = Vec::new();
        let subgroup = SubgroupHeader { properties: false, ..header(0, 0) };
        subgroup.encode(&mut front);
        encode_object_header(None, 0, None, 1 << 20, ObjectStatus::Normal, &mut front);
        let whole = payload(0, 0, 1 << 20);
        front.extend_from_slice(&whole[..PIECE]);
        let mut offset = front.len() as u64;
        let stream;
        (publisher, stream) = with(publisher, move |publisher| {
            let stream = publisher.open(StreamKind::Data, &front, false).unwrap();
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
            let _ = publisher.settle(); // an error means that the relay has closed the session
            publisher.closed.clone()
        })
        .await;
        // The subscriber may not get the last piece of the object. But its stream is reset, and its session continues.
        assert_eq!(received.all().await.1, PeerStreamEnd::Reset, "{beyond}");
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
                publisher.open(StreamKind::Data, &next, true).unwrap();
                publisher.settle().unwrap();
            })
            .await;
            assert_eq!(subscriber.next_subgroup().await.all().await, (vec![0], PeerStreamEnd::Fin));
            drop(publisher);
        }
        // exact: the bystander's session, which began before the attack, stays in the status
        let status = relay.status();
        assert!(status.sessions.iter().any(|session| session.subscriber || session.publisher), "{status:#?}");
    }
    relay.assert_forwarded();
}

/// Two frames have the same offset: 53 bytes of an object of 1000, and 54 bytes that are a whole object. They are in
/// one packet, or the second one is in an earlier packet that the kernel does not read. Whichever frame the relay uses,
/// subscribers must get the same bytes from the kernel and from userspace, and no session may end.
#[tokio::test]
async fn overlapping_stream_frames_with_different_bytes_end_no_session() {
    const ROUNDS: u64 = 4;
    const PIECES: usize = 8;
    let relay = TestRelay::start();
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
        // If the relay forwards in the kernel, the kernel forwards this stream by now.
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
            let stream = hostile.open(StreamKind::Data, &front, false).unwrap();
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
        // Subscribers get the second version of the stream's bytes, or the first version until the relay has detected
        // that they differ.
        received.well_formed(PIECES * 102 + len).await;
        drop((received, hostile));
        // The subscriber's session still delivers the media of other publishers.
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
        assert_eq!(received.all().await, ((0..OBJECTS).collect(), PeerStreamEnd::Fin));
    }
    relay.assert_forwarded();
}

/// Sends two versions of a stream's next bytes at the same offset, and then continues only the second version, which is
/// malformed where an object of the first version ends. Returns the length of the second version in bytes.
fn contradict(hostile: &mut hostile::peer::HostilePeer, stream: u64, next: u64, hidden: bool) -> usize {
    let objects = |len: usize, count: u64| {
        let mut bytes = Vec::new();
        for id in next..next + count {
            encode_object_header(id.checked_sub(1), id, None, len as u64, ObjectStatus::Normal, &mut bytes);
            bytes.resize(bytes.len() + len, 0xff);
        }
        bytes
    };
    let x = objects(1000, 1);
    let y = objects(52, 40);
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
        // Sending fails when the relay has detected that the two versions of the bytes differ, and has closed the
        // session.
        if hostile.send(frames, true).and_then(|()| hostile.settle()).is_err() {
            break;
        }
    }
    y.len()
}

/// The first bytes of a stream of unknown type arrive twice in one packet. Later bytes of the stream follow out of
/// order.
#[tokio::test]
async fn repeated_stream_of_unknown_type_is_ignored() {
    const PADDING: u64 = 0x132b_3e28;
    let relay = TestRelay::start();
    let bystander = relay.peer().await;
    let stranger = establish(&relay).await;
    let (stranger, closed) = with(stranger, |stranger| {
        let mut front = stranger.binding.uni().to_vec();
        vi64::encode(PADDING, &mut front);
        front.extend_from_slice(&[0; 100]);
        let id = stranger.open_bare(StreamKind::Data, &[], false).unwrap();
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
async fn open_handshakes_count_towards_the_session_limit() {
    let relay = TestRelay::with(|config| config.max_sessions = 5);
    let held = begin_handshakes(&relay, 5).await;
    relay.until("all handshakes to be open", |status| status.handshakes == 5).await;
    assert!(Session::connect(&remote(&relay)).await.is_err());
    relay.until("the handshake to be counted", |status| status.drops["session_limit"] >= 1).await;
    drop(held);
}

#[tokio::test]
async fn many_open_handshakes_require_address_validation() {
    const UNPROVED: u64 = 64;
    let relay = TestRelay::start();
    let held = begin_handshakes(&relay, 100).await;
    relay
        .until("further handshakes to be asked for validation", |status| {
            status.totals.retries == 100 - UNPROVED
        })
        .await;
    // exact: the number of unfinished handshakes is at its limit, above which the relay sends only Retry
    assert_eq!(relay.status().handshakes, UNPROVED);
    // A client that can validate its address is served.
    let peer = relay.peer().await;
    let status = relay.until("a session", |status| status.sessions.len() == 1).await;
    assert_eq!((status.handshakes, status.totals.retries), (UNPROVED, 100 - UNPROVED + 1));
    drop((held, peer));
}

/// The clients never send the end of a control message or of an object's header.
#[tokio::test]
async fn session_with_too_many_bytes_of_incomplete_messages_is_closed() {
    const BYTES: usize = 60_000;
    let mut message = vec![0x03, 0xff, 0xff];
    message.resize(BYTES, 0);
    let mut object = vec![0, 0xc0, 0xff, 0xff];
    object.resize(BYTES, 0);
    for objects in [false, true] {
        let relay = TestRelay::start();
        let (mut publisher, _namespace, track) = with_publisher(&relay).await;
        let (subscriber, _request, _, _upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
        let connection = publisher.session.connection().clone();
        let mut streams = Vec::new();
        // The relay closes the connection before all 200 incomplete messages have arrived.
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

fn remote(relay: &TestRelay) -> Remote {
    Remote::new(relay.url(), CertificateTrust::Anyone)
}
