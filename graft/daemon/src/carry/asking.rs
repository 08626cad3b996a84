//! What programs in the kernel ask, as a task waits for it.

use std::{io, os::fd::OwnedFd};

use millrace_graft_kernel::Events;
use tokio::io::{Interest, unix::AsyncFd};
use tracing::warn;

pub struct Asking<T> {
    asks: Events<T>,
    descriptor: AsyncFd<OwnedFd>,
}

impl<T: Send + 'static> Asking<T> {
    pub fn new(asks: Events<T>) -> io::Result<Self> {
        let descriptor = register(asks.descriptor().try_clone_to_owned()?)?;
        Ok(Self { asks, descriptor })
    }

    /// Some more, or none. `None`: nothing comes any more.
    pub async fn next(&mut self) -> Option<Vec<T>> {
        self.descriptor.readable().await.ok()?.clear_ready();
        Some(self.asks.take().unwrap_or_else(|error| {
            warn!("SYNs cannot be read: {error}");
            Vec::new()
        }))
    }
}

/// For tasks that wait until it can be read.
///
/// Deprecated in favour of an unsafe function, for types whose descriptor may change or close while they are registered: this one does not.
#[allow(deprecated)]
pub fn register(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(descriptor, Interest::READABLE)
}
