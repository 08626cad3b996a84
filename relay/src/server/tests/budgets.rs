//! No message causes work that no budget covers.

use millrace_moq::message::{RequestOk, RequestUpdate, SubscribeNamespace, TrackStatus};

use super::{
    asked::{Asked, DRAFT},
    *,
};
use crate::access::{Budget, Limits, Policy};

/// Requests per second of a session.
const RATE: u64 = 200;

fn relay() -> Relay {
    relay_at(RATE)
}

fn relay_at(requests_per_second: u64) -> Relay {
    let session = Budget { requests_per_second, ..Limits::default().session };
    let access = Access::new(Policy::default(), Limits { session, ..Limits::default() });
    Relay::with(access, |transport| transport.alpn = vec![DRAFT.alpn().to_vec()])
}

struct Client {
    connection: Arc<Connection>,
    _control: SendStream,
}

impl Client {
    async fn connect(relay: &Relay) -> Self {
        let (connection, _) = relay.connect().await;
        let _control = open_stream(&connection, &encoded_in(DRAFT, Setup::default())).await;
        Self { connection, _control }
    }

    async fn ask(&self, message: impl Into<Message>) -> Asked {
        Asked::open(&self.connection, message).await
    }
}

impl Asked {
    /// The code that the request was refused with.
    async fn refusal(&mut self) -> code::Request {
        match self.message().await {
            Message::RequestError(error) => error.code,
            other => panic!("{other:?}"),
        }
    }
}

/// One more second's worth than what is there at once takes a second. All are answered: an update that is refused would end its
/// request.
#[tokio::test]
async fn updates_come_at_the_rate_of_requests() {
    let relay = relay();
    let client = Client::connect(&relay).await;
    let prefix = |number: u64| Namespace::from_path(&format!("a/{number}")).unwrap();
    let watch = SubscribeNamespace { request_id: 0, prefix: prefix(0), parameters: Parameters::default() };
    let mut asked = client.ask(watch).await;
    assert!(matches!(asked.message().await, Message::RequestOk(_)));
    let begun = Instant::now();
    // Half of a second's worth is left to requests.
    let updates = RATE / 2 + RATE;
    let mut bytes = Vec::new();
    for number in 1..=updates {
        let track_namespace_prefix = Some(prefix(number));
        let parameters = Parameters { track_namespace_prefix, ..Parameters::default() };
        bytes.extend(encoded_in(DRAFT, RequestUpdate { request_id: 2 * number, parameters }));
    }
    asked.send.write_all(&bytes).await.unwrap();
    for _ in 0..updates {
        assert!(matches!(asked.message().await, Message::RequestOk(_)));
    }
    let took = begun.elapsed();
    assert!(took > Duration::from_millis(900), "{updates} updates took {took:?}");
    assert!(relay.server.status().totals.message_waits > 0); // exact: the updates were answered
}

/// What is refused whatever the budget says takes from it as well.
#[tokio::test]
async fn requests_that_nobody_may_make_count() {
    // So few that they come faster than there is room again, whoever has the CPU.
    let relay = relay_at(4);
    let client = Client::connect(&relay).await;
    let reserved = TrackName::new(Namespace::from_path(".").unwrap(), "t".to_owned()).unwrap();
    let status = |number: u64, track: &TrackName| TrackStatus {
        request_id: 2 * number,
        track: track.clone(),
        parameters: Parameters::default(),
    };
    let mut last = None;
    for number in 0..3 * RATE {
        let mut asked = client.ask(status(number, &reserved)).await;
        assert_eq!(asked.refusal().await, code::Request::UNAUTHORIZED);
        let mut good = client.ask(status(3 * RATE + number, &track(0))).await;
        last = Some(good.refusal().await);
        if last == Some(code::Request::EXCESSIVE_LOAD) {
            break;
        }
    }
    assert_eq!(last, Some(code::Request::EXCESSIVE_LOAD), "of as many as fit in a second");
}

/// A draft that lets a session subscribe to a track again does not let it take all that the kernel has.
#[tokio::test]
async fn a_session_subscribes_to_one_track_a_few_times() {
    let relay = relay();
    let publisher = Client::connect(&relay).await;
    let mut published = publisher.ask(publish(0)).await;
    assert!(matches!(published.message().await, Message::RequestOk(_)));
    let client = Client::connect(&relay).await;
    let again = |number: u64| Subscribe { track: track(0), ..subscribe(2 * number, None) };
    let mut subscribed = Vec::new();
    for number in 0..4 {
        let mut asked = client.ask(again(number)).await;
        assert!(matches!(asked.message().await, Message::SubscribeOk(_)));
        subscribed.push(asked);
    }
    assert_eq!(client.ask(again(4)).await.refusal().await, code::Request::EXCESSIVE_LOAD);
    assert_eq!(relay.server.status().access.refused["same_track"], 1); // exact: it was refused
    // Another session has its own, and a place that is given back is free.
    let other = Client::connect(&relay).await;
    let mut its_own = other.ask(again(0)).await;
    assert!(matches!(its_own.message().await, Message::SubscribeOk(_)));
    drop(subscribed.pop());
    // exact: `until` looks again
    let subscribers = || relay.server.status().tracks.iter().map(|track| track.subscribers).sum::<u64>();
    until("one subscription less", || subscribers() == 4).await;
    assert!(matches!(client.ask(again(5)).await.message().await, Message::SubscribeOk(_)));
}

/// As many answers as the relay has asked for, and no more.
#[tokio::test]
async fn an_answer_to_nothing_ends_the_session() {
    let relay = relay();
    let publisher = Client::connect(&relay).await;
    let mut published = publisher.ask(publish(0)).await;
    assert!(matches!(published.message().await, Message::RequestOk(_)));
    published.say(RequestOk::default()).await;
    let closed = time::timeout(PATIENCE, publisher.connection.quic.closed()).await.unwrap();
    assert!(closed.to_string().contains("REQUEST_OK answers nothing"), "{closed}");
}
