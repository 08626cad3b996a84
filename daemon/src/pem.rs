//! Reads certificates and private keys of TLS from PEM files. Errors name the file, the fault and what to do.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
};

use millrace_base::pem::{PemKind, fault, unusable_key};
use rustls::{
    RootCertStore,
    crypto::ring::{self, sign::any_supported_type},
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::{CertifiedKey, SigningKey},
};
use x509_parser::{parse_x509_certificate, prelude::X509Certificate};

/// The reason why a certificate or key file cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    #[error("{}: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("{}: {fault}", path.display())]
    Fault { path: PathBuf, fault: String },
    #[error(
        "{}: its first certificate does not belong to the key in {}: one of the two files is old, or of another server", cert.display(),
        key.display()
    )]
    Pair { cert: PathBuf, key: PathBuf },
    #[error(
        "{}: the certificate of the key in {} is number {number} in this file, and has to be the first, followed by those that signed it", 
        cert.display(), key.display()
    )]
    Order { cert: PathBuf, key: PathBuf, number: usize },
}

fn wrong(path: &Path, fault: String) -> Error {
    Error::Fault { path: path.to_owned(), fault }
}

/// Reads a file.
///
/// # Errors
/// Fails if the file cannot be read.
pub fn read(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|source| Error::Read { path: path.to_owned(), source })
}

/// Reads the certificates of a file, which must contain at least one.
///
/// # Errors
/// Fails if the file cannot be read, or has no certificate.
pub fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let bytes = read(path)?;
    let certificates = CertificateDer::pem_slice_iter(&bytes).collect::<Result<Vec<_>, _>>();
    let certificates = certificates.ok().filter(|certificates| !certificates.is_empty());
    certificates.ok_or_else(|| wrong(path, fault(path, &bytes, PemKind::Certificates)))
}

/// Reads a private key of a type that Millrace's TLS implementation supports.
///
/// # Errors
/// Fails if the file cannot be read, has no key, or has a key of another type.
pub fn private_key(path: &Path) -> Result<(PrivateKeyDer<'static>, Arc<dyn SigningKey>), Error> {
    let bytes = read(path)?;
    let named = |fault| wrong(path, fault);
    let key =
        PrivateKeyDer::from_pem_slice(&bytes).map_err(|_| named(fault(path, &bytes, PemKind::PrivateKey)))?;
    let signing = any_supported_type(&key).map_err(|_| named(unusable_key(key.secret_der())))?;
    Ok((key, signing))
}

/// Reads a certificate chain and its private key.
///
/// # Errors
/// Fails if a file cannot be read or has other contents, or the key does not belong to the first certificate.
pub fn pair(cert: &Path, key: &Path) -> Result<CertifiedKey, Error> {
    let chain = certificates(cert)?;
    let (private, signing) = private_key(key)?;
    match CertifiedKey::from_der(chain.clone(), private, &ring::default_provider()) {
        Ok(certified) => Ok(certified),
        Err(rustls::Error::InconsistentKeys(_)) => Err(mismatch(cert, key, &chain, &*signing)),
        Err(error) => Err(wrong(
            cert,
            format!("its first certificate is damaged, or of a kind that is not known here: {error}"),
        )),
    }
}

/// Explains why the private key does not match the first certificate.
fn mismatch(cert: &Path, key: &Path, chain: &[CertificateDer<'_>], signing: &dyn SigningKey) -> Error {
    let public = signing.public_key();
    let is_its = |der: &&CertificateDer<'_>| {
        public
            .as_ref()
            .is_some_and(|public| parse(der).is_some_and(|it| it.public_key().raw == public.as_ref()))
    };
    match chain.iter().position(|der| is_its(&der)) {
        Some(at) => Error::Order { cert: cert.to_owned(), key: key.to_owned(), number: at + 1 },
        None => Error::Pair { cert: cert.to_owned(), key: key.to_owned() },
    }
}

fn parse<'a>(der: &'a CertificateDer<'_>) -> Option<X509Certificate<'a>> {
    parse_x509_certificate(der).ok().filter(|(rest, _)| rest.is_empty()).map(|(_, parsed)| parsed)
}

/// Reads trusted root certificates. Certificates that cannot be parsed are skipped, because CA bundles often contain
/// some.
///
/// # Errors
/// Fails if the file cannot be read, or has no certificate that can be parsed.
pub fn roots(path: &Path) -> Result<RootCertStore, Error> {
    let mut roots = RootCertStore::empty();
    match roots.add_parsable_certificates(certificates(path)?) {
        (0, _) => Err(wrong(path, "none of its certificates can be read: they are damaged".to_owned())),
        _ => Ok(roots),
    }
}

/// Returns a warning if clients may refuse this certificate, with what to do.
pub fn complaints(certified: &CertifiedKey) -> Vec<String> {
    let parsed: Option<Vec<_>> = certified.cert.iter().map(parse).collect();
    let Some((leaf, others)) = parsed.as_deref().and_then(<[_]>::split_first) else {
        return vec!["a certificate in the file is damaged, so clients may refuse the chain".to_owned()];
    };
    let mut complaints = Vec::new();
    if leaf.is_ca() {
        complaints.push(
            "it is an authority's certificate (CA:TRUE, as `openssl req -x509` makes it), which clients refuse unless they \
             pin it with --tls-fingerprint; make another with -addext basicConstraints=critical,CA:FALSE"
                .to_owned(),
        );
    }
    if !matches!(leaf.subject_alternative_name(), Ok(Some(names)) if !names.value.general_names.is_empty()) {
        complaints.push(
            "it has no subjectAltName, so clients refuse it for every name; make another with \
             -addext subjectAltName=DNS:relay.example"
                .to_owned(),
        );
    }
    complaints.extend([leaf].into_iter().chain(others).enumerate().filter_map(|(at, it)| untimely(at, it)));
    let signed =
        |(below, above): (&X509Certificate<'_>, &X509Certificate<'_>)| below.issuer() == above.subject();
    let all = || [leaf].into_iter().chain(others);
    if let Some(at) = all().zip(others).position(|pair| !signed(pair)) {
        complaints.push(format!(
            "certificate {} in the file did not sign the one in front of it, so clients may find no way to their roots; put each \
             behind the one that it signed",
            at + 2
        ));
    }
    complaints
}

/// Returns what is wrong with the validity dates of a certificate. `at` is the certificate's index in the file.
fn untimely(at: usize, cert: &X509Certificate<'_>) -> Option<String> {
    let now = x509_parser::time::ASN1Time::now();
    let validity = cert.validity();
    let which = if at == 0 { "it".to_owned() } else { format!("certificate {} in the file", at + 1) };
    if now < validity.not_before {
        return Some(format!(
            "{which} is not valid before {}: either it is used too early, or the clock of this machine is wrong ({now} now)",
            validity.not_before
        ));
    }
    (now > validity.not_after).then(|| format!("{which} expired on {}: renew it", validity.not_after))
}

#[cfg(test)]
mod tests;
