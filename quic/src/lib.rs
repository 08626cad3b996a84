//! QUIC version 1 on the wire (RFC 9000, RFC 9001, RFC 9221), for several senders on one connection.
//!
//! One of them is the QUIC stack, for example quinn. It numbers its packets and counts its credit as if it were alone:
//! [`ack`] translates acknowledgements for it, and [`credit`] gives it a part of the credit. All senders draw their
//! packet numbers from one [`number::PacketNumbers`]. Several readers parse received packets independently:
//! [`received`] ensures that they read the same bytes. [`silence`] decides when to probe a peer that has stopped
//! sending.
//!
//! [`plane`] is the data plane: the send side of one connection, with recovery and congestion control. [`ranges`] are
//! sets of byte offsets.
//!
//! Nothing here does I/O, reads a clock, spawns a task or needs `unsafe`. Time is an argument, and bytes go in and
//! out of slices, so that every rule can be tested, fuzzed and replayed. The crate knows nothing of MoQ: it serves
//! any QUIC program that wants a second sender on its connections. A [`plane::downstream::Downstream`] sends
//! [sources](plane::source::Source), and repairs what the network loses.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod ack;
pub mod capsule;
pub mod credit;
pub mod cursor;
pub mod frame;
pub mod keys;
pub mod keystream;
pub mod number;
pub mod packet;
pub mod params;
pub mod plane;
pub mod ranges;
pub mod received;
pub mod silence;
pub mod varint;
pub mod webtransport;
