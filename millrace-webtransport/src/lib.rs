//! One WebTransport session (draft-ietf-webtrans-http3) on a [quinn] connection, or the bare connection, as the same streams.
//!
//! A server [`accept`]s what a client asks for with its CONNECT request, a client [`connect`]s. Both get a [`Tunnel`], which lives as
//! long as the session, and the session's [`Binding`]. [`Streams`] opens and takes streams of a binding: behind their preambles,
//! with the application's own error codes. With [`Binding::Bare`] it does so on a connection without HTTP/3, so that an
//! application is written once for both.
//!
//! HTTP/3's header compression and its messages are those of the crate `web-transport-proto`; no dynamic table is used, and
//! nothing else of HTTP/3 is served. A connection carries one session.
//!
//! Whatever the peer sends is bounded: its request by 64 KiB and by the caller's patience, capsules by 128 KiB, and the streams
//! of HTTP/3 itself are read and forgotten.

mod stream;
mod streams;
mod tunnel;

pub use millrace_proto::quic::webtransport::{ALPN, Binding};
pub use stream::{NotOurs, RecvStream, SendStream};
pub use streams::Streams;
pub use tunnel::{ConnectError, Refused, Terms, Tunnel, accept, connect};
