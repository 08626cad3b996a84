//! Tokens of either form, and what they have to be like.

use std::{
    collections::{HashMap, HashSet},
    time::SystemTime,
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use bytes::Bytes;
use millrace_moq::token::Credential;
use url::form_urlencoded;

use super::{cat, grant::Grant, jwt, keys::AccessKey, refusal::TokenError};

/// The longest token that is looked at, in bytes.
pub const MAX_LEN: usize = 8192;

/// Tokens of a URL that are looked at.
const MAX_IN_URL: usize = 2;

/// Token types (registry "MOQT Auth Token Type").
pub const KIND_AGREED: u64 = 0;
/// A Common Access Token (CTA-5007).
pub const KIND_CAT: u64 = 1;

/// Requirements that tokens have to meet.
#[derive(Clone, Debug, Default)]
pub struct Requirements {
    /// Keys that tokens are checked with.
    pub keys: Vec<AccessKey>,
    /// The settings name keys, whether or not one of them could be read.
    pub wants_keys: bool,
    /// Audiences that tokens may be for. If empty, only tokens without an audience are taken.
    pub audience: Vec<String>,
    /// Issuers that keys which are bound to none speak for; empty: any but those of `bound`.
    pub issuers: Vec<String>,
    /// Issuers that only keys bound to them speak for, whether or not one of these could be read.
    pub bound: HashSet<String>,
    /// IDs of tokens that are not good any more, whoever they are from.
    pub revoked: HashSet<String>,
    /// Likewise, of tokens of one issuer.
    pub revoked_of: HashMap<String, HashSet<String>>,
}

impl Requirements {
    /// Returns the grant of a token, if it is good at `now`.
    ///
    /// # Errors
    /// The token is not good.
    pub fn check(&self, credential: &Credential, now: SystemTime) -> Result<Grant, TokenError> {
        let grant = open(credential, &self.keys)?;
        self.check_claims(&grant, now)?;
        Ok(grant)
    }

    /// Checks that a token with these claims is good at `now`.
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
        if !grant.audience.is_empty() && !grant.audience.iter().any(|one| self.audience.contains(one)) {
            return Err(TokenError::Audience);
        }
        Ok(())
    }

    /// Reports whether a key that verifies it speaks for the issuer that it names.
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

/// Checks a token's signature, and reads what it says.
///
/// # Errors
/// It is malformed, signed by nobody known, or not to be enforced.
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

/// Returns a URL's path, and the tokens in its query, as moq-relay takes them.
pub fn credentials_from_url(path_and_query: &str) -> (&str, Vec<Credential>) {
    let (path, query) = path_and_query.split_once('?').unwrap_or((path_and_query, ""));
    let pairs = form_urlencoded::parse(query.as_bytes());
    let tokens = pairs.filter(|(name, value)| name == "jwt" && !value.is_empty());
    (path, tokens.take(MAX_IN_URL).map(|(_, value)| credential_from_text(&value)).collect())
}

/// Returns a token as it stands in a file: text, or a CAT in COSE.
pub fn credential_from_bytes(bytes: &[u8]) -> Credential {
    match std::str::from_utf8(bytes) {
        Ok(text) => credential_from_text(text),
        Err(_) => Credential { kind: KIND_CAT, value: Bytes::copy_from_slice(bytes) },
    }
}

/// Returns a token as it stands in a URL or a file: a JWT, or a CAT in its compact form or in base64url.
pub fn credential_from_text(text: &str) -> Credential {
    let text = text.trim();
    let decoded = URL_SAFE_NO_PAD.decode(text).unwrap_or_default();
    if cat::is_tagged(&decoded) {
        return Credential { kind: KIND_CAT, value: decoded.into() };
    }
    let kind = if cat::is_compact(text.as_bytes()) { KIND_CAT } else { KIND_AGREED };
    Credential { kind, value: Bytes::copy_from_slice(text.as_bytes()) }
}
