//! Draws random numbers.

use ring::rand::{SecureRandom as _, SystemRandom};

/// Returns a random number from the operating system's secure source.
pub fn number() -> u64 {
    let mut bytes = [0; 8];
    // A failure is ignored: without a source of random numbers, TLS would have failed before.
    let _ = SystemRandom::new().fill(&mut bytes);
    u64::from_le_bytes(bytes)
}
