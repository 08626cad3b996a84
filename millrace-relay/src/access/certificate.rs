//! What a client's certificate says of it.

use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use x509_parser::{certificate::X509Certificate, extensions::GeneralName, prelude::FromDer};

use super::rules::Certificate;

/// Names that are looked at.
const MAX_NAMES: usize = 64;

/// The names of a verified certificate, and until when it is valid.
pub fn read(der: &CertificateDer<'_>) -> Certificate {
    let Ok((_, certificate)) = X509Certificate::from_der(der) else { return Certificate::default() };
    let alternative = certificate.subject_alternative_name().ok().flatten();
    let alternative = alternative.iter().flat_map(|names| &names.value.general_names).filter_map(text);
    let common = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
    let names = alternative.chain(common).filter(|name| !name.is_empty()).take(MAX_NAMES).map(str::to_owned);
    let not_after = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0);
    let not_after = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(not_after));
    Certificate { names: names.collect(), not_after }
}

fn text<'a>(name: &GeneralName<'a>) -> Option<&'a str> {
    match name {
        GeneralName::DNSName(name) | GeneralName::URI(name) | GeneralName::RFC822Name(name) => Some(name),
        _ => None,
    }
}
