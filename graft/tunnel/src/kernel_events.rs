//! Makes events of BPF programs available to tasks.

use std::{io, os::fd::OwnedFd};

use millrace_graft_kernel::Events;
use tokio::io::{Interest, unix::AsyncFd};
use tracing::warn;

pub struct KernelEvents<T> {
    asks: Events<T>,
    descriptor: AsyncFd<OwnedFd>,
}

impl<T: Send + 'static> KernelEvents<T> {
    pub fn new(asks: Events<T>) -> io::Result<Self> {
        let descriptor = register(asks.descriptor().try_clone_to_owned()?)?;
        Ok(Self { asks, descriptor })
    }

    /// Waits for events of the BPF programs, and returns them; the list may be empty. Returns `None` once no more
    /// events can come.
    pub async fn next(&mut self) -> Option<Vec<T>> {
        self.descriptor.readable().await.ok()?.clear_ready();
        Some(self.asks.take().unwrap_or_else(|error| {
            warn!("events of held SYNs cannot be read from the kernel: {error}");
            Vec::new()
        }))
    }
}

/// Registers a descriptor with the tokio runtime, so that tasks can wait until it is readable.
///
/// `AsyncFd::with_interest` is deprecated in favour of an unsafe function, because a descriptor may change or close
/// while it is registered. The `AsyncFd` owns this descriptor, which does neither.
#[allow(deprecated)]
pub fn register(descriptor: OwnedFd) -> io::Result<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(descriptor, Interest::READABLE)
}
