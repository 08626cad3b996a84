//! Clients and servers that are no Millrace daemons, but speak the protocol of its tunnels (carriers) with a key of
//! their own.

use std::io::Read as _;
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use millrace_client::tls::CertificateTrust;
use millrace_graft::identity::hex;
use quinn::crypto::rustls::{QuicClientConfig, QuicServerConfig};
use quinn::{Endpoint, EndpointConfig, TokioRuntime};
use rcgen::PublicKeyData as _;
use ring::digest;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{ClientConfig, ClientConnection, ServerConfig, ServerConnection};

use super::FaultedCarrier;

/// Longest wait until the other host answers or closes the connection.
const PATIENCE: Duration = Duration::from_secs(20);
const NAME: &str = "millrace-graft";

/// A key and certificate that the settings of the hosts do not trust. Some faults add the key to the settings.
pub struct UnknownIdentity {
    /// The public key, in the format of the daemon's settings.
    pub key: String,
    certificate: CertificateDer<'static>,
    private: Vec<u8>,
}

impl UnknownIdentity {
    pub fn new() -> anyhow::Result<Self> {
        let pair = rcgen::KeyPair::generate()?;
        let certificate = rcgen::CertificateParams::new([NAME.to_owned()])?.self_signed(&pair)?;
        let hash = digest::digest(&digest::SHA256, &pair.subject_public_key_info());
        let key = hex(hash.as_ref());
        Ok(Self { key, certificate: certificate.der().clone(), private: pair.serialize_der() })
    }

    fn private(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.private.clone()).into()
    }

    fn client(&self, alpn: &[u8]) -> anyhow::Result<ClientConfig> {
        let mut config = CertificateTrust::Anyone.client_config(&[alpn])?;
        let provider = config.crypto_provider();
        let own = CertifiedKey::from_der(vec![self.certificate.clone()], self.private(), provider)?;
        config.client_auth_cert_resolver = Arc::new(SingleCertAndKey::from(own));
        Ok(config)
    }

    fn server(&self, alpn: &[u8]) -> anyhow::Result<ServerConfig> {
        let config = ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()));
        let config = config.with_protocol_versions(&[&rustls::version::TLS13])?.with_no_client_auth();
        let mut config = config.with_single_cert(vec![self.certificate.clone()], self.private())?;
        config.alpn_protocols = vec![alpn.to_vec()];
        Ok(config)
    }

    /// Makes one handshake from the calling thread's namespace, and waits until the other host has closed the
    /// connection.
    pub fn call(&self, kind: FaultedCarrier, at: SocketAddr, alpn: &[u8]) -> anyhow::Result<()> {
        let config = self.client(alpn)?;
        match kind {
            FaultedCarrier::Quic => call_by_quic(at, config),
            // An MPTCP socket accepts plain TCP connections too.
            FaultedCarrier::Tcp | FaultedCarrier::Mptcp => call_by_tcp(at, config),
        }
    }

    /// Starts a server in the calling thread's namespace. It accepts all connections for as long as the process lives.
    pub fn answer(&self, kind: FaultedCarrier, at: SocketAddr, alpn: &[u8]) -> anyhow::Result<()> {
        let config = self.server(alpn)?;
        match kind {
            FaultedCarrier::Quic => {
                let socket = UdpSocket::bind(at)?;
                let config = quinn::ServerConfig::with_crypto(Arc::new(QuicServerConfig::try_from(config)?));
                std::thread::spawn(move || runtime().map(|it| it.block_on(take_quic(socket, config))));
            }
            FaultedCarrier::Tcp | FaultedCarrier::Mptcp => {
                let listener = TcpListener::bind(at)?;
                let config = Arc::new(config);
                std::thread::spawn(move || {
                    for stream in listener.incoming().map_while(Result::ok) {
                        let config = config.clone();
                        std::thread::spawn(move || take_tcp(stream, config));
                    }
                });
            }
        }
        Ok(())
    }
}

fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}

fn call_by_quic(at: SocketAddr, config: ClientConfig) -> anyhow::Result<()> {
    let config = quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(config)?));
    runtime()?.block_on(async {
        let endpoint = Endpoint::client(([0, 0, 0, 0], 0).into())?;
        let connecting = endpoint.connect_with(config, at, NAME)?;
        let until_closed = async {
            if let Ok(connection) = connecting.await {
                connection.closed().await;
            }
        };
        tokio::time::timeout(PATIENCE, until_closed)
            .await
            .context("the other host did not end the handshake")?;
        endpoint.close(0_u32.into(), b"");
        endpoint.wait_idle().await;
        anyhow::Ok(())
    })
}

async fn take_quic(socket: UdpSocket, config: quinn::ServerConfig) -> anyhow::Result<()> {
    let endpoint = Endpoint::new(EndpointConfig::default(), Some(config), socket, Arc::new(TokioRuntime))?;
    while let Some(incoming) = endpoint.accept().await {
        tokio::spawn(async move { incoming.await.map(|connection| drop(connection.close_reason())) });
    }
    Ok(())
}

fn call_by_tcp(at: SocketAddr, config: ClientConfig) -> anyhow::Result<()> {
    let mut stream = TcpStream::connect_timeout(&at, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let mut tls = ClientConnection::new(Arc::new(config), ServerName::try_from(NAME)?)?;
    // The server must refuse this key, so an error is expected.
    let mut both = rustls::Stream::new(&mut tls, &mut stream);
    let _ = both.read(&mut [0]);
    Ok(())
}

fn take_tcp(mut stream: TcpStream, config: Arc<ServerConfig>) {
    let Ok(mut tls) = ServerConnection::new(config) else { return };
    let _ = stream.set_read_timeout(Some(PATIENCE));
    // rustls queues an alert before it returns the error, so the alert is sent below.
    while tls.complete_io(&mut stream).is_ok_and(|(read, _)| read > 0) {}
    let _ = tls.write_tls(&mut stream);
}
