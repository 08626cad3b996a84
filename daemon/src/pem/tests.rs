//! Tests with files as operators have them: made by OpenSSL, swapped, in the wrong order, or of the wrong kind.

use super::*;

/// A temporary directory with files.
struct PemFiles(tempfile::TempDir);

impl PemFiles {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn put(&self, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
        let path = self.0.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    }

    /// Returns the error for this certificate file and this key file.
    fn refused(&self, cert: impl AsRef<[u8]>, key: impl AsRef<[u8]>) -> String {
        let cert = self.put("cert.pem", cert);
        let key = self.put("key.pem", key);
        pair(&cert, &key).map(|_| ()).unwrap_err().to_string()
    }
}

/// Returns a certificate and its key in PEM. `change` sets fields of the certificate.
fn made(change: impl FnOnce(&mut rcgen::CertificateParams)) -> (String, String) {
    let mut params = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    change(&mut params);
    let key = rcgen::KeyPair::generate().unwrap();
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

/// Returns a leaf certificate and its key, and the chain of its issuers, the direct issuer first.
fn chain() -> (String, String, [String; 2]) {
    let authority = |name: &str| {
        let mut params = rcgen::CertificateParams::new(Vec::<String>::new()).unwrap();
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        (params, rcgen::KeyPair::generate().unwrap())
    };
    let (root_params, root_key) = authority("root");
    let root_pem = root_params.self_signed(&root_key).unwrap().pem();
    let root = rcgen::Issuer::from_params(&root_params, &root_key);
    let (params, key) = authority("intermediate");
    let intermediate_pem = params.signed_by(&key, &root).unwrap().pem();
    let intermediate = rcgen::Issuer::from_params(&params, &key);
    let leaf = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let leaf_key = rcgen::KeyPair::generate().unwrap();
    let leaf_pem = leaf.signed_by(&leaf_key, &intermediate).unwrap().pem();
    (leaf_pem, leaf_key.serialize_pem(), [intermediate_pem, root_pem])
}

fn der(pem: &str) -> Vec<u8> {
    use base64::Engine as _;
    let lines: String = pem.lines().filter(|line| !line.starts_with("-----")).collect();
    base64::engine::general_purpose::STANDARD.decode(lines).unwrap()
}

/// Each error names the file at fault, what is wrong and what to do.
#[test]
fn error_about_a_certificate_and_key_names_the_file_at_fault() {
    let files = PemFiles::new();
    let (cert, key) = made(|_| {});
    let (_, other) = made(|_| {});
    let cut = &cert[..cert.len() / 2];
    for (cert, key, said) in [
        (
            cert.as_bytes(),
            include_bytes!("fixtures/p521.pem").as_slice(),
            ["key.pem", "P-521", "openssl genpkey"],
        ),
        (cert.as_bytes(), include_bytes!("fixtures/p521_sec1.pem"), ["key.pem", "P-521", "openssl genpkey"]),
        (cert.as_bytes(), include_bytes!("fixtures/k1.pem"), ["key.pem", "secp256k1", "openssl genpkey"]),
        (cert.as_bytes(), include_bytes!("fixtures/ed448.pem"), ["key.pem", "Ed448", "openssl genpkey"]),
        (
            cert.as_bytes(),
            include_bytes!("fixtures/rsa1024.pem"),
            ["key.pem", "fewer than 2048", "openssl genpkey"],
        ),
        (cert.as_bytes(), include_bytes!("fixtures/enc.pem"), ["key.pem", "encrypted", "openssl pkey -in"]),
        (
            cert.as_bytes(),
            include_bytes!("fixtures/enc_sec1.pem"),
            ["key.pem", "encrypted", "openssl pkey -in"],
        ),
        (cert.as_bytes(), other.as_bytes(), ["cert.pem", "key.pem", "one of the two files is old"]),
        (
            key.as_bytes(),
            cert.as_bytes(),
            ["cert.pem", "a private key and no certificate", "are the two files swapped?"],
        ),
        (
            cert.as_bytes(),
            cert.as_bytes(),
            ["key.pem", "a certificate and no private key", "are the two files swapped?"],
        ),
        (b"", key.as_bytes(), ["cert.pem", "is empty", ""]),
        (cert.as_bytes(), b"", ["key.pem", "is empty", ""]),
        (
            cert.as_bytes(),
            b"garbage",
            ["key.pem", "no private key in PEM form", "-----BEGIN PRIVATE KEY-----"],
        ),
        (cut.as_bytes(), key.as_bytes(), ["cert.pem", "damaged", ""]),
        (&der(&cert), key.as_bytes(), ["cert.pem", "DER", "openssl x509 -inform DER"]),
        (cert.as_bytes(), &der(&key), ["key.pem", "DER", "openssl pkey -inform DER"]),
    ] {
        let refused = files.refused(cert, key);
        for part in said {
            assert!(refused.contains(part), "{part:?} is not in {refused:?}");
        }
    }
    let missing = files.0.path().join("missing.pem");
    let error = pair(&missing, &missing).map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("missing.pem") && error.contains("No such file"), "{error}");
}

/// A certificate whose fields cannot be parsed is a fault of the certificate file, not of the key. Certificates after
/// the first are not checked: clients check them.
#[test]
fn error_names_the_damaged_certificate() {
    let files = PemFiles::new();
    let (cert, key) = made(|_| {});
    let broken = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let refused = files.refused(broken, &key);
    assert!(refused.contains("cert.pem: its first certificate is damaged"), "{refused}");
    let cert = files.put("cert.pem", format!("{cert}{broken}"));
    let key = files.put("key.pem", &key);
    assert!(complaints(&pair(&cert, &key).unwrap()).join("; ").contains("is damaged"));
}

#[test]
fn error_names_the_position_of_an_end_entity_certificate_not_first() {
    let files = PemFiles::new();
    let (leaf, key, [intermediate, root]) = chain();
    let cert = files.put("cert.pem", format!("{leaf}{intermediate}{root}"));
    let good = pair(&cert, &files.put("key.pem", &key)).unwrap();
    assert_eq!(complaints(&good), Vec::<String>::new());
    for (order, number) in [(format!("{intermediate}{leaf}"), 2), (format!("{root}{intermediate}{leaf}"), 3)]
    {
        let refused = files.refused(order, &key);
        let told = format!("is number {number} in this file, and has to be the first");
        assert!(refused.contains(&told) && refused.contains("cert.pem"), "{refused}");
    }
    // The leaf comes first, but the root follows, which did not issue it.
    let cert = files.put("cert.pem", format!("{leaf}{root}{intermediate}"));
    let mixed = complaints(&pair(&cert, &files.put("key.pem", &key)).unwrap()).join("; ");
    assert!(mixed.contains("certificate 2 in the file did not sign the one in front of it"), "{mixed}");
}

/// Files that OpenSSL, certbot and mkcert write are accepted.
#[test]
fn valid_files_of_all_formats_are_accepted() {
    let files = PemFiles::new();
    let (cert, key) = made(|_| {});
    let both = format!("{key}{cert}");
    for (cert, key) in [
        (cert.clone(), key.clone()),
        (both.clone(), both),
        (cert.replace('\n', "\r\n"), key.replace('\n', "\r\n")),
        (
            format!("subject=CN = localhost\nissuer=CN = x\n{cert}"),
            format!("Bag Attributes\n    x: y\n{key}"),
        ),
    ] {
        let cert = files.put("cert.pem", cert);
        let key = files.put("key.pem", key);
        pair(&cert, &key).unwrap();
    }
}

#[test]
fn server_certificate_that_tls_clients_refuse_is_reported() {
    let files = PemFiles::new();
    let complaints_of = |change: fn(&mut rcgen::CertificateParams)| {
        let (cert, key) = made(change);
        let cert = files.put("cert.pem", cert);
        let key = files.put("key.pem", key);
        complaints(&pair(&cert, &key).unwrap()).join("; ")
    };
    assert_eq!(complaints_of(|_| {}), "");
    let authority = complaints_of(|it| it.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained));
    assert!(authority.contains("CA:TRUE") && authority.contains("basicConstraints"), "{authority}");
    assert!(complaints_of(|it| it.subject_alt_names.clear()).contains("subjectAltName"));
    let expired = complaints_of(|it| it.not_after = rcgen::date_time_ymd(2001, 1, 1));
    assert!(expired.contains("expired on Jan  1 00:00:00 2001") && expired.contains("renew"), "{expired}");
    let early = complaints_of(|it| it.not_before = rcgen::date_time_ymd(2090, 1, 1));
    assert!(early.contains("not valid before Jan  1 00:00:00 2090") && early.contains("clock"), "{early}");
}

#[test]
fn error_about_root_certificates_names_the_fault() {
    let files = PemFiles::new();
    let (cert, key) = made(|_| {});
    assert_eq!(roots(&files.put("roots.pem", &cert)).unwrap().len(), 1);
    for (bytes, said) in [
        (key.as_bytes(), "a private key and no certificate"),
        (&der(&cert), "openssl x509 -inform DER"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "damaged"),
        (b"", "is empty"),
    ] {
        let error = roots(&files.put("roots.pem", bytes)).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("roots.pem") && error.contains(said), "{error}");
    }
}
