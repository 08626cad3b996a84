//! QUIC connections with two senders: an unmodified QUIC stack, and next to it a data plane that sends media.
//!
//! The QUIC stack is [quinn], unmodified. It does the handshake, bidirectional streams and all receiving, and does not
//! notice the other senders on its connections. The data plane ([`Connection::downstream`]) owns the unidirectional
//! streams and the datagrams that are sent. Both draw their packet numbers from one atomic counter, seal with the same
//! keys, and stay within the same congestion window and credit. The [`offload`] may be a third sender: it forwards
//! arriving packets inside the kernel, before any process wakes.
//!
//! ```text
//!   Endpoint ── Connection                   the application's handles
//!      │            │
//!     seam ───── shared ───── driver         quinn's crypto traits; one lock per connection; timers
//!              ┌────┼──────┐
//!           stack  plane  offload::state     quinn's view; data to send; delegated streams
//!              └────┼──────┤
//!          numbers  send   offload           the packet number counter; sockets; the trait
//! ```
//!
//! In the diagram, modules call only modules below them. Frames, ACKs, keys, recovery and congestion control are in
//! `millrace-quic`, which does no I/O. The offload is a trait here; its implementation in the kernel is
//! `millrace-relay-kernel`. So this crate needs no C compiler.
//!
//! # The offload's corridor
//!
//! A call to a connection's offload passes two types. [`Connection::offload`] gives access to
//! [`offload::LockedOffload`] while the connection's lock is held. `LockedOffload` records delegations, and calls the
//! [`offload::Offload`] of the engine. Both types have the same methods: `ingress`, `openings`, `accept`, `prepare`,
//! `delegate`.
//!
//! | what | for callers | recorded as | in the engine |
//! | --- | --- | --- | --- |
//! | a stream of the peer, or a track's datagrams | [`offload::OffloadIngress`], of a [`offload::OffloadOrigin`] | | `KernelIngress` |
//! | one subscriber's copy of a stream | [`offload::StreamCopy`] | `DelegatedStream` | `KernelEgress`, an [`offload::Delegation`] |
//! | one subscriber's copy of datagrams | [`offload::DatagramCopy`] | by tag | `KernelEgress` |
//! | streams of the peer that begin | [`offload::OffloadOpenings`] | | `KernelOpenings` |
//! | one subscriber's copy of a stream that begins | [`offload::OpeningTerms`] | `OpeningBook` of `OpeningEntry` | [`offload::OpeningRequest`], `KernelEgress` |
//! | which end opens that | | | [`offload::OpeningSide`] |
//!
//! The corresponding types inside the BPF program are listed in the documentation of `millrace-relay-kernel`.
//!
//! The example `files` serves files with the second sender, without MoQ.
#![deny(missing_docs)]

mod alarm;
mod allowance;
pub mod clock;
mod config;
mod congestion;
mod connection;
mod driver;
mod dscp;
mod endpoint;
mod ids;
pub mod interfaces;
mod lasting;
mod marking;
mod numbers;
pub mod offers;
pub mod offload;
mod outbox;
mod path;
mod paths;
mod plane;
mod registry;
mod seam;
mod secrets;
pub mod send;
mod shards;
mod shared;
mod sockets;
mod stack;
mod stats;
pub mod takeover;
mod tap;
pub mod tls;
pub mod trace;
mod traps;
pub mod waiters;
mod windows;

pub use allowance::OpenStream;
pub use config::Config;
pub use connection::{Connection, Health, PeerWatch};
pub use dscp::Dscp;
pub use endpoint::{AcceptError, BindError, ConnectError, Endpoint, Incoming, bind_socket};
pub use ids::ID_LEN;
pub use lasting::LastingSecret;
pub use outbox::Outbox;
pub use paths::{PathChange, PathReports};
pub use shards::{MAX_SHARDS, ShardReport};
pub use stats::Stats;
pub use tap::{SentPiece, Tap};
pub use windows::{ReceiveWindow, WindowShare, Windows};
