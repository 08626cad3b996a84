//! Who is at the other end: mutual TLS 1.3, by pinned keys or an authority's certificates.
//!
//! A key that is pinned is what counts of a certificate: it may be self-signed, and its dates and names do not matter.

use std::{fs::OpenOptions, io::Write as _, os::unix::fs::OpenOptionsExt as _, path::Path, sync::Arc};

use anyhow::{Context as _, bail};
use millrace_daemon::pem;
use millrace_graft::{
    Identity,
    settings::{Agreement, Peer, Trust},
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
    crypto::{CryptoProvider, WebPkiSupportedAlgorithms, ring, verify_tls13_signature},
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime},
    server::{
        NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
    sign::{CertifiedKey, SigningKey},
    version::TLS13,
};

/// What this host shows, and whom it knows.
#[derive(Clone)]
pub struct Tls {
    shown: Arc<CertifiedKey>,
    known: Arc<Known>,
}

/// Makes a private key; returns what peers know it by.
pub fn make_key(path: &Path) -> anyhow::Result<Identity> {
    let key = rcgen::KeyPair::generate().context("a key")?;
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .with_context(|| path.display().to_string())?;
    file.write_all(key.serialize_pem().as_bytes())?;
    fingerprint(path)
}

/// What peers know the holder of a private key by.
pub fn fingerprint(path: &Path) -> anyhow::Result<Identity> {
    let (_, signing) = read_key(path)?;
    let public = signing.public_key().with_context(|| format!("{}: no public key", path.display()))?;
    Ok(Identity::of(&public))
}

fn read_key(path: &Path) -> anyhow::Result<(PrivateKeyDer<'static>, Arc<dyn SigningKey>)> {
    pem::private_key(path)
        .with_context(|| format!("no key (`millrace graft key --new {}` makes one)", path.display()))
}

impl Tls {
    /// # Errors
    /// A file cannot be read, or is not what it should be.
    pub fn new(agreement: &Agreement) -> anyhow::Result<Self> {
        let shown = match &agreement.certificate {
            Some(path) => pem::pair(path, &agreement.key)?,
            None => {
                let (key, signing) = read_key(&agreement.key)?;
                CertifiedKey::new(vec![self_signed(&key, &agreement.key)?], signing)
            }
        };
        Ok(Self { shown: Arc::new(shown), known: Arc::new(Known::new(agreement)?) })
    }

    /// To call this peer, and nobody else.
    pub fn client(&self, peer: &Peer) -> anyhow::Result<ClientConfig> {
        let expected = Verifier { known: self.known.only(peer) };
        let mut config = ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(expected))
            .with_client_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(self.shown.clone())));
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.resumption = Resumption::disabled();
        Ok(config)
    }

    /// To be called by any peer that is known.
    pub fn server(&self) -> anyhow::Result<ServerConfig> {
        let mut config = ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(Verifier { known: self.known.clone() }))
            .with_cert_resolver(Arc::new(rustls::sign::SingleCertAndKey::from(self.shown.clone())));
        config.alpn_protocols = vec![ALPN.to_vec()];
        config.session_storage = Arc::new(NoServerSessionStorage {});
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// Whose certificate it is; of one that was verified.
    pub fn name(&self, certificates: &[CertificateDer<'_>]) -> Option<String> {
        let (end, others) = certificates.split_first()?;
        self.known.identify(end, others, UnixTime::now(), Role::Client).ok()
    }
}

/// For 2020 to 2100: peers look at the key alone.
fn self_signed(key: &PrivateKeyDer<'_>, path: &Path) -> anyhow::Result<CertificateDer<'static>> {
    let what = || format!("{}: a certificate for this key", path.display());
    let PrivateKeyDer::Pkcs8(der) = key else { bail!("{}: it is not PKCS#8", path.display()) };
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
    known.into_iter().find(|it| fits(it)).context("it is no key of Ed25519, P-256 or P-384")
}

/// With the fastest cipher of this host first. The caller's order counts.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    let first = match has_aes() {
        true => CipherSuite::TLS13_AES_128_GCM_SHA256,
        false => CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
    };
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
enum Role {
    Client,
    Server,
}

#[derive(Debug)]
struct Known {
    keys: Vec<(Identity, String)>,
    hosts: Vec<(ServerName<'static>, String)>,
    roots: Option<Arc<RootCertStore>>,
    provider: Arc<CryptoProvider>,
}

impl Known {
    fn new(agreement: &Agreement) -> anyhow::Result<Self> {
        let roots = match &agreement.authority {
            Some(path) => {
                let mut roots = RootCertStore::empty();
                for certificate in pem::certificates(path)? {
                    roots.add(certificate).with_context(|| path.display().to_string())?;
                }
                Some(Arc::new(roots))
            }
            None => None,
        };
        let (keys, hosts) = (Vec::new(), Vec::new());
        let mut known = Self { keys, hosts, roots, provider: Arc::new(ring::default_provider()) };
        agreement.peers.iter().try_for_each(|peer| known.add(peer))?;
        Ok(known)
    }

    fn add(&mut self, peer: &Peer) -> anyhow::Result<()> {
        match &peer.trust {
            Trust::Key(key) => self.keys.push((*key, peer.name.clone())),
            Trust::Host(host) => {
                let name = ServerName::try_from(host.clone());
                let name = name.with_context(|| format!("peer {}: host {host:?} is no name", peer.name))?;
                self.hosts.push((name, peer.name.clone()));
            }
        }
        Ok(())
    }

    fn only(&self, peer: &Peer) -> Arc<Self> {
        Arc::new(Self {
            keys: self.keys.iter().filter(|(_, name)| *name == peer.name).cloned().collect(),
            hosts: self.hosts.iter().filter(|(_, name)| *name == peer.name).cloned().collect(),
            roots: self.roots.clone(),
            provider: self.provider.clone(),
        })
    }

    /// The name of the peer.
    fn identify(
        &self,
        end: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
        role: Role,
    ) -> Result<String, Error> {
        let parsed = ParsedCertificate::try_from(end)?;
        let key = Identity::of(&parsed.subject_public_key_info());
        if let Some((_, name)) = self.keys.iter().find(|(known, _)| *known == key) {
            return Ok(name.clone());
        }
        let found = self.hosts.iter().find(|(host, _)| verify_server_name(&parsed, host).is_ok());
        let (Some((host, name)), Some(roots)) = (found, &self.roots) else {
            return Err(Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure));
        };
        let wrong = |_| Error::InvalidCertificate(CertificateError::UnknownIssuer);
        match role {
            Role::Client => {
                let builder =
                    WebPkiClientVerifier::builder_with_provider(roots.clone(), self.provider.clone());
                builder.build().map_err(wrong)?.verify_client_cert(end, others, now).map(drop)?;
            }
            Role::Server => {
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
    known: Arc<Known>,
}

impl Verifier {
    fn algorithms(&self) -> &WebPkiSupportedAlgorithms {
        &self.known.provider.signature_verification_algorithms
    }
}

/// Of the server that is called: whatever name stands in its certificate.
impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        _called: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.known.identify(end, others, now, Role::Server).map(|_| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _end: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken here".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        end: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, end, signed, self.algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms().supported_schemes()
    }
}

impl ClientCertVerifier for Verifier {
    /// Callers are told no authorities: they have one certificate.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end: &CertificateDer<'_>,
        others: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.known.identify(end, others, now, Role::Client).map(|_| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _end: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not spoken here".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        end: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, end, signed, self.algorithms())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms().supported_schemes()
    }
}
