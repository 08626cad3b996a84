//! The relay as its peers see it, each on its own stock quinn connection over loopback.

#![allow(clippy::unwrap_used)]

mod control;
mod ends;
mod fetch;
mod live;
mod peer;
mod pressure;
