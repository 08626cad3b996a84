//! The daemon that runs grafts, and the requests on its control socket. The crate `millrace-graft` contains grafts and
//! their runtime.
#![deny(missing_docs)]

mod agreement;
pub mod agreements;
pub mod broker;
pub mod confine;
pub mod control;
pub mod daemon;
mod link;
mod link_server;
mod metrics;
mod packet_metrics;
pub mod packets;
pub mod peers;
pub mod probe;
mod select_metrics;
mod select_text;
pub mod serve;
mod sockets;
pub mod supervisor;
pub mod text;
pub mod tunnel;
mod tunnel_link;
mod tunnel_reports;
mod tunnel_server;
pub mod usable;
mod worker;
