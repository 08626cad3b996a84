//! The relay: sessions, namespaces, tracks.

mod admission;
mod config;
mod engine;
mod hub;
mod live;
mod outbox;
mod report;
mod server;
mod session;
pub mod status;
mod subscription;
pub mod trace;
mod upstream;
mod wire;

pub use admission::{Admission, Open, Permit};
pub use config::{Config, Upstream};
pub use engine::Engine;
pub use server::{Bound, Server, outgoing_sockets};
