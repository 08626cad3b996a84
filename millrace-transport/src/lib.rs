//! QUIC connections with a second sender.

pub mod engine;
pub mod interfaces;
pub mod quic;
