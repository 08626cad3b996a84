//! Tracks that a publisher breaks (draft-18, "Malformed Tracks"): they end for all subscribers, but the publisher's
//! session does not.

use bytes::Bytes;
use millrace_moq::{
    Message, ObjectDatagram, Status, SubgroupHeader, SubgroupId, code, data::encode_object_header,
    property::PairWriter,
};

use super::peer::{
    PeerStreamEnd, PublishedSubgroup, TestPeer, TestRelay, at, expect_done, first_subscriber, header,
    patiently, payload, with_publisher,
};

/// The fault that makes the track malformed.
#[derive(Clone, Copy, Debug)]
enum TrackFault {
    BehindEndOfGroup,
    BehindLastOfGroup,
    BehindEndOfTrack,
    TwoPriorities,
    DatagramAndStream,
    StreamAndDatagram,
    TwoPayloads,
    MandatoryProperty,
}

const FAULTS: [TrackFault; 8] = [
    TrackFault::BehindEndOfGroup,
    TrackFault::BehindLastOfGroup,
    TrackFault::BehindEndOfTrack,
    TrackFault::TwoPriorities,
    TrackFault::DatagramAndStream,
    TrackFault::StreamAndDatagram,
    TrackFault::TwoPayloads,
    TrackFault::MandatoryProperty,
];

fn datagram(publisher: &TestPeer, object: u64, payload: Vec<u8>) {
    let datagram = ObjectDatagram {
        alias: 1,
        group: 0,
        object,
        priority: None,
        end_of_group: false,
        properties: Bytes::new(),
        status: None,
        payload: payload.into(),
    };
    let mut bytes = Vec::new();
    datagram.encode(&mut bytes);
    publisher.session.streams().send_datagram(bytes.into()).unwrap();
}

async fn other_subgroup(publisher: &TestPeer) -> PublishedSubgroup {
    publisher.subgroup(SubgroupHeader { subgroup: SubgroupId::Explicit(1), ..header(1, 0) }).await
}

/// Sends valid objects up to the fault, waits until the relay has them, and sends the fault.
async fn commit(relay: &TestRelay, publisher: &TestPeer, subscriber: &mut TestPeer, fault: TrackFault) {
    let cached = async |objects| {
        relay.until("the object to be cached", |status| status.tracks[0].objects_cached == objects).await;
    };
    let mut first = match fault {
        TrackFault::DatagramAndStream | TrackFault::TwoPayloads => {
            datagram(publisher, 0, payload(0, 0, 100));
            cached(1).await;
            if matches!(fault, TrackFault::TwoPayloads) {
                return datagram(publisher, 0, payload(0, 7, 100));
            }
            return publisher.subgroup(header(1, 0)).await.object(0, 100).await;
        }
        TrackFault::MandatoryProperty => {
            publisher.subgroup(SubgroupHeader { properties: true, ..header(1, 0) }).await
        }
        _ => publisher.subgroup(header(1, 0)).await,
    };
    first.object(0, 100).await;
    cached(1).await;
    match fault {
        TrackFault::BehindEndOfGroup => {
            first.status(3, Status::EndOfGroup).await;
            cached(2).await;
            other_subgroup(publisher).await.object(4, 100).await;
        }
        TrackFault::BehindLastOfGroup => {
            first.finish();
            assert_eq!(subscriber.next_subgroup().await.all().await, (vec![0], PeerStreamEnd::Fin));
            other_subgroup(publisher).await.object(1, 100).await;
        }
        TrackFault::BehindEndOfTrack => {
            first.status(1, Status::EndOfTrack).await;
            cached(2).await;
            publisher.subgroup(header(1, 1)).await.object(0, 100).await;
        }
        TrackFault::TwoPriorities => {
            publisher
                .subgroup(SubgroupHeader { priority: Some(5), ..header(1, 0) })
                .await
                .object(1, 100)
                .await;
        }
        TrackFault::StreamAndDatagram => datagram(publisher, 0, payload(0, 0, 100)),
        TrackFault::MandatoryProperty => {
            let mut block = Vec::new();
            let mut bytes = Vec::new();
            PairWriter::new(&mut block).integer(0x4000, 1);
            encode_object_header(Some(0), 1, Some(&block), 100, Status::Normal, &mut bytes);
            first.stream.write_all(&bytes).await.unwrap();
        }
        TrackFault::DatagramAndStream | TrackFault::TwoPayloads => {}
    }
}

#[tokio::test]
async fn malformed_track_ends_for_all_subscribers() {
    let relay = TestRelay::start();
    for (nth, fault) in FAULTS.into_iter().enumerate() {
        let (mut publisher, _namespace, track) = with_publisher(&relay).await;
        let (mut subscriber, mut request, _ok, mut upstream) =
            first_subscriber(&relay, &mut publisher, &track, 1).await;
        commit(&relay, &publisher, &mut subscriber, fault).await;
        assert_eq!(expect_done(&mut request).await.code, code::Done::MALFORMED_TRACK, "{fault:?}");
        let cancelled = patiently(upstream.next()).await;
        assert!(cancelled.is_err(), "{fault:?}: {cancelled:?}");
        let expected = nth as u64 + 1;
        relay
            .until("nothing of the malformed track to be cached", |status| {
                status.tracks.iter().all(|one| one.objects_cached == 0)
            })
            .await;
        // exact: the relay counts a malformed track before it ends the track
        assert_eq!(relay.status().drops["malformed_track"], expected, "{fault:?}");
        // The session can be used for other subscriptions, even to this track.
        let (mut again, _request, _ok, _upstream) = first_subscriber(&relay, &mut publisher, &track, 2).await;
        let mut subgroup = publisher.subgroup(header(2, 0)).await;
        subgroup.object(0, 100).await;
        subgroup.finish();
        assert_eq!(again.next_subgroup().await.all().await, (vec![0], PeerStreamEnd::Fin), "{fault:?}");
        publisher.session.close(code::Session::NO_ERROR, "");
        relay.until("its end", |status| status.tracks.iter().all(|one| one.publishers == 0)).await;
    }
}

/// Every subgroup of a group may be marked END_OF_GROUP, whichever of them has the group's last object. This alone does
/// not make the track malformed.
#[tokio::test]
async fn end_of_group_in_several_subgroups_does_not_make_a_track_malformed() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, _request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut first = publisher.subgroup(SubgroupHeader { end_of_group: false, ..header(1, 0) }).await;
    first.object(0, 100).await;
    let received = subscriber.next_subgroup().await;
    let mut other = other_subgroup(&publisher).await;
    other.object(5, 100).await;
    let second = subscriber.next_subgroup().await;
    other.finish();
    first.object(4, 100).await;
    first.finish();
    assert_eq!(second.all().await, (vec![5], PeerStreamEnd::Fin));
    assert_eq!(received.all().await, (vec![0, 4], PeerStreamEnd::Fin));
    // When the next group arrives, the relay knows the ends of both subgroups.
    let mut next = publisher.subgroup(header(1, 1)).await;
    next.object(0, 100).await;
    next.finish();
    assert_eq!(subscriber.next_subgroup().await.all().await, (vec![0], PeerStreamEnd::Fin));
    relay.until_largest(at(1, 0)).await;
    // exact: a malformed track would have been counted before the later object reached the cache
    assert_eq!(relay.status().drops["malformed_track"], 0);
}

#[tokio::test]
async fn a_fetch_of_a_malformed_track_is_reset() {
    let relay = TestRelay::start();
    let (mut publisher, _namespace, track) = with_publisher(&relay).await;
    let (_subscriber, mut request, _ok, _upstream) =
        first_subscriber(&relay, &mut publisher, &track, 1).await;
    let mut first = publisher.subgroup(header(1, 0)).await;
    // The objects exceed the flow-control credit of a subscriber that does not read, so the FETCH stays open.
    for id in 0..40 {
        first.object(id, 1 << 20).await;
    }
    relay.until("all have begun", |status| status.tracks[0].objects_cached == 40).await;
    let mut fetcher = relay.peer().await;
    let mut fetch = super::fetch::ask_for(&fetcher, &track).await;
    let answer = patiently(fetch.answer()).await.unwrap();
    assert!(matches!(answer, Message::FetchOk(_)), "{answer:?}");
    let (_, mut stream) = patiently(fetcher.streams.recv()).await.unwrap();
    publisher.subgroup(SubgroupHeader { priority: Some(5), ..header(1, 0) }).await.object(40, 100).await;
    assert_eq!(expect_done(&mut request).await.code, code::Done::MALFORMED_TRACK);
    let end = loop {
        match patiently(stream.chunk()).await {
            Ok(Some(_)) => {}
            end => break end,
        }
    };
    assert!(end.is_err(), "{end:?}");
}
