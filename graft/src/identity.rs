//! The identity of a graft (a program that is loaded into the kernel): a hash of its object file, and signatures of
//! trusted keys.

use std::{fmt, str::FromStr};

use ring::{
    digest::{SHA256, digest},
    signature::{ED25519, UnparsedPublicKey},
};

/// SHA-256 of the object file of a graft (a program that is loaded into the kernel).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectIdentity([u8; 32]);

impl ObjectIdentity {
    /// Computes the identity of an object file.
    pub fn from_image(image: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, image).as_ref());
        Self(bytes)
    }

    /// Returns the 32 bytes of the SHA-256.
    pub fn bytes(&self) -> [u8; 32] {
        self.0
    }

    /// Returns the first four bytes of the hash, which TCP options contain.
    pub fn start(&self) -> [u8; 4] {
        let [a, b, c, d, ..] = self.0;
        [a, b, c, d]
    }
}

impl fmt::Display for ObjectIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for ObjectIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for ObjectIdentity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        bytes(text).map(Self).ok_or_else(|| "is a SHA-256: 64 hexadecimal digits".to_owned())
    }
}

/// An ed25519 public key whose signatures are trusted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignatureKey([u8; 32]);

impl SignatureKey {
    /// Reports whether the signature of this text was made with this key.
    pub fn verifies(&self, text: &[u8], signature: &Signature) -> bool {
        UnparsedPublicKey::new(&ED25519, self.0).verify(text, &signature.0).is_ok()
    }
}

impl FromStr for SignatureKey {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        bytes(text).map(Self).ok_or_else(|| "is an ed25519 public key: 64 hexadecimal digits".to_owned())
    }
}

/// An ed25519 signature of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature([u8; 64]);

impl FromStr for Signature {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        bytes(text).map(Self).ok_or_else(|| "is an ed25519 signature: 128 hexadecimal digits".to_owned())
    }
}

/// Returns bytes as hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    if text.len() != 2 * N || !text.is_ascii() {
        return None;
    }
    let mut bytes = [0; N];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(text.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(bytes)
}

/// The key or the host name by which a peer is authenticated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerTrust {
    /// The SHA-256 of the peer's public key (SubjectPublicKeyInfo).
    Key(ObjectIdentity),
    /// A host name in a certificate of the trusted authority.
    Host(String),
}

impl PeerTrust {
    /// Reads the values of `key` and `host` from the settings. Exactly one of them must be set.
    pub(crate) fn from_settings(key: Option<String>, host: Option<String>) -> Result<Self, String> {
        match (key, host) {
            (Some(key), None) => match key.parse() {
                Ok(key) => Ok(Self::Key(key)),
                Err(_) => Err("key is a SHA-256, which `millrace graft key FILE` prints".to_owned()),
            },
            (None, Some(host)) if !host.is_empty() => Ok(Self::Host(host)),
            _ => Err("one of key and host has to be set".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graft_identities_round_trip_as_text() {
        let identity = ObjectIdentity::from_image(b"abc");
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(identity.to_string(), text);
        assert_eq!(text.parse(), Ok(identity));
        assert_eq!(identity.start(), [0xba, 0x78, 0x16, 0xbf]);
        for bad in ["", "ba78", &text[1..], &format!("{}g", &text[1..]), &"é".repeat(32)] {
            assert!(bad.parse::<ObjectIdentity>().is_err(), "{bad}");
        }
    }
}
