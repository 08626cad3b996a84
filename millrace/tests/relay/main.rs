//! The relay as its peers see it, each on its own stock quinn connection.

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
mod goaway;
mod hostile;
mod live;
mod malformed;
pub mod peer;
mod pressure;
mod receivers;
mod returns;
mod rivals;
#[path = "../support/site.rs"]
mod site;
mod sources;
mod switching;
