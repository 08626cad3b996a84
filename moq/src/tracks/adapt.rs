//! Which rendition a subscriber gets: ladders, estimates, and the groups that each rendition is good for.
//!
//! A [`Ladder`] lists renditions of the same content whose groups of the same ID cover the same time. A [`Decider`] looks at
//! what a path carries and says which rung fits; a [`Choice`] says which rendition each group is from, so that every group is
//! wholly of one. Where subscribers name alternates themselves, [`sets`] says which of them fit. None of these keeps a clock or does
//! anything itself.

mod choice;
mod decider;
mod ladder;
pub mod sets;

pub use choice::{Choice, NOBODY, Span};
pub use decider::{Decider, Sample};
pub use ladder::{Ladder, MAX_RUNGS, Rung};

#[cfg(test)]
mod tests;
