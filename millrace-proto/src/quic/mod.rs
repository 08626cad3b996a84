//! QUIC version 1 on the wire (RFC 9000, RFC 9001, RFC 9221): what two senders on one connection need.

pub mod ack;
pub mod credit;
mod cursor;
pub mod frame;
pub mod keys;
pub mod keystream;
pub mod number;
pub mod packet;
pub mod params;
pub mod varint;
