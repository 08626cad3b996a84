//! The binary `millrace` as a library, so that tests can start its parts: commands, settings, HTTP, metrics, logs and
//! text around the crates that do the work.
//!
//! | module | what |
//! | --- | --- |
//! | `commands` | one file a command: its flags, and what they become |
//! | `relay` | settings, engine, gate and identity around `millrace-relay`; its status, metrics, text |
//! | `gate` | the gate's daemon and control socket around `millrace-gate`; its text |
//! | `graft` | the daemon of grafts and its control socket around `millrace-graft`; its metrics and text |
//! | `fanout` | the fan-out of RTP: its daemon, control socket, metrics and text, and the client that asks for streams |
//! | `cost` | live view, files and dashboard of what `millrace-cost` reports |
//! | `gate_metrics`, `gate_watch` | a gate's metrics and log lines: of its daemon, and of the relay's gate |
//! | `confine` | child processes of this binary for hostile bytes: no file, no network, no right |
//! | `pem` | certificates and private keys from files, and what is wrong with them |
//! | `http`, `openmetrics`, `log`, `render`, `socket` | HTTP servers, metrics, logging, tables and units, control sockets, each for all of them |
//!
//! Arrows point down this list: commands use everything, and `relay`, `gate`, `graft`, `fanout` and `cost` do not know each other.

mod cgroup;
mod closer;
pub mod commands;
pub mod confine;
mod cost;
mod daemon;
#[cfg(test)]
mod documented;
mod fanout;
mod gate;
mod gate_metrics;
mod gate_watch;
#[cfg(test)]
mod golden;
mod graft;
mod http;
pub mod log;
mod memory;
mod openmetrics;
mod pem;
pub mod relay;
mod render;
mod socket;
