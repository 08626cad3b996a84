//! The tests of `interop`, whose relays forward in the kernel.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "interop/main.rs"]
mod interop;
