//! Tests of the relay as its peers see it. Each peer has a connection of unmodified quinn.

#![allow(clippy::unwrap_used)]

mod adaptive;
mod cluster;
mod control;
mod credentials;
mod drafts;
mod ends;
#[path = "../../../relay/discovery/tests/support/mod.rs"]
mod etcd;
mod fetch;
mod gaps;
mod goaway;
mod groups;
mod hostile;
mod live;
mod malformed;
mod moves;
pub mod peer;
mod pressure;
mod receivers;
mod returns;
mod rivals;
#[path = "../support/site.rs"]
mod site;
mod sources;
mod switching;
