//! Compares the results for random packets with those of ring.

use millrace_kernel::crypto::{QuicKeys, TAG_LEN, TEXT_MAX};

use crate::engine::{AT_MAX, CryptoCase, CryptoEngine, HEADER_MAX, Operation};
use ring::aead::{self, quic};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RandomSuite {
    ChaCha20Poly1305,
    Aes128Gcm,
    Aes256Gcm,
}

pub const SUITES: [RandomSuite; 3] =
    [RandomSuite::ChaCha20Poly1305, RandomSuite::Aes128Gcm, RandomSuite::Aes256Gcm];

pub fn bytes<const N: usize>() -> [u8; N] {
    std::array::from_fn(|_| fastrand::u8(..))
}

fn some_bytes(len: usize) -> Vec<u8> {
    (0..len).map(|_| fastrand::u8(..)).collect()
}

/// The same keys twice: for the code under test and for the library ring.
struct RandomKeys {
    keys: QuicKeys,
    iv: [u8; 12],
    packet: aead::LessSafeKey,
    header: quic::HeaderProtectionKey,
}

impl RandomKeys {
    fn random(suite: RandomSuite) -> Self {
        let (key, header, iv): ([u8; 32], [u8; 32], _) = (bytes(), bytes(), bytes());
        let (keys, aead, quic, len): (_, _, &'static quic::Algorithm, _) = match suite {
            RandomSuite::ChaCha20Poly1305 => (
                QuicKeys::chacha20_poly1305(&key, &iv, &header),
                &aead::CHACHA20_POLY1305,
                &quic::CHACHA20,
                32,
            ),
            RandomSuite::Aes128Gcm => {
                let [key, header] = [key, header].map(|key| *key.first_chunk().expect("16 of 32"));
                (QuicKeys::aes128_gcm(&key, &iv, &header), &aead::AES_128_GCM, &quic::AES_128, 16)
            }
            RandomSuite::Aes256Gcm => {
                (QuicKeys::aes256_gcm(&key, &iv, &header), &aead::AES_256_GCM, &quic::AES_256, 32)
            }
        };
        let packet = aead::UnboundKey::new(aead, &key[..len]).expect("a key");
        let header = quic::HeaderProtectionKey::new(quic, &header[..len]).expect("a key");
        Self { keys, iv, packet: aead::LessSafeKey::new(packet), header }
    }

    /// Seals a packet with ring (RFC 9001, section 5.3).
    fn seal(&self, number: u64, header: &[u8], text: &[u8]) -> Vec<u8> {
        let mut nonce = self.iv;
        nonce[4..].iter_mut().zip(number.to_be_bytes()).for_each(|(byte, number)| *byte ^= number);
        let mut sealed = text.to_vec();
        let nonce = aead::Nonce::assume_unique_for_key(nonce);
        self.packet.seal_in_place_append_tag(nonce, aead::Aad::from(header), &mut sealed).expect("seal");
        sealed
    }
}

fn random_number() -> u64 {
    fastrand::u64(..) >> fastrand::u32(2..64)
}

/// Seals and opens texts of every length. Checks the output, and that no other byte of the buffer is written.
fn every_length(engine: &CryptoEngine, suite: RandomSuite) {
    let keys = RandomKeys::random(suite);
    for len in 0..=TEXT_MAX {
        let header = some_bytes(fastrand::usize(0..=40));
        let text = some_bytes(len);
        let number = random_number();
        let sealed = keys.seal(number, &header, &text);

        let mut case = CryptoCase::to_seal(&keys.keys, number, &header, &text);
        let mut want = case.packet.bytes;
        want[case.text_at()..][..sealed.len()].copy_from_slice(&sealed);
        assert_eq!(engine.run(Operation::Seal, &mut case), 0);
        assert!(case.packet.bytes == want, "sealing {len} bytes with {suite:?}");

        let mut case = CryptoCase::to_open(&keys.keys, number, &header, &sealed);
        let at = case.text_at();
        let before = case.packet.bytes;
        assert_eq!(engine.run(Operation::Open, &mut case), 0, "opening {len} bytes with {suite:?}");
        assert!(case.text(len) == text, "opening {len} bytes with {suite:?}");
        assert_eq!(engine.run(Operation::SealInPlace, &mut case), 0);
        assert!(case.text(sealed.len()) == sealed, "sealing {len} bytes in place with {suite:?}");
        assert!(case.packet.bytes[..at] == before[..at]);
        let end = at + len + TAG_LEN;
        assert!(case.packet.bytes[end..] == before[end..], "written behind {len} bytes with {suite:?}");
    }
}

#[test]
fn chacha20_poly1305_equals_a_library_at_every_length() {
    for engine in CryptoEngine::all("chacha20_poly1305_equals_a_library_at_every_length") {
        every_length(&engine, RandomSuite::ChaCha20Poly1305);
    }
}

#[test]
fn aes128_gcm_equals_a_library_at_every_length() {
    for engine in CryptoEngine::all("aes128_gcm_equals_a_library_at_every_length") {
        every_length(&engine, RandomSuite::Aes128Gcm);
    }
}

#[test]
fn aes256_gcm_equals_a_library_at_every_length() {
    for engine in CryptoEngine::all("aes256_gcm_equals_a_library_at_every_length") {
        every_length(&engine, RandomSuite::Aes256Gcm);
    }
}

#[test]
fn crypto_works_with_every_header_length() {
    for engine in CryptoEngine::all("crypto_works_with_every_header_length") {
        for (suite, len) in SUITES.into_iter().flat_map(|suite| (0..=HEADER_MAX).map(move |len| (suite, len)))
        {
            let keys = RandomKeys::random(suite);
            let header = some_bytes(len);
            let text = some_bytes(fastrand::usize(0..64));
            let number = random_number();
            let mut case = CryptoCase::to_seal(&keys.keys, number, &header, &text);
            assert_eq!(engine.run(Operation::Seal, &mut case), 0);
            assert!(case.text(text.len() + TAG_LEN) == keys.seal(number, &header, &text), "{suite:?}, {len}");
        }
    }
}

/// Checks that sealing with a precomputed keystream gives the same packets as sealing at once. Also checks that no more
/// keystream is written than requested.
#[test]
fn keystream_computed_ahead_equals_direct_encryption() {
    for engine in CryptoEngine::all("keystream_computed_ahead_equals_direct_encryption") {
        for (suite, _) in SUITES.into_iter().flat_map(|suite| (0..100).map(move |i| (suite, i))) {
            let keys = RandomKeys::random(suite);
            let text = some_bytes(fastrand::usize(0..=TEXT_MAX));
            let header = some_bytes(20);
            let number = random_number();
            let mut ahead = CryptoCase::new(&keys.keys);
            ahead.number = number;
            ahead.extent.text_bytes = text.len() as u32;
            let rest = text.len().next_multiple_of(64).min(TEXT_MAX);
            let untouched = ahead.packet.text[rest..].to_vec();
            assert_eq!(engine.run(Operation::Keystream, &mut ahead), 0);
            assert!(ahead.packet.text[rest..] == untouched);

            let mut case = CryptoCase::to_seal(&keys.keys, !number, &header, &text);
            (case.packet.once, case.packet.text) = (ahead.packet.once, ahead.packet.text);
            assert_eq!(engine.run(Operation::SealWith, &mut case), 0);
            assert!(case.text(text.len() + TAG_LEN) == keys.seal(number, &header, &text));
            assert_eq!(engine.run(Operation::OpenWith, &mut case), 0);
            assert!(case.text(text.len()) == text);
        }
    }
}

/// Flips each bit of header, text, tag and packet number, and checks that the packet is then refused.
#[test]
fn packet_with_any_flipped_bit_is_refused() {
    for engine in CryptoEngine::all("packet_with_any_flipped_bit_is_refused") {
        for (suite, len) in SUITES.into_iter().flat_map(|suite| [0, 1, 16, 47].map(|len| (suite, len))) {
            let keys = RandomKeys::random(suite);
            let header = some_bytes(13);
            let number = random_number();
            let packet = [header.clone(), keys.seal(number, &header, &some_bytes(len))].concat();
            for bit in 0..packet.len() * 8 {
                let mut forged = packet.clone();
                forged[bit / 8] ^= 1 << (bit % 8);
                let (header, sealed) = forged.split_at(header.len());
                let mut case = CryptoCase::to_open(&keys.keys, number, header, sealed);
                assert_eq!(engine.run(Operation::Open, &mut case), -1, "{suite:?}, bit {bit} of {len} bytes");
            }
            for bit in 0..62 {
                let (header, sealed) = packet.split_at(header.len());
                let mut case = CryptoCase::to_open(&keys.keys, number ^ 1 << bit, header, sealed);
                assert_eq!(engine.run(Operation::Open, &mut case), -1, "{suite:?}, number bit {bit}");
            }
        }
    }
}

#[test]
fn crypto_refuses_lengths_out_of_bounds() {
    for engine in CryptoEngine::all("crypto_refuses_lengths_out_of_bounds") {
        for suite in SUITES {
            let keys = RandomKeys::random(suite);
            for field in 0..5 {
                let mut case = CryptoCase::to_seal(&keys.keys, 1, &[1; 20], &[2; 30]);
                match field {
                    0 => case.extent.header_at = AT_MAX as u32 - 19,
                    1 => case.extent.header_bytes = HEADER_MAX as u32 + 1,
                    2 => case.extent.plain_at = AT_MAX as u32 + 1,
                    3 => case.extent.text_bytes = TEXT_MAX as u32 + 1,
                    _ => case.extent.header_at = u32::MAX - 10,
                }
                let before = case.packet.bytes;
                assert_eq!(engine.run(Operation::Seal, &mut case), -1, "field {field}");
                assert_eq!(engine.run(Operation::Open, &mut case), -1, "field {field}");
                assert!(case.packet.bytes == before, "field {field}");
            }
        }
    }
}

/// Compares header protection with ring's masks, for every length of connection ID and packet number.
#[test]
fn header_protection_equals_a_library() {
    for engine in CryptoEngine::all("header_protection_equals_a_library") {
        for (suite, id_len) in SUITES.into_iter().flat_map(|suite| (0..=20).map(move |len| (suite, len))) {
            for number_len in 1..=4 {
                protect_and_back(&engine, suite, id_len, number_len);
            }
        }
    }
}

fn protect_and_back(engine: &CryptoEngine, suite: RandomSuite, id_len: usize, number_len: usize) {
    let keys = RandomKeys::random(suite);
    let number_at = 1 + id_len;
    let mut packet = some_bytes(number_at + 4 + 16 + fastrand::usize(0..9));
    packet[0] = 0x40 | packet[0] & 0x3c | (number_len as u8 - 1);
    let mask = keys.header.new_mask(&packet[number_at + 4..][..16]).expect("a mask");

    let at = fastrand::usize(0..=AT_MAX - number_at);
    let mut case = CryptoCase::new(&keys.keys);
    case.extent.header_at = at as u32;
    case.id_bytes = id_len as u32;
    case.packet.bytes[at..][..packet.len()].copy_from_slice(&packet);
    let mut want = case.packet.bytes;
    want[at] ^= mask[0] & 0x1f;
    (0..number_len).for_each(|i| want[at + number_at + i] ^= mask[1 + i]);
    assert_eq!(engine.run(Operation::Protect, &mut case), 0);
    assert!(case.packet.bytes == want, "{suite:?}, {id_len}, {number_len}");

    for too_short in 0..number_at + 4 + 16 {
        case.extent.text_bytes = too_short as u32;
        assert_eq!(engine.run(Operation::Unprotect, &mut case), -1);
        assert!(case.packet.bytes == want);
    }
    case.extent.text_bytes = packet.len() as u32;
    assert_eq!(engine.run(Operation::Unprotect, &mut case), 0);
    assert!(case.packet.bytes[at..][..packet.len()] == packet, "{suite:?}, {id_len}, {number_len}");
    let number = packet[number_at..][..number_len].iter().fold(0, |n, &byte| n << 8 | u32::from(byte));
    assert_eq!((case.header.first, case.header.number), (packet[0], number));
    assert_eq!(usize::from(case.header.number_bytes), number_len);
}

/// Encodes random packet numbers in enough bytes, and checks that they are decoded.
#[test]
fn packet_numbers_within_half_the_encodable_range_are_decoded() {
    let keys = QuicKeys::chacha20_poly1305(&[0; 32], &[0; 12], &[0; 32]);
    for engine in CryptoEngine::all("packet_numbers_within_half_the_encodable_range_are_decoded") {
        for _ in 0..2000 {
            let number = random_number();
            let number_bytes = fastrand::u8(1..=4);
            let half = 1u64 << (8 * number_bytes - 1);
            let expected = fastrand::u64(number.saturating_sub(half)..number + half).min((1 << 62) - 1);
            let mut case = CryptoCase::new(&keys);
            case.number = expected;
            case.header.number_bytes = number_bytes;
            case.header.number = number as u32 & (u32::MAX >> (32 - 8 * u32::from(number_bytes)));
            engine.run(Operation::Number, &mut case);
            assert_eq!(case.number, number, "expected {expected:#x}, {number_bytes} bytes");
        }
    }
}
