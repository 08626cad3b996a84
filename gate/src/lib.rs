//! A library that drops unwanted QUIC packets at XDP, by rules and by what the server reports about its connections.
//!
//! ```no_run
//! use millrace_gate::{Gate, XdpMode, Policy};
//!
//! let policy = Policy::parse(r#"
//!     [[scope]]
//!     name = "web"
//!     port = 443
//!     count = "application"
//!     rules.quota = { connections = 20 }
//! "#)?;
//! let gate = Gate::new(&policy)?;
//! gate.attach("eth0", XdpMode::Auto)?;
//! let scope = gate.scope("web")?;
//! // For each connection whose handshake is complete:
//! let connection = scope.connection("192.0.2.7".parse()?)?;
//! // The connection counts until `connection` is dropped.
//! # drop(connection);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Nothing is pinned and no signal is caught. The gate is detached when [`Gate`] is dropped, and when the process ends
//! in whatever way, even if a child that it forked lives on. The gate does not work in such a child. All methods may be
//! called from many threads at once.
//!
//! `include/millrace_gate.h` declares the same functions for C. `docs/guide/gate.md` describes the rules and the
//! policy's format, `docs/notes/design/0004-gate.md` how packets are checked.
#![deny(missing_docs)]

mod error;
mod ffi;
mod gate;
pub mod hex;
mod inner;
mod interfaces;
pub mod kernel;
pub mod policy;
mod scope;
pub mod status;

pub use crate::kernel::{
    Config, Event, GateReason, GateTotals, GateTrace, KernelClient, Kind, ListEntry, Listing, PacketCounter,
    PacketTracer, Pass, RefusedPacket, Rule, ScopeStatistics, TableFill, Traced, rules, token,
};
pub use error::Error;
pub use gate::Gate;
pub use interfaces::Interface;
pub use millrace_kernel::{
    prefix::{ParseError, Prefix},
    xdp::XdpMode,
};
pub use policy::Policy;
pub use scope::{Connection, Scope};
