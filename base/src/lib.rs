//! Parts that several products share, apart from the kernel and QUIC.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`networks`] | whom an address stands for, and how many places each network gets |
//! | [`file`](mod@file) | reads files within bounds |
//! | [`pem`] | what is wrong with files of certificates and keys, in words |
//! | [`control`] | a connection between two processes of a host: records of JSON, with descriptors beside them |
//! | [`settings`] | reads TOML files, and reports everything that is wrong with them at once |
//! | [`Reload`] | what became of reading a daemon's settings again |
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod control;
pub mod file;
pub mod networks;
pub mod pem;
mod reload;
pub mod settings;

pub use reload::Reload;
