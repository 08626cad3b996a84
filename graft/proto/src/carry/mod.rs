//! TCP connections as streams of a carrier between two brokers, and how they outlive the carrier.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`frame`] | encodes and decodes the frames of a stream |
//! | [`ledger`] | counts bytes in both directions: sent and confirmed, received and delivered |
//!
//! A byte is **confirmed** when the other broker's kernel has accepted it for the application there. The sender keeps
//! bytes until they are confirmed. If a carrier ends, each end reports on another carrier how many bytes it has
//! received, and the other end continues from there. The exchange is described in
//! `docs/notes/design/0018-carried.md`.

pub mod frame;
pub mod ledger;

/// Most unconfirmed bytes of a connection. An end that receives more breaks the connection.
pub const WINDOW_MAX: u64 = 16 << 20;

/// Most bytes of padding at the beginning of a stream, which belong to no connection. The receiver discards them;
/// they open the congestion window of the path.
pub const WARM_MAX: u64 = 1 << 20;
