//! Scenarios in which the client publishes or receives objects.

use anyhow::Result;
use bytes::Bytes;
use millrace_moq::{
    Filter, Location, ObjectDatagram, Parameters, Status,
    data::encode_object_header,
    message::{FetchKind, FetchRequest, Publish, Subscribe},
};

use super::{
    MOMENT, ScenarioAttack,
    requests::{publish, subgroup, track},
};
use crate::hostile::{
    params::ClientLimits,
    peer::{Acks, HostilePeer, StreamKind},
};

/// Number of objects in a track, and bytes in each of them.
const OBJECTS: u64 = 100;
const OBJECT: usize = 20_000;
const FETCHES: u64 = 200;
const DATAGRAMS: u64 = 5_000;
/// Number of tracks with one large group each. `HOG` is the size of that group's object, bytes.
const HOGS: u64 = 40;
const HOG: usize = 1 << 20;

/// Returns the encoded stream of one group with `objects` objects, each with a payload of `len` bytes.
pub fn group(alias: u64, group: u64, objects: u64, len: usize) -> Vec<u8> {
    let mut bytes = subgroup(alias, group);
    for id in 0..objects {
        let previous = id.checked_sub(1);
        encode_object_header(previous, id, Some(&[]), len as u64, Status::Normal, &mut bytes);
        bytes.resize(bytes.len() + len, id as u8);
    }
    bytes
}

/// Opens a session that publishes track 0.
pub fn publisher(attack: &ScenarioAttack<'_>) -> Result<HostilePeer> {
    let mut peer = attack.peer()?;
    let request = peer.request(publish(0, track(&attack.namespace, 0)?))?;
    peer.answer(request)?;
    Ok(peer)
}

/// Opens a session that subscribes to track 0. `params` limits what the relay may send.
fn subscriber(attack: &ScenarioAttack<'_>, params: ClientLimits) -> Result<HostilePeer> {
    let mut peer = HostilePeer::connect(attack.target, params)?;
    peer.setup(attack.target)?;
    let subscribe =
        Subscribe { request_id: 0, track: track(&attack.namespace, 0)?, parameters: Parameters::default() };
    let request = peer.request(subscribe)?;
    peer.answer(request)?;
    Ok(peer)
}

pub fn unread_fetches(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut publisher = publisher(attack)?;
    publisher.open(StreamKind::Data, &group(0, 0, OBJECTS, OBJECT), true)?;
    publisher.settle()?;
    // The client's flow-control limits allow the relay to answer each request, but to send no byte of the fetched
    // objects.
    let mut peer =
        HostilePeer::connect(attack.target, ClientLimits { max_streams: 3, ..ClientLimits::default() })?;
    peer.setup(attack.target)?;
    for number in 0..FETCHES {
        let track = track(&attack.namespace, 0)?;
        let kind = FetchKind::Standalone {
            track,
            range: Filter::range(Location::new(0, 0), Location::new(0, u64::MAX)),
        };
        peer.request(FetchRequest { request_id: number * 2, kind, parameters: Parameters::default() })?;
    }
    peer.settle()?;
    std::thread::sleep(MOMENT);
    attack.close(publisher)?;
    attack.close(peer)
}

pub fn no_acks(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    acknowledge(attack, Acks::None)
}

pub fn optimistic_acks(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    acknowledge(attack, Acks::Optimistic)
}

/// Receives a track, and acknowledges packets as `acks` says.
fn acknowledge(attack: &mut ScenarioAttack<'_>, acks: Acks) -> Result<()> {
    let mut publisher = publisher(attack)?;
    let mut peer = subscriber(attack, ClientLimits::default())?;
    peer.acks = acks;
    for number in 0..10 {
        publisher.open(StreamKind::Data, &group(0, number, OBJECTS / 10, OBJECT), true)?;
        peer.pump(MOMENT / 10, |_| false);
    }
    publisher.settle()?;
    peer.pump(MOMENT, |_| false);
    attack.close(publisher)?;
    attack.vanish(peer);
    Ok(())
}

pub fn datagrams(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut publisher = publisher(attack)?;
    let mut peer = subscriber(attack, ClientLimits::default())?;
    for object in (0..DATAGRAMS).chain(0..DATAGRAMS) {
        let datagram = ObjectDatagram {
            alias: 0,
            group: 0,
            object,
            priority: None,
            end_of_group: false,
            properties: Bytes::new(),
            status: None,
            payload: Bytes::from_static(&[0; 32]),
        };
        let mut bytes = Vec::new();
        datagram.encode(&mut bytes);
        publisher.datagram(&bytes)?;
    }
    publisher.settle()?;
    peer.pump(MOMENT, |_| false);
    attack.close(publisher)?;
    attack.close(peer)
}

pub fn cache_hog(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut peer = attack.peer()?;
    for number in 0..HOGS {
        let request = peer.request(publish(number, track(&attack.namespace, number)?))?;
        peer.answer(request)?;
        // The stream holds the track's newest group, and never ends.
        peer.open(StreamKind::Data, &group(number, 0, 1, HOG), false)?;
    }
    peer.settle()?;
    attack.close(peer)
}

pub fn silent_copies(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut peers = Vec::new();
    for _ in 0..3 {
        let mut peer = attack.peer()?;
        let largest = Some(Location::new(u64::MAX, u64::MAX));
        let parameters = Parameters { largest_object: largest, ..Parameters::default() };
        let claim = Publish { parameters, ..publish(0, track(&attack.namespace, 0)?) };
        let request = peer.request(claim)?;
        peer.answer(request)?;
        for number in 0..100 {
            peer.open(StreamKind::Data, &subgroup(0, number), false)?;
        }
        peer.settle()?;
        peers.push(peer);
    }
    let subscriber = subscriber(attack, ClientLimits::default())?;
    peers.into_iter().chain([subscriber]).try_for_each(|peer| attack.close(peer))
}

pub fn vanish(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut publisher = publisher(attack)?;
    let mut peer = subscriber(attack, ClientLimits::default())?;
    publisher.open(StreamKind::Data, &group(0, 0, 10, OBJECT), false)?;
    publisher.settle()?;
    peer.pump(MOMENT, |_| false);
    attack.vanish(publisher);
    attack.vanish(peer);
    Ok(())
}
