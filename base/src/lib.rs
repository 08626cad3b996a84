//! What several products share and neither the kernel nor QUIC is.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`networks`] | whom an address stands for, and how many places each network gets |
//! | [`pem`] | what is wrong with files of certificates and keys, in words |
//! | [`control`] | a connection between two processes of a host: records of JSON, with descriptors beside them |
//! | [`settings`] | reads TOML files, and reports everything that is wrong with them at once |
//! | [`LogLimit`] | bounds how often a line is logged |
//! | [`Reload`] | what became of reading a daemon's settings again |
#![forbid(unsafe_code)]

pub mod control;
mod log_limit;
pub mod networks;
pub mod pem;
mod reload;
pub mod settings;

pub use log_limit::{LogLimit, short};
pub use reload::Reload;
