//! The frame of daemons, and what their commands print.
//!
//! | module | what |
//! | --- | --- |
//! | [`daemon`], [`notify`] | the frame: control socket, HTTP, ticks, reload, signals; messages to the service manager |
//! | [`http`], [`openmetrics`], [`log`], [`render`], [`socket`] | HTTP servers, metrics, logging, tables and units, control sockets |
//! | [`closer`] | connections that linger |
//! | [`pem`] | certificates and private keys from files, and what is wrong with them |
//! | [`columns`], [`duration`], [`address`], [`file`](mod@file) | columns of text; times, addresses and files as users write them |
//! | [`words`] | settings that are single words |
//! | [`memory`], [`cgroup`] | what this process takes, and which group it is in |

pub mod address;
pub mod cgroup;
pub mod closer;
pub mod columns;
pub mod daemon;
pub mod duration;
pub mod file;
pub mod http;
pub mod log;
pub mod memory;
pub mod notify;
pub mod openmetrics;
pub mod pem;
pub mod render;
pub mod socket;
pub mod words;
