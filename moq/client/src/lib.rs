//! A publisher and a subscriber of Media over QUIC (MoQ Transport, drafts 18 to 22), as a library.
//!
//! They run on stock quinn and do not depend on the relay's kernel engine, so the peer can be any other implementation.
//! The commands `millrace publish` and `millrace subscribe` are built on them.
//!
//! Most programs need one of three functions: [`publish::publish`] sends generated objects or fragmented MP4,
//! [`subscribe::play`] writes a broadcast's media to a file or pipe, [`subscribe::measure`] counts what arrives and how
//! late. Both ends of a measurement run on one host, since latency is the difference of two readings of one clock
//! ([`payload::now`]).
//!
//! ```no_run
//! use millrace_client::session::{Remote, parse_url};
//! use millrace_client::{subscribe, tls::CertificateTrust};
//! use millrace_moq::Namespace;
//!
//! # async fn example() -> Result<(), Box<dyn std::error::Error>> {
//! let remote = Remote::new(parse_url("moqt://relay.example:4443")?, CertificateTrust::System);
//! let options = subscribe::SubscribeOptions::new(remote, Namespace::from_path("live/bbb")?);
//! // Fragmented MP4, which a player reads from standard input, until it ends or Ctrl-C is pressed.
//! let stop = async { drop(tokio::signal::ctrl_c().await) };
//! subscribe::play(&options, tokio::io::stdout(), stop).await?;
//! # Ok(())
//! # }
//! ```
//!
//! These functions are built from the following modules, for programs with objects of their own:
//!
//! | module | what |
//! | --- | --- |
//! | [`dial`] | a QUIC connection to one of a host's addresses |
//! | [`session`] | a MoQ session over a QUIC connection: requests, data streams, datagrams |
//! | [`broadcast`], [`serve`] | tracks and their recent objects, and how a publisher answers for them |
//! | [`receive`], [`object`], [`order`] | a subscriber's side: streams to objects, objects in a track's order |
//! | [`media`] | fragmented MP4 as tracks, named as moq-pub names them |
//! | [`generate`], [`payload`], [`stats`], [`owed`] | objects that can be measured, and the figures |
#![deny(missing_docs)]

mod again;
mod alternates;
pub mod broadcast;
mod catch_up;
pub mod dial;
pub mod generate;
mod keep;
pub mod media;
pub mod object;
pub mod order;
pub mod owed;
pub mod payload;
pub mod publish;
pub mod receive;
mod received;
pub mod serve;
pub mod session;
pub mod stats;
pub mod subscribe;
#[cfg(test)]
mod tests;
pub mod tls;
