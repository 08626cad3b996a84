//! Reasons why a stream of a carrier has ended.

use millrace_graft_proto::carry::frame::MalformedFrame;

/// The reason why a stream of a carrier has ended.
#[derive(Debug, thiserror::Error)]
pub enum CarrierError {
    #[error("the carrier is gone")]
    Lost,
    #[error("the other end has reset the stream")]
    Reset,
    #[error("the other end has closed the stream")]
    Closed,
    #[error("no answer came in time")]
    TimedOut,
    #[error("{0}")]
    Malformed(#[from] MalformedFrame),
}
