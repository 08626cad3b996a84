//! Whatever a hostile client does, its bystanders get every object, and nothing of it is left.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering::Relaxed},
};
use std::time::Duration;

use millrace_client::{
    session::{Remote, Session},
    tls::Trust,
};
use millrace_lab::hostile::{
    self,
    params::Params,
    peer::Target,
    scenario::{self, Report, Scenario},
};
use millrace_proto::moq::SubgroupHeader;
use tokio::{runtime::Handle, sync::watch, task::spawn_blocking, time::sleep};

use super::peer::{End, Peer, Relay, first_subscriber, header, patiently, with_publisher};

/// Objects of a group of the bystanders', and the time between them.
const OBJECTS: u64 = 10;
const PAUSE: Duration = Duration::from_millis(5);

/// Publishes groups until it is told to stop, and returns how many.
async fn publish(publisher: &Peer, stop: Arc<AtomicBool>) -> u64 {
    let mut group = 0;
    while !stop.load(Relaxed) {
        let mut subgroup = publisher.subgroup(header(1, group)).await;
        for id in 0..OBJECTS {
            subgroup.object(id, 1000).await;
            sleep(PAUSE).await;
        }
        subgroup.finish();
        group += 1;
    }
    group
}

/// Takes groups, all whole and in order, until there are as many as were published.
async fn take(subscriber: &mut Peer, mut published: watch::Receiver<Option<u64>>) {
    let mut taken = 0;
    while *published.borrow_and_update() != Some(taken) {
        let received = tokio::select! {
            received = subscriber.next_subgroup() => received,
            _ = published.changed() => continue,
        };
        assert_eq!(received.header.group, taken);
        assert_eq!(received.all().await, ((0..OBJECTS).collect(), End::Fin), "group {taken}");
        taken += 1;
    }
}

fn target(relay: &Relay) -> Target {
    Target { addr: relay.addr, name: "localhost".into(), path: String::new() }
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
async fn attack(relay: &Relay, scenario: &'static Scenario) -> Report {
    let target = target(relay);
    let round = spawn_blocking(move || scenario::run(scenario, &target, 1, None));
    patiently(round).await.unwrap().unwrap_or_else(|error| panic!("{}: {error:#}", scenario.name))
}

/// What is left of all scenarios together is counted at the end: `millrace lab hostile` says of which one it is.
#[tokio::test]
async fn bystanders_lose_nothing_and_nothing_is_left() {
    let relay = Relay::with(|config| {
        config.cache_age = Duration::from_secs(1);
        config.cache_bytes = 16 << 20;
        config.idle_timeout = Duration::from_secs(3);
    });
    let tasks = Handle::current().metrics().num_alive_tasks();
    let (mut publisher, namespace, track) = with_publisher(&relay).await;
    let (mut subscriber, request, _, upstream) = first_subscriber(&relay, &mut publisher, &track, 1).await;
    let (stop, total) = (Arc::new(AtomicBool::new(false)), watch::Sender::new(None));
    let publishing = async { total.send_replace(Some(publish(&publisher, Arc::clone(&stop)).await)) };
    let attacking = async {
        for scenario in scenario::ALL {
            let report = attack(&relay, scenario).await;
            println!("{}: {:?}", scenario.name, report.rounds);
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
    assert_eq!(relay.status().handshakes, UNPROVED);
    // Whoever can prove its address is served.
    let peer = relay.peer().await;
    relay.until("a session", |status| status.sessions.len() == 1).await;
    let status = relay.status();
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
                    false => connection.open_bi().await.unwrap().0,
                };
                if stream.write_all(if objects { &object } else { &message }).await.is_err() {
                    break;
                }
                streams.push(stream);
            }
            connection.closed().await
        };
        let closed = patiently(sending).await;
        assert!(closed.to_string().contains("not complete"), "{closed}");
        assert!(streams.len() >= (4 << 20) / BYTES, "{}", streams.len());
        drop(subscriber);
    }
}

fn remote(relay: &Relay) -> Remote {
    Remote { url: relay.url(), trust: Trust::Anyone }
}
