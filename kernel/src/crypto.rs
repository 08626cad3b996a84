//! Keys of 1-RTT packets (RFC 9001, section 5), in the form that BPF programs use (`bpf/crypto_intf.h`).
//!
//! The AES key schedule and GHASH's tables are computed here once per key, so that BPF programs do not compute them
//! for every packet.

#![allow(unsafe_code)]

use crate::intf::{
    Plain,
    generated::{
        self, QUIC_AES128_GCM as AES128_GCM, QUIC_AES256_GCM as AES256_GCM,
        QUIC_CHACHA20_POLY1305 as CHACHA20_POLY1305,
    },
};

/// The keystream of one packet, which depends only on key and packet number. For ChaCha20-Poly1305 `once` is block 0.
/// For AES-GCM the first 16 bytes of `once` are the encrypted counter block 1, and the rest is unused. `text` is
/// XORed with the packet's text.
pub use generated::QuicKeystream as Keystream;

/// Length of the authentication tag in bytes.
pub const TAG_LEN: usize = 16;
/// Largest number of bytes of frames in a packet that the kernel opens or seals, without the tag.
pub const TEXT_MAX: usize = generated::QUIC_TEXT_MAX as usize;

/// Size of the larger member of the union, `quic_aes_keys`, in words of 8 bytes.
const MATERIAL_WORDS: usize = (2 * (4 + SCHEDULE_LEN) + GHASH_ROWS * 16 * 16) / 8;

/// The keys of one direction of a connection, in one key phase (`struct quic_keys`).
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct QuicKeys {
    suite: u32,
    iv: [u8; 12],
    /// The union of `struct quic_keys`, which has the keys of either suite, as words in memory order.
    material: [u64; MATERIAL_WORDS],
}

const _: () = assert!(size_of::<QuicKeys>() == generated::QUIC_KEYS_BYTES as usize);

// SAFETY: `repr(C)` with integers only. The assertion above shows that there is no padding.
unsafe impl Plain for QuicKeys {}

impl std::fmt::Debug for QuicKeys {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("QuicKeys").field("suite", &self.suite).finish_non_exhaustive()
    }
}

impl QuicKeys {
    /// A value for keys that do not exist: all bytes are zero.
    pub const NONE: Self = Self { suite: 0, iv: [0; 12], material: [0; MATERIAL_WORDS] };

    /// Makes keys of TLS_CHACHA20_POLY1305_SHA256 from the values that are derived with the labels "quic key", "quic
    /// iv" and "quic hp".
    pub fn chacha20_poly1305(key: &[u8; 32], iv: &[u8; 12], header: &[u8; 32]) -> Self {
        Self::new(CHACHA20_POLY1305, iv, words(key).chain(words(header)))
    }

    /// Makes keys of TLS_AES_128_GCM_SHA256 from the values that are derived with the labels "quic key", "quic iv" and
    /// "quic hp".
    pub fn aes128_gcm(key: &[u8; 16], iv: &[u8; 12], header: &[u8; 16]) -> Self {
        Self::aes_gcm(AES128_GCM, key, iv, header)
    }

    /// Makes keys of TLS_AES_256_GCM_SHA384 from the values that are derived with the labels "quic key", "quic iv" and
    /// "quic hp".
    pub fn aes256_gcm(key: &[u8; 32], iv: &[u8; 12], header: &[u8; 32]) -> Self {
        Self::aes_gcm(AES256_GCM, key, iv, header)
    }

    fn aes_gcm(suite: u32, key: &[u8], iv: &[u8; 12], header: &[u8]) -> Self {
        // The layout of `struct aes_key`: number of rounds, and expanded key.
        let aes_key = |key| {
            let rounds = (rounds(key) as u32).to_ne_bytes();
            rounds.into_iter().chain(expand(key))
        };
        let keys: Vec<u8> = aes_key(key).chain(aes_key(header)).collect();
        Self::new(suite, iv, words(&keys).chain(ghash_words(key)))
    }

    fn new(suite: u32, iv: &[u8; 12], words: impl Iterator<Item = u64>) -> Self {
        let mut keys = Self { suite, iv: *iv, material: [0; MATERIAL_WORDS] };
        keys.material.iter_mut().zip(words).for_each(|(to, word)| *to = word);
        keys
    }

    /// Returns the bytes of `struct quic_keys`, which BPF programs read.
    pub fn as_bytes(&self) -> &[u8] {
        Plain::as_bytes(self)
    }
}

/// Returns the constants of AES-128-GCM for one key and nonce: GHASH's table, and the block that masks the tag.
/// Programs need them to authenticate data that they do not encrypt.
pub fn gcm_constants(key: &[u8; 16], nonce: &[u8; 12]) -> Vec<u8> {
    let mut counter = [0; 16];
    counter[..12].copy_from_slice(nonce);
    counter[15] = 1;
    ghash_words(key).flat_map(u64::to_ne_bytes).chain(encrypt(key, counter)).collect()
}

/// Returns GHASH's table for an AES key (`struct ghash_key`) as words.
fn ghash_words(key: &[u8]) -> impl Iterator<Item = u64> + use<> {
    let rows = ghash_rows(u128::from_be_bytes(encrypt(key, [0; 16])));
    rows.into_iter().flatten().flat_map(|element| [(element >> 64) as u64, element as u64])
}

/// Splits bytes into words in memory order.
fn words(bytes: &[u8]) -> impl Iterator<Item = u64> {
    bytes.chunks_exact(8).map(|chunk| chunk.iter().rev().fold(0, |word, &byte| word << 8 | u64::from(byte)))
}

/// Length of an expanded key of AES-256. The expanded key of AES-128 has 176 bytes.
const SCHEDULE_LEN: usize = 240;
const SBOX: [u8; 256] = sbox();

/// Computes the S-box (FIPS 197, section 5.1.1). `power` runs through the powers of 3, which are all elements except
/// zero, and `inverse` through those of 1/3.
const fn sbox() -> [u8; 256] {
    let mut sbox = [0x63; 256];
    let mut power = 1u8;
    let mut inverse = 1u8;
    loop {
        power ^= double(power);
        inverse ^= inverse << 1;
        inverse ^= inverse << 2;
        inverse ^= inverse << 4;
        inverse ^= if inverse & 0x80 == 0 { 0 } else { 0x09 };
        let affine = inverse ^ inverse.rotate_left(1) ^ inverse.rotate_left(2) ^ inverse.rotate_left(3);
        sbox[power as usize] = affine ^ inverse.rotate_left(4) ^ 0x63;
        if power == 1 {
            return sbox;
        }
    }
}

/// Returns `byte * x` in the field GF(2^8) of AES.
const fn double(byte: u8) -> u8 {
    byte << 1 ^ if byte & 0x80 == 0 { 0 } else { 0x1b }
}

/// Returns the number of rounds for a key of 16 or 32 bytes (FIPS 197, section 5).
fn rounds(key: &[u8]) -> usize {
    key.len() / 4 + 6
}

/// Expands a key of 16 or 32 bytes (FIPS 197, section 5.2). The bytes after the expanded key are 0.
fn expand(key: &[u8]) -> [u8; SCHEDULE_LEN] {
    let mut schedule = [0; SCHEDULE_LEN];
    schedule[..key.len()].copy_from_slice(key);
    let mut round = 1;
    for at in (key.len()..16 * (rounds(key) + 1)).step_by(4) {
        let mut word = [schedule[at - 4], schedule[at - 3], schedule[at - 2], schedule[at - 1]];
        // AES-256 substitutes a word in the middle of each eight words, too.
        if at % key.len() == 0 || at % key.len() == 16 {
            word = word.map(|byte| SBOX[usize::from(byte)]);
        }
        if at % key.len() == 0 {
            word.rotate_left(1);
            word[0] ^= round;
            round = double(round);
        }
        for (i, byte) in word.into_iter().enumerate() {
            schedule[at + i] = schedule[at + i - key.len()] ^ byte;
        }
    }
    schedule
}

/// Encrypts one AES block (FIPS 197, section 5.1). The code is simple and slow, because it runs twice per key.
fn encrypt(key: &[u8], mut state: [u8; 16]) -> [u8; 16] {
    let schedule = expand(key);
    let (keys, _) = schedule.as_chunks::<16>();
    add(&mut state, &keys[0]);
    for (round, round_key) in keys.iter().enumerate().skip(1).take(rounds(key)) {
        // SubBytes and ShiftRows: the byte in row r of column c comes from column c + r.
        state = std::array::from_fn(|i| SBOX[usize::from(state[(i + 4 * (i % 4)) % 16])]);
        if round < rounds(key) {
            state.as_chunks_mut::<4>().0.iter_mut().for_each(mix);
        }
        add(&mut state, round_key);
    }
    state
}

/// Computes MixColumns of one column.
fn mix(column: &mut [u8; 4]) {
    let all = column.iter().fold(0, |sum, byte| sum ^ byte);
    let from = *column;
    for (i, byte) in column.iter_mut().enumerate() {
        *byte ^= all ^ double(from[i] ^ from[(i + 1) % 4]);
    }
}

fn add(state: &mut [u8; 16], key: &[u8; 16]) {
    state.iter_mut().zip(key).for_each(|(byte, key)| *byte ^= key);
}

const GHASH_ROWS: usize = 8;

/// Returns the table of GHASH, `rows[j][n] = n * x^(4j) * h`. In nibbles, as in elements, the top bit is the
/// coefficient of `x^0`.
fn ghash_rows(h: u128) -> [[u128; 16]; GHASH_ROWS] {
    let mut power = h;
    std::array::from_fn(|_| {
        let powers: [u128; 4] = std::array::from_fn(|_| {
            let this = power;
            power = times_x(power);
            this
        });
        std::array::from_fn(|nibble| {
            (0..4).filter(|bit| nibble & (8 >> bit) != 0).fold(0, |sum, bit: usize| sum ^ powers[bit])
        })
    })
}

/// Multiplies by x modulo `x^128 + x^7 + x^2 + x + 1` (NIST SP 800-38D, section 6.3).
fn times_x(element: u128) -> u128 {
    element >> 1 ^ if element & 1 == 0 { 0 } else { 0xe1 << 120 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use libbpf_rs::HasSize;
    use libbpf_rs::btf::Btf;
    use libbpf_rs::btf::types::{MemberAttr, Struct};
    use std::mem::offset_of;

    fn offsets(c: &Struct<'_>) -> Vec<(Option<String>, usize)> {
        c.iter()
            .map(|member| match member.attr {
                MemberAttr::Normal { offset } => {
                    (member.name.map(|name| name.to_string_lossy().into_owned()), offset as usize / 8)
                }
                MemberAttr::BitField { .. } => panic!("a bit field"),
            })
            .collect()
    }

    fn named(fields: &[(&str, usize)]) -> Vec<(Option<String>, usize)> {
        fields.iter().map(|(name, at)| (Some((*name).to_owned()), *at)).collect()
    }

    #[test]
    fn rust_layout_of_key_structures_matches_btf() {
        let btf = Btf::from_path(format!("{}/crypto_test.bpf.o", env!("OUT_DIR"))).expect("BTF");
        let of = |name: &str| btf.type_by_name::<Struct<'_>>(name).unwrap_or_else(|| panic!("no {name}"));
        let keys = of("quic_keys");
        assert_eq!(keys.size(), size_of::<QuicKeys>());
        let mut expected = named(&[("suite", 0), ("iv", offset_of!(QuicKeys, iv))]);
        expected.push((None, offset_of!(QuicKeys, material)));
        assert_eq!(offsets(&keys), expected);
        assert_eq!(4 + 12 + 8 * MATERIAL_WORDS, size_of::<QuicKeys>(), "implicit padding");
        assert_eq!(offsets(&of("quic_chacha20_keys")), named(&[("packet", 0), ("header", 32)]));
        let key_len = 4 + SCHEDULE_LEN;
        assert_eq!(offsets(&of("aes_key")), named(&[("rounds", 0), ("words", 4)]));
        let aes = [("packet", 0), ("header", key_len), ("ghash", 2 * key_len)];
        assert_eq!(offsets(&of("quic_aes_keys")), named(&aes));
        assert_eq!(offsets(&of("gf128")), named(&[("high", 0), ("low", 8)]));
        let keystream = of("quic_keystream");
        assert_eq!(offsets(&keystream), named(&[("once", 0), ("text", 64)]));
        assert_eq!(keystream.size(), 64 + TEXT_MAX);
    }

    /// Checks the test vectors of FIPS 197, appendices A.1, A.3, B and C.3.
    #[test]
    fn aes_matches_fips_197() {
        let key = 0x2b7e151628aed2a6abf7158809cf4f3c_u128.to_be_bytes();
        assert_eq!(expand(&key)[172..176], [0xb6, 0x63, 0x0c, 0xa6]);
        let cipher = encrypt(&key, 0x3243f6a8885a308d313198a2e0370734_u128.to_be_bytes());
        assert_eq!(u128::from_be_bytes(cipher), 0x3925841d02dc09fbdc118597196a0b32);
        let long = [0x603deb1015ca71be2b73aef0857d7781_u128, 0x1f352c073b6108d72d9810a30914dff4];
        assert_eq!(expand(long.map(u128::to_be_bytes).as_flattened())[236..], [0x70, 0x6c, 0x63, 0x1e]);
        let key: [u8; 32] = std::array::from_fn(|i| i as u8);
        let cipher = encrypt(&key, 0x00112233445566778899aabbccddeeff_u128.to_be_bytes());
        assert_eq!(u128::from_be_bytes(cipher), 0x8ea2b7ca516745bfeafc49904b496089);
    }

    #[test]
    fn ghash_rows_are_multiples_of_the_hash_key() {
        let h = 0x66e94bd4ef8a2c3b884cfa59ca342b2e;
        let rows = ghash_rows(h);
        assert_eq!(rows[0][0b1000], h);
        assert_eq!(rows[0][0b0001], times_x(times_x(times_x(h))));
        assert_eq!(rows[1][0b1000], times_x(rows[0][0b0001]));
        assert_eq!(rows[7][0b1010], rows[7][0b1000] ^ rows[7][0b0010]);
    }

    #[test]
    fn debug_output_of_packet_keys_shows_no_key_bytes() {
        let keys = QuicKeys::chacha20_poly1305(&[0xa7; 32], &[0xa7; 12], &[0xa7; 32]);
        assert_eq!(format!("{keys:?}"), "QuicKeys { suite: 0, .. }");
    }
}
