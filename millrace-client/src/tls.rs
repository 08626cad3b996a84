//! Whom a client trusts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, RootCertStore, SignatureScheme};

/// Where Debian and its relatives keep the certificates that the system trusts.
const SYSTEM_ROOTS: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Whose certificates are accepted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Trust {
    /// Those that the system trusts.
    #[default]
    System,
    /// Those in this PEM file.
    Roots(PathBuf),
    /// Anyone's: for tests on networks that are trusted.
    Anyone,
}

/// Why there is no TLS configuration.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read certificates from {}: {source}", file.display())]
    Read { file: PathBuf, source: pem::Error },
    #[error("{} is not PEM: {source}", file.display())]
    NotPem { file: PathBuf, source: pem::Error },
    #[error("bad certificate in {}: {source}", file.display())]
    BadCertificate { file: PathBuf, source: rustls::Error },
    #[error("no certificate in {}", .0.display())]
    NoCertificate(PathBuf),
    #[error(transparent)]
    Tls(#[from] rustls::Error),
}

impl Trust {
    /// A TLS configuration that offers `alpn` only.
    ///
    /// # Errors
    /// The trusted certificates cannot be read.
    pub fn client_config(&self, alpn: &[u8]) -> Result<rustls::ClientConfig, Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?;
        let mut config = match self {
            Self::System => {
                let roots = roots(Path::new(SYSTEM_ROOTS), OnBad::Skip)?;
                builder.with_root_certificates(roots).with_no_client_auth()
            }
            Self::Roots(file) => {
                builder.with_root_certificates(roots(file, OnBad::Fail)?).with_no_client_auth()
            }
            Self::Anyone => builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(AcceptAny(provider)))
                .with_no_client_auth(),
        };
        config.alpn_protocols = vec![alpn.to_vec()];
        Ok(config)
    }
}

/// What becomes of a certificate that rustls does not take.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OnBad {
    /// A system's bundle may hold some.
    Skip,
    /// A file that was named is to be good.
    Fail,
}

fn roots(file: &Path, on_bad: OnBad) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    let certificates = CertificateDer::pem_file_iter(file)
        .map_err(|source| Error::Read { file: file.to_owned(), source })?;
    for certificate in certificates {
        let certificate = certificate.map_err(|source| Error::NotPem { file: file.to_owned(), source })?;
        match roots.add(certificate) {
            Err(source) if on_bad == OnBad::Fail => {
                return Err(Error::BadCertificate { file: file.to_owned(), source });
            }
            _ => {}
        }
    }
    if roots.is_empty() {
        return Err(Error::NoCertificate(file.to_owned()));
    }
    Ok(roots)
}

/// Takes any certificate, but still checks that the server holds its key.
#[derive(Debug)]
struct AcceptAny(Arc<CryptoProvider>);

impl ServerCertVerifier for AcceptAny {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
