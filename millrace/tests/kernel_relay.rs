//! The tests of `relay` with relays that forward in the kernel.
#![allow(clippy::unwrap_used)]

#[path = "relay/main.rs"]
mod relay;
