//! The tests of `relay`, whose relays forward in the kernel.
#![allow(clippy::unwrap_used)]

#[path = "relay/main.rs"]
mod relay;
