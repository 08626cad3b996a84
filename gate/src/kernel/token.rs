//! Tokens of Retry packets (RFC 9000, section 8.1.2), which the gate makes and an application checks. They are equal
//! byte for byte to those that `bpf/gate_token.h` makes.
//!
//! A token has the client's address, the time, and the destination connection ID of the answered Initial. The server
//! must put that ID into the transport parameter `original_destination_connection_id`. A token is valid for one
//! connection of one scope. The Initial with the token uses the Retry's source connection ID as its destination ID,
//! which the server must put into `retry_source_connection_id`.

use std::fmt;
use std::io::{self, Read};
use std::net::SocketAddr;
use std::time::Duration;

use millrace_kernel::prefix::{mapped, unmapped};
use millrace_kernel::siphash::{siphash128, word};

use super::intf;

/// Length of a Retry token in bytes.
pub const LEN: usize = size_of::<intf::Token>();
const MAGIC: [u8; 4] = *b"mrg2";
const TAG_AT: usize = LEN - 16;
/// Seconds by which the clocks of two machines that share keys may differ.
const SKEW: u64 = 1;

/// A key that Retry tokens are made with.
#[derive(Clone, PartialEq, Eq)]
pub struct GateKey([u8; 16]);

impl GateKey {
    /// Length of a key in bytes.
    pub const LEN: usize = 16;

    /// Makes a key from these bytes.
    pub const fn new(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// Makes a key from the system's random numbers.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; 16];
        std::fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
        Ok(Self(bytes))
    }

    pub(super) fn words(&self) -> [u64; 2] {
        let (low, high) = self.0.split_at(8);
        [word(low), word(high)]
    }
}

impl fmt::Debug for GateKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

/// The keys whose tokens are accepted. A token contains the index of its key.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keys([Option<GateKey>; intf::TOKEN_KEYS]);

impl Keys {
    /// Makes a set of keys, for example from the keys of another gate
    /// ([`LoadedGate::token_keys`](super::LoadedGate::token_keys)).
    pub const fn new(keys: [Option<GateKey>; intf::TOKEN_KEYS]) -> Self {
        Self(keys)
    }

    /// Returns the key with this index.
    pub fn get(&self, index: usize) -> Option<&GateKey> {
        self.0.get(index)?.as_ref()
    }

    pub(super) fn set(&mut self, index: usize, key: GateKey) {
        if let Some(slot) = self.0.get_mut(index) {
            *slot = Some(key);
        }
    }
}

/// The contents of an authentic Retry token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token {
    /// The client's address and port.
    pub client: SocketAddr,
    /// Time when the token was made, in seconds since 1970.
    pub issued: u64,
    /// Source connection ID of the Retry, and destination ID of the packet with the token.
    pub retry_id: [u8; 8],
    id: [u8; intf::ID_MAX],
    id_len: usize,
}

impl Token {
    /// Makes the contents of a Retry token. Returns `None` if the connection ID is longer than 20 bytes.
    pub fn new(client: SocketAddr, original_id: &[u8], issued: u64) -> Option<Self> {
        let mut id = [0; intf::ID_MAX];
        id.get_mut(..original_id.len())?.copy_from_slice(original_id);
        Some(Self { client, issued, retry_id: [0; 8], id, id_len: original_id.len() })
    }

    /// Returns the destination connection ID of the Initial that the Retry answered.
    pub fn original_id(&self) -> &[u8] {
        &self.id[..self.id_len]
    }

    /// Encodes the token for a guarded application (scope), in the gate's format. `index` is the index of `key`.
    pub fn seal(&self, index: u8, key: &GateKey, scope: &str) -> [u8; LEN] {
        let mut bytes = [0; LEN];
        let fields: [&[u8]; 7] = [
            &MAGIC,
            &[index, self.id_len as u8],
            &self.client.port().to_be_bytes(),
            &(self.issued as u32).to_be_bytes(),
            &self.retry_id,
            &mapped(self.client.ip()),
            &self.id,
        ];
        let content = fields.concat();
        bytes[..TAG_AT].copy_from_slice(&content);
        bytes[TAG_AT..].copy_from_slice(&tag(key, &content, scope));
        bytes
    }
}

/// The reason why a Retry token was not accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the messages describe the variants")]
pub enum Error {
    /// The token does not have the gate's format. A server may treat the packet as if it had no token (RFC 9000,
    /// section
    /// 8.1.3).
    #[error("the token was not made by a gate")]
    NotOurs,
    #[error("the token is forged, of another scope, or made with a key that is no longer accepted")]
    Forged,
    #[error("the Retry token was given to another address")]
    OtherClient,
    #[error("the token is too old, or from the future")]
    Expired,
}

/// Returns the hash of the name of a guarded application (scope). The authentication tag of each of its tokens also
/// covers this hash.
pub(super) fn scope_word(scope: &str) -> u64 {
    word(&siphash128([0; 2], scope.as_bytes())[..8])
}

fn tag(key: &GateKey, content: &[u8], scope: &str) -> [u8; 16] {
    siphash128(key.words(), &[content, &scope_word(scope).to_le_bytes()].concat())
}

/// Checks that a token is authentic and was made for this guarded application (scope), but not its address and time.
/// Use it with QUIC libraries that compare address and time by themselves.
pub fn open(keys: &Keys, scope: &str, token: &[u8]) -> Result<Token, Error> {
    let token: &[u8; LEN] = token.try_into().map_err(|_| Error::NotOurs)?;
    let (content, sealed) = token.split_at(TAG_AT);
    let mut rest = content.strip_prefix(&MAGIC).ok_or(Error::NotOurs)?;
    let [index, id_len] = take(&mut rest).ok_or(Error::NotOurs)?;
    let port = take(&mut rest).map(u16::from_be_bytes).ok_or(Error::NotOurs)?;
    let issued = take(&mut rest).map(u32::from_be_bytes).ok_or(Error::NotOurs)?;
    let retry_id = take(&mut rest).ok_or(Error::NotOurs)?;
    let address = take(&mut rest).ok_or(Error::NotOurs)?;
    let key = keys.get(usize::from(index)).ok_or(Error::Forged)?;
    if !equal(&tag(key, content, scope), sealed) {
        return Err(Error::Forged);
    }
    let client = SocketAddr::new(unmapped(address), port);
    let id = rest.get(..usize::from(id_len)).ok_or(Error::Forged)?;
    let token = Token::new(client, id, u64::from(issued)).ok_or(Error::Forged)?;
    Ok(Token { retry_id, ..token })
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (taken, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*taken)
}

/// Checks a token that `client` sent to a guarded application (scope) at `now`, in seconds since 1970.
pub fn check(
    keys: &Keys,
    scope: &str,
    token: &[u8],
    client: SocketAddr,
    now: u64,
    lifetime: Duration,
) -> Result<Token, Error> {
    let token = open(keys, scope, token)?;
    if (token.client.ip(), token.client.port()) != (client.ip().to_canonical(), client.port()) {
        return Err(Error::OtherClient);
    }
    if token.issued > now.saturating_add(SKEW) || now > token.issued.saturating_add(lifetime.as_secs()) {
        return Err(Error::Expired);
    }
    Ok(token)
}

/// Compares two tags in constant time, so that the time tells nothing about the right tag.
fn equal(a: &[u8; 16], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: GateKey = GateKey::new([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]);

    fn keys() -> Keys {
        Keys::new([None, Some(KEY)])
    }

    #[test]
    fn sealed_retry_token_can_be_opened() {
        for (client, id) in [
            ("192.0.2.1:443", &[][..]),
            ("[2001:db8::1]:65535", &[7; 20]),
            ("192.0.2.1:1", &[1, 2, 3, 4, 5, 6, 7, 8]),
        ] {
            let token = Token::new(client.parse().expect("an address"), id, 1_800_000_000).expect("a token");
            let sealed = token.seal(1, &KEY, "web");
            assert_eq!(open(&keys(), "web", &sealed), Ok(token));
            assert_eq!(open(&keys(), "dns", &sealed), Err(Error::Forged));
            assert_eq!(token.original_id(), id);
        }
        assert_eq!(Token::new("192.0.2.1:1".parse().expect("an address"), &[0; 21], 0), None);
    }

    #[test]
    fn token_with_any_changed_byte_is_refused() {
        let client = "192.0.2.1:443".parse().expect("an address");
        let sealed = Token::new(client, &[7; 8], 1_800_000_000).expect("a token").seal(1, &KEY, "web");
        for at in 0..LEN {
            let mut forged = sealed;
            forged[at] ^= 1;
            let want = if at < MAGIC.len() { Error::NotOurs } else { Error::Forged };
            assert_eq!(open(&keys(), "web", &forged), Err(want), "byte {at}");
        }
        assert_eq!(open(&keys(), "web", &sealed[1..]), Err(Error::NotOurs));
        assert_eq!(open(&Keys::default(), "web", &sealed), Err(Error::Forged));
    }

    #[test]
    fn retry_token_is_refused_from_another_address_or_after_its_lifetime() {
        let client: SocketAddr = "192.0.2.1:443".parse().expect("an address");
        let sealed = Token::new(client, &[7; 8], 100).expect("a token").seal(1, &KEY, "web");
        let lifetime = Duration::from_secs(10);
        let check = |client: &str, now| {
            check(&keys(), "web", &sealed, client.parse().expect("an address"), now, lifetime).map(|_| ())
        };
        assert_eq!(check("192.0.2.1:443", 100), Ok(()));
        assert_eq!(check("[::ffff:192.0.2.1]:443", 100), Ok(()));
        assert_eq!(check("192.0.2.1:443", 110), Ok(()));
        assert_eq!(check("192.0.2.1:443", 99), Ok(()));
        assert_eq!(check("192.0.2.1:443", 98), Err(Error::Expired));
        assert_eq!(check("192.0.2.1:443", 111), Err(Error::Expired));
        assert_eq!(check("192.0.2.1:444", 100), Err(Error::OtherClient));
        assert_eq!(check("192.0.2.2:443", 100), Err(Error::OtherClient));
    }
}
