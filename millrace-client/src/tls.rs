//! Whom a client trusts.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, RootCertStore, SignatureScheme};

/// Where Debian and its relatives keep the certificates that the system trusts.
const SYSTEM_ROOTS: &str = "/etc/ssl/certs/ca-certificates.crt";

/// How the server's certificate is checked.
#[derive(Clone, Debug, Default, clap::Args)]
pub struct TlsArgs {
    /// Accept any certificate: for tests on networks that you trust
    #[arg(long)]
    pub tls_disable_verify: bool,
    /// Trust the certificates in this PEM file instead of the system's
    #[arg(long, value_name = "FILE", conflicts_with = "tls_disable_verify")]
    pub tls_root: Option<PathBuf>,
}

impl TlsArgs {
    /// A TLS configuration that offers `alpn` only.
    pub fn client_config(&self, alpn: &[u8]) -> anyhow::Result<rustls::ClientConfig> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::ClientConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&rustls::version::TLS13])?;
        let mut config = match self.tls_disable_verify {
            true => builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(AcceptAny(provider)))
                .with_no_client_auth(),
            false => builder.with_root_certificates(self.roots()?).with_no_client_auth(),
        };
        config.alpn_protocols = vec![alpn.to_vec()];
        Ok(config)
    }

    fn roots(&self) -> anyhow::Result<RootCertStore> {
        let file = self.tls_root.as_deref().unwrap_or(Path::new(SYSTEM_ROOTS));
        let mut roots = RootCertStore::empty();
        let certificates = CertificateDer::pem_file_iter(file)
            .with_context(|| format!("cannot read certificates from {}", file.display()))?;
        for certificate in certificates {
            let certificate = certificate.with_context(|| format!("{} is not PEM", file.display()))?;
            // A system's bundle may hold certificates that rustls does not take; an operator's file not.
            match roots.add(certificate) {
                Err(error) if self.tls_root.is_some() => {
                    return Err(error).with_context(|| format!("bad certificate in {}", file.display()));
                }
                _ => {}
            }
        }
        anyhow::ensure!(!roots.is_empty(), "no certificate in {}", file.display());
        Ok(roots)
    }
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
