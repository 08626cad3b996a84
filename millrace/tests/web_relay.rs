//! The tests of `relay` with WebTransport clients as peers, and tests of features that only WebTransport clients have.
#![allow(clippy::unwrap_used)]

#[path = "relay/main.rs"]
mod relay;
mod web;
