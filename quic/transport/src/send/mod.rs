//! Sends sealed packets from userspace (engine `user` of the relay). Connections add packets to a [`PacketBatch`], and
//! a [`BatchSender`] passes the batch to the kernel with as few system calls as possible.

mod batch;
mod handover;
mod packets;
mod sender;
mod thread;

pub use batch::PacketBatch;
pub(crate) use handover::SendHandover;
pub use packets::PacketFlow;
pub use sender::{BatchSender, SendReport};
pub(crate) use thread::{SendingConnection, send_all};
