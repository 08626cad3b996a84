//! The data plane: the send side of one QUIC connection, for unidirectional streams and datagrams.
//!
//! It shares the connection with a QUIC stack, which does the handshake, the receiving and its own streams, and
//! perhaps with an offload that sends some of the data plane's streams itself. All of them draw packet numbers
//! from the same sequence and share congestion window and credit.
//!
//! [`downstream::Downstream`] is the whole of it. It stands on the other modules, each of which uses only those
//! above it in this list:
//!
//! * [`types`], [`source`], [`ranges`]: the names of things, what a stream reads from, sets of offsets;
//! * [`congestion`], [`pacing`], [`recovery`]: RFC 9002, over the packets of all senders;
//! * `queues`, `stream`, `slots`: what goes next, one stream's state, and where the streams are kept.

pub mod congestion;
pub mod downstream;
pub mod pacing;
mod queues;
pub mod ranges;
pub mod recovery;
mod slots;
pub mod source;
mod stream;
pub mod types;
