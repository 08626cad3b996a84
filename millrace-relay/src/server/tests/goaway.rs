//! GOAWAY of a client, on its control stream and on requests.

use millrace_proto::moq::{code, message::GoAway};

use super::*;

fn goaway(uri: &str, request_id: Option<u64>) -> GoAway {
    GoAway { uri: uri.into(), timeout: 0, request_id }
}

/// What the relay closes the session with because of these messages; `None` if it does not, and goes on to answer.
async fn outcome(on_control: bool, messages: &[GoAway], closes: bool) -> Option<u64> {
    let relay = Relay::start();
    let (connection, _session, mut control) = relay.establish().await;
    let namespace = Namespace::from_path("a").unwrap();
    let publish = PublishNamespace { request_id: 0, namespace, parameters: Parameters::default() };
    let (mut request, _answers) = open_request(&connection, publish).await;
    for message in messages {
        let stream = if on_control { &mut control } else { &mut request };
        let _ = stream.write_all(&encoded(message.clone())).await; // closed by the one before
    }
    if closes {
        connection.quic.closed().await;
    } else {
        // Refused, since nobody publishes that.
        let other = Subscribe {
            track: TrackName::new(Namespace::from_path("b").unwrap(), Vec::new()).unwrap(),
            ..subscribe(2, None)
        };
        let (_request, mut answers) = open_request(&connection, other).await;
        answers.read_chunk(1, true).await.unwrap();
    }
    match connection.quic.close_reason() {
        Some(quinn::ConnectionError::ApplicationClosed(close)) => Some(close.error_code.into_inner()),
        _ => None,
    }
}

#[tokio::test]
async fn goaway_is_checked_on_every_stream() {
    let violation = Some(code::Session::PROTOCOL_VIOLATION.0);
    let wrong_side = Some(code::Session::INVALID_REQUEST_ID.0);
    let table = [
        ("the relay's first request was not seen", true, vec![goaway("", Some(1))], None),
        ("of older drafts", true, vec![goaway("", None)], None),
        ("a request of the client's own", true, vec![goaway("", Some(2))], wrong_side),
        ("a client cannot say where to", true, vec![goaway("moqt://a", Some(1))], violation),
        ("twice", true, vec![goaway("", Some(1)), goaway("", Some(1))], violation),
        ("a request moves", false, vec![goaway("", None)], None),
        ("to elsewhere", false, vec![goaway("moqt://a", None)], violation),
        ("a request has no request ID", false, vec![goaway("", Some(1))], violation),
        ("a request moves twice", false, vec![goaway("", None), goaway("", None)], violation),
    ];
    for (description, on_control, messages, expected) in table {
        let outcome = time::timeout(PATIENCE, outcome(on_control, &messages, expected.is_some())).await;
        assert_eq!(outcome, Ok(expected), "{description}");
    }
}
