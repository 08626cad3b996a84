//! By which arm a connection is best sent: learned from measured transfers, readable, and corrected by what comes of it.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`features`] | what is known of a connection before it begins |
//! | [`profile`] | what applications want, as a cost of the times at which bytes came |
//! | [`arms`] | names of what is chosen among |
//! | [`tree`] | a decision tree: how it is walked, and in words |
//! | [`model`] | a tree as a file |
//! | [`kind`] | what a connection is for, by earlier ones of its kind |
//! | [`online`] | what is done where it turns out to be wrong |
//!
//! A model is trained in the laboratory (`millrace-lab train`). Why it is so: `docs/design/0023-selection.md`.

pub mod arms;
pub mod features;
pub mod kind;
pub mod model;
pub mod online;
pub mod profile;
pub mod tree;
