//! The certificates that a client trusts.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::{fmt, fs, io};

use millrace_base::pem::{PemKind, fault};
use parking_lot::Mutex;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{CertificateError, DigitallySignedStruct, RootCertStore, SignatureScheme};

/// Path of the system's trusted certificates on Debian and its derivatives.
const SYSTEM_ROOTS: &str = "/etc/ssl/certs/ca-certificates.crt";

/// The rule that decides which server certificates are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CertificateTrust {
    /// The system's trusted certificates.
    #[default]
    System,
    /// The certificates in this PEM file.
    Roots(PathBuf),
    /// Only the certificate with this fingerprint. Its names, dates and issuer are not checked.
    Fingerprint(Fingerprint),
    /// Any certificate, without verification. This is for tests on trusted networks only.
    Anyone,
}

/// SHA-256 of a certificate, as relays log it: 64 hexadecimal digits, with or without colons.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Fingerprint([u8; 32]);

/// The error for text that is not a [`Fingerprint`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a fingerprint is a SHA-256 of 64 hexadecimal digits, as the relay logs it at start-up")]
pub struct NoFingerprint;

impl FromStr for Fingerprint {
    type Err = NoFingerprint;

    fn from_str(text: &str) -> Result<Self, NoFingerprint> {
        let digits = text.bytes().filter(|byte| *byte != b':').map(|byte| char::from(byte).to_digit(16));
        let digits: Vec<u8> = digits
            .map(|digit| digit.and_then(|it| u8::try_from(it).ok()))
            .collect::<Option<_>>()
            .ok_or(NoFingerprint)?;
        let (pairs, []) = digits.as_chunks::<2>() else { return Err(NoFingerprint) };
        let bytes: Vec<u8> = pairs.iter().map(|[high, low]| high << 4 | low).collect();
        bytes.try_into().map(Self).map_err(|_| NoFingerprint)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Fingerprint {
    /// Returns the fingerprint of a certificate.
    pub fn from_certificate(certificate: &CertificateDer<'_>) -> Self {
        let digest = ring::digest::digest(&ring::digest::SHA256, certificate);
        let mut bytes = [0; 32];
        bytes.iter_mut().zip(digest.as_ref()).for_each(|(to, from)| *to = *from);
        Self(bytes)
    }
}

/// The reason why a certificate was refused, and what to do about it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct CertificateRefusal(String);

impl CertificateRefusal {
    fn new(error: &rustls::Error, host: &ServerName<'_>, shown: Fingerprint) -> Self {
        let host = host.to_str();
        let rustls::Error::InvalidCertificate(error) = error else { return Self(error.to_string()) };
        Self(match error {
            CertificateError::UnknownIssuer => format!(
                "its certificate is not signed by an authority that this system trusts; trust its authority with --tls-root FILE, or this \
                 certificate with --tls-fingerprint {shown} (compare with what the relay logs)"
            ),
            CertificateError::ApplicationVerificationFailure => {
                format!("its certificate has another fingerprint than --tls-fingerprint: {shown}")
            }
            CertificateError::Other(error) if error.0.to_string().contains("CaUsedAsEndEntity") => format!(
                "{AUTHORITY_SHOWN}; or trust it unchanged with --tls-fingerprint {shown} (compare with what the relay logs)"
            ),
            CertificateError::NotValidForName => format!("its certificate is not for {host}"),
            error @ CertificateError::NotValidForNameContext { .. } => format!("not for {host}: {error}"),
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                format!("its certificate is not valid at this time: {error}")
            }
            error => format!("its certificate is not valid: {error}"),
        })
    }
}

/// Advice for a relay's operator whose certificate was made by `openssl req -x509`, which marks it as a CA.
const AUTHORITY_SHOWN: &str = "its certificate is that of an authority (CA:TRUE), which a server must not present; make another \
                               with openssl req -x509 ... -addext basicConstraints=critical,CA:FALSE";

/// The reason why the server certificate that was checked last was refused. Clones share the value.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastRefusal(Arc<Mutex<Option<CertificateRefusal>>>);

impl LastRefusal {
    pub fn take(&self) -> Option<CertificateRefusal> {
        self.0.lock().take()
    }
}

/// The reason why a TLS configuration could not be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("cannot read certificates from {}: {source}", file.display())]
    Read { file: PathBuf, source: io::Error },
    #[error("{}: {fault}", file.display())]
    NotPem { file: PathBuf, fault: String },
    #[error("bad certificate in {}: {source}", file.display())]
    BadCertificate { file: PathBuf, source: rustls::Error },
    #[error(transparent)]
    Verifier(#[from] rustls::client::VerifierBuilderError),
    #[error(transparent)]
    Tls(#[from] rustls::Error),
}

impl CertificateTrust {
    /// Returns a TLS configuration that offers the protocols `alpn`, the preferred one first.
    ///
    /// # Errors
    /// Fails if the trusted certificates cannot be read.
    pub fn client_config(&self, alpn: &[&[u8]]) -> Result<rustls::ClientConfig, Error> {
        self.explaining_config(alpn).map(|(config, _)| config)
    }

    /// Returns the same as [`Self::client_config`], and in addition a store of the reason why a certificate was
    /// refused.
    pub(crate) fn explaining_config(
        &self,
        alpn: &[&[u8]],
    ) -> Result<(rustls::ClientConfig, LastRefusal), Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let by_roots =
            |roots| WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build();
        let chain = match self {
            Self::System => Some(by_roots(roots(Path::new(SYSTEM_ROOTS), OnBad::Skip)?)?),
            Self::Roots(file) => Some(by_roots(roots(file, OnBad::Fail)?)?),
            Self::Fingerprint(_) | Self::Anyone => None,
        };
        let fingerprint = match self {
            Self::Fingerprint(expected) => Some(*expected),
            _ => None,
        };
        let algorithms = provider.signature_verification_algorithms;
        let verdict = LastRefusal::default();
        let explaining = ExplainingVerifier { chain, fingerprint, algorithms, verdict: verdict.clone() };
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(explaining))
            .with_no_client_auth();
        config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
        Ok((config, verdict))
    }
}

/// The reaction to a trusted root certificate that rustls cannot use.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OnBad {
    /// Skip the certificate, because a system's CA bundle may contain such certificates.
    Skip,
    /// Fail, because the user has specified the file.
    Fail,
}

fn roots(file: &Path, on_bad: OnBad) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    let bytes = fs::read(file).map_err(|source| Error::Read { file: file.to_owned(), source })?;
    let not_pem =
        || Error::NotPem { file: file.to_owned(), fault: fault(file, &bytes, PemKind::Certificates) };
    for certificate in CertificateDer::pem_slice_iter(&bytes) {
        match roots.add(certificate.map_err(|_| not_pem())?) {
            Err(source) if on_bad == OnBad::Fail => {
                return Err(Error::BadCertificate { file: file.to_owned(), source });
            }
            _ => {}
        }
    }
    if roots.is_empty() {
        return Err(not_pem());
    }
    Ok(roots)
}

/// A verifier of the server's certificate. It stores the reason for a refusal, because QUIC's error cannot carry advice
/// for the user. In all cases the server has to prove that it has the certificate's private key.
#[derive(Debug)]
struct ExplainingVerifier {
    /// The verifier that checks whether a trusted CA has signed the certificate.
    chain: Option<Arc<WebPkiServerVerifier>>,
    /// The only certificate that is accepted, without a chain. If `chain` and this field are `None`, every certificate
    /// is accepted.
    fingerprint: Option<Fingerprint>,
    algorithms: WebPkiSupportedAlgorithms,
    verdict: LastRefusal,
}

impl ServerCertVerifier for ExplainingVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let shown = Fingerprint::from_certificate(end_entity);
        let verified = match &self.chain {
            Some(chain) => {
                chain.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
            }
            None if self.fingerprint.is_some_and(|expected| expected != shown) => {
                Err(CertificateError::ApplicationVerificationFailure.into())
            }
            None => Ok(ServerCertVerified::assertion()),
        };
        if let Err(error) = &verified {
            *self.verdict.0.lock() = Some(CertificateRefusal::new(error, server_name, shown));
        }
        verified
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _cert: &CertificateDer<'_>,
        _dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        // QUIC requires TLS 1.3 (RFC 9001, section 4.2), so rustls never calls this method.
        Err(rustls::Error::General("TLS 1.2 is not supported".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fingerprint_is_parsed_with_or_without_colons() {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let fingerprint = Fingerprint::from_certificate(made.cert.der());
        let text = fingerprint.to_string();
        assert_eq!(text.parse(), Ok(fingerprint));
        let pairs: Vec<_> = text.as_bytes().chunks(2).map(|pair| String::from_utf8_lossy(pair)).collect();
        assert_eq!(pairs.join(":").to_uppercase().parse(), Ok(fingerprint));
        for bad in ["", "abc", &text[1..], &format!("{text}00"), &text.replace('a', "x").replace('0', "y")] {
            assert_eq!(bad.parse::<Fingerprint>(), Err(NoFingerprint), "{bad}");
        }
    }
}
