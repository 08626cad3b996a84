//! Tests of Poly1305 with sums near multiples of 2^130 - 5, where limbs are full and carries pass through all limbs.

use millrace_kernel::crypto::{QuicKeys, TAG_LEN};

use crate::engine::{CryptoCase, CryptoEngine, Operation};

/// The accumulator of Poly1305 for r = 1. Its value is `high * 2^128 + low`: the sum of all blocks, where Poly1305 adds
/// 2^128 to each block.
#[derive(Clone, Copy, Default)]
struct AuthenticatorSum {
    high: u128,
    low: u128,
}

impl AuthenticatorSum {
    fn add(self, block: u128) -> Self {
        let (low, carry) = self.low.overflowing_add(block);
        Self { high: self.high + 1 + u128::from(carry), low }
    }

    /// Multiplies modulo 2^130 - 5, by doubling and adding. In every intermediate sum, `high` stays below 2^5.
    fn multiply(self, by: u128) -> Self {
        let plus = |a: Self, b: Self| {
            let (low, carry) = a.low.overflowing_add(b.low);
            Self { high: a.high + b.high + u128::from(carry), low }.shorten()
        };
        (0..128).rev().fold(Self::default(), |product, bit| {
            let doubled = plus(product, product);
            if by >> bit & 1 == 1 { plus(doubled, self) } else { doubled }
        })
    }

    /// Reduces the sum modulo 2^130 - 5, but not completely: the result may be slightly above 2^130.
    fn shorten(self) -> Self {
        let (low, carry) = self.low.overflowing_add(5 * (self.high / 4));
        Self { high: self.high % 4 + u128::from(carry), low }
    }

    /// Returns the lowest 128 bits of the sum modulo 2^130 - 5.
    fn reduce(self) -> u128 {
        let Self { high, low } = self.shorten();
        let over = high == 4 || high == 3 && low.checked_add(5).is_none();
        if over { low.wrapping_add(5) } else { low }
    }
}

/// Returns the Poly1305 tag of these blocks, without associated data, for the one-time key `(r, s)` and a keystream of
/// zeroes.
fn authenticate(engine: &CryptoEngine, r: u128, s: u128, blocks: &[u128]) -> u128 {
    let keys = QuicKeys::chacha20_poly1305(&[0; 32], &[0; 12], &[0; 32]);
    let text: Vec<u8> = blocks.iter().flat_map(|block| block.to_le_bytes()).collect();
    let mut case = CryptoCase::to_seal(&keys, 0, &[], &text);
    case.packet.once[..16].copy_from_slice(&r.to_le_bytes());
    case.packet.once[16..32].copy_from_slice(&s.to_le_bytes());
    case.packet.text.fill(0);
    assert_eq!(engine.run(Operation::SealWith, &mut case), 0);
    u128::from_le_bytes(*case.text(text.len() + TAG_LEN).last_chunk().expect("a tag"))
}

#[test]
fn poly1305_sums_near_the_prime_are_exact() {
    for engine in CryptoEngine::all("poly1305_sums_near_the_prime_are_exact") {
        for _ in 0..4000 {
            let mut blocks: Vec<u128> = (0..fastrand::usize(0..12)).map(|_| any_block()).collect();
            let lengths = ((blocks.len() as u128 + 1) * 16) << 64;
            let others =
                blocks.iter().fold(AuthenticatorSum::default().add(lengths), |sum, &block| sum.add(block));
            blocks.push(fastrand::u128(0..128).wrapping_sub(64).wrapping_sub(others.low));
            let sum =
                blocks.iter().fold(AuthenticatorSum::default().add(lengths), |sum, &block| sum.add(block));

            let s = fastrand::u128(..);
            let want = sum.reduce().wrapping_add(s);
            assert_eq!(authenticate(&engine, 1, s, &blocks), want, "{blocks:x?}");
        }
    }
}

fn any_block() -> u128 {
    match fastrand::u8(0..4) {
        0 => u128::MAX - fastrand::u128(0..8),
        1 => fastrand::u128(0..8),
        _ => fastrand::u128(..),
    }
}

/// Authenticates a text of one block with r = 2. The block fills all limbs of the accumulator except the lowest. Adding
/// the second block, which has the lengths, then carries through all limbs. The product is `2^131 - 4 * j`.
#[test]
fn poly1305_carry_passes_through_full_limbs() {
    const LENGTHS: u128 = 16 << 64;
    for engine in CryptoEngine::all("poly1305_carry_passes_through_full_limbs") {
        for j in 0..64 {
            let block = (1 << 127) - LENGTHS / 2 - j;
            let tag = 10u128.wrapping_sub(4 * j).wrapping_sub(if j <= 2 { 0 } else { 5 });
            assert_eq!(authenticate(&engine, 2, 0, &[block]), tag, "{j}");
        }
    }
}

/// Checks the largest possible sums of products: with the largest key, and blocks of ones only.
#[test]
fn poly1305_sums_of_products_do_not_overflow() {
    const LARGEST: u128 = 0x0fff_fffc_0fff_fffc_0fff_fffc_0fff_ffff;
    for engine in CryptoEngine::all("poly1305_sums_of_products_do_not_overflow") {
        for case in 0..14 {
            let count = [0, 1, 2, 3, 10, 40, 90][case / 2];
            let full = case % 2 == 0;
            let blocks: Vec<u128> = (0..count).map(|_| if full { u128::MAX } else { any_block() }).collect();
            let lengths = (count as u128 * 16) << 64;
            let sum = blocks
                .iter()
                .chain([&lengths])
                .fold(AuthenticatorSum::default(), |sum, &block| sum.add(block).multiply(LARGEST));
            assert_eq!(authenticate(&engine, LARGEST, 0, &blocks), sum.reduce(), "{blocks:x?}");
        }
    }
}
