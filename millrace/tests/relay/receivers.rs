//! Tests of `millrace-lab lab receivers` (many subscribers in one process) at a real relay: hundreds of sessions whose
//! addresses change.

use std::{
    collections::BTreeMap,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use millrace_client::payload::{self, Stamp};
use millrace_lab::receivers::{
    ReceiverControl, ReceiverRun, Settings, moves::WaveSettings, report::ReceiversReport,
};
use millrace_moq::{Status as ObjectStatus, code, data::encode_object_header, message::PublishDone};
use millrace_relay_daemon::status::Status;
use millrace_testkit::async_wait_for;
use tokio::{
    task::{JoinHandle, spawn_blocking},
    time::sleep,
};

use super::peer::{TestPeer, TestRelay, first_subscriber, header, patiently, with_publisher};

const SESSIONS: usize = 200;
const OBJECTS: u64 = 20;
const OBJECT: usize = 300;
/// Time between two objects.
const PAUSE: Duration = Duration::from_millis(25);
const ALIAS: u64 = 1;

fn settings(relay: &TestRelay, track: &millrace_moq::TrackName) -> Settings {
    Settings {
        relay: relay.addr,
        host: "localhost".to_owned(),
        path: String::new(),
        track: Some(track.clone()),
        subscribes_at_once: true,
        sessions: SESSIONS,
        sockets: 4,
        from: Vec::new(),
        streams: 16,
        duration: None,
        moves: None,
    }
}

fn start(settings: Settings, control: &Arc<ReceiverControl>) -> JoinHandle<ReceiversReport> {
    let receivers = ReceiverRun::new(settings, Arc::clone(control)).unwrap();
    spawn_blocking(move || receivers.run().unwrap())
}

/// Publishes groups of numbered objects until it is stopped, and returns the number of groups.
async fn publish(publisher: &TestPeer, stop: &AtomicBool) -> u64 {
    let mut group = 0;
    while !stop.load(Relaxed) {
        let mut subgroup = publisher.subgroup(header(ALIAS, group)).await;
        for id in 0..OBJECTS {
            let stamp = Stamp { sequence: group * OBJECTS + id, sent: payload::now(), total: 0 };
            let mut bytes = Vec::new();
            let previous = id.checked_sub(1);
            encode_object_header(previous, id, None, OBJECT as u64, ObjectStatus::Normal, &mut bytes);
            bytes.extend_from_slice(&payload::build(stamp, OBJECT));
            subgroup.stream.write_all(&bytes).await.unwrap();
            sleep(PAUSE).await; // exact: this pause sets the publisher's sending rate
        }
        subgroup.finish();
        group += 1;
    }
    group
}

/// Returns the address of each subscriber.
fn addresses(status: &Status) -> BTreeMap<u64, SocketAddr> {
    status.sessions.iter().filter(|one| one.subscriber).map(|one| (one.id, one.remote)).collect()
}

#[tokio::test]
async fn sessions_that_change_address_within_a_second_lose_no_objects() {
    let relay = TestRelay::with(|config| config.cache_age = Duration::from_secs(60));
    let (mut publisher, namespace, track) = with_publisher(&relay).await;
    let (bystander, request, _, mut upstream) = first_subscriber(&relay, &mut publisher, &track, ALIAS).await;
    let control = Arc::new(ReceiverControl::default());
    let running = start(settings(&relay, &track), &control);
    let stop = AtomicBool::new(false);
    let moving = async {
        async_wait_for("any object", || control.served() == SESSIONS as u64).await;
        relay.until_ready().await;
        // exact: no session changes its address before `move_sessions` is called
        let before = addresses(&relay.status());
        assert_eq!(before.len(), SESSIONS + 1);
        control.move_sessions(WaveSettings { share: 1.0, within: Duration::from_secs(1) });
        async_wait_for("media again", || control.resumed() == SESSIONS as u64).await;
        let all_moved = |status: &Status| {
            let is_moved = |(id, addr): (&u64, &SocketAddr)| addresses(status).get(id) != Some(addr);
            before.iter().filter(|one| is_moved(*one)).count() == SESSIONS
        };
        relay.until("all sessions to be at their new addresses", all_moved).await;
        relay.until_ready().await;
        stop.store(true, Relaxed);
    };
    let (groups, ()) = tokio::join!(publish(&publisher, &stop), moving);
    let stream_count = groups;
    upstream
        .send(PublishDone { code: code::Done::TRACK_ENDED, stream_count, reason: String::new() })
        .await
        .unwrap();
    let report = patiently(running).await.unwrap();
    let ReceiversReport { connected, subscribed, served, ref moves, .. } = report;
    assert_eq!([connected, subscribed, served], [SESSIONS as u64; 3], "{report:#?}");
    assert!(report.ended_early.is_empty(), "{report:#?}");
    assert_eq!((moves.len(), moves[0].sessions), (1, SESSIONS as u64));
    let lost = [report.missing, report.duplicates, report.late, report.streams_cut, report.not_resumed];
    assert_eq!(lost, [0; 5], "{report:#?}");
    assert!(report.objects >= SESSIONS as u64 * OBJECTS && report.latency_ms.is_some());
    relay.assert_forwarded();
    drop((bystander, request, namespace));
}

/// A share of the sessions changes addresses again and again until the test ends.
#[tokio::test]
async fn a_tenth_of_the_sessions_changes_address_every_300_ms_without_loss() {
    let relay = TestRelay::start();
    let (mut publisher, namespace, track) = with_publisher(&relay).await;
    let (bystander, request, _, upstream) = first_subscriber(&relay, &mut publisher, &track, ALIAS).await;
    let control = Arc::new(ReceiverControl::default());
    let every = Duration::from_millis(300);
    let moves = Some((every, WaveSettings { share: 0.1, within: every / 3 }));
    let sessions = 40;
    let running = start(Settings { sessions, moves, ..settings(&relay, &track) }, &control);
    let stop = AtomicBool::new(false);
    let watching = async {
        async_wait_for("media after three moves", || control.resumed() >= 3 * sessions as u64 / 10).await;
        stop.store(true, Relaxed);
    };
    tokio::join!(publish(&publisher, &stop), watching);
    control.stop();
    let report = patiently(running).await.unwrap();
    assert!(report.moves.len() >= 3, "{report:#?}");
    assert!(report.moves.iter().all(|wave| wave.sessions == sessions as u64 / 10), "{report:#?}");
    assert_eq!((report.missing, report.duplicates, report.ended_early.len()), (0, 0, 0), "{report:#?}");
    drop((bystander, request, namespace, upstream));
}

#[tokio::test]
async fn refused_sessions_and_missing_relays_are_reported() {
    let relay = TestRelay::with(|config| config.max_sessions = 10);
    let control = Arc::new(ReceiverControl::default());
    let (mut publisher, namespace, track) = with_publisher(&relay).await;
    let (bystander, request, _, upstream) = first_subscriber(&relay, &mut publisher, &track, ALIAS).await;
    let running = start(Settings { sessions: 20, ..settings(&relay, &track) }, &control);
    let stop = AtomicBool::new(false);
    let watching = async {
        async_wait_for("objects, or refusals", || (control.served(), control.ended_early()) == (8, 12)).await;
        stop.store(true, Relaxed);
    };
    tokio::join!(publish(&publisher, &stop), watching);
    control.stop();
    let report = patiently(running).await.unwrap();
    assert_eq!((report.served, report.ended_early.values().sum::<u64>()), (8, 12), "{report:#?}");
    drop((bystander, request, namespace, upstream));
}
