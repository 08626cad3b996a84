use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use millrace_moq::{GroupOrder, Location, tracks::cache};
use millrace_testkit::async_wait_for;
use tokio::{task::JoinSet, time::sleep};

use super::*;

/// A publisher that gives the same answer to every SUBSCRIBE.
struct Answering {
    id: u64,
    answer: SubscribeAnswer,
    asked: AtomicU64,
    backed_up: AtomicU64,
}

impl Answering {
    fn new(id: u64, answer: SubscribeAnswer) -> Arc<Self> {
        Arc::new(Self { id, answer, asked: AtomicU64::new(0), backed_up: AtomicU64::new(0) })
    }
}

impl HubPublisher for Answering {
    fn id(&self) -> u64 {
        self.id
    }

    fn is_upstream(&self) -> bool {
        false
    }

    fn subscribe(&self, _: Arc<LiveTrack>, answers: mpsc::Sender<SubscribeAnswer>) {
        self.asked.fetch_add(1, Relaxed);
        answers.try_send(self.answer.clone()).unwrap();
    }

    fn back_up(&self, tracks: Vec<Arc<LiveTrack>>) {
        self.backed_up.fetch_add(tracks.len() as u64, Relaxed);
    }

    fn fetch(&self, _: TrackName, _: (Location, Location), _: GroupOrder) -> Fetching<'_> {
        Box::pin(async { Err(refusal()) })
    }
}

fn refusal() -> RequestError {
    RequestError::new(code::Request::DOES_NOT_EXIST, "not here")
}

fn hub() -> Arc<Hub> {
    let limits = HubLimits {
        max_tracks: 100_000,
        offloaded_tracks: 128,
        linger: Duration::from_secs(1),
        absence: Duration::ZERO,
        max_rendezvous: Duration::from_secs(60),
        max_routes: 100,
        request_timeout: Duration::from_secs(10),
    };
    let cache = Arc::new(TrackCache::new(cache::CacheLimits { bytes: 1 << 20, age: Duration::from_secs(1) }));
    Arc::new(Hub::new(limits, cache, Delays::default(), AdaptiveMode::Off, false))
}

fn namespace(path: &str) -> Namespace {
    Namespace::from_path(path).unwrap()
}

fn track(path: &str) -> TrackName {
    TrackName::new(namespace(path), "video".to_owned()).unwrap()
}

const REQUESTER: Requester = Requester::client(1);

/// Subscribes to a track, and waits up to a minute for its publisher.
async fn subscribe(hub: Arc<Hub>, name: TrackName) -> SubscribeAnswer {
    hub.established(&name, REQUESTER, Duration::from_secs(60), None).await.map(drop)
}

async fn until_waiting(hub: &Hub, count: usize) {
    async_wait_for("SUBSCRIBEs that wait", || match hub.waiting.count() {
        now if now == count => Ok(()),
        now => Err(format!("{now} of {count}")),
    })
    .await;
}

/// A namespace or track that appears must not wake SUBSCRIBEs for other tracks, even if the names are similar. A
/// SUBSCRIBE is woken once, when its track appears.
#[tokio::test]
async fn new_publisher_wakes_only_subscribes_waiting_for_its_tracks() {
    const WAITERS: usize = 7200;
    let hub = hub();
    let mut waiting = JoinSet::new();
    for number in 0..WAITERS {
        waiting.spawn(subscribe(Arc::clone(&hub), track(&format!("mine/{number}"))));
    }
    until_waiting(&hub, WAITERS).await;
    let searches = || hub.counters.publisher_searches.load(Relaxed);
    assert_eq!(searches(), WAITERS as u64);
    let publisher = Answering::new(2, Ok(()));
    let publish = |path: &str| hub.publish(namespace(path), &(Arc::clone(&publisher) as _), false);
    for number in 0..1000 {
        drop(publish(&format!("other/{number}")));
        drop(publish(&format!("mine/{number}/deeper")));
        drop(publish(&format!("min/{number}")));
        let name = TrackName::new(namespace(&format!("mine/{number}")), "audio".to_owned()).unwrap();
        hub.track_established(&hub.track(&name, Instant::now()).unwrap());
    }
    assert_eq!((hub.waiting.count(), searches()), (WAITERS, WAITERS as u64));
    let publication = publish("mine/7");
    waiting.join_next().await.unwrap().unwrap().expect("the publisher agrees");
    drop(publication);
    assert_eq!((hub.waiting.count(), searches()), (WAITERS - 1, WAITERS as u64 + 1));
    assert_eq!(publisher.asked.load(Relaxed), 1);
    // One namespace covers the tracks of all waiting SUBSCRIBEs.
    let publication = publish("mine");
    while let Some(answer) = waiting.join_next().await {
        answer.unwrap().expect("the publisher agrees");
    }
    drop(publication);
    assert_eq!((hub.waiting.count(), searches()), (0, 2 * WAITERS as u64));
}

/// A SUBSCRIBE that asks for no wait arrives before the relay has a session with its upstream relay. It is served once
/// there is one. If there is none within [`RENDEZVOUS`], the SUBSCRIBE is refused with that reason.
#[tokio::test]
async fn subscribe_waits_a_little_for_an_upstream_relay_that_is_away() {
    let hub = hub();
    let at_once = || {
        let hub = Arc::clone(&hub);
        tokio::spawn(async move { hub.established(&track("mine"), REQUESTER, Duration::ZERO, None).await })
    };
    assert!(at_once().await.unwrap().is_err_and(|refused| refused.code == code::Request::DOES_NOT_EXIST));
    let away = status::UpstreamStatus { host: "up:4443".into(), ..status::UpstreamStatus::default() };
    *hub.upstream.lock() = Some(away);
    let began = Clock::now();
    let refused = at_once().await.unwrap().map(drop).expect_err("nobody publishes it");
    assert!(began.elapsed() >= RENDEZVOUS && refused.code == code::Request::TIMEOUT, "{}", refused.code);
    assert!(refused.reason.contains("upstream relay is away"), "{}", refused.reason);
    let served = at_once();
    until_waiting(&hub, 1).await;
    let upstream = Answering::new(2, Ok(()));
    let _everything = hub.publish(Namespace::default(), &(Arc::clone(&upstream) as _), true);
    served.await.unwrap().expect("the upstream relay has it");
}

/// A publisher that connects, refuses the track and disconnects repeatedly gets SUBSCRIBE at growing intervals.
#[tokio::test]
async fn flapping_publisher_gets_subscribe_at_growing_intervals() {
    let hub = hub();
    let waiting = tokio::spawn(subscribe(Arc::clone(&hub), track("mine")));
    let publisher = Answering::new(2, Err(refusal()));
    let begun = Instant::now();
    for _ in 0..200 {
        drop(hub.publish(namespace("mine"), &(Arc::clone(&publisher) as _), false));
        let _present = hub.publish(namespace("mine"), &(Arc::clone(&publisher) as _), false);
        // exact: this pause is the interval at which the publisher reconnects
        sleep(Duration::from_millis(1)).await;
    }
    let most = 2 + (begun.elapsed().as_millis() / PAUSES.0.as_millis()).ilog2();
    let asked = publisher.asked.load(Relaxed);
    assert!((1..=u64::from(most)).contains(&asked), "{asked} times of {most} at most");
    waiting.abort();
}

/// A watch lists the present namespaces page by page, and waits before each page but the first. Namespace changes
/// during the listing are not missed.
#[tokio::test]
async fn listing_of_many_namespaces_to_a_watcher_is_paced() {
    let hub = hub();
    let publisher = Answering::new(2, Ok(()));
    let publish = |path: String| hub.publish(namespace(&path), &(Arc::clone(&publisher) as _), false);
    let _others: Vec<_> = (0..1000).map(|number| publish(format!("other/{number}"))).collect();
    let _mine: Vec<_> = (0..200).map(|number| publish(format!("mine/{number}"))).collect();
    let paced = AtomicU64::new(0);
    let pace = || {
        paced.fetch_add(1, Relaxed);
        Clock::now()
    };
    let mut watch = hub.watch_namespaces(namespace("mine"));
    let mut found = vec![watch.next(pace).await.unwrap()];
    assert_eq!(paced.load(Relaxed), 1, "what nobody takes is not looked for");
    drop(publish("mine/late".to_owned()));
    for _ in 1..200 {
        found.push(watch.next(pace).await.unwrap());
    }
    let mut expected: Vec<_> =
        (0..200).map(|number| NamespaceEvent::Published(namespace(&format!("mine/{number}")))).collect();
    expected.sort_by_key(|event| format!("{event:?}"));
    found.sort_by_key(|event| format!("{event:?}"));
    assert_eq!(found, expected);
    assert_eq!(paced.load(Relaxed), 3, "for each page but the first");
    let late = namespace("mine/late");
    assert_eq!(watch.next(pace).await, Some(NamespaceEvent::Published(late.clone())));
    assert_eq!(watch.next(pace).await, Some(NamespaceEvent::Done(late)));
}

/// SUBSCRIBEs for the tracks below a new publisher's namespace are sent page by page.
#[tokio::test]
async fn publisher_of_many_tracks_gets_subscribes_in_pages() {
    let hub = hub();
    for number in 0..200 {
        hub.track(&track(&format!("mine/{number}")), Instant::now()).unwrap();
        hub.track(&track(&format!("other/{number}")), Instant::now()).unwrap();
    }
    let publisher = Answering::new(2, Ok(()));
    let paced = AtomicU64::new(0);
    let pace = || {
        paced.fetch_add(1, Relaxed);
        Clock::now()
    };
    let publishing: Arc<dyn HubPublisher> = Arc::clone(&publisher) as _;
    hub.subscribe_existing(&namespace("mine"), &publishing, pace).await;
    assert_eq!((paced.load(Relaxed), publisher.backed_up.load(Relaxed)), (3, 0), "nobody is subscribed");
}
