//! Grafts as they are run: a daemon that holds them, and what it is asked. What they are is in `millrace-graft`.

mod agreement;
pub(crate) mod broker;
mod callers;
pub(crate) mod carry;
pub(crate) mod control;
pub(crate) mod daemon;
mod metrics;
mod packet_metrics;
pub(crate) mod packets;
pub(crate) mod probe;
mod select_metrics;
mod select_text;
pub(crate) mod serve;
mod sockets;
pub(crate) mod text;
pub(crate) mod tls;
