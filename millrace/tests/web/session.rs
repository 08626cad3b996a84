//! Tests of capsules, HTTP requests, streams and datagrams on the connection of a WebTransport session.

use millrace_moq::{code, message::SetupOptions};
use millrace_quic::{varint, webtransport::error};
use millrace_webtransport::Foreign;
use web_transport_proto::{Capsule, Http3CapsuleReader};

use super::{TestRelay, WebClient, patiently};

fn frame(kind: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    varint::encode(kind, &mut bytes);
    varint::encode(payload.len() as u64, &mut bytes);
    bytes.extend_from_slice(payload);
    bytes
}

/// Returns how the relay closes the session.
async fn closed(session: super::WebSession) -> (u32, String) {
    let mut capsules = Http3CapsuleReader::new(session.recv);
    match patiently(capsules.read()).await.unwrap() {
        Some(Capsule::CloseWebTransportSession { code, reason }) => (code, reason),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn webtransport_path_is_in_the_request_and_not_in_setup() {
    let relay = TestRelay::start();
    let table = [
        SetupOptions { path: Some("/elsewhere".into()), ..SetupOptions::default() },
        SetupOptions { authority: Some("elsewhere".into()), ..SetupOptions::default() },
    ];
    for setup in table {
        let client = WebClient::connect(&relay).await;
        let session = client.session(&relay).await;
        let _control = client.set_up(&session, setup).await;
        let (code, reason) = closed(session).await;
        assert_eq!(u64::from(code), code::Session::INVALID_PATH.0, "{reason}");
    }
}

#[tokio::test]
async fn a_client_closes_its_session_by_a_capsule_or_by_ending_its_request() {
    let relay = TestRelay::start();
    let mut capsule = Vec::new();
    Capsule::CloseWebTransportSession { code: 7, reason: "enough".into() }.encode(&mut capsule);
    for last in [frame(0, &capsule), vec![]] {
        let client = WebClient::connect(&relay).await;
        let mut session = client.session(&relay).await;
        let _control = client.set_up(&session, SetupOptions::default()).await;
        relay.until("a session", |status| status.sessions.len() == 1).await;
        session.send.write_all(&last).await.unwrap();
        session.send.finish().unwrap();
        relay.until("the end of all sessions", |status| status.sessions.is_empty()).await;
        patiently(client.connection.closed()).await;
    }
}

/// Waits until the relay has closed one more session for a protocol violation.
async fn violated(relay: &TestRelay, before: u64) {
    relay.until("a violation", |status| status.drops["protocol_violation"] == before + 1).await;
    relay.until("no session", |status| status.sessions.is_empty()).await;
}

#[tokio::test]
async fn malformed_close_session_capsule_is_a_protocol_violation() {
    const CLOSE: u64 = 0x2843;
    let relay = TestRelay::start();
    let capsules = [frame(CLOSE, &[0; 3]), frame(CLOSE, &[0; 1029]), frame(CLOSE, &[0, 0, 0, 0, 0xff])];
    for (before, capsule) in capsules.iter().enumerate() {
        let client = WebClient::connect(&relay).await;
        let mut session = client.session(&relay).await;
        let _control = client.set_up(&session, SetupOptions::default()).await;
        session.send.write_all(&frame(0, capsule)).await.unwrap();
        violated(&relay, before as u64).await;
        let (code, reason) = closed(session).await;
        assert_eq!(u64::from(code), code::Session::PROTOCOL_VIOLATION.0, "{reason}");
    }
}

#[tokio::test]
async fn http_requests_next_to_a_session_close_it() {
    let relay = TestRelay::start();
    for is_uni in [true, false] {
        let client = WebClient::connect(&relay).await;
        let session = client.session(&relay).await;
        let _control = client.set_up(&session, SetupOptions::default()).await;
        relay.until("a session", |status| status.sessions.len() == 1).await;
        let mut held = Vec::new();
        // The client's HTTP/3 control stream counts toward the limit on unidirectional streams.
        for _ in u64::from(is_uni)..Foreign::MOST {
            held.push(foreign(&client, is_uni).await);
        }
        let counted = if is_uni { "http_stream" } else { "http_request" };
        relay.until("all streams to be counted", |status| status.drops[counted] == Foreign::MOST).await;
        assert_eq!(client.connection.close_reason(), None);
        held.push(foreign(&client, is_uni).await);
        violated(&relay, u64::from(!is_uni)).await;
        let (_, reason) = closed(session).await;
        assert!(reason.contains("outside the session"), "{reason}");
    }
}

/// Opens a unidirectional stream of a reserved type, or an HTTP request stream.
async fn foreign(client: &WebClient, is_uni: bool) -> quinn::SendStream {
    let mut stream = match is_uni {
        true => client.connection.open_uni().await.unwrap(),
        false => client.connection.open_bi().await.unwrap().0,
    };
    // An error is ignored, since the relay may have stopped the stream or closed the connection.
    let _ = stream.write_all(if is_uni { &[0x21] } else { &[1, 2, 0, 0] }).await;
    stream
}

#[tokio::test]
async fn unknown_http_3_streams_frames_and_capsules_are_ignored() {
    let relay = TestRelay::start();
    let client = WebClient::connect(&relay).await;
    let mut session = client.session(&relay).await;
    let _control = client.set_up(&session, SetupOptions::default()).await;
    relay.until("a session", |status| status.sessions.len() == 1).await;
    // The streams are QPACK's, one of a reserved type, and a second control stream; then unknown frames and capsules.
    for kind in [&[2][..], &[3], &[0x21], &[0]] {
        let mut stream = client.connection.open_uni().await.unwrap();
        stream.write_all(kind).await.unwrap();
        stream.write_all(&[0; 5000]).await.unwrap();
        stream.finish().unwrap();
    }
    session.send.write_all(&frame(0x21, b"reserved")).await.unwrap();
    let mut unknown = Vec::new();
    varint::encode(0x4321, &mut unknown);
    unknown.extend_from_slice(&[3, 1, 2, 3]);
    session.send.write_all(&frame(0, &unknown)).await.unwrap();
    // The session IDs of these datagrams belong to no session, so the relay must ignore them.
    client.connection.send_datagram(vec![9, 1, 2, 3].into()).unwrap();
    client.connection.send_datagram(vec![].into()).unwrap();
    relay.until("the streams to be counted", |status| status.drops["http_datagram"] > 0).await;
    // The relay must reset a second HTTP request on the connection.
    let (mut send, mut recv) = client.connection.open_bi().await.unwrap();
    send.write_all(&frame(1, &[0, 0])).await.unwrap();
    match patiently(recv.read_chunk(100, true)).await {
        Err(quinn::ReadError::Reset(code)) => assert_eq!(code.into_inner(), error::REQUEST_REJECTED),
        other => panic!("{other:?}"),
    }
    assert_eq!(client.connection.close_reason(), None);
    // exact: the number of sessions no longer changes, since the relay has answered the last request
    assert_eq!(relay.status().sessions.len(), 1);
}

#[tokio::test]
async fn a_stream_of_another_session_ends_the_connection() {
    let relay = TestRelay::start();
    for is_uni in [true, false] {
        let client = WebClient::connect(&relay).await;
        let session = client.session(&relay).await;
        let _control = client.set_up(&session, SetupOptions::default()).await;
        relay.until("a session", |status| status.sessions.len() == 1).await;
        let mut stream = match is_uni {
            true => client.connection.open_uni().await.unwrap(),
            false => client.connection.open_bi().await.unwrap().0,
        };
        let kind = if is_uni { 0x54 } else { 0x41 };
        stream.write_all(&[0x40, kind, 44]).await.unwrap();
        let (code, reason) = closed(session).await;
        assert_eq!(u64::from(code), code::Session::PROTOCOL_VIOLATION.0, "{reason}");
        relay.until("the end of all sessions", |status| status.sessions.is_empty()).await;
    }
}
