//! An HTTP/3 client on stock quinn that sends exactly what a test asks for.

mod dialect;
mod requests;
mod session;

use std::sync::Arc;

use millrace_client::tls::CertificateTrust;
use millrace_moq::{Draft, Message, message::SetupOptions};
use millrace_webtransport::{ALPN, Binding, Foreign, SessionStreams};
use quinn::{Connection, Endpoint, RecvStream, SendStream, VarInt};
use web_transport_proto::{ConnectRequest, ConnectResponse, Settings};

use crate::relay::peer::{TestRelay, patiently};

/// A connection with ALPN `h3` after the exchange of SETTINGS.
struct WebClient {
    connection: Connection,
    foreign: Foreign,
    _endpoint: Endpoint,
    _control: [WebControl; 2],
}

enum WebControl {
    Ours(#[expect(dead_code, reason = "held open")] SendStream),
    Theirs(#[expect(dead_code, reason = "held open")] RecvStream),
}

/// The CONNECT stream of an established WebTransport session.
struct WebSession {
    send: SendStream,
    recv: RecvStream,
}

impl WebClient {
    async fn connect(relay: &TestRelay) -> Self {
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
        let control = [WebControl::Ours(ours), WebControl::Theirs(theirs)];
        Self { connection, foreign: Foreign::default(), _endpoint: endpoint, _control: control }
    }

    /// Sends a request, and reads the answer.
    async fn ask(
        &self,
        request: &ConnectRequest,
    ) -> Result<(WebSession, ConnectResponse), web_transport_proto::ConnectError> {
        let (mut send, mut recv) = self.connection.open_bi().await.unwrap();
        let mut bytes = Vec::new();
        request.encode(&mut bytes).unwrap();
        send.write_all(&bytes).await.unwrap();
        let response = patiently(ConnectResponse::read(&mut recv)).await?;
        Ok((WebSession { send, recv }, response))
    }

    async fn session(&self, relay: &TestRelay) -> WebSession {
        let (session, response) = self.ask(&request(relay)).await.unwrap();
        assert_eq!(response.protocol.as_deref(), Some(Draft::D18.protocol()));
        session
    }

    /// Sends SETUP in the session.
    async fn set_up(&self, session: &WebSession, setup: SetupOptions) -> millrace_webtransport::SendStream {
        let mut stream = self.streams(session).open_uni().await.unwrap();
        let mut bytes = Vec::new();
        Message::from(setup).encode(Draft::D18, &mut bytes).unwrap();
        stream.write_all(&bytes).await.unwrap();
        stream
    }

    fn streams(&self, session: &WebSession) -> SessionStreams<'_> {
        let binding = Binding::Session(VarInt::from(session.send.id()).into_inner());
        SessionStreams { connection: &self.connection, binding, foreign: &self.foreign }
    }

    /// Returns the code that the relay closed the connection with.
    async fn closed(&self) -> u64 {
        match patiently(self.connection.closed()).await {
            quinn::ConnectionError::ApplicationClosed(close) => close.error_code.into_inner(),
            other => panic!("{other}"),
        }
    }
}

async fn dial(relay: &TestRelay) -> Result<(Endpoint, Connection), quinn::ConnectionError> {
    let tls = CertificateTrust::Anyone.client_config(&[ALPN]).unwrap();
    let crypto = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
    let endpoint = Endpoint::client(([0, 0, 0, 0], 0).into()).unwrap();
    let config = quinn::ClientConfig::new(Arc::new(crypto));
    let connecting = endpoint.connect_with(config, relay.addr, "localhost").unwrap();
    Ok((endpoint, patiently(connecting).await?))
}

fn request(relay: &TestRelay) -> ConnectRequest {
    let url: url::Url = format!("https://{}/some/path?a=b", relay.addr).parse().unwrap();
    ConnectRequest::new(url).with_protocol(Draft::D18.protocol())
}
