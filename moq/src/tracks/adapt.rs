//! Rendition switching: ladders, bandwidth estimates, and the rendition that each group is taken from.
//!
//! A [`Ladder`] lists renditions of the same content whose groups of the same ID cover the same time. A [`Decider`]
//! watches a path's throughput and selects the best rendition of a ladder for which the path has enough capacity. A
//! [`RenditionChoice`] assigns each group to one rendition, so that no group mixes two. If subscribers assign tracks to
//! switching sets themselves, [`sets`] selects a track of each set. None of these reads a clock or does I/O.

mod choice;
mod decider;
mod ladder;
pub mod sets;

pub use choice::{GroupSpan, NOBODY, RenditionChoice};
pub use decider::{ConnectionSample, Decider};
pub use ladder::{Ladder, MAX_RUNGS, Rung};

#[cfg(test)]
mod tests;
