//! Mutual TLS 1.3 between daemons. A peer is known by its pinned key, or by a host name in a certificate of an
//! authority.
//!
//! With a pinned key only the certificate's key is checked. The certificate may be self-signed, and its dates and names
//! do not matter.
#![deny(missing_docs)]

pub mod callers;

use std::{fs::OpenOptions, io::Write as _, os::unix::fs::OpenOptionsExt as _, path::Path, sync::Arc};

use anyhow::{Context as _, bail};
use millrace_daemon::pem;
use millrace_graft::{
    ObjectIdentity,
    identity::PeerTrust,
    settings::{AgreementPeer, AgreementSettings},
};
use millrace_graft_proto::message::ALPN;
use rustls::{
    CertificateError, CipherSuite, ClientConfig, DigitallySignedStruct, DistinguishedName, Error,
    RootCertStore, ServerConfig, SignatureScheme,
    client::{
        Resumption, WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    crypto::{CryptoProvider, ring, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime},
    server::{
        NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::{CertifiedKey, SigningKey},
    version::TLS13,
};

/// This host's certificate and key, and the peers whose keys or names it knows.
#[derive(Clone)]
pub struct Tls {
    shown: Arc<CertifiedKey>,
    known: Arc<KnownPeers>,
}

/// Creates a private key in a new file. Returns the hash of its public key, which peers name in their settings to
/// identify this host.
pub fn make_key(path: &Path) -> anyhow::Result<ObjectIdentity> {
    let key = rcgen::KeyPair::generate().context("cannot generate a key")?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| path.display().to_string())?;
    file.write_all(key.serialize_pem().as_bytes())?;
    fingerprint(path)
}

/// Returns the hash of the public key that belongs to a private key. Peers name this hash in their settings to identify
/// the host.
pub fn fingerprint(path: &Path) -> anyhow::Result<ObjectIdentity> {
    let (_, signing) = read_key(path)?;
    let public =
        signing.public_key().with_context(|| format!("{}: the file has no public key", path.display()))?;
    Ok(ObjectIdentity::from_image(&public))
}

fn read_key(path: &Path) -> anyhow::Result<(PrivateKeyDer<'static>, Arc<dyn SigningKey>)> {
    pem::private_key(path)
        .with_context(|| format!("no key (`millrace graft key --new {}` makes one)", path.display()))
}

impl Tls {
    /// Reads the key and certificates that the settings of agreements name.
    ///
    /// # Errors
    /// A key or certificate file cannot be read, or its content is not usable.
    pub fn new(agreement: &AgreementSettings) -> anyhow::Result<Self> {
        let peers = agreement.peers.iter().map(|peer| (peer.name.as_str(), &peer.trust));
        let certificate = agreement.certificate.as_deref();
        let authority = agreement.authority.as_deref();
        Self::from_settings(&agreement.key, certificate, authority, peers)
    }

    /// Reads this host's key, its certificate if it has a file, and the keys and names of its peers. Without a file
    /// the certificate is self-signed.
    ///
    /// # Errors
    /// A key or certificate file cannot be read, or its content is not usable.
    pub fn from_settings<'a>(
        key: &Path,
        certificate: Option<&Path>,
        authority: Option<&Path>,
        peers: impl IntoIterator<Item = (&'a str, &'a PeerTrust)>,
    ) -> anyhow::Result<Self> {
        let shown = match certificate {
            Some(path) => pem::pair(path, key)?,
            None => {
                let (private, signing) = read_key(key)?;
                CertifiedKey::new(vec![self_signed(&private, key)?], signing)
            }
        };
        Ok(Self { shown: Arc::new(shown), known: Arc::new(KnownPeers::new(authority, peers)?) })
    }

    /// Returns a copy of these credentials that accepts only the given peer.
    pub fn restrict_to(&self, peer: &str) -> Self {
        Self { shown: self.shown.clone(), known: self.known.only(peer) }
    }

    /// Returns the TLS settings for connecting to this peer only.
    pub fn client(&self, peer: &AgreementPeer) -> anyhow::Result<ClientConfig> {
        self.restrict_to(&peer.name).caller()
    }

    /// Returns the TLS settings for connecting to any known peer.
    pub fn caller(&self) -> anyhow::Result<ClientConfig> {
        let expected = Verifier { known: self.known.clone() };
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            // rustls names the method for every custom verifier `dangerous`.
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(expected))
            .with_client_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(self.shown.clone())));
        config.alpn_protocols = vec![ALPN.to_vec()];
        // Each handshake has to prove the peer's key, so no session is resumed.
        config.resumption = Resumption::disabled();
        Ok(config)
    }

    /// Returns the TLS settings for accepting connections of any known peer.
    pub fn server(&self) -> anyhow::Result<ServerConfig> {
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(Verifier { known: self.known.clone() }))
            .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(self.shown.clone())));
        config.alpn_protocols = vec![ALPN.to_vec()];
        // The server neither stores sessions nor sends tickets, so that no handshake is resumed.
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// Returns the name of the peer that a certificate belongs to, or `None` if no known peer has it.
    pub fn name(&self, certificates: &[CertificateDer<'_>]) -> Option<String> {
        let (end, others) = certificates.split_first()?;
        self.known.identify(end, others, UnixTime::now(), TlsRole::Client).ok()
    }
}

/// Creates a self-signed certificate that is valid from 2020 to 2100. Peers check only its key.
fn self_signed(key: &PrivateKeyDer<'_>, path: &Path) -> anyhow::Result<CertificateDer<'static>> {
    let what = || format!("{}: a certificate for this key", path.display());
    let PrivateKeyDer::Pkcs8(der) = key else { bail!("{}: the key is not in PKCS#8 form", path.display()) };
    let pair = rcgen::KeyPair::from_pkcs8_der_and_sign_algo(
        &PrivatePkcs8KeyDer::from(der.secret_pkcs8_der()),
        algorithm(der.secret_pkcs8_der()).with_context(what)?,
    );
    let mut params = rcgen::CertificateParams::new(["millrace-graft".to_owned()]).with_context(what)?;
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(2100, 1, 1);
    Ok(params.self_signed(&pair.with_context(what)?).with_context(what)?.der().clone())
}

fn algorithm(pkcs8: &[u8]) -> anyhow::Result<&'static rcgen::SignatureAlgorithm> {
    let known = [&rcgen::PKCS_ED25519, &rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ECDSA_P384_SHA384];
    let der = PrivatePkcs8KeyDer::from(pkcs8);
    let fits = |it: &'static _| rcgen::KeyPair::from_pkcs8_der_and_sign_algo(&der, it).is_ok();
    known
        .into_iter()
        .find(|it| fits(it))
        .context("the key's algorithm is not supported: use Ed25519, P-256 or P-384")
}

/// Returns the crypto provider with the cipher suite first that is fastest on this host. The order in which a TLS
/// client lists the suites decides which suite is used.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    let first = match has_aes() {
        true => CipherSuite::TLS13_AES_128_GCM_SHA256,
        false => CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
    };
    // `false` sorts before `true`, so the preferred suite comes first.
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != first);
    Arc::new(provider)
}

#[cfg(target_arch = "x86_64")]
fn has_aes() -> bool {
    is_x86_feature_detected!("aes") && is_x86_feature_detected!("pclmulqdq")
}

#[cfg(target_arch = "aarch64")]
fn has_aes() -> bool {
    std::arch::is_aarch64_feature_detected!("aes")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn has_aes() -> bool {
    false
}

#[derive(Clone, Copy)]
enum TlsRole {
    Client,
    Server,
}

#[derive(Debug)]
struct KnownPeers {
    keys: Vec<(ObjectIdentity, String)>,
    hosts: Vec<(ServerName<'static>, String)>,
    roots: Option<Arc<RootCertStore>>,
    provider: Arc<CryptoProvider>,
}

impl KnownPeers {
    fn new<'a>(
        authority: Option<&Path>,
        peers: impl IntoIterator<Item = (&'a str, &'a PeerTrust)>,
    ) -> anyhow::Result<Self> {
        let roots = match authority {
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for certificate in pem::certificates(path)? {
                    roots.add(certificate).with_context(|| path.display().to_string())?;
                }
                Some(Arc::new(roots))
            }
            None => None,
        };
        let keys = Vec::new();
        let hosts = Vec::new();
        let mut known = Self { keys, hosts, roots, provider: Arc::new(ring::default_provider()) };
        peers.into_iter().try_for_each(|(name, trust)| known.add(name, trust))?;
        Ok(known)
    }

    fn add(&mut self, peer: &str, trust: &PeerTrust) -> anyhow::Result<()> {
        match trust {
            PeerTrust::Key(key) => self.keys.push((*key, peer.to_owned())),
            PeerTrust::Host(host) => {
                let name = ServerName::try_from(host.clone());
                let name = name.with_context(|| format!("peer {peer}: host {host:?} is no name"))?;
                self.hosts.push((name, peer.to_owned()));
            }
        }
        Ok(())
    }

    fn only(&self, peer: &str) -> Arc<Self> {
        Arc::new(Self {
            keys: self.keys.iter().filter(|(_, name)| name == peer).cloned().collect(),
            hosts: self.hosts.iter().filter(|(_, name)| name == peer).cloned().collect(),
            roots: self.roots.clone(),
            provider: self.provider.clone(),
        })
    }

    /// Returns the name, in the settings, of the peer whose pinned key the certificate has, or of which the certificate
    /// contains the host name.
    fn identify(
        &self,
        end: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
        role: TlsRole,
    ) -> Result<String, Error> {
        let parsed = ParsedCertificate::try_from(end)?;
        let key = ObjectIdentity::from_image(&parsed.subject_public_key_info());
        // A pinned key identifies the peer whatever the certificate says, so nothing more is verified.
        if let Some((_, name)) = self.keys.iter().find(|(known, _)| *known == key) {
            return Ok(name.clone());
        }
        // Without a pinned key, the certificate must contain a host name that the settings name.
        let found = self.hosts.iter().find(|(host, _)| verify_server_name(&parsed, host).is_ok());
        let (Some((host, name)), Some(roots)) = (found, &self.roots) else {
            return Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure));
        };
        let wrong = |_| Error::InvalidCertificate(CertificateError::UnknownIssuer);
        match role {
            TlsRole::Client => {
                let builder =
                    WebPkiClientVerifier::builder_with_provider(roots.clone(), self.provider.clone());
                builder.build().map_err(wrong)?.verify_client_cert(end, others, now).map(drop)?;
            }
            TlsRole::Server => {
                let builder =
                    WebPkiServerVerifier::builder_with_provider(roots.clone(), self.provider.clone());
                let verifier = builder.build().map_err(wrong)?;
                verifier.verify_server_cert(end, others, host, &[], now).map(drop)?;
            }
        }
        Ok(name.clone())
    }
}

#[derive(Debug)]
struct Verifier {
    known: Arc<KnownPeers>,
}

/// Defines the methods that verify what a peer has signed, which are the same in both verifiers' traits.
macro_rules! verify_signatures {
    () => {
        fn verify_tls12_signature(
            &self,
            _message: &[u8],
            _end: &CertificateDer<'_>,
            _signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Err(Error::General("TLS 1.2 is not supported".to_owned()))
        }

        fn verify_tls13_signature(
            &self,
            message: &[u8],
            end: &CertificateDer<'_>,
            signed: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            let algorithms = &self.known.provider.signature_verification_algorithms;
            verify_tls13_signature(message, end, signed, algorithms)
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            self.known.provider.signature_verification_algorithms.supported_schemes()
        }
    };
}

/// Verifies the certificate of the server that this host connects to. The server name that the client has sent does not
/// matter.
impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _called: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.known.identify(end, others, now, TlsRole::Server).map(|_| ServerCertVerified::assertion())
    }

    verify_signatures!();
}

impl ClientCertVerifier for Verifier {
    /// The server names no accepted authorities, since each client has one certificate only.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.known.identify(end, others, now, TlsRole::Client).map(|_| ClientCertVerified::assertion())
    }

    verify_signatures!();
}
