//! By which arm a connection is best sent: learned from measured transfers, readable, and corrected by what comes of it.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`features`] | what is known of a connection before it begins |
//! | [`profile`] | what applications want, as a cost of the times at which bytes came |
//! | [`runs`] | measured transfers, as lines of a file |
//! | [`cases`] | questions with their right answers, made of these |
//! | [`tree`] | a decision tree: how it is walked, and in words |
//! | [`grow`] | how it is grown and pruned (gain ratio, C4.5) |
//! | [`judge`] | how good decisions are, on networks that the training has not seen |
//! | [`model`] | a tree as a file |
//! | [`kind`] | what a connection is for, by earlier ones of its kind |
//! | [`online`] | what is done where it turns out to be wrong |
//!
//! Why it is so: `docs/design/0023-selection.md`.

pub mod cases;
pub mod features;
pub mod grow;
pub mod judge;
pub mod kind;
pub mod model;
pub mod online;
pub mod profile;
pub mod runs;
pub mod tree;
