//! The Millrace relay and its tools as a library; the binary is a thin shell around it.

pub mod cost;
pub mod gate;
mod openmetrics;
pub mod relay;
pub mod status;
pub mod trace;
