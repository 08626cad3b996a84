//! Engine `user`: how sealed packets reach the network from a process. Connections put them into a [`Batch`], and a
//! [`Sender`] hands the batch to the kernel with as few system calls as it can.

mod batch;
mod handover;
mod packets;
mod sender;

pub use batch::Batch;
pub(crate) use handover::Handover;
pub use packets::Flow;
pub use sender::{Report, Sender};
