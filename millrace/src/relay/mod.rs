//! The relay: sessions, namespaces, tracks.

pub mod cli;
pub mod config;
mod engine;
pub mod gate;
pub mod http;
mod hub;
mod live;
pub mod log;
pub mod metrics;
mod outbox;
mod report;
pub mod server;
mod session;
pub mod status;
mod subscription;
pub mod tls;
pub mod trace;
mod upstream;
mod wire;
