//! Tests of objects that arrive as datagrams.

use std::{collections::BTreeSet, time::Duration};

use millrace_moq::ObjectDatagram;
use millrace_testkit::async_wait_until;
use tokio::time;

use crate::{
    needs_root,
    net::{
        ALIAS, Arrived, Cast, KernelNetwork, PeerKind, assert_forwarded, cast, cast_by, futures_join,
        is_quiet, sum,
    },
    peer::{TestPeer, patiently},
};

const OBJECTS: u64 = 400;
/// Largest number of datagrams in flight. More would overflow a socket whose reader does not get the CPU.
const AHEAD: u64 = 16;

fn object(group: u64, object: u64) -> ObjectDatagram {
    ObjectDatagram {
        alias: ALIAS,
        group,
        object,
        priority: object.is_multiple_of(2).then_some(100),
        end_of_group: object + 1 == OBJECTS,
        properties: Default::default(),
        status: None,
        payload: vec![group as u8 ^ object as u8; 1 + object as usize * 2].into(),
    }
}

/// Publishes a group as datagrams, and checks that all subscribers receive all of it. Calls `between` before each
/// object.
async fn play(
    publisher: &TestPeer,
    subscribers: &mut [&mut TestPeer],
    group: u64,
    mut between: impl FnMut(u64),
) {
    let arrived = Arrived::new(subscribers.len());
    let publishing = async {
        for id in 0..OBJECTS {
            between(id);
            let mut bytes = Vec::new();
            object(group, id).encode(&mut bytes);
            publisher.session.streams().send_datagram(bytes.into()).unwrap();
            arrived.wait((id + 1).saturating_sub(AHEAD)).await;
            // exact: this pause sets the publisher's sending rate
            time::sleep(Duration::from_millis(1)).await;
        }
    };
    let receiving = subscribers.iter_mut().enumerate();
    let receiving = receiving.map(|(at, subscriber)| receive(subscriber, group, arrived.at(at))).collect();
    tokio::join!(publishing, futures_join(receiving));
}

/// Checks that a datagram is as published, and returns the number of its object.
fn checked(datagram: ObjectDatagram, group: u64) -> u64 {
    let want = object(group, datagram.object);
    assert_eq!(datagram, ObjectDatagram { alias: datagram.alias, ..want });
    datagram.object
}

/// Receives every object of the group once.
async fn receive(subscriber: &mut TestPeer, group: u64, tell: impl Fn(usize)) {
    let mut seen = Vec::new();
    while seen.len() < OBJECTS as usize {
        let datagram = patiently(subscriber.datagrams.recv()).await.unwrap();
        seen.push(checked(datagram, group));
        tell(1);
    }
    seen.sort_unstable();
    assert_eq!(seen, (0..OBJECTS).collect::<Vec<_>>());
}

/// Receives a burst of datagrams, and checks that no object arrives twice. How many are lost depends on the machine's
/// load: Quinn drops a packet as a duplicate if its number is more than 128 below the largest received one, and batches
/// can overtake each other.
async fn receive_burst(net: &KernelNetwork, subscriber: &mut TestPeer, group: u64) {
    let mut seen = BTreeSet::new();
    let mut next = Some(patiently(subscriber.datagrams.recv()).await.unwrap());
    async_wait_until("the end of the burst", || net.status(), is_quiet).await;
    while let Some(datagram) = next {
        let id = checked(datagram, group);
        assert!(seen.insert(id), "{id} came twice");
        // A datagram that arrives at all is delivered within this time.
        let more = time::timeout(Duration::from_secs(2), subscriber.datagrams.recv()).await;
        next = more.ok().map(Option::unwrap);
    }
}

#[test]
fn each_datagram_arrives_once_and_most_are_forwarded_by_the_kernel() {
    needs_root!(each_datagram_arrives_once_and_most_are_forwarded_by_the_kernel);
    [PeerKind::Quic, PeerKind::Web].into_iter().for_each(datagrams_from);
}

/// Publishes datagrams to subscribers over QUIC and over WebTransport.
fn datagrams_from(by: PeerKind) {
    let net = KernelNetwork::new(2, false, |_| {});
    let both = [("sub1", PeerKind::Quic), ("sub2", PeerKind::Web)];
    let Cast { publisher, subscribers: mut peers, _requests } = cast_by(&net, by, &both);
    let [one, other] = &mut peers[..] else { panic!("two subscribers") };
    net.run(play(&publisher, &mut [one, other], 1, |_| {}));
    let status = net.settled();
    assert_forwarded(&status, OBJECTS / 10);
    assert_eq!(status.totals.datagrams_sent, 2 * OBJECTS);
    assert_eq!(status.engine.streams, 2);

    // Subscribers that join after the publication get the same objects from userspace, all at once.
    let mut late = net.peer_by("sub1", PeerKind::Web);
    let track = crate::peer::track("live/cam", "video");
    net.run(async {
        let _request = late.subscribe(&track).await;
        receive_burst(&net, &mut late, 1).await;
        play(&publisher, &mut [one, other, &mut late], 2, |_| {}).await;
    });
    assert_eq!(net.settled().totals.datagrams_sent, 2 * OBJECTS + OBJECTS + 3 * OBJECTS);
}

#[test]
fn each_datagram_arrives_once_when_the_program_is_detached() {
    needs_root!(each_datagram_arrives_once_when_the_program_is_detached);
    let net = KernelNetwork::new(2, false, |_| {});
    let Cast { publisher, subscribers: mut peers, _requests } = cast(&net, &["sub1", "sub2"]);
    let [one, other] = &mut peers[..] else { panic!("two subscribers") };
    net.run(play(&publisher, &mut [one, other], 1, |_| {}));
    let before = sum(&net.settled(), |session| session.kernel.packets);
    assert!(before > 0);
    net.run(play(&publisher, &mut [one, other], 2, |id| {
        if id == OBJECTS / 2 {
            crate::life::detach_all(net.relay());
        }
    }));
    let status = net.settled();
    assert_eq!(status.totals.datagrams_sent, 4 * OBJECTS);
    assert!(sum(&status, |session| session.data_plane.packets) > 0);
}
