//! The relay, without I/O: tracks and their cache, what each subscriber is owed, repair, loss, congestion.

pub mod cache;
pub mod congestion;
pub mod downstream;
pub mod fetch;
pub mod filter;
mod lanes;
pub mod pacing;
pub mod ranges;
pub mod recovery;
mod slots;
pub mod source;
mod stream;
pub mod subgroup;
pub mod track;
pub mod view;

#[cfg(test)]
mod tests;
