//! The tests of `relay` with WebTransport clients as peers, and tests of features that only those have.
#![allow(clippy::unwrap_used)]

#[path = "relay/main.rs"]
mod relay;
mod web;
