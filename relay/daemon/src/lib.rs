//! The relay as it is run: settings, engine, gate, certificate, HTTP and metrics around the library's relay.

pub mod access;
pub mod config;
mod engine;
mod events;
mod guard;
pub mod http;
pub mod lasting;
pub mod metrics;
mod page;
pub(crate) mod serve;
pub mod server;
pub mod status;
pub(crate) mod text;
pub mod tls;
