//! RTP from one sender to many receivers: requests and reports of receivers, reports of the sender, and rules for
//! cutting a receiver off.
//!
//! A relay fans out a sender's RTP ([`rtp`]) to receivers that have a lease ([`receivers`]). Receivers ask for a lease
//! with a [`message`], and prove their address with a [`token`]. Their reports ([`rtcp`]) drive a circuit breaker
//! ([`breaker`], RFC 8083), which ends leases. [`reception`] makes the reports of a receiver that is no RTP endpoint
//! itself.
#![deny(missing_docs)]

pub mod breaker;
pub mod kernel;
pub mod message;
pub mod receivers;
pub mod reception;
pub mod rtcp;
pub mod rtp;
pub mod token;
