//! The tests of `interop`, with relays that forward in the kernel.
//!
//! Tier: test-all, since the peers have to be built.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "interop/main.rs"]
mod interop;
