//! The data plane: the send side of one QUIC connection, for unidirectional streams and datagrams.
//!
//! The data plane is one of up to three senders on the connection. The **QUIC stack** does the handshake, receives, and
//! sends its own streams. An **offload**, if there is one, sends on streams that the data plane has delegated to it.
//! All senders draw from one sequence of packet numbers and share the congestion window and the peer's credit.
//!
//! [`downstream::Downstream`] is the entry point. The other modules follow from the lowest up. Each uses only those
//! before it:
//!
//! * [`types`], [`source`]: keys and priorities, and the bytes that streams read;
//! * [`congestion`], [`ecn`], [`pacing`], [`recovery`]: RFC 9002, over the packets of all senders;
//! * [`estimate`]: the estimate of the path, and when to report it;
//! * [`policy`]: which streams to drop if the peer does not keep up;
//! * `datagrams`, `queues`, `stream`, `slots`: waiting data and its order, the state of one stream, and the storage of
//!   streams.

pub mod congestion;
mod datagrams;
pub mod downstream;
pub mod ecn;
pub mod estimate;
pub mod pacing;
pub mod policy;
mod queues;
pub mod recovery;
mod slots;
pub mod source;
mod stream;
pub mod types;
