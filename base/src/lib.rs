//! Code that several Millrace products share, apart from code for the kernel and for QUIC.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`networks`] | the client that an address stands for, and the places that each network gets |
//! | [`file`](mod@file) | reads files within bounds |
//! | [`pem`] | explains what is wrong with files of certificates and keys |
//! | [`control`] | a connection between two processes of a host: records of JSON, with file descriptors |
//! | [`settings`] | reads TOML files, and reports everything that is wrong with them at once |
//! | [`Reload`] | the outcome of the latest reload of a daemon's settings |
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod control;
pub mod file;
pub mod networks;
pub mod pem;
mod reload;
pub mod settings;

pub use reload::Reload;
