//! Authorization tokens as they are sent (draft-18, "AUTHORIZATION TOKEN Parameter"), and those a session has registered.

use std::{collections::HashMap, fmt};

use bytes::Bytes;

use super::{DecodeError, code, param::Token, vi64};

const DELETE: u64 = 0x0;
const REGISTER: u64 = 0x1;
const USE_ALIAS: u64 = 0x2;
const USE_VALUE: u64 = 0x3;

/// What a registered token takes of the limit besides its value, in bytes.
const ENTRY_COST: u64 = 16;

/// A token's type and payload. It is a credential, so the payload is never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Credential {
    /// Of the registry "MOQT Auth Token Type": 0 is by agreement, 1 is a Common Access Token.
    pub kind: u64,
    pub value: Bytes,
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Credential({}, {} bytes)", self.kind, self.value.len())
    }
}

/// The Token structure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Form {
    Delete { alias: u64 },
    Register { alias: u64, credential: Credential },
    UseAlias { alias: u64 },
    UseValue(Credential),
}

impl Form {
    /// # Errors
    /// It is none: KEY_VALUE_FORMATTING_ERROR.
    pub fn decode(token: &Token) -> Result<Self, DecodeError> {
        let mut input = &token.0[..];
        let mut number = || vi64::decode(&mut input).ok_or(TRUNCATED);
        let (kind, first) = (number()?, number()?);
        match kind {
            DELETE | USE_ALIAS if !input.is_empty() => {
                Err(DecodeError::key_value("bytes behind the alias of a token"))
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

    pub fn encode(&self) -> Token {
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
        Token(out.into())
    }
}

const TRUNCATED: DecodeError = DecodeError::key_value("a token ends inside its numbers");

fn credential(kind: u64, value: &[u8]) -> Credential {
    Credential { kind, value: Bytes::copy_from_slice(value) }
}

/// The tokens that a peer has registered, within a limit of bytes (MAX_AUTH_TOKEN_CACHE_SIZE).
#[derive(Debug)]
pub struct Registered {
    limit: u64,
    size: u64,
    by_alias: HashMap<u64, Credential>,
}

impl Registered {
    pub fn new(limit: u64) -> Self {
        Self { limit, size: 0, by_alias: HashMap::new() }
    }

    /// The tokens of a SETUP. Registrations past the limit count for this once.
    ///
    /// # Errors
    /// What to close the session with.
    pub fn of_setup(&mut self, tokens: &[Token]) -> Result<Vec<Credential>, DecodeError> {
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

    /// The tokens of a request; registers and deletes as they say.
    ///
    /// # Errors
    /// What to close the session with.
    pub fn of_request(&mut self, tokens: &[Token]) -> Result<Vec<Credential>, DecodeError> {
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

    /// Bytes that are registered, as the limit counts them.
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
                reason: "more tokens are registered than there is room for",
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

    fn of(value: &str) -> Credential {
        Credential { kind: 1, value: Bytes::copy_from_slice(value.as_bytes()) }
    }

    fn register(alias: u64, value: &str) -> Token {
        Form::Register { alias, credential: of(value) }.encode()
    }

    #[test]
    fn forms_on_the_wire() {
        let table: [(Form, &[u8]); 4] = [
            (Form::Delete { alias: 5 }, &[0, 5]),
            (Form::Register { alias: 5, credential: of("ab") }, &[1, 5, 1, b'a', b'b']),
            (Form::UseAlias { alias: 5 }, &[2, 5]),
            (Form::UseValue(of("ab")), &[3, 1, b'a', b'b']),
        ];
        for (form, bytes) in table {
            assert_eq!(form.encode().0, bytes, "{form:?}");
            assert_eq!(Form::decode(&Token(Bytes::copy_from_slice(bytes))), Ok(form));
        }
    }

    #[test]
    fn what_is_no_token_closes_the_session() {
        let table: [&[u8]; 8] = [&[], &[0], &[2], &[1, 5], &[3], &[4, 1], &[0, 5, 0], &[2, 5, 0]];
        for bytes in table {
            let error = Form::decode(&Token(Bytes::copy_from_slice(bytes))).unwrap_err();
            assert_eq!(error.code, code::Session::KEY_VALUE_FORMATTING_ERROR, "{bytes:x?}");
        }
    }

    #[test]
    fn registered_tokens_are_used_until_they_are_deleted() {
        let mut registered = Registered::new(100);
        assert_eq!(registered.of_request(&[register(7, "abcd")]), Ok(vec![of("abcd")]));
        assert_eq!(registered.size(), 20);
        let used = registered.of_request(&[Form::UseAlias { alias: 7 }.encode()]);
        assert_eq!(used, Ok(vec![of("abcd")]));
        assert_eq!(registered.of_request(&[Form::Delete { alias: 7 }.encode()]), Ok(vec![]));
        assert_eq!(registered.size(), 0);
        for form in [Form::UseAlias { alias: 7 }, Form::Delete { alias: 7 }] {
            let error = registered.of_request(&[form.encode()]).unwrap_err();
            assert_eq!(error.code, code::Session::UNKNOWN_AUTH_TOKEN_ALIAS);
        }
    }

    #[test]
    fn aliases_and_room_are_limited() {
        let mut registered = Registered::new(40);
        registered.of_request(&[register(1, "abcd")]).unwrap();
        let twice = registered.of_request(&[register(1, "x")]).unwrap_err();
        assert_eq!(twice.code, code::Session::DUPLICATE_AUTH_TOKEN_ALIAS);
        let much = registered.of_request(&[register(2, "abcde")]).unwrap_err();
        assert_eq!(much.code, code::Session::AUTH_TOKEN_CACHE_OVERFLOW);
        registered.of_request(&[register(2, "abcd")]).unwrap();
        assert_eq!(registered.size(), 40);
    }

    #[test]
    fn a_setup_may_register_more_than_there_is_room_for_but_refer_to_nothing() {
        let mut registered = Registered::new(0);
        assert_eq!(registered.of_setup(&[register(1, "abcd")]), Ok(vec![of("abcd")]));
        let unknown = registered.of_request(&[Form::UseAlias { alias: 1 }.encode()]).unwrap_err();
        assert_eq!(unknown.code, code::Session::UNKNOWN_AUTH_TOKEN_ALIAS);
        for form in [Form::Delete { alias: 1 }, Form::UseAlias { alias: 1 }] {
            let error = registered.of_setup(&[form.encode()]).unwrap_err();
            assert_eq!(error.code, code::Session::PROTOCOL_VIOLATION);
        }
    }

    #[test]
    fn credentials_are_not_printed() {
        assert_eq!(format!("{:?}", Form::UseValue(of("secret"))), "UseValue(Credential(1, 6 bytes))");
    }

    proptest! {
        #[test]
        fn any_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let token = Token(bytes.into());
            if let Ok(form) = Form::decode(&token) {
                prop_assert_eq!(Form::decode(&form.encode()), Ok(form));
            }
        }
    }
}
