//! Engine `user`: how sealed packets reach the network from a process. Connections put them into a [`PacketBatch`], and a
//! [`BatchSender`] hands the batch to the kernel with as few system calls as it can.

mod batch;
mod handover;
mod packets;
mod sender;

pub use batch::PacketBatch;
pub(crate) use handover::SendHandover;
pub use packets::PacketFlow;
pub use sender::{BatchSender, SendReport};
