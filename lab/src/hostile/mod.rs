//! A client that means no good, for operators to try on their own relay: `millrace-lab lab hostile`.
//!
//! [`peer::HostilePeer`] is a QUIC client of our own with a say over every frame, acknowledgement and credit, made of
//! `millrace-quic`'s packets, keys and parsers, with rustls for the handshake. A [`scenario::HostileScenario`] is what it does
//! with that, in rounds. [`watch`] asks the relay's `/status` what is left afterwards: the bounds are those of
//! [`watch::LeftObjects`].

pub mod cli;
pub mod packet;
pub mod params;
pub mod peer;
pub mod scenario;
pub mod watch;
