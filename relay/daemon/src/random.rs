//! Random numbers.

use ring::rand::{SecureRandom as _, SystemRandom};

/// Draws a number that nobody can guess.
pub fn number() -> u64 {
    let mut bytes = [0; 8];
    // Without a source of random numbers there is no TLS either.
    let _ = SystemRandom::new().fill(&mut bytes);
    u64::from_le_bytes(bytes)
}
