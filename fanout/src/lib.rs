//! RTP from one sender to many receivers: what receivers ask for, what they and the sender report, and when a receiver is cut off.
//!
//! A relay fans out what it takes for a sender's RTP ([`rtp`]) to whoever has a lease ([`receivers`]), asked for by
//! [`message`], given to addresses that were proved by a [`token`]. It judges what receivers report ([`rtcp`]) as a circuit breaker
//! does ([`breaker`], RFC 8083). [`reception`] is the other side: what a receiver that is no RTP endpoint itself reports.

pub mod breaker;
pub mod kernel;
pub mod message;
pub mod receivers;
pub mod reception;
pub mod rtcp;
pub mod rtp;
pub mod token;
