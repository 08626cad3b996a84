//! Rendition switching: ladders, bandwidth estimates, and the rendition that each group is taken from.
//!
//! A [`Ladder`] lists renditions of the same content whose groups of the same ID cover the same time. A [`Decider`]
//! looks at a path's throughput and says which rung fits. A [`RenditionChoice`] says which rendition each group is taken from,
//! so that every group is wholly of one. Where subscribers name alternates themselves, [`sets`] says which of them
//! fit. None of these reads a clock or does I/O.

mod choice;
mod decider;
mod ladder;
pub mod sets;

pub use choice::{GroupSpan, NOBODY, RenditionChoice};
pub use decider::{ConnectionSample, Decider};
pub use ladder::{Ladder, MAX_RUNGS, Rung};

#[cfg(test)]
mod tests;
