//! Tokens of either form, and what they have to be like.

use std::{collections::HashSet, time::SystemTime};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use bytes::Bytes;
use millrace_proto::moq::token::Credential;
use url::form_urlencoded;

use super::{cat, grant::Grant, jwt, keys::Key, refusal::TokenError};

/// The longest token that is looked at, in bytes.
pub const MAX_LEN: usize = 8192;

/// Tokens of a URL that are looked at.
const MAX_IN_URL: usize = 2;

/// Token types (registry "MOQT Auth Token Type").
pub const KIND_AGREED: u64 = 0;
pub const KIND_CAT: u64 = 1;

/// What tokens have to be like.
#[derive(Clone, Debug, Default)]
pub struct Requirements {
    pub keys: Vec<Key>,
    /// Whom tokens may be for; empty: only tokens for nobody in particular are taken.
    pub audience: Vec<String>,
    /// Whom tokens may be from; empty: from whoever has a key.
    pub issuers: Vec<String>,
    /// IDs of tokens that are not good any more.
    pub revoked: HashSet<String>,
}

impl Requirements {
    /// What a token allows, if it is good at `now`.
    ///
    /// # Errors
    /// It is not.
    pub fn check(&self, credential: &Credential, now: SystemTime) -> Result<Grant, TokenError> {
        let grant = open(credential, &self.keys)?;
        self.check_claims(&grant, now)?;
        Ok(grant)
    }

    /// Whether a token that says so is good at `now`.
    pub(super) fn check_claims(&self, grant: &Grant, now: SystemTime) -> Result<(), TokenError> {
        if grant.expires.is_some_and(|expires| now >= expires) {
            return Err(TokenError::Expired);
        }
        if grant.not_before.is_some_and(|not_before| now < not_before) {
            return Err(TokenError::NotYet);
        }
        if grant.id.as_ref().is_some_and(|id| self.revoked.contains(id)) {
            return Err(TokenError::Revoked);
        }
        let from_us = |issuer: &String| self.issuers.contains(issuer);
        if !self.issuers.is_empty() && !grant.issuer.as_ref().is_some_and(from_us) {
            return Err(TokenError::Issuer);
        }
        if !grant.audience.is_empty() && !grant.audience.iter().any(|one| self.audience.contains(one)) {
            return Err(TokenError::Audience);
        }
        Ok(())
    }
}

/// Checks a token's signature, and reads what it says.
///
/// # Errors
/// It is malformed, signed by nobody known, or not to be enforced.
pub fn open(credential: &Credential, keys: &[Key]) -> Result<Grant, TokenError> {
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

/// A URL's path, and the tokens in its query, as moq-relay takes them.
pub fn of_url(path_and_query: &str) -> (&str, Vec<Credential>) {
    let (path, query) = path_and_query.split_once('?').unwrap_or((path_and_query, ""));
    let pairs = form_urlencoded::parse(query.as_bytes());
    let tokens = pairs.filter(|(name, value)| name == "jwt" && !value.is_empty());
    (path, tokens.take(MAX_IN_URL).map(|(_, value)| of_text(&value)).collect())
}

/// A token as it stands in a file: text, or a CAT in COSE.
pub fn of_bytes(bytes: &[u8]) -> Credential {
    match std::str::from_utf8(bytes) {
        Ok(text) => of_text(text),
        Err(_) => Credential { kind: KIND_CAT, value: Bytes::copy_from_slice(bytes) },
    }
}

/// A token as it stands in a URL or a file: a JWT, or a CAT in its compact form or in base64url.
pub fn of_text(text: &str) -> Credential {
    let text = text.trim();
    let decoded = URL_SAFE_NO_PAD.decode(text).unwrap_or_default();
    if cat::is_tagged(&decoded) {
        return Credential { kind: KIND_CAT, value: decoded.into() };
    }
    let kind = if cat::is_compact(text.as_bytes()) { KIND_CAT } else { KIND_AGREED };
    Credential { kind, value: Bytes::copy_from_slice(text.as_bytes()) }
}
