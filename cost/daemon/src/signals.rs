//! Receives SIGINT, SIGTERM and SIGHUP through a descriptor, so that the program can finish its outputs.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

/// The descriptor of the signals that end the program (`signalfd(2)`).
pub struct CostSignals(SignalFd);

impl CostSignals {
    /// Blocks the signals in this thread and in threads that it starts later, and opens the descriptor.
    pub fn block() -> io::Result<Self> {
        let set = set();
        set.thread_block()?;
        Ok(Self(SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?))
    }

    /// Unblocks the signals, so that they end the process again.
    pub fn unblock() -> io::Result<()> {
        Ok(set().thread_unblock()?)
    }

    /// Waits for at most `time`, and reports whether a signal arrived.
    pub fn wait(&self, time: Duration) -> io::Result<bool> {
        let mut ready = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ready, PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX)) {
            // Another signal has interrupted the wait, so no signal that ends the program has arrived yet.
            Err(nix::errno::Errno::EINTR) => return Ok(false),
            polled => polled?,
        };
        Ok(self.0.read_signal()?.is_some())
    }
}

impl AsFd for CostSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn set() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect()
}
