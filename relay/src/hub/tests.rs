use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use millrace_moq::{GroupOrder, Location, tracks::cache};
use millrace_testkit::async_wait_for;
use tokio::{task::JoinSet, time::sleep};

use super::*;

/// Answers every SUBSCRIBE alike.
struct Answering {
    id: u64,
    answer: Answer,
    asked: AtomicU64,
    backed_up: AtomicU64,
}

impl Answering {
    fn new(id: u64, answer: Answer) -> Arc<Self> {
        Arc::new(Self { id, answer, asked: AtomicU64::new(0), backed_up: AtomicU64::new(0) })
    }
}

impl Publisher for Answering {
    fn id(&self) -> u64 {
        self.id
    }

    fn is_upstream(&self) -> bool {
        false
    }

    fn subscribe(&self, _: Arc<LiveTrack>, answers: mpsc::Sender<Answer>) {
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
    let limits = Limits {
        max_tracks: 100_000,
        linger: Duration::from_secs(1),
        absence: Duration::ZERO,
        max_rendezvous: Duration::from_secs(60),
        request_timeout: Duration::from_secs(10),
    };
    let cache = Arc::new(Cache::new(cache::Limits { bytes: 1 << 20, age: Duration::from_secs(1) }));
    Arc::new(Hub::new(limits, cache, Delays::default(), Adaptive::Off, false))
}

fn namespace(path: &str) -> Namespace {
    Namespace::from_path(path).unwrap()
}

fn track(path: &str) -> TrackName {
    TrackName::new(namespace(path), "video".to_owned()).unwrap()
}

const REQUESTER: Requester = Requester { session: 1, is_upstream: false };

/// A SUBSCRIBE that waits for a publisher for a minute.
async fn subscribe(hub: Arc<Hub>, name: TrackName) -> Answer {
    hub.established(&name, REQUESTER, Duration::from_secs(60), None).await.map(drop)
}

async fn until_waiting(hub: &Hub, count: usize) {
    async_wait_for("SUBSCRIBEs that wait", || match hub.waiting.count() {
        now if now == count => Ok(()),
        now => Err(format!("{now} of {count}")),
    })
    .await;
}

/// Neither a namespace nor a track wakes those who wait for something else, however near its name is; what they wait for wakes them
/// once.
#[tokio::test]
async fn arrivals_elsewhere_are_no_attempt_of_who_waits() {
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
    // One for all of them.
    let publication = publish("mine");
    while let Some(answer) = waiting.join_next().await {
        answer.unwrap().expect("the publisher agrees");
    }
    drop(publication);
    assert_eq!((hub.waiting.count(), searches()), (0, 2 * WAITERS as u64));
}

/// A publisher that comes and goes, and has nothing, is asked more and more seldom.
#[tokio::test]
async fn who_waits_looks_more_seldom_each_time() {
    let hub = hub();
    let waiting = tokio::spawn(subscribe(Arc::clone(&hub), track("mine")));
    let publisher = Answering::new(2, Err(refusal()));
    let begun = Instant::now();
    for _ in 0..200 {
        drop(hub.publish(namespace("mine"), &(Arc::clone(&publisher) as _), false));
        let _present = hub.publish(namespace("mine"), &(Arc::clone(&publisher) as _), false);
        sleep(Duration::from_millis(1)).await; // exact: how often it comes, not a wait
    }
    let most = 2 + (begun.elapsed().as_millis() / PAUSES.0.as_millis()).ilog2();
    let asked = publisher.asked.load(Relaxed);
    assert!((1..=u64::from(most)).contains(&asked), "{asked} times of {most} at most");
    waiting.abort();
}

/// What is there comes a page at a time, each but the first when it may; nothing is missed that comes meanwhile.
#[tokio::test]
async fn a_watch_of_many_is_paced() {
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

/// A publisher that comes is told of the tracks below its namespace, a page at a time.
#[tokio::test]
async fn a_publisher_of_much_is_told_of_it_in_pages() {
    let hub = hub();
    for number in 0..200 {
        hub.track(&track(&format!("mine/{number}")), Instant::now()).unwrap();
        hub.track(&track(&format!("other/{number}")), Instant::now()).unwrap();
    }
    let (publisher, paced) = (Answering::new(2, Ok(())), AtomicU64::new(0));
    let pace = || {
        paced.fetch_add(1, Relaxed);
        Clock::now()
    };
    let publishing: Arc<dyn Publisher> = Arc::clone(&publisher) as _;
    hub.subscribe_existing(&namespace("mine"), &publishing, pace).await;
    assert_eq!((paced.load(Relaxed), publisher.backed_up.load(Relaxed)), (3, 0), "nobody is subscribed");
}
