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
//! | `pem` | certificates and private keys from files, and what is wrong with them |
//! | `http`, `openmetrics`, `log`, `render`, `socket` | HTTP servers, metrics, logging, tables and units, control sockets, each for all of them |
//! | `columns`, `duration`, `address`, `file` | columns of text; times, addresses and files as users write them |
//! | `program` | what a program does around its commands |
//!
//! Arrows point down this list: commands use everything, and `relay`, `gate`, `graft`, `fanout` and `cost` do not know each other.

pub mod address;
mod cgroup;
mod closer;
pub mod columns;
pub mod commands;
pub mod cost;
mod daemon;
#[cfg(test)]
mod documented;
pub mod duration;
mod fanout;
pub mod file;
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
pub mod program;
pub mod relay;
pub mod render;
mod socket;
