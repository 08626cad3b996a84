//! The streams of one WebTransport session (draft-ietf-webtrans-http3) on a [quinn] connection, or of a bare QUIC
//! connection, by the same interface.
//!
//! A server [`accept`]s the session of a client's CONNECT request, a client [`connect`]s. Both get a [`Tunnel`], which
//! lives as long as the session, and the session's [`Binding`]. [`SessionStreams`] opens and accepts streams of a
//! binding, writes and reads their preambles, and converts the application's error codes. With [`Binding::Bare`] it
//! works on a connection without HTTP/3, so that an application needs no separate code for connections with and without
//! HTTP/3.
//!
//! [`attempts`] tries several addresses or servers at a time. [`described_by_field_socket`] is for sockets that wrap
//! another one.
//!
//! The crate `web-transport-proto` implements HTTP/3's header compression, without dynamic tables, and its messages.
//! Other requests of HTTP/3 are refused. A connection carries one session.
//!
//! Everything that the peer sends is bounded: its request by 64 KiB and ten seconds, a buffered capsule by about 1 KiB,
//! and other streams and requests of HTTP/3 by [`Foreign::MOST`]. Bytes of HTTP/3's own streams are read and discarded.
#![deny(missing_docs)]

pub mod attempts;
mod foreign;
pub mod request;
mod socket;
mod stream;
mod streams;
mod tunnel;

pub use foreign::Foreign;
pub use millrace_quic::{
    capsule::Closed,
    webtransport::{ALPN, Binding},
};
pub use request::{SessionRefused, SessionTerms};
pub use stream::{NotOurs, RecvStream, SendStream};
pub use streams::SessionStreams;
pub use tunnel::{Tunnel, TunnelConnectError, accept, connect};
