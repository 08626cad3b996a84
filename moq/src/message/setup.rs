//! SETUP: the first message on each side's control stream.

use bytes::Bytes;

use super::{Body, DecodeError};
use crate::param::Token;
use crate::property::{Pair, PairWriter, Pairs, Value};
use crate::wire::{Reader, Writer};
use crate::{Draft, code, vi64};

const PATH: u64 = 0x01;
const AUTHORIZATION_TOKEN: u64 = 0x03;
const MAX_AUTH_TOKEN_CACHE_SIZE: u64 = 0x04;
const AUTHORITY: u64 = 0x05;
const IMPLEMENTATION: u64 = 0x07;
const MAX_REQUEST_UPDATES: u64 = 0x08;
/// Provisional, as SWITCHING_SET_ASSIGNMENT is.
const SWITCHING_ALGORITHMS: u64 = 0x09;

/// Algorithms of switching sets that are remembered of a peer.
const MAX_ALGORITHMS: usize = 16;

/// The options of one side. Unknown ones are ignored.
///
/// `path` and `authority` are the client's, over QUIC without WebTransport: whoever gets them otherwise
/// closes the session with INVALID_PATH or INVALID_AUTHORITY.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Setup {
    /// The URI's path and query, empty or from its `/` or `?` on.
    pub path: Option<String>,
    pub authorization_tokens: Vec<Token>,
    /// Bytes of registered tokens that the sender is willing to keep; absent means 0.
    pub max_auth_token_cache_size: Option<u64>,
    pub authority: Option<String>,
    /// Name and version of the sender's software.
    pub implementation: Option<String>,
    /// How many updates of a request may have no answer yet; absent and 0 mean any number. Draft-19 on.
    pub max_request_updates: Option<u64>,
    /// SSTS_ALGORITHMS (draft-wilaw-moq-moqt-ssts): what the sender knows to do with switching sets; empty: nothing.
    pub switching_algorithms: Vec<u64>,
}

impl Setup {
    fn take(&mut self, pair: Pair<'_>, draft: Draft) -> Result<(), DecodeError> {
        let repeated = match pair {
            Pair { kind: PATH, value: Value::Bytes(path) } => self.path.replace(read_path(path)?).is_some(),
            Pair { kind: AUTHORITY, value: Value::Bytes(authority) } => {
                self.authority.replace(read_authority(authority)?).is_some()
            }
            Pair { kind: AUTHORIZATION_TOKEN, value: Value::Bytes(token) } => {
                self.authorization_tokens.push(Token(Bytes::copy_from_slice(token)));
                false
            }
            Pair { kind: MAX_AUTH_TOKEN_CACHE_SIZE, value: Value::Integer(size) } => {
                self.max_auth_token_cache_size.replace(size).is_some()
            }
            Pair { kind: IMPLEMENTATION, value: Value::Bytes(text) } => {
                self.implementation.replace(String::from_utf8_lossy(text).into_owned()).is_some()
            }
            Pair { kind: MAX_REQUEST_UPDATES, value: Value::Integer(most) } if draft.limits_updates() => {
                self.max_request_updates.replace(most).is_some()
            }
            Pair { kind: SWITCHING_ALGORITHMS, value: Value::Bytes(list) } => {
                !std::mem::replace(&mut self.switching_algorithms, read_algorithms(list)).is_empty()
            }
            _ => false,
        };
        match repeated {
            true => Err(DecodeError::violation("a setup option is repeated")),
            false => Ok(()),
        }
    }
}

impl Body for Setup {
    fn decode(input: &mut Reader) -> Result<Self, DecodeError> {
        let options = input.rest();
        let mut setup = Self::default();
        Pairs::new(&options).try_for_each(|pair| setup.take(pair?, input.draft()))?;
        Ok(setup)
    }

    fn encode(&self, out: &mut Writer<'_>) {
        let max_request_updates = self.max_request_updates.filter(|_| out.draft().limits_updates());
        let mut options = PairWriter::new(out.out);
        if let Some(path) = &self.path {
            options.bytes(PATH, path.as_bytes());
        }
        for token in &self.authorization_tokens {
            options.bytes(AUTHORIZATION_TOKEN, &token.0);
        }
        if let Some(size) = self.max_auth_token_cache_size {
            options.integer(MAX_AUTH_TOKEN_CACHE_SIZE, size);
        }
        if let Some(authority) = &self.authority {
            options.bytes(AUTHORITY, authority.as_bytes());
        }
        if let Some(implementation) = &self.implementation {
            options.bytes(IMPLEMENTATION, implementation.as_bytes());
        }
        if let Some(most) = max_request_updates {
            options.integer(MAX_REQUEST_UPDATES, most);
        }
        if !self.switching_algorithms.is_empty() {
            let mut list = Vec::new();
            self.switching_algorithms.iter().for_each(|algorithm| vi64::encode(*algorithm, &mut list));
            options.bytes(SWITCHING_ALGORITHMS, &list);
        }
    }
}

/// What is no list means something else by the number, and is nothing to us.
fn read_algorithms(bytes: &[u8]) -> Vec<u64> {
    let mut input = Reader::new(Draft::NEWEST, Bytes::copy_from_slice(bytes));
    let mut algorithms = Vec::new();
    while !input.is_empty() && algorithms.len() < MAX_ALGORITHMS {
        match input.vi64() {
            Ok(algorithm) => algorithms.push(algorithm),
            Err(_) => return Vec::new(),
        }
    }
    algorithms
}

/// Whether all of `text` may appear in a URI (RFC 3986, appendix A).
fn is_uri(text: &[u8]) -> bool {
    text.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-._~:/?#[]@!$&'()*+,;=%".contains(byte))
}

fn read_path(bytes: &[u8]) -> Result<String, DecodeError> {
    let starts_well = matches!(bytes.first(), None | Some(b'/' | b'?'));
    match String::from_utf8(bytes.to_vec()) {
        Ok(path) if starts_well && is_uri(bytes) && !bytes.contains(&b'#') => Ok(path),
        _ => Err(DecodeError { code: code::Session::MALFORMED_PATH, reason: "the path is not one of a URI" }),
    }
}

fn read_authority(bytes: &[u8]) -> Result<String, DecodeError> {
    match String::from_utf8(bytes.to_vec()) {
        Ok(authority) if is_uri(bytes) && !bytes.iter().any(|byte| b"/?#".contains(byte)) => Ok(authority),
        _ => Err(DecodeError {
            code: code::Session::MALFORMED_AUTHORITY,
            reason: "the authority is not one of a URI",
        }),
    }
}
