//! A hostile client for operators to try on their own relay: `millrace-lab lab hostile`.
//!
//! [`peer::HostilePeer`] is a QUIC client of our own that controls every frame, acknowledgement and credit. It uses the
//! packets, keys and parsers of `millrace-quic`, and rustls for the handshake. A [`scenario::HostileScenario`] is an
//! attack with this client, in rounds. [`watch`] reads from the relay's `/status` what it still holds afterwards, as
//! [`watch::LeftObjects`].

pub mod cli;
pub mod packet;
pub mod params;
pub mod peer;
pub mod scenario;
pub mod watch;
