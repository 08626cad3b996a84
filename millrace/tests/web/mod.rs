//! A client of HTTP/3 that does what a test says, on stock quinn.

mod dialect;
mod requests;
mod session;

use std::sync::Arc;

use millrace_client::tls::Trust;
use millrace_moq::{Draft, Message, message::Setup};
use millrace_webtransport::{ALPN, Binding, Foreign, Streams};
use quinn::{Connection, Endpoint, RecvStream, SendStream, VarInt};
use web_transport_proto::{ConnectRequest, ConnectResponse, Settings};

use crate::relay::peer::{Relay, patiently};

/// A connection with ALPN `h3`, on which SETTINGS were exchanged.
struct Client {
    connection: Connection,
    foreign: Foreign,
    _endpoint: Endpoint,
    _control: [Control; 2],
}

enum Control {
    Ours(#[expect(dead_code, reason = "held open")] SendStream),
    Theirs(#[expect(dead_code, reason = "held open")] RecvStream),
}

/// The request of a session that was let in.
struct Session {
    send: SendStream,
    recv: RecvStream,
}

impl Client {
    async fn connect(relay: &Relay) -> Self {
        let (endpoint, connection) = dial(relay).await.unwrap();
        let mut bytes = Vec::new();
        let mut settings = Settings::default();
        settings.enable_webtransport(1);
        settings.encode(&mut bytes);
        let mut ours = connection.open_uni().await.unwrap();
        ours.write_all(&bytes).await.unwrap();
        let mut theirs = patiently(connection.accept_uni()).await.unwrap();
        let settings = patiently(Settings::read(&mut theirs)).await.unwrap();
        assert_eq!(settings.supports_webtransport(), 1);
        let control = [Control::Ours(ours), Control::Theirs(theirs)];
        Self { connection, foreign: Foreign::default(), _endpoint: endpoint, _control: control }
    }

    /// Sends a request, and reads the answer.
    async fn ask(
        &self,
        request: &ConnectRequest,
    ) -> Result<(Session, ConnectResponse), web_transport_proto::ConnectError> {
        let (mut send, mut recv) = self.connection.open_bi().await.unwrap();
        let mut bytes = Vec::new();
        request.encode(&mut bytes).unwrap();
        send.write_all(&bytes).await.unwrap();
        let response = patiently(ConnectResponse::read(&mut recv)).await?;
        Ok((Session { send, recv }, response))
    }

    async fn session(&self, relay: &Relay) -> Session {
        let (session, response) = self.ask(&request(relay)).await.unwrap();
        assert_eq!(response.protocol.as_deref(), Some(Draft::D18.protocol()));
        session
    }

    /// Sends SETUP in the session.
    async fn set_up(&self, session: &Session, setup: Setup) -> millrace_webtransport::SendStream {
        let mut stream = self.streams(session).open_uni().await.unwrap();
        let mut bytes = Vec::new();
        Message::from(setup).encode(Draft::D18, &mut bytes).unwrap();
        stream.write_all(&bytes).await.unwrap();
        stream
    }

    fn streams(&self, session: &Session) -> Streams<'_> {
        let binding = Binding::Session(VarInt::from(session.send.id()).into_inner());
        Streams { connection: &self.connection, binding, foreign: &self.foreign }
    }

    /// The code that the relay closed the connection with.
    async fn closed(&self) -> u64 {
        match patiently(self.connection.closed()).await {
            quinn::ConnectionError::ApplicationClosed(close) => close.error_code.into_inner(),
            other => panic!("{other}"),
        }
    }
}

async fn dial(relay: &Relay) -> Result<(Endpoint, Connection), quinn::ConnectionError> {
    let tls = Trust::Anyone.client_config(&[ALPN]).unwrap();
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
    let endpoint = Endpoint::client(([0, 0, 0, 0], 0).into()).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    let connecting = endpoint.connect_with(config, relay.addr, "localhost").unwrap();
    Ok((endpoint, patiently(connecting).await?))
}

fn request(relay: &Relay) -> ConnectRequest {
    let url: url::Url = format!("https://{}/some/path?a=b", relay.addr).parse().unwrap();
    ConnectRequest::new(url).with_protocol(Draft::D18.protocol())
}
