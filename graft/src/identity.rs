//! What a graft is called by, whoever made it, and whose word there is for it.

use std::{fmt, str::FromStr};

use ring::{
    digest::{SHA256, digest},
    signature::{ED25519, UnparsedPublicKey},
};

/// The SHA-256 of an object file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Identity([u8; 32]);

impl Identity {
    pub fn of(image: &[u8]) -> Self {
        let mut bytes = [0; 32];
        bytes.copy_from_slice(digest(&SHA256, image).as_ref());
        Self(bytes)
    }

    pub fn bytes(&self) -> [u8; 32] {
        self.0
    }

    /// As TCP options name it.
    pub fn start(&self) -> [u8; 4] {
        let [a, b, c, d, ..] = self.0;
        [a, b, c, d]
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Identity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        bytes(text).map(Self).ok_or_else(|| "is a SHA-256: 64 hexadecimal digits".to_owned())
    }
}

/// An ed25519 public key whose signatures count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key([u8; 32]);

impl Key {
    /// Whether it is this key's signature of the text.
    pub fn verifies(&self, text: &[u8], signature: &Signature) -> bool {
        UnparsedPublicKey::new(&ED25519, self.0).verify(text, &signature.0).is_ok()
    }
}

impl FromStr for Key {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        bytes(text).map(Self).ok_or_else(|| "is an ed25519 public key: 64 hexadecimal digits".to_owned())
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signature([u8; 64]);

impl FromStr for Signature {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        bytes(text).map(Self).ok_or_else(|| "is an ed25519 signature: 128 hexadecimal digits".to_owned())
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identities_are_written_and_read() {
        let identity = Identity::of(b"abc");
        let text = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(identity.to_string(), text);
        assert_eq!(text.parse(), Ok(identity));
        assert_eq!(identity.start(), [0xba, 0x78, 0x16, 0xbf]);
        for bad in ["", "ba78", &text[1..], &format!("{}g", &text[1..]), &"é".repeat(32)] {
            assert!(bad.parse::<Identity>().is_err(), "{bad}");
        }
    }
}
