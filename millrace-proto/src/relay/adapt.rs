//! Which rendition a subscriber gets: ladders, estimates, and the groups that each rendition is good for.
//!
//! A [`Ladder`] lists renditions of the same content whose groups of the same ID cover the same time. A [`Decider`] looks at
//! what a path carries and says which rung fits; a [`Choice`] says which rendition each group is from, so that every group is
//! wholly of one. Neither keeps a clock or does anything itself.

mod choice;
mod decider;
mod ladder;

pub use choice::{Choice, Span};
pub use decider::{Decider, Sample};
pub use ladder::{Ladder, MAX_RUNGS, Rung};

#[cfg(test)]
mod tests;
