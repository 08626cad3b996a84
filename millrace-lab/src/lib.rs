//! Networks out of namespaces and emulated links, and measurements in them.

pub mod bench;
pub mod duration;
pub mod lab;
