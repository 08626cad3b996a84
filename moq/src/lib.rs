//! Encodes and decodes MoQ Transport, drafts 18 to 22: control messages, stream headers, objects, datagrams.
//!
//! Decoders never panic on a peer's input. They report that more bytes are needed, or fail with the error code
//! ([`code::Session`]) with which to close the session.
//!
//! The module [`tracks`] has the state that relays and clients keep. Nothing here does I/O, reads a clock, spawns a
//! task or needs `unsafe`.
//!
//! To understand how a relay forwards an object, read about these types. [`tracks::subgroup::SubgroupStream`] keeps the
//! bytes of a publisher's stream as they arrived. [`tracks::view::SubgroupView`] is the same subgroup as it is sent to
//! one subscriber. It implements [`Source`](millrace_quic::plane::source::Source). The data plane sends sources, and
//! retransmits what the network loses.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

pub mod code;
pub mod data;
mod draft;
mod error;
mod filter;
pub mod hang;
mod hops;
pub mod incomplete;
pub mod loc;
pub mod location;
pub mod message;
pub mod msf;
pub mod name;
pub mod param;
pub mod property;
mod request_ids;
pub mod token;
pub mod tracks;
pub mod vi64;
mod wire;

pub use data::{
    FetchDecoder, FetchEncoder, FetchItem, FetchObject, ObjectDatagram, ObjectParser, ObjectStart, Position,
    Status, StreamHeader, SubgroupHeader, SubgroupId,
};
pub use draft::{Draft, UnknownDraft};
pub use error::{DecodeError, EncodeError};
pub use filter::Filter;
pub use hops::{HopError, HopId, HopPath};
pub use location::{GroupOrder, Location};
pub use message::Message;
pub use name::{Namespace, TrackName};
pub use param::Parameters;
pub use property::Properties;
pub use request_ids::RequestIds;
