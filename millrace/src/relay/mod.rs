//! The relay: sessions, namespaces, tracks.

pub mod cli;
pub mod config;
pub mod http;
pub mod log;
pub mod metrics;
pub mod status;
pub mod tls;
