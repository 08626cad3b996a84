//! The parts that all daemons share: control socket, HTTP, signals, logging, and the output of their commands.
//!
//! | module | contents |
//! | --- | --- |
//! | [`daemon`], [`notify`] | the frame: control socket, HTTP, ticks, reload, signals; messages to the service manager |
//! | [`part`], [`rights`] | parts of a daemon: processes that one supervisor starts again when they end; their capabilities |
//! | [`http`], [`openmetrics`], [`log`], [`render`], [`socket`] | HTTP servers, metrics, logging, tables and units, control sockets |
//! | [`closer`] | closes connections that linger |
//! | [`pem`] | reads certificates and private keys, and explains faulty files |
//! | [`columns`], [`duration`], [`address`], [`file`](mod@file) | columns of text; times and addresses as users write them; files within bounds |
//! | [`words`] | settings that are single words |
//! | [`memory`], [`cgroup`] | returns free memory to the system; finds the cgroup of this process |
#![deny(missing_docs)]

pub mod address;
pub mod cgroup;
pub mod closer;
pub mod columns;
pub mod daemon;
pub mod duration;
pub mod http;
mod inherited;
pub mod log;
pub mod memory;
pub mod notify;
pub mod openmetrics;
pub mod part;
pub mod pem;
pub mod render;
pub mod rights;
pub mod socket;
pub mod words;

pub use millrace_base::file;
