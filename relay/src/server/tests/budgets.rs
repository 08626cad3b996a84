//! Tests that every kind of control message counts against a limit, such as the session's request rate, for the work
//! that it causes.

use millrace_moq::message::{RequestOk, RequestUpdate, SubscribeNamespace, TrackStatus};

use super::{
    asked::{AnsweredRequest, DRAFT},
    *,
};
use millrace_access::{AccessPolicy, Budget, BudgetLimits};

/// The most requests per second of one session.
const RATE: u64 = 200;

fn relay() -> RelayUnderTest {
    relay_at(RATE)
}

fn relay_at(requests_per_second: u64) -> RelayUnderTest {
    let session = Budget { requests_per_second, ..BudgetLimits::default().session };
    let access = Access::new(AccessPolicy::default(), BudgetLimits { session, ..BudgetLimits::default() });
    RelayUnderTest::with(access, |transport| transport.alpn = vec![DRAFT.alpn().to_vec()])
}

struct BudgetClient {
    connection: Arc<Connection>,
    _control: SendStream,
}

impl BudgetClient {
    async fn connect(relay: &RelayUnderTest) -> Self {
        let (connection, _) = relay.connect().await;
        let _control = open_stream(&connection, &encoded_in(DRAFT, SetupOptions::default())).await;
        Self { connection, _control }
    }

    async fn ask(&self, message: impl Into<Message>) -> AnsweredRequest {
        AnsweredRequest::open(&self.connection, message).await
    }
}

impl AnsweredRequest {
    /// Returns the code with which the request is refused.
    async fn refusal(&mut self) -> code::Request {
        match self.message().await {
            Message::RequestError(error) => error.code,
            other => panic!("{other:?}"),
        }
    }
}

/// A client sends one second's worth of updates more than the budget holds. The relay delays the excess updates by a
/// second and answers all of them, because a refused update would end its request.
#[tokio::test]
async fn request_updates_beyond_the_request_rate_are_delayed() {
    let relay = relay();
    let client = BudgetClient::connect(&relay).await;
    let prefix = |number: u64| Namespace::from_path(&format!("a/{number}")).unwrap();
    let watch = SubscribeNamespace { request_id: 0, prefix: prefix(0), parameters: Parameters::default() };
    let mut asked = client.ask(watch).await;
    assert!(matches!(asked.message().await, Message::RequestOk(_)));
    let begun = Instant::now();
    // Half of the session's request budget is reserved for new requests, so updates may use the other half.
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
    // exact: the relay counts a delayed REQUEST_UPDATE before it answers the message
    assert!(relay.server.status().totals.message_waits > 0);
}

/// A request that is refused for another reason also counts against the session's request budget.
#[tokio::test]
async fn refused_requests_count_against_the_request_rate_limit() {
    // The allowed request rate is so low that the test exceeds it even on a slow machine.
    let relay = relay_at(4);
    let client = BudgetClient::connect(&relay).await;
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

/// Some drafts allow several subscriptions of a session to one track. With them, a session must not use up the entries
/// of the kernel's tables.
#[tokio::test]
async fn subscriptions_of_a_session_to_one_track_are_limited() {
    let relay = relay();
    let publisher = BudgetClient::connect(&relay).await;
    let mut published = publisher.ask(publish(0)).await;
    assert!(matches!(published.message().await, Message::RequestOk(_)));
    let client = BudgetClient::connect(&relay).await;
    let again = |number: u64| Subscribe { track: track(0), ..subscribe(2 * number, None) };
    let mut subscribed = Vec::new();
    for number in 0..4 {
        let mut asked = client.ask(again(number)).await;
        assert!(matches!(asked.message().await, Message::SubscribeOk(_)));
        subscribed.push(asked);
    }
    assert_eq!(client.ask(again(4)).await.refusal().await, code::Request::EXCESSIVE_LOAD);
    // exact: the relay counts the refusal of a SUBSCRIBE before it sends the refusal
    assert_eq!(relay.server.status().access.refused["same_track"], 1);
    // The limit of subscriptions to one track applies to each session separately. A subscription that has ended no
    // longer counts.
    let other = BudgetClient::connect(&relay).await;
    let mut its_own = other.ask(again(0)).await;
    assert!(matches!(its_own.message().await, Message::SubscribeOk(_)));
    drop(subscribed.pop());
    // exact: `until` rereads the number of subscriptions until it is 4
    let subscribers = || relay.server.status().tracks.iter().map(|track| track.subscribers).sum::<u64>();
    until("one subscription less", || subscribers() == 4).await;
    assert!(matches!(client.ask(again(5)).await.message().await, Message::SubscribeOk(_)));
}

/// A peer may send one answer for each request of the relay, and no more.
#[tokio::test]
async fn surplus_request_ok_closes_the_session() {
    let relay = relay();
    let publisher = BudgetClient::connect(&relay).await;
    let mut published = publisher.ask(publish(0)).await;
    assert!(matches!(published.message().await, Message::RequestOk(_)));
    published.say(RequestOk::default()).await;
    let closed = time::timeout(PATIENCE, publisher.connection.quic.closed()).await.unwrap();
    assert!(closed.to_string().contains("REQUEST_OK answers nothing"), "{closed}");
}
