//! `millrace gate`: guards QUIC servers of this machine, as a command. What it decides by is in `millrace-gate`.

pub mod cli;
pub mod control;
mod daemon;
mod lists;
pub(crate) mod metrics;
mod top;
pub mod watch;
