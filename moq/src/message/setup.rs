//! SETUP: the first message on each side's control stream.

use bytes::Bytes;

use super::{DecodeError, MessageBody};
use crate::param::AuthToken;
use crate::property::{KeyValuePair, KeyValuePairs, PairWriter, Value};
use crate::wire::{WireReader, WireWriter};
use crate::{Draft, HopId, code, vi64};

const PATH: u64 = 0x01;
const AUTHORIZATION_TOKEN: u64 = 0x03;
const MAX_AUTH_TOKEN_CACHE_SIZE: u64 = 0x04;
const AUTHORITY: u64 = 0x05;
const IMPLEMENTATION: u64 = 0x07;
const MAX_REQUEST_UPDATES: u64 = 0x08;
/// The option SSTS_ALGORITHMS. Its number is provisional, like the number of the parameter SWITCHING_SET_ASSIGNMENT.
const SWITCHING_ALGORITHMS: u64 = 0x09;
/// The options HOP_ID and RELAY_COST of draft-lcurley-moq-cluster-01. In version 00 of that draft, HOP_ID was 0x40b55,
/// and its value had a length field.
const HOP_ID: u64 = 0x40b54;
const RELAY_COST: u64 = 0x40b56;

/// Largest number of switching-set algorithms that are stored from a peer's list.
const MAX_ALGORITHMS: usize = 16;

/// The SETUP options of one endpoint. Unknown options are ignored.
///
/// Only a client sends `path` and `authority`, and only over QUIC without WebTransport. An endpoint that receives
/// them otherwise closes the session with INVALID_PATH or INVALID_AUTHORITY.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SetupOptions {
    /// The URI's path and query: empty, or beginning with `/` or `?`.
    pub path: Option<String>,
    /// Authorization tokens of the sender.
    pub authorization_tokens: Vec<AuthToken>,
    /// Number of bytes of registered tokens that the sender is willing to store; `None` means 0.
    pub max_auth_token_cache_size: Option<u64>,
    /// The URI's authority.
    pub authority: Option<String>,
    /// Name and version of the sender's implementation.
    pub implementation: Option<String>,
    /// Largest number of unanswered updates of a request; `None` and 0 mean no limit. Draft-19 and later.
    pub max_request_updates: Option<u64>,
    /// SSTS_ALGORITHMS (draft-wilaw-moq-moqt-ssts): the switching-set algorithms that the sender supports; empty if
    /// none.
    pub switching_algorithms: Vec<u64>,
    /// HOP_ID: the sender's identity in paths of announcements. If both endpoints send it, announcements of namespaces
    /// carry paths and costs.
    pub hop_id: Option<HopId>,
    /// RELAY_COST: the cost of receiving objects from the sender, as the sender states it.
    pub relay_cost: Option<u64>,
}

impl SetupOptions {
    fn take(&mut self, pair: KeyValuePair<'_>, draft: Draft) -> Result<(), DecodeError> {
        let repeated = match pair {
            KeyValuePair { kind: PATH, value: Value::Bytes(path) } => {
                self.path.replace(read_path(path)?).is_some()
            }
            KeyValuePair { kind: AUTHORITY, value: Value::Bytes(authority) } => {
                self.authority.replace(read_authority(authority)?).is_some()
            }
            KeyValuePair { kind: AUTHORIZATION_TOKEN, value: Value::Bytes(token) } => {
                self.authorization_tokens.push(AuthToken(Bytes::copy_from_slice(token)));
                false
            }
            KeyValuePair { kind: MAX_AUTH_TOKEN_CACHE_SIZE, value: Value::Integer(size) } => {
                self.max_auth_token_cache_size.replace(size).is_some()
            }
            KeyValuePair { kind: IMPLEMENTATION, value: Value::Bytes(text) } => {
                self.implementation.replace(String::from_utf8_lossy(text).into_owned()).is_some()
            }
            KeyValuePair { kind: MAX_REQUEST_UPDATES, value: Value::Integer(most) }
                if draft.limits_updates() =>
            {
                self.max_request_updates.replace(most).is_some()
            }
            KeyValuePair { kind: SWITCHING_ALGORITHMS, value: Value::Bytes(list) } => {
                !std::mem::replace(&mut self.switching_algorithms, read_algorithms(list)).is_empty()
            }
            KeyValuePair { kind: HOP_ID, value: Value::Integer(hop) } => {
                self.hop_id.replace(HopId(hop)).is_some()
            }
            KeyValuePair { kind: RELAY_COST, value: Value::Integer(cost) } => {
                self.relay_cost.replace(cost).is_some()
            }
            _ => false,
        };
        match repeated {
            true => Err(DecodeError::violation("a setup option is repeated")),
            false => Ok(()),
        }
    }
}

impl MessageBody for SetupOptions {
    fn decode(input: &mut WireReader) -> Result<Self, DecodeError> {
        let options = input.rest();
        let mut setup = Self::default();
        KeyValuePairs::new(&options).try_for_each(|pair| setup.take(pair?, input.draft()))?;
        Ok(setup)
    }

    fn encode(&self, out: &mut WireWriter<'_>) {
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
        if let Some(hop) = self.hop_id {
            options.integer(HOP_ID, hop.0);
        }
        if let Some(cost) = self.relay_cost {
            options.integer(RELAY_COST, cost);
        }
    }
}

/// Reads a list of algorithms. If the bytes are not a list of algorithms, some other extension uses the same option
/// number. The returned list is empty then.
fn read_algorithms(bytes: &[u8]) -> Vec<u64> {
    let mut input = WireReader::new(Draft::NEWEST, Bytes::copy_from_slice(bytes));
    let mut algorithms = Vec::new();
    while !input.is_empty() && algorithms.len() < MAX_ALGORITHMS {
        match input.vi64() {
            Ok(algorithm) => algorithms.push(algorithm),
            Err(_) => return Vec::new(),
        }
    }
    algorithms
}

/// Reports whether `text` has only characters that may appear in a URI (RFC 3986, appendix A).
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
