//! The Millrace relay and its tools as a library; the binary is a thin shell around it.

pub mod bench;
pub mod client;
pub mod cost;
mod duration;
pub mod engine;
pub mod gate;
mod interfaces;
pub mod lab;
mod openmetrics;
pub mod quic;
pub mod relay;
pub mod status;
pub mod trace;
