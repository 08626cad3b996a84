//! The relay, without I/O: tracks and their cache, what each subscriber is owed, repair, loss, congestion.

pub mod downstream;
pub mod source;
