//! RTP from one sender to many receivers: requests and reports of receivers, reports of the sender, and rules for
//! cutting a receiver off.
//!
//! A relay fans out a sender's RTP ([`rtp`]) to receivers that have a lease ([`receivers`]), asked for by
//! [`message`], given to addresses that were proved by a [`token`]. It judges what receivers report ([`rtcp`]) as a circuit breaker
//! does ([`breaker`], RFC 8083). [`reception`] is the other side: what a receiver that is no RTP endpoint itself reports.
#![deny(missing_docs)]

pub mod breaker;
pub mod kernel;
pub mod message;
pub mod receivers;
pub mod reception;
pub mod rtcp;
pub mod rtp;
pub mod token;
