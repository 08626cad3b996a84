//! Reads the names in a client's certificate.

use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;
use x509_parser::{certificate::X509Certificate, extensions::GeneralName, prelude::FromDer};

use super::rules::{CertificateName, ClientCertificate, NameKind};

/// Largest number of names that are read from one certificate.
const MAX_NAMES: usize = 64;

/// Reads the names of a verified certificate, and the time at which it expires.
pub fn read(der: &CertificateDer<'_>) -> ClientCertificate {
    let Ok((_, certificate)) = X509Certificate::from_der(der) else { return ClientCertificate::default() };
    let alternative = certificate.subject_alternative_name().ok().flatten();
    let alternative = alternative.iter().flat_map(|names| &names.value.general_names).filter_map(named);
    let common = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
    let common = common.map(|name| CertificateName::new(NameKind::Common, name));
    let names = alternative.chain(common).filter(|name| !name.text.is_empty()).take(MAX_NAMES);
    let not_after = u64::try_from(certificate.validity().not_after.timestamp()).unwrap_or(0);
    let not_after = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(not_after));
    ClientCertificate { names: names.collect(), not_after }
}

fn named(name: &GeneralName<'_>) -> Option<CertificateName> {
    match name {
        GeneralName::DNSName(name) => Some(CertificateName::new(NameKind::Dns, *name)),
        GeneralName::URI(name) => Some(CertificateName::new(NameKind::Uri, *name)),
        GeneralName::RFC822Name(name) => Some(CertificateName::new(NameKind::Mail, *name)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{DnType, SanType};

    use super::*;

    /// Reads a certificate whose common name, mail and URI repeat the host name of another client.
    #[test]
    fn same_name_in_two_certificate_fields_gets_different_type_prefixes() {
        let mut params = rcgen::CertificateParams::new(vec!["mic.example".into()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, "cam.example");
        params.subject_alt_names.push(SanType::Rfc822Name("cam.example".try_into().unwrap()));
        params.subject_alt_names.push(SanType::URI("cam.example".try_into().unwrap()));
        let key = rcgen::KeyPair::generate().unwrap();
        let names = read(params.self_signed(&key).unwrap().der()).names;
        let names: Vec<_> = names.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["dns:mic.example", "mail:cam.example", "uri:cam.example", "cn:cam.example"]);
    }
}
