//! Tests that a client with a large receive window does not slow down other clients.

use millrace_moq as moq;
use millrace_moq::data::encode_object_header;
use millrace_transport::Windows;

use super::*;

const LEAST: u64 = 64 << 10;

/// A publisher that uses quinn directly, so on each stream it may send as much as the relay's flow control allows.
struct QuinnPublisher {
    connection: quinn::Connection,
    session: u64,
    sent: u64,
    _endpoint: quinn::Endpoint,
    _streams: (quinn::SendStream, quinn::SendStream, quinn::RecvStream),
}

impl QuinnPublisher {
    async fn start(relay: &RelayUnderTest, trusted: &CertifiedKey, number: u64) -> Self {
        let sessions = &relay.server.shared.sessions;
        let known = sessions.lock().len();
        let endpoint = quinn::Endpoint::client((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let connecting = endpoint.connect_with(client(trusted), relay.server.local_addrs()[0], "localhost");
        let connection = connecting.unwrap().await.unwrap();
        until("a session", || sessions.lock().len() > known).await;
        let session = *sessions.lock().keys().max().unwrap();
        let mut control = connection.open_uni().await.unwrap();
        control.write_all(&encoded(SetupOptions::default())).await.unwrap();
        let (mut send, mut recv) = connection.open_bi().await.unwrap();
        send.write_all(&encoded(Publish { request_id: 0, ..publish(number) })).await.unwrap();
        // Waits for the answer to PUBLISH.
        recv.read_chunk(1, true).await.unwrap().unwrap();
        let _streams = (control, send, recv);
        Self { connection, session, sent: number, _endpoint: endpoint, _streams }
    }

    /// Sends a group, as fast as the relay reads it.
    async fn send(&mut self) {
        const OBJECT: usize = 256 << 10;
        let mut bytes = subgroup(self.sent % 2, self.sent);
        encode_object_header(None, 0, None, OBJECT as u64, moq::Status::Normal, &mut bytes);
        bytes.resize(bytes.len() + OBJECT, 7);
        let mut stream = self.connection.open_uni().await.unwrap();
        stream.write_all(&bytes).await.unwrap();
        stream.finish().unwrap();
        self.sent += 2;
    }

    /// Returns the size of the session's receive window, in bytes.
    fn held(&self, relay: &RelayUnderTest) -> u64 {
        let sessions = relay.server.shared.sessions.lock();
        sessions
            .get(&self.session)
            .map_or(0, |session| session.connection().receive_window(Instant::now()).held)
    }

    async fn grow(&mut self, relay: &RelayUnderTest) {
        time::timeout(PATIENCE, async {
            while self.held(relay) < 4 * LEAST {
                self.send().await;
            }
        })
        .await
        .expect("a larger window");
    }
}

fn client(trusted: &CertifiedKey) -> quinn::ClientConfig {
    let mut roots = RootCertStore::empty();
    roots.add(trusted.cert[0].clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    tls.alpn_protocols = vec![Draft::D18.alpn().to_vec()];
    quinn::ClientConfig::new(Arc::new(quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap()))
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_session_is_closed_when_another_needs_its_receive_window_memory() {
    // The memory budget for receive windows is 8 times `LEAST`, and the windows may use three quarters of it. One
    // session's window takes up 4 times `LEAST`, and another session then needs 2 times `LEAST` or more.
    let windows = Arc::new(Windows::new(8 * LEAST));
    let trusted = certificate();
    let relay = RelayUnderTest::with(Access::open(), |transport| {
        transport.windows = Arc::clone(&windows);
        transport.alpn = vec![Draft::D18.alpn().to_vec()];
        transport.certificate = Some(Arc::new(trusted.clone()));
    });
    let shared = &relay.server.shared;
    let later = || Instant::now() + Duration::from_secs(31);
    let mut fast = QuinnPublisher::start(&relay, &trusted, 0).await;
    fast.grow(&relay).await;
    let mut other = QuinnPublisher::start(&relay, &trusted, 1).await;
    windows.take_pressed();
    shared.reclaim_window(later());
    assert!(fast.connection.close_reason().is_none(), "nobody wants it");
    let closed = time::timeout(PATIENCE, async {
        loop {
            other.send().await;
            shared.reclaim_window(Instant::now());
            shared.reclaim_window(later());
            if let Some(reason) = fast.connection.close_reason() {
                return reason;
            }
        }
    });
    let quinn::ConnectionError::ApplicationClosed(closed) = closed.await.expect("an end") else {
        panic!("closed otherwise");
    };
    assert_eq!(closed.error_code, crate::wire::var(code::Session::DATA_STREAM_TIMEOUT.0));
    // exact: the relay counts an idle session before it closes the session
    assert_eq!(relay.server.status().receive.reclaimed, 1);
    until("its window back", || fast.held(&relay) == 0).await;
    other.grow(&relay).await;
    assert!(other.connection.close_reason().is_none());
}
