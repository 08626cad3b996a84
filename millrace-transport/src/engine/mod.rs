//! Engines: how sealed packets reach the network.
//!
//! Engine `user` is this: connections put sealed packets into a [`Batch`], and a [`Sender`] hands the batch
//! to the kernel with as few system calls as it can. What another engine declines takes the same way.

//!
//! Engine `kernel` is in [`kernel`].

mod batch;
pub mod kernel;
mod sender;

pub use batch::{Batch, Flow};
pub use sender::{Report, Sender};
