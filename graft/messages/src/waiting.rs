//! Waits for sockets, with a time limit.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::Error;

/// Waits until the descriptor is ready, or until a time limit.
pub fn wait(descriptor: impl AsFd, what: PollFlags, until: Option<Instant>) -> Result<(), Error> {
    wait_any(&mut [PollFd::new(&descriptor, what)], until)
}

/// Waits until one of several descriptors is ready, or until a time limit.
pub fn wait_any(wanted: &mut [PollFd<'_>], until: Option<Instant>) -> Result<(), Error> {
    let left = match until.map(|until| until.saturating_duration_since(Instant::now())) {
        Some(Duration::ZERO) => return Err(Error::TimedOut),
        left => left,
    };
    let timeout = left.and_then(|left| Timespec::try_from(left).ok());
    match poll(wanted, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(Error::Socket(error.into())),
    }
}
