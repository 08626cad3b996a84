//! TLS for QUIC: the rustls configurations of an endpoint's connections.

use std::sync::Arc;

use millrace_quic::keys::KeySuite;
use parking_lot::RwLock;
use rustls::{
    CipherSuite, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, KeyLog, RootCertStore,
    ServerConfig, SignatureScheme,
    client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring},
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::{
        ClientHello, ResolvesServerCert, ServerSessionMemoryCache, StoresServerSessions,
        WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::{CertifiedKey, SingleCertAndKey},
};

/// The certificates that a client accepts.
#[derive(Clone, Debug)]
pub enum ServerTrust {
    /// Certificates that chain to one of these root certificates.
    Roots(Arc<RootCertStore>),
    /// Every certificate, for tests. Connections are encrypted, but the server's identity is not checked.
    Anyone,
}

/// The server's certificate, which can be replaced while connections are accepted.
#[derive(Debug)]
pub(crate) struct ReplaceableCertificate(pub RwLock<Option<Arc<CertifiedKey>>>);

impl ResolvesServerCert for ReplaceableCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.read().clone()
    }
}

/// The root certificates that clients' certificates have to chain to. They can be replaced while connections are
/// accepted. Without root certificates, clients are not asked for a certificate.
#[derive(Debug)]
pub(crate) struct ReplaceableRoots {
    provider: Arc<CryptoProvider>,
    verifier: RwLock<Option<Arc<dyn ClientCertVerifier>>>,
    /// TLS sessions that may be resumed. Resumption does not check the certificate again, so all sessions are dropped
    /// when the roots are replaced.
    sessions: RwLock<Arc<ServerSessionMemoryCache>>,
}

/// Largest number of TLS sessions that may be resumed.
const RESUMABLE: usize = 256;

impl ReplaceableRoots {
    pub fn new(provider: Arc<CryptoProvider>, roots: Option<&Arc<RootCertStore>>) -> Result<Self, Error> {
        let sessions = RwLock::new(ServerSessionMemoryCache::new(RESUMABLE));
        let clients = Self { provider, verifier: RwLock::default(), sessions };
        clients.set(roots)?;
        Ok(clients)
    }

    /// Replaces the root certificates for clients' certificates. No earlier TLS session can be resumed afterwards.
    pub fn set(&self, roots: Option<&Arc<RootCertStore>>) -> Result<(), Error> {
        let verifier = roots.map(|roots| {
            WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), Arc::clone(&self.provider))
                .allow_unauthenticated()
                .build()
                .map_err(|error| Error::General(error.to_string()))
        });
        *self.verifier.write() = verifier.transpose()?;
        // A resumed session would skip the check against the new root certificates.
        *self.sessions.write() = ServerSessionMemoryCache::new(RESUMABLE);
        Ok(())
    }

    fn verifier(&self) -> Option<Arc<dyn ClientCertVerifier>> {
        self.verifier.read().clone()
    }

    fn sessions(&self) -> Arc<ServerSessionMemoryCache> {
        Arc::clone(&self.sessions.read())
    }
}

impl ClientCertVerifier for ReplaceableRoots {
    fn offer_client_auth(&self) -> bool {
        self.verifier.read().is_some()
    }

    fn client_auth_mandatory(&self) -> bool {
        false
    }

    /// Returns no names of accepted certificate authorities, because the roots may be replaced. Clients present the
    /// certificate that they have for this server.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        match self.verifier() {
            Some(verifier) => verifier.verify_client_cert(end_entity, intermediates, now),
            None => Err(Error::General("client certificates are not asked for any more".into())),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        rustls::crypto::verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl StoresServerSessions for ReplaceableRoots {
    fn put(&self, key: Vec<u8>, value: Vec<u8>) -> bool {
        self.sessions().put(key, value)
    }

    fn get(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.sessions().get(key)
    }

    fn take(&self, key: &[u8]) -> Option<Vec<u8>> {
        self.sessions().take(key)
    }

    fn can_cache(&self) -> bool {
        true
    }
}

/// Returns rustls's crypto provider by ring with the given cipher suites, the preferred one first.
pub(crate) fn provider(suites: &[KeySuite]) -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    let known = std::mem::take(&mut provider.cipher_suites);
    let wanted = suites.iter().map(|suite| match suite {
        KeySuite::ChaCha20Poly1305 => CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
        KeySuite::Aes128Gcm => CipherSuite::TLS13_AES_128_GCM_SHA256,
        KeySuite::Aes256Gcm => CipherSuite::TLS13_AES_256_GCM_SHA384,
    });
    provider.cipher_suites =
        wanted.filter_map(|suite| known.iter().find(|known| known.suite() == suite).copied()).collect();
    Arc::new(provider)
}

/// Returns the cipher suite of Initial packets, which does not depend on the negotiated suite (RFC 9001, section 5).
pub(crate) fn initial_suite() -> Option<rustls::quic::Suite> {
    ring::default_provider().cipher_suites.iter().find_map(|suite| match suite.suite() {
        CipherSuite::TLS13_AES_128_GCM_SHA256 => suite.tls13()?.quic_suite(),
        _ => None,
    })
}

pub(crate) fn server(
    provider: Arc<CryptoProvider>,
    certificate: Arc<ReplaceableCertificate>,
    clients: &Arc<ReplaceableRoots>,
    alpn: &[Vec<u8>],
) -> Result<ServerConfig, Error> {
    let mut config = ServerConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_client_cert_verifier(Arc::clone(clients) as _)
        .with_cert_resolver(certificate);
    config.alpn_protocols = alpn.to_vec();
    // The server's order of cipher suites, which the operator configures, decides which one is used.
    config.ignore_client_order = true;
    config.session_storage = Arc::clone(clients) as _;
    Ok(config)
}

pub(crate) fn client(
    provider: Arc<CryptoProvider>,
    trust: &ServerTrust,
    certificate: Option<&Arc<CertifiedKey>>,
    alpn: &[Vec<u8>],
) -> Result<ClientConfig, Error> {
    let algorithms = provider.signature_verification_algorithms;
    let builder =
        ClientConfig::builder_with_provider(provider).with_protocol_versions(&[&rustls::version::TLS13])?;
    let builder = match trust {
        ServerTrust::Roots(roots) => builder.with_root_certificates(Arc::clone(roots)),
        ServerTrust::Anyone => {
            builder.dangerous().with_custom_certificate_verifier(Arc::new(AcceptAnyone(algorithms)))
        }
    };
    let mut config = match certificate {
        Some(own) => builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(Arc::clone(own)))),
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = alpn.to_vec();
    Ok(config)
}

/// Returns a key log that writes to the file `SSLKEYLOGFILE`, for tools that decrypt packet captures.
pub fn key_log_file() -> Arc<dyn KeyLog> {
    Arc::new(rustls::KeyLogFile::new())
}

#[derive(Debug)]
struct AcceptAnyone(WebPkiSupportedAlgorithms);

impl ServerCertVerifier for AcceptAnyone {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls12_signature(message, certificate, signature, &self.0)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        rustls::crypto::verify_tls13_signature(message, certificate, signature, &self.0)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_schemes()
    }
}
