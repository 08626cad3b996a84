//! TCP connections that two brokers (proxies) tunnel as streams of a carrier, such as a QUIC connection between the
//! brokers. The connections continue when the carrier ends.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`frame`] | encodes and decodes the frames of a stream |
//! | [`ledger`] | counts bytes in both directions: sent and confirmed, received and delivered |
//!
//! A byte is **confirmed** when the other broker's kernel has accepted it for the application there. The sender stores
//! bytes until they are confirmed. If a carrier ends, each broker reports on another carrier how many bytes it has
//! received, and the other broker continues from there. The exchange is described in
//! `docs/notes/design/0018-carried.md`.

pub mod frame;
pub mod ledger;

/// Most unconfirmed bytes of a connection. A tunnel broker that receives more closes the connection.
pub const WINDOW_MAX: u64 = 16 << 20;

/// Most bytes of padding at the beginning of a stream, which belong to no connection. They make the path's congestion
/// window grow, and the receiver discards them.
pub const WARM_MAX: u64 = 1 << 20;
