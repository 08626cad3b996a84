//! Transport functions that are loaded into the kernel while TCP runs.
//!
//! A **graft** is an object file and a manifest. It lies in a **pool**: a directory, or what is compiled in. A
//! [`Runtime`] loads grafts, has connections use them by **rules**, swaps them under traffic, and takes them back. A
//! [`Monitor`](paths::Monitor) says what TCP has measured of the paths to its peers.
//!
//! ```no_run
//! use millrace_graft::{Runtime, Settings};
//!
//! let settings = Settings::parse(r#"
//!     [[rule]]
//!     name = "backup"
//!     side = "client"
//!     port = 873
//!     agree = false
//!     graft = "longhaul"
//! "#)?;
//! let mut runtime = Runtime::start(settings)?;
//! for line in runtime.status()?.rules {
//!     println!("{}", line.name);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! [`packet`] has functions on datagrams, as lists that are changed while they pass; [`message`] is for applications that ask for such.
//!
//! Nothing is pinned: all of it ends with the [`Runtime`], but that sockets keep the congestion control that they have
//! until they close. `docs/graft.md` has the settings, the manifest and how to write a graft; the design is in
//! `docs/design/0012-graft.md`.

pub mod agreements;
mod error;
mod flow;
pub mod identity;
mod learned;
mod left;
pub mod manifest;
pub mod message;
pub mod packet;
pub mod paths;
mod pool;
mod refusal;
mod replace;
mod runtime;
pub mod settings;
pub mod status;

pub use error::Error;
pub use flow::{Carried, Flow};
pub use identity::Identity;
pub use learned::Learned;
pub use manifest::Manifest;
pub use pool::{Graft, Pool, Source};
pub use refusal::Refusal;
pub use runtime::{Own, Runtime, Session, Swapped, check};
pub use settings::{Agree, Class, Load, Rule, Settings, Side};
