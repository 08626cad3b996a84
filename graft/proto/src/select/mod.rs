//! Chooses the candidate that suits a connection best: a congestion control, or a carrier that tunnels the connection
//! (such as a QUIC connection between two proxies). The model is learned from measured transfers, people can read it,
//! and outcomes of connections correct it.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`features`] | features of a connection that are known before it begins |
//! | [`profile`] | needs of applications, as a cost of the arrival times of bytes |
//! | [`candidates`] | names of the candidates |
//! | [`tree`] | a decision tree, and the walk through it in words |
//! | [`model`] | the file of a tree |
//! | [`kind`] | predicts profile and size of a connection from earlier ones of its kind |
//! | [`online`] | corrects the model where its outcomes are bad |
//!
//! Models are trained in the laboratory (`millrace-lab train`). The reasons for this design are in
//! `docs/notes/design/0023-selection.md`.

pub mod candidates;
pub mod features;
pub mod kind;
pub mod model;
pub mod online;
pub mod profile;
pub mod tree;
