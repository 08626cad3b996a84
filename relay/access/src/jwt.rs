//! JSON Web Tokens with the claims of moq-relay: `root`, `put` and `get`.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use bytes::Bytes;
use millrace_moq::{Namespace, name::MAX_FIELDS};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{
    grant::{Action, Actions, Grant, GrantMatch, GrantScope, list_issuers},
    keys::{self, AccessKey, KeyError, Signer, TokenAlgorithm},
    parts::{parts, time},
    pattern::path,
    refusal::TokenError,
};

/// Largest number of namespace paths that a token may name, in the claims `put` and `get` together.
const MAX_PATHS: usize = 256;

/// A JWT's claims.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct JwtClaims {
    /// The path that `put` and `get` are relative to.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub root: String,
    /// Paths below `root` that may be published.
    #[serde(skip_serializing_if = "OneOrMany::is_empty")]
    pub put: OneOrMany,
    /// Paths below `root` that may be subscribed to.
    #[serde(skip_serializing_if = "OneOrMany::is_empty")]
    pub get: OneOrMany,
    /// The time at which the token expires, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exp: Option<f64>,
    /// The time from which on the token is valid, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nbf: Option<f64>,
    /// The time at which the token was made, in seconds since 1970.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iat: Option<f64>,
    /// The issuer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iss: Option<String>,
    /// The subject.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sub: Option<String>,
    /// The audiences.
    #[serde(skip_serializing_if = "OneOrMany::is_empty")]
    pub aud: OneOrMany,
    /// The token's ID.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jti: Option<String>,
    /// The key that the token's holder has to prove possession of (RFC 7800). Tokens with this claim are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cnf: Option<Value>,
}

/// A string or a list of strings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum OneOrMany {
    /// The claim is one string.
    One(String),
    /// The claim is a list of strings.
    Many(Vec<String>),
}

impl Default for OneOrMany {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl OneOrMany {
    fn as_slice(&self) -> &[String] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }

    fn is_empty(&self) -> bool {
        self.as_slice().is_empty()
    }
}

/// Checks the signature of a token, and reads its claims.
pub fn open(token: &[u8], keys: &[AccessKey]) -> Result<Grant, TokenError> {
    let [header, payload, tag] = parts(token).ok_or(TokenError::Malformed("it has not three parts"))?;
    let head = jsonwebtoken::decode_header(token).map_err(|error| match error.kind() {
        jsonwebtoken::errors::ErrorKind::InvalidAlgorithmName => TokenError::Algorithm,
        _ => TokenError::Malformed("its header"),
    })?;
    // A token with a critical header parameter that is not known must be refused (RFC 7515, section 4.1.11).
    if head.crit.is_some_and(|critical| !critical.is_empty()) {
        return Err(TokenError::Unsupported("critical header parameters"));
    }
    let algorithm = TokenAlgorithm::from_name(&format!("{:?}", head.alg)).ok_or(TokenError::Algorithm)?;
    let tag = URL_SAFE_NO_PAD.decode(tag).map_err(|_| TokenError::Malformed("its signature"))?;
    // The signature covers the encoded header and payload with the dot between them (RFC 7515, section 5.2).
    let message = &token[..header.len() + 1 + payload.len()];
    let signers = keys::signers(keys, algorithm, head.kid.as_deref(), message, &tag)?;
    // Claims are parsed only after the signature was verified, so only the owner of a key can reach this parser.
    let payload = URL_SAFE_NO_PAD.decode(payload).map_err(|_| TokenError::Malformed("its payload"))?;
    let claims: JwtClaims =
        serde_json::from_slice(&payload).map_err(|_| TokenError::Malformed("its claims"))?;
    Ok(Grant { signers: list_issuers(&signers), ..grant(claims)? })
}

fn grant(claims: JwtClaims) -> Result<Grant, TokenError> {
    // Without the proof of possession that RFC 7800 asks for, a stolen token could be used by anyone.
    if claims.cnf.is_some() {
        return Err(TokenError::Unsupported("proof of possession"));
    }
    let put = claims.put.as_slice();
    let get = claims.get.as_slice();
    if put.is_empty() && get.is_empty() {
        return Err(TokenError::Malformed("it grants nothing"));
    }
    if put.len() + get.len() > MAX_PATHS {
        return Err(TokenError::Malformed("it has too many paths"));
    }
    let setup = [Action::ClientSetup, Action::RequestUpdate];
    let publish = Actions::from_actions(&[&setup[..], &[Action::Publish, Action::PublishNamespace]].concat());
    let watch = [Action::Subscribe, Action::Fetch, Action::TrackStatus, Action::SubscribeNamespace];
    let subscribe = Actions::from_actions(&[&setup[..], &watch].concat());
    let root = path(&claims.root);
    let of = |paths: &[String], actions| -> Result<Vec<GrantScope>, TokenError> {
        paths.iter().map(|below| scope(&root, below, actions)).collect()
    };
    let scopes = [of(put, publish)?, of(get, subscribe)?].concat();
    Ok(Grant {
        id: claims.jti,
        subject: claims.sub,
        issuer: claims.iss,
        audience: claims.aud.as_slice().to_vec(),
        expires: claims.exp.map(time).transpose()?,
        not_before: claims.nbf.map(time).transpose()?,
        scopes,
        root: Some(root),
        signers: Vec::new(),
    })
}

fn scope(root: &[String], below: &str, actions: Actions) -> Result<GrantScope, TokenError> {
    let fields: Vec<_> = root.iter().cloned().chain(path(below)).collect();
    if fields.len() > MAX_FIELDS || Namespace::new(fields.clone()).is_err() {
        return Err(TokenError::Malformed("a path that is no namespace"));
    }
    let namespace = fields.into_iter().map(|field| GrantMatch::Exact(Bytes::from(field))).collect();
    Ok(GrantScope { actions, namespace, closed: false, track: None })
}

/// Makes a signed token.
///
/// # Errors
/// Fails if the claims cannot be written as JSON, or if signing fails.
pub fn make(claims: &JwtClaims, signer: &Signer) -> Result<String, KeyError> {
    let mut header = serde_json::json!({ "typ": "JWT", "alg": signer.algorithm.name() });
    if let Some(id) = &signer.id {
        header["kid"] = id.as_str().into();
    }
    let encode = |bytes: &[u8]| URL_SAFE_NO_PAD.encode(bytes);
    let claims = serde_json::to_vec(claims).map_err(|error| KeyError::Json(error.to_string()))?;
    let message = format!("{}.{}", encode(header.to_string().as_bytes()), encode(&claims));
    let tag = signer.sign(message.as_bytes())?;
    Ok(format!("{message}.{}", encode(&tag)))
}
