//! Keys that tokens are checked and made with. They are in PEM, JWK or JWKS files, or are HMAC secrets in files that a
//! setting names as secrets. A file with an HMAC secret has to be configured as such: if a public key were taken for a
//! secret, everybody who knows it could make tokens.

use std::{collections::BTreeMap, fmt, sync::Arc};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use jsonwebtoken::jwk::{
    AlgorithmParameters, EllipticCurve, Jwk, JwkSet, KeyAlgorithm, KeyOperations, PublicKeyUse,
};
use ring::{hmac, rand::SystemRandom, signature};
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, SubjectPublicKeyInfoDer, pem::PemObject};
use x509_parser::prelude::FromDer;

use super::{
    recognise::{has_pem, recognise, trimmed},
    refusal::TokenError,
};

/// The shortest HMAC secret that is accepted, in bytes (RFC 7518, section 3.2, for the shortest hash).
const MIN_SECRET: usize = 32;
/// Largest number of keys that are read from one file.
const MAX_KEYS: usize = 64;

/// Signature algorithms of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names are those of RFC 7518 and RFC 8037")]
pub enum TokenAlgorithm {
    Hs256,
    Hs384,
    Hs512,
    Es256,
    Es384,
    EdDsa,
    Rs256,
    Rs384,
    Rs512,
    Ps256,
    Ps384,
    Ps512,
}

/// The reason why a file has no usable key.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum KeyError {
    #[error("an HMAC secret of {0} bytes is too short: at least {MIN_SECRET}")]
    Short(usize),
    #[error("not a JWK or a JWK set: {0}")]
    Json(String),
    #[error("no key that tokens can be checked with")]
    None,
    #[error("{0}")]
    Unusable(&'static str),
    #[error("more than {MAX_KEYS} keys")]
    Many,
    #[error(
        "it is {0}: a key is PEM, a JWK or a JWK set (an object with `keys`). What `openssl pkey -pubin -inform DER` or \
         `ssh-keygen -e -m PKCS8` prints is; an HMAC secret as it is belongs where secrets are named: token-secrets, --secret"
    )]
    Format(&'static str),
    #[error(
        "it is {0}, and no secret: others know it, and could make tokens. Name keys in token-keys, as PEM or JWK; \
         `head -c 32 /dev/urandom` makes a secret"
    )]
    NotSecret(&'static str),
}

/// A key that tokens are verified with. It may be a secret, so its `Debug` prints the kind and the ID only.
#[derive(Clone)]
pub struct AccessKey {
    id: Option<String>,
    /// The only algorithm that the key may be used with. `None`: all algorithms of keys of its kind.
    algorithm: Option<TokenAlgorithm>,
    /// The only issuer whose tokens the key verifies. `None`: all issuers that have no key of their own.
    issuer: Option<Arc<str>>,
    material: TokenKeyMaterial,
}

#[derive(Clone)]
enum TokenKeyMaterial {
    Secret(Arc<[u8]>),
    /// A public key of P-256 as an uncompressed point: the byte 4, then both coordinates. `P384` has the same form.
    P256(Arc<[u8]>),
    P384(Arc<[u8]>),
    Ed25519(Arc<[u8]>),
    Rsa {
        n: Arc<[u8]>,
        e: Arc<[u8]>,
    },
}

impl fmt::Debug for AccessKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({}, {:?})", self.kind(), self.id)
    }
}

/// Reads the keys of a file: PEM, a JWK or a JWK set.
///
/// # Errors
/// Fails if the file has another format, has no key, or has a key that cannot be used.
pub fn read(bytes: &[u8]) -> Result<Vec<AccessKey>, KeyError> {
    let text = trimmed(bytes);
    let keys = match text.first() {
        None => return Err(KeyError::None),
        Some(b'{') => read_json(text)?,
        _ if has_pem(text) => read_pem(text)?,
        _ => return Err(KeyError::Format(recognise(bytes).unwrap_or("neither PEM nor JSON"))),
    };
    match keys.len() {
        0 => Err(KeyError::None),
        1..=MAX_KEYS => Ok(keys),
        _ => Err(KeyError::Many),
    }
}

/// Reads an HMAC secret, byte by byte. A line end at its end, as editors add it, is dropped if the rest is long enough.
///
/// # Errors
/// Fails if the secret is too short. Fails as well if the bytes are a key or a certificate in a known format, because
/// it may be public.
pub fn read_secret(bytes: &[u8]) -> Result<AccessKey, KeyError> {
    // Key formats are recognised before a line end is dropped, since the last byte of a key in DER may look like a line
    // end.
    if let Some(what) = recognise(bytes) {
        return Err(KeyError::NotSecret(what));
    }
    let text = bytes.strip_suffix(b"\n").map_or(bytes, |front| front.strip_suffix(b"\r").unwrap_or(front));
    secret(if text.len() < MIN_SECRET { bytes } else { text }, None, None)
}

/// Returns the number of keys by kind and issuer, for logs.
pub fn describe(keys: &[AccessKey]) -> String {
    let mut counts = BTreeMap::<_, u64>::new();
    for key in keys {
        *counts.entry((key.issuer.as_deref(), key.kind())).or_default() += 1;
    }
    let one = |((issuer, kind), count): (&(Option<&str>, &str), &u64)| match issuer {
        Some(issuer) => format!("{count} {kind} of {issuer}"),
        None => format!("{count} {kind}"),
    };
    match counts.is_empty() {
        true => "none".to_owned(),
        false => counts.iter().map(one).collect::<Vec<_>>().join(", "),
    }
}

fn secret(
    bytes: &[u8],
    id: Option<String>,
    algorithm: Option<TokenAlgorithm>,
) -> Result<AccessKey, KeyError> {
    if let Some(what) = recognise(bytes) {
        return Err(KeyError::NotSecret(what));
    }
    if bytes.len() < MIN_SECRET {
        return Err(KeyError::Short(bytes.len()));
    }
    Ok(AccessKey { id, algorithm, issuer: None, material: TokenKeyMaterial::Secret(bytes.into()) })
}

fn read_json(text: &[u8]) -> Result<Vec<AccessKey>, KeyError> {
    let json = |error: serde_json::Error| KeyError::Json(error.to_string());
    let value: serde_json::Value = serde_json::from_slice(text).map_err(json)?;
    let keys = if value.get("keys").is_some() {
        serde_json::from_value::<JwkSet>(value).map_err(json)?.keys
    } else {
        vec![serde_json::from_value::<Jwk>(value).map_err(json)?]
    };
    // A JWK set may also have keys for other purposes, such as encryption.
    keys.iter().filter(|key| is_for_signatures(key)).map(from_jwk).collect()
}

fn is_for_signatures(key: &Jwk) -> bool {
    let for_signatures =
        !matches!(&key.common.public_key_use, Some(other) if *other != PublicKeyUse::Signature);
    let operations = key.common.key_operations.as_ref();
    for_signatures
        && operations
            .is_none_or(|list| list.contains(&KeyOperations::Verify) || list.contains(&KeyOperations::Sign))
}

fn from_jwk(jwk: &Jwk) -> Result<AccessKey, KeyError> {
    let decode = |text: &str| {
        URL_SAFE_NO_PAD
            .decode(text.trim_end_matches('='))
            .map_err(|_| KeyError::Unusable("a number of a JWK is not base64url"))
    };
    let id = jwk.common.key_id.clone();
    let algorithm = jwk.common.key_algorithm.map(from_key_algorithm).transpose()?;
    let material = match &jwk.algorithm {
        AlgorithmParameters::OctetKey(key) => return secret(&decode(&key.value)?, id, algorithm),
        AlgorithmParameters::EllipticCurve(key) => {
            let x = decode(&key.x)?;
            let y = decode(&key.y)?;
            // The byte 4 begins an uncompressed point of a curve (SEC 1, section 2.3.3).
            let point: Arc<[u8]> = [&[4][..], &x, &y].concat().into();
            match (&key.curve, x.len(), y.len()) {
                (EllipticCurve::P256, 32, 32) => TokenKeyMaterial::P256(point),
                (EllipticCurve::P384, 48, 48) => TokenKeyMaterial::P384(point),
                _ => return Err(KeyError::Unusable("a curve other than P-256 and P-384, or a wrong point")),
            }
        }
        AlgorithmParameters::OctetKeyPair(key) => match (&key.curve, decode(&key.x)?) {
            (EllipticCurve::Ed25519, x) if x.len() == 32 => TokenKeyMaterial::Ed25519(x.into()),
            _ => return Err(KeyError::Unusable("a curve other than Ed25519, or a wrong point")),
        },
        AlgorithmParameters::RSA(key) => {
            TokenKeyMaterial::Rsa { n: decode(&key.n)?.into(), e: decode(&key.e)?.into() }
        }
        _ => return Err(KeyError::Unusable("an unknown kind of JWK")),
    };
    Ok(AccessKey { id, algorithm, issuer: None, material })
}

fn from_key_algorithm(algorithm: KeyAlgorithm) -> Result<TokenAlgorithm, KeyError> {
    TokenAlgorithm::from_name(&algorithm.to_string())
        .ok_or(KeyError::Unusable("a JWK for an algorithm that tokens are not checked with"))
}

fn read_pem(bytes: &[u8]) -> Result<Vec<AccessKey>, KeyError> {
    let bad = |_| KeyError::Unusable("not readable as PEM");
    let mut keys = Vec::new();
    for der in SubjectPublicKeyInfoDer::pem_slice_iter(bytes) {
        keys.push(from_public_key(der.map_err(bad)?.as_ref())?);
    }
    for der in CertificateDer::pem_slice_iter(bytes) {
        let der = der.map_err(bad)?;
        let (_, certificate) = x509_parser::certificate::X509Certificate::from_der(&der)
            .map_err(|_| KeyError::Unusable("a certificate that cannot be parsed"))?;
        keys.push(from_public_key(certificate.public_key().raw)?);
    }
    if keys.is_empty() && PrivatePkcs8KeyDer::from_pem_slice(bytes).is_ok() {
        return Err(KeyError::Unusable("a private key: tokens are checked with the public one"));
    }
    Ok(keys)
}

fn from_public_key(der: &[u8]) -> Result<AccessKey, KeyError> {
    use x509_parser::{public_key::PublicKey, x509::SubjectPublicKeyInfo};
    let unusable = KeyError::Unusable("a public key other than P-256, P-384, Ed25519 and RSA");
    let Ok((_, info)) = SubjectPublicKeyInfo::from_der(der) else { return Err(unusable) };
    let point = &info.subject_public_key.data;
    let material = match info.parsed() {
        Ok(PublicKey::RSA(key)) => TokenKeyMaterial::Rsa {
            n: without_sign(key.modulus).into(),
            e: without_sign(key.exponent).into(),
        },
        Ok(PublicKey::EC(_)) if point.len() == 65 => TokenKeyMaterial::P256(point.to_vec().into()),
        Ok(PublicKey::EC(_)) if point.len() == 97 => TokenKeyMaterial::P384(point.to_vec().into()),
        // This is the object identifier of Ed25519 (RFC 8410, section 3).
        _ if info.algorithm.algorithm.to_id_string() == "1.3.101.112" && point.len() == 32 => {
            TokenKeyMaterial::Ed25519(point.to_vec().into())
        }
        _ => return Err(unusable),
    };
    Ok(AccessKey { id: None, algorithm: None, issuer: None, material })
}

/// Strips the zero that DER puts before a number whose highest bit is set.
fn without_sign(number: &[u8]) -> &[u8] {
    number.strip_prefix(&[0]).unwrap_or(number)
}

impl TokenAlgorithm {
    const NAMES: [(Self, &'static str); 12] = [
        (Self::Hs256, "HS256"),
        (Self::Hs384, "HS384"),
        (Self::Hs512, "HS512"),
        (Self::Es256, "ES256"),
        (Self::Es384, "ES384"),
        (Self::EdDsa, "EdDSA"),
        (Self::Rs256, "RS256"),
        (Self::Rs384, "RS384"),
        (Self::Rs512, "RS512"),
        (Self::Ps256, "PS256"),
        (Self::Ps384, "PS384"),
        (Self::Ps512, "PS512"),
    ];

    /// Returns the algorithm with this name among the JSON Web Algorithms.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(_, known)| *known == name).map(|(algorithm, _)| *algorithm)
    }

    /// Returns the name of the algorithm in a token's header (`alg`).
    pub fn name(self) -> &'static str {
        Self::NAMES.iter().find(|(known, _)| *known == self).map_or("", |(_, name)| name)
    }

    /// Returns the algorithm with this number among the COSE algorithms (RFC 9053).
    pub fn from_cose(number: i64) -> Option<Self> {
        Some(match number {
            5 => Self::Hs256,
            6 => Self::Hs384,
            7 => Self::Hs512,
            -7 => Self::Es256,
            -35 => Self::Es384,
            -8 => Self::EdDsa,
            -257 => Self::Rs256,
            -258 => Self::Rs384,
            -259 => Self::Rs512,
            -37 => Self::Ps256,
            -38 => Self::Ps384,
            -39 => Self::Ps512,
            _ => return None,
        })
    }

    /// Reports whether the algorithm is an HMAC. A party that can verify an HMAC can also make one.
    pub fn is_mac(self) -> bool {
        matches!(self, Self::Hs256 | Self::Hs384 | Self::Hs512)
    }
}

impl AccessKey {
    /// Restricts the key to an issuer, so that it verifies tokens of this issuer only.
    pub fn bound_to(self, issuer: Arc<str>) -> Self {
        Self { issuer: Some(issuer), ..self }
    }

    /// Returns the only issuer whose tokens the key verifies, if it is restricted to one.
    pub fn issuer(&self) -> Option<&Arc<str>> {
        self.issuer.as_ref()
    }

    /// Returns the kind of the key, for logs.
    fn kind(&self) -> &'static str {
        match self.material {
            TokenKeyMaterial::Secret(_) => "HMAC secret",
            TokenKeyMaterial::P256(_) => "P-256",
            TokenKeyMaterial::P384(_) => "P-384",
            TokenKeyMaterial::Ed25519(_) => "Ed25519",
            TokenKeyMaterial::Rsa { .. } => "RSA",
        }
    }

    /// Reports whether the key may be used for a token of this algorithm and key ID.
    fn is_for(&self, algorithm: TokenAlgorithm, id: Option<&str>) -> bool {
        let same = |wanted: &String| id.is_none_or(|id| id == wanted);
        self.algorithm.is_none_or(|only| only == algorithm) && self.id.as_ref().is_none_or(same)
    }

    fn verifies(&self, algorithm: TokenAlgorithm, message: &[u8], tag: &[u8]) -> bool {
        use TokenAlgorithm as A;
        let public = |with: &'static dyn signature::VerificationAlgorithm, key: &[u8]| {
            signature::UnparsedPublicKey::new(with, key).verify(message, tag).is_ok()
        };
        match &self.material {
            TokenKeyMaterial::Secret(secret) => hmac_of(algorithm)
                .is_some_and(|with| hmac::verify(&hmac::Key::new(with, secret), message, tag).is_ok()),
            TokenKeyMaterial::P256(key) => {
                algorithm == A::Es256 && public(&signature::ECDSA_P256_SHA256_FIXED, key)
            }
            TokenKeyMaterial::P384(key) => {
                algorithm == A::Es384 && public(&signature::ECDSA_P384_SHA384_FIXED, key)
            }
            TokenKeyMaterial::Ed25519(key) => algorithm == A::EdDsa && public(&signature::ED25519, key),
            TokenKeyMaterial::Rsa { n, e } => rsa_of(algorithm).is_some_and(|with| {
                signature::RsaPublicKeyComponents { n: &**n, e: &**e }.verify(with, message, tag).is_ok()
            }),
        }
    }
}

fn hmac_of(algorithm: TokenAlgorithm) -> Option<hmac::Algorithm> {
    match algorithm {
        TokenAlgorithm::Hs256 => Some(hmac::HMAC_SHA256),
        TokenAlgorithm::Hs384 => Some(hmac::HMAC_SHA384),
        TokenAlgorithm::Hs512 => Some(hmac::HMAC_SHA512),
        _ => None,
    }
}

fn rsa_of(algorithm: TokenAlgorithm) -> Option<&'static signature::RsaParameters> {
    Some(match algorithm {
        TokenAlgorithm::Rs256 => &signature::RSA_PKCS1_2048_8192_SHA256,
        TokenAlgorithm::Rs384 => &signature::RSA_PKCS1_2048_8192_SHA384,
        TokenAlgorithm::Rs512 => &signature::RSA_PKCS1_2048_8192_SHA512,
        TokenAlgorithm::Ps256 => &signature::RSA_PSS_2048_8192_SHA256,
        TokenAlgorithm::Ps384 => &signature::RSA_PSS_2048_8192_SHA384,
        TokenAlgorithm::Ps512 => &signature::RSA_PSS_2048_8192_SHA512,
        _ => return None,
    })
}

/// Returns the keys that may be used for the algorithm and key ID, and verify `tag` over `message`. There may be
/// several, since issuers may share a key.
///
/// # Errors
/// Fails if no key verifies the tag.
pub fn signers<'a>(
    keys: &'a [AccessKey],
    algorithm: TokenAlgorithm,
    id: Option<&str>,
    message: &[u8],
    tag: &[u8],
) -> Result<Vec<&'a AccessKey>, TokenError> {
    let fit = keys.iter().filter(|key| key.is_for(algorithm, id) && key.verifies(algorithm, message, tag));
    let signers: Vec<_> = fit.collect();
    if signers.is_empty() { Err(TokenError::Signature) } else { Ok(signers) }
}

/// A key that tokens are signed with.
pub struct Signer {
    /// The key's ID (`kid`), which goes into the header of tokens.
    pub id: Option<String>,
    /// The signature algorithm of the key.
    pub algorithm: TokenAlgorithm,
    key: Private,
}

enum Private {
    Secret(AccessKey),
    Ecdsa(signature::EcdsaKeyPair),
    Ed25519(signature::Ed25519KeyPair),
}

impl Signer {
    /// Reads a private key in PEM (PKCS #8), or an HMAC secret as a JWK (`kty` is `oct`).
    ///
    /// # Errors
    /// Fails if the file has neither, or has a key that cannot be used.
    pub fn read(bytes: &[u8]) -> Result<Self, KeyError> {
        if let Ok(der) = PrivatePkcs8KeyDer::from_pem_slice(bytes) {
            return Self::from_private_key(der.secret_pkcs8_der());
        }
        let key = read(bytes)?.into_iter().next().ok_or(KeyError::None)?;
        if !matches!(key.material, TokenKeyMaterial::Secret(_)) {
            return Err(KeyError::Unusable("a public key: tokens are made with the private one"));
        }
        Ok(Self::from_key(key))
    }

    /// Reads an HMAC secret, as [`read_secret`] does.
    ///
    /// # Errors
    /// Fails if the file has no secret that [`read_secret`] accepts.
    pub fn read_secret(bytes: &[u8]) -> Result<Self, KeyError> {
        read_secret(bytes).map(Self::from_key)
    }

    fn from_key(key: AccessKey) -> Self {
        let algorithm = key.algorithm.unwrap_or(TokenAlgorithm::Hs256);
        Self { id: key.id.clone(), algorithm, key: Private::Secret(key) }
    }

    fn from_private_key(der: &[u8]) -> Result<Self, KeyError> {
        let curves = [
            (TokenAlgorithm::Es256, &signature::ECDSA_P256_SHA256_FIXED_SIGNING),
            (TokenAlgorithm::Es384, &signature::ECDSA_P384_SHA384_FIXED_SIGNING),
        ];
        for (algorithm, curve) in curves {
            if let Ok(pair) = signature::EcdsaKeyPair::from_pkcs8(curve, der, &SystemRandom::new()) {
                return Ok(Self { id: None, algorithm, key: Private::Ecdsa(pair) });
            }
        }
        signature::Ed25519KeyPair::from_pkcs8_maybe_unchecked(der)
            .map(|pair| Self { id: None, algorithm: TokenAlgorithm::EdDsa, key: Private::Ed25519(pair) })
            .map_err(|_| KeyError::Unusable("a private key other than P-256, P-384 and Ed25519"))
    }

    /// Signs a message.
    ///
    /// # Errors
    /// Fails if the system has no random numbers, or if the key is an HMAC secret and the algorithm is no HMAC.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>, KeyError> {
        match &self.key {
            Private::Secret(key) => {
                let (TokenKeyMaterial::Secret(secret), Some(with)) = (&key.material, hmac_of(self.algorithm))
                else {
                    return Err(KeyError::Unusable("a secret for an algorithm without one"));
                };
                Ok(hmac::sign(&hmac::Key::new(with, secret), message).as_ref().to_vec())
            }
            Private::Ecdsa(pair) => pair
                .sign(&SystemRandom::new(), message)
                .map(|made| made.as_ref().to_vec())
                .map_err(|_| KeyError::Unusable("the system has no random numbers")),
            Private::Ed25519(pair) => Ok(pair.sign(message).as_ref().to_vec()),
        }
    }
}
