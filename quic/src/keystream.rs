//! Keystreams of future packets, computed ahead so that a sender or receiver in the kernel only has to XOR. A keystream
//! is the part of packet protection that depends on key and packet number alone (RFC 9001, section 5.3).

use ring::aead;

use super::keys::{KeyMaterial, KeySuite, TrafficSecret};

/// A key that computes the keystreams of one direction and key generation.
pub struct KeystreamKey {
    suite: KeySuite,
    key: aead::LessSafeKey,
    material: KeyMaterial,
}

impl KeystreamKey {
    /// Creates the key of this secret.
    pub fn new(secret: &TrafficSecret) -> Self {
        let material = secret.key_material();
        let suite = secret.suite();
        let key = aead::UnboundKey::new(suite.aead(), &material.key[..suite.key_len()]);
        let key = key.map(aead::LessSafeKey::new).expect("the key has the suite's length");
        Self { suite, key, material }
    }

    /// Computes the keystream of packet `number`. `text` receives the bytes that the payload is XORed with. `once`
    /// receives the one-time input of the authenticator: block 0 of ChaCha20, or the mask of GCM's tag in the first
    /// 16 bytes.
    ///
    /// `text` is computed by sealing zeroes, so it takes as long as sealing a payload.
    pub fn compute(&self, number: u64, once: &mut [u8; 64], text: &mut [u8]) {
        text.fill(0);
        // Encrypting zeroes yields the keystream itself.
        let _ = self.seal(number, text);
        match self.suite {
            KeySuite::ChaCha20Poly1305 => *once = chacha20_block(&self.material.key, 0, &self.nonce(number)),
            // GHASH of an empty input is 0, so the tag of an empty packet is the mask of GCM's tag.
            KeySuite::Aes128Gcm | KeySuite::Aes256Gcm => {
                once[..aead::NONCE_LEN + 4].copy_from_slice(self.seal(number, &mut []).as_ref())
            }
        }
    }

    fn seal(&self, number: u64, text: &mut [u8]) -> aead::Tag {
        let nonce = aead::Nonce::assume_unique_for_key(self.nonce(number));
        let tag = self.key.seal_in_place_separate_tag(nonce, aead::Aad::empty(), text);
        tag.expect("a packet is shorter than any AEAD's limit")
    }

    fn nonce(&self, number: u64) -> [u8; aead::NONCE_LEN] {
        let mut nonce = self.material.iv;
        for (byte, number) in nonce[4..].iter_mut().zip(number.to_be_bytes()) {
            *byte ^= number;
        }
        nonce
    }
}

/// Computes a block of ChaCha20 (RFC 8439, section 2.3).
fn chacha20_block(key: &[u8; 32], counter: u32, nonce: &[u8; 12]) -> [u8; 64] {
    let mut input =
        [0x6170_7865, 0x3320_646e, 0x7962_2d32, 0x6b20_6574, 0, 0, 0, 0, 0, 0, 0, 0, counter, 0, 0, 0];
    read_words(key, &mut input[4..12]);
    read_words(nonce, &mut input[13..]);
    let mut state = input;
    for _ in 0..10 {
        for [a, b, c, d] in [
            [0, 4, 8, 12],
            [1, 5, 9, 13],
            [2, 6, 10, 14],
            [3, 7, 11, 15],
            [0, 5, 10, 15],
            [1, 6, 11, 12],
            [2, 7, 8, 13],
            [3, 4, 9, 14],
        ] {
            for (x, y, z, by) in [(a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)] {
                state[x] = state[x].wrapping_add(state[y]);
                state[z] = (state[z] ^ state[x]).rotate_left(by);
            }
        }
    }
    let mut block = [0; 64];
    for (bytes, (word, input)) in block.chunks_exact_mut(4).zip(state.iter().zip(input)) {
        bytes.copy_from_slice(&word.wrapping_add(input).to_le_bytes());
    }
    block
}

fn read_words(bytes: &[u8], words: &mut [u32]) {
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = bytes.iter().rev().fold(0, |word, byte| word << 8 | u32::from(*byte));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test vector of RFC 8439, section 2.3.2.
    #[test]
    fn chacha20_block_matches_rfc_8439() {
        let key = std::array::from_fn(|i| i as u8);
        let nonce = [0, 0, 0, 9, 0, 0, 0, 0x4a, 0, 0, 0, 0];
        let block = chacha20_block(&key, 1, &nonce);
        assert_eq!(block[..8], [0x10, 0xf1, 0xe7, 0xe4, 0xd1, 0x3b, 0x59, 0x15]);
        assert_eq!(block[60..], [0xa2, 0x50, 0x3c, 0x4e]);
    }

    #[test]
    fn payload_xored_with_keystream_equals_sealed_payload() {
        for suite in [KeySuite::ChaCha20Poly1305, KeySuite::Aes128Gcm, KeySuite::Aes256Gcm] {
            let secret = TrafficSecret::new(suite, &vec![7; suite.secret_len()]).expect("a secret");
            let keystream = KeystreamKey::new(&secret);
            for (number, len) in [(0, 1), (77, 100), (1 << 40, 1500)] {
                let mut once = [0; 64];
                let mut text = vec![1; len];
                keystream.compute(number, &mut once, &mut text);
                let plain: Vec<u8> = (0..len).map(|i| i as u8).collect();
                let mut sealed = plain.clone();
                secret.packet_key().seal(number, b"header", &mut sealed);
                let xored: Vec<u8> = plain.iter().zip(&text).map(|(plain, key)| plain ^ key).collect();
                assert_eq!(xored, sealed, "{suite:?}");
            }
        }
    }
}
