//! Who gets a session, and who does not.

use millrace_proto::{moq::Draft, quic::webtransport::error};
use millrace_relay::Origins;
use web_transport_proto::{
    ConnectError, ConnectRequest,
    http::{HeaderName, HeaderValue, StatusCode},
};

use super::{Client, Relay, dial, request};

fn status(
    answer: Result<(super::Session, web_transport_proto::ConnectResponse), ConnectError>,
) -> StatusCode {
    match answer {
        Ok((_, response)) => response.status,
        Err(ConnectError::WrongStatus(Some(status))) => status,
        Err(error) => panic!("no answer: {error}"),
    }
}

#[tokio::test]
async fn pages_of_the_origins_that_are_listed_may_connect() {
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
        let relay = Relay::with(|config| config.web = Some(origins));
        let client = Client::connect(&relay).await;
        let mut request = request(&relay);
        if let Some(origin) = origin {
            let name = HeaderName::from_static("origin");
            request = request.with_header(name, HeaderValue::from_static(origin));
        }
        assert_eq!(status(client.ask(&request).await), expected, "{origin:?}");
        if expected != StatusCode::OK {
            assert_eq!(client.closed().await, error::REQUEST_REJECTED);
            relay
                .until("nothing is left", |status| status.handshakes == 0 && status.sessions.is_empty())
                .await;
        }
    }
}

#[tokio::test]
async fn clients_that_speak_something_else_are_told() {
    let relay = Relay::start();
    let url = request(&relay).url;
    let users = url.as_str().replace("https://", "https://user@");
    for protocols in [vec![], vec!["moqt-17".to_owned()], vec!["moq-00".to_owned(); 40]] {
        let client = Client::connect(&relay).await;
        let request = ConnectRequest::new(url.clone()).with_protocols(protocols);
        assert_eq!(status(client.ask(&request).await), StatusCode::BAD_REQUEST);
        assert_eq!(client.closed().await, error::REQUEST_REJECTED);
    }
    let client = Client::connect(&relay).await;
    let several = request(&relay).with_protocols(["moqt-15".to_owned(), "other".to_owned()]);
    assert_eq!(status(client.ask(&several).await), StatusCode::OK);
    let client = Client::connect(&relay).await;
    let request =
        ConnectRequest::new(users.parse::<url::Url>().unwrap()).with_protocol(Draft::NEWEST.protocol());
    assert_eq!(status(client.ask(&request).await), StatusCode::BAD_REQUEST);
    relay
        .until("all are counted", |status| {
            (status.drops["web_protocol"], status.drops["web_request"]) == (3, 1)
        })
        .await;
}

#[tokio::test]
async fn what_is_no_request_for_a_session_ends_the_connection() {
    let relay = Relay::start();
    // Frames: HEADERS that cannot be decoded, DATA first, one that is too long, one that ends early.
    let table: [&[u8]; 4] = [&[1, 2, 0xff, 0xff], &[0, 1, 7], &[1, 0x80, 0xff, 0xff, 0xff], &[1, 9, 0, 0]];
    for bytes in table {
        let client = Client::connect(&relay).await;
        let (mut send, _recv) = client.connection.open_bi().await.unwrap();
        send.write_all(bytes).await.unwrap();
        send.finish().unwrap();
        assert_eq!(client.closed().await, error::REQUEST_REJECTED, "{bytes:?}");
    }
    // And frames of no meaning without end.
    let client = Client::connect(&relay).await;
    let (mut send, _recv) = client.connection.open_bi().await.unwrap();
    let nothing = [&[0x21, 0x43, 0xe8][..], &[0; 1000]].concat();
    while send.write_all(&nothing).await.is_ok() {}
    assert_eq!(client.closed().await, error::REQUEST_REJECTED);
    relay.until("all are counted", |status| status.drops["web_request"] == table.len() as u64 + 1).await;
    relay.until("nothing is left", |status| status.handshakes == 0 && status.sessions.is_empty()).await;
}

#[tokio::test]
async fn who_waits_with_its_request_has_proved_its_address() {
    const WAITING: u64 = 70;
    let relay = Relay::start();
    let mut held = Vec::new();
    for _ in 0..WAITING {
        held.push(dial(&relay).await.unwrap());
    }
    relay.until("all count as handshakes", |status| status.handshakes == WAITING).await;
    assert_eq!(relay.status().totals.retries, 0);
}

#[tokio::test]
async fn without_webtransport_there_is_no_http() {
    let relay = Relay::with(|config| config.web = None);
    let error = dial(&relay).await.unwrap_err();
    assert!(error.to_string().contains("known protocol"), "{error}");
}
