//! TCP connections as streams of a carrier, in both directions, and how they outlive the carrier that they were on.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`frame`] | what stands on a stream |
//! | [`ledger`] | what each end has sent, and what of it is confirmed; what it has got, and delivered |
//!
//! A byte is **confirmed** when the other broker's kernel has taken it for the application there; until then its sender
//! keeps it. When a carrier is gone, each end says on another how far it has come, and the other goes on from there.
//! The exchange is in `docs/design/0018-carried.md`.

pub mod frame;
pub mod ledger;

/// What a sender may have unconfirmed at most, of one connection; what is more is no connection any more.
pub const WINDOW_MAX: u64 = 16 << 20;

/// Bytes of no connection, on a stream that begins with them, that the other end takes: they open the path's window.
pub const WARM_MAX: u64 = 1 << 20;
