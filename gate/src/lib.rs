//! Admission of QUIC packets at XDP, told by the server: for applications.
//!
//! ```no_run
//! use millrace_gate::{Gate, Mode, Policy};
//!
//! let policy = Policy::parse(r#"
//!     [[scope]]
//!     name = "web"
//!     port = 443
//!     count = "application"
//!     rules.quota = { connections = 20 }
//! "#)?;
//! let gate = Gate::new(&policy)?;
//! gate.attach("eth0", Mode::Auto)?;
//! let scope = gate.scope("web")?;
//! // For each connection whose handshake is complete:
//! let connection = scope.connection("192.0.2.7".parse()?)?;
//! // It counts until it is dropped.
//! # drop(connection);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Nothing is pinned and no signal is caught: the gate is off the interface when [`Gate`] is dropped, and when the
//! process ends, however it does; also if a child that it forked lives on, in which the gate is of no use. All methods
//! may be called from many threads at once.
//!
//! `include/millrace_gate.h` is the same for C. What rules there are and how a policy is written is in
//! `docs/gate.md`; how packets are judged in `docs/design/0004-gate.md`.

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
    Client, Config, Counter, Entry, Event, Kind, Listing, Pass, Reason, Rule, Sample, ScopeStatistics,
    Statistics, Table, Trace, Traced, Tracer, rules, token,
};
pub use error::Error;
pub use gate::Gate;
pub use interfaces::Interface;
pub use millrace_kernel::{
    prefix::{ParseError, Prefix},
    xdp::Mode,
};
pub use policy::Policy;
pub use scope::{Connection, Scope};
