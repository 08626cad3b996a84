//! Tests of WebTransport session requests: which are accepted and which refused.

use bytes::BytesMut;
use millrace_moq::{
    Draft, Message, Namespace, Parameters,
    message::{PublishNamespace, SetupOptions},
};
use millrace_quic::webtransport::error;
use millrace_relay::{
    Origins,
    access::{AccessRule, Principal},
};
use web_transport_proto::{
    ConnectError, ConnectRequest,
    http::{HeaderName, HeaderValue, StatusCode},
};

use super::{TestRelay, WebClient, dial, patiently, request};

fn status(
    answer: Result<(super::WebSession, web_transport_proto::ConnectResponse), ConnectError>,
) -> StatusCode {
    match answer {
        Ok((_, response)) => response.status,
        Err(ConnectError::WrongStatus(Some(status))) => status,
        Err(error) => panic!("no answer: {error}"),
    }
}

#[tokio::test]
async fn browser_origin_outside_the_allowed_list_gets_status_403() {
    let table = [
        (Origins::Any, Some("https://evil.example"), StatusCode::OK),
        (Origins::Only(vec!["https://good.example".into()]), Some("https://good.example"), StatusCode::OK),
        (Origins::Only(vec!["https://good.example".into()]), Some("HTTPS://GOOD.EXAMPLE"), StatusCode::OK),
        (Origins::Only(vec!["https://good.example".into()]), None, StatusCode::OK),
        (
            Origins::Only(vec!["https://good.example".into()]),
            Some("https://evil.example"),
            StatusCode::FORBIDDEN,
        ),
        (
            Origins::Only(vec!["https://good.example".into()]),
            Some("http://good.example"),
            StatusCode::FORBIDDEN,
        ),
        (Origins::Only(vec!["https://good.example".into()]), Some("null"), StatusCode::FORBIDDEN),
        (Origins::Only(vec![]), Some("https://good.example"), StatusCode::FORBIDDEN),
    ];
    for (origins, origin, expected) in table {
        let relay = TestRelay::with(|config| config.web = Some(origins));
        let client = WebClient::connect(&relay).await;
        let mut request = request(&relay);
        if let Some(origin) = origin {
            let name = HeaderName::from_static("origin");
            request = request.with_header(name, HeaderValue::from_static(origin));
        }
        assert_eq!(status(client.ask(&request).await), expected, "{origin:?}");
        if expected != StatusCode::OK {
            assert_eq!(client.closed().await, error::REQUEST_REJECTED);
            relay
                .until("an empty relay", |status| status.handshakes == 0 && status.sessions.is_empty())
                .await;
        }
    }
}

#[tokio::test]
async fn webtransport_request_without_a_supported_protocol_gets_status_400() {
    let relay = TestRelay::start();
    let url = request(&relay).url;
    let users = url.as_str().replace("https://", "https://user@");
    for protocols in [vec![], vec!["moqt-17".to_owned()], vec!["moq-00".to_owned(); 40]] {
        let client = WebClient::connect(&relay).await;
        let request = ConnectRequest::new(url.clone()).with_protocols(protocols);
        assert_eq!(status(client.ask(&request).await), StatusCode::BAD_REQUEST);
        assert_eq!(client.closed().await, error::REQUEST_REJECTED);
    }
    let client = WebClient::connect(&relay).await;
    let several = request(&relay).with_protocols(["moqt-15".to_owned(), "other".to_owned()]);
    assert_eq!(status(client.ask(&several).await), StatusCode::OK);
    let client = WebClient::connect(&relay).await;
    let request =
        ConnectRequest::new(users.parse::<url::Url>().unwrap()).with_protocol(Draft::NEWEST.protocol());
    assert_eq!(status(client.ask(&request).await), StatusCode::BAD_REQUEST);
    relay
        .until("all requests to be counted", |status| {
            (status.drops["web_protocol"], status.drops["web_request"]) == (3, 1)
        })
        .await;
}

/// Returns whether a client with this URL may publish.
async fn may_publish(relay: &TestRelay, url: &str) -> bool {
    let client = WebClient::connect(relay).await;
    let request = ConnectRequest::new(url.parse::<url::Url>().unwrap()).with_protocol(Draft::D18.protocol());
    let (session, _) = client.ask(&request).await.unwrap();
    let _control = client.set_up(&session, SetupOptions::default()).await;
    let (mut send, mut recv) = client.streams(&session).open_bi().await.unwrap();
    let namespace = Namespace::from_path("live/cam").unwrap();
    let asked = PublishNamespace { request_id: 0, namespace, parameters: Parameters::default() };
    let mut bytes = Vec::new();
    Message::from(asked).encode(Draft::D18, &mut bytes).unwrap();
    send.write_all(&bytes).await.unwrap();
    let mut answer = BytesMut::new();
    loop {
        match Message::decode(Draft::D18, &mut answer).unwrap() {
            Some(Message::RequestOk(_)) => return true,
            Some(Message::RequestError(_)) => return false,
            Some(other) => panic!("{other:?}"),
            None => match patiently(recv.read_chunk(usize::MAX, true)).await {
                Ok(Some(chunk)) => answer.extend_from_slice(&chunk.bytes),
                // A client without any rights gets no session.
                Ok(None) | Err(_) => return false,
            },
        }
    }
}

/// Browsers omit the port from `:authority` if it is 443, the default of https.
#[tokio::test]
async fn access_rule_for_port_443_matches_an_authority_without_port() {
    let relay = TestRelay::with(|config| {
        config.access.rules = vec![AccessRule {
            namespace: "**".parse().unwrap(),
            publish: vec![Principal::Anyone],
            subscribe: vec![],
            path: None,
            authority: Some("relay.example:443".parse().unwrap()),
        }];
    });
    assert!(may_publish(&relay, "https://relay.example/").await);
    assert!(may_publish(&relay, "https://relay.example:443/").await);
    assert!(!may_publish(&relay, "https://relay.example:4443/").await);
    assert!(!may_publish(&relay, "https://other.example/").await);
}

#[tokio::test]
async fn malformed_session_request_closes_the_connection() {
    let relay = TestRelay::start();
    // The malformed requests are HEADERS that cannot be decoded, DATA before HEADERS, a frame that is too long, and a
    // frame that ends early.
    let table: [&[u8]; 4] = [&[1, 2, 0xff, 0xff], &[0, 1, 7], &[1, 0x80, 0xff, 0xff, 0xff], &[1, 9, 0, 0]];
    for bytes in table {
        let client = WebClient::connect(&relay).await;
        let (mut send, _recv) = client.connection.open_bi().await.unwrap();
        send.write_all(bytes).await.unwrap();
        send.finish().unwrap();
        assert_eq!(client.closed().await, error::REQUEST_REJECTED, "{bytes:?}");
    }
    // Another client sends unknown HTTP/3 frames without end.
    let client = WebClient::connect(&relay).await;
    let (mut send, _recv) = client.connection.open_bi().await.unwrap();
    let nothing = [&[0x21, 0x43, 0xe8][..], &[0; 1000]].concat();
    while send.write_all(&nothing).await.is_ok() {}
    assert_eq!(client.closed().await, error::REQUEST_REJECTED);
    relay
        .until("all requests to be counted", |status| status.drops["web_request"] == table.len() as u64 + 1)
        .await;
    relay.until("an empty relay", |status| status.handshakes == 0 && status.sessions.is_empty()).await;
}

#[tokio::test]
async fn clients_that_delay_their_webtransport_request_cause_no_retry_packets() {
    const WAITING: u64 = 70;
    let relay = TestRelay::start();
    let mut held = Vec::new();
    for _ in 0..WAITING {
        held.push(dial(&relay).await.unwrap());
    }
    relay.until("all count as handshakes", |status| status.handshakes == WAITING).await;
    // exact: the count of Retry packets is final, since all clients have connected
    assert_eq!(relay.status().totals.retries, 0);
}

/// The client sends no request, and is closed after the limit of 10 seconds.
#[tokio::test]
async fn client_without_a_request_has_no_session() {
    let relay = TestRelay::start();
    let client = WebClient::connect(&relay).await;
    assert_eq!(client.closed().await, error::REQUEST_REJECTED);
    relay.until("an empty relay", |status| status.handshakes == 0 && status.sessions.is_empty()).await;
    // exact: the relay counts a client without a request before it closes the client's connection
    assert_eq!(relay.status().drops["web_late"], 1);
}

#[tokio::test]
async fn relay_without_webtransport_refuses_http_3_connections() {
    let relay = TestRelay::with(|config| config.web = None);
    let error = dial(&relay).await.unwrap_err();
    assert!(error.to_string().contains("known protocol"), "{error}");
}
