//! The relay, without I/O: tracks and their cache, what each subscriber is owed, repair, loss, congestion.

pub mod congestion;
pub mod downstream;
pub mod pacing;
pub mod ranges;
pub mod recovery;
mod slots;
pub mod source;
mod stream;
