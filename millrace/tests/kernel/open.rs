//! Tests of streams to subscribers that the kernel opens: each object has a stream of its own.

use std::{collections::BTreeMap, time::Duration};

use millrace_client::session::SessionRequest;
use millrace_moq::{
    Filter, Parameters, Status as ObjectStatus, SubgroupHeader, SubgroupId, code, data::encode_object_header,
};
use millrace_relay_daemon::status::{RelaySessionStatus, Status};
use millrace_testkit::async_wait_until;
use millrace_webtransport::SendStream;
use tokio::time;

use crate::{
    needs_root,
    net::{ALIAS, Cast, KernelNetwork, PUBLISHER_LINK, PeerKind, cast_by, subscribers},
    peer::{PeerStreamEnd, TestPeer, header, payload, track},
};

/// Number of streams to each subscriber that the relay must have prepared before the test publishes the next object.
/// The kernel can open only prepared streams.
const ENOUGH: u64 = 2;
pub const BYTES: usize = 800;

fn counts_or_default(counts: &Option<BTreeMap<String, u64>>) -> BTreeMap<String, u64> {
    counts.clone().unwrap_or_default()
}

/// Returns the increases of the counters since `before`, by name. Counters that did not change are left out.
pub fn since(
    now: &Option<BTreeMap<String, u64>>,
    before: &Option<BTreeMap<String, u64>>,
) -> Vec<(String, u64)> {
    let before = counts_or_default(before);
    let grown = counts_or_default(now).into_iter().map(|(name, count)| {
        let old = before.get(&name).copied().unwrap_or(0);
        (name, count - old)
    });
    grown.filter(|(_, count)| *count > 0).collect()
}

pub fn named(counts: &[(String, u64)], name: &str) -> u64 {
    counts.iter().find(|(other, _)| other == name).map_or(0, |(_, count)| *count)
}

pub fn single(group: u64, object: u64) -> SubgroupHeader {
    let subgroup = SubgroupId::Explicit(object);
    SubgroupHeader { subgroup, end_of_group: false, ..header(ALIAS, group) }
}

pub async fn publish(publisher: &TestPeer, group: u64, object: u64) {
    let mut subgroup = publisher.subgroup(single(group, object)).await;
    subgroup.object(object, BYTES).await;
    subgroup.finish();
}

async fn expect(subscriber: &mut TestPeer, group: u64, object: u64) {
    let received = subscriber.next_subgroup().await;
    assert_eq!((received.header.group, received.header.subgroup), (group, SubgroupId::Explicit(object)));
    assert_eq!(received.all().await, (vec![object], PeerStreamEnd::Fin));
}

/// Subscribers over QUIC and over WebTransport.
const BOTH: [(&str, PeerKind); 2] = [("sub1", PeerKind::Quic), ("sub2", PeerKind::Web)];

/// Connects a publisher and subscribers, and waits until the kernel has the state of their sessions (kernel records).
/// The kernel can then open streams that begin later.
pub fn ready_by(net: &KernelNetwork, publisher: PeerKind, subscribers: &[(&str, PeerKind)]) -> Cast {
    let cast = cast_by(net, publisher, subscribers);
    let is_ready = |session: &RelaySessionStatus| session.kernel_ready == Some(true);
    net.until("records", |status| status.sessions.iter().all(is_ready));
    cast
}

/// Waits until the relay has read all objects up to this one, and has again prepared streams, which the kernel can
/// open, for this number of subscribers. Waits for the keys by which the kernel decrypts packets, too: the engine's
/// thread installs them some time after the publisher's first stream.
pub async fn settled(net: &KernelNetwork, at: (u64, u64), subscribers: u64) {
    let what = format!("{at:?}, and openings for {subscribers}");
    let wanted = |status: &Status| {
        let read = status.tracks.first().is_some_and(|track| track.largest == Some(at));
        let is_ready = status.sessions.iter().all(|session| session.kernel_ready == Some(true));
        read && is_ready && status.engine.prepared >= ENOUGH * subscribers
    };
    async_wait_until(&what, || net.status(), wanted).await;
}

/// Publishes objects of group 0 until the kernel has sent packets to every subscriber. Returns the number of the next
/// object.
async fn warm_up(net: &KernelNetwork, publisher: &TestPeer, receivers: &mut [TestPeer]) -> u64 {
    let mut object = 0;
    // exact: the test rereads the kernel's packet counts of the subscribers after each published object
    while subscribers(&net.status()).any(|session| session.kernel.packets == 0) {
        // exact: the status is printed only if the test fails
        assert!(object < 10_000, "{:#?}", net.status());
        publish(publisher, 0, object).await;
        for receiver in receivers.iter_mut() {
            expect(receiver, 0, object).await;
        }
        settled(net, (0, object), receivers.len() as u64).await;
        object += 1;
    }
    object
}

fn nothing_is_left(net: &KernelNetwork) {
    net.until("nothing prepared or delegated", |status| {
        status.engine.prepared == 0 && status.engine.streams == 0
    });
}

#[test]
fn the_kernel_opens_a_stream_for_each_object() {
    needs_root!(the_kernel_opens_a_stream_for_each_object);
    [PeerKind::Quic, PeerKind::Web].into_iter().for_each(open_a_stream_for_each_object);
}

fn open_a_stream_for_each_object(by: PeerKind) {
    const OBJECTS: u64 = 50;
    let net = KernelNetwork::new(2, false, |_| {});
    let Cast { publisher, subscribers: mut receivers, _requests } = ready_by(&net, by, &BOTH);
    net.run(async {
        warm_up(&net, &publisher, &mut receivers).await;
        let before = net.settled();
        for object in 0..OBJECTS {
            publish(&publisher, 1, object).await;
            for subscriber in &mut receivers {
                expect(subscriber, 1, object).await;
            }
            settled(&net, (1, object), 2).await;
        }
        let now = net.settled();
        assert_all_bound(&now, &before, OBJECTS);
        // Userspace opens the streams that the kernel did not open. Their number depends on the machine's load.
        let copies = since(&now.engine.copies, &before.engine.copies);
        assert!(named(&copies, "sent") >= OBJECTS, "{copies:?}");
        assert_eq!(opened(&now) - opened(&before), 2 * OBJECTS);
        for (now, before) in subscribers(&now).zip(subscribers(&before)) {
            let copies = since(&now.kernel_copies, &before.kernel_copies);
            assert!(named(&copies, "sent") >= OBJECTS / 2, "{by:?} {now:#?}");
        }
    });
    drop((publisher, receivers, _requests));
    nothing_is_left(&net);
}

/// Checks that `streams` streams of the publisher began since `before`, and that the kernel opened the subscribers'
/// streams for each. Packets that had only the preamble of a WebTransport stream are counted separately, and ignored
/// here. So are repeated beginnings of streams that have ended (`order`, then `taken`): a publisher whose
/// acknowledgements come late sends them.
pub fn assert_all_bound(now: &Status, before: &Status, streams: u64) {
    let mut openings = since(&now.engine.openings, &before.engine.openings);
    openings.retain(|(name, _)| !["preamble", "order", "taken"].contains(&name.as_str()));
    let received = since(&now.engine.received, &before.engine.received);
    assert_eq!(openings, [("bound".to_owned(), streams)], "packets: {received:?}");
}

fn opened(status: &Status) -> u64 {
    status.totals.streams_opened
}

/// Each subscriber must get the objects that it asked for, once.
#[test]
fn subscribers_that_join_late_or_leave_get_their_objects_once() {
    needs_root!(subscribers_that_join_late_or_leave_get_their_objects_once);
    for (publisher, first, late) in
        [(PeerKind::Quic, PeerKind::Quic, PeerKind::Quic), (PeerKind::Web, PeerKind::Quic, PeerKind::Web)]
    {
        join_late_and_leave(publisher, first, late);
    }
}

fn join_late_and_leave(publisher: PeerKind, first: PeerKind, late: PeerKind) {
    let net = KernelNetwork::new(3, false, |_| {});
    let Cast { publisher, mut subscribers, _requests: mut requests } =
        ready_by(&net, publisher, &[("sub1", first)]);
    net.run(async {
        let first = warm_up(&net, &publisher, &mut subscribers).await;
        let track = track("live/cam", "video");
        let mut late = net_peer(&net, "sub2", late).await;
        let filter = Filter::AbsoluteStart(crate::peer::at(0, first + 5));
        let parameters = Parameters { filter: Some(filter), ..Parameters::default() };
        let (request, _) = late.try_subscribe(&track, parameters).await.unwrap();
        settled(&net, (0, first - 1), 2).await;
        let before = net.settled();
        for object in first..first + 20 {
            publish(&publisher, 0, object).await;
            expect(&mut subscribers[0], 0, object).await;
            if object >= first + 5 {
                expect(&mut late, 0, object).await;
            }
            settled(&net, (0, object), 2).await;
        }
        assert_all_bound(&net.settled(), &before, 20);
        // The first subscriber leaves in the middle of the group.
        leave(requests.swap_remove(1));
        for object in first + 20..first + 40 {
            publish(&publisher, 0, object).await;
            expect(&mut late, 0, object).await;
        }
        settled(&net, (0, first + 39), 1).await;
        late.expect_no_stream().await;
        leave(request);
    });
}

fn leave(request: SessionRequest) {
    drop(request);
}

async fn net_peer(net: &KernelNetwork, node: &str, by: PeerKind) -> TestPeer {
    tokio::task::block_in_place(|| net.peer_by(node, by))
}

/// Each object must arrive once, whether the kernel or userspace has opened its stream.
#[test]
fn objects_published_faster_than_the_subscriber_reads_arrive_once() {
    const OBJECTS: u64 = 300;
    needs_root!(objects_published_faster_than_the_subscriber_reads_arrive_once);
    let net = KernelNetwork::new(1, false, |_| {});
    let Cast { publisher, mut subscribers, _requests } =
        ready_by(&net, PeerKind::Quic, &[("sub1", PeerKind::Quic)]);
    net.run(async {
        warm_up(&net, &publisher, &mut subscribers).await;
        for object in 0..OBJECTS {
            publish(&publisher, 1, object).await;
            // exact: this pause sets the publisher's sending rate
            time::sleep(Duration::from_millis(1)).await;
        }
        net.until("all at the relay", |status| status.tracks[0].largest == Some((1, OBJECTS - 1)));
        let mut received = Vec::new();
        for _ in 0..OBJECTS {
            let stream = subscribers[0].next_subgroup().await;
            let SubgroupId::Explicit(id) = stream.header.subgroup else { panic!("{:?}", stream.header) };
            assert_eq!(stream.all().await, (vec![id], PeerStreamEnd::Fin));
            received.push(id);
        }
        received.sort_unstable();
        assert!(received.into_iter().eq(0..OBJECTS));
        subscribers[0].expect_no_stream().await;
    });
}

/// The links lose, duplicate or delay packets, including the first packets of streams.
#[test]
fn every_object_arrives_once_over_lossy_reordering_links() {
    const OBJECTS: u64 = 200;
    needs_root!(every_object_arrives_once_over_lossy_reordering_links);
    for (link, publisher, subscriber) in [
        (PUBLISHER_LINK, PeerKind::Quic, PeerKind::Quic),
        ("relay-sub1", PeerKind::Quic, PeerKind::Quic),
        (PUBLISHER_LINK, PeerKind::Web, PeerKind::Web),
        ("relay-sub1", PeerKind::Quic, PeerKind::Web),
    ] {
        let net = KernelNetwork::new(1, true, |_| {});
        let Cast { publisher, mut subscribers, _requests } =
            ready_by(&net, publisher, &[("sub1", subscriber)]);
        net.run(async {
            warm_up(&net, &publisher, &mut subscribers).await;
            net.impair(link, "loss=3% reorder=5% duplicate=5% delay=3ms");
            let before = net.settled();
            let publishing = async {
                for object in 0..OBJECTS {
                    // Every third object needs several packets.
                    let mut subgroup = publisher.subgroup(single(1, object)).await;
                    subgroup.object(object, if object.is_multiple_of(3) { 5000 } else { BYTES }).await;
                    subgroup.finish();
                    // exact: this pause sets the publisher's sending rate
                    time::sleep(Duration::from_millis(2)).await;
                }
            };
            let receiving = async {
                let mut received = Vec::new();
                for _ in 0..OBJECTS {
                    let (objects, end) = subscribers[0].next_subgroup().await.all().await;
                    assert_eq!(end, PeerStreamEnd::Fin);
                    received.extend(objects);
                }
                received.sort_unstable();
                assert!(received.into_iter().eq(0..OBJECTS));
                subscribers[0].expect_no_stream().await;
            };
            tokio::join!(publishing, receiving);
            let openings = since(&net.settled().engine.openings, &before.engine.openings);
            assert!(named(&openings, "bound") > 0, "{openings:?}");
        });
    }
}

/// The publisher resets streams before userspace has read any of their bytes, or just after it has read them.
#[test]
fn streams_that_the_publisher_resets_are_reset_and_leave_nothing_behind() {
    needs_root!(streams_that_the_publisher_resets_are_reset_and_leave_nothing_behind);
    [PeerKind::Quic, PeerKind::Web].into_iter().for_each(reset_streams);
}

fn reset_streams(by: PeerKind) {
    const STREAMS: u64 = 60;
    let net = KernelNetwork::new(1, false, |_| {});
    let Cast { publisher, mut subscribers, _requests } = ready_by(&net, by, &[("sub1", by)]);
    net.run(async {
        warm_up(&net, &publisher, &mut subscribers).await;
        for object in 0..STREAMS {
            let mut subgroup = publisher.subgroup(single(1, object)).await;
            subgroup.object(object, BYTES).await;
            // exact: this pause sets the publisher's sending rate
            time::sleep(Duration::from_micros(100 * (object % 20))).await;
            subgroup.reset(code::Reset::CANCELLED);
        }
        publish(&publisher, 2, 0).await;
        loop {
            let received = subscribers[0].next_subgroup().await;
            let group = received.header.group;
            let (_, end) = received.all().await;
            if group == 2 {
                assert_eq!(end, PeerStreamEnd::Fin);
                break;
            }
            assert_eq!(end, PeerStreamEnd::Reset);
        }
        assert!(subscribers[0].session.connection().close_reason().is_none());
        net.until("no stream in the kernel", |status| status.engine.streams == 0);
    });
    drop((publisher, subscribers, _requests));
    nothing_is_left(&net);
}

/// The publisher sends each field of a subgroup stream in a packet of its own, as a browser does that writes each field
/// separately.
#[test]
fn stream_sent_byte_by_byte_is_forwarded_by_the_kernel_after_its_header() {
    const PIECES: usize = 4;
    needs_root!(stream_sent_byte_by_byte_is_forwarded_by_the_kernel_after_its_header);
    for by in [PeerKind::Quic, PeerKind::Web] {
        let net = KernelNetwork::new(2, false, |_| {});
        let Cast { publisher, subscribers: mut receivers, _requests } = ready_by(&net, by, &BOTH);
        net.run(async {
            warm_up(&net, &publisher, &mut receivers).await;
            for group in 1..4 {
                let is_free = |status: &Status| status.engine.streams == 0;
                async_wait_until("the earlier streams to be over", || net.status(), is_free).await;
                let before = net.settled();
                let mut stream = publisher.session.streams().open_uni().await.unwrap();
                let mut head = Vec::new();
                let mut front = Vec::new();
                single(group, 0).encode(&mut head);
                write_slowly(&mut stream, head.chunks(1)).await;
                let is_delegated = |status: &Status| status.engine.streams == 2;
                async_wait_until("the kernel has the stream", || net.status(), is_delegated).await;
                encode_object_header(None, 0, None, BYTES as u64, ObjectStatus::Normal, &mut front);
                write_slowly(&mut stream, front.chunks(1)).await;
                write_slowly(&mut stream, payload(group, 0, BYTES).chunks(BYTES / PIECES)).await;
                stream.finish().unwrap();
                for receiver in &mut receivers {
                    expect(receiver, group, 0).await;
                }
                let now = net.settled();
                let good = since(&now.engine.frames, &before.engine.frames);
                assert!(named(&good, "good") >= PIECES as u64, "{good:?}");
                for (now, before) in subscribers(&now).zip(subscribers(&before)) {
                    // Userspace sends the subgroup header, and the fields that arrive while it hands the stream over to
                    // the kernel.
                    assert!(now.kernel.packets - before.kernel.packets >= PIECES as u64, "{now:#?}");
                }
            }
        });
    }
}

/// Writes the pieces so that each is in a packet of its own.
async fn write_slowly<'a>(stream: &mut SendStream, pieces: impl Iterator<Item = &'a [u8]>) {
    for piece in pieces {
        stream.write_all(piece).await.unwrap();
        time::sleep(Duration::from_millis(2)).await; // exact: this pause sets the publisher's sending rate
    }
}
