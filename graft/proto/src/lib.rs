//! What two hosts say to each other about grafts, on a connection whose ends TLS has proved, and what each makes of it.
//!
//! | module | what it is |
//! | --- | --- |
//! | [`message`] | the messages, and how they are framed |
//! | [`judge`] | whether an offer is taken, and on which terms |
//! | [`evidence`] | what both ends saw in the TCP options of the same connections: downgrades |
//! | [`carry`] | TCP connections as streams of a carrier |
//! | [`probe`] | datagrams that find out what a path lets through |
//! | [`parts`] | messages of applications as datagrams, and back |
//! | [`turns`] | these messages in the order in which they were sent |
//! | [`measure`] | what packets that were sent and answered say of a path |
//! | [`select`] | by which arm a connection is best sent, as was learned |
//!
//! The exchange is in `docs/design/0017-agreement.md`.

pub mod carry;
pub mod evidence;
pub mod judge;
pub mod measure;
pub mod message;
pub mod parts;
pub mod probe;
pub mod select;
pub mod turns;
