//! The tests of `relay`, whose peers are WebTransport clients, and what only those can do.
#![allow(clippy::unwrap_used)]

#[path = "relay/main.rs"]
mod relay;
mod web;
