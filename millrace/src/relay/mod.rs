//! `millrace relay`: settings, engine, gate, certificate, logs, HTTP and metrics around the library's relay.

pub mod cli;
pub mod config;
mod engine;
mod guard;
pub mod http;
pub mod log;
pub mod metrics;
pub mod server;
pub mod status;
pub mod tls;
