//! One WebTransport session (draft-ietf-webtrans-http3) on a [quinn] connection, or the bare connection, as the same streams.
//!
//! A server [`accept`]s the session of a client's CONNECT request, a client [`connect`]s. Both get a [`Tunnel`], which lives as
//! long as the session, and the session's [`Binding`]. [`SessionStreams`] opens and takes streams of a binding: behind their preambles,
//! with the application's own error codes. With [`Binding::Bare`] it does so on a connection without HTTP/3, so that an
//! application is written once for both.
//!
//! HTTP/3's header compression and its messages are those of the crate `web-transport-proto`; no dynamic table is used, and
//! nothing else of HTTP/3 is served. A connection carries one session.
//!
//! Whatever the peer sends is bounded: its request by 64 KiB and ten seconds, what is held of its capsules by the longest that
//! means something (1 KiB), and what else it tries of HTTP/3 by [`Foreign::MOST`]. The streams of HTTP/3 itself are read and
//! forgotten.
#![deny(missing_docs)]

mod foreign;
pub mod request;
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
