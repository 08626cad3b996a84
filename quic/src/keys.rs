//! Packet protection keys (RFC 9001, section 5), derived from TLS traffic secrets.

use std::fmt;

use ring::{aead, hkdf};
use thiserror::Error;

/// Length of the authentication tag of every cipher suite, bytes.
pub const TAG_LEN: usize = 16;

/// Length of the ciphertext sample that header protection takes, bytes.
pub const SAMPLE_LEN: usize = 16;

/// Error: the packet's authentication tag does not match its bytes and the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the packet is not authentic")]
pub struct NotAuthentic;

/// AEAD and hash of a TLS 1.3 cipher suite.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names are those of TLS")]
pub enum KeySuite {
    ChaCha20Poly1305,
    Aes128Gcm,
    Aes256Gcm,
}

impl KeySuite {
    /// Returns the length of the AEAD key, bytes.
    pub const fn key_len(self) -> usize {
        match self {
            Self::Aes128Gcm => 16,
            Self::ChaCha20Poly1305 | Self::Aes256Gcm => 32,
        }
    }

    /// Returns the length of a traffic secret in bytes, which is the output length of the suite's hash.
    pub const fn secret_len(self) -> usize {
        match self {
            Self::ChaCha20Poly1305 | Self::Aes128Gcm => 32,
            Self::Aes256Gcm => 48,
        }
    }

    /// Returns how many packets may be sealed with one key (RFC 9001, section 6.6).
    pub const fn confidentiality_limit(self) -> u64 {
        match self {
            // The limit of ChaCha20-Poly1305 exceeds the 2^62 packet numbers of a connection.
            Self::ChaCha20Poly1305 => u64::MAX,
            // Beyond 2^23 packets the advantage of an attacker exceeds 2^-57 (RFC 9001, appendix B.1).
            Self::Aes128Gcm | Self::Aes256Gcm => 1 << 23,
        }
    }

    pub(crate) fn aead(self) -> &'static aead::Algorithm {
        match self {
            Self::ChaCha20Poly1305 => &aead::CHACHA20_POLY1305,
            Self::Aes128Gcm => &aead::AES_128_GCM,
            Self::Aes256Gcm => &aead::AES_256_GCM,
        }
    }

    fn header(self) -> &'static aead::quic::Algorithm {
        match self {
            Self::ChaCha20Poly1305 => &aead::quic::CHACHA20,
            Self::Aes128Gcm => &aead::quic::AES_128,
            Self::Aes256Gcm => &aead::quic::AES_256,
        }
    }

    fn hkdf(self) -> hkdf::Algorithm {
        match self {
            Self::ChaCha20Poly1305 | Self::Aes128Gcm => hkdf::HKDF_SHA256,
            Self::Aes256Gcm => hkdf::HKDF_SHA384,
        }
    }
}

/// A traffic secret of one direction and key generation. `Debug` does not print its bytes.
#[derive(Clone)]
pub struct TrafficSecret {
    suite: KeySuite,
    bytes: [u8; 48],
}

impl fmt::Debug for TrafficSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TrafficSecret").field("suite", &self.suite).finish_non_exhaustive()
    }
}

impl TrafficSecret {
    /// Creates a secret from the bytes that TLS gave. Returns `None` if its length is not that of the suite's hash.
    pub fn new(suite: KeySuite, secret: &[u8]) -> Option<Self> {
        let mut bytes = [0; 48];
        (secret.len() == suite.secret_len()).then(|| bytes[..secret.len()].copy_from_slice(secret))?;
        Some(Self { suite, bytes })
    }

    /// Returns the cipher suite.
    pub fn suite(&self) -> KeySuite {
        self.suite
    }

    /// Derives the secret of the next key generation, "quic ku" (RFC 9001, section 6.1).
    pub fn next(&self) -> Self {
        let mut bytes = [0; 48];
        self.expand(b"quic ku", &mut bytes[..self.suite.secret_len()]);
        Self { suite: self.suite, bytes }
    }

    /// Derives the AEAD key and IV, "quic key" and "quic iv".
    pub fn packet_key(&self) -> DirectionKey {
        let mut key = [0; 32];
        let key = &mut key[..self.suite.key_len()];
        self.expand(b"quic key", key);
        let mut iv = [0; aead::NONCE_LEN];
        self.expand(b"quic iv", &mut iv);
        let key = aead::UnboundKey::new(self.suite.aead(), key).map(aead::LessSafeKey::new);
        DirectionKey { key: key.expect("the key has the suite's length"), iv }
    }

    /// Derives the header protection key, "quic hp". All key generations use the header protection key of the first
    /// generation (RFC 9001, section 6).
    pub fn header_key(&self) -> HeaderKey {
        let mut key = [0; 32];
        let key = &mut key[..self.suite.key_len()];
        self.expand(b"quic hp", key);
        let key = aead::quic::HeaderProtectionKey::new(self.suite.header(), key);
        HeaderKey(key.expect("the key has the suite's length"))
    }

    /// Returns the bytes of [`packet_key`](Self::packet_key) and [`header_key`](Self::header_key), for a sender or
    /// receiver in the kernel. All key generations protect headers with the header key of the first generation, so
    /// callers ignore the header keys of later ones.
    pub fn key_material(&self) -> KeyMaterial {
        let mut material = KeyMaterial { key: [0; 32], iv: [0; aead::NONCE_LEN], header: [0; 32] };
        let len = self.suite.key_len();
        self.expand(b"quic key", &mut material.key[..len]);
        self.expand(b"quic iv", &mut material.iv);
        self.expand(b"quic hp", &mut material.header[..len]);
        material
    }

    /// Runs HKDF-Expand-Label with an empty context (RFC 8446, section 7.1).
    fn expand(&self, label: &[u8], out: &mut [u8]) {
        let secret = &self.bytes[..self.suite.secret_len()];
        expand_label(&hkdf::Prk::new_less_safe(self.suite.hkdf(), secret), label, out);
    }
}

/// The bytes of one direction's keys. A key shorter than 32 bytes is padded with zeroes.
#[derive(Clone)]
pub struct KeyMaterial {
    /// The AEAD's key.
    pub key: [u8; 32],
    /// The IV, which the packet number is XORed into (RFC 9001, section 5.3).
    pub iv: [u8; aead::NONCE_LEN],
    /// The key of header protection (RFC 9001, section 5.4).
    pub header: [u8; 32],
}

/// Derives the secrets that protect Initial packets (RFC 9001, section 5.2), the client's and the server's, from the
/// destination connection ID of the client's first packet.
pub fn initial_secrets(connection_id: &[u8]) -> (TrafficSecret, TrafficSecret) {
    const SALT: [u8; 20] = [
        0x38, 0x76, 0x2c, 0xf7, 0xf5, 0x59, 0x34, 0xb3, 0x4d, 0x17, 0x9a, 0xe6, 0xa4, 0xc8, 0x0c, 0xad, 0xcc,
        0xbb, 0x7f, 0x0a,
    ];
    let initial = hkdf::Salt::new(hkdf::HKDF_SHA256, &SALT).extract(connection_id);
    let secret = |label: &[u8]| {
        let mut bytes = [0; 48];
        expand_label(&initial, label, &mut bytes[..32]);
        TrafficSecret { suite: KeySuite::Aes128Gcm, bytes }
    };
    (secret(b"client in"), secret(b"server in"))
}

fn expand_label(secret: &hkdf::Prk, label: &[u8], out: &mut [u8]) {
    struct KeyLength(usize);
    impl hkdf::KeyType for KeyLength {
        fn len(&self) -> usize {
            self.0
        }
    }

    const PREFIX: &[u8] = b"tls13 ";
    let length = (out.len() as u16).to_be_bytes();
    let label_len = [(PREFIX.len() + label.len()) as u8];
    // An HkdfLabel has the output length, the label with its length, and a context, which is empty here.
    let info = [&length, label_len.as_slice(), PREFIX, label, &[0]];
    secret
        .expand(&info, KeyLength(out.len()))
        .and_then(|okm| okm.fill(out))
        .expect("HKDF expands to 48 bytes at most, and the buffer has the requested length");
}

/// The AEAD key and IV of one direction and key generation.
pub struct DirectionKey {
    key: aead::LessSafeKey,
    iv: [u8; aead::NONCE_LEN],
}

impl DirectionKey {
    /// Seals `payload` in place and returns its tag. A packet `number` may be used at most once per key.
    pub fn seal(&self, number: u64, header: &[u8], payload: &mut [u8]) -> [u8; TAG_LEN] {
        let tag = self.key.seal_in_place_separate_tag(self.nonce(number), aead::Aad::from(header), payload);
        let tag = tag.expect("a packet is shorter than any AEAD's limit");
        let mut bytes = [0; TAG_LEN];
        bytes.copy_from_slice(tag.as_ref());
        bytes
    }

    /// Opens `sealed` (payload and tag) in place and returns the payload.
    pub fn open<'a>(
        &self,
        number: u64,
        header: &[u8],
        sealed: &'a mut [u8],
    ) -> Result<&'a mut [u8], NotAuthentic> {
        let opened = self.key.open_in_place(self.nonce(number), aead::Aad::from(header), sealed);
        opened.map_err(|_| NotAuthentic)
    }

    /// Computes the nonce (RFC 9001, section 5.3).
    fn nonce(&self, number: u64) -> aead::Nonce {
        let mut nonce = self.iv;
        // The packet number is padded on the left to the IV's 12 bytes, so only the last 8 bytes of the nonce differ
        // from the IV.
        for (byte, number) in nonce[4..].iter_mut().zip(number.to_be_bytes()) {
            *byte ^= number;
        }
        aead::Nonce::assume_unique_for_key(nonce)
    }
}

/// The header protection key of one direction.
pub struct HeaderKey(aead::quic::HeaderProtectionKey);

impl HeaderKey {
    /// Returns the mask for a ciphertext sample (RFC 9001, section 5.4).
    pub fn mask(&self, sample: &[u8; SAMPLE_LEN]) -> [u8; 5] {
        let mask = self.0.new_mask(sample);
        mask.expect("every suite samples 16 bytes")
    }
}
