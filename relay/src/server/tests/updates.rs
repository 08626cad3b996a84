//! Tests of the limit of unanswered updates of a request (MAX_REQUEST_UPDATES).

use millrace_moq::{
    message::{RequestOk, RequestUpdate},
    property::TrackProperties,
};

use super::{
    asked::{AnsweredRequest, DRAFT},
    *,
};

/// How long a test waits to see that no message arrives.
const QUIET: Duration = Duration::from_millis(200);

impl AnsweredRequest {
    /// Returns the NEW_GROUP_REQUEST in the next REQUEST_UPDATE of the relay.
    async fn group_request(&mut self) -> Option<u64> {
        match self.message().await {
            Message::RequestUpdate(update) => update.parameters.new_group_request,
            other => panic!("{other:?}"),
        }
    }
}

/// The limit is 1: the newest update waits for the answer to the previous one, and the updates that it replaces are
/// not sent.
#[tokio::test]
async fn unanswered_request_updates_are_limited_to_the_publishers_maximum() {
    let relay =
        RelayUnderTest::with(Access::open(), |transport| transport.alpn = vec![DRAFT.alpn().to_vec()]);
    let table = [(Some(1), [1, 3].as_slice()), (None, &[1, 2, 3]), (Some(0), &[1, 2, 3])];
    for (number, (limit, expected)) in (0..).zip(table) {
        let (publisher, _) = relay.connect().await;
        let setup = SetupOptions { max_request_updates: limit, ..SetupOptions::default() };
        let _control = open_stream(&publisher, &encoded_in(DRAFT, setup)).await;
        let properties =
            TrackProperties { dynamic_groups: Some(true), ..TrackProperties::default() }.encode();
        let publish = Publish { request_id: 0, properties, ..publish(number) };
        let mut published = AnsweredRequest::open(&publisher, publish).await;
        assert!(matches!(published.message().await, Message::RequestOk(_)));

        let (subscriber, _) = relay.connect().await;
        let _control = open_stream(&subscriber, &encoded_in(DRAFT, SetupOptions::default())).await;
        let wanted = Subscribe { track: track(number), ..subscribe(0, None) };
        let mut subscribed = AnsweredRequest::open(&subscriber, wanted).await;
        assert!(matches!(subscribed.message().await, Message::SubscribeOk(_)));
        for group in 1..=3 {
            let parameters = Parameters { new_group_request: Some(group), ..Parameters::default() };
            subscribed.say(RequestUpdate { request_id: 2 * group, parameters }).await;
            assert!(matches!(subscribed.message().await, Message::RequestOk(_)));
        }
        for group in expected {
            assert_eq!(published.group_request().await, Some(*group), "{limit:?}");
            if limit == Some(1) {
                time::timeout(QUIET, published.reader.next()).await.expect_err("there was no answer yet");
            }
            published.say(RequestOk::default()).await;
        }
        time::timeout(QUIET, published.reader.next()).await.expect_err("nothing more is asked for");
        publisher.quic.close(0u32.into(), b"");
        subscriber.quic.close(0u32.into(), b"");
        until("all gone", || relay.server.status().sessions.is_empty()).await;
    }
}
