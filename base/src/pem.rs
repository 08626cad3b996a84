//! Explains what is wrong with a file that should hold certificates or a private key, and what to do about it.
//!
//! PEM readers skip sections of other kinds, and report any other content as bad base64. A caller that finds no
//! certificate or key, or cannot use the one found, calls [`fault`]. Messages contain no bytes of the file, because it
//! may be a secret.

use std::path::Path;

/// The contents that a file should have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PemKind {
    /// A certificate, or several.
    Certificates,
    /// A private key that no passphrase protects.
    PrivateKey,
}

/// Largest number of PEM labels that are read from a file. Later labels do not change the diagnosis.
const LABELS_MAX: usize = 64;
const BEGIN: &str = "-----BEGIN ";

/// Returns why the file at `path` does not contain what `wanted` asks for, and what to do.
pub fn fault(path: &Path, bytes: &[u8], wanted: PemKind) -> String {
    let path = path.display();
    let labels = labels(bytes);
    let has = |label: &str| labels.iter().any(|found| found == label);
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return "the file is empty".to_owned();
    }
    // Text in UTF-16 begins with one of these byte order marks, and no PEM label is found in it.
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        return format!("it is text in UTF-16: iconv -f UTF-16 -t ASCII {path} > FILE.pem");
    }
    if labels.is_empty() {
        return binary(&path.to_string(), bytes, wanted);
    }
    let has_key = labels.iter().any(|label| label.ends_with("PRIVATE KEY"));
    match wanted {
        PemKind::Certificates if has("TRUSTED CERTIFICATE") => {
            format!("it is a certificate with OpenSSL's own additions: openssl x509 -in {path} -out FILE.pem")
        }
        PemKind::Certificates if has("PKCS7") => {
            format!("it is a PKCS#7 bundle: openssl pkcs7 -print_certs -in {path} -out FILE.pem")
        }
        PemKind::Certificates if has("CERTIFICATE REQUEST") || has("NEW CERTIFICATE REQUEST") => {
            "it is a certificate signing request: send it to an authority, and use the certificate that it returns".to_owned()
        }
        // No certificate could be read from the file although it has the label of one, so its contents are damaged.
        PemKind::Certificates if has("CERTIFICATE") => damaged("certificate"),
        PemKind::Certificates if has_key => {
            "it holds a private key and no certificate: are the two files swapped?".to_owned()
        }
        PemKind::PrivateKey if has("ENCRYPTED PRIVATE KEY") || is_encrypted(bytes) => format!(
            "the key is encrypted, and the daemon cannot ask for its passphrase: run openssl pkey -in {path} -out FILE.pem, \
             and make FILE.pem readable by its owner only"
        ),
        PemKind::PrivateKey if has("OPENSSH PRIVATE KEY") => {
            format!("it is a key in OpenSSH's form: ssh-keygen -p -N '' -m PKCS8 -f {path} writes it in the form that is read here")
        }
        PemKind::PrivateKey if has_key => damaged("private key"),
        PemKind::PrivateKey if has("PUBLIC KEY") => {
            "it holds a public key: name the file with the private one".to_owned()
        }
        PemKind::PrivateKey if has("CERTIFICATE") => {
            "it holds a certificate and no private key: are the two files swapped?".to_owned()
        }
        PemKind::PrivateKey if has("EC PARAMETERS") => {
            "it holds the parameters of a curve and no key: openssl genpkey -algorithm EC -pkeyopt \
             ec_paramgen_curve:P-256 makes one"
                .to_owned()
        }
        wanted => format!("it holds no {}, but other things in PEM form", wanted.noun()),
    }
}

impl PemKind {
    fn noun(self) -> &'static str {
        match self {
            Self::Certificates => "certificate",
            Self::PrivateKey => "private key",
        }
    }
}

fn damaged(noun: &str) -> String {
    format!("the {noun} in it is damaged: it is cut off, or something was written into it")
}

/// Explains why a file without any PEM section cannot be used.
fn binary(path: &str, bytes: &[u8], wanted: PemKind) -> String {
    /// The tag of a DER SEQUENCE, with which certificates and keys begin.
    const SEQUENCE: u8 = 0x30;
    let noun = wanted.noun();
    let is_der = bytes.first() == Some(&SEQUENCE) && der_ends(bytes) == Some(bytes.len());
    // PFX ::= SEQUENCE { version INTEGER {v3(3)}, ... } (RFC 7292, section 4).
    let is_pkcs12 = is_der && contains(&bytes[..bytes.len().min(12)], &[2, 1, 3]);
    match wanted {
        _ if is_pkcs12 => {
            let part = if wanted == PemKind::Certificates { "-nokeys" } else { "-nocerts -nodes" };
            format!("it is a PKCS#12 file: openssl pkcs12 -in {path} {part} -out FILE.pem")
        }
        PemKind::Certificates if is_der => {
            format!("it is in DER form: openssl x509 -inform DER -in {path} -out FILE.pem")
        }
        PemKind::PrivateKey if is_der => {
            format!("it is in DER form: openssl pkey -inform DER -in {path} -out FILE.pem")
        }
        _ => format!(
            "it holds no {noun} in PEM form, which has a line -----BEGIN {}-----",
            noun.to_uppercase()
        ),
    }
}

/// Returns the offset, in bytes, at which the first DER value ends.
fn der_ends(bytes: &[u8]) -> Option<usize> {
    let first = *bytes.get(1)?;
    let more = match first {
        0..=0x7f => return Some(2 + usize::from(first)),
        // The lower bits of this byte are the number of bytes that the length takes (X.690, section 8.1.3.5).
        0x81..=0x84 => usize::from(first & 0x7f),
        _ => return None,
    };
    let length = bytes.get(2..2 + more)?.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
    Some(2 + more + length)
}

/// Returns the labels of the PEM sections in a file.
fn labels(bytes: &[u8]) -> Vec<String> {
    let lines = bytes.split(|byte| matches!(byte, b'\n' | b'\r'));
    let labels = lines.filter_map(|line| {
        let line = str::from_utf8(line).ok()?.trim();
        Some(line.strip_prefix(BEGIN)?.strip_suffix("-----")?.to_owned())
    });
    labels.take(LABELS_MAX).collect()
}

/// Reports whether a PEM key is encrypted as RFC 1421 describes.
fn is_encrypted(bytes: &[u8]) -> bool {
    contains(bytes, b"Proc-Type: 4,ENCRYPTED")
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    bytes.windows(part.len()).any(|window| window == part)
}

/// Object identifiers, in DER, of key types that Millrace's TLS implementation does not support.
const UNUSABLE: [(&[u8], &str); 9] = [
    (&[0x06, 0x05, 0x2b, 0x81, 0x04, 0x00, 0x23], "of the curve P-521"),
    (&[0x06, 0x05, 0x2b, 0x81, 0x04, 0x00, 0x21], "of the curve P-224"),
    (&[0x06, 0x05, 0x2b, 0x81, 0x04, 0x00, 0x0a], "of the curve secp256k1"),
    (&[0x06, 0x09, 0x2b, 0x24, 0x03, 0x03, 0x02, 0x08, 0x01, 0x01], "of a Brainpool curve"),
    (&[0x06, 0x03, 0x2b, 0x65, 0x71], "of Ed448"),
    (&[0x06, 0x03, 0x2b, 0x65, 0x6e], "of X25519, which signs nothing"),
    (&[0x06, 0x07, 0x2a, 0x86, 0x48, 0xce, 0x38, 0x04, 0x01], "of DSA"),
    (&[0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x0a], "of RSA for PSS only"),
    (
        &[0x06, 0x09, 0x2a, 0x86, 0x48, 0x86, 0xf7, 0x0d, 0x01, 0x01, 0x01],
        "of RSA with fewer than 2048 bits, or more than 8192",
    ),
];

/// Returns why Millrace's TLS implementation cannot use a private key in DER.
pub fn unusable_key(der: &[u8]) -> String {
    let kind = UNUSABLE.iter().find(|(oid, _)| contains(der, oid)).map(|(_, kind)| *kind);
    format!(
        "the key is {}: make one of P-256 (openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256), P-384, Ed25519 or RSA \
         with 2048 to 8192 bits, and get a certificate for it",
        kind.unwrap_or("of a kind that is not known here, or damaged")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pem(label: &str) -> String {
        format!("-----BEGIN {label}-----\nAAAA\n-----END {label}-----\n")
    }

    #[test]
    fn each_pem_fault_is_reported_with_its_remedy() {
        use PemKind::{Certificates, PrivateKey};
        let path = Path::new("/etc/x");
        let der = [&[0x30, 0x82, 0x01, 0x00][..], &[2; 256]].concat();
        let pkcs12 = [&[0x30, 0x82, 0x01, 0x03, 2, 1, 3][..], &[0x30; 256]].concat();
        let legacy = pem("RSA PRIVATE KEY").replace("AAAA", "Proc-Type: 4,ENCRYPTED\nDEK-Info: AES\n\nAAAA");
        for (bytes, wanted, said) in [
            (&b""[..], Certificates, "is empty"),
            (b" \n\n", PrivateKey, "is empty"),
            (b"hello", Certificates, "no certificate in PEM form"),
            (b"0hello", PrivateKey, "no private key in PEM form"),
            (b"\xff\xfe-\0", Certificates, "UTF-16"),
            (&der, Certificates, "openssl x509 -inform DER -in /etc/x"),
            (&der, PrivateKey, "openssl pkey -inform DER -in /etc/x"),
            (&pkcs12, Certificates, "openssl pkcs12 -in /etc/x -nokeys"),
            (&pkcs12, PrivateKey, "openssl pkcs12 -in /etc/x -nocerts"),
            (pem("PRIVATE KEY").as_bytes(), Certificates, "a private key and no certificate"),
            (pem("CERTIFICATE").as_bytes(), PrivateKey, "a certificate and no private key"),
            (pem("CERTIFICATE").as_bytes(), Certificates, "damaged"),
            (pem("EC PRIVATE KEY").as_bytes(), PrivateKey, "damaged"),
            (pem("CERTIFICATE REQUEST").as_bytes(), Certificates, "signing request"),
            (pem("TRUSTED CERTIFICATE").as_bytes(), Certificates, "openssl x509 -in /etc/x"),
            (pem("PKCS7").as_bytes(), Certificates, "openssl pkcs7"),
            (pem("ENCRYPTED PRIVATE KEY").as_bytes(), PrivateKey, "encrypted"),
            (legacy.as_bytes(), PrivateKey, "encrypted"),
            (pem("OPENSSH PRIVATE KEY").as_bytes(), PrivateKey, "ssh-keygen"),
            (pem("PUBLIC KEY").as_bytes(), PrivateKey, "a public key"),
            (pem("EC PARAMETERS").as_bytes(), PrivateKey, "parameters of a curve"),
            (pem("DH PARAMETERS").as_bytes(), PrivateKey, "no private key, but other things"),
        ] {
            let fault = fault(path, bytes, wanted);
            assert!(fault.contains(said), "{wanted:?}: {fault:?} does not say {said:?}");
        }
    }

    #[test]
    fn error_for_an_unusable_key_names_its_type() {
        for (oid, kind) in UNUSABLE {
            let der = [&[0x30, 0x20][..], oid, &[7; 9]].concat();
            assert!(unusable_key(&der).contains(kind), "{kind}");
        }
        assert!(unusable_key(&[]).contains("not known here"));
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_bytes_are_refused_as_pem(bytes in proptest::collection::vec(proptest::num::u8::ANY, 0..200)) {
            for wanted in [PemKind::Certificates, PemKind::PrivateKey] {
                assert!(!fault(Path::new("x"), &bytes, wanted).is_empty());
            }
            assert!(!unusable_key(&bytes).is_empty());
        }
    }
}
