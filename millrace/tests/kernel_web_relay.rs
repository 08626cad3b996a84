//! The tests of live media from `relay`, with relays that forward in the kernel and peers that are WebTransport
//! clients.
#![allow(clippy::unwrap_used)]

#[path = "relay/live.rs"]
mod live;
#[path = "relay/peer.rs"]
#[allow(dead_code, reason = "other tests use the rest")]
mod peer;
#[path = "support/site.rs"]
mod site;
