//! Scenarios with very many allowed requests: subscriptions to one track, tracks of one publisher, subscriptions that
//! wait for a track, and updates that change the namespace prefix of a request (SUBSCRIBE_TRACKS).

use anyhow::Result;
use millrace_moq::{
    Namespace, Parameters, TrackName,
    message::{PublishNamespace, RequestUpdate, Subscribe, SubscribeTracks},
};

use super::{
    MOMENT, ScenarioAttack,
    media::{group, publisher},
    requests::publish,
};
use crate::hostile::peer::{HostilePeer, StreamKind, encoded};

/// Number of requests of one session. It is below a relay's limits on open requests and on requests per second.
const REQUESTS: u64 = 900;
/// Number of sessions that make `REQUESTS` requests each.
const SESSIONS: u64 = 8;
/// Number of published tracks, with one viewer each. It exceeds the total number of streams to viewers that a relay
/// prepares in advance for its kernel fast path.
const HOG_TRACKS: u64 = 1100;
/// Number of groups that are published while the requests are open.
const GROUPS: u64 = 20;
/// Number of namespaces that are published and withdrawn while subscriptions wait.
const COMINGS: u64 = 500;
const UPDATES: u64 = 500;
const WAIT_MS: u64 = 60_000;

/// Subscribes to the same track very often. The relay may refuse all but a few of the subscriptions.
pub fn same_track(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut publisher = publisher(attack)?;
    let mut peer = attack.peer()?;
    for number in 0..REQUESTS {
        peer.request(subscribe(number, super::requests::track(&attack.namespace, 0)?))?;
    }
    peer.settle()?;
    for number in 0..GROUPS {
        publisher.open(StreamKind::Data, &group(0, number, 10, 1000), true)?;
        peer.pump(MOMENT / 20, |_| false);
    }
    publisher.settle()?;
    peer.pump(MOMENT, |_| false);
    [publisher, peer].into_iter().try_for_each(|peer| attack.close(peer))
}

/// Publishes tracks with one subscriber and one object each, the object in a stream of its own.
pub fn track_hog(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut peers = Vec::new();
    for first in (0..HOG_TRACKS).step_by(REQUESTS as usize) {
        let numbers = 0..REQUESTS.min(HOG_TRACKS - first);
        let mut publisher = attack.peer()?;
        let mut peer = attack.peer()?;
        for number in numbers.clone() {
            publisher.request(publish(number, nth(attack, 0, first + number)?))?;
        }
        publisher.settle()?;
        for number in numbers.clone() {
            peer.request(subscribe(number, nth(attack, 0, first + number)?))?;
        }
        peer.settle()?;
        for number in numbers {
            publisher.open(StreamKind::Data, &group(number, 0, 1, 100), true)?;
        }
        publisher.settle()?;
        peer.pump(MOMENT, |_| false);
        peers.extend([publisher, peer]);
    }
    peers.into_iter().try_for_each(|peer| attack.close(peer))
}

/// Makes subscriptions wait for tracks, while other namespaces are published. Publishing these namespaces must not make
/// the relay process the waiting subscriptions.
pub fn waiters(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut peers = sessions(attack, |peer, number, track| {
        let parameters = Parameters { rendezvous_timeout: Some(WAIT_MS), ..Parameters::default() };
        peer.request(Subscribe { request_id: number * 2, track, parameters }).map(drop)
    })?;
    let mut publisher = attack.peer()?;
    for number in 0..COMINGS {
        let namespace = namespace(attack, SESSIONS + number)?;
        let request = publisher.request(PublishNamespace {
            request_id: number * 2,
            namespace,
            parameters: Parameters::default(),
        })?;
        publisher.answer(request)?;
        publisher.reset(request)?;
    }
    publisher.settle()?;
    peers.push(publisher);
    peers.into_iter().try_for_each(|peer| attack.close(peer))
}

/// Publishes many tracks, and sends many updates of one SUBSCRIBE_TRACKS request. Each update changes the request's
/// namespace prefix. Few of the namespaces have tracks.
pub fn updates(attack: &mut ScenarioAttack<'_>) -> Result<()> {
    let mut peers = sessions(attack, |peer, number, track| peer.request(publish(number, track)).map(drop))?;
    let mut peer = attack.peer()?;
    let parameters = Parameters::default();
    let prefix = namespace(attack, SESSIONS)?;
    let request = peer.request(SubscribeTracks { request_id: 0, prefix, parameters })?;
    peer.answer(request)?;
    for number in 0..UPDATES {
        let prefix = namespace(attack, number)?;
        let parameters = Parameters { track_namespace_prefix: Some(prefix), ..Parameters::default() };
        let update = RequestUpdate { request_id: (number + 1) * 2, parameters };
        peer.write(request, &encoded(update)?, false)?;
    }
    peer.settle()?;
    peer.pump(MOMENT, |_| false);
    peers.push(peer);
    peers.into_iter().try_for_each(|peer| attack.close(peer))
}

/// Opens sessions that make as many requests as a relay allows, each for a different track.
fn sessions(
    attack: &ScenarioAttack<'_>,
    request: impl Fn(&mut HostilePeer, u64, TrackName) -> Result<()>,
) -> Result<Vec<HostilePeer>> {
    let session = |session| {
        let mut peer = attack.peer()?;
        for number in 0..REQUESTS {
            request(&mut peer, number, nth(attack, session, number)?)?;
        }
        peer.settle()?;
        Ok(peer)
    };
    (0..SESSIONS).map(session).collect()
}

fn namespace(attack: &ScenarioAttack<'_>, number: u64) -> Result<Namespace> {
    Ok(Namespace::from_path(&format!("{}/{number}", attack.namespace))?)
}

fn nth(attack: &ScenarioAttack<'_>, session: u64, number: u64) -> Result<TrackName> {
    Ok(TrackName::new(namespace(attack, session)?, number.to_string())?)
}

fn subscribe(number: u64, track: TrackName) -> Subscribe {
    Subscribe { request_id: number * 2, track, parameters: Parameters::default() }
}
