//! Tokens (JWT and CAT), and the requirements that a relay makes on them.

use std::{
    collections::{HashMap, HashSet},
    time::SystemTime,
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use bytes::Bytes;
use millrace_moq::token::Credential;
use url::form_urlencoded;

use super::{cat, grant::Grant, jwt, keys::AccessKey, refusal::TokenError};

/// Length of the longest token that is accepted, in bytes.
pub const MAX_LEN: usize = 8192;

/// Largest number of tokens that are read from a URL.
const MAX_IN_URL: usize = 2;

/// Token type of a form that both sides have agreed on (registry "MOQT Auth Token Type"). Here it is a JWT.
pub const KIND_AGREED: u64 = 0;
/// Token type of a Common Access Token (CTA-5007).
pub const KIND_CAT: u64 = 1;

/// Requirements that tokens have to meet.
#[derive(Clone, Debug, Default)]
pub struct Requirements {
    /// Keys that tokens' signatures are checked with.
    pub keys: Vec<AccessKey>,
    /// True if the settings name keys, even if none of them could be read.
    pub wants_keys: bool,
    /// Audiences that tokens may be for. If empty, only tokens without an audience are accepted.
    pub audience: Vec<String>,
    /// Issuers whose tokens may be signed by keys that are not restricted to an issuer. If empty, these are all issuers
    /// except those in `bound`.
    pub issuers: Vec<String>,
    /// Issuers whose tokens must be signed by a key that is restricted to them, even if none of these keys could be
    /// read.
    pub bound: HashSet<String>,
    /// IDs of revoked tokens of any issuer.
    pub revoked: HashSet<String>,
    /// IDs of revoked tokens, by their issuer.
    pub revoked_of: HashMap<String, HashSet<String>>,
}

impl Requirements {
    /// Returns the verified content of a token, if the token is valid at `now`.
    ///
    /// # Errors
    /// Fails if the token is not valid.
    pub fn check(&self, credential: &Credential, now: SystemTime) -> Result<Grant, TokenError> {
        let grant = open(credential, &self.keys)?;
        self.check_claims(&grant, now)?;
        Ok(grant)
    }

    /// Checks that a token with these claims is valid at `now`.
    pub(super) fn check_claims(&self, grant: &Grant, now: SystemTime) -> Result<(), TokenError> {
        if grant.expires.is_some_and(|expires| now >= expires) {
            return Err(TokenError::Expired);
        }
        if grant.not_before.is_some_and(|not_before| now < not_before) {
            return Err(TokenError::NotYet);
        }
        if !self.is_from_its_issuer(grant) {
            return Err(TokenError::Issuer);
        }
        if self.is_revoked(grant) {
            return Err(TokenError::Revoked);
        }
        // A token that names audiences is valid only for these (RFC 7519, section 4.1.3).
        if !grant.audience.is_empty() && !grant.audience.iter().any(|one| self.audience.contains(one)) {
            return Err(TokenError::Audience);
        }
        Ok(())
    }

    /// Reports whether one of the keys that verified the token may sign for the issuer that the token names.
    fn is_from_its_issuer(&self, grant: &Grant) -> bool {
        let issuer = grant.issuer.as_ref();
        let unbound = || {
            let is_free = issuer.is_none_or(|issuer| !self.bound.contains(issuer));
            let is_taken = issuer.is_some_and(|issuer| self.issuers.contains(issuer));
            is_free && (self.issuers.is_empty() || is_taken)
        };
        grant.signers.iter().any(|signer| match signer {
            Some(own) => issuer.is_some_and(|issuer| **issuer == **own),
            None => unbound(),
        })
    }

    fn is_revoked(&self, grant: &Grant) -> bool {
        let Some(id) = &grant.id else { return false };
        let of_issuer = grant.issuer.as_ref().and_then(|issuer| self.revoked_of.get(issuer));
        self.revoked.contains(id) || of_issuer.is_some_and(|revoked| revoked.contains(id))
    }

    /// Returns how many IDs are revoked.
    pub fn revoked_count(&self) -> usize {
        self.revoked.len() + self.revoked_of.values().map(HashSet::len).sum::<usize>()
    }
}

/// Checks a token's signature, and reads its claims.
///
/// # Errors
/// Fails if the token is malformed, if no known key has signed it, or if it has claims that cannot be enforced.
pub fn open(credential: &Credential, keys: &[AccessKey]) -> Result<Grant, TokenError> {
    let value = &credential.value;
    if value.len() > MAX_LEN {
        return Err(TokenError::Malformed("it is too long"));
    }
    match credential.kind {
        KIND_CAT => cat::open(value, keys),
        KIND_AGREED => jwt::open(value, keys),
        _ => Err(TokenError::Kind),
    }
}

/// Returns a URL's path, and the tokens in its query (`?jwt=...`, as for moq-relay).
pub fn credentials_from_url(path_and_query: &str) -> (&str, Vec<Credential>) {
    let (path, query) = path_and_query.split_once('?').unwrap_or((path_and_query, ""));
    let pairs = form_urlencoded::parse(query.as_bytes());
    let tokens = pairs.filter(|(name, value)| name == "jwt" && !value.is_empty());
    (path, tokens.take(MAX_IN_URL).map(|(_, value)| credential_from_text(&value)).collect())
}

/// Returns the token in a file's contents: text, or a CAT in COSE.
pub fn credential_from_bytes(bytes: &[u8]) -> Credential {
    match std::str::from_utf8(bytes) {
        Ok(text) => credential_from_text(text),
        Err(_) => Credential { kind: KIND_CAT, value: Bytes::copy_from_slice(bytes) },
    }
}

/// Returns the token in a text from a URL or a file: a JWT, or a CAT in its compact form or in base64url.
pub fn credential_from_text(text: &str) -> Credential {
    let text = text.trim();
    let decoded = URL_SAFE_NO_PAD.decode(text).unwrap_or_default();
    if cat::is_tagged(&decoded) {
        return Credential { kind: KIND_CAT, value: decoded.into() };
    }
    let kind = if cat::is_compact(text.as_bytes()) { KIND_CAT } else { KIND_AGREED };
    Credential { kind, value: Bytes::copy_from_slice(text.as_bytes()) }
}
