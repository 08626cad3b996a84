//! The relay: sessions, namespaces, tracks.

pub mod cli;
