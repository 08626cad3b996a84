use base64::{
    Engine as _,
    engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD},
};
use rcgen::PublicKeyData as _;
use serde_json::json;

use super::*;
use crate::{jwt, keys::KeyError};

/// Test case: its name, the content of a key file, and the expected number of keys or the beginning of the error.
type KeyFileRow = (&'static str, Vec<u8>, Result<usize, &'static str>);

fn oct() -> serde_json::Value {
    json!({ "kty": "oct", "kid": "1", "alg": "HS256", "k": URL_SAFE_NO_PAD.encode(SECRET) })
}

#[test]
fn contents_of_key_files_are_recognised() {
    let pair = rcgen::KeyPair::generate().unwrap();
    let certificate = rcgen::CertificateParams::new(["x".to_owned()]).unwrap().self_signed(&pair).unwrap();
    let encryption = json!({ "kty": "oct", "use": "enc", "k": "AAAA" });
    let set = json!({ "keys": [oct(), encryption] }).to_string();
    let latin1 = [b"# f\xfcr alle\n", pair.public_key_pem().as_bytes()].concat();
    let marked = ["\u{feff}".as_bytes(), oct().to_string().as_bytes()].concat();
    let table: [KeyFileRow; 12] = [
        ("public key", pair.public_key_pem().into_bytes(), Ok(1)),
        ("public key under a comment that is not UTF-8", latin1, Ok(1)),
        ("certificate", certificate.pem().into_bytes(), Ok(1)),
        (
            "private key",
            pair.serialize_pem().into_bytes(),
            Err("a private key: tokens are checked with the public one"),
        ),
        ("JWK", oct().to_string().into_bytes(), Ok(1)),
        ("JWK with a byte order mark", marked, Ok(1)),
        ("JWKS", set.into_bytes(), Ok(1)),
        ("no key in a set", json!({ "keys": [] }).to_string().into_bytes(), Err("no key that tokens")),
        ("no JWK", b"{}".to_vec(), Err("an unknown kind of JWK")),
        ("nothing", b" \n".to_vec(), Err("no key that tokens")),
        ("a secret", SECRET.to_vec(), Err("it is neither PEM nor JSON: a key is PEM")),
        ("DER", pair.subject_public_key_info(), Err("it is DER: a key is PEM")),
    ];
    for (what, bytes, wanted) in table {
        match (keys::read(&bytes), wanted) {
            (Ok(keys), Ok(count)) => assert_eq!(keys.len(), count, "{what}"),
            (Err(error), Err(start)) => assert!(error.to_string().starts_with(start), "{what}: {error}"),
            (found, _) => panic!("{what}: {found:?}"),
        }
    }
    assert_eq!(format!("{:?}", keys()), "[Key(HMAC secret, None)]");
}

/// Returns all kinds of files in which an issuer or a tool may hand out a public key.
fn public_files() -> Vec<(String, Vec<u8>)> {
    let pair = rcgen::KeyPair::generate().unwrap();
    let ed25519 = rcgen::KeyPair::generate_for(&rcgen::PKCS_ED25519).unwrap();
    let certificate = rcgen::CertificateParams::new(["x".to_owned()]).unwrap().self_signed(&pair).unwrap();
    let pem = pair.public_key_pem();
    let jwk = json!({ "kty": "EC", "crv": "P-256", "x": "AAAA", "y": "AAAA" });
    let blob = [&[0, 0, 0, 11][..], b"ssh-ed25519", &[0, 0, 0, 32], &[7; 32]].concat();
    let utf16 = pem.encode_utf16().flat_map(u16::to_le_bytes);
    let line = format!("ssh-ed25519 {} alice@example", STANDARD.encode(&blob));
    let mut ends_like_a_line = pair.subject_public_key_info();
    *ends_like_a_line.last_mut().unwrap() = b'\n';
    let with_lines = [&ends_like_a_line[..], b"\n\r\n"].concat();
    let plain: [(&str, Vec<u8>); 18] = [
        ("SPKI in DER", pair.subject_public_key_info()),
        ("SPKI in DER whose last byte is a line feed", ends_like_a_line),
        ("the same, and more line ends", with_lines),
        ("Ed25519 in DER", ed25519.subject_public_key_info()),
        ("private key in DER", pair.serialize_der()),
        ("certificate in DER", certificate.der().to_vec()),
        ("PEM", pem.clone().into_bytes()),
        ("PEM under a comment in Latin-1", [b"# f\xfcr alle\n", pem.as_bytes()].concat()),
        ("PEM in UTF-16", [0xff, 0xfe].into_iter().chain(utf16).collect()),
        ("PEM with a byte order mark", format!("\u{feff}{pem}").into_bytes()),
        ("JWK", jwk.to_string().into_bytes()),
        ("JWKS as an array", json!([jwk]).to_string().into_bytes()),
        ("JWKS with a byte order mark", format!("\u{feff}{}", json!({ "keys": [jwk] })).into_bytes()),
        ("JWKS that is cut off", format!("{{\"keys\": [{jwk}").into_bytes()),
        ("SSH key", line.clone().into_bytes()),
        ("SSH key with options", format!("from=\"10.0.0.0/8\" {line}\n").into_bytes()),
        ("SSH2 key", b"---- BEGIN SSH2 PUBLIC KEY ----\nAAAA\n---- END SSH2 PUBLIC KEY ----\n".to_vec()),
        ("SSH key as a blob", blob),
    ];
    let encode = |bytes: &[u8]| {
        let lines: Vec<_> = STANDARD.encode(bytes).into_bytes().chunks(64).map(<[u8]>::to_vec).collect();
        let hexadecimal = bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        [lines.join(&b"\r\n"[..]), URL_SAFE_NO_PAD.encode(bytes).into_bytes(), hexadecimal.into_bytes()]
    };
    let mut files = Vec::new();
    for (what, bytes) in plain {
        let encoded = encode(&bytes);
        files.push((what.to_owned(), bytes));
        files.extend(encoded.map(|encoded| (format!("{what}, encoded"), encoded)));
    }
    files
}

#[test]
fn public_key_in_any_form_is_no_secret() {
    for (what, bytes) in public_files() {
        for bytes in [bytes.clone(), [&bytes[..], b"\n"].concat(), [&bytes[..], b"\r\n"].concat()] {
            let found = keys::read_secret(&bytes);
            assert!(matches!(found, Err(KeyError::NotSecret(_))), "{what}: {found:?}");
            assert!(Signer::read_secret(&bytes).is_err(), "{what}");
        }
    }
}

/// Signs as an attacker would who knows only the public file: by HMAC, with the file's bytes as the secret.
#[test]
fn jwt_signed_by_hmac_with_a_public_key_file_as_secret_is_refused() {
    let mut refused = 0;
    for (what, bytes) in public_files() {
        let Ok(known) = keys::read(&bytes) else { continue };
        let part = |json: serde_json::Value| URL_SAFE_NO_PAD.encode(json.to_string());
        let message =
            format!("{}.{}", part(json!({ "typ": "JWT", "alg": "HS256" })), part(json!({ "put": "a" })));
        let tag =
            ring::hmac::sign(&ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &bytes), message.as_bytes());
        let forged = token::credential_from_text(&format!("{message}.{}", URL_SAFE_NO_PAD.encode(tag)));
        assert_eq!(token::open(&forged, &known).map(drop), Err(TokenError::Signature), "{what}");
        refused += 1;
    }
    assert_eq!(refused, 3, "the public files that are read as keys");
}

#[test]
fn hmac_secrets_of_32_arbitrary_bytes_are_accepted() {
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (random >> 56) as u8
    };
    for _ in 0..20_000 {
        let secret: Vec<u8> = (0..32).map(|_| next()).collect();
        assert!(keys::read_secret(&secret).is_ok(), "{secret:02x?}");
        let text = STANDARD.encode(&secret);
        assert!(keys::read_secret(text.as_bytes()).is_ok(), "{text}");
    }
    let with_line_end = [SECRET, &b"\n"[..]].concat();
    let signer = Signer::read_secret(&with_line_end).unwrap();
    let claims = jwt::JwtClaims { put: jwt::OneOrMany::One("a".into()), ..jwt::JwtClaims::default() };
    let made = token::credential_from_text(&jwt::make(&claims, &signer).unwrap());
    assert!(token::open(&made, &keys()).is_ok(), "without the line end");
    let short = keys::read_secret(b"short").unwrap_err().to_string();
    assert_eq!(short, "an HMAC secret of 5 bytes is too short: at least 32");
}

#[test]
fn key_description_counts_keys_by_algorithm_and_issuer() {
    let pem = rcgen::KeyPair::generate().unwrap().public_key_pem();
    let public = || keys::read(pem.as_bytes()).unwrap().remove(0);
    let all = [keys().remove(0), public(), public(), public().bound_to("studio-a".into())];
    assert_eq!(keys::describe(&all), "1 HMAC secret, 2 P-256, 1 P-256 of studio-a");
    assert_eq!(keys::describe(&[]), "none");
}
