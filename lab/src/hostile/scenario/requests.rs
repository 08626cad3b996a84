//! Scenarios with requests and control messages.

use anyhow::Result;
use millrace_moq::{
    Namespace, Parameters, Properties, SubgroupHeader, SubgroupId, TrackName,
    message::{Publish, PublishNamespace, Subscribe, SubscribeNamespace},
    vi64,
};
use millrace_quic::frame;

use super::{MOMENT, ScenarioAttack};
use crate::hostile::{
    packet,
    params::ClientLimits,
    peer::{HostilePeer, StreamKind},
};

/// Number of request streams, and of data streams, that a client opens.
const STREAMS: u64 = 900;
const TRACKS: u64 = 200;
const NAMESPACES: u64 = 200;
/// Number of request streams, and of data streams, that stay incomplete. `HALF` is the number of bytes that are sent on
/// each.
const HALVES: u64 = 100;
const HALF: usize = 60_000;

pub fn streams_before_setup(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut peer = HostilePeer::connect(attack.target, ClientLimits::default())?;
    for alias in 0..STREAMS {
        peer.open(StreamKind::Request, &[0x03], false)?;
        peer.open(StreamKind::Data, &subgroup(alias, 0), false)?;
    }
    peer.settle()?;
    attack.close(peer)
}

pub fn rendezvous(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut peer = attack.peer()?;
    for number in 0..TRACKS {
        let parameters = Parameters { rendezvous_timeout: Some(60_000), ..Parameters::default() };
        let track = track(&attack.namespace, number)?;
        peer.request(Subscribe { request_id: number * 2, track, parameters })?;
    }
    peer.settle()?;
    std::thread::sleep(MOMENT);
    attack.close(peer)
}

pub fn namespaces(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut publisher = attack.peer()?;
    let mut subscriber = attack.peer()?;
    for number in 0..TRACKS {
        let track = track(&attack.namespace, number)?;
        let request = publisher.request(publish(number, track.clone()))?;
        publisher.answer(request)?;
        let parameters = Parameters::default();
        let request = subscriber.request(Subscribe { request_id: number * 2, track, parameters })?;
        subscriber.answer(request)?;
    }
    let mut peer = attack.peer()?;
    let namespace = Namespace::from_path(&attack.namespace)?;
    let watch =
        SubscribeNamespace { request_id: 0, prefix: Namespace::default(), parameters: Parameters::default() };
    peer.request(watch)?;
    for number in 1..NAMESPACES {
        let parameters = Parameters::default();
        let namespace = match number % 2 {
            0 => namespace.clone(),
            _ => namespace.join(&Namespace::new([number.to_string()])?)?,
        };
        peer.request(PublishNamespace { request_id: number * 2, namespace, parameters })?;
    }
    peer.settle()?;
    std::thread::sleep(MOMENT);
    for peer in [publisher, subscriber, peer] {
        attack.close(peer)?;
    }
    Ok(())
}

pub fn half_messages(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut peer = attack.peer()?;
    let request = peer.request(publish(0, track(&attack.namespace, 0)?))?;
    peer.answer(request)?;
    let mut message = vec![0x03, 0xff, 0xff];
    message.resize(HALF, 0);
    let mut object = Vec::new();
    vi64::encode(0, &mut object);
    vi64::encode(65_000, &mut object);
    object.resize(HALF, 0);
    for group in 0..HALVES {
        let bytes = [subgroup(0, group), object.clone()].concat();
        peer.open(StreamKind::Data, &bytes, false)?;
        peer.open(StreamKind::Request, &message, false)?;
    }
    peer.settle()?;
    std::thread::sleep(MOMENT);
    attack.close(peer)
}

/// Sends several kinds of malformed data, each on a new connection, which the relay closes.
pub fn garbage(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut random = vec![0; 1000];
    fastrand::fill(&mut random);
    for kind in [StreamKind::Request, StreamKind::Data] {
        for bytes in [&random[..], &[0xff; 20], &[0x05, 0, 1, 0xff], &[0x2f, 0]] {
            let mut peer = attack.peer()?;
            // An error is expected: the relay may have closed the connection already.
            let _ = peer.open(kind, bytes, true).and_then(|_| peer.settle());
            attack.vanish(peer);
        }
    }
    let frames = |fields: &[u64]| {
        let mut out = Vec::new();
        packet::write_fields(fields, &mut out);
        out
    };
    let mut datagram = Vec::new();
    frame::write_datagram(&random, &mut datagram);
    // Frames that only a server may send, frames of unknown streams, frames beyond all limits, and an empty packet.
    let frames = [
        frames(&[0x1e]),
        frames(&[0x05, 3, 0]),
        frames(&[0x11, 4003, 1 << 40]),
        frames(&[0x04, 2, 0, (1 << 62) - 1]),
        frames(&[0x0f, 2, (1 << 61), 0]),
        frames(&[0x02, 1 << 40, 0, 0, 1 << 30]),
        frames(&[0x19, 77]),
        datagram,
        random,
    ];
    for frames in frames {
        let mut peer = attack.peer()?;
        let _ = peer.send(frames, true).and_then(|()| peer.settle()); // fails if the relay has closed the connection
        attack.vanish(peer);
    }
    Ok(())
}

/// Returns the encoded header of a subgroup stream whose objects have properties.
pub fn subgroup(alias: u64, group: u64) -> Vec<u8> {
    let header = SubgroupHeader {
        alias,
        group,
        subgroup: SubgroupId::Zero,
        priority: None,
        properties: true,
        end_of_group: false,
        first_object: true,
    };
    let mut bytes = Vec::new();
    header.encode(&mut bytes);
    bytes
}

pub fn track(namespace: &str, number: u64) -> Result<TrackName> {
    Ok(TrackName::new(Namespace::from_path(namespace)?, number.to_string())?)
}

/// Builds a PUBLISH whose track alias is `number`.
pub fn publish(number: u64, track: TrackName) -> Publish {
    Publish {
        request_id: number * 2,
        track,
        track_alias: number,
        parameters: Parameters::default(),
        properties: Properties::default(),
    }
}
