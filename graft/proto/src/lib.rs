//! Messages between two hosts about grafts (transport functions that are loaded into the kernel), on connections whose
//! ends TLS has authenticated, and the decisions that follow from them. The code does no I/O, and reads no clock.
//!
//! | module | what it does |
//! | --- | --- |
//! | [`message`] | the messages of agreements, and their encoding |
//! | [`judge`] | decides whether an offer is accepted, and on which terms |
//! | [`evidence`] | finds downgrades: compares the TCP options that both ends saw on the same connections |
//! | [`carry`] | TCP connections as streams of a carrier: frames, and unconfirmed bytes |
//! | [`probe`] | probe datagrams that find out which packets a path lets through |
//! | [`measure`] | computes statistics of a path from probes and their answers |
//! | [`select`] | chooses how a connection is sent best, by a learned model |
//!
//! The exchange is described in `docs/notes/design/0017-agreement.md`.
#![deny(missing_docs)]

pub mod carry;
pub mod evidence;
pub mod judge;
pub mod measure;
pub mod message;
pub mod probe;
pub mod select;
