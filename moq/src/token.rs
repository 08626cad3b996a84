//! Authorization tokens as they are sent (draft-18, "AUTHORIZATION TOKEN Parameter"), and the registered tokens of a
//! session.

use std::{collections::HashMap, fmt};

use bytes::Bytes;

use super::{DecodeError, code, param::AuthToken, vi64};

const DELETE: u64 = 0x0;
const REGISTER: u64 = 0x1;
const USE_ALIAS: u64 = 0x2;
const USE_VALUE: u64 = 0x3;

/// Number of bytes that a registered token takes of MAX_AUTH_TOKEN_CACHE_SIZE in addition to its value's length.
const ENTRY_COST: u64 = 16;

/// A token's type and payload. It is secret, so the payload is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// The type in the registry "MOQT Auth Token Type". 0 means that both sides agreed on the token's format by other
    /// means, and 1 means a Common Access Token.
    pub kind: u64,
    /// The payload.
    pub value: Bytes,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({}, {} bytes)", self.kind, self.value.len())
    }
}

/// The Token structure: a credential, or a reference to a registered credential.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    /// Deletes a registered token.
    Delete {
        /// The token's alias.
        alias: u64,
    },
    /// Registers a token, and uses it.
    Register {
        /// The token's alias.
        alias: u64,
        /// The token itself: the bytes that prove the client's rights.
        credential: Credential,
    },
    /// Uses a token that was registered before.
    UseAlias {
        /// The token's alias.
        alias: u64,
    },
    /// A credential that is used once and not registered.
    UseValue(Credential),
}

impl Form {
    /// Reads the Token structure from a parameter's value.
    ///
    /// # Errors
    /// Fails with KEY_VALUE_FORMATTING_ERROR if the bytes are not a token.
    pub fn decode(token: &AuthToken) -> Result<Self, DecodeError> {
        let mut input = &token.0[..];
        let mut number = || vi64::decode(&mut input).ok_or(TRUNCATED);
        let kind = number()?;
        let first = number()?;
        match kind {
            DELETE | USE_ALIAS if !input.is_empty() => {
                Err(DecodeError::key_value("bytes after the alias of a token"))
            }
            DELETE => Ok(Self::Delete { alias: first }),
            USE_ALIAS => Ok(Self::UseAlias { alias: first }),
            REGISTER => {
                let kind = vi64::decode(&mut input).ok_or(TRUNCATED)?;
                Ok(Self::Register { alias: first, credential: credential(kind, input) })
            }
            USE_VALUE => Ok(Self::UseValue(credential(first, input))),
            _ => Err(DecodeError::key_value("an unknown alias type of a token")),
        }
    }

    /// Encodes the Token structure as a parameter's value.
    pub fn encode(&self) -> AuthToken {
        let mut out = Vec::new();
        let mut put = |numbers: &[u64], value: &[u8]| {
            numbers.iter().for_each(|number| vi64::encode(*number, &mut out));
            out.extend_from_slice(value);
        };
        match self {
            Self::Delete { alias } => put(&[DELETE, *alias], &[]),
            Self::UseAlias { alias } => put(&[USE_ALIAS, *alias], &[]),
            Self::Register { alias, credential } => {
                put(&[REGISTER, *alias, credential.kind], &credential.value);
            }
            Self::UseValue(credential) => put(&[USE_VALUE, credential.kind], &credential.value),
        }
        AuthToken(out.into())
    }
}

const TRUNCATED: DecodeError = DecodeError::key_value("a token ends inside its numbers");

fn credential(kind: u64, value: &[u8]) -> Credential {
    Credential { kind, value: Bytes::copy_from_slice(value) }
}

/// The tokens that a peer has registered. Their total size is limited (MAX_AUTH_TOKEN_CACHE_SIZE).
#[derive(Debug)]
pub struct RegisteredTokens {
    limit: u64,
    size: u64,
    by_alias: HashMap<u64, Credential>,
}

impl RegisteredTokens {
    /// Makes an empty set whose tokens may have up to `limit` bytes in total.
    pub fn new(limit: u64) -> Self {
        Self { limit, size: 0, by_alias: HashMap::new() }
    }

    /// Returns the credentials in a SETUP, and registers the tokens that the SETUP asks to register. A token that
    /// exceeds the size limit of the set is used once and not registered.
    ///
    /// # Errors
    /// Fails with the code to close the session with.
    pub fn resolve_setup_tokens(&mut self, tokens: &[AuthToken]) -> Result<Vec<Credential>, DecodeError> {
        let mut found = Vec::new();
        for token in tokens {
            match Form::decode(token)? {
                Form::Delete { .. } | Form::UseAlias { .. } => {
                    return Err(DecodeError::violation("a SETUP refers to a token by its alias"));
                }
                Form::Register { alias, credential } => {
                    if self.fits(&credential) {
                        self.register(alias, credential.clone())?;
                    }
                    found.push(credential);
                }
                Form::UseValue(credential) => found.push(credential),
            }
        }
        Ok(found)
    }

    /// Returns the credentials in a request. It also registers and deletes tokens as the request asks.
    ///
    /// # Errors
    /// Fails with the code to close the session with.
    pub fn resolve_request_tokens(&mut self, tokens: &[AuthToken]) -> Result<Vec<Credential>, DecodeError> {
        let mut found = Vec::new();
        for token in tokens {
            match Form::decode(token)? {
                Form::Delete { alias } => {
                    let deleted = self.by_alias.remove(&alias).ok_or(UNKNOWN)?;
                    self.size -= cost(&deleted);
                }
                Form::Register { alias, credential } => {
                    self.register(alias, credential.clone())?;
                    found.push(credential);
                }
                Form::UseAlias { alias } => found.push(self.by_alias.get(&alias).ok_or(UNKNOWN)?.clone()),
                Form::UseValue(credential) => found.push(credential),
            }
        }
        Ok(found)
    }

    /// Returns the total size of the registered tokens in bytes, computed as MAX_AUTH_TOKEN_CACHE_SIZE counts it.
    pub fn size(&self) -> u64 {
        self.size
    }

    fn fits(&self, credential: &Credential) -> bool {
        self.size + cost(credential) <= self.limit
    }

    fn register(&mut self, alias: u64, credential: Credential) -> Result<(), DecodeError> {
        if self.by_alias.contains_key(&alias) {
            return Err(DecodeError {
                code: code::Session::DUPLICATE_AUTH_TOKEN_ALIAS,
                reason: "a token alias is registered twice",
            });
        }
        if !self.fits(&credential) {
            return Err(DecodeError {
                code: code::Session::AUTH_TOKEN_CACHE_OVERFLOW,
                reason: "more tokens are registered than the cache has room for",
            });
        }
        self.size += cost(&credential);
        self.by_alias.insert(alias, credential);
        Ok(())
    }
}

const UNKNOWN: DecodeError = DecodeError {
    code: code::Session::UNKNOWN_AUTH_TOKEN_ALIAS,
    reason: "a token alias that is not registered",
};

fn cost(credential: &Credential) -> u64 {
    ENTRY_COST + credential.value.len() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn from_value(value: &str) -> Credential {
        Credential { kind: 1, value: Bytes::copy_from_slice(value.as_bytes()) }
    }

    fn register(alias: u64, value: &str) -> AuthToken {
        Form::Register { alias, credential: from_value(value) }.encode()
    }

    #[test]
    fn token_forms_encode_and_decode() {
        let table: [(Form, &[u8]); 4] = [
            (Form::Delete { alias: 5 }, &[0, 5]),
            (Form::Register { alias: 5, credential: from_value("ab") }, &[1, 5, 1, b'a', b'b']),
            (Form::UseAlias { alias: 5 }, &[2, 5]),
            (Form::UseValue(from_value("ab")), &[3, 1, b'a', b'b']),
        ];
        for (form, bytes) in table {
            assert_eq!(form.encode().0, bytes, "{form:?}");
            assert_eq!(Form::decode(&AuthToken(Bytes::copy_from_slice(bytes))), Ok(form));
        }
    }

    #[test]
    fn malformed_token_closes_the_session() {
        let table: [&[u8]; 8] = [&[], &[0], &[2], &[1, 5], &[3], &[4, 1], &[0, 5, 0], &[2, 5, 0]];
        for bytes in table {
            let error = Form::decode(&AuthToken(Bytes::copy_from_slice(bytes))).unwrap_err();
            assert_eq!(error.code, code::Session::KEY_VALUE_FORMATTING_ERROR, "{bytes:x?}");
        }
    }

    #[test]
    fn registered_tokens_are_used_until_they_are_deleted() {
        let mut registered = RegisteredTokens::new(100);
        assert_eq!(registered.resolve_request_tokens(&[register(7, "abcd")]), Ok(vec![from_value("abcd")]));
        assert_eq!(registered.size(), 20);
        let used = registered.resolve_request_tokens(&[Form::UseAlias { alias: 7 }.encode()]);
        assert_eq!(used, Ok(vec![from_value("abcd")]));
        assert_eq!(registered.resolve_request_tokens(&[Form::Delete { alias: 7 }.encode()]), Ok(vec![]));
        assert_eq!(registered.size(), 0);
        for form in [Form::UseAlias { alias: 7 }, Form::Delete { alias: 7 }] {
            let error = registered.resolve_request_tokens(&[form.encode()]).unwrap_err();
            assert_eq!(error.code, code::Session::UNKNOWN_AUTH_TOKEN_ALIAS);
        }
    }

    #[test]
    fn repeated_alias_and_full_token_cache_are_refused() {
        let mut registered = RegisteredTokens::new(40);
        registered.resolve_request_tokens(&[register(1, "abcd")]).unwrap();
        let twice = registered.resolve_request_tokens(&[register(1, "x")]).unwrap_err();
        assert_eq!(twice.code, code::Session::DUPLICATE_AUTH_TOKEN_ALIAS);
        let much = registered.resolve_request_tokens(&[register(2, "abcde")]).unwrap_err();
        assert_eq!(much.code, code::Session::AUTH_TOKEN_CACHE_OVERFLOW);
        registered.resolve_request_tokens(&[register(2, "abcd")]).unwrap();
        assert_eq!(registered.size(), 40);
    }

    #[test]
    fn setup_token_over_the_cache_size_is_used_and_a_setup_alias_is_refused() {
        let mut registered = RegisteredTokens::new(0);
        assert_eq!(registered.resolve_setup_tokens(&[register(1, "abcd")]), Ok(vec![from_value("abcd")]));
        let unknown = registered.resolve_request_tokens(&[Form::UseAlias { alias: 1 }.encode()]).unwrap_err();
        assert_eq!(unknown.code, code::Session::UNKNOWN_AUTH_TOKEN_ALIAS);
        for form in [Form::Delete { alias: 1 }, Form::UseAlias { alias: 1 }] {
            let error = registered.resolve_setup_tokens(&[form.encode()]).unwrap_err();
            assert_eq!(error.code, code::Session::PROTOCOL_VIOLATION);
        }
    }

    #[test]
    fn debug_output_of_a_token_hides_its_credential() {
        assert_eq!(format!("{:?}", Form::UseValue(from_value("secret"))), "UseValue(Credential(1, 6 bytes))");
    }

    proptest! {
        #[test]
        fn auth_token_of_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let token = AuthToken(bytes.into());
            if let Ok(form) = Form::decode(&token) {
                prop_assert_eq!(Form::decode(&form.encode()), Ok(form));
            }
        }
    }
}
