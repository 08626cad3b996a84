//! Why a stream of a carrier is over.

use millrace_graft_proto::carry::frame::Malformed;

#[derive(Debug, thiserror::Error)]
pub enum Broken {
    #[error("the carrier is gone")]
    Lost,
    #[error("the other end has reset it")]
    Reset,
    #[error("the other end has closed it")]
    Closed,
    #[error("nothing came")]
    TimedOut,
    #[error("{0}")]
    Malformed(#[from] Malformed),
}
