//! The rules of Millrace, a Media over QUIC relay, as plain values and functions.
//!
//! Nothing here does I/O, reads a clock, spawns a task or needs `unsafe`. Time is an argument, and bytes go in and
//! out of slices, so that every rule can be tested, fuzzed and replayed.
//!
//! | module | what it is | uses |
//! | --- | --- | --- |
//! | [`ranges`] | sets of byte offsets | |
//! | [`quic`] | QUIC version 1 on the wire: packets, frames, keys, and packet numbers that several senders share | `ranges` |
//! | [`moq`] | MoQ Transport, drafts 18 to 22, on the wire: messages, stream headers, objects, datagrams | |
//! | [`plane`] | the data plane: the send side of one QUIC connection, with recovery and congestion control | `quic`, `ranges` |
//! | [`relay`] | what a relay keeps and serves: tracks, their cache, the bytes of each stream | `moq`, `plane` |
//! | [`fanout`] | RTP from one sender to many receivers: leases, reports, when a receiver is cut off | |
//! | [`networks`] | whom an address stands for, and how many places each network gets | |
//! | [`pem`] | what is wrong with files of certificates and keys, in words | |
//! | [`graft`] | what two hosts say to each other about transport functions, and about the path between them | |
//!
//! Neither `quic` nor `plane` imports `moq`: they serve any QUIC program that wants a second sender on its connections.
//!
//! To follow an object through the crate, read three things. [`relay::subgroup::Subgroup`] keeps the bytes of a
//! publisher's stream as they arrived. [`relay::view::View`] is the same subgroup as one subscriber gets it, and a
//! [`plane::source::Source`]. [`plane::downstream::Downstream`] sends sources, and repairs what the network loses.
#![forbid(unsafe_code)]

pub mod fanout;
pub mod graft;
pub mod moq;
pub mod networks;
pub mod pem;
pub mod plane;
pub mod quic;
pub mod ranges;
pub mod relay;
