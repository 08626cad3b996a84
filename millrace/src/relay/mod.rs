//! The relay: sessions, namespaces, tracks.

pub mod cli;
pub mod config;
pub mod status;
