//! SIGINT, SIGTERM and SIGHUP as something to wait for, so that what is being written is ended well.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

pub struct Signals(SignalFd);

impl Signals {
    /// In this thread and those that it starts from now on.
    pub fn block() -> io::Result<Self> {
        let set = set();
        set.thread_block()?;
        Ok(Self(SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?))
    }

    /// They end the process again.
    pub fn unblock() -> io::Result<()> {
        Ok(set().thread_unblock()?)
    }

    /// Whether one came within `time`.
    pub fn wait(&self, time: Duration) -> io::Result<bool> {
        let mut ready = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        match poll(&mut ready, PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX)) {
            Err(nix::errno::Errno::EINTR) => return Ok(false),
            polled => polled?,
        };
        Ok(self.0.read_signal()?.is_some())
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn set() -> SigSet {
    [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP].into_iter().collect()
}
