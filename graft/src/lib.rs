//! Transport functions that are loaded into the kernel while TCP runs.
//!
//! A **graft** is an object file and a manifest. It is part of a **pool**: a directory, or the grafts that are
//! compiled in. A [`GraftRuntime`] loads grafts, makes connections use them by **rules**, swaps them under traffic, and
//! removes them. A [`Monitor`](paths::Monitor) reports TCP's measurements of the paths to its peers.
//!
//! ```no_run
//! use millrace_graft::{GraftRuntime, Settings};
//!
//! let settings = Settings::parse(r#"
//!     [[rule]]
//!     name = "backup"
//!     side = "client"
//!     port = 873
//!     agree = false
//!     graft = "longhaul"
//! "#)?;
//! let mut runtime = GraftRuntime::start(settings)?;
//! for line in runtime.status()?.rules {
//!     println!("{}", line.name);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`packet`] has functions on datagrams, as lists that can change while datagrams pass. Applications request them
//! with `millrace-messages`.
//!
//! Nothing is pinned: everything ends with the [`GraftRuntime`], except that sockets keep their congestion control
//! until they close. `docs/guide/graft.md` has the settings, the manifest and how to write a graft; the design is in
//! `docs/notes/design/0012-graft.md`.
#![deny(missing_docs)]

pub mod agreements;
mod error;
mod fetch;
mod flow;
pub mod identity;
mod learned;
mod left;
pub mod manifest;
pub mod packet;
pub mod paths;
mod pool;
mod refusal;
mod replace;
mod runtime;
pub mod settings;
pub mod status;

pub use error::Error;
pub use flow::{CarriedFlow, CarriedStart, SelectedFlow};
pub use identity::ObjectIdentity;
pub use learned::Learned;
pub use manifest::GraftManifest;
pub use pool::{GraftPool, PoolGraft, PoolSource};
pub use refusal::LoadRefusal;
pub use runtime::{AgreementSession, ComparedStatements, GraftRuntime, NegotiationEnds, SwapResult, check};
pub use settings::{Agree, LoadSetting, PathClass, RuleSetting, Settings, SideSetting};
