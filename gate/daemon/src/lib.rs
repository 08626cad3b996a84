//! The gate as it is run: a daemon that guards QUIC servers of this machine. What it decides by is in `millrace-gate`.

pub(crate) mod control;
pub(crate) mod daemon;
mod lists;
pub(crate) mod serve;
pub(crate) mod text;
pub(crate) mod trace;
