//! `millrace fanout`: RTP from one sender to many receivers, forwarded in the kernel, and the client that asks for it.

pub mod config;
pub mod daemon;
mod metrics;
pub mod receive;
mod reports;
pub mod status;
mod stream;
pub mod text;
pub mod trace;

#[cfg(test)]
pub use stream::EVENTS;

pub const DEFAULT_SOCKET: &str = "/run/millrace/fanout.sock";
